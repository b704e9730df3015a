"""Decode beside cuDNN, FlashAttention 2 and 3 and FlexAttention, without the host's time.

    python examples/bench_decode.py

One query row, D 128, bfloat16. Printed are microseconds of a call in a CUDA graph, medians of
rounds that all take turns in, whose tensors no cache holds; the best peer's time over ours; and how
fast k and v were read, also as a part of what a sum over 4 GiB reaches. FlashAttention-3 is timed
if `fa3_fwd` is installed. Processes of their own compile FlexAttention for all rows first.
On a CPU a small call is only checked against PyTorch.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
import warnings
from concurrent.futures import ProcessPoolExecutor

import torch

import attngen
from attngen import AttentionSpec
from attngen.bench import DEFAULT, OURS, bench, by_graph
from attngen.peers import Peer, all_peers
from attngen.workload import Workload

SPEC = AttentionSpec(head_dim=128)
ROWS = [
    Workload(batch, heads, heads_kv, 1, keys)
    for batch, keys, heads, heads_kv in (
        (1, 65536, 32, 8),
        (8, 16384, 32, 8),
        (64, 4096, 32, 8),
        (16, 16384, 32, 32),
        (1, 8192, 32, 8),
        (32, 1024, 32, 8),
        (128, 512, 32, 8),
        (8, 8192, 64, 8),
        (16, 16384, 32, 1),
    )
]
PEERS = ("sdpa flash", "sdpa cudnn", "flex", "fa3 kvcache")


def inputs(row: Workload, device: str) -> list[torch.Tensor]:
    shapes = ((row.num_heads_q, row.seqlen_q), *[(row.num_heads_kv, row.seqlen_k)] * 2)
    return [
        torch.randn(row.batch, *shape, SPEC.head_dim, device=device).bfloat16() for shape in shapes
    ]


def compile_flex(row: Workload) -> str:
    """Fill inductor's cache for a row; why that failed, if it did."""
    warnings.simplefilter("ignore")
    (flex,) = chosen("flex")
    try:
        flex.make(SPEC, row)(*inputs(row, "cuda"))
    except Exception as error:  # a peer may fail in any way; the others are still timed
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def chosen(*names: str) -> list[Peer]:
    return [peer for peer in all_peers() if peer.name in names]


def read_rate() -> float:
    """Bytes a second of a sum over 4 GiB."""
    x = torch.empty(2**29, device="cuda", dtype=torch.int64)
    return 2**32 / statistics.median(by_graph(x.sum) for _ in range(3)) * 1e3


def compare(rounds: int) -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a process each is enough
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(ROWS), os.cpu_count() or 1), spawned) as pool:
        for row, failed in zip(ROWS, pool.map(compile_flex, ROWS), strict=True):
            if failed:
                print(f"FlexAttention, {row}: {failed}")
    rate = read_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, read {rate / 1e12:.2f} TB/s")
    names = (OURS, DEFAULT, *PEERS)
    print(" | ".join(("batch, keys, Hq/Hkv", *names, "ratio", "TB/s", "of read")))
    ratios = []
    for row in ROWS:
        named = {"directions": ("fwd",), "rounds": rounds, "timer": by_graph}
        (found,) = bench(SPEC, row, chosen(*PEERS), **named)
        us = {each.name: 1e3 * each.ms for each in found.timed if each.ms is not None}
        ratios.append(min(us[name] for name in PEERS if name in us) / us[OURS])
        size = 4 * row.batch * row.num_heads_kv * row.seqlen_k * SPEC.head_dim
        speed = size / us[OURS] * 1e6
        sizes = f"{row.batch}, {row.seqlen_k}, {row.num_heads_q}/{row.num_heads_kv}"
        times = (f"{us[name]:.1f}" if name in us else "-" for name in names)
        shown = (f"{ratios[-1]:.3f}", f"{speed / 1e12:.2f}", f"{speed / rate:.2f}")
        print(" | ".join((sizes, *times, *shown)), flush=True)
        torch.cuda.empty_cache()
    mean = math.exp(statistics.mean(map(math.log, ratios)))
    print(f"best peer's time over ours: geometric mean {mean:.3f}, least {min(ratios):.3f}")


def check() -> None:
    """What stands in for a comparison on a CPU."""
    q, k, v = inputs(Workload(2, 8, 2, 1, 300), "cpu")
    out = attngen.attention(q, k, v)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.float() for x in (q, k, v)), enable_gqa=True
    )
    print(f"no GPU to time; largest difference {(out - want).abs().max().item():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")  # the peers'
    if torch.cuda.is_available():
        compare(rounds)
    else:
        check()


if __name__ == "__main__":
    main()
