"""A tuning run whose children misbehave: `python -m faults.session DATABASE COUNT [STORAGE]`.

Prints a line for each config that was measured, after its commit, and "done" at the end.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from attngen.gpu import by_name
from attngen.lowering import SWITCH
from attngen.records import POLICY, RecordKey
from attngen.search_space import axes
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.tuner import compile_pool, timing_client
from attngen.tuner.session import Job, Session
from attngen.tuner.timing_client import TimingClient
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


def shared(
    count: int, url: str, store: Store, pool: compile_pool.CompilePool, timer: TimingClient
) -> None:
    """Share the search, by a clock that runs faster."""
    from attngen.tuner import shared_study, storage
    from attngen.tuner.shared_session import SharedSession

    storage.LOCK_S = 3
    shared_study.BEAT_S, shared_study.SILENT_S, shared_study.POLL_S = 0.5, 4.0, 0.1
    with storage.opened(url) as opened:
        study = shared_study.SharedStudy(opened, url, KEY, SIZES, axes(SPEC, BUCKET, GPU))
        SharedSession(job(count), store, pool, timer, show, study).run()


def main() -> None:
    os.environ[SWITCH] = "triton"  # faults are planned for these configs
    path, count = sys.argv[1], int(sys.argv[2])
    url = sys.argv[3] if len(sys.argv) > 3 else None
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
        if url is None:
            Session(job(count), store, pool, timer, show).run()
        else:
            shared(count, url, store, pool, timer)
    print("done", flush=True)


if __name__ == "__main__":
    main()
