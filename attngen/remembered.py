"""What a process remembers of its calls, until configs are read anew."""

from __future__ import annotations

import threading
from typing import TypeVar

from attngen.resolve import on_reset

K = TypeVar("K")
V = TypeVar("V")


class Remembered(dict[K, V]):
    """At most so many entries, of which the older half goes first; none after
    `attngen.reload()`."""

    __slots__ = ("_lock", "most", "resets")

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.resets = 0
        """How often everything was forgotten."""
        self._lock = threading.Lock()
        on_reset(self._forget)

    def _forget(self) -> None:
        with self._lock:
            self.resets += 1
            self.clear()

    def keep(self, at: K, value: V, resets: int) -> None:
        """Keep a value, unless all was forgotten since `resets`, when work on it began."""
        with self._lock:
            if resets != self.resets:
                return
            if len(self) >= self.most:
                for oldest in list(self)[: self.most // 2]:
                    del self[oldest]
            self[at] = value
