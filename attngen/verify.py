"""Running a spec's kernels against float64 on small and awkward shapes.

The kernel must be about as good as plain PyTorch in the same dtype (`verdict.judge`). Without a
GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from attngen import packed, packed_reference, reference
from attngen.api import compile
from attngen.block_map import map_of
from attngen.errors import UnsupportedSpecError
from attngen.fp8 import quantize, spread
from attngen.mask_rules import made
from attngen.packed_reference import Sequences
from attngen.score_reference import example_aux
from attngen.spec import DESCALES, PACKED_ARGS, AttentionSpec
from attngen.verdict import FP8_LSE_EPSILON, judge, slopes_slack
from attngen.workload import Direction, Workload

# Sizes that find mistakes, as (seqlen_q, seqlen_k): one row, no tile divides them, more queries
# than keys (rows that see nothing), more keys than queries (an offset).
AWKWARD = ((1, 1), (63, 63), (129, 64), (33, 130))
# What is compared, in the order of `results`, and the direction whose kernels made it.
RESULTS: tuple[tuple[str, Direction], ...] = (
    ("out", "fwd"),
    ("lse", "fwd"),
    ("dq", "bwd"),
    ("dk", "bwd"),
    ("dv", "bwd"),
)
GRADIENTS = {"bias": "dbias", "alibi_slopes": "dslopes", "sinks": "dsinks"}
"""What is compared after those, of a spec that asks for these tensors."""
Kind = Literal["kernel", "oracle", "yardstick"]
INTERPRETED_SCORES = 1 << 16
"""Entries of the score matrix up to which the interpreter runs a workload whole."""
COMPILED_SCORES = 1 << 25
MAX_GROUP = 16
"""Query heads for each key/value head on the awkward shapes: more only take longer."""
SEED = 20_240_229


@dataclass(frozen=True)
class Check:
    """One result of a kernel beside the oracle's."""

    workload: Workload
    direction: Direction
    result: str
    """One of `RESULTS` or `GRADIENTS`."""
    ok: bool
    error: float
    """Largest absolute error; inf if a NaN or a wrong infinity appeared."""
    detail: str

    def as_dict(self) -> dict[str, Any]:
        named = {**vars(self), "workload": str(self.workload)}
        return named | {"error": self.error if self.error < float("inf") else None}


def shapes(workload: Workload | None, device: str) -> list[Workload]:
    """Awkward lengths with the workload's group of heads, and the workload if it is small."""
    group = min(workload.group_size, MAX_GROUP) if workload else 2
    found = [Workload(1, group, 1, *lengths) for lengths in AWKWARD]
    found.append(Workload(2, 2 * group, 2, 70, 70))
    if workload is not None:
        limit = INTERPRETED_SCORES if device == "cpu" else COMPILED_SCORES
        rows = workload.batch * workload.num_heads_q * workload.seqlen_q
        if rows * workload.seqlen_k <= limit:
            found.append(workload)
    return found


def verify(
    spec: AttentionSpec, workloads: list[Workload], directions: tuple[Direction, ...], device: str
) -> Iterator[Check]:
    """Compare every result of the kernels that `attngen.compile(spec)` runs with the oracle's.

    The batch of a packed spec is sequences of uneven lengths, which a workload gives the mean of.
    """
    if spec.is_quantized:
        raise UnsupportedSpecError(
            ["verify of kv_dtype is not built yet; `attngen tune` checks each config"]
        )
    if spec.has_lengths:
        raise UnsupportedSpecError(
            ["verify of key_lengths and paged is not built yet; `attngen tune` checks each config"]
        )
    for workload in workloads:
        layout = "thd" if spec.is_packed else "bhsd"
        yield from _verify(replace(spec, layout=layout), workload, directions, device)


def _verify(
    spec: AttentionSpec, workload: Workload, directions: tuple[Direction, ...], device: str
) -> Iterator[Check]:
    given = _inputs(spec, workload, device)
    backward = "bwd" in directions
    is_deterministic = spec.deterministic or (
        spec.deterministic is None and torch.are_deterministic_algorithms_enabled()
    )
    learnt = [n for n in spec.gradient_args if not (is_deterministic and n in spec.learnt_aux)]

    def results(kind: Kind) -> list[Tensor]:
        is_exact = kind == "oracle"
        wide = torch.float64 if is_exact else given.dout.dtype
        as_given = kind == "kernel" and spec.is_fp8
        leaves = [x.clone() if as_given else x.to(wide, copy=True) for x in given[:3]]
        for leaf in leaves:
            leaf.requires_grad_(backward)
            leaf.grad_dtype = wide
        q, k, v = leaves
        beside: dict[str, Any] = dict(given.beside)
        for name in learnt:
            own = beside[name]
            leaf = own.to(torch.float64 if is_exact else own.dtype, copy=True)
            beside[name] = leaf.requires_grad_(backward)
            leaves.append(leaf)
        if given.offsets is None:
            out, lse = _attend(kind, spec, q, k, v, beside, given.descales)
        else:
            out, lse = _attend_packed(kind, spec, q, k, v, beside, given.offsets)
        found = [out, lse]
        if backward:
            found += reference.gradients(out, lse, tuple(leaves), given.dout, given.dlse)
        return found

    kinds = (results(kind) for kind in get_args(Kind))
    named: list[tuple[str, Direction]] = [*RESULTS]
    named += [(GRADIENTS.get(name, f"d{name}"), "bwd") for name in learnt]
    for (name, direction), actual, wanted, yard in zip(named, *kinds, strict=False):
        if direction in directions:
            # gradients of float32 slopes and sinks come of results in the spec's dtype
            unit = torch.finfo(actual.dtype if direction == "fwd" else given.dout.dtype).eps
            if name == "lse" and spec.is_fp8:
                unit = FP8_LSE_EPSILON
            slack = 0.0
            if name == "dslopes":
                slack = slopes_slack(workload.seqlen_q, workload.seqlen_k)
            verdict = judge(actual, wanted, yard, unit, slack)
            yield Check(workload, direction, name, *verdict)


def _attend(
    kind: Kind,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beside: dict[str, Any],
    descales: tuple[Tensor, ...],
) -> tuple[Tensor, Tensor]:
    if kind != "kernel" and descales:
        pairs = zip((q, k, v), descales, strict=True)
        q, k, v = ((x * spread(descale, x)).to(x.dtype) for x, descale in pairs)
    if kind == "oracle":
        return reference.attention(spec, q, k, v, **beside, seed=SEED)
    if kind == "yardstick":
        narrow = None if q.dtype == torch.float32 else q.dtype
        return reference.yardstick(spec, q, k, v, narrow, **beside, seed=SEED)
    tensors: dict[str, Any] = beside | dict(zip(DESCALES, descales, strict=False))
    if spec.has_functions:
        tensors["aux_tensors"] = tuple(tensors.pop(name) for name in spec.aux_args)
    if spec.block_map:
        tensors["block_map"] = map_of(spec, q, k, tensors["aux_tensors"])
    out, lse = compile(spec)(q, k, v, return_lse=True, dropout_seed=SEED, **tensors)
    return out, lse


def _attend_packed(
    kind: Kind,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beside: dict[str, Any],
    offsets: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    if kind == "oracle":
        at = Sequences.of(*offsets)
        return packed_reference.attention(spec, q, k, v, at, **beside, seed=SEED)
    if kind == "yardstick":
        narrow = None if q.dtype == torch.float32 else q.dtype
        at = Sequences.of(*offsets)
        return packed_reference.yardstick(spec, q, k, v, narrow, at, **beside, seed=SEED)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
    named: dict[str, Any] = beside | dict(zip(PACKED_ARGS, offsets, strict=False))
    if spec.has_functions:
        named["aux_tensors"] = tuple(named.pop(name) for name in spec.aux_args)
    out, lse = compile(spec)(q, k, v, return_lse=True, dropout_seed=SEED, **named)
    return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]


class _Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    beside: dict[str, Tensor]
    """attn_mask, bias, alibi_slopes and sinks: those of the spec."""
    descales: tuple[Tensor, ...] = ()
    offsets: tuple[Tensor, Tensor] | None = None
    """cu_seqlens_q and cu_seqlens_k."""


def _inputs(spec: AttentionSpec, workload: Workload, device: str) -> _Inputs:
    """The same random inputs and upstream gradients for the same sizes, on every device."""
    generator = torch.Generator().manual_seed(SEED)
    batch, heads_q, heads_kv = workload.batch, workload.num_heads_q, workload.num_heads_kv
    rows, keys = workload.seqlen_q, workload.seqlen_k
    offsets = None
    if spec.is_packed:
        lengths = (packed.spread_lengths(batch, mean) for mean in (rows, keys))
        first, second = (packed.offsets_of(each, device) for each in lengths)
        offsets = (first, second)
        batch, rows, keys = 1, batch * rows, batch * keys
    dtype = getattr(torch, spec.out_dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    q = normal(batch, heads_q, rows, spec.head_dim)
    k = normal(batch, heads_kv, keys, spec.head_dim)
    v = normal(batch, heads_kv, keys, spec.head_dim_v)
    v = k[..., : spec.head_dim_v] if spec.shared_kv else v
    dout = normal(batch, heads_q, rows, spec.head_dim_v)
    dlse = normal(batch, heads_q, rows).float()
    beside = made(spec, workload, device)
    if spec.attn_mask:
        beside["attn_mask"] = _mask(normal(batch, 1, rows, keys))
    if spec.bias:
        beside["bias"] = _some_hidden(normal(1, heads_q, rows, keys))
    if spec.alibi:
        nth = torch.arange(1.0, heads_q + 1, device=device)
        beside["alibi_slopes"] = 2 ** (-8 / heads_q * nth)
    if spec.sinks:
        beside["sinks"] = normal(heads_q).float()
    aux = example_aux(spec, workload, "cpu", generator)
    beside |= {name: x.to(device) for name, x in aux.items()}
    if spec.fp8_scale is None:
        return _Inputs(q, k, v, dout, dlse, beside, offsets=offsets)
    q, k, v, *descales = quantize(q, k, v, dtype=spec.dtype, scale=spec.fp8_scale)
    return _Inputs(q, k, v, dout, dlse, beside, tuple(descales))


def _mask(normal: Tensor) -> Tensor:
    """Keeps 84 %; every fifth row sees nothing."""
    mask = normal < 1
    mask[:, :, 4::5] = False
    return mask


def _some_hidden(bias: Tensor) -> Tensor:
    """The bias, with -inf for a sixth of its entries."""
    return bias.masked_fill(bias > 1, float("-inf"))
