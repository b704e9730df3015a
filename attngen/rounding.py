"""Rounding where a good kernel must round: values on the way forward, gradients on the way back."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.spec import AttentionSpec

FP8_PEAK = 256.0
"""The largest weight of a row in FP8: float8_e4m3fn holds up to 448."""


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
