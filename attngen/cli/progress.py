"""Progress on stderr: a live bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress

Event = dict[str, Any]
LINE_EVERY_S = 5.0


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """Gives a function that shows what is being done now."""
    if not sys.stderr.isatty():
        yield lambda message: click.echo(message, err=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda message: status.update(message)


@contextmanager
def tuning_progress(budget: float) -> Iterator[Callable[[Event], None]]:
    """Gives a function that shows the tuner's events (`tune(progress=)` says what they hold)."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield _Bar(shown, budget)


class _Lines:
    """A line for each new bucket and each winner, and else one every few seconds."""

    def __init__(self) -> None:
        self._bucket = ""
        self._last = 0.0

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        is_new = event["bucket"] != self._bucket or event["event"] != "trial"
        if is_new or now - self._last >= LINE_EVERY_S:
            self._bucket, self._last = event["bucket"], now
            click.echo(describe(event), err=True)


class _Bar:
    """A bar for each bucket, as long as its budget of seconds."""

    def __init__(self, shown: Progress, budget: float) -> None:
        self._shown, self._budget = shown, budget
        self._bucket = ""
        self._began = 0.0
        self._task = shown.add_task("starting", total=None)

    def __call__(self, event: Event) -> None:
        if event["bucket"] != self._bucket:
            self._bucket, self._began = event["bucket"], time.monotonic()
            self._shown.reset(self._task, total=self._budget)
        self._shown.update(
            self._task,
            completed=min(self._budget, time.monotonic() - self._began),
            description=describe(event),
        )


def describe(event: Event) -> str:
    """`fwd-q4096-...: tried 12, measured 8, best 431.2 us; last ok`, or the winner."""
    if event["event"] != "trial":
        config = ",".join(f"{name}={value}" for name, value in event.get("config", {}).items())
        return f"{event['bucket']}: {event['event']} {config}"
    best = event.get("best_us")
    far = f"tried {event['tried']}, measured {event['measured']}"
    best_so_far = "" if best is None else f", best {best:.1f} us"
    reason = (event.get("reason") or "").partition("\n")[0]
    last = f"{event['status']} ({reason})" if reason else event["status"]
    return f"{event['bucket']}: {far}{best_so_far}; last {last}"
