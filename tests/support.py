"""What the tests share: inputs, the oracle of tests/cases, and comparisons with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import attngen
from attngen.config import BwdConfig, FwdConfig

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "tests" / "cases"))

import oracle  # noqa: E402  (lies beside the cases, outside any package)

SMALL_FWD = FwdConfig(block_m=16, block_n=16, num_warps=1, num_stages=1)
SMALL_BWD = BwdConfig(
    block_m=16,
    block_n=16,
    num_warps=1,
    num_stages=1,
    dq_block_m=16,
    dq_block_n=16,
    dq_num_warps=1,
    dq_num_stages=1,
)
"""Tiles so small that short sequences still span several."""


def make_qkv(
    batch: int = 1,
    heads: int = 2,
    seqlen_q: int = 20,
    seqlen_k: int | None = None,
    dim: int = 16,
    *,
    heads_kv: int | None = None,
    dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v as (batch, heads, seqlen, dim) leaves that require grad."""
    generator = torch.Generator().manual_seed(seed)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    shapes = (
        (batch, heads, seqlen_q, dim),
        (batch, heads_kv or heads, seqlen_k, dim),
        (batch, heads_kv or heads, seqlen_k, dim_v or dim),
    )
    q, k, v = (
        torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in shapes
    )
    return q, k, v


def oracle_options(options: dict[str, Any], q: Tensor, k: Tensor) -> dict[str, Any]:
    """Options of `attngen.attention`, attn_mask among them, in the oracle's words."""
    causal = options.get("causal", False)
    named: dict[str, Any] = {
        "causal": causal is not False,
        "align": "top_left" if causal == "top_left" else "bottom_right",
        "window": options.get("window"),
        "scale": options.get("softmax_scale"),
        "softcap": options.get("softcap") or 0.0,
    }
    if options.get("attn_mask") is not None:
        named["mask"] = options["attn_mask"]
    if options.get("chunk"):
        shift = 0 if causal == "top_left" else k.shape[2] - q.shape[2]
        rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        local = ((rows + shift) // options["chunk"])[:, None] == keys // options["chunk"]
        named["mask"] = named.get("mask", True) & local.expand(*q.shape[:3], k.shape[2])
    if any(options.get(name) is not None for name in ("prefix_lens", "doc_ids_q", "tree_mask")):
        named["mask"] = named.get("mask", True) & structure(options, q, k)
        if causal is not False:  # which is in that mask; it closes the window's right side
            named |= {"causal": False, "window": ((named["window"] or (None, None))[0], None)}
    if options.get("dropout_p"):
        p, seed = options["dropout_p"], options["dropout_seed"]
        keep = attngen.dropout_keep(seed, *q.shape[:3], k.shape[2], p)
        named |= {"dropout_p": p, "keep": keep.to(q.device)}
    return named


def structure(options: dict[str, Any], q: Tensor, k: Tensor) -> Tensor:
    """Which keys rows see by causal, tree_mask, prefix_lens and document ids: a dense mask."""
    batch, heads, rows, keys = *q.shape[:3], k.shape[2]
    causal, tree = options.get("causal", False), options.get("tree_mask")
    i, j = torch.arange(rows, device=q.device)[:, None], torch.arange(keys, device=q.device)
    shift = 0 if causal == "top_left" else keys - rows
    seen = j <= i + shift if causal is not False else torch.ones_like(i + j, dtype=torch.bool)
    seen = seen.repeat(batch, 1, 1)
    if tree is not None:
        n = tree.shape[-1]
        seen[:, rows - n :, keys - n :] = tree
    if options.get("prefix_lens") is not None:
        seen |= j < options["prefix_lens"][:, None, None]
    if options.get("doc_ids_q") is not None:
        ids_q = options["doc_ids_q"]
        ids_k = options.get("doc_ids_k", ids_q)
        ids_q, ids_k = ids_q.expand(batch, rows), ids_k.expand(batch, keys)
        seen &= ids_q[:, :, None] == ids_k[:, None, :]
    return seen[:, None].expand(batch, heads, rows, keys)


def assert_exact(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any] | None = None,
    *,
    scores: dict[str, Tensor] | None = None,
    with_lse_gradient: bool = True,
) -> None:
    """`attend(q, k, v)` -> (out, lse) and all its gradients are as good as plain PyTorch's.

    The judge is the cases': twice the error of PyTorch in the same dtype plus a rounding band.
    `options` are those of `attngen.attention`, for the oracle, and so are `scores`, the bias,
    alibi_slopes and sinks that `attend` uses: their gradients are compared where they require one.
    """
    scores = scores or {}
    named = oracle_options(options or {}, q, k)
    out, lse = attend(q, k, v)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    loss, grads = [out], [do]
    dlse = None
    if with_lse_gradient:
        dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2)).to(lse.device)
        loss.append(lse)
        grads.append(dlse.masked_fill(torch.isinf(lse.detach()), 0.0))
    inputs = dict(zip("qkv", (q, k, v), strict=True))
    inputs |= {name: x for name, x in scores.items() if x.requires_grad}
    fixed = {name: x for name, x in scores.items() if not x.requires_grad}
    got = torch.autograd.grad(loss, list(inputs.values()), grads)
    narrow = q.dtype if q.dtype != torch.float32 else None

    def solve(**how: Any) -> tuple[Any, dict[str, Tensor]]:
        leaf = how.get("math_dtype", torch.float64)
        return oracle.gradients(
            lambda **x: oracle.attention(**x, **fixed, **named, **how),
            inputs,
            do,
            dlse,
            leaf_dtype=leaf,
        )

    right, right_grads = solve()
    yard, yard_grads = solve(math_dtype=torch.float32, round_to=narrow)
    rows = [
        ("out", out, right.out, yard.out, q.dtype),
        ("lse", lse, right.lse, yard.lse, lse.dtype),
    ]
    yards = [yard_grads, _by_rounded_rows(right, inputs, fixed, named, do, dlse)]
    if "sinks" in inputs:
        yards.append({"sinks": _sinks_gradient(right, inputs["sinks"], do, narrow)})
    if "alibi_slopes" in inputs:
        yards.append({"alibi_slopes": _slopes_gradient(right_grads, inputs, fixed, named, do)})
    yard_grads = _added(right_grads, yards)
    rows += [
        (f"d{name}", grad, right_grads[name], yard_grads[name], inputs[name].dtype)
        for name, grad in zip(inputs, got, strict=True)
    ]
    for name, actual, want, about, dtype in rows:
        assert actual.dtype == dtype, name
        if name in ("dbias", "dalibi_slopes", "dsinks"):  # no finer than the out that they use
            dtype = max(dtype, q.dtype, key=lambda each: torch.finfo(each).eps)
        good, why = oracle.judge(actual, want, dtype, yard=about)
        assert good, f"{name}: {why}"


def _added(right: dict[str, Tensor], yards: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A yardstick that has the errors of several, of causes that a backward pass has all of."""
    return {
        name: x + sum((yard[name] - x).abs() for yard in yards if name in yard)
        for name, x in right.items()
    }


def _by_rounded_rows(
    right: Any,
    inputs: dict[str, Tensor],
    fixed: dict[str, Tensor],
    named: dict[str, Any],
    do: Tensor,
    dlse: Tensor | None,
) -> dict[str, Tensor]:
    """Exact gradients, but with lse and delta = rowsum(out * do) in float32, as every backward
    pass has them that keeps no P: a row's P, and so all that it adds, is too large by one factor,
    and an error of delta acts as a gradient of lse."""
    lse, out = right.lse.detach(), right.out.detach()
    excess = torch.exp(lse - lse.float().double()).where(lse.isfinite(), 1.0)
    late = (out * do.double()).sum(-1) - (out.float() * do.float()).sum(-1).double()
    dlse = late if dlse is None else dlse.double() + late
    _, grads = oracle.gradients(
        lambda **x: oracle.attention(**x, **fixed, **named),
        inputs,
        do.double() * excess[..., None],
        dlse * excess,
    )
    return grads


def _sinks_gradient(right: Any, sinks: Tensor, do: Tensor, narrow: torch.dtype | None) -> Tensor:
    """From the exact out and lse, -P_sink rowsum(out * do) summed over rows; as a backward pass
    has it: of out rounded to a narrow dtype, or in float32 with the standard error of such a sum.

    A call has few sinks, so that the plain computation's error may be small by luck. In float32
    P_sink is wrong by lse's rounding, and a product of two rows by its terms'.
    """
    sinks = sinks.detach().double()
    out, do = right.out.detach(), do.double()
    sees = right.lse.detach().isfinite()
    lse = right.lse.detach().where(sees, 0.0)
    weight = torch.sigmoid((sinks[:, None] if sinks.dim() == 1 else sinks[:, :, None]) - lse)
    weight = weight.where(sees, 0.0)
    if narrow is not None:
        out = out.to(narrow).double()
    each = (out * do).sum(-1)
    total = -(weight * each).sum(-1).sum_to_size(sinks.shape)
    if narrow is not None:
        return total
    eps = torch.finfo(torch.float32).eps
    wrong = weight * (
        eps / 4 * (1 + lse.abs()) * each.abs() + eps / 2 * out.norm(dim=-1) * do.norm(dim=-1)
    )
    return total + wrong.square().sum(-1).sum_to_size(sinks.shape).sqrt()


def _slopes_gradient(
    right_grads: dict[str, Tensor],
    inputs: dict[str, Tensor],
    fixed: dict[str, Tensor],
    named: dict[str, Any],
    do: Tensor,
) -> Tensor:
    """The exact gradient of ALiBi's slopes, off by the standard error of its sum in float32: of
    rows and keys, -distance P (dP - delta).

    A call has few slopes, so that the plain computation's error may be small by luck. In float32
    P is wrong by what its score is, and dP, a product of two rows, by its terms'.
    """
    q, k, v = (inputs[name].detach().double() for name in "qkv")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    slopes = inputs["alibi_slopes"].detach().double()
    terms = {name: x.detach() for name, x in (fixed | inputs).items() if name not in "qkv"}
    found = oracle.attention(q, k, v, **terms, **named, return_probs=True)
    p, do = found.probs, do.double()
    rows, keys = p.shape[-2:]
    at = (rows, keys, named.get("align", "bottom_right"), named.get("q_pos"), named.get("k_pos"))
    places, others = oracle.positions(*at, q.device)
    distance = (places[:, None] - others).abs().double()
    dp, delta = do @ v.transpose(-1, -2), (found.out * do).sum(-1, keepdim=True)

    def norms(x: Tensor, y: Tensor) -> Tensor:
        return x.norm(dim=-1)[..., None] * y.norm(dim=-1)[..., None, :]

    scale = named.get("scale") or q.shape[-1] ** -0.5
    score = norms(q, k) * scale + slopes.abs()[..., None, None] * distance
    eps = torch.finfo(torch.float32).eps / 2
    wrong = eps * distance * p * (score * (dp - delta).abs() + norms(do, v))
    wanted = right_grads["alibi_slopes"]
    return wanted + wrong.square().sum((-2, -1)).sum_to_size(wanted.shape).sqrt()


def assert_close(actual: Iterable[Tensor], wanted: Iterable[Tensor], atol: float = 2e-5) -> None:
    """Two sets of float32 results agree: same shapes, no NaN, difference at most atol."""
    for number, (a, w) in enumerate(zip(actual, wanted, strict=True)):
        torch.testing.assert_close(a, w, atol=atol, rtol=0, msg=lambda m, n=number: f"[{n}] {m}")


def python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a fresh process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=REPO / "tests",
        env={**os.environ, **environment},
        timeout=300,
    )


def run_file(path: Path) -> subprocess.CompletedProcess[str]:
    """Run an emitted file in the interpreter."""
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
