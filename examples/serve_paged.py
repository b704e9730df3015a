"""Greedy generation by a small Llama with keys and values in pages, checked by eager attention.

    python examples/serve_paged.py

Prompts of several lengths are padded on the left: queries are aligned with the last key, so that a
row of padding has a position below 0, where nothing is written and nothing is seen. A step is one
`attngen.append_kv` (which also rotates q and k) and one `attngen.attention` a layer, and waits for
no value on the device. At the end PyTorch computes the whole sequences, without a cache: each
token must be the one that it would have chosen. Runs on a CUDA GPU, or at smaller sizes in Triton's
interpreter where there is none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import attngen

PAGE = 16


@dataclass(frozen=True)
class Sizes:
    """Of the model."""

    layers: int = 2
    heads: int = 2
    heads_kv: int = 1
    head_dim: int = 32
    hidden: int = 192
    vocab: int = 101
    max_positions: int = 2048

    @property
    def dim(self) -> int:
        return self.heads * self.head_dim


class Llama:
    """A decoder of random weights: RMSNorm, rotary positions, grouped queries, SwiGLU."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, device=device) * columns**-0.5

        self.sizes, dim = sizes, sizes.dim
        self.embedding = torch.randn(sizes.vocab, dim, device=device) * 0.3
        self.head = matrix(sizes.vocab, dim)
        shapes = {
            "q": (dim, dim),
            "k": (sizes.heads_kv * sizes.head_dim, dim),
            "v": (sizes.heads_kv * sizes.head_dim, dim),
            "o": (dim, dim),
            "gate": (sizes.hidden, dim),
            "up": (sizes.hidden, dim),
            "down": (dim, sizes.hidden),
        }
        self.layers = [
            {name: matrix(*shape) for name, shape in shapes.items()} for _ in range(sizes.layers)
        ]
        half = sizes.head_dim // 2
        speeds = 10000.0 ** (-torch.arange(half, device=device) / half)
        angles = torch.arange(sizes.max_positions, device=device)[:, None] * speeds
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Logits of tokens (batch, seqlen): of whole sequences, or of what follows the cache."""
        x = self.embedding[tokens]
        positions = None if cache is None else cache.positions(tokens.shape[1])
        for number, layer in enumerate(self.layers):
            y = norm(x)
            q, k, v = (
                F.linear(y, layer[name]).unflatten(2, (-1, self.sizes.head_dim)) for name in "qkv"
            )
            if cache is None:
                out = self.eager(q, k, v)
            else:
                out = cache.attend(number, q, k, v, positions, self.cos, self.sin)
            x = x + F.linear(out.flatten(2), layer["o"])
            y = norm(x)
            x = x + F.linear(
                F.silu(F.linear(y, layer["gate"])) * F.linear(y, layer["up"]), layer["down"]
            )
        return F.linear(norm(x), self.head)

    def eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention in plain PyTorch; all (batch, seqlen, heads, head_dim)."""
        length = q.shape[1]
        q, k = (rotated(x, self.cos[:length], self.sin[:length]) for x in (q, k))
        k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(3)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)


class Cache:
    """Pages of keys and values of all layers, and a table of whose they are."""

    def __init__(self, sizes: Sizes, lengths: Tensor, room: list[int]) -> None:
        """Room for so many tokens of each sequence; `lengths` are those of the prompts."""
        device, counts = lengths.device, [-(-n // PAGE) for n in room]
        shape = (sizes.layers, 2, sum(counts), PAGE, sizes.heads_kv, sizes.head_dim)
        self.pages = torch.empty(shape, device=device)
        free = torch.randperm(sum(counts), dtype=torch.int32).split(counts)  # in no order
        table = torch.nn.utils.rnn.pad_sequence(free, batch_first=True, padding_value=-1)
        self.table, self.used = table.to(device), lengths

    def positions(self, rows: int) -> Tensor:
        """Where the last `rows` tokens of each sequence stand; below 0 is padding."""
        return torch.arange(rows, device=self.used.device) + (self.used - rows)[:, None]

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *angles: Tensor
    ) -> Tensor:
        """Append k and v, and attend; all (batch, seqlen, heads, head_dim)."""
        keys, values = self.pages[layer]
        cos, sin = angles
        q = attngen.append_kv(
            k,
            v,
            keys,
            values,
            positions=positions,
            block_table=self.table,
            q=q,
            cos=cos,
            sin=sin,
            layout="bshd",
        )
        return attngen.attention(
            q,
            keys,
            values,
            causal=True,
            block_table=self.table,
            seqused_k=self.used,
            layout="bshd",
        )


def norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (batch, seqlen, heads, head_dim), turned by the angles of its positions."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def generate(model: Llama, prompts: list[Tensor], steps: int) -> Tensor:
    """The next `steps` tokens of each prompt, (batch, steps)."""
    device = prompts[0].device
    longest = max(map(len, prompts))
    tokens = torch.stack([F.pad(x, (longest - len(x), 0)) for x in prompts])
    lengths = torch.tensor([len(x) for x in prompts], dtype=torch.int32, device=device)
    cache = Cache(model.sizes, lengths, [len(x) + steps for x in prompts])
    found = []
    for _ in range(steps):
        logits = model(tokens, cache)[:, -1]
        tokens = logits.argmax(-1, keepdim=True)
        found.append(tokens)
        cache.used = cache.used + 1
    return torch.cat(found, 1)


def shortfall(model: Llama, prompt: Tensor, found: Tensor) -> float:
    """How far the logits of the tokens found are below the greatest ones of eager attention."""
    logits = model(torch.cat([prompt, found])[None, :-1])[0, len(prompt) - 1 :]
    chosen = logits.gather(1, found[:, None])[:, 0]
    return (logits.amax(1) - chosen).max().item()


def main() -> None:
    is_gpu = torch.cuda.is_available()
    device = "cuda" if is_gpu else "cpu"
    torch.manual_seed(0)
    sizes, lengths, steps = Sizes(), (20, 7, 13), 8
    if is_gpu:
        sizes = Sizes(8, 16, 4, 64, 4096, 32000)
        lengths, steps = (500, 1, 333, 64, 16, 1000, 77, 250), 64
    model = Llama(sizes, device)
    prompts = [torch.randint(sizes.vocab, (n,), device=device) for n in lengths]
    with torch.no_grad():
        began = time.perf_counter()
        found = generate(model, prompts, steps)
        print(f"{found.numel()} tokens of {len(prompts)} prompts: {found[0, :8].tolist()} ...")
        print(f"{time.perf_counter() - began:.1f} s, kernels compiled or interpreted among them")
        short = max(shortfall(model, *pair) for pair in zip(prompts, found, strict=True))
    print(f"tokens against eager attention: at most {short:.1e} below the greatest logit")
    assert short < 1e-3, "a token is not what eager attention chooses"


if __name__ == "__main__":
    main()
