"""Two GPUs against one, and against torch's own ring: forward and backward, by wall clock.

    torchrun --nproc-per-node 2 examples/bench_context_parallel.py
    torchrun --nproc-per-node 2 examples/bench_context_parallel.py --json > two.json

Times are medians of what CUDA events say on the slowest rank. "compute" is the ring with messages
left out: what remains beyond it is not hidden. "torch" is torch.distributed.tensor.experimental's
context_parallel, by ring ("alltoall") and by all-gather. A case that hangs ends the run after
--limit seconds, and what was measured is printed all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import attngen
from attngen import distributed
from attngen.distributed import comm

DIM = 128
CASES = (("full", "contiguous"), ("causal", "zigzag"), ("causal", "contiguous"))
COLUMNS = {
    "one_ms": "one GPU",
    "ring_ms": "ring",
    "compute_ms": "computing alone",
    "ulysses_ms": "ulysses",
    "torch_ring_ms": "torch ring",
    "torch_gather_ms": "torch all-gather",
}


def median_ms(step: Callable[[], Any], rounds: int, group: Any) -> float:
    """Of the slowest rank."""
    for _ in range(2):
        step()
    times = []
    for _ in range(rounds):
        dist.barrier(group)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    return slowest.item()


@contextmanager
def watched(what: str, seconds: float, report: Callable[[], None]) -> Iterator[None]:
    """End the process if this takes too long: a rank that waits for another one waits for ever."""

    def end() -> None:
        print(f"{what} did not end in {seconds:.0f} s", file=sys.stderr, flush=True)
        report()
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def without_messages() -> Iterator[None]:
    """The same computing, on keys that are at hand."""
    post = comm.post

    def instead(messages, outgoing, incoming, group, what, wanted) -> comm.Pending:
        at_hand = next(iter(outgoing.values()), [])
        for block in incoming.values():
            for x, y in zip(block, at_hand, strict=False):
                x.copy_(y) if x.shape == y.shape else x.zero_()
        return comm.Pending([], [], group, what, wanted)

    comm.post = instead
    try:
        yield
    finally:
        comm.post = post


def measure(seqlen: int, mask: str, layout: str, options: Any, group: Any, put: Callable) -> None:
    """The times of a case, each put as it comes."""
    causal = mask == "causal"
    world, device = dist.get_world_size(group), torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    whole = [
        torch.randn(1, heads, seqlen, DIM, device=device, dtype=torch.bfloat16)
        for heads in (options.heads, options.heads_kv, options.heads_kv, options.heads)
    ]

    def both(attend: Callable[..., Tensor], tensors: list[Tensor]) -> Callable[[], None]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]

        def step() -> None:
            torch.autograd.grad(attend(*leaves), leaves, tensors[3])

        return step

    def one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngen.attention(q, k, v, causal=causal)

    put("one_ms", median_ms(both(one, whole), options.rounds, group))
    near = [distributed.shard(x, layout, dim=2, group=group) for x in whole]

    def spread(method: str) -> Callable[[], None]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            named = {"group": group, "method": method, "layout": layout, "causal": causal}
            return distributed.attention(q, k, v, **named)

        return both(attend, near)

    put("ring_ms", median_ms(spread("ring"), options.rounds, group))
    with without_messages():
        put("compute_ms", median_ms(spread("ring"), options.rounds, group))
    if options.heads % world == 0:
        put("ulysses_ms", median_ms(spread("ulysses"), options.rounds, group))
    if options.heads == options.heads_kv and layout != "contiguous" or not causal:
        for name, method in (("torch_ring_ms", "alltoall"), ("torch_gather_ms", "allgather")):
            try:
                with torch_step(whole, causal, method) as step:
                    put(name, median_ms(step, options.rounds, group))
            except Exception as error:  # an experimental API: say so, and go on
                put(f"{name}_error", f"{type(error).__name__}: {str(error)[:120]}")


@contextmanager
def torch_step(whole: list[Tensor], causal: bool, method: str) -> Iterator[Callable[[], None]]:
    """A call of torch's own context parallelism; buffers are cut by it, once."""
    from torch.distributed.tensor.experimental import _attention as theirs

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    theirs.set_rotate_method(method)
    theirs._cp_options.enable_load_balance = causal
    buffers = [x.detach().clone() for x in whole]
    dims = [2] * len(buffers)
    named = {"buffer_seq_dims": dims, "no_restore_buffers": set(buffers)}
    with theirs.context_parallel(mesh, buffers=buffers, **named):
        *leaves, do = (x.detach().requires_grad_(n < 3) for n, x in enumerate(buffers))

        def step() -> None:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
                out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
                torch.autograd.grad(out, leaves, do)

        yield step


def main() -> None:
    parser = argparse.ArgumentParser(description="Context parallelism, measured.")
    parser.add_argument("--seqlens", type=int, nargs="+", default=[32768, 65536, 131072])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--heads-kv", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each case")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    group = dist.group.WORLD
    rows: list[dict[str, Any]] = []

    def report() -> None:
        if rank == 0 and options.json:
            head = {"gpu": torch.cuda.get_device_name(), "gpus": dist.get_world_size()}
            head |= {"heads": options.heads, "heads_kv": options.heads_kv, "head_dim": DIM}
            print(json.dumps(head | {"torch": torch.__version__, "rows": rows}), flush=True)

    if rank == 0 and not options.json:
        print("| mask | layout | N | " + " | ".join(COLUMNS.values()) + " | speed-up | exposed |")
        print("|---" * (len(COLUMNS) + 5) + "|")
    for seqlen in options.seqlens:
        for mask, layout in CASES:
            row: dict[str, Any] = {"mask": mask, "layout": layout, "seqlen": seqlen}
            rows.append(row)
            with watched(f"{mask}, {layout}, {seqlen}", options.limit, report):
                measure(seqlen, mask, layout, options, group, row.__setitem__)
            torch.cuda.empty_cache()
            if rank == 0 and not options.json:
                print(_line(row), flush=True)
    report()
    dist.barrier()
    dist.destroy_process_group()


def _line(row: dict[str, Any]) -> str:
    times = [f"{row[name]:.2f}" if name in row else "" for name in COLUMNS]
    speed = f"{row['one_ms'] / row['ring_ms']:.2f}"
    exposed = f"{1 - row['compute_ms'] / row['ring_ms']:.1%}"
    words = [row["mask"], row["layout"], f"{row['seqlen'] // 1024}k", *times, speed, exposed]
    said = "".join(f"\n{name}: {x}" for name, x in row.items() if name.endswith("_error"))
    return "| " + " | ".join(words) + " |" + said


if __name__ == "__main__":
    main()
