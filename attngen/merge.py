"""Joining attentions over disjoint sets of keys: the online softmax across calls."""

from __future__ import annotations

import torch
from torch import Tensor

from attngen.checks import check_kinds
from attngen.errors import DtypeError, SpecError


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two attentions of the same queries over disjoint sets of keys.

    With m = max(lse_a, lse_b): out = (e^(lse_a - m) out_a + e^(lse_b - m) out_b) / sum, and
    lse = m + log(sum) (Milakov and Gimelshein: Online normalizer calculation for softmax, 2018). A
    side that saw no key (lse -inf, or +inf as some libraries write it) counts for nothing, and two
    such sides give (0, -inf). Differentiable in all four arguments.

    Args:
        out_a, out_b: (batch, heads, seqlen_q, head_dim_v), normalised; pass `partial=True` outs
            (float32) to keep full precision.
        lse_a, lse_b: (batch, heads, seqlen_q), float32, natural log.

    Returns:
        out in the dtype of the two outs, and lse.

    Raises:
        SpecError: the shapes do not belong together, or an argument is no float tensor.
    """
    _check(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        raise SpecError(
            f"merge needs two outs and two lses of one shape, got out {tuple(out_a.shape)} and "
            f"{tuple(out_b.shape)}, lse {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    if out_a.shape[:-1] != lse_a.shape:
        raise SpecError(
            f"lse must have out's shape without its last dim, got {tuple(lse_a.shape)} for out "
            f"{tuple(out_a.shape)}; transpose a bshd out to bhsd first"
        )
    empty_a, empty_b = torch.isinf(lse_a), torch.isinf(lse_b)
    low = torch.finfo(lse_a.dtype).min
    # Each masked_fill keeps an inf out of the exponential, and so a NaN out of its gradient.
    a, b = lse_a.masked_fill(empty_a, low), lse_b.masked_fill(empty_b, low)
    top = torch.maximum(a, b).detach()
    weight_a = torch.exp(a - top).masked_fill(empty_a, 0.0)
    weight_b = torch.exp(b - top).masked_fill(empty_b, 0.0)
    empty = empty_a & empty_b
    total = (weight_a + weight_b).masked_fill(empty, 1.0)
    out = out_a * (weight_a / total).unsqueeze(-1) + out_b * (weight_b / total).unsqueeze(-1)
    lse = (top + torch.log(total)).masked_fill(empty, float("-inf"))
    return out.to(torch.promote_types(out_a.dtype, out_b.dtype)), lse


def _check(**tensors: Tensor) -> None:
    check_kinds(tensors)
    device = tensors["out_a"].device
    for name, x in tensors.items():
        if name.startswith("lse") and x.dtype not in (torch.float32, torch.float64):
            raise DtypeError(
                f"{name} must be float32 (or float64), got {x.dtype}; pass the lse of "
                "return_lse=True as it comes"
            )
        if not x.is_floating_point():
            raise DtypeError(f"{name} must be a float tensor, got {x.dtype}; cast it with .float()")
        if x.device != device:
            raise SpecError(
                f"{name} is on {x.device} but out_a is on {device}; move it with .to(out_a.device)"
            )
