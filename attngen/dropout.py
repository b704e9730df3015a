"""The dropout mask in plain torch: which entries of P survive, bit for bit as in the kernels; and
seeds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.checks import elsewhere
from attngen.errors import SpecError
from attngen.values import probability, whole

_MASK = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def dropout_keep(
    seed: int | Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float
) -> Tensor:
    """Which entries of the softmax matrix dropout keeps.

    Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers, SC 2011) with key = seed and
    counter = (j // 4, i, head, batch), word j % 4, for query row i and key row j counted in their
    whole sequence; an entry stays iff its word >= floor(dropout_p * 2**32). So the mask does not
    depend on tiles, splits, ranks or shards.

    Args:
        seed: an int of 64 bits, or an int64 tensor of one element (the mask is made on its device).
        batch, heads, seqlen_q, seqlen_k: sizes of the whole attention.
        dropout_p: probability of dropping, 0 to 1.

    Returns:
        bool tensor (batch, heads, seqlen_q, seqlen_k), True = kept.

    Raises:
        SpecError: dropout_p is not from 0 to 1, a size is no size, or the seed no seed.
    """
    dropout_p = probability("dropout_p", dropout_p)
    batch, heads = whole("batch", batch), whole("heads", heads)
    seqlen_q, seqlen_k = whole("seqlen_q", seqlen_q), whole("seqlen_k", seqlen_k)
    seed = check_seed(seed)
    device = seed.device if isinstance(seed, Tensor) else torch.device("cpu")
    key = (seed.reshape(()) if isinstance(seed, Tensor) else seed_tensor(seed, device)).view(())

    def counter(n: int, dim: int) -> Tensor:
        shape = [1, 1, 1, 1]
        shape[dim] = n
        return torch.arange(n, dtype=torch.int64, device=device).view(shape)

    quads = (seqlen_k + 3) // 4
    words = _philox(
        [counter(quads, 3), counter(seqlen_q, 2), counter(heads, 1), counter(batch, 0)],
        [key & _MASK, (key >> 32) & _MASK],
    )
    full = [w.expand(batch, heads, seqlen_q, quads) for w in words]
    word = torch.stack(full, -1).flatten(3)[..., :seqlen_k]
    return word >= int(dropout_p * 2**32)


def check_seed(seed: Any, device: torch.device | None = None) -> int | Tensor:
    """A dropout seed: 64 bits as an int, or an int64 tensor of one element, on the device."""
    must = "it must be an int or an int64 tensor of one element"
    if not isinstance(seed, Tensor):
        if torch.compiler.is_compiling() and type(seed) is int:
            return seed  # may be symbolic, and guards know int64 only
        step = f"a seed is 64 bits; {must}"
        return whole("dropout_seed", seed, -(2**63), 2**64 - 1, step)
    if seed.numel() != 1 or seed.dtype != torch.int64:
        raise SpecError(f"dropout_seed: {must}, got {seed.dtype} of shape {tuple(seed.shape)}")
    if device is not None and seed.device != device:
        raise elsewhere("dropout_seed", seed.device, device)
    return seed


def seed_of(seed: int | Tensor | None, q: Tensor) -> Tensor:
    """The seed of a call as a tensor of one element; drawn from torch's generator if None."""
    if seed is None:
        return torch.randint(0, 2**63 - 1, (1,), dtype=torch.int64, device=q.device)
    return seed.reshape(1) if isinstance(seed, Tensor) else seed_tensor(seed, q.device)


def seed_tensor(seed: int, device: torch.device) -> Tensor:
    """A 64-bit seed as an int64 tensor of one element; made without a host synchronisation."""
    signed = seed - 2**64 if seed >= 2**63 else seed  # no modulo: seed may be symbolic
    return torch.full((1,), signed, dtype=torch.int64, device=device)


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b, in int64 arithmetic that never overflows."""
    upper = a * (b >> 16)
    low = a * (b & 0xFFFF) + ((upper & 0xFFFF) << 16)
    return (upper >> 16) + (low >> 32), low & _MASK


def _philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIER[0], c0)
        high1, low1 = _multiply(_MULTIPLIER[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]
