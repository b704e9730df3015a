"""Train a small character-level GPT, as nanoGPT does, with attngen in place of SDPA.

    python examples/nanogpt_training.py                   # a toy, in under a minute on a CPU
    python examples/nanogpt_training.py --device cuda     # 124M parameters, bfloat16, torch.compile

The model calls `torch.nn.functional.scaled_dot_product_attention` and knows nothing of attngen; one
line, `attngen.patch_sdpa()`, serves it. The text is a repeated sentence, so that the loss falls
fast.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngen

TEXT = "the quick brown fox jumps over the lazy dog. " * 400


@dataclass(frozen=True)
class Sizes:
    layers: int = 12
    heads: int = 12
    width: int = 768
    tokens: int = 1024
    batch: int = 16
    steps: int = 200
    learning_rate: float = 6e-4
    dropout: float = 0.1


TOY = Sizes(layers=1, heads=2, width=64, tokens=32, batch=1, steps=8, learning_rate=1e-2)


class Block(nn.Module):
    def __init__(self, n: Sizes) -> None:
        super().__init__()
        self.heads, self.dropout = n.heads, n.dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(n.width), nn.LayerNorm(n.width)
        self.qkv, self.out = nn.Linear(n.width, 3 * n.width), nn.Linear(n.width, n.width)
        self.mlp = nn.Sequential(
            nn.Linear(n.width, 4 * n.width), nn.GELU(), nn.Linear(4 * n.width, n.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (batch, heads, seqlen, dim)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, n: Sizes, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = (
            nn.Embedding(vocabulary, n.width),
            nn.Embedding(n.tokens, n.width),
        )
        self.blocks = nn.Sequential(*(Block(n) for _ in range(n.layers)))
        self.norm, self.head = nn.LayerNorm(n.width), nn.Linear(n.width, vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train(n: Sizes, step: Any, optimizer: torch.optim.Optimizer, data: Tensor) -> list[Tensor]:
    """The loss of each step."""
    losses = []
    for number in range(n.steps):
        at = torch.randint(len(data) - n.tokens - 1, (n.batch, 1), device=data.device)
        ids = data[at + torch.arange(n.tokens + 1, device=data.device)]
        with torch.autocast(data.device.type, torch.bfloat16, enabled=data.is_cuda):
            loss = step(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if number % max(n.steps // 4, 1) == 0:
            print(f"step {number}: loss {losses[-1].item():.3f}", flush=True)
    return losses


def main() -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    device = parser.parse_args().device
    n = Sizes() if device == "cuda" else TOY
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    data = torch.tensor([letters.index(letter) for letter in TEXT], device=device)
    model = GPT(n, len(letters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=n.learning_rate)

    # "eager" is for CPUs, where inductor's compilation would take longer than the training.
    step = torch.compile(model, backend="inductor" if device == "cuda" else "eager")
    start = time.perf_counter()
    with attngen.patch_sdpa(strict=True):
        losses = train(n, step, optimizer, data)
    seconds = time.perf_counter() - start
    first, last = losses[0].item(), losses[-1].item()
    print(f"loss fell from {first:.3f} to {last:.3f}, {n.steps / seconds:.1f} steps/s")
    assert last < first


if __name__ == "__main__":
    main()
