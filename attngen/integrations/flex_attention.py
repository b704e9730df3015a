"""torch's flex_attention by attngen kernels: the same arguments, torch's BlockMask among them.

score_mod and mask_mod become text of the kernel (`attngen.score_capture`), so they are fused
without torch.compile, too. A BlockMask's blocks become a `block_map`: blocks that it leaves out are
not read, and its full blocks are not masked.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from attngen.api import attention
from attngen.block_map import BlockMap, lists_of, mask_key
from attngen.checks import check_kinds
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.score_functions import function_text
from attngen.spec import MAP_TILE
from attngen.values import flag, scale_number, shown

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch types it not
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """What `torch.nn.attention.flex_attention.flex_attention` means, by an attngen kernel.

    torch.compile breaks its graph here and runs the kernel; for one graph, compile an
    `attngen.AttentionSpec` with the functions and call that.

    Args:
        query: (batch, num_heads_q, seqlen_q, head_dim).
        key, value: (batch or 1, num_heads_kv, seqlen_k, dim).
        score_mod: score_mod(score, b, h, q_idx, kv_idx); tensors that it reads get gradients,
            unless torch's deterministic algorithms are on.
        block_mask: a BlockMask for these lengths, of any block size. It is read once: afterwards
            its blocks may change in place, its mask_mod and the tensors that this reads may not
            become others.
        scale: default 1 / sqrt(head_dim).
        enable_gqa: lets key and value have fewer heads than query.
        return_lse: also return lse, float32 (batch, num_heads_q, seqlen_q).
        kernel_options: taken for torch's sake; attngen chooses by its own records.
        return_aux: `AuxRequest(lse=True)` returns (out, AuxOutput) as torch does.

    Returns:
        out (batch, num_heads_q, seqlen_q, head_dim_v); (out, lse) or (out, aux) on request. A query
        that sees no key has out 0 and lse -inf.

    Raises:
        SpecError: an argument, shape or device is wrong; a function asks for values of tensors.
        UnsupportedSpecError: a function uses an operator that kernels do not have, or max_scores
            is asked for.
    """
    enable_gqa, return_lse = flag("enable_gqa", enable_gqa), flag("return_lse", return_lse)
    check_kinds({"query": query, "key": key, "value": value})
    wants_lse = return_lse
    if return_aux is not None:
        if return_lse:
            raise SpecError("return_lse=True and return_aux exclude each other; pass return_aux")
        if not hasattr(return_aux, "max_scores"):
            raise SpecError(
                f"return_aux must be an AuxRequest, got {shown(return_aux)}; write "
                "torch.nn.attention.flex_attention.AuxRequest(lse=True)"
            )
        if return_aux.max_scores:
            raise UnsupportedSpecError(
                [
                    "max_scores by query is not built; attngen.attention returns the largest score "
                    'of each head, return_aux=("max_logit",)'
                ]
            )
        wants_lse = return_aux.lse
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise SpecError(f"query, key and value must have 4 dims, got {shapes}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise SpecError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}; pass enable_gqa=True for "
            "grouped queries"
        )
    if key.shape[0] == 1 != query.shape[0]:
        key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    options: dict[str, Any] = {"score_mod": score_mod}
    if scale is not None:
        options["softmax_scale"] = scale_number("scale", scale)
    if block_mask is not None:
        options |= _masked(block_mask, query, key)
    found = attention(query, key, value, return_lse=wants_lse, **options)
    if return_aux is None:
        return found
    from torch.nn.attention.flex_attention import AuxOutput

    return (found[0], AuxOutput(lse=found[1])) if wants_lse else (found, AuxOutput())


class _Read(NamedTuple):
    """What was made of a BlockMask."""

    made_of: tuple[Any, ...]
    """Numbers that change when its blocks do, and its mask_mod."""
    mask_mod: Any
    """Text with tensors, or None where every key of a listed block is seen."""
    block_map: BlockMap


_READ: weakref.WeakKeyDictionary[BlockMask, _Read] = weakref.WeakKeyDictionary()


def _masked(mask: Any, q: Tensor, k: Tensor) -> dict[str, Any]:
    """The mask_mod and block_map of a BlockMask."""
    if not isinstance(mask, BlockMask):
        raise SpecError(
            f"block_mask must be a BlockMask, got {shown(mask)}; make one with "
            "torch.nn.attention.flex_attention.create_block_mask"
        )
    lengths = tuple(int(x) for x in mask.seq_lengths)
    if lengths != (q.shape[2], k.shape[2]):
        raise SpecError(
            f"block_mask is for {lengths[0]} queries and {lengths[1]} keys, got {q.shape[2]} and "
            f"{k.shape[2]}; make one for these lengths, or crop it with block_mask._adjust"
        )
    tensors = _blocks(mask)
    if tensors[0].shape[2] != -(-lengths[0] // mask.BLOCK_SIZE[0]):
        raise SpecError(
            f"block_mask has {tensors[0].shape[2]} rows of blocks for {lengths[0]} queries; set "
            "seq_lengths of a sliced one"
        )
    if tensors[0].device != q.device:
        raise SpecError(
            f"block_mask is on {tensors[0].device} but query is on {q.device}; move it with "
            ".to(query.device)"
        )
    sizes = tuple(q.shape[:2])
    for n, (name, size) in enumerate((("batch", sizes[0]), ("num_heads_q", sizes[1]))):
        if tensors[0].shape[n] not in (1, size):
            raise SpecError(
                f"block_mask has {tensors[0].shape[n]} for {name}, got {size}; make it with 1 "
                "(None) or as many"
            )
    made_of = (*sizes, mask.mask_mod, *((x.data_ptr(), x._version) for x in tensors))
    held = _READ.get(mask)
    if held is None or held.made_of != made_of:
        held = _READ[mask] = _read(mask, tensors, q, k, made_of)
    return {"mask_mod": held.mask_mod, "block_map": held.block_map}


def _blocks(mask: BlockMask) -> list[Tensor]:
    """Counts and columns of its partial blocks, then of its full ones if it tells these apart."""
    given = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    return [x for x in given if x is not None]


def _read(
    mask: BlockMask, tensors: list[Tensor], q: Tensor, k: Tensor, made_of: tuple[Any, ...]
) -> _Read:
    rows, keys = q.shape[2], k.shape[2]
    of_q, of_k = mask.BLOCK_SIZE
    count = -(-keys // of_k)
    kinds = _marked(tensors[0], tensors[1], count)
    if len(tensors) > 2:
        kinds = kinds + 2 * _marked(tensors[2], tensors[3], count)
    mask_mod: Any = _every_key if mask.mask_mod is noop_mask else mask.mask_mod
    if of_q % MAP_TILE or of_k % MAP_TILE:  # tiles hold parts of blocks: ask for the block, too
        mask_mod = _in_blocks(mask_mod, kinds, of_q, of_k)
    text = function_text("mask_mod", mask_mod)
    lists = lists_of(_tile_kinds(kinds, rows, keys, of_q, of_k))
    key = mask_key(False, None, None, str(text))
    return _Read(made_of, text, BlockMap(lists, q.shape[0], q.shape[1], rows, keys, key))


def _every_key(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return kv_idx >= 0


def _marked(counts: Tensor, columns: Tensor, count: int) -> Tensor:
    """int8 (batch, heads, rows, columns) of blocks: 1 where listed."""
    listed = torch.arange(columns.shape[3], device=columns.device) < counts[..., None]
    at = columns.long().masked_fill(~listed, count)
    marks = columns.new_zeros((*columns.shape[:3], count + 1), dtype=torch.int8)
    marks.scatter_(3, at, 1)
    return marks[..., :count]


def _in_blocks(mask_mod: Any, kinds: Tensor, of_q: int, of_k: int) -> Any:
    """mask_mod in partial blocks, all keys in full ones, and none elsewhere."""
    batch, heads = kinds.shape[:2]
    table = kinds.clamp(max=2).int()

    def in_blocks(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        kind = table[b if batch > 1 else 0, h if heads > 1 else 0, q_idx // of_q, kv_idx // of_k]
        seen: Tensor = (kind == 2) | ((kind == 1) & mask_mod(b, h, q_idx, kv_idx))
        return seen

    return in_blocks


def _tile_kinds(kinds: Tensor, rows: int, keys: int, of_q: int, of_k: int) -> Tensor:
    """The kinds of the map's tiles: 0 for empty ones, 1 for partial and 2 for full ones."""
    for dim, length, block in ((2, rows, of_q), (3, keys, of_k)):
        tiles = torch.arange(-(-length // MAP_TILE), device=kinds.device) * MAP_TILE
        ends = (tiles + MAP_TILE).clamp(max=length) - 1
        found, lowest = None, None
        steps = -(-MAP_TILE // block) + (MAP_TILE % block > 0)
        for step in range(max(steps, 1)):  # the blocks that a tile reaches into
            at = ((tiles // block) + step).minimum(ends // block)
            part = kinds.index_select(dim, at).clamp(max=2)
            found = part if found is None else torch.maximum(found, part)
            lowest = part if lowest is None else torch.minimum(lowest, part)
        assert found is not None and lowest is not None
        kinds = found.clamp(max=1) + (lowest == 2)
        if length % MAP_TILE:  # kernels look at the end of a sequence in partial tiles alone
            kinds.select(dim, -1).clamp_(max=1)
    return kinds


class _CallableModule(ModuleType):
    """`attngen.integrations.flex_attention` is the function, whoever imported the module first."""

    __call__ = staticmethod(flex_attention)


sys.modules[__name__].__class__ = _CallableModule
