"""Attention over a sequence in two shards, as a ring of two ranks computes it.

    python examples/merge_shards.py

Each rank holds one half of the queries, keys and values. It attends to each half of the keys in
turn, told by position where the rows of its call stand in the whole sequence, and `merge` joins the
partial results. Dropout bits depend on positions alone, so the joined result has the very mask of
one call over everything. There is no communication here: both ranks run in this process.
"""

from __future__ import annotations

import torch
from torch import Tensor

import attngen

SEQLEN, RANKS, SEED = 128, 2, 1234


def ring_rank(attn: attngen.Attention, rank: int, shards: list[list[Tensor]]) -> Tensor:
    """The output of one rank's queries; shards of keys come in the order a ring sends them."""
    rows = SEQLEN // RANKS
    q = shards[rank][0]
    out = lse = None
    for step in range(RANKS):
        source = (rank - step) % RANKS
        _, k, v = shards[source]
        part, part_lse = attn(
            q,
            k,
            v,
            q_start=rank * rows,
            k_start=source * rows,
            seqlen_q_total=SEQLEN,
            seqlen_k_total=SEQLEN,
            dropout_seed=SEED,
            partial=True,
            return_lse=True,
        )
        if out is None:
            out, lse = part, part_lse
        else:
            out, lse = attngen.merge(out, lse, part, part_lse)
    return out


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, SEQLEN, 64, device=device, requires_grad=True) for _ in "qkv"]
    spec = attngen.AttentionSpec(head_dim=64, dtype="float32", causal=True, dropout_p=0.2)
    attn = attngen.compile(spec)

    whole = attn(*tensors, dropout_seed=SEED)
    halves = [x.chunk(RANKS, dim=2) for x in tensors]
    shards = [list(shard) for shard in zip(*halves, strict=True)]
    joined = torch.cat([ring_rank(attn, rank, shards) for rank in range(RANKS)], dim=2)
    error = (joined - whole).abs().max().item()
    print(f"out: ring of {RANKS} against one call, largest difference {error:.1e}")
    assert error < 1e-5

    want = torch.autograd.grad(whole.square().sum(), tensors)
    got = torch.autograd.grad(joined.square().sum(), tensors)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        error = (a - b).abs().max().item()
        print(f"{name}: largest difference {error:.1e}")
        assert error < 1e-4


if __name__ == "__main__":
    main()
