"""Carrying records between databases and `tuning_db/*.jsonl`, as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any

from attngen.errors import StoreError
from attngen.gpu import GpuInfo
from attngen.record_checks import DATE_FORMAT
from attngen.records import Record, RecordKey, preference
from attngen.store import Store


@dataclass(frozen=True)
class ImportReport:
    """What an import did; `kept` counts lines that changed nothing."""

    added: int
    replaced: int
    kept: int
    rejected: tuple[tuple[int, str], ...]
    """(line number, reason); number 0 where the source is no text."""

    def __str__(self) -> str:
        return (
            f"{self.added} added, {self.replaced} replaced, {self.kept} kept, "
            f"{len(self.rejected)} rejected"
        )


def lines_of(records: Iterable[Record], gpu: GpuInfo | None = None) -> list[str]:
    """Records (of one GPU) as sorted JSON lines, ready for `tuning_db/<gpu>.jsonl`."""
    return sorted(
        record.to_line()
        for record in records
        if gpu is None or record.key.device_key == gpu.device_key
    )


def import_lines(store: Store, lines: Iterable[str]) -> ImportReport:
    """Merge exported lines into the store; the result does not depend on their order.

    Of two records with one key the better by `records.preference` stays. A bad line is rejected
    with its reason and stops nothing.

    Raises:
        StoreError: the store itself cannot be written.
    """
    best: dict[RecordKey, Record] = {}
    rejected = []
    good = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = Record.from_line(line, f"line {number}")
            _refuse_future(record, f"line {number}")
        except StoreError as error:
            rejected.append((number, str(error)))
            continue
        good += 1
        best[record.key] = max(record, best.get(record.key, record), key=preference)
    added, replaced = store.merge(best.values())
    return ImportReport(added, replaced, good - added - replaced, tuple(rejected))


def _refuse_future(record: Record, where: str) -> None:
    """A date to come would be the newer one for ever.

    Only what is brought in is judged so: a clock that is behind must not hide what is here.
    """
    latest = (datetime.now(timezone.utc) + timedelta(days=1)).strftime(DATE_FORMAT)
    if record.date > latest:
        raise StoreError(f"{where}: date must not be in the future, got {record.date}")


@dataclass(frozen=True)
class Contents:
    """All that a database holds, and what is wrong with each row that cannot be read."""

    winners: list[str]
    trials: list[dict[str, Any]]
    bad_winners: list[str]
    bad_trials: list[str]


def contents(store: Store) -> Contents:
    """What `merge` takes over. Trials that have not ended stay behind."""
    records, bad_winners = store.read_winners()
    trials, bad_trials = store.trial_rows()
    return Contents(lines_of(records), trials, bad_winners, bad_trials)


def merge(store: Store, source: Contents) -> tuple[ImportReport, ImportReport]:
    """Merge the winners and the trials of a database into the store, whatever the order.

    Of two trials of one config for one key the timed one stays, then a failed one, then the newer.

    Raises:
        StoreError: the store itself cannot be written.
    """
    winners = import_lines(store, source.winners)
    unreadable = tuple((0, why) for why in source.bad_winners)
    added, replaced = store.merge_trials(source.trials)
    kept = len(source.trials) - added - replaced
    damaged = tuple((0, why) for why in source.bad_trials)
    return (
        replace(winners, rejected=winners.rejected + unreadable),
        ImportReport(added, replaced, kept, damaged),
    )
