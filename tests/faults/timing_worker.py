"""Stands in for attngen.tuner.timing_worker."""

from __future__ import annotations

import time
from typing import Any

from faults.table import median_us, misbehave, timing_fault

from attngen.gpu import by_name
from attngen.tuner.child import Lines

GPU = by_name("nvidia_h200")
HELLO = {
    "gpu": GPU.as_dict(),
    "provenance": {
        "gpu": GPU.name,
        "driver": None,
        "cuda": None,
        "torch": None,
        "triton": "3.6.0",
    },
}


def timed(config: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.02)  # so that a kill may come in the middle
    return {"median_us": median_us(config), "spread_us": 1.0, "stopped": False, "error": 0.001}


def answer(message: dict[str, Any]) -> dict[str, Any]:
    action = message["do"]
    if action == "hello":
        return HELLO
    if action == "measure":
        fault = timing_fault(message["config"])
        if fault == "wrong":
            return {"status": "failed", "kind": "wrong result", "reason": "planted wrong numbers"}
        if fault == "lost context":
            return {"status": "crashed", "kind": "crashed", "reason": "planted illegal access"}
        if fault is not None:
            misbehave(fault)
        return timed(message["config"])
    if action == "compare":
        timings = [timed(config) for config in message["configs"]]
        return {"timings": timings, "clocks_mhz": [1980, 1965]}
    return {"error": 0.001}  # open, load, gate, verify


if __name__ == "__main__":
    Lines().serve(answer)
