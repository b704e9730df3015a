"""attngen as an attention of transformers: `attn_implementation=register()`.

Two functions are registered under one name. The mask function sees which keys a model's queries
may see before any layer runs, and hands on a `StructuredMask` wherever causal order, a window,
chunks, padding or packed documents say it; only what has no such form (image blocks, a user's own
mask function) becomes a tensor of (batch, 1, q_length, kv_length). The attention function turns
either into one call of `attngen.attention`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from attngen.api import attention
from attngen.errors import SpecError
from attngen.integrations.transformers_masks import StructuredMask, load, structured_mask
from attngen.torch_sdpa import check_mask_dtype


def register(name: str = "attngen", *, packed: bool = True) -> str:
    """Make attngen an attention implementation of transformers 5.

    Args:
        name: what `attn_implementation=` and `set_attn_implementation()` will take.
        packed: position_ids that restart separate the documents of a row, as transformers has it.
            A compiled model without a cache cannot look at them, and so computes document masks
            in any case; False leaves them out there, for rows that hold one document each.

    Returns:
        The name.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface

        load()
    except ImportError as error:
        raise ImportError(
            f"attngen.integrations.transformers needs transformers 5 ({error}); install it with "
            "pip install 'attngen[integrations]'"
        ) from error
    if not isinstance(name, str) or any(part in name for part in ("flash", "/", "|")):
        raise SpecError(
            f"name must be a str without 'flash', '/' and '|', got {name!r}: transformers takes "
            'those for packages and kernels of its own; use "attngen"'
        )
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, functools.partial(structured_mask, packed=packed))
    return name


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: Any = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers; unknown options are not looked at.

    Args:
        query: (batch, num_heads_q, q_length, head_dim).
        key, value: (batch, num_heads_kv, kv_length, head_dim or head_dim_v), not repeated.
        attention_mask: what `structured_mask` made, a tensor (bool, or float to be added), or None:
            causal where the module is, and rows and keys begin at one place.
        s_aux: sinks, (num_heads_q,).
        position_bias: added to the scores, broadcastable; differentiable.
        options: cu_seq_lens_q and cu_seq_lens_k, int32 (num_seqs + 1), make rows of all of the
            batch packed sequences, whatever attention_mask says.

    Returns:
        out (batch, q_length, num_heads_q, head_dim_v), contiguous, and no weights. Queries that are
        padding have 0 under causal order where each row's padding lies at its ends, as flash-attn
        has it.
    """
    if isinstance(scaling, Tensor):
        query, scaling = query * scaling, 1.0
    named: dict[str, Any] = {
        "softmax_scale": scaling,
        "softcap": softcap or None,
        "sinks": s_aux,
        "dropout_p": dropout,
    }
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    begins_q, begins_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if begins_q is not None and begins_k is not None and position_bias is None:
        named["cu_seqlens_q"], named["cu_seqlens_k"] = begins_q.int(), begins_k.int()
        if sliding_window is not None:
            named["window"] = (sliding_window - 1, None if causal else sliding_window - 1)
        return _packed(query, key, value, causal=bool(causal), **named), None
    if isinstance(attention_mask, StructuredMask):
        mask = attention_mask
        if query.shape[2] != mask.sizes[2] or key.shape[2] != mask.sizes[3]:
            raise SpecError(
                f"the mask was made for {mask.sizes[2]} queries and {mask.sizes[3]} keys, but this "
                f"layer has {query.shape[2]} and {key.shape[2]}; hand the model a mask of 4 dims"
            )
        is_batch = query.shape[0] == mask.sizes[0]
        if mask.packing is not None and position_bias is None and is_batch:
            named.update(mask.packing)
            named["causal"], named["window"] = mask.causal, mask.window
            key, value = key[:, :, : mask.keys], value[:, :, : mask.keys]
            return _packed(query, key, value, **named), None
        if mask.used is None or not (dropout or _needs_gradient(query, key, value)):
            named.update(_structure(mask))
            keys = mask.keys
        else:  # keys of several lengths have no backward
            named["attn_mask"], keys = mask.dense(), None
    elif isinstance(attention_mask, Tensor):
        tile = attention_mask
        if tile.dim() == 2:
            tile = (
                tile[:, None, None, :] if tile.dtype == torch.bool else tile.bool()[:, None, None]
            )
        check_mask_dtype(tile)
        tile, keys = tile[..., : key.shape[2]], None
        if tile.dtype == torch.bool:
            named["attn_mask"] = tile
        else:
            position_bias = tile if position_bias is None else position_bias + tile
    else:
        rows, keys = query.shape[2], None
        if causal and rows > 1:
            named["causal"] = "top_left"
            if sliding_window is not None and sliding_window < key.shape[2]:
                named["window"] = (sliding_window - 1, None)
            if key.shape[2] > rows:  # an empty cache of static length
                keys = rows
            if key.shape[2] >= rows:
                named["causal"] = True
    if keys is not None:
        key, value = key[:, :, :keys], value[:, :, :keys]
    if position_bias is not None:
        named["bias"] = position_bias[..., : key.shape[2]]
    for name in ("attn_mask", "doc_ids_k"):
        if keys is not None and named.get(name) is not None:
            named[name] = named[name][..., :keys]
    out = attention(query, key, value, **named)
    return out.transpose(1, 2), None


def _structure(mask: StructuredMask) -> dict[str, Any]:
    """A mask as arguments of `attngen.attention`."""
    named: dict[str, Any] = {"causal": mask.causal}
    if mask.window != (None, None):
        named["window"] = mask.window
    if mask.chunk is not None:
        named["chunk"] = mask.chunk
    if not mask.is_aligned:
        named["causal"] = "top_left"
        named["q_start"], named["k_start"] = mask.start, mask.key_start
    if mask.used is not None:
        named["seqused_k"] = mask.used
    if mask.pad is not None:
        named["attn_mask"] = mask.pad[:, None, None, :]
    if mask.documents is not None:
        named["doc_ids_q"], named["doc_ids_k"] = mask.documents
    return named


def _needs_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _packed(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
    """Attention within sequences whose rows follow each other in (batch, q_length)."""
    batch, _, rows, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out: Tensor = attention(q, k, v, layout="thd", **named)
    return out.unflatten(0, (batch, rows))  # type: ignore[no-any-return]  # a Tensor
