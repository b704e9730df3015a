"""How tensors lie in memory: what kernels can address, and how results are stored."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def addressable(*tensors: Tensor) -> bool:
    """May a tensor descriptor (TMA) address these? Pointers and strides in units of 16 bytes."""
    for x in tensors:
        size = x.element_size()
        if x.data_ptr() % 16 or x.shape[3] * size % 16:
            return False
        for stride in x.stride()[:3]:
            if stride <= 0 or stride * size % 16:
                return False
    return True


def aligned(x: Tensor) -> Tensor:
    """x itself, or a copy whose rows begin at multiples of 16 bytes and whose last stride is 1.

    Kernels load 16 bytes at a time. Rows of any other length are copied, once, into rows padded to
    16 bytes: O(N d) bytes beside O(N^2 d) work.
    """
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and _is_whole(x.shape, x.stride(), unit):
        return x
    *sizes, columns = x.shape
    padded = x.new_empty((*sizes, -(-columns // unit) * unit))[..., :columns]
    return padded.copy_(x)


@functools.lru_cache(maxsize=4096)
def _is_whole(shape: torch.Size, strides: tuple[int, ...], unit: int) -> bool:
    """Do rows begin at multiples of `unit` elements, with the last stride 1?"""
    *leading, last = zip(shape, strides, strict=True)
    if last[0] != 1 and last[1] != 1:
        return False
    return all(stride % unit == 0 or size == 1 for size, stride in leading)


def on_16_bytes(x: Tensor) -> Tensor:
    """x itself, or a copy that begins at a multiple of 16 bytes."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def bshd_strides(heads: int, rows: int, dim: int) -> tuple[int, int, int, int]:
    """Strides of a (batch, heads, rows, dim) tensor stored (batch, rows, heads, dim)."""
    dim, heads, rows = max(dim, 1), max(heads, 1), max(rows, 1)  # as torch has it
    return rows * heads * dim, dim, heads * dim, 1


def empty_bshd(like: Tensor, batch: int, heads: int, rows: int, dim: int, dtype: Any) -> Tensor:
    """Uninitialised (batch, heads, rows, dim), stored (batch, rows, heads, dim)."""
    return like.new_empty((batch, rows, heads, dim), dtype=dtype).transpose(1, 2)
