"""The main job, end to end: spec, emitted kernel, tuning, record, and a model that trains.

Run it with `make demo`, or `python examples/demo.py`. With a CUDA GPU everything is measured there.
Without one, the kernels are compiled for an A100 and checked, but not timed, and the model trains
in Triton's interpreter: small sizes, under three minutes on two cores. The exit code is 1 if the
model that trains with attngen strays from the one that trains with PyTorch's own attention.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import attngen
from attngen.explain import explain_workload
from attngen.gpu import by_name, current
from attngen.kernel import emit
from attngen.paths import cache_dir, database_path

AttentionFunction = Callable[[Tensor, Tensor, Tensor], Tensor]
TOLERANCE = 0.005  # of the loss: two attentions that round to bfloat16 give 0.001
SEED = 0
ONLINE_SOFTMAX = {
    "triton": ("s = score(", "m_i = m_new"),
    "hopper": ("def softmax(", "return p, m_new"),
}
"""Its first and last line in a forward, by lowering."""


@dataclass(frozen=True)
class Sizes:
    """The model, the batch, and how long to tune."""

    batch: int
    num_heads: int
    head_dim: int
    seqlen: int
    steps: int
    learning_rate: float
    tune_seconds: float
    """For each of the two directions."""

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def workload(self) -> attngen.Workload:
        return attngen.Workload(
            self.batch, self.num_heads, self.num_heads, self.seqlen, self.seqlen
        )


ON_CPU = Sizes(
    batch=4, num_heads=2, head_dim=32, seqlen=64, steps=15, learning_rate=3e-3, tune_seconds=15
)
ON_GPU = Sizes(
    batch=8, num_heads=4, head_dim=64, seqlen=1024, steps=40, learning_rate=1e-3, tune_seconds=15
)


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a norm and beside a residual."""

    def __init__(self, sizes: Sizes, attend: AttentionFunction) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.attend = sizes.num_heads, attend
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        out = self.attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ByteModel(nn.Module):
    """A transformer of two layers that predicts the next byte; returns the loss."""

    def __init__(self, sizes: Sizes, attend: AttentionFunction) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.embed = nn.Embedding(256, sizes.width)
        self.place = nn.Embedding(sizes.seqlen, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes, attend) for _ in range(2)))
        self.head = nn.Linear(sizes.width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1]) + self.place.weight
        return F.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), tokens[:, 1:].flatten())


def text_bytes() -> Tensor:
    """A text made here, as bytes: sums, which a model learns to continue."""
    pairs = itertools.product(range(40), range(40))
    text = " ".join(f"{a} plus {b} makes {a + b}." for a, b in pairs)
    return torch.tensor(list(text.encode()))


def batches(sizes: Sizes, device: str) -> Iterator[Tensor]:
    """Random stretches of the text, (batch, seqlen + 1); the same for every caller."""
    text = text_bytes()
    generator = torch.Generator().manual_seed(SEED)
    columns = torch.arange(sizes.seqlen + 1)
    for _ in range(sizes.steps):
        starts = torch.randint(len(text) - sizes.seqlen, (sizes.batch, 1), generator=generator)
        yield text[starts + columns].to(device)


def train(sizes: Sizes, attend: AttentionFunction, device: str, backend: str) -> list[float]:
    """The loss of each training step, through torch.compile, in bfloat16 autocast."""
    model = ByteModel(sizes, attend).to(device)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate)
    losses = []
    for tokens in batches(sizes, device):
        with torch.autocast(device, torch.bfloat16):
            loss = compiled(tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def train_beside(
    sizes: Sizes, attend: AttentionFunction, device: str
) -> tuple[list[float], list[float]]:
    """Losses with `attend`, and with PyTorch's attention: the same model, data and seed.

    The model is compiled by inductor, or by aot_eager where inductor finds no compiler.
    """
    backend = "inductor"
    try:
        theirs = train(sizes, torch_attention, device, backend)
    except Exception as error:
        print(f"   inductor does not work here ({_first_line(error)}); using aot_eager")
        torch._dynamo.reset()
        backend = "aot_eager"
        theirs = train(sizes, torch_attention, device, backend)
    return train(sizes, attend, device, backend), theirs


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def section(number: int, title: str) -> None:
    print(f"\n{number}. {title}")


def shown(text: str) -> None:
    print("   | " + text.rstrip().replace("\n", "\n   | "))


class BestSoFar:
    """Prints a line whenever a measured config beats all before it."""

    def __init__(self) -> None:
        self._best: dict[str, float] = {}

    def __call__(self, event: dict[str, Any]) -> None:
        time_us = event.get("median_us")
        if time_us and time_us < self._best.get(event["bucket"], float("inf")):
            self._best[event["bucket"]] = time_us
            print(f"   config {event['tried']}: {time_us:.1f} us  {event['config']}", flush=True)


def excerpt(source: str, begin: str, end: str) -> str:
    """The lines of an emitted file from the one that holds `begin` to the one that holds `end`."""
    lines = source.splitlines()
    first = next(n for n, line in enumerate(lines) if begin in line)
    last = next(n for n, line in enumerate(lines) if n > first and end in line)
    return "\n".join(lines[first : last + 1])


def main() -> int:
    began = time.monotonic()
    on_gpu = torch.cuda.is_available()
    device, sizes = ("cuda", ON_GPU) if on_gpu else ("cpu", ON_CPU)
    gpu = current() if on_gpu else by_name("nvidia_a100")
    workload = sizes.workload

    section(1, "A spec says what is computed")
    spec = attngen.AttentionSpec(head_dim=sizes.head_dim, dtype="bfloat16", causal=True)
    attend = attngen.compile(spec)
    print(f"   {attend!r}")

    section(2, f"Emit its forward kernel for {gpu.name}: a file to read, edit and run")
    chosen = explain_workload(spec, workload, gpu=gpu, directions=("fwd",)).choices[0]
    path = emit(chosen.spec, chosen.config)
    print(f"   {path}")
    shown(excerpt(path.read_text(), *ONLINE_SOFTMAX[chosen.config.lowering]))

    how = "measured" if on_gpu else "compiled for the A100 and checked, but not timed: no GPU here"
    section(3, f"Tune it for {workload} (B,Hq,Hkv,Sq,Sk): {how}")
    reports = attngen.tune(
        attend.spec,
        workload,
        gpu=None if on_gpu else gpu.name,
        budget=sizes.tune_seconds,
        progress=BestSoFar(),
    )
    for report in reports:
        shown(str(report))

    section(4, f"The records are kept in {database_path()}")
    attngen.reload()
    explained = explain_workload(attend.spec, workload, gpu=gpu)
    for choice in explained.choices:
        record = choice.found.record
        if record is None:
            print(f"   no record serves {choice.bucket.key}: {'; '.join(choice.found.why)}")
            return 1
        if choice.bucket.direction == "fwd":
            shown("\n".join(f"{name:13} {value}" for name, value in record.as_dict().items()))
    print("   and one like it for the backward")

    section(5, "Which kernel serves these sizes, and why")
    shown(str(explained))

    section(6, "Train a two-layer transformer with it, through torch.compile")
    if not on_gpu:
        print("   (here by the interpreter's own config: the records above are the A100's)")
    print(f"   compiling, then {sizes.steps} steps with each attention ...", flush=True)
    ours, theirs = train_beside(sizes, attend, device)
    print("   step  attngen  PyTorch's SDPA")
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if step % max(1, sizes.steps // 15) == 0 or step == sizes.steps - 1:
            print(f"   {step:4}  {a:7.4f}  {b:7.4f}")
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    agree = largest <= TOLERANCE and ours[-1] < ours[0]
    print(
        f"   largest difference {largest:.1e}, allowed {TOLERANCE}: {'ok' if agree else 'FAILED'}"
    )

    print(f"\nDone in {time.monotonic() - began:.0f} s. Kernels and records: {cache_dir()}")
    return 0 if agree else 1


if __name__ == "__main__":
    warnings.formatwarning = lambda message, *place, **more: f"   note: {message}\n"
    sys.exit(main())
