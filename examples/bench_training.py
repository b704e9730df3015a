"""A training step of a Llama-style model, by attngen and by PyTorch's SDPA, in one run.

    python examples/bench_training.py                 # 12 layers, 8192 tokens, bfloat16, on a GPU
    python examples/bench_training.py --cold --warm   # and a first step in fresh processes

Both models have the same weights and data; torch.compile compiles their layers. Steps are timed in
turns, so that clocks are the same for both. Printed are medians. On a CPU the model is a toy,
and torch.compile's backend is "eager".

--cold times a fresh process from its first call of the model to the end of the first step, with no
kernels cached by Triton, inductor or attngen; --warm the same again with these caches filled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    layers: int = 12
    width: int = 2048
    heads: int = 16
    heads_kv: int = 4
    hidden: int = 5632
    vocabulary: int = 16384
    tokens: int = 8192
    batch: int = 1

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


TOY = Sizes(layers=1, width=64, heads=2, heads_kv=1, hidden=96, vocabulary=128, tokens=16)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (batch, seqlen, heads, dim)."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class Layer(nn.Module):
    """Attention and a gated MLP, each behind an RMS norm."""

    def __init__(self, n: Sizes, attend: Attend) -> None:
        super().__init__()
        self.heads, self.heads_kv, self.attend = n.heads, n.heads_kv, attend
        rows = n.heads + 2 * n.heads_kv
        self.qkv = nn.Linear(n.width, rows * n.head_dim, bias=False)
        self.out = nn.Linear(n.width, n.width, bias=False)
        self.gate_up = nn.Linear(n.width, 2 * n.hidden, bias=False)
        self.down = nn.Linear(n.hidden, n.width, bias=False)
        self.norm, self.norm_mlp = nn.RMSNorm(n.width), nn.RMSNorm(n.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows = self.heads + 2 * self.heads_kv
        parts = self.qkv(self.norm(x)).unflatten(2, (rows, -1))
        q, k, v = parts.split([self.heads, self.heads_kv, self.heads_kv], 2)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(out.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm_mlp(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, n: Sizes, attend: Attend) -> None:
        super().__init__()
        self.embed = nn.Embedding(n.vocabulary, n.width)
        self.layers = nn.ModuleList(Layer(n, attend) for _ in range(n.layers))
        self.norm = nn.RMSNorm(n.width)
        self.head = nn.Linear(n.width, n.vocabulary, bias=False)
        half = n.head_dim // 2
        angles = torch.arange(n.tokens)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos.to(x.dtype), self.sin.to(x.dtype))
        return F.cross_entropy(self.head(self.norm(x[:, :-1])).flatten(0, 1), ids[:, 1:].flatten())


def attends(n: Sizes, dtype: torch.dtype) -> dict[str, Attend]:
    """The two functions that are compared."""
    import attngen

    spec = attngen.AttentionSpec(head_dim=n.head_dim, dtype=dtype, causal=True)
    return {"attngen": attngen.compile(spec), "sdpa": by_sdpa}


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Trainer:
    """A compiled model, its optimiser and its data."""

    def __init__(self, n: Sizes, attend: Attend, device: str) -> None:
        self.is_gpu = device == "cuda"
        dtype = torch.bfloat16 if self.is_gpu else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Model(n, attend).to(dtype)
            self.ids = torch.randint(n.vocabulary, (n.batch, n.tokens))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=self.is_gpu)
        for layer in self.model.layers:  # one graph, which all of them share
            layer.compile(backend="inductor" if self.is_gpu else "eager", fullgraph=True)

    def step(self) -> float:
        """Seconds of a step."""
        start = self._now()
        loss = self.model(self.ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.detach()
        return self._now() - start

    def peak(self) -> float:
        """GiB at the peak of a step above what is held between steps, 0 on a CPU."""
        if not self.is_gpu:
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        return (torch.cuda.max_memory_allocated() - before) / 2**30

    def _now(self) -> float:
        if self.is_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def compare(n: Sizes, device: str, rounds: int) -> float:
    """Print both models' throughput and memory; returns attngen's throughput over SDPA's."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    trainers = {name: Trainer(n, attend, device) for name, attend in attends(n, dtype).items()}
    for name, trainer in trainers.items():
        seconds = trainer.step()
        print(f"{name}: first step {seconds:.1f} s, loss {trainer.loss.item():.4f}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for each in range(rounds + 2):
        turns = list(trainers.items())
        for name, trainer in turns if each % 2 else reversed(turns):  # neither is always first
            seconds = trainer.step()
            if each >= 2:
                times[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, trainer in trainers.items():
        rate = n.batch * n.tokens / medians[name]
        print(
            f"{name}: {medians[name] * 1e3:.1f} ms a step, {rate:,.0f} tokens/s, "
            f"peak {trainer.peak():.2f} GiB above rest"
        )
    ratio = medians["sdpa"] / medians["attngen"]
    print(f"throughput over SDPA's: {ratio:.3f}")
    return ratio


def first_step(n: Sizes, device: str) -> None:
    """For a child process: seconds of a first step, after imports and the model's making."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    trainer = Trainer(n, attends(n, dtype)["attngen"], device)
    print(f"{trainer.step():.1f}")


def in_fresh_process(arguments: list[str], folder: str) -> str:
    """Run this file again with all caches in a folder."""
    named = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "ATTNGEN_CACHE_DIR")
    own = {name: os.path.join(folder, name.lower()) for name in named}
    done = subprocess.run(
        [sys.executable, __file__, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **own},
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return done.stdout.split()[-1]


def main() -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--rounds", type=int, help="default: 5, on a CPU 1")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--no-compare", action="store_true")
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    n = Sizes() if chosen.device == "cuda" else TOY
    if chosen.first_step:
        first_step(n, chosen.device)
        return
    if not chosen.no_compare:
        compare(n, chosen.device, chosen.rounds or (5 if chosen.device == "cuda" else 1))
    if chosen.cold or chosen.warm:
        child = ["--device", chosen.device, "--first-step"]
        with tempfile.TemporaryDirectory() as folder:
            print(f"first step, cold caches: {in_fresh_process(child, folder)} s", flush=True)
            if chosen.warm:
                print(f"first step, warm caches: {in_fresh_process(child, folder)} s")


if __name__ == "__main__":
    main()
