"""Keys of several lengths: `seqused_k`, and caches of pages, `block_table`.

A call has q as usual, and k and v either dense, (batch, heads, seqlen, dim), or caches of pages,
(pages, page_size, heads, dim), which kernels see as (pages, heads, page_size, dim) views. Kernels
read lengths and tables on the device: the host never waits for their values, and so checks them in
Triton's interpreter alone. What lies behind a length is not read, nor are the table's entries for
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.checks import check_beside
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.shard import WHOLE
from attngen.spec import AttentionSpec
from attngen.values import shown

PAGE_UNIT = 16
"""Keys that a page has a multiple of."""


def lengths(
    seqused_k: Any, block_table: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any
) -> tuple[Tensor, ...]:
    """cu_seqlens_q of packed queries, seqused_k, and block_table if there is one, in the order of
    the op's `extra`."""
    beside = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q}
    given = [name for name, x in beside.items() if x is not None]
    packed: dict[str, Any] = {}
    if given and block_table is not None:
        if given != ["cu_seqlens_q"]:
            raise SpecError(
                f"{', '.join(given)} with block_table: queries over pages are packed by "
                "cu_seqlens_q alone, and seqused_k says how many keys each sequence has; leave the "
                "others out"
            )
        packed, given = {"cu_seqlens_q": (cu_seqlens_q, 1, "(num_seqs + 1,)")}, []
    if given:
        raise SpecError(
            f"seqused_k with {', '.join(given)}: packed sequences need both cu_seqlens_q and "
            "cu_seqlens_k; leave them out for k and v of (batch, heads, seqlen, dim)"
        )
    if seqused_k is None:
        raise SpecError(
            "block_table without seqused_k: pass the number of keys of each batch row, int32 "
            "(batch,), on q's device"
        )
    named = {"seqused_k": (seqused_k, 1, "(batch,)"), "block_table": (block_table, 2, "(batch, n)")}
    found = []
    for name, (x, dims, shape) in (packed | named).items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise SpecError(f"{name} must be an int32 tensor {shape}, got {shown(x)}")
        if x.dim() != dims:
            raise SpecError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
        found.append(x)
    return tuple(found)


def check_fields(
    spec: AttentionSpec, seqused_k: Any, block_table: Any, cu_seqlens_q: Any = None
) -> None:
    """What a call brings is what its spec has."""
    if block_table is not None and not spec.paged:
        raise SpecError(
            "block_table is given, but the spec says paged=False; compile a spec with paged=True, "
            "or leave block_table out"
        )
    if spec.paged and block_table is None:
        raise SpecError(
            "the spec says paged=True, but the call has no block_table; pass block_table=, or "
            "compile a spec without paged"
        )
    if seqused_k is not None and not spec.has_lengths:
        raise SpecError(
            f'seqused_k is given, but the spec says layout="{spec.layout}" and key_lengths=False; '
            'compile a spec with key_lengths=True, or with layout="thd" for packed sequences, or '
            "leave seqused_k out"
        )
    if spec.paged and (cu_seqlens_q is not None) != spec.packs_queries:
        has = "has no cu_seqlens_q" if spec.packs_queries else "has cu_seqlens_q"
        raise SpecError(
            f'the spec says layout="{spec.layout}" and paged=True, but the call {has}; packed '
            'queries have both layout="thd" and cu_seqlens_q'
        )
    if spec.has_lengths and seqused_k is None:
        field = "paged" if spec.paged else "key_lengths"
        raise SpecError(f"the spec says {field}=True, but the call has no seqused_k; pass it")


def refuse_beside(shard: tuple[Any, ...], block_table: Any = None, **beside: Any) -> None:
    """Refuse what keys of several lengths cannot have, of what a call brings, and of pages what has
    an entry for each key."""
    given = [name for name, x in beside.items() if x is not None]
    if block_table is not None and given:
        raise UnsupportedSpecError(
            [
                f"{name} with paged is not built yet; gather the pages into dense k and v, and "
                "leave block_table out"
                for name in given
            ]
        )
    if shard != WHOLE:
        raise UnsupportedSpecError(
            [
                "q_start, q_step, k_start, k_step and seqlen_*_total with seqused_k are not built "
                "yet: each batch row would have its own; leave them out"
            ]
        )


def heads_first(k: Any, v: Any) -> tuple[Tensor, Tensor]:
    """(pages, page_size, heads, dim) as (pages, heads, page_size, dim) views."""
    views = []
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else shown(x)
            raise SpecError(
                f"{name} must be (pages, page_size, num_heads_kv, dim) with block_table, got {got}"
            )
        views.append(x.transpose(1, 2))
    k, v = views
    return k, v


def capacity(k: Tensor, block_table: Tensor | None) -> int:
    """Keys that a batch row has room for; k has heads first."""
    return k.shape[2] if block_table is None else block_table.shape[1] * k.shape[2]


def key_capacity(spec: AttentionSpec, k: Tensor, extra: Sequence[Tensor | None]) -> int:
    """The same, of the op's `extra`."""
    return capacity(k, extra[spec.tensor_args.index("block_table")] if spec.paged else None)


def check_lengths(spec: AttentionSpec, q: Tensor, extra: Sequence[Tensor | None]) -> None:
    """Dtypes, shapes and devices of the op's seqused_k and block_table, and the size of pages."""
    named = dict(zip(spec.tensor_args, extra, strict=True))
    batch, whose = q.shape[0], "q's batch"
    if spec.packs_queries:
        batch, whose = num_seqs(spec, extra), "cu_seqlens_q"
        if q.shape[0] != 1 or batch < 0:
            raise SpecError(
                'layout="thd" takes a (1, heads, total, dim) view of q and cu_seqlens_q of '
                "num_seqs + 1 offsets; call attngen.attention"
            )
    for name in ("cu_seqlens_q", "seqused_k", "block_table"):
        if name not in named:
            continue
        x, dims = named[name], 2 if name == "block_table" else 1
        rows = batch + (name == "cu_seqlens_q")
        if x is None or x.dim() != dims or x.shape[0] != rows:
            shape = (rows, "max_pages")[:dims]
            got = None if x is None else tuple(x.shape)
            raise SpecError(
                f"{name} must have shape ({', '.join(map(str, shape))}{',' * (dims == 1)}), as "
                f"{whose} has it, got {got}"
            )
        check_beside(name, x, torch.int32, q)


def num_seqs(spec: AttentionSpec, extra: Sequence[Tensor | None]) -> int:
    """How many sequences of packed queries there are."""
    offsets = extra[spec.tensor_args.index("cu_seqlens_q")]
    return -1 if offsets is None else offsets.shape[0] - 1


def queries_first(q: Any) -> Tensor:
    """Packed queries (total, heads, dim) as a (1, heads, total, dim) view."""
    if not isinstance(q, Tensor) or q.is_nested or q.dim() != 3:
        got = tuple(q.shape) if isinstance(q, Tensor) and not q.is_nested else shown(q)
        raise SpecError(
            f"q must be (total_q, num_heads_q, dim) with cu_seqlens_q and block_table, got {got}; "
            "flatten batch and length into one"
        )
    return q.transpose(0, 1).unsqueeze(0)


def check_page_size(k: Tensor) -> None:
    """Pages have whole sixteens of keys."""
    if k.shape[2] == 0 or k.shape[2] % PAGE_UNIT:
        raise SpecError(
            f"page_size must be a multiple of {PAGE_UNIT}, got {k.shape[2]}: k is (pages, "
            "page_size, num_heads_kv, dim)"
        )


def check_values(
    spec: AttentionSpec, total_q: int, k: Tensor, extra: Sequence[Tensor | None]
) -> None:
    """Refuse lengths beyond the keys, and used entries that name no page. Waits for the values: for
    tensors on the CPU."""
    named = dict(zip(spec.tensor_args, extra, strict=True))
    used, table = named["seqused_k"], named.get("block_table")
    assert used is not None
    most = capacity(k, table)
    if spec.packs_queries:
        offsets = named["cu_seqlens_q"]
        assert offsets is not None
        at = offsets.tolist()
        if at != sorted(at) or at[0] < 0 or at[-1] > total_q:
            raise SpecError(
                f"cu_seqlens_q must not decrease and lie from 0 to {total_q}, the rows of q, got "
                f"{shown(at)}; it is torch.cumsum of the lengths, after a 0"
            )
    for row, length in enumerate(used.tolist()):
        if not 0 <= length <= most:
            raise SpecError(f"seqused_k[{row}] must be from 0 to {most}, got {length}")
        if table is None or spec.closes_left:  # pages that a window has left may be gone
            continue
        for page in table[row, : -(-length // k.shape[2])].tolist():
            if not 0 <= page < k.shape[0]:
                raise SpecError(
                    f"block_table[{row}] names page {page}, but k has {k.shape[0]} pages"
                )


def refuse_gradients(spec: AttentionSpec) -> None:
    """Keys of several lengths have no backward, nor has a quantised cache."""
    if spec.is_quantized:
        raise UnsupportedSpecError(
            [
                f"a cache of {spec.kv_dtype} (kv_dtype) has no backward; call it under "
                "torch.no_grad(), or detach q and the scales"
            ]
        )
    if spec.has_lengths:
        what = "a paged cache" if spec.paged else "keys of several lengths (seqused_k)"
        raise UnsupportedSpecError(
            [f"{what} has no backward; call it under torch.no_grad(), or detach q, k and v"]
        )
