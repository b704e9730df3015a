"""Exact attention in plain PyTorch: the oracle that emitted kernels are judged by.

Nothing here is fast. Shapes are (batch, heads, seqlen, dim). Everything is made of ordinary torch
operations in float64 (or float32), forward and gradients. For shapes whose score matrix would not
fit, `sampled_reference` computes sampled query rows and sampled keys only; `verdict` judges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.dropout_reference import dropout_keep
from attngen.dropout_reference import philox_keep as philox_keep
from attngen.mask_rules import Structure
from attngen.rounding import rounded, rounded_weights
from attngen.score_reference import Functions
from attngen.softmax_reference import (
    NEG_INF,
    alignment,
    aux_of,
    beside_of,
    capped,
    dropped,
    places,
    scale_of,
    softmax,
    structure_of,
    visible,
)
from attngen.spec import AttentionSpec
from attngen.verdict import FP8_LSE_EPSILON as FP8_LSE_EPSILON
from attngen.verdict import Verdict as Verdict
from attngen.verdict import judge as judge
from attngen.verdict import slopes_slack as slopes_slack


def attention(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: int | Tensor = 0,
    batch_start: int = 0,
    math_dtype: torch.dtype = torch.float64,
    round_to: torch.dtype | None = None,
    **more: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of (batch, heads, seqlen, dim) inputs, differentiable in all that is no mask.

    Args:
        attn_mask: bool, broadcastable to (batch, heads, seqlen_q, seqlen_k); False hides a key.
        bias: of such a shape, added to capped scores; -inf hides a key.
        alibi_slopes: (heads,) or (batch, heads); a score loses slope * |distance|.
        sinks: (heads,) or (batch, heads); exp(sink) joins the denominator, but not lse.
        more: prefix_lens, doc_ids_q, doc_ids_k, tree_mask, aux0 and so on: those of the spec.
        seed: of dropout.
        batch_start: number of the first batch row, for dropout and functions.
        math_dtype: in which everything is computed.
        round_to: round P and dS to this dtype where a good kernel must; for `yardstick`.
        aux: aux0, aux1, ..., the tensors of score_mod and mask_mod.
    """
    batch, heads, seqlen_q, _ = q.shape
    group, seqlen_k = heads // k.shape[1], k.shape[2]
    beside = beside_of(spec, attn_mask, bias, alibi_slopes, sinks)
    rules = Structure.of(spec, seqlen_k, structure_of(more))
    q, k, v = (x.to(math_dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    rows, keys = (torch.arange(n, device=q.device) for n in (seqlen_q, seqlen_k))
    functions = Functions(spec, aux_of(more))
    place = places(batch, heads, rows, keys, batch_start)
    at = (torch.arange(batch, device=q.device)[:, None, None, None], rows[:, None], keys)
    rows = (rows + alignment(spec, seqlen_q, seqlen_k))[:, None]
    ahead, seen = keys - rows, beside.seen(visible(spec, rows, keys, rules, at))
    seen = functions.seen(seen, *place)
    dirty = not bool(torch.isfinite(k).all() and torch.isfinite(v).all())
    if dirty:  # what stands in a key that a row does not see must not reach the row
        s = (q[:, :, :, None] * torch.where(seen[..., None], k[:, :, None], 0.0)).sum(-1)
    else:
        s = q @ k.transpose(2, 3)
    if round_to is not None:
        s = rounded(s, None, round_to)
    s = beside.added_to(capped(spec, s * scale_of(spec)), ahead)
    s = functions.applied(s, *place)
    seen = seen & (s != NEG_INF)
    p, lse = softmax(s, seen, beside.sinks)
    keep = None
    if spec.has_dropout:
        sizes = (batch, heads, seqlen_q, seqlen_k)
        drop_p = spec.dropout_p
        keep = dropout_keep(seed, *sizes, drop_p, device=q.device, batch_start=batch_start)
    p = dropped(spec, p, keep)
    if round_to is not None:
        p = rounded_weights(spec, p, round_to)
    if dirty:
        return (p[..., None] * torch.where(seen[..., None], v[:, :, None], 0.0)).sum(3), lse
    return p @ v, lse


def side_outputs(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    *,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    batch_start: int = 0,
    math_dtype: torch.dtype = torch.float64,
    **more: Tensor | None,
) -> dict[str, Tensor]:
    """What the spec's aux names: the largest score of each head, the column sums of P before
    dropout, and the entropy of its rows."""
    if not spec.aux:
        return {}
    batch, heads, seqlen_q, _ = q.shape
    seqlen_k = k.shape[2]
    beside = beside_of(spec, attn_mask, bias, alibi_slopes, sinks)
    rules = Structure.of(spec, seqlen_k, structure_of(more))
    q, k = (x.detach().to(math_dtype) for x in (q, k))
    rows, keys = (torch.arange(n, device=q.device) for n in (seqlen_q, seqlen_k))
    functions = Functions(spec, aux_of(more))
    place = places(batch, heads, rows, keys, batch_start)
    at = (torch.arange(batch, device=q.device)[:, None, None, None], rows[:, None], keys)
    rows = (rows + alignment(spec, seqlen_q, seqlen_k))[:, None]
    s = q @ k.repeat_interleave(heads // k.shape[1], 1).mT * scale_of(spec)
    s = functions.applied(beside.added_to(capped(spec, s), keys - rows), *place)
    seen = functions.seen(beside.seen(visible(spec, rows, keys, rules, at)), *place)
    seen = seen & (s != NEG_INF)
    p, _ = softmax(s, seen, beside.sinks)
    found = {
        "max_logit": s.masked_fill(~seen, NEG_INF).amax((2, 3)),
        "col_sum": p.sum(2),
        "entropy": torch.special.entr(p).sum(3),
    }
    return {name: found[name] for name in spec.aux}


def yardstick(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    narrow: torch.dtype | None,
    *,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: int | Tensor = 0,
    batch_start: int = 0,
    **more: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The measure of a fair error: float32, rounded to `narrow` only where a good kernel must.

    That is P before P @ v, dS before dS @ k, and the results; None rounds nothing.
    """
    out, lse = attention(
        spec,
        q,
        k,
        v,
        attn_mask=attn_mask,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        seed=seed,
        batch_start=batch_start,
        math_dtype=torch.float32,
        round_to=narrow,
        **more,
    )
    return rounded(out, narrow, narrow), lse


def gradients(
    out: Tensor, lse: Tensor, leaves: tuple[Tensor, ...], do: Tensor, dlse: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Gradients of <out, do> + <lse, dlse> with respect to the leaves; a lse of -inf has none."""
    loss = (out * do.to(out.dtype)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == NEG_INF, 0.0) * dlse.to(lse.dtype)).sum()
    return torch.autograd.grad(loss, leaves)
