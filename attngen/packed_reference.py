"""The oracle of packed sequences: `attngen.reference`, one sequence after another.

Tensors are (1, heads, total, dim) views, as kernels see them. Offsets are read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attngen import reference
from attngen.softmax_reference import NEG_INF
from attngen.spec import AttentionSpec

OF_SEQUENCES = ("alibi_slopes", "sinks")
"""Tensors beside q, k and v: (heads,) or (num_seqs, heads)."""


@dataclass(frozen=True)
class Sequences:
    """Where the used rows of packed sequences lie."""

    rows: list[slice]
    keys: list[slice]

    @classmethod
    def of(
        cls,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
    ) -> Sequences:
        return cls(_used(cu_seqlens_q, seqused_q), _used(cu_seqlens_k, seqused_k))


def _used(cu_seqlens: Tensor, used: Tensor | None) -> list[slice]:
    at = cu_seqlens.tolist()
    ends = at[1:] if used is None else map(sum, zip(at[:-1], used.tolist(), strict=True))
    return [slice(*each) for each in zip(at[:-1], ends, strict=True)]


def attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) as `reference.attention` gives them, 0 and -inf in rows of no sequence."""
    return _each(reference.attention, spec, q, k, v, (), sequences, **how)


def yardstick(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    narrow: torch.dtype | None,
    sequences: Sequences,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    """The same as `reference.yardstick` gives them."""
    return _each(reference.yardstick, spec, q, k, v, (narrow,), sequences, **how)


def side_outputs(
    spec: AttentionSpec, q: Tensor, k: Tensor, sequences: Sequences, **how: Any
) -> dict[str, Tensor]:
    """Those of `reference.side_outputs`: max_logit (num_seqs, heads), entropy (1, heads, total)."""
    wide, heads = how.get("math_dtype", torch.float64), q.shape[1]
    largest = q.new_full((len(sequences.rows), heads), NEG_INF, dtype=wide)
    entropy = q.new_zeros(q.shape[:3], dtype=wide)
    for n, (rows, keys) in enumerate(zip(sequences.rows, sequences.keys, strict=True)):
        if rows.stop > rows.start and keys.stop > keys.start and spec.aux:
            given = {name: _of_one(name, x, n) for name, x in how.items()}
            tensors = (q[:, :, rows], k[:, :, keys])
            found = reference.side_outputs(spec.of_sequence, *tensors, **given, batch_start=n)
            largest[n] = found.get("max_logit", largest[n])
            entropy[:, :, rows] = found.get("entropy", entropy[:, :, rows])
    return {n: x for n, x in (("max_logit", largest), ("entropy", entropy)) if n in spec.aux}


def _each(
    attend: Callable[..., tuple[Tensor, Tensor]],
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    more: tuple[Any, ...],
    sequences: Sequences,
    **how: Any,
) -> tuple[Tensor, Tensor]:
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    wide = how.get("math_dtype", torch.float32 if more else torch.float64)

    def leave_out(begin: int, end: int) -> None:
        if end > begin:
            outs.append(q.new_zeros((1, q.shape[1], end - begin, v.shape[3]), dtype=wide))
            lses.append(q.new_full((1, q.shape[1], end - begin), NEG_INF, dtype=wide))

    end = 0
    for n, (rows, keys) in enumerate(zip(sequences.rows, sequences.keys, strict=True)):
        leave_out(end, rows.start)
        end = rows.stop
        if rows.stop == rows.start:
            continue
        if keys.stop == keys.start:
            leave_out(rows.start, rows.stop)
            continue
        given = {name: _of_one(name, x, n) for name, x in how.items()}
        tensors = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        out, lse = attend(spec.of_sequence, *tensors, *more, **given, batch_start=n)
        outs.append(out)
        lses.append(lse)
    leave_out(end, q.shape[2])
    # zero times q, so that there are gradients where no query sees a key
    nothing = (q[:, :, :0].sum() + k[:, :, :0].sum() + v[:, :, :0].sum()).to(wide)
    return torch.cat(outs, 2) + nothing, torch.cat(lses, 2) + nothing


def _of_one(name: str, x: Any, n: int) -> Any:
    if name == "prefix_lens":
        return x[n : n + 1]
    return x[n] if name in OF_SEQUENCES and x.dim() == 2 and x.shape[0] != 1 else x


def samples(at: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Sampled (sequence, head, row) of `at`, which is in order, sequence by sequence."""
    for n in at[:, 0].unique().tolist():
        yield n, at[at[:, 0] == n]


def rows_at(begins: list[slice], at: Tensor) -> Tensor:
    """Sampled (sequence, head, row) as (0, head, packed row)."""
    first = at.new_tensor([each.start for each in begins])[at[:, 0]]
    return torch.stack([torch.zeros_like(first), at[:, 1], at[:, 2] + first], 1)


def of_sequence(x: Tensor, rows: slice, count: int) -> Tensor:
    """A sequence's rows of x as a batch of `count`, each the same, so that its number is right."""
    return x[:, :, rows].expand(count, *x.shape[1:2], -1, *x.shape[3:])
