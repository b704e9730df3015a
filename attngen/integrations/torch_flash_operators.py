"""Flash attention's own operators in torch, of (batch, seqlen, heads, dim) or (total, heads, dim)
tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from attngen import calls
from attngen.errors import UnsupportedSpecError
from attngen.integrations.torch_arguments import (
    arguments_of,
    before,
    random_state,
    refuse,
    scaled,
    seed_in,
)
from attngen.integrations.torch_sdpa_operators import dense_backward


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:
    """num_splits=1 asks for bits that do not depend on the batch; else attngen chooses it."""
    refuse(return_debug_mask=return_debug_mask, alibi_slopes=alibi_slopes)
    state, offset, seed = random_state(query, dropout_p)
    q, positive, _ = scaled(query, scale)
    how: dict[str, Any] = {
        "causal": is_causal,
        "scale": positive,
        "window": (window_size_left, window_size_right),
        "dropout_p": dropout_p,
        "dropout_seed": seed,
        "batch_invariant": num_splits == 1,
    }
    if cum_seq_q is None or cum_seq_k is None:
        k, v = key.transpose(1, 2), value.transpose(1, 2)
        lengths: dict[str, Any] = {"seqused_k": seqused_k, "block_table": block_table}
        if (
            cum_seq_q is not None
            and block_table is not None
            and not _are_equal(q, cum_seq_q, max_q)
        ):
            (q,) = _heads_first(q)
            lengths["cu_seqlens_q"] = cum_seq_q
            out, lse = calls.forward(*before([q, k, v], arguments_of(q, v, **how, **lengths)))
            out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
            return out, lse, state, offset, query.new_empty(0)
        q = q.transpose(1, 2) if cum_seq_q is None else _equal_lengths(q, cum_seq_q, max_q)
        out, lse = calls.forward(*before([q, k, v], arguments_of(q, v, **how, **lengths)))
        out = out.transpose(1, 2)
        if cum_seq_q is not None:
            out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    else:
        refuse(block_table=block_table)
        rows = _heads_first(q, key, value)
        packed: dict[str, Any] = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
        packed["seqused_k"] = seqused_k
        out, lse = calls.forward(*before(rows, arguments_of(rows[0], rows[2], **how, **packed)))
        out, lse = out.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return out, lse, state, offset, query.new_empty(0)


def _are_equal(q: Tensor, cum_seq_q: Tensor, max_q: int) -> bool:
    """Has each sequence max_q packed queries? Their sum says so."""
    return q.shape[0] == (cum_seq_q.shape[0] - 1) * max_q


def _equal_lengths(q: Tensor, cum_seq_q: Tensor, max_q: int) -> Tensor:
    """Packed queries of equal lengths as a batch."""
    count = cum_seq_q.shape[0] - 1
    if not _are_equal(q, cum_seq_q, max_q):
        raise UnsupportedSpecError(
            [
                f"a cache without cu_seq_k for sequences of unequal query lengths ({q.shape[0]} "
                f"rows in {count} sequences of at most {max_q}); pad the queries to {max_q}, or "
                "call attngen.attention"
            ]
        )
    batch: Tensor = q.unflatten(0, (count, max_q))
    return batch.transpose(1, 2)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def flash_forward_out(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any
) -> Tensor:
    made, lse, *_ = flash_forward(query, key, value, *arguments, **named)
    out.copy_(made)
    return lse  # type: ignore[no-any-return]  # a Tensor


def flash_backward(
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
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    how: dict[str, Any] = {
        "window": (window_size_left, window_size_right),
        "dropout_seed": seed_in(rng_state, dropout_p),
    }
    tensors = (grad_out, query, key, value, out)
    if cum_seq_q is None:
        dout, q, k, v, made = (x.transpose(1, 2) for x in tensors)
        dense = dense_backward(dout, q, k, v, made, logsumexp, is_causal, scale, dropout_p, **how)
        return tuple(g.transpose(1, 2) for g in dense)
    dout, q, k, v, made = _heads_first(*tensors)
    q, positive, factor = scaled(q, scale)
    how |= {"causal": is_causal, "scale": positive, "dropout_p": dropout_p}
    packed: dict[str, Any] = {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
    arguments = arguments_of(q, v, **how, **packed)
    lse = logsumexp.unsqueeze(0)
    found = calls.backward(arguments.text_key, q, k, v, made, lse, dout, None, *arguments[1:])
    dq, dk, dv = (g.squeeze(0).transpose(0, 1) for g in found)
    return dq if factor == 1.0 else dq * factor, dk, dv
