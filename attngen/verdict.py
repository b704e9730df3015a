"""Is a result as good as plain PyTorch in the same dtype?"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

FP8_LSE_EPSILON = 2.0**-11
"""Rounding unit of the lse of FP8 inputs: tensor cores of sm_90 add FP8 products with about 14
bits, also those that cancel. Seen on an H200, with FlashAttention-3 too."""


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
