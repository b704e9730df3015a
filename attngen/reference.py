"""Exact attention in plain PyTorch: the oracle that emitted kernels are judged by.

Nothing here is fast. Shapes are (batch, heads, seqlen, dim). Everything is made of ordinary torch
operations in float64 (or float32), forward and gradients; for shapes whose score matrix would not
fit there are forms that compute sampled query rows and sampled keys only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen.mask_rules import NAMES, Structure
from attngen.score_reference import Functions
from attngen.spec import AttentionSpec

NEG_INF = float("-inf")
FP8_PEAK = 256.0
"""The largest weight of a row in FP8: float8_e4m3fn holds up to 448."""
FP8_LSE_EPSILON = 2.0**-11
"""Rounding unit of the lse of FP8 inputs: tensor cores of sm_90 add FP8 products with about 14
bits, also those that cancel. Seen on an H200, with FlashAttention-3 too."""
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def seen_lse(lse: Tensor) -> Tensor:
    """lse, 0 in rows that see no key: what it is subtracted from may be -inf, too."""
    return torch.where(lse == NEG_INF, 0.0, lse)


def philox_keep(
    seed: int | Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor, dropout_p: float
) -> Tensor:
    """Which entries survive dropout; the four int64 coordinates broadcast against each other.

    Philox4x32-10: key = the 64-bit seed, counter (j // 4, i, head, batch), word j % 4, kept iff
    word >= floor(p * 2^32).
    """
    shape = (batch + head + i + j).shape
    c = [x.expand(shape) & _LOW for x in (j // 4, i, head, batch)]
    whole = seed.reshape(()) if isinstance(seed, Tensor) else int(seed)
    k0, k1 = whole & _LOW, whole >> 32 & _LOW
    for _ in range(10):
        # int64 products wrap modulo 2^64, which leaves both 32-bit halves exact
        first, second = (c[n] * m for n, m in zip((0, 2), _PHILOX_MULTIPLIERS, strict=True))
        c = [
            (second >> 32 & _LOW) ^ c[1] ^ k0,
            second & _LOW,
            (first >> 32 & _LOW) ^ c[3] ^ k1,
            first & _LOW,
        ]
        k0, k1 = ((k + step) & _LOW for k, step in zip((k0, k1), _PHILOX_KEY_STEPS, strict=True))
    word = torch.stack(c).gather(0, (j % 4).expand(shape)[None])[0]
    return word >= min(int(dropout_p * 2**32), _LOW)


def dropout_keep(
    seed: int | Tensor,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    dropout_p: float,
    *,
    device: torch.device | str = "cpu",
    batch_start: int = 0,
) -> Tensor:
    """The bool mask (batch, heads, seqlen_q, seqlen_k) of entries that dropout keeps."""
    b, h, i, j = (torch.arange(n, device=device) for n in (batch, heads, seqlen_q, seqlen_k))
    b = b + batch_start
    return philox_keep(seed, b[:, None, None, None], h[:, None, None], i[:, None], j, dropout_p)


class _Round(torch.autograd.Function):
    """Round values (forward) and gradients (backward) to a narrower dtype and back."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        x: Tensor,
        fwd: torch.dtype | None,
        bwd: torch.dtype | None,
    ) -> Tensor:
        ctx.narrow = bwd  # type: ignore[attr-defined]  # a context takes any name
        return x.clone() if fwd is None else x.to(fwd).to(x.dtype)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, None, None]:
        narrow = ctx.narrow  # type: ignore[attr-defined]  # see forward
        return (grad if narrow is None else grad.to(narrow).to(grad.dtype)), None, None


def rounded(x: Tensor, fwd: torch.dtype | None, bwd: torch.dtype | None) -> Tensor:
    """x, rounded on the way forward, and its gradient on the way back."""
    result: Tensor = _Round.apply(x, fwd, bwd)  # type: ignore[no-untyped-call]  # torch types none
    return result


def rounded_weights(spec: AttentionSpec, p: Tensor, narrow: torch.dtype) -> Tensor:
    """P as a good kernel multiplies it: in `narrow`, or with FP8 inputs in FP8, each row scaled so
    that it fits."""
    if not spec.is_fp8:
        return rounded(p, narrow, narrow)
    most = p.detach().amax(-1, keepdim=True)
    fit = FP8_PEAK / torch.where(most > 0, most, 1.0)
    return rounded(p * fit, torch.float8_e4m3fn, narrow) / fit


def scale_of(spec: AttentionSpec) -> float:
    """The spec's softmax scale, or its default."""
    return spec.head_dim**-0.5 if spec.softmax_scale is None else spec.softmax_scale


def alignment(spec: AttentionSpec, seqlen_q: int, seqlen_k: int) -> int:
    """The key position that stands at query 0's own."""
    return 0 if spec.causal == "top_left" else seqlen_k - seqlen_q


def visible(
    spec: AttentionSpec,
    queries: Tensor,
    keys: Tensor,
    structure: Structure | None = None,
    at: tuple[Tensor | int, Tensor, Tensor] | None = None,
) -> Tensor:
    """May queries see keys? Both are aligned positions, of shapes that broadcast.

    With a structure, `at` names their batch rows, query rows and key rows.
    """
    left, right = spec.window or (None, None)
    ahead = keys - queries
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if spec.chunk is not None:
        seen &= queries // spec.chunk == keys // spec.chunk
    if spec.is_causal:
        right = 0
    if structure is not None and at is not None:
        if spec.is_causal:
            seen = seen & structure.ordered(ahead <= 0, at[0], queries, keys)
            right = None
        elif spec.tree_mask:
            seen = seen & structure.ordered(torch.ones_like(seen), at[0], queries, keys)
        seen = seen & structure.shares_document(*at)
    if left is not None:
        seen = seen & (ahead >= -left)
    if right is not None:
        seen = seen & (ahead <= right)
    return seen


def _capped(spec: AttentionSpec, s: Tensor) -> Tensor:
    return s if spec.softcap is None else spec.softcap * torch.tanh(s / spec.softcap)


@dataclass(frozen=True)
class _Beside:
    """The tensors of a call beside q, k and v, as they meet scores (batch, heads, rows, keys)."""

    attn_mask: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None

    def expand(self, *sizes: int) -> _Beside:
        return _Beside(*(None if x is None else x.expand(sizes) for x in vars(self).values()))

    def __getitem__(self, at: Any) -> _Beside:
        return _Beside(*(None if x is None else x[at] for x in vars(self).values()))

    def seen(self, seen: Tensor) -> Tensor:
        """Those of the keys `seen` that are not hidden here."""
        if self.attn_mask is not None:
            seen = seen & self.attn_mask
        return seen if self.bias is None else seen & (self.bias != NEG_INF)

    def added_to(self, s: Tensor, ahead: Tensor) -> Tensor:
        """Capped scores with their bias, less ALiBi's part."""
        if self.bias is not None:
            s = s + self.bias.to(s.dtype).masked_fill(self.bias == NEG_INF, 0.0)
        return s if self.slopes is None else s - self.slopes.to(s.dtype) * ahead.abs()


def _beside(
    spec: AttentionSpec,
    attn_mask: Tensor | None,
    bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> _Beside:
    """The tensors that the spec wants, neither more nor less."""
    given = {"attn_mask": attn_mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    for name, tensor in given.items():
        assert (tensor is not None) == (name in spec.tensor_args), f"{name} is not as {spec} says"

    def of_heads(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.reshape(-1, x.shape[-1], 1, 1)

    return _Beside(attn_mask, bias, of_heads(alibi_slopes), of_heads(sinks))


def _places(
    batch: int, heads: int, rows: Tensor, keys: Tensor, first: int = 0
) -> tuple[Tensor, ...]:
    """b, h, q_idx and k_idx of all scores, b from `first` on."""
    b, h = (torch.arange(n, device=rows.device) for n in (batch, heads))
    return (b + first)[:, None, None, None], h[:, None, None], rows[:, None], keys


def _softmax(s: Tensor, seen: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(probabilities, lse) over the last dim; a row that sees nothing is 0 and -inf."""
    s = s.masked_fill(~seen, NEG_INF)
    m = s.detach().amax(-1, keepdim=True)
    m = torch.where(m == NEG_INF, torch.zeros_like(m), m)
    e = torch.exp(s - m)
    total = e.sum(-1, keepdim=True)
    live = total > 0
    total = torch.where(live, total, torch.ones_like(total))
    p, lse = e / total, m + torch.log(total)
    if sinks is not None:  # exp(lse) of exp(lse) + exp(sink) is left to the keys
        p = p * torch.sigmoid(lse - sinks.to(s.dtype))
    return p, torch.where(live, lse, torch.full_like(lse, NEG_INF)).squeeze(-1)


def _dropped(spec: AttentionSpec, p: Tensor, keep: Tensor | None) -> Tensor:
    if keep is None:
        return p
    return p * keep / (1 - spec.dropout_p) if spec.dropout_p < 1 else p * 0.0


def structure_of(given: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Those of a call's tensors that masks of structure read."""
    return {name: x for name, x in given.items() if name in NAMES}


def aux_of(given: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Those that score_mod and mask_mod read."""
    return {name: x for name, x in given.items() if name not in NAMES and x is not None}


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
    beside = _beside(spec, attn_mask, bias, alibi_slopes, sinks)
    rules = Structure.of(spec, seqlen_k, structure_of(more))
    q, k, v = (x.to(math_dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    rows, keys = (torch.arange(n, device=q.device) for n in (seqlen_q, seqlen_k))
    functions = Functions(spec, aux_of(more))
    place = _places(batch, heads, rows, keys, batch_start)
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
    s = beside.added_to(_capped(spec, s * scale_of(spec)), ahead)
    s = functions.applied(s, *place)
    seen = seen & (s != NEG_INF)
    p, lse = _softmax(s, seen, beside.sinks)
    keep = None
    if spec.has_dropout:
        sizes = (batch, heads, seqlen_q, seqlen_k)
        drop_p = spec.dropout_p
        keep = dropout_keep(seed, *sizes, drop_p, device=q.device, batch_start=batch_start)
    p = _dropped(spec, p, keep)
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
    beside = _beside(spec, attn_mask, bias, alibi_slopes, sinks)
    rules = Structure.of(spec, seqlen_k, structure_of(more))
    q, k = (x.detach().to(math_dtype) for x in (q, k))
    rows, keys = (torch.arange(n, device=q.device) for n in (seqlen_q, seqlen_k))
    functions = Functions(spec, aux_of(more))
    place = _places(batch, heads, rows, keys, batch_start)
    at = (torch.arange(batch, device=q.device)[:, None, None, None], rows[:, None], keys)
    rows = (rows + alignment(spec, seqlen_q, seqlen_k))[:, None]
    s = q @ k.repeat_interleave(heads // k.shape[1], 1).mT * scale_of(spec)
    s = functions.applied(beside.added_to(_capped(spec, s), keys - rows), *place)
    seen = functions.seen(beside.seen(visible(spec, rows, keys, rules, at)), *place)
    seen = seen & (s != NEG_INF)
    p, _ = _softmax(s, seen, beside.sinks)
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
    beside = _beside(spec, attn_mask, bias, alibi_slopes, sinks).expand(*q.shape[:3], seqlen_k)
    rules = Structure.of(spec, seqlen_k, structure_of(more))
    functions = Functions(spec, aux_of(more))
    outs, lses, dqs = [], [], []
    for b, h, i in at.tolist():
        row = q[b, h, i].detach().to(math_dtype).requires_grad_(do is not None)
        s = k[b, h // group].to(math_dtype) @ row
        if round_to is not None:
            s = rounded(s, None, round_to)
        ahead, here = keys - i - shift, beside[b, h, i]
        s = here.added_to(_capped(spec, s * scale_of(spec)), ahead)
        place = (*at.new_tensor([b, h, i]).unbind(), keys)
        s = functions.applied(s, *place)
        at_i = keys.new_tensor(i)
        seen = here.seen(visible(spec, at_i + shift, keys, rules, (b, at_i, keys)))
        seen = functions.seen(seen, *place) & (s != NEG_INF)
        p, lse = _softmax(s, seen, here.sinks)
        keep = None
        if spec.has_dropout:
            batch, head, at_row = at.new_tensor([b, h, i]).unbind()
            keep = philox_keep(seed, batch, head, at_row, keys, spec.dropout_p)
        p = _dropped(spec, p, keep)
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
    beside = _beside(spec, attn_mask, bias, alibi_slopes, sinks).expand(*q.shape[:3], seqlen_k)
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
        s = _capped(spec, q_all @ key * scale_of(spec))
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
            weight = _dropped(spec, weight, keep)
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


class Verdict(NamedTuple):
    """Is a result as good as plain PyTorch in the same dtype?"""

    ok: bool
    error: float
    """Largest absolute error; inf if a NaN or a wrong infinity appeared."""
    detail: str


def slopes_slack(rows: int, keys: int) -> float:
    """An error of an ALiBi slope's gradient beyond its rounding.

    It sums dS * distance. Each row's rowsum(out * do) errs by a rounding unit of float32 or two,
    which dS hands on times a distance; plain PyTorch sums P * dP instead, whose errors cancel.
    """
    return 2 * torch.finfo(torch.float32).eps * math.sqrt(rows) * (rows + keys)


def judge(
    actual: Tensor, wanted: Tensor, yard: Tensor, epsilon: float, slack: float = 0.0
) -> Verdict:
    """Compare with the oracle: error <= 2 * (error of the yardstick) + a rounding band + slack.

    The band is 1e-6 + 2 * epsilon * (largest wanted value + 0.1). NaN fails, and infinities must
    stand exactly where the oracle has them.
    """
    a, w, y = (x.detach().to(torch.float64) for x in (actual, wanted, yard))
    if torch.isnan(a).any():
        return Verdict(False, math.inf, f"{int(torch.isnan(a).sum())} NaN")
    finite = torch.isfinite(w)
    if not torch.equal(a[~finite], w[~finite]) or not torch.isfinite(a[finite]).all():
        return Verdict(False, math.inf, "infinities differ")
    if not finite.any():
        return Verdict(True, 0.0, "nothing finite to compare")
    error = (a - w)[finite].abs().max().item()
    band = 1e-6 + 2 * epsilon * (w[finite].abs().max().item() + 0.1)
    allowed = slack + band + 2 * (y - w)[finite].abs().max().item()
    return Verdict(error <= allowed, error, f"error {error:.2e}, allowed {allowed:.2e}")
