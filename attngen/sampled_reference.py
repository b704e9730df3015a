"""The oracle of sampled query rows and keys, for shapes whose score matrix would not fit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attngen.dropout_reference import philox_keep
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
    scale_of,
    softmax,
    structure_of,
    visible,
)
from attngen.spec import AttentionSpec


class Rows(NamedTuple):
    """Sampled query rows: out and dq (n, dim), lse (n,)."""

    out: Tensor
    lse: Tensor
    dq: Tensor | None


def sampled_rows(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    at: Tensor,
    *,
    do: Tensor | None = None,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: int | Tensor = 0,
    math_dtype: torch.dtype = torch.float64,
    round_to: torch.dtype | None = None,
    **more: Tensor | None,
) -> Rows:
    """The query rows `at` (n, 3: batch, head, row) alone, and their dq if `do` is given."""
    group, seqlen_q, seqlen_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    keys = torch.arange(seqlen_k, device=q.device)
    shift = alignment(spec, seqlen_q, seqlen_k)
    beside = beside_of(spec, attn_mask, bias, alibi_slopes, sinks).expand(*q.shape[:3], seqlen_k)
    rules = Structure.of(spec, seqlen_k, structure_of(more))
    functions = Functions(spec, aux_of(more))
    outs, lses, dqs = [], [], []
    for b, h, i in at.tolist():
        row = q[b, h, i].detach().to(math_dtype).requires_grad_(do is not None)
        s = k[b, h // group].to(math_dtype) @ row
        if round_to is not None:
            s = rounded(s, None, round_to)
        ahead, here = keys - i - shift, beside[b, h, i]
        s = here.added_to(capped(spec, s * scale_of(spec)), ahead)
        place = (*at.new_tensor([b, h, i]).unbind(), keys)
        s = functions.applied(s, *place)
        at_i = keys.new_tensor(i)
        seen = here.seen(visible(spec, at_i + shift, keys, rules, (b, at_i, keys)))
        seen = functions.seen(seen, *place) & (s != NEG_INF)
        p, lse = softmax(s, seen, here.sinks)
        keep = None
        if spec.has_dropout:
            batch, head, at_row = at.new_tensor([b, h, i]).unbind()
            keep = philox_keep(seed, batch, head, at_row, keys, spec.dropout_p)
        p = dropped(spec, p, keep)
        if round_to is not None:
            p = rounded_weights(spec, p, round_to)
        out = rounded(p @ v[b, h // group].to(math_dtype), round_to, round_to)
        if do is not None:
            dqs.append(torch.autograd.grad((out * do[b, h, i].to(math_dtype)).sum(), row)[0])
        outs.append(out.detach())
        lses.append(lse.detach())
    return Rows(torch.stack(outs), torch.stack(lses), torch.stack(dqs) if dqs else None)


class Keys(NamedTuple):
    """Gradients of sampled keys: dk (n, head_dim) and dv (n, head_dim_v)."""

    dk: Tensor
    dv: Tensor


def sampled_keys(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    at: Tensor,
    *,
    attn_mask: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: int | Tensor = 0,
    math_dtype: torch.dtype = torch.float64,
    round_to: torch.dtype | None = None,
    **more: Tensor | None,
) -> Keys:
    """dk and dv of the keys `at` (n, 3: batch, kv head, key), from the forward's out and lse."""
    group, seqlen_q, seqlen_k = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    rows = torch.arange(seqlen_q, device=q.device)
    shift = alignment(spec, seqlen_q, seqlen_k)
    beside = beside_of(spec, attn_mask, bias, alibi_slopes, sinks).expand(*q.shape[:3], seqlen_k)
    rules = Structure.of(spec, seqlen_k, structure_of(more))
    functions = Functions(spec, aux_of(more))
    dks, dvs = [], []
    for b, h_kv, j in at.tolist():
        heads = torch.arange(h_kv * group, (h_kv + 1) * group, device=q.device)
        q_all, o_all, do_all = (x[b, heads].to(math_dtype) for x in (q, out, do))
        key, value = k[b, h_kv, j].to(math_dtype), v[b, h_kv, j].to(math_dtype)
        ahead, here = j - rows - shift, beside[b, heads, :, j]
        column = torch.full_like(rows, j)
        seen = here.seen(visible(spec, rows + shift, column, rules, (b, rows, column)))
        seen = seen & (lse[b, heads] != NEG_INF)
        s = capped(spec, q_all @ key * scale_of(spec))
        raw = here.added_to(s, ahead).detach().requires_grad_()
        place = (at.new_tensor(b), heads[:, None], rows, at.new_tensor(j))
        t = functions.applied(raw, *place)
        seen = functions.seen(seen, *place) & (t != NEG_INF)
        total = lse[b, heads].to(math_dtype)
        if here.sinks is not None:
            total = torch.logaddexp(total, here.sinks.to(math_dtype))
        p = torch.exp(torch.where(seen, t.detach() - total, NEG_INF))
        weight = torch.ones_like(p)
        if spec.has_dropout:
            batch, column = at.new_tensor([b, j]).unbind()
            keep = philox_keep(seed, batch, heads[:, None], rows, column, spec.dropout_p)
            weight = dropped(spec, weight, keep)
        ds = p * (weight * (do_all @ value) - (o_all * do_all).sum(-1))
        if spec.score_mod is not None and t.requires_grad:
            ds = torch.where(seen, torch.autograd.grad(t, raw, torch.where(seen, ds, 0.0))[0], 0.0)
        elif spec.score_mod is not None:
            ds = torch.zeros_like(ds)  # of a score_mod that forgets the score
        if spec.softcap is not None:
            ds = ds * (1 - (s / spec.softcap) ** 2)
        dvs.append(rounded(p * weight, round_to, None).flatten() @ do_all.flatten(0, 1))
        dks.append(rounded(ds, round_to, None).flatten() @ q_all.flatten(0, 1) * scale_of(spec))
    return Keys(torch.stack(dks), torch.stack(dvs))
