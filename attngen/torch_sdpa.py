"""torch's scaled_dot_product_attention by attngen kernels: sdpa()."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant

from attngen.checks import check_kinds, check_place
from attngen.errors import DtypeError, SpecError
from attngen.functional import attention
from attngen.jagged import are_jagged
from attngen.score_terms import BIAS_DTYPES, fits
from attngen.values import flag, scale_number


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What `torch.nn.functional.scaled_dot_product_attention` means, by an attngen kernel.

    Args:
        query, key, value: (..., heads, seqlen, dim), or (seqlen, dim); leading dims are
            broadcast, and so are heads. Or all three jagged nested tensors, (batch, heads, seqlen,
            dim).
        attn_mask: broadcastable to (..., heads, seqlen_q, seqlen_k), where three dims stand for
            (..., seqlen_q, seqlen_k). Bool: True is a key that may be seen; float16, bfloat16 or
            float32: added to the scores, and differentiable. Or what
            `torch.nn.attention.bias.causal_lower_right` and `causal_upper_left` make. Not together
            with is_causal.
        dropout_p: drops whenever it is > 0, as SDPA does; pass 0.0 in evaluation.
        is_causal: top-left aligned (key j visible iff j <= i).
        scale: default 1 / sqrt(head_dim).
        enable_gqa: lets key and value have fewer heads than query.

    Returns:
        (..., heads, seqlen_q, head_dim_v). A query that sees no key gets 0.

    Raises:
        SpecError: an argument, shape, dtype or device is wrong.
    """
    is_causal, enable_gqa = flag("is_causal", is_causal), flag("enable_gqa", enable_gqa)
    if scale is not None:
        scale = scale_number("scale", scale)
    if attn_mask is not None and is_causal:
        raise SpecError(
            "attn_mask and is_causal=True exclude each other; let the mask hide what is causal, or "
            "call attngen.attention, which takes both"
        )
    causal: bool | str = "top_left" if is_causal else False
    if isinstance(attn_mask, CausalBias):
        causal, attn_mask = _alignment(attn_mask, query, key), None
    options: dict[str, Any] = {"softmax_scale": scale, "dropout_p": dropout_p}
    if are_jagged(query, key, value):
        if attn_mask is not None:
            raise SpecError(
                "attn_mask with nested tensors: packed sequences have no dense mask; leave it out, "
                "or call attngen.attention with mask_mod"
            )
        return attention(query, key, value, causal=causal, **options)  # type: ignore[no-any-return]  # a Tensor
    check_kinds({"query": query, "key": key, "value": value})
    q, k, v, lead = _four_dims(query, key, value, enable_gqa)
    rank = max(query.dim(), key.dim(), value.dim())
    mask, bias = None, None
    if attn_mask is not None:
        full = (*lead, q.shape[1], q.shape[2], k.shape[2])
        tile = _mask(attn_mask, query, full if rank > 2 else full[1:])
        mask, bias = (tile, None) if tile.dtype == torch.bool else (None, tile)
    out = attention(q, k, v, causal=causal, attn_mask=mask, bias=bias, **options)
    if rank > 4:
        out = out.unflatten(0, lead)
    while rank < out.dim():
        out = out.squeeze(0)
    return out  # type: ignore[no-any-return]  # a Tensor


def _four_dims(
    query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """q, k and v as `attention` takes them, and the leading dims of the result."""
    shapes = query.shape, key.shape, value.shape
    if query.dim() == key.dim() == value.dim() == 4 and key.shape[:2] == value.shape[:2]:
        _check_heads(query.shape[1], key.shape[1], value.shape[1], enable_gqa, shapes)
        if query.shape[0] == key.shape[0] and query.shape[1] >= key.shape[1]:
            return query, key, value, tuple(query.shape[:1])
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            raise SpecError(
                f"{name} must have at least 2 dims, got shape {tuple(x.shape)}; add them with "
                ".unsqueeze(0)"
            )
    rank = max(query.dim(), key.dim(), value.dim(), 3)
    tensors = []
    for x in (query, key, value):
        while x.dim() < rank:
            x = x.unsqueeze(0)
        tensors.append(x)
    lead = _broadcast([x.shape[:-3] for x in tensors], shapes)
    counts = [x.shape[-3] for x in tensors]
    _check_heads(counts[0], counts[1], counts[2], enable_gqa, shapes)
    heads = counts[0] if enable_gqa else max(counts)
    if any(count == 0 for count in counts):
        heads = 0
    for n, x in enumerate(tensors):
        wanted = heads
        if n > 0 and counts[1] == counts[2]:
            wanted = counts[1]  # groups of query heads, of which one group is the broadcast
        elif enable_gqa and counts[n] > 0:
            x = x.repeat_interleave(heads // counts[n], -3)
        tensors[n] = x.expand(*lead, wanted, *x.shape[-2:])
    if rank == 3:
        tensors = [x.unsqueeze(0) for x in tensors]
    elif rank > 4:
        tensors = [x.flatten(0, -4) for x in tensors]
    return tensors[0], tensors[1], tensors[2], lead


def _broadcast(leads: list[torch.Size], shapes: tuple[torch.Size, ...]) -> tuple[int, ...]:
    """The leading dims that all have, or are expanded to."""
    found = []
    for sizes in zip(*leads, strict=True):
        size = next((each for each in sizes if each != 1), 1)
        if any(each != size and each != 1 for each in sizes):
            q, k, v = (tuple(shape) for shape in shapes)
            raise SpecError(
                "query, key and value must have leading dims that are equal or 1, got shapes "
                f"{q}, {k} and {v} (..., heads, seqlen, dim); expand them"
            )
        found.append(size)
    return tuple(found)


def _check_heads(
    of_q: int, of_k: int, of_v: int, enable_gqa: bool, shapes: tuple[torch.Size, ...]
) -> None:
    if of_k == 0 or of_v == 0:
        raise SpecError(
            f"key and value must have at least one head, got {of_k} and {of_v}, with {of_q} of "
            "query; the heads are dim -3, and a call without any can be left out"
        )
    if enable_gqa:
        if of_q % of_k or of_q % of_v:
            raise SpecError(
                f"query must have a multiple of the heads of key and value, got {of_q}, {of_k} and "
                f"{of_v}; the heads are dim -3"
            )
        return
    count = next((each for each in (of_q, of_k, of_v) if each != 1), 1)
    if any(each != count and each != 1 for each in (of_q, of_k, of_v)):
        other = f"key {of_k}" if of_k != of_q else f"value {of_v}"
        raise SpecError(
            f"query has {of_q} heads and {other}; pass enable_gqa=True for grouped queries"
        )


def _alignment(bias: CausalBias, query: Tensor, key: Tensor) -> str:
    """The `causal` of a CausalBias."""
    sizes = (bias.seq_len_q, bias.seq_len_kv)
    if not query.is_nested and sizes != (query.shape[-2], key.shape[-2]):
        raise SpecError(
            f"attn_mask is a causal bias of {sizes[0]} queries and {sizes[1]} keys, got "
            f"{query.shape[-2]} and {key.shape[-2]}; make one for these lengths"
        )
    return "top_left" if bias.variant == CausalVariant.UPPER_LEFT else "bottom_right"


def check_mask_dtype(mask: Tensor) -> None:
    """A mask of bools, or floats that are added."""
    if mask.dtype != torch.bool and mask.dtype not in BIAS_DTYPES:
        step = "cast it with attn_mask.float()"
        if not mask.is_floating_point():
            step = "write attn_mask.bool(), where True is a key that may be seen"
        raise DtypeError(
            f"attn_mask must be bool, float16, bfloat16 or float32, got {mask.dtype}; {step}"
        )


def _mask(mask: Any, query: Tensor, full: tuple[int, ...]) -> Tensor:
    """SDPA's attn_mask, of four dims."""
    check_place("attn_mask", mask, query)
    check_mask_dtype(mask)
    tile: Tensor = mask
    while tile.dim() < len(full):
        tile = tile.unsqueeze(0)
    if tile.dim() > len(full) or not fits(tile.shape, full):
        raise SpecError(
            f"attn_mask must be broadcastable to (..., heads, seqlen_q, seqlen_k) {full}, got "
            f"shape {tuple(mask.shape)}; make each dim 1 or full"
        )
    while tile.dim() < 4:
        tile = tile.unsqueeze(0)
    if tile.dim() > 4:
        if any(size != 1 for size in tile.shape[:-3]):
            tile = tile.expand(*full[:-3], *tile.shape[-3:])
        tile = tile.flatten(0, -4)
    return tile
