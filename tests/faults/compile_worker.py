"""Stands in for attngen.tuner.compile_worker."""

from __future__ import annotations

from typing import Any

from faults.table import compile_fault, misbehave

from attngen.tuner.child import Lines

FACTS = {
    "kernel": "attn_fwd",
    "registers": 128,
    "stack_bytes": 0,
    "shared_bytes": 65536,
    "tensor_memory": 0,
    "trap": False,
    "serialised_wgmma": False,
    "compile_s": 0.0,
}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    if "hello" in message:
        return {}
    fault = compile_fault(message["config"])
    if fault == "error":
        return {"error": "a planted compile error", "kernel": "attn_fwd"}
    if fault is not None:
        misbehave(fault)
    return {"kernels": [FACTS]}


if __name__ == "__main__":
    Lines().serve(answer)
