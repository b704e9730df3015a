"""Child processes that answer JSON lines: the child's side.

Standard output carries answers only: what libraries print goes to standard error. When standard
input ends, because the parent closed it or died, the process ends too, even in the middle of a
compilation.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

GRACE_S = 2.0

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class Lines:
    """Messages from the parent, and answers to it."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._messages: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._messages.put(line)
        self._messages.put(None)
        threading.Event().wait(GRACE_S)
        _end_now()

    def send(self, answer: dict[str, Any]) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def serve(self, handle: Handler) -> None:
        """Answer every message until the parent closes the line."""
        while (line := self._messages.get()) is not None:
            self.send(handle(json.loads(line)))


def _end_now() -> None:
    """End this process and those it started (it leads a group of its own)."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
