"""The tuner: finds the fastest correct config for a (spec, workload, GPU) and stores it.

`tune` is all that callers need; `kept_workers` round several calls saves starting the compiler
processes anew for each. Inside, `session` (on the GPU) and `predict` (without it) hold the
procedure; `search` proposes; `compile_pool` and `timing_client` own the child processes; `gate`
and `static_check` say no.
"""

from __future__ import annotations

from attngen.tuner.compile_pool import kept_workers
from attngen.tuner.report import TuneReport
from attngen.tuner.run import tune

__all__ = ["TuneReport", "kept_workers", "tune"]
