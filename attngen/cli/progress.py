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
def tuning_progress() -> Iterator[Callable[[Event], None]]:
    """Gives a function that shows the tuner's events.

    An event says its `stage`; `done` and `total` where they are known; and whatever else is worth
    a look, as `best_us`.
    """
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        yield _Bar(shown)


class _Lines:
    """A line for each new stage, and within a stage one every few seconds."""

    def __init__(self) -> None:
        self._stage: Any = None
        self._last = 0.0

    def __call__(self, event: Event) -> None:
        now, stage = time.monotonic(), event.get("stage")
        if stage != self._stage or now - self._last >= LINE_EVERY_S:
            self._stage, self._last = stage, now
            click.echo(describe(event), err=True)


class _Bar:
    """One bar, that says what it is at."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._task = shown.add_task("starting", total=None)

    def __call__(self, event: Event) -> None:
        self._shown.update(
            self._task,
            description=describe(event),
            completed=event.get("done", 0),
            total=event.get("total"),
        )


def describe(event: Event) -> str:
    """`timing 12/96  best_us 431.2`: the stage, how far, and the rest as it comes."""
    rest = {name: value for name, value in event.items() if name not in ("stage", "done", "total")}
    far = f" {event['done']}/{event.get('total', '?')}" if "done" in event else ""
    words = [f"{name} {_short(value)}" for name, value in rest.items() if value is not None]
    return "  ".join([f"{event.get('stage', 'tuning')}{far}", *words])


def _short(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
