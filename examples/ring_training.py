"""Train on a sequence that no rank holds whole: two ranks, a ring, a toy language model.

    python examples/ring_training.py

Each rank holds a zigzag shard of one long sequence: tokens, positions for rotary embeddings, and
labels, which are shifted before anything else is computed, since the token behind a shard's last
row lies on another rank. Attention runs as a ring inside torch.autograd; gradients of weights are
summed over ranks, as with data parallelism, and the loss is divided by the count of labels on all
ranks. One process trains on the whole sequence beside them: both must lose alike.

On GPUs: `torchrun --nproc-per-node 2 examples/ring_training.py`, where NCCL and kernels do it.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

import attngen
from attngen import distributed

RANKS, SEQLEN, VOCABULARY, DIM, HEADS, STEPS = 2, 509, 64, 64, 4, 5
LAYOUT = "zigzag"


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embeddings; x is (batch, heads, rows, dim)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 1e4 ** (-torch.arange(half, device=x.device) / half)
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.attend = attend
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        out = self.attend(rotated(q, positions), rotated(k, positions), v)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


def train(attend, tokens: Tensor, positions: Tensor, labels: Tensor, group=None) -> list[float]:
    """Losses of some steps, the same on every rank."""
    torch.manual_seed(0)
    model = Model(attend).to(tokens.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    count = (labels != -100).sum()
    if group is not None:
        dist.all_reduce(count, group=group)
    losses = []
    for _ in range(STEPS):
        logits = model(tokens, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if group is not None:
            dist.all_reduce(total, group=group)
            for weight in model.parameters():
                dist.all_reduce(weight.grad, group=group)
        optimizer.step()
        losses.append(total.item())
    return losses


def sequence(device: torch.device) -> Tensor:
    """Tokens with something to learn: each follows from the one before, mostly."""
    generator = torch.Generator().manual_seed(1)
    noise = torch.randint(0, VOCABULARY, (SEQLEN,), generator=generator)
    keep = torch.rand(SEQLEN, generator=generator) < 0.8
    tokens = [0]
    for n in range(1, SEQLEN):
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY if keep[n] else int(noise[n]))
    return torch.tensor(tokens, device=device)[None]


def rank_main(rank: int, world: int, store: str | None) -> None:
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    backend = "nccl" if on_gpu else "gloo"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=world)
    group = dist.group.WORLD

    whole = sequence(device)
    tokens = distributed.shard(whole, LAYOUT, dim=1, group=group)
    positions = distributed.positions(LAYOUT, rank, world, SEQLEN, device=device)
    labels = distributed.shift_labels(tokens, LAYOUT, dim=1, seqlen=SEQLEN, group=group)

    spec = attngen.AttentionSpec(head_dim=DIM // HEADS, dtype="float32", causal=True)
    hop = "kernel" if on_gpu else "torch"  # kernels on a CPU are interpreted, and slow
    ring = distributed.ContextParallel(group, method="ring", layout=LAYOUT, hop=hop)
    attn = attngen.compile(spec, context_parallel=ring)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attn(q, k, v, seqlen_q_total=SEQLEN, seqlen_k_total=SEQLEN)

    losses = train(attend, tokens, positions, labels, group)
    if rank == 0:
        want = train(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            whole,
            torch.arange(SEQLEN, device=device),
            F.pad(whole[:, 1:], (0, 1), value=-100),
        )
        print(f"{SEQLEN} tokens over {world} ranks, {LAYOUT}, ring on {backend}")
        for step, (a, b) in enumerate(zip(losses, want, strict=True)):
            print(f"step {step}: loss {a:.4f} over ranks, {b:.4f} in one process")
        error = max(abs(a - b) for a, b in zip(losses, want, strict=True))
        print(f"largest difference {error:.1e}")
        assert error < 1e-3 and losses[-1] < losses[0]
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:  # torchrun
        rank_main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), None)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (RANKS, f"file://{folder}/store"), nprocs=RANKS)


if __name__ == "__main__":
    main()
