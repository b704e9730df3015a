"""The oracle's dropout: which entries of P survive, by the definition."""

from __future__ import annotations

import torch
from torch import Tensor

_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


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
