"""Carrying records between databases and `tuning_db/*.jsonl`, as lines of JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from attngen.errors import StoreError
from attngen.gpu import GpuInfo
from attngen.records import Record, RecordKey, preference
from attngen.store import Store


@dataclass(frozen=True)
class ImportReport:
    """What an import did; `kept` counts lines that changed nothing."""

    added: int
    replaced: int
    kept: int
    rejected: tuple[tuple[int, str], ...]
    """(line number, reason)."""


def export_lines(store: Store, gpu: GpuInfo | None = None) -> list[str]:
    """The winners (of one GPU) as sorted JSON lines, ready for `tuning_db/<gpu>.jsonl`."""
    return sorted(
        record.to_line()
        for record in store.winners()
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
        except StoreError as error:
            rejected.append((number, str(error)))
            continue
        good += 1
        best[record.key] = max(record, best.get(record.key, record), key=preference)
    added, replaced = store.merge(best.values())
    return ImportReport(added, replaced, good - added - replaced, tuple(rejected))
