"""Emit a kernel file and run it without attngen.

    python examples/run_emitted.py

The file imports torch and triton only. Run as a program it checks itself against PyTorch and, on a
GPU, prints its time, so `python FILE`, `ncu python FILE` and an editor are all that it takes to
study it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch

import attngen
from attngen.explain import explain_workload
from attngen.kernel import emit


def main() -> None:
    # float16: without attngen, Triton's interpreter multiplies bfloat16 wrongly (Triton 3.6).
    spec = attngen.AttentionSpec(head_dim=64, dtype="float16", causal=True)
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    for choice in explain_workload(spec, attngen.Workload(1, 16, 16, 4096, 4096)).choices:
        path = emit(choice.spec, choice.config)
        source = path.read_text()
        assert "attngen." not in source and "from attngen" not in source
        print(f"{choice.bucket.direction}: {path}, {len(source.splitlines())} lines", flush=True)
        # -I: this folder, PYTHONPATH and the user's site-packages stay out.
        subprocess.run([sys.executable, "-I", str(path)], env=environment, check=True)


if __name__ == "__main__":
    main()
