"""Dual tensors: forward-mode derivatives as torch carries them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def may_have_tangents() -> bool:
    """Is a level of forward-mode derivatives open? A graph of torch.compile opens one unseen."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def tangent_of(x: Tensor | None) -> Tensor | None:
    """The tangent of a dual tensor, if it is one and that is not a symbolic zero."""
    if x is None or not may_have_tangents():
        return None
    _, tangent = _unpacked(x)
    return None if tangent is None or tangent._is_zerotensor() else tangent


def have_tangents(*tensors: Tensor | None) -> bool:
    """Is any a dual tensor?"""
    return may_have_tangents() and any(tangent_of(x) is not None for x in tensors)


def primal_of(x: Tensor) -> Tensor:
    return _unpacked(x)[0]


def dual(primal: Tensor, tangent: Tensor) -> Tensor:
    return torch._VF._make_dual(primal, tangent, level=0)


def _unpacked(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Primal and tangent. Levels of torch do not nest: there is one, of number 0."""
    return torch._VF._unpack_dual(x, level=0)
