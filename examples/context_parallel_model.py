"""From which length does a ring hide its traffic? A model of bytes against products, on paper.

    python examples/context_parallel_model.py
    torchrun --nproc-per-node 2 examples/bench_context_parallel.py --json | tee two.json
    python examples/context_parallel_model.py --check two.json

A GPU holds n = N / P rows of a sequence. In one hop of a ring it computes n rows of queries against
n keys, and sends as many keys and values on; the hop is hidden if that takes no longer than the
products. docs/context_parallel.md has the tables and what follows from them. `--check` compares
with a measurement of two GPUs.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Link:
    """Bytes per second that one GPU sends while it receives as many."""

    name: str
    rate: float


@dataclass(frozen=True)
class Machine:
    """What a GPU does in a second, of attention at head dim 128 in bfloat16, and its links."""

    forward: float = 680e12
    backward: float = 540e12
    inside: Link = Link("NVLink", 450e9)
    across: Link = Link("400 Gb/s", 50e9)
    efficiency: float = 0.8
    """Share of a link's rate that large messages reach."""


@dataclass(frozen=True)
class Heads:
    name: str
    q: int
    kv: float
    dim: int = 128


MODELS = (Heads("32 heads", 32, 32), Heads("32 heads, 8 for keys", 32, 8))


def products(heads: Heads, rows: float, keys: float, *, backward: bool, causal: bool) -> float:
    """Operations of attention; a balanced causal layout halves them."""
    whole = (10 if backward else 4) * rows * keys * heads.q * heads.dim
    return whole / 2 if causal else whole


def hop_bytes(heads: Heads, rows: float, *, backward: bool) -> float:
    """What a GPU sends in a hop: k and v in 16 bits, and backward their gradients in 32."""
    return 2 * rows * heads.kv * heads.dim * (2 + 4 * backward)


def hop_times(
    machine: Machine, heads: Heads, link: Link, rows: float, *, backward: bool, causal: bool
) -> tuple[float, float]:
    """Seconds of a hop's products and of its traffic."""
    rate = machine.backward if backward else machine.forward
    work = products(heads, rows, rows, backward=backward, causal=causal) / rate
    sent = hop_bytes(heads, rows, backward=backward) / (link.rate * machine.efficiency)
    return work, sent


def hidden_from(
    machine: Machine, heads: Heads, link: Link, *, backward: bool, causal: bool
) -> float:
    """Rows on each GPU from which a hop hides its traffic: products grow with their square, traffic
    with them."""
    work, sent = hop_times(machine, heads, link, 1.0, backward=backward, causal=causal)
    return sent / work


def usp_hidden_from(machine: Machine, heads: Heads, *, backward: bool, causal: bool) -> float:
    """The same of rings across nodes with Ulysses in them: each GPU has an eighth of the heads, and
    the rows of eight. A kv head that several GPUs need counts for each."""
    kv = max(heads.kv / GPUS_PER_NODE, 1)
    share = replace(heads, q=heads.q // GPUS_PER_NODE, kv=kv)
    rows = hidden_from(machine, share, machine.across, backward=backward, causal=causal)
    return rows / GPUS_PER_NODE


def exposed_all_to_all(machine: Machine, heads: Heads, rows: float) -> float:
    """Seconds of Ulysses' exchanges in a node, forward and backward, that nothing hides: q, k, v
    and out there, dout and three gradients back."""
    each = rows * heads.dim * 2 * (1 - 1 / GPUS_PER_NODE)
    kv = max(heads.kv, GPUS_PER_NODE)
    return each * 2 * (2 * heads.q + 2 * kv) / (machine.inside.rate * machine.efficiency)


def rounded(rows: float) -> str:
    return f"{rows:,.0f}" if rows < 1000 else f"{rows / 1000:,.1f} k"


def tables(machine: Machine) -> str:
    """The tables of docs/context_parallel.md."""
    lines = [
        "| heads | mask | link of the ring | forward hidden from | backward from |",
        "|---|---|---|---|---|",
    ]
    for heads in MODELS:
        for causal in (False, True):
            mask = "causal, balanced" if causal else "full"
            for link in (machine.inside, machine.across):
                found = [
                    rounded(hidden_from(machine, heads, link, backward=b, causal=causal))
                    for b in (False, True)
                ]
                lines.append(f"| {heads.name} | {mask} | {link.name} | {' | '.join(found)} |")
            found = [
                rounded(usp_hidden_from(machine, heads, backward=b, causal=causal))
                for b in (False, True)
            ]
            lines.append(f"| {heads.name} | {mask} | USP over 400 Gb/s | {' | '.join(found)} |")
    lines += [
        "",
        "| GPUs | method | heads | N for a hidden causal ring, backward too | share of time that "
        "1 M tokens leave exposed |",
        "|---|---|---|---|---|",
    ]
    for gpus in (8, 64, 512):
        for heads in MODELS:
            lines += [
                _row(machine, gpus, heads, usp) for usp in (False, True) if gpus > 8 or not usp
            ]
    return "\n".join(lines)


def _row(machine: Machine, gpus: int, heads: Heads, usp: bool) -> str:
    link = machine.inside if gpus <= GPUS_PER_NODE else machine.across
    if usp:
        rows = max(usp_hidden_from(machine, heads, backward=b, causal=True) for b in (False, True))
    else:
        rows = max(
            hidden_from(machine, heads, link, backward=b, causal=True) for b in (False, True)
        )
    share = exposed_share(machine, heads, gpus, 2**20, usp=usp)
    name = "USP: 8 x " + str(gpus // GPUS_PER_NODE) if usp else f"ring, {link.name}"
    return f"| {gpus} | {name} | {heads.name} | {rounded(rows * gpus)} | {share:.0%} |"


def exposed_share(machine: Machine, heads: Heads, gpus: int, seqlen: int, *, usp: bool) -> float:
    """Of the time of a causal attention, forward and backward, what waits for messages."""
    rows, hops, link = seqlen / gpus, gpus, machine.inside
    share, extra = heads, 0.0
    if gpus > GPUS_PER_NODE:
        link = machine.across
    if usp:
        extra = exposed_all_to_all(machine, heads, rows)
        kv = max(heads.kv / GPUS_PER_NODE, 1)
        share = replace(heads, q=heads.q // GPUS_PER_NODE, kv=kv)
        rows, hops = rows * GPUS_PER_NODE, gpus // GPUS_PER_NODE
    total = busy = 0.0
    for backward in (False, True):
        work, sent = hop_times(machine, share, link, rows, backward=backward, causal=True)
        busy += hops * work
        total += work + (hops - 1) * max(work, sent)
    gradients = 2 * rows * share.kv * share.dim * 4  # the last message goes home alone
    total += extra + (gradients / (link.rate * machine.efficiency) if hops > 1 else 0.0)
    return 1 - busy / total


def check(path: Path) -> None:
    """Predicted and measured times of two GPUs."""
    text = path.read_text()
    found = json.loads(text[text.index("{") :])
    print("| mask | layout | N | ring, ms | computing alone | exposed | of the model |")
    print("|---|---|---|---|---|---|---|")
    for row in found["rows"]:
        if "ring_ms" not in row or "compute_ms" not in row:
            continue
        heads = Heads("measured", found["heads"], found["heads_kv"], found["head_dim"])
        rows = row["seqlen"] / 2
        exposed = (row["ring_ms"] - row["compute_ms"]) / row["ring_ms"]
        sent = 2 * rows * heads.kv * heads.dim * 4 / (450e9 * Machine.efficiency)
        waits = sent * 1e3 / (row["compute_ms"] + sent * 1e3)
        print(
            f"| {row['mask']} | {row['layout']} | {row['seqlen']} | {row['ring_ms']:.2f} | "
            f"{row['compute_ms']:.2f} | {exposed:.1%} | {waits:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="A model of context parallelism.")
    parser.add_argument("--check", type=Path, help="JSON of examples/bench_context_parallel.py")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.check)
    else:
        print(tables(Machine()))


if __name__ == "__main__":
    main()
