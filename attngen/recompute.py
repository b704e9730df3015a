"""Derivatives of derivatives, in plain PyTorch: what no kernel computes.

A call of the ops as ordinary differentiable operations in float32, so that autograd and torch.func
go on from there, any number of times. Score matrices are whole: memory is O(seqlen_q * seqlen_k).
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.dropout_reference import philox_keep
from attngen.identity import parsed
from attngen.settle import numbers_of
from attngen.softmax_reference import NEG_INF, Beside, beside_of, seen_lse, visible
from attngen.spec import AttentionSpec


class _Whole(NamedTuple):
    """Everything of a call that is (batch, num_heads_q, rows, keys), and what it is made of."""

    spec: AttentionSpec
    scale: float
    beside: Beside
    q: Tensor
    k: Tensor
    v: Tensor
    ahead: Tensor
    """Key position minus query position."""
    seen: Tensor
    slope: Tensor | None
    """Derivative of the softcap."""
    soft: Tensor
    """Softmax over keys alone."""
    p: Tensor
    """The same with sinks."""
    kept: Tensor | None
    """What dropout multiplies P by."""
    lse: Tensor

    @property
    def dropped(self) -> Tensor:
        return self.p if self.kept is None else self.p * self.kept


def forward(text_key: str, q: Tensor, k: Tensor, v: Tensor, *lists: Any) -> list[Tensor]:
    """out and lse of `attngen::fwd`."""
    dtype = _out_dtype(text_key, lists)
    if q.numel() == 0 or v.numel() == 0:
        nothing = q.sum() * 0 + v.sum() * 0
        return [
            (nothing + q.new_zeros((*q.shape[:3], v.shape[3]))).to(dtype),
            nothing.float() + q.new_full(q.shape[:3], NEG_INF, dtype=torch.float32),
        ]
    whole = _whole(text_key, q, k, v, lists)
    return [(whole.dropped @ whole.v).to(dtype), whole.lse]


def tangents(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    *lists: Any,
) -> list[Tensor]:
    """out, lse and their tangents, of `attngen::jvp`."""
    out, lse = forward(text_key, q, k, v, *lists)
    if q.numel() == 0 or v.numel() == 0:
        return [out, lse, out * 0, torch.zeros_like(lse)]
    whole = _whole(text_key, q, k, v, lists)
    group = q.shape[1] // k.shape[1]
    tout = torch.zeros_like(whole.q[..., :1]) * whole.v[:, :, :1]
    tlse = torch.zeros_like(whole.lse)
    if tq is not None or tk is not None:
        ds = torch.zeros_like(whole.p)
        if tq is not None:
            ds = ds + tq.float() @ whole.k.mT
        if tk is not None:
            ds = ds + whole.q @ _shared(tk, group).mT
        ds = ds * whole.scale
        if whole.slope is not None:
            ds = ds * whole.slope
        ds = torch.where(whole.seen, ds, 0.0)
        tlse = (whole.soft * ds).sum(-1)
        mean = (whole.p * ds).sum(-1, keepdim=True)
        tout = (whole.dropped * (ds - mean)) @ whole.v
    if tv is not None:
        tout = tout + whole.dropped @ _shared(tv, group)
    return [out, lse, tout.to(out.dtype), tlse]


def gradients(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
    needs: Sequence[bool] = (),
) -> list[Tensor]:
    """What `attngen::bwd` gives."""
    spec = parsed(text_key)
    terms = dict(zip(spec.tensor_args, extra, strict=True))
    wanted = [n for n, need in zip(spec.gradient_args, needs, strict=False) if need]
    others = [x for name in wanted if (x := terms[name]) is not None]
    if q.numel() == 0 or v.numel() == 0:
        return [x * 0 for x in (q, k, v, *others)]
    whole = _whole(text_key, q, k, v, (extra, scalars, ints))
    ds = torch.zeros_like(whole.p)
    grad_v = torch.zeros_like(whole.v)
    delta = torch.zeros_like(whole.lse)
    if dout is not None:
        do = dout.float()
        grad_v = whole.dropped.mT @ do
        dp = do @ whole.v.mT
        if whole.kept is not None:
            dp = dp * whole.kept
        delta = (whole.p * dp).sum(-1)
        ds = whole.p * (dp - delta[..., None])
    if dlse is not None:
        ds = ds + whole.soft * dlse.float()[..., None]
    ds = torch.where(whole.seen, ds, 0.0)
    found = {"bias": ds, "alibi_slopes": -(ds * whole.ahead.abs()).sum((2, 3))}
    if whole.beside.sinks is not None:
        weight = torch.sigmoid(whole.beside.sinks.float()[..., 0] - seen_lse(whole.lse))
        found["sinks"] = -(weight * delta).sum(2)
    ds = ds * whole.scale if whole.slope is None else ds * whole.slope * whole.scale
    batch, heads_kv = k.shape[:2]
    grad_k, grad_v = (
        x.view(batch, heads_kv, -1, *x.shape[2:]).sum(2) for x in (ds.mT @ whole.q, grad_v)
    )
    made = [found[name].sum_to_size(x.shape) for name, x in zip(wanted, others, strict=True)]
    results = zip((ds @ whole.k, grad_k, grad_v, *made), (q, k, v, *others), strict=True)
    return [grad.to(x.dtype) for grad, x in results]


def _shared(x: Tensor, group: int) -> Tensor:
    """Keys or values as each query head has them."""
    return x.float().repeat_interleave(group, 1)


def _out_dtype(text_key: str, lists: Any) -> torch.dtype:
    return torch.float32 if lists[2][0] else getattr(torch, parsed(text_key).out_dtype)


def _whole(text_key: str, q: Tensor, k: Tensor, v: Tensor, lists: Any) -> _Whole:
    extra, scalars, ints = lists
    spec = parsed(text_key)
    if spec.has_masks or spec.has_functions or spec.is_packed:
        raise NotImplementedError(
            "attngen: second derivatives, and mixtures of both modes, are not built under "
            'prefix_lm, documents, tree_mask, score_mod, mask_mod and layout="thd"; say it by '
            "attn_mask and bias"
        )
    named = dict(zip(spec.int_args, ints, strict=True))
    scalar = dict(zip(spec.scalar_args, scalars, strict=True))
    terms: dict[str, Any] = dict(zip(spec.tensor_args, extra, strict=True))
    spec = replace(
        spec,
        window=(named.get("window_left"), named.get("window_right")),
        chunk=named.get("chunk"),
        softcap=scalar.get("softcap"),
        dropout_p=scalar.get("dropout_p", 0.0),
    )
    seed = terms.pop("dropout_seed", None)
    scores = ("attn_mask", "bias", "alibi_slopes", "sinks")
    beside = beside_of(spec, *(terms.get(name) for name in scores))
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), _shared(k, group), _shared(v, group)

    numbers = numbers_of(spec, named, q.shape[2], k.shape[2])
    rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    rows = (numbers.get("q_start", 0) + rows * numbers.get("q_step", 1))[:, None]
    keys = numbers.get("k_start", 0) + keys * numbers.get("k_step", 1)
    aligned = rows + numbers.get("align", 0)
    seen = beside.seen(visible(spec, aligned, keys)).expand(*q.shape[:3], k.shape[2])
    ahead = keys - aligned

    taint = None
    if spec.hides_keys:  # NaN in a key that a row does not see must not reach the row
        bad = ~(torch.isfinite(k).all(-1) & torch.isfinite(v).all(-1))
        taint = (seen & bad[:, :, None]).any(-1, keepdim=True)
        k, v = (torch.where(torch.isfinite(x), x, 0.0) for x in (k, v))
    scale = scalar["softmax_scale"]
    s, slope = q @ k.mT * scale, None
    if spec.softcap is not None:
        unit = torch.tanh(s / spec.softcap)
        s, slope = spec.softcap * unit, 1 - unit * unit
    s = beside.added_to(s, ahead).masked_fill(~seen, NEG_INF)
    most = s.detach().amax(-1, keepdim=True)
    most = torch.where(most == NEG_INF, 0.0, most)
    e = torch.exp(s - most)
    total = e.sum(-1, keepdim=True)
    live = total != 0
    total = torch.where(live, total, 1.0)
    soft, lse = e / total, most + torch.log(total)
    if taint is not None:
        soft = soft + torch.where(seen & taint, float("nan"), 0.0)
    p = soft
    if beside.sinks is not None:
        p = soft * torch.sigmoid(lse - beside.sinks.float())
    kept = None
    if spec.has_dropout:
        b, h = (torch.arange(n, device=q.device) for n in q.shape[:2])
        b, h = b[:, None, None, None] + named["batch_start"], h[:, None, None] + named["head_start"]
        kept = philox_keep(seed, b, h, rows, keys, spec.dropout_p).float()
        kept = kept / (1 - spec.dropout_p) if spec.dropout_p < 1 else kept * 0.0
    lse = torch.where(live, lse, NEG_INF).squeeze(-1)
    return _Whole(spec, scale, beside, q, k, v, ahead, seen, slope, soft, p, kept, lse)
