"""Tune a spec for a workload, keep the record, and read the kernel it names.

    python examples/tune_and_read_kernel.py

On a CUDA GPU the configs are timed. Without one, the tuner does everything but the timing for an
A100: it compiles candidates, checks one in the interpreter, and stores a record whose origin is
"predicted". The record goes to the usual database, so that a second run finds it.
"""

from __future__ import annotations

from typing import Any

import torch

import attngen
from attngen.explain import explain_workload
from attngen.gpu import by_name, current
from attngen.kernel import emit
from attngen.paths import database_path


def show(event: dict[str, Any]) -> None:
    """One line for each config that the tuner has taken up."""
    print("  " + ", ".join(f"{name} {value}" for name, value in event.items()))


def main() -> None:
    on_gpu = torch.cuda.is_available()
    spec = attngen.AttentionSpec(head_dim=64, dtype="bfloat16", causal=True, window=(255, 0))
    workload = attngen.Workload(
        batch=2, num_heads_q=16, num_heads_kv=4, seqlen_q=2048, seqlen_k=2048
    )
    (report,) = attngen.tune(
        spec,
        workload,
        direction="fwd",
        gpu=None if on_gpu else "nvidia_a100",
        budget=15,
        progress=show,
    )
    print(report)
    print(f"record kept in {database_path()}:\n  {report.record.to_line()}")

    gpu = current() if on_gpu else by_name("nvidia_a100")
    (choice,) = explain_workload(spec, workload, gpu=gpu, directions=("fwd",)).choices
    path = emit(choice.spec, choice.config)
    lines = path.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("def visible_keys"))
    print(f"{path}, from line {begin + 1}:")
    print("\n".join(lines[begin : begin + 24]))


if __name__ == "__main__":
    main()
