"""attngen as an attention backend of diffusers: `model.set_attention_backend(register())`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.api import attention
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.torch_sdpa import check_mask_dtype

NAME = "attngen"


def register() -> str:
    """Add the backend "attngen" to diffusers, and return its name.

    Names of backends are an enum that diffusers closes: the member is added to it at run time. The
    backend runs without context parallelism, which diffusers refuses by name.
    """
    try:
        from diffusers.models import attention_dispatch as host
    except ImportError as error:
        raise ImportError(
            f"attngen.integrations.diffusers needs diffusers ({error}); install it with "
            "pip install 'attngen[integrations]'"
        ) from error
    names, registry = host.AttentionBackendName, host._AttentionBackendRegistry
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        type.__setattr__(names, member._name_, member)
        names._member_map_[member._name_] = member
        names._value2member_map_[NAME] = member
        names._member_names_.append(member._name_)
    checks = [host._check_device, host._check_shape]
    registry.register(names(NAME), constraints=checks)(attend)
    return NAME


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Any:
    """Attention of query (batch, seqlen_q, num_heads_q, head_dim), key and value (batch, seqlen_k,
    num_heads_kv, head_dim).

    Args:
        attn_mask: bool (True is a key that may be seen) or float (added to the scores), of (batch,
            seqlen_k), or broadcastable to (batch, num_heads_q, seqlen_q, seqlen_k).
        is_causal: top-left aligned, as SDPA has it.

    Returns:
        out (batch, seqlen_q, num_heads_q, head_dim), or (out, lse (batch, num_heads_q, seqlen_q)).
    """
    if _parallel_config is not None:
        raise UnsupportedSpecError(
            [
                'context parallelism with the backend "attngen" is not built yet; use another '
                "backend, or attention of whole sequences"
            ]
        )
    if query.shape[2] != key.shape[2] and not enable_gqa:
        raise SpecError(
            f"query has {query.shape[2]} heads and key {key.shape[2]}; pass enable_gqa=True for "
            "grouped queries"
        )
    named: dict[str, Any] = {}
    if attn_mask is not None:
        check_mask_dtype(attn_mask)
        if attn_mask.dim() == 2 and attn_mask.shape == (key.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None, :]
        named["attn_mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    return attention(
        query,
        key,
        value,
        causal="top_left" if is_causal else False,
        softmax_scale=scale,
        dropout_p=dropout_p,
        layout="bshd",
        return_lse=return_lse,
        **named,
    )
