"""Block maps: which tiles of scores a mask leaves empty, partial or full, found once by a kernel.

A map has tiles of MAP_TILE queries and keys, and memory for each of these. Kernels, whose own tiles
divide them, walk its lists: those of a row in the forward and for dq, those of a column for dk and
dv.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from attngen import interpreter
from attngen.config import FwdConfig
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.kernel import kernel
from attngen.resolve import device_index_of
from attngen.score_aux import check_aux, functions_of_texts
from attngen.shard import WHOLE, Shard
from attngen.softmax_reference import alignment
from attngen.spec import MAP_TILE, AttentionSpec
from attngen.values import shown, whole
from attngen.workload import Direction


@dataclass(frozen=True, kw_only=True)
class MapConfig(FwdConfig):
    """One program looks at a tile of the map, `block_m` rows at a time."""

    direction: ClassVar[Direction] = "map"


CONFIG = MapConfig(block_m=32, block_n=MAP_TILE, num_warps=4, num_stages=1)


class BlockMap(NamedTuple):
    """What `make_block_map` gives: for calls of these sizes, under this mask."""

    lists: Tensor
    """int32 (1 or batch, 1 or heads, entries), as kernels take it."""
    batch: int
    num_heads_q: int
    seqlen_q: int
    seqlen_k: int
    mask: str
    """mask_mod, causal, window and chunk."""


def make_block_map(
    spec: AttentionSpec,
    batch: int,
    num_heads_q: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    device: torch.device | str | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
) -> BlockMap:
    """Find which tiles of 128 queries and 128 keys a spec's masks leave empty, and which whole.

    Args:
        spec: has mask_mod; its causal, window and chunk count, too.
        batch, num_heads_q: of the calls; the map has one entry for all where mask_mod does not
            read b or h.
        seqlen_q, seqlen_k: of the calls.
        device: of the calls; default: that of the tensors mask_mod reads, else the current GPU, or
            the CPU where there is none.
        aux_tensors: what functions read, as in a call. The map holds while these do not change.

    Returns:
        What calls take as block_map=, any number of times.

    Raises:
        SpecError: the spec has no mask_mod, or a size is no whole number.
        UnsupportedSpecError: the spec has masks that a map does not know.
    """
    if not isinstance(spec, AttentionSpec) or spec.mask_mod is None:
        raise SpecError(
            f"make_block_map takes an AttentionSpec with mask_mod, got {shown(spec)}; causal, "
            "window and chunk skip tiles without a map"
        )
    of_masks = mask_spec(spec)
    names = ("batch", "num_heads_q", "seqlen_q", "seqlen_k")
    sizes = (batch, num_heads_q, seqlen_q, seqlen_k)
    batch, heads, rows, keys = (whole(n, x, 0, None) for n, x in zip(names, sizes, strict=True))
    function = spec.mask_function
    assert function is not None
    functions = functions_of_texts(spec.score_mod, spec.mask_mod)
    assert functions is not None
    given = functions.captured if aux_tensors is None else aux_tensors
    if device is None:
        tensors = [x for x in given or () if isinstance(x, Tensor)]
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = tensors[-1].device if tensors else torch.device(default)
    like = torch.empty(0, device=device)
    aux = check_aux(functions, aux_tensors, like, None)[-len(function.aux) or len(functions.aux) :]
    if like.is_cpu and not interpreter.enabled():
        raise SpecError(
            "device is the CPU but this machine has a GPU; name a GPU, or set ATTNGEN_INTERPRET=1 "
            "to run Triton's interpreter"
        )
    own = (batch if "b" in function.inputs else 1, heads if "h" in function.inputs else 1)
    kinds = torch.empty((*own, *_tiles(rows, keys)), dtype=torch.int8, device=like.device)
    if kinds.numel():
        numbers: dict[str, Any] = {"seqlen_q": rows, "seqlen_k": keys}
        left, right = spec.window or (None, None)
        if of_masks.has_window_left:
            numbers["window_left"] = left
        if of_masks.has_window_right:
            numbers["window_right"] = right
        if of_masks.has_chunk:
            numbers["chunk"] = spec.chunk
        if of_masks.aligns_rows:
            numbers["align"] = alignment(spec, rows, keys)
        numbers |= zip(of_masks.aux_args, (x.detach() for x in aux), strict=True)
        index = device_index_of(like)
        run = kernel(of_masks, CONFIG, index is None)
        if index is None or index == torch.cuda.current_device():
            run(kinds, **numbers)
        else:
            with torch.cuda.device(index):
                run(kinds, **numbers)
    return BlockMap(lists_of(kinds), batch, heads, rows, keys, of_masks.key)


def _tiles(rows: int, keys: int) -> tuple[int, int]:
    return -(-rows // MAP_TILE), -(-keys // MAP_TILE)


def num_entries(rows: int, keys: int) -> int:
    """Numbers of a map for one head."""
    tiles_q, tiles_k = _tiles(rows, keys)
    return tiles_q * (tiles_k + 2) + tiles_k * (tiles_q + 2)


def map_of(spec: AttentionSpec, q: Tensor, k: Tensor, aux: Sequence[Tensor]) -> BlockMap:
    """The map of a call of (batch, heads, seqlen, dim) tensors."""
    sizes = (*q.shape[:3], k.shape[2])
    return make_block_map(spec, *sizes, device=q.device, aux_tensors=aux)


def lists_of(kinds: Tensor) -> Tensor:
    """Tiles by row, then by column: for each the numbers of partial and of all entries, then the
    partial ones, the full ones and, never read, the rest."""
    found = []
    for each in (kinds, kinds.mT):
        counts = torch.stack([(each == 1).sum(3), (each > 0).sum(3)], 3)
        order = torch.argsort((each + 2) % 3, dim=3, stable=True)
        found.append(torch.cat([counts, order], 3).flatten(2))
    return torch.cat(found, 2).int()


def mask_spec(spec: AttentionSpec) -> AttentionSpec:
    """The spec of the masks alone, the same for all specs that share a map."""
    masks = [name for name in ("prefix_lm", "documents", "tree_mask") if getattr(spec, name)]
    if masks or spec.is_packed:
        with_ = masks or ['layout="thd"']
        raise UnsupportedSpecError(
            [f"block_map with {name} is not built yet; say it by mask_mod" for name in with_]
        )
    return _mask_spec(
        spec.causal if spec.causal == "top_left" else spec.is_causal,
        spec.window,
        spec.chunk,
        str(spec.mask_mod),
    )


@functools.lru_cache(maxsize=256)
def _mask_spec(
    causal: bool | str,
    window: tuple[int | None, int | None] | None,
    chunk: int | None,
    mask_mod: str,
) -> AttentionSpec:
    return AttentionSpec(
        head_dim=1, causal=causal, window=window, chunk=chunk, mask_mod=mask_mod, block_map=True
    )


def mask_key(
    causal: bool | str,
    window: tuple[int | None, int | None] | None,
    chunk: int | None,
    mask_mod: str,
) -> str:
    """What a map must have been made for."""
    causal = causal if causal == "top_left" else causal is not False
    return _mask_spec(causal, None if window == (None, None) else window, chunk, mask_mod).key


torch.compiler.assume_constant_result(mask_key)


def check_block_map(
    given: Any, mask: str | None, q: Tensor, k: Tensor, shard: Shard, starts: tuple[int, int]
) -> Tensor:
    """The lists of a call's map.

    Args:
        mask: the call's `mask_key`, None if its spec has no block map.
        q, k: (batch, heads, seqlen, dim).
        shard, starts: the rows, and the batch row and head, that the call begins with.
    """
    if given is None:
        raise SpecError(
            "the spec says block_map=True, but the call has no block_map; pass block_map=, or "
            "compile a spec without block_map"
        )
    if mask is None:
        raise SpecError(
            "block_map is given, but the spec says block_map=False, or has no mask_mod; compile a "
            "spec with both, or leave block_map out"
        )
    if not isinstance(given, BlockMap):
        raise SpecError(
            f"block_map must be what attngen.make_block_map gives, got {shown(given)}; make it "
            "once, for these sizes and this mask_mod"
        )
    if given.mask != mask:
        raise SpecError(
            f"block_map was made for {given.mask}, but the call has {mask}; make one for the "
            "call's mask_mod, causal, window and chunk"
        )
    for name, size, made in (
        ("batch", q.shape[0], given.batch),
        ("num_heads_q", q.shape[1], given.num_heads_q),
        ("seqlen_q", q.shape[2], given.seqlen_q),
        ("seqlen_k", k.shape[2], given.seqlen_k),
    ):
        if size != made:
            raise SpecError(
                f"block_map was made for {name} {made}, but the call has {size}; make one for "
                "these sizes"
            )
    if given.lists.device != q.device:
        raise SpecError(
            f"block_map is on {given.lists.device} but q is on {q.device}; make it with "
            "device=q.device"
        )
    if shard != WHOLE or starts != (0, 0):
        raise UnsupportedSpecError(
            [
                "block_map with q_start, q_step, k_start, k_step, seqlen_*_total, batch_start or "
                "head_start is not built yet; leave it out"
            ]
        )
    return given.lists


def check_lists(lists: Tensor | None, q: Tensor, k: Tensor) -> None:
    """Refuse what a kernel would read past the end of."""
    entries = num_entries(q.shape[2], k.shape[2])
    sizes = ((1, q.shape[0]), (1, q.shape[1]), (entries,))
    is_list = lists is not None and lists.dtype == torch.int32 and lists.dim() == 3
    if (
        lists is None
        or not is_list
        or not lists.is_contiguous()
        or lists.device != q.device
        or any(size not in may for size, may in zip(lists.shape, sizes, strict=True))
    ):
        got = None if lists is None else f"{lists.dtype} of shape {tuple(lists.shape)}"
        raise SpecError(
            f"block_map must be int32 (1 or batch, 1 or num_heads_q, {entries}) on {q.device}, "
            f"got {got}; attngen.make_block_map makes it"
        )
