"""A hop in plain PyTorch, float32, with score matrices whole: what a hop of kernels computes, for
tests of everything around it on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.dropout_reference import philox_keep
from attngen.mask_rules import Structure
from attngen.score_reference import Functions
from attngen.softmax_reference import NEG_INF, seen_lse, visible
from attngen.spec import AttentionSpec

Terms = dict[str, Any]


class _Scores(NamedTuple):
    s: Tensor
    """After all that is added; (batch, num_heads_q, rows, keys)."""
    seen: Tensor
    kept: Tensor | None
    """What dropout multiplies P by."""


def forward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    scalars: dict[str, float],
    ints: dict[str, int],
) -> tuple[Tensor, Tensor]:
    """out and lse, float32."""
    found = _scores(spec, q.float(), k.float(), terms, scalars, ints)
    s = found.s.masked_fill(~found.seen, NEG_INF)
    most = s.amax(-1, keepdim=True)
    most = torch.where(most == NEG_INF, torch.zeros_like(most), most)
    e = torch.exp(s - most)
    total = e.sum(-1, keepdim=True)
    p, lse = e / total.clamp(min=1.0), (most + torch.log(total)).squeeze(-1)
    if found.kept is not None:
        p = p * found.kept
    return p @ v.float().repeat_interleave(q.shape[1] // k.shape[1], 1), lse


def backward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    terms: Terms,
    scalars: dict[str, float],
    ints: dict[str, int],
    needs: Sequence[bool],
) -> list[Tensor]:
    """dq, dk, dv, and the gradients of the terms that `needs` asks for, float32; from the out and
    lse of all keys, of which k is a part."""
    group = q.shape[1] // k.shape[1]
    wanted = [n for n, need in zip(spec.gradient_args, needs, strict=True) if need]
    with torch.enable_grad():
        q, k = (x.detach().float().requires_grad_() for x in (q, k))
        others = {n: terms[n].detach().float().requires_grad_() for n in wanted}
        found = _scores(spec, q, k, terms | others, scalars, ints)
    soft = _weights(found, lse)
    p = soft
    if spec.sinks:
        p = p * torch.sigmoid(seen_lse(lse) - terms["sinks"].float()[..., None])[..., None]
    ds, dv = torch.zeros_like(p), torch.zeros_like(v, dtype=torch.float32)
    if dout is not None:
        do = dout.float()
        dropped = p if found.kept is None else p * found.kept
        dv = _by_group(dropped.mT @ do, group)
        dp = do @ v.float().repeat_interleave(group, 1).mT
        dp = dp if found.kept is None else dp * found.kept
        ds = p * (dp - (out.float() * do).sum(-1, keepdim=True))
    if dlse is not None:
        ds = ds + soft * dlse.float().masked_fill(lse == NEG_INF, 0.0)[..., None]
    inputs = [q, k, *others.values()]
    grads = torch.autograd.grad(found.s, inputs, ds, allow_unused=True)
    made = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]
    return [*made[:2], dv, *made[2:]]


def _by_group(x: Tensor, group: int) -> Tensor:
    total: Tensor = x.unflatten(1, (-1, group)).sum(2)
    return total


def _weights(found: _Scores, lse: Tensor) -> Tensor:
    """Softmax by an lse; rows that see nothing are 0."""
    total = seen_lse(lse)
    s = found.s.detach().masked_fill(~found.seen, NEG_INF)
    return torch.exp(s - total[..., None])


def _scores(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    terms: Terms,
    scalars: dict[str, float],
    ints: dict[str, int],
) -> _Scores:
    batch, heads, n, _ = q.shape
    m = k.shape[2]
    b, h, i, j = (torch.arange(size, device=q.device) for size in (batch, heads, n, m))
    b, h, i = b[:, None, None, None], h[:, None, None], i[:, None]
    rows = ints.get("q_start", 0) + i * ints.get("q_step", 1)
    keys = ints.get("k_start", 0) + j * ints.get("k_step", 1)
    totals = [ints.get(f"seqlen_{side}_total", -1) for side in "qk"]
    total_q, total_k = (own if t < 0 else t for t, own in zip(totals, (n, m), strict=True))
    align = total_k - total_q if ints.get("bottom_right", 1) else 0
    values = replace(
        spec,
        window=(ints.get("window_left"), ints.get("window_right")),
        chunk=ints.get("chunk"),
        dropout_p=scalars.get("dropout_p", 0.0),
    )
    place = (b + ints.get("batch_start", 0), h + ints.get("head_start", 0), rows, keys)
    ids_q, ids_k = terms.get("doc_ids_q"), terms.get("doc_ids_k")
    structure = Structure(terms.get("prefix_lens"), ids_q, ids_k)
    seen = visible(values, rows + align, keys, structure, (b, i, j))
    functions = Functions(spec, {name: terms[name] for name in spec.aux_args})
    s = q @ k.repeat_interleave(heads // k.shape[1], 1).mT * scalars["softmax_scale"]
    if spec.has_softcap:
        s = scalars["softcap"] * torch.tanh(s / scalars["softcap"])
    if spec.bias:
        hidden = terms["bias"] == NEG_INF
        seen = seen & ~hidden
        s = s + terms["bias"].float().masked_fill(hidden, 0.0)
    if spec.alibi:
        s = s - terms["alibi_slopes"].float()[..., None, None] * (keys - rows - align).abs()
    if spec.attn_mask:
        seen = seen & terms["attn_mask"]
    s = functions.applied(s, *place)
    seen = functions.seen(seen, *place) & (s != NEG_INF)
    kept = None
    if spec.has_dropout:
        p = values.dropout_p
        kept = philox_keep(terms["dropout_seed"], *place, p).float()
        kept = kept / (1 - p) if p < 1 else kept * 0.0
    return _Scores(s, seen.expand(s.shape), kept)
