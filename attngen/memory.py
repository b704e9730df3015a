"""How tensors lie in memory: what kernels can address, how results are stored, and scratch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

TRANSPOSED_KEYS = 128
"""Keys of a tile of the kernel that transposes V."""


class Memory(NamedTuple):
    """A tensor to allocate."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def make(self, like: Tensor) -> Tensor:
        return like.new_empty_strided(self.shape, self.strides, dtype=self.dtype)


def transposed(v: Tensor) -> Memory:
    """V^T of the hopper lowering, keys padded to whole tiles of the kernel that makes it."""
    batch, heads, keys, dim = v.shape
    padded = -(-keys // TRANSPOSED_KEYS) * TRANSPOSED_KEYS
    strides = (heads * dim * padded, dim * padded, padded, 1)
    return Memory((batch, heads, dim, padded), strides, v.dtype)


def order_of(num_seqs: int) -> Memory:
    """The order of work of packed sequences, in the forward of the hopper lowering."""
    return Memory((2 + 7 * (num_seqs + 2),), (1,), torch.int32)


def bshd(rows_of: Tensor, dim: int, dtype: torch.dtype) -> Memory:
    """A result with the rows of another, stored (batch, rows, heads, dim)."""
    batch, heads, rows, _ = rows_of.shape
    return Memory((batch, heads, rows, dim), bshd_strides(heads, rows, dim), dtype)


def float32(*shape: int) -> Memory:
    """Contiguous float32."""
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * max(size, 1))
    return Memory(shape, tuple(strides), torch.float32)


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


def numbered_rows(seqlen_q: int) -> int:
    """How many row numbers a backward has of a head: those of whole tiles of 128."""
    return -(-seqlen_q // 128) * 128
