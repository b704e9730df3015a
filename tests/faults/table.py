"""What each config does to the worker that takes it, by its name alone. No torch, no GPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import zlib
from typing import Any, NoReturn

COMPILING = {0: "hang", 1: "segfault", 2: "error"}
TIMING = {0: "hang", 1: "segfault", 2: "out of memory", 3: "wrong", 4: "lost context"}


def _code(config: dict[str, Any], salt: str) -> int:
    return zlib.crc32((salt + json.dumps(config, sort_keys=True)).encode())


def compile_fault(config: dict[str, Any]) -> str | None:
    return COMPILING.get(_code(config, "compile") % 16)


def timing_fault(config: dict[str, Any]) -> str | None:
    return TIMING.get(_code(config, "time") % 20)


def median_us(config: dict[str, Any]) -> float:
    """All within a factor of two, so that no config is given up as hopeless."""
    return 100.0 + _code(config, "speed") % 997 / 10


def misbehave(fault: str) -> NoReturn:
    """End, or never return."""
    if fault == "hang":
        subprocess.Popen(["sleep", "600"])  # as a stuck ptxas: it must end, too
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGSEGV if fault == "segfault" else signal.SIGKILL)
    raise AssertionError("a signal ended this process")
