"""The operators of scaled_dot_product_attention's flash backend, of (batch, heads, seqlen, dim).

Those of CPU tensors have masks, and causal ones from the top left.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen import calls
from attngen.integrations.torch_arguments import (
    arguments_of,
    before,
    random_state,
    refuse,
    scaled,
    seed_in,
)


def dense_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str,
    scale: float | None,
    dropout_p: float = 0.0,
    **beside: Any,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of (batch, heads, seqlen, dim) tensors."""
    q, positive, _ = scaled(q, scale)
    how: dict[str, Any] = {"causal": causal, "scale": positive, "dropout_p": dropout_p, **beside}
    if dropout_p == 0 and beside.get("bias") is None and _alone(q, k, v):
        rows = _fold(q, k, v)
        folded = calls.forward(*before(rows, arguments_of(rows[0], rows[2], **how)))
        return _unfold(q, folded[0])[0], folded[1].view(q.shape[:3])
    out, lse = calls.forward(*before([q, k, v], arguments_of(q, v, **how)))
    return _as_in(out, q), lse


def dense_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool | str,
    scale: float | None,
    dropout_p: float = 0.0,
    **beside: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of such tensors."""
    own, positive, factor = scaled(q, scale)
    how: dict[str, Any] = {"causal": causal, "scale": positive, "dropout_p": dropout_p, **beside}
    inputs = [own, k, v, out, lse, dout]
    alone = dropout_p == 0 and beside.get("bias") is None and _alone(own, k, v)
    if alone:
        *rows, lse, dout = _fold(own, k, v, out.contiguous(), lse[..., None], dout.contiguous())
        inputs = [*rows, lse.squeeze(3), dout]
    arguments = arguments_of(inputs[0], inputs[2], **how)
    grads: Any = calls.backward(arguments.text_key, *inputs, None, *arguments[1:])  # type: ignore[arg-type,call-arg]  # seven tensors
    if alone:
        grads = _unfold(q, *grads)
    dq, dk, dv = grads
    dq = dq if factor == 1.0 else dq * factor
    return dq, dk, dv


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    refuse(return_debug_mask=return_debug_mask)
    state, offset, seed = random_state(query, dropout_p)
    out, lse = dense_forward(query, key, value, is_causal, scale, dropout_p, dropout_seed=seed)
    lengths = (query.shape[2], key.shape[2])
    return out, lse, None, None, *lengths, state, offset, query.new_empty(0)


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    grads = dense_backward(
        grad_out,
        query,
        key,
        value,
        out,
        logsumexp,
        is_causal,
        scale,
        dropout_p,
        dropout_seed=seed_in(philox_seed, dropout_p),
    )
    return tuple(_as_in(g, x) for g, x in zip(grads, (query, key, value), strict=True))


def cpu_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    causal = "top_left" if is_causal else False
    bias = _four_dims(attn_mask)
    out, lse = dense_forward(query, key, value, causal, scale, bias=bias)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)


def cpu_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    causal = "top_left" if is_causal else False
    bias = _four_dims(attn_mask)
    grads = dense_backward(grad_out, query, key, value, out, logsumexp, causal, scale, bias=bias)
    return tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)


def _four_dims(mask: Tensor | None) -> Tensor | None:
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask


def _as_in(x: Tensor, like: Tensor) -> Tensor:
    """x in the memory order in which `torch.empty_like(like)` would be."""
    batch, heads, rows, columns = like.stride()
    if (batch >= rows >= heads and columns == 1) or x.shape != like.shape:
        return x  # as attngen stores results
    made = torch.empty_like(like)
    pairs = zip(x.shape, x.stride(), made.stride(), strict=True)
    return x if all(a == b for size, a, b in pairs if size != 1) else made.copy_(x)


def _alone(*tensors: Tensor) -> bool:
    """Is each head a batch row of its own in memory, for all of these? Results stored (batch,
    seqlen, heads, dim) then have torch's order without a copy."""
    heads = tensors[0].shape[1]
    return heads > 1 and all(x.shape[1] == heads and x.is_contiguous() for x in tensors)


def _fold(*tensors: Tensor) -> list[Tensor]:
    return [x.flatten(0, 1).unsqueeze(1) for x in tensors]


def _unfold(like: Tensor, *tensors: Tensor) -> list[Tensor]:
    return [x.squeeze(1).unflatten(0, like.shape[:2]) for x in tensors]
