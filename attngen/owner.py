"""Which process runs a trial, so that another one can tell whether it still does."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path

FOREIGN_S = 3600.0
"""After so long a process that cannot be looked at is taken for gone: no trial takes an hour."""

_PROCESSES = Path("/proc")


def this_process() -> str:
    """Host, process id, when it started, and the time now."""
    pid = os.getpid()
    return f"{_host()} {pid} {_started(pid) or 0} {time.time():.0f}"


def is_gone(owner: str) -> bool:
    """Has the process that wrote this surely ended?"""
    host, pid, started, since = owner.rsplit(" ", 3)
    if host != _host() or started == "0":
        return time.time() - float(since) > FOREIGN_S
    return _started(int(pid)) != started and not _hidden(int(pid))


def _host() -> str:
    """This host, and which of its containers: each numbers its own processes."""
    container = ""
    with suppress(OSError):
        container = os.readlink(_PROCESSES / "self/ns/pid")
    return f"{socket.gethostname()}/{container}"


def _started(pid: int) -> str | None:
    """When a process started, in ticks since boot: a later one may have the same id.

    None if there is no such process, or only its exit code is left, or this system does not tell.
    """
    try:
        stat = (_PROCESSES / str(pid) / "stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in ("Z", "X") else rest[18]


def _hidden(pid: int) -> bool:
    """Is there a process of another user, that /proc does not show?"""
    if (_PROCESSES / str(pid)).exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
