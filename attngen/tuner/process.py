"""Child processes that answer JSON lines: the parent's side.

Each child is `python -m attngen.tuner.<module>` in a process group of its own, so that killing it
also ends a compiler it started, and so that Ctrl-C reaches the parent alone. Children end by
themselves when the parent does, because their stdin closes (`attngen.tuner.child`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MAX_STDERR = 2000
CLOSE_TIMEOUT_S = 5.0


class WorkerLostError(Exception):
    """A child died, hung or broke the protocol; it is gone, and the message says why."""

    def __init__(self, message: str, was_killed: bool = False) -> None:
        super().__init__(message)
        self.was_killed = was_killed
        """By a signal from outside: for want of memory, or by a person."""


class Worker:
    """One child process. Not for several threads at once."""

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str | None] | None = None
    ) -> None:
        self.module = module
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=_environment(environment or {}),
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put(b"")

    def ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a message and wait for the answer.

        Raises:
            WorkerLostError: no answer in time, or the child ended.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # the pipe is broken, or was closed by `kill`
            raise self._lost() from None
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next answer."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            raise WorkerLostError(f"no answer within {timeout_s:.0f} s; killed") from None
        except BaseException:  # Ctrl-C: the answer that is due would be taken for the next one
            self.kill()
            raise
        if not line:
            raise self._lost()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lost(self) -> WorkerLostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        code, words = self._process.poll(), self._last_words()
        self.kill()
        was_killed = code == -signal.SIGKILL
        return WorkerLostError(f"{self.module} ended with exit code {code}: {words}", was_killed)

    def _last_words(self) -> str:
        if self._stderr.closed:
            return "killed"
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - MAX_STDERR))
        return self._stderr.read().decode(errors="replace").strip() or "no message"

    def kill(self) -> None:
        """End the child and whatever it started, at once. Any thread may; twice does no harm."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(CLOSE_TIMEOUT_S)
        self._close_stdin()
        self._stderr.close()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was not flushed cannot be
            self._process.stdin.close()

    def close(self) -> None:
        """Let the child end by itself; kill it if it does not."""
        self._close_stdin()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        self.kill()


def _environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment, changed, in which the child finds this very attngen."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    found = dict(os.environ) | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    for name, value in changes.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value
    return found
