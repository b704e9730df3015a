"""What a trial is: a config that was tried, as a row, and which of two rows is worth more."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from attngen.errors import StoreError
from attngen.owner import is_gone
from attngen.record_checks import Origin, Status, trial_problem

Outcome = Literal["ok", "failed", "crashed", "skipped"]

MAX_CRASHES = 2


@dataclass(frozen=True)
class Trial:
    """One config tried for one key."""

    config: dict[str, Any]
    config_key: str
    status: Status
    median_us: float | None
    spread_us: float | None
    reason: str | None
    """Why it failed, was skipped or quarantined."""
    crashes: int
    origin: Origin
    date: str
    workload: str | None = None
    """Which of the bucket's sizes it was timed on; None where that was not stored."""
    owner: str | None = None
    """The process that runs it, as `owner.this_process` writes it; None if none does."""

    @property
    def was_left(self) -> bool:
        """Did the process that ran it end without a verdict?"""
        return self.status == "running" if self.owner is None else is_gone(self.owner)


def quarantine_reason(crashes: int, last: str | None) -> str:
    return f"crashed {crashes} times; last: {last or 'no reason given'}"


def is_timed(trial: Trial) -> bool:
    return trial.status == "ok" and trial.median_us is not None


def best_first(trials: Iterable[Trial], workload: str | None) -> list[Trial]:
    """Those timed on `workload` first. A bucket's sizes differ up to 8-fold, so that times of
    different ones are compared as multiples of the best of their own."""
    known = list(trials)
    best: dict[str | None, float] = {}
    for trial in known:
        time = trial.median_us or 0.0
        best[trial.workload] = min(time, best.get(trial.workload, time))

    def rank(trial: Trial) -> tuple[bool, float, str]:
        ratio = (trial.median_us or 0.0) / best[trial.workload]
        return (trial.workload != workload, ratio, trial.config_key)

    return sorted(known, key=rank)


def trial_of(row: dict[str, Any]) -> Trial:
    """The trial in a row.

    Raises:
        StoreError: the row is damaged.
    """
    where = f"trial {row['key_hash']} {row['config_key']}"
    try:
        parsed = row | {"config": json.loads(row["config"])}
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"{where}: config is not JSON ({error})") from None
    if problem := trial_problem(parsed):
        raise StoreError(f"{where}: {problem}")
    return Trial(**{field.name: parsed[field.name] for field in fields(Trial)})


def worth(row: dict[str, Any]) -> tuple[bool, bool, bool, str, str]:
    """Greater is better, and no two different rows are equal, so that merging is a maximum.

    A readable row before a damaged one, a time before a failure before the rest, then the later.
    """
    try:
        trial_of(row)
    except StoreError:
        return (False, False, False, "", repr(row))
    timed = row["status"] == "ok" and row["median_us"] is not None
    return (True, timed, row["status"] == "failed", row["date"], json.dumps(row, sort_keys=True))
