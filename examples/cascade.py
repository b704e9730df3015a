"""Decode over a prefix that sequences share, read once for the batch, and suffixes of their own.

    python examples/cascade.py

The two levels of a cascade are two calls that `attngen.merge` joins. In the first the batch is one
sequence: the queries of all are rows of one call, so that the prefix's keys are read once, not once
for each sequence. In the second each sequence has the keys behind the prefix, of its own length, in
pages. No level sees the other's keys, and the merge is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

import attngen

PAGE = 16


def prefix_level(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of q (batch, heads, rows, dim) to one prefix, k and v of (1, heads_kv, keys, dim).

    Each row sees all of it: nothing is masked.
    """
    batch, heads, rows, dim = q.shape
    folded = q.transpose(0, 1).reshape(1, heads, batch * rows, dim)
    out, lse = attngen.attention(folded, k, v, partial=True, return_lse=True)
    out = out.view(heads, batch, rows, -1).transpose(0, 1)
    return out, lse.view(heads, batch, rows).transpose(0, 1)


def cascade(
    q: Tensor,
    prefix: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    block_table: Tensor,
    suffix_lengths: Tensor,
) -> Tensor:
    """Causal attention of the last rows of each sequence to the prefix and its own suffix."""
    shared = prefix_level(q, *prefix)
    own = attngen.attention(
        q,
        *pages,
        causal=True,
        block_table=block_table,
        seqused_k=suffix_lengths,
        partial=True,
        return_lse=True,
    )
    out, _ = attngen.merge(*shared, *own)
    return out.to(q.dtype)


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = "cuda" if is_gpu else "cpu"
    torch.manual_seed(0)
    batch, heads, heads_kv, dim, keys = (64, 32, 8, 128, 8192) if is_gpu else (3, 4, 2, 32, 50)
    lengths = torch.arange(1, batch + 1, dtype=torch.int32, device=device) * 7
    count = -(-int(lengths.max()) // PAGE)
    q = torch.randn(batch, heads, 1, dim, device=device)
    prefix = tuple(torch.randn(2, 1, heads_kv, keys, dim, device=device))
    pages = tuple(torch.randn(2, batch * count, PAGE, heads_kv, dim, device=device))
    table = torch.randperm(batch * count, device=device).int().view(batch, count)

    out = cascade(q, prefix, pages, table, lengths)

    errors = []
    for b, length in enumerate(lengths.tolist()):
        own = (x[table[b].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in pages)
        k, v = (torch.cat(pair, 2) for pair in zip(prefix, own, strict=True))
        want = torch.nn.functional.scaled_dot_product_attention(q[b : b + 1], k, v, enable_gqa=True)
        errors.append((out[b : b + 1] - want).abs().max())
    error = torch.stack(errors).max().item()
    size = 2 * heads_kv * dim * q.element_size()
    suffixes = int(lengths.sum())
    print(f"cascade against one call for each sequence: largest difference {error:.1e}")
    print(
        f"keys and values read: {size * (keys + suffixes) / 1e6:.2f} MB, without a cascade "
        f"{size * (batch * keys + suffixes) / 1e6:.2f} MB"
    )
    assert error < 1e-4, "does not agree with PyTorch"


if __name__ == "__main__":
    main()
