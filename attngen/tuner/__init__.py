"""The tuner: finds the fastest correct config for a (spec, workload, GPU) and stores it.

`tune` is all that callers need; `kept_workers` round several calls saves starting the compiler
processes anew for each. Inside, `session` (on the GPU) and `predict` (without it) hold the
procedure; `search` proposes; `compile_pool` and `timing_client` own the child processes; `gate`
and `static_check` say no.

The names are looked up when they are asked for: a child process imports what it needs alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attngen.tuner.compile_pool import kept_workers
    from attngen.tuner.report import TuneReport
    from attngen.tuner.run import tune

__all__ = ["TuneReport", "kept_workers", "tune"]

_HOME = {"TuneReport": "report", "kept_workers": "compile_pool", "tune": "run"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
