"""One rank's part of an attention: blocks of queries and keys, each by calls of a kernel, or in
plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen import calls
from attngen.distributed import plain
from attngen.distributed.blocks import Block, Kind, Rules
from attngen.distributed.heads import Run
from attngen.identity import parsed
from attngen.spec import AttentionSpec


class Keys(NamedTuple):
    """A shard of keys and values, with the documents of its rows where there are some."""

    k: Tensor
    v: Tensor
    doc_ids: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self if x is not None]

    def like(self, rows: int) -> Keys:
        """Memory for a shard of so many rows."""
        ids = self.doc_ids
        return Keys(
            self.k.new_empty((*self.k.shape[:2], rows, self.k.shape[3])),
            self.v.new_empty((*self.v.shape[:2], rows, self.v.shape[3])),
            None if ids is None else ids.new_empty((ids.shape[0], rows)),
        )

    def sums(self, rows: int, *, zero: bool = False) -> list[Tensor]:
        """Memory for the gradients of k and v, float32."""
        shapes = [(*x.shape[:2], rows, x.shape[3]) for x in (self.k, self.v)]
        make = self.k.new_zeros if zero else self.k.new_empty
        return [make(shape, dtype=torch.float32) for shape in shapes]


@dataclass
class Work:
    """What is the same for all blocks of a call."""

    key: str
    """Text key."""
    scalars: dict[str, float]
    ints: dict[str, int]
    totals: tuple[int, int]
    """Lengths of the whole sequences of q and k."""
    terms: dict[str, Tensor]
    """Tensors beside q, k and v, as the op has them; heads are those of this rank."""
    runs: tuple[Run, ...]
    head_start: int
    """Global number of this rank's first query head."""
    hop: str
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of those terms that want one, float32; added to by `backward`."""

    @functools.cached_property
    def rules(self) -> Rules:
        left, right = self.ints.get("window_left"), self.ints.get("window_right")
        spec = parsed(self.key)
        bottom_right = bool(self.ints.get("bottom_right", 1))
        return Rules.of(spec, left, right, self.ints.get("chunk"), self.totals, bottom_right)

    def forward(self, block: Block, q: Tensor, keys: Keys) -> tuple[Tensor, Tensor]:
        """out and lse of a block's rows, float32, without sinks."""
        text, spec = _variant(self.key, block.kind, True)
        ints, scalars = self._ints(spec, block, 1), self._scalars(spec)
        parts = []
        for run in self.runs:
            q_part, k_part, v_part = _of_run(block, run, q, keys)
            extra = self._extra(spec, block, run, keys)
            if "head_start" in ints:
                ints["head_start"] = self.head_start + run.q[0]
            if self.hop == "torch":
                named = dict(zip(spec.tensor_args, extra, strict=True))
                out, lse = plain.forward(spec, q_part, k_part, v_part, named, scalars, ints)
            else:
                numbers = (list(scalars.values()), list(ints.values()))
                out, lse = calls.forward(text, q_part, k_part, v_part, extra, *numbers)
            parts.append((out, lse))
        return _by_heads([part[0] for part in parts]), _by_heads([part[1] for part in parts])

    def backward(
        self,
        block: Block,
        q: Tensor,
        keys: Keys,
        out: Tensor,
        lse: Tensor,
        dout: Tensor | None,
        dlse: Tensor | None,
    ) -> list[tuple[Run, Tensor, Tensor, Tensor]]:
        """dq, dk and dv of a block, from the lse and out of all keys, of each run of heads."""
        text, spec = _variant(self.key, block.kind, False)
        ints, scalars = self._ints(spec, block, 0), self._scalars(spec)
        found = []
        for run in self.runs:
            q_part, k_part, v_part = _of_run(block, run, q, keys)
            extra = self._extra(spec, block, run, keys)
            if "head_start" in ints:
                ints["head_start"] = self.head_start + run.q[0]
            o, own_lse, do, dl = (_rows(x, run, block) for x in (out, lse, dout, dlse))
            needs = [name in self.gradients for name in spec.gradient_args]
            given = (q_part, k_part, v_part, o, own_lse, do, dl)
            if self.hop == "torch":
                named = dict(zip(spec.tensor_args, extra, strict=True))
                dq, dk, dv, *more = plain.backward(spec, *given, named, scalars, ints, needs)
            else:
                lists = (extra, list(scalars.values()), list(ints.values()))
                wanted = [need for need in [needs] if any(need)]
                dq, dk, dv, *more = calls.backward(text, *given, *lists, *wanted)
            found.append((run, dq, dk, dv))
            names = [n for n, need in zip(spec.gradient_args, needs, strict=True) if need]
            for name, grad in zip(names, more, strict=True):
                part = self._part(name, self.gradients[name], block, run)
                part.add_(grad)
        return found

    def _scalars(self, spec: AttentionSpec) -> dict[str, float]:
        return {name: self.scalars[name] for name in spec.scalar_args}

    def _ints(self, spec: AttentionSpec, block: Block, partial: int) -> dict[str, int]:
        q, k = block.q, block.k
        made = {name: self.ints.get(name, 0) for name in spec.int_args}
        made["partial"] = partial
        place = {"q_start": 0, "q_step": 1, "k_start": 0, "k_step": 1}
        place |= {"seqlen_q_total": -1, "seqlen_k_total": -1, "bottom_right": 1}
        if q is not None and k is not None:
            place = {"q_start": q.start, "q_step": q.step, "k_start": k.start, "k_step": k.step}
            place |= {"seqlen_q_total": self.totals[0], "seqlen_k_total": self.totals[1]}
            place["bottom_right"] = self.ints.get("bottom_right", 1)
        return made | {name: n for name, n in place.items() if name in made}

    def _extra(
        self, spec: AttentionSpec, block: Block, run: Run, keys: Keys
    ) -> list[Tensor | None]:
        terms = self.terms
        if keys.doc_ids is not None:
            terms = terms | {"doc_ids_k": keys.doc_ids}
        return [self._part(name, terms[name], block, run) for name in spec.tensor_args]

    def _part(self, name: str, x: Tensor, block: Block, run: Run) -> Tensor:
        """Of a term, what a block needs: a view."""
        if name in ("attn_mask", "bias"):
            if x.shape[1] > 1:
                x = x[:, run.q[0] : run.q[1]]
            if x.shape[2] > 1:
                x = x[:, :, block.rows[0] : block.rows[1]]
            if x.shape[3] > 1 and block.k is not None:
                k = block.k
                x = x[..., k.start : k.last + 1 : k.step]
        elif name in ("alibi_slopes", "sinks"):
            x = x[:, run.q[0] : run.q[1]]
        elif name == "doc_ids_q":
            x = x[:, block.rows[0] : block.rows[1]]
        elif name == "doc_ids_k":
            x = x[:, block.keys[0] : block.keys[1]]
        return x


@functools.lru_cache(maxsize=1024)
def _variant(key: str, kind: Kind, is_forward: bool) -> tuple[str, AttentionSpec]:
    """The text that serves a block. Partial results have no sinks: they count once, at the end."""
    spec = parsed(key)
    if is_forward and spec.sinks:
        spec = replace(spec, sinks=False)
    if kind != "placed":
        spec = replace(spec, causal=kind == "causal", window=None, chunk=None)
    return spec.text_key, spec


def _of_run(block: Block, run: Run, q: Tensor, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
    rows, at = slice(*block.rows), slice(*block.keys)
    heads = slice(*run.kv)
    return q[:, slice(*run.q), rows], keys.k[:, heads, at], keys.v[:, heads, at]


def _rows(x: Any, run: Run, block: Block) -> Any:
    return None if x is None else x[:, slice(*run.q), slice(*block.rows)]


def _by_heads(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
