"""A tuning run whose children misbehave: `python -m faults.session DATABASE COUNT`.

Prints a line for each config that was measured, after its commit, and "done" at the end.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from attngen.gpu import by_name
from attngen.records import POLICY, RecordKey
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.tuner import compile_pool, timing_client
from attngen.tuner.session import Job, Session
from attngen.workload import Workload, spec_bucket

GPU = by_name("nvidia_h200")
SPEC = AttentionSpec(head_dim=128, causal=True)
SIZES = Workload(4, 32, 8, 4096, 4096)
BUCKET = spec_bucket("fwd", SPEC, SIZES)
KEY = RecordKey(SPEC.text_key, "planted", BUCKET.key, GPU.device_key, "3.6", POLICY)


def show(event: dict[str, Any]) -> None:
    if event.get("status") == "ok":
        print(json.dumps([event["config"], event["median_us"]]), flush=True)


def job(count: int) -> Job:
    return Job(SPEC, SIZES, BUCKET, GPU, KEY, 600.0, count, exhaustive=True)


def main() -> None:
    path, count = sys.argv[1], int(sys.argv[2])
    compile_pool.MODULE = "faults.compile_worker"
    compile_pool.COMPILE_TIMEOUT_S = 0.5
    timing_client.MODULE = "faults.timing_worker"
    timing_client.RUN_TIMEOUT_S = 0.5
    with (
        Store.open(path) as store,
        timing_client.TimingClient() as timer,
        compile_pool.CompilePool(SPEC, SIZES, "fwd", GPU, jobs=2) as pool,
    ):
        timer.open(SPEC, SIZES, "fwd")
        Session(job(count), store, pool, timer, show).run()
    print("done", flush=True)


if __name__ == "__main__":
    main()
