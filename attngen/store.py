"""The user's tuning database: SQLite through sqlite-utils.

Two tables: `trials`, one row per (key, config), committed one by one so that a killed tuner loses
nothing; and `winners`, one record per key. Whoever opens it to write gets a StoreError when
something is wrong with the file; whoever opens it to read gets one warning and an empty store,
because attention must run anyway.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlite_utils import Database

from attngen.config import KernelConfig
from attngen.errors import DamagedStoreError, StoreError
from attngen.owner import this_process
from attngen.paths import database_path
from attngen.record_checks import Origin, Status
from attngen.records import Record, RecordKey, now, preference, warn_once
from attngen.schema import (
    PROC_MOUNTS,
    empty_database,
    explained,
    immediate,
    open_reader,
    open_writer,
    refuse_place,
)
from attngen.trials import (
    MAX_CRASHES,
    Outcome,
    Trial,
    best_first,
    is_timed,
    quarantine_reason,
    trial_of,
    worth,
)

MAX_REASON = 2000

_JSON_COLUMNS = ("config", "clocks_mhz", "provenance")


class Store:
    """The tuning database. Use `Store.open`, as a context manager; threads may share one."""

    def __init__(self, path: Path, db: Database, trouble: str | None, readonly: bool) -> None:
        self.path = path
        self.trouble = trouble
        """Why a read-only store is empty although its file exists; None if all is well."""
        self.readonly = readonly
        self._db = db
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls, path: Path | str | None = None, readonly: bool = False, *, mounts: Path = PROC_MOUNTS
    ) -> Store:
        """Open `path` (default: `paths.database_path()`).

        To write, the file is created or migrated as needed. With `readonly=True` nothing on disk
        changes and nothing raises: a missing file reads as empty, and one that cannot be used
        too, after one warning (`trouble` says why).

        A damaged file in the cache folder is renamed, never deleted, and a new one begun: a warning
        says so. One that was named (here or by ATTNGEN_DB) is refused.

        Raises:
            StoreError: opened to write, and the file is damaged, locked, of a newer schema, on a
                network file system, or not writable; says what to do.
        """
        is_named = path is not None or "ATTNGEN_DB" in os.environ
        path = Path(path) if path is not None else database_path()
        if not readonly:
            try:
                return cls(path, open_writer(path, mounts), None, False)
            except DamagedStoreError as error:
                if is_named:
                    raise
                what, _, _ = str(error).partition(";")
                warn_once(f"{what}; it was renamed to {_set_aside(path)}, and a new one begun")
            return cls(path, open_writer(path, mounts), None, False)
        try:
            with explained(path):
                refuse_place(path)
                is_there = path.exists()
            if is_there:
                return cls(path, open_reader(path, mounts), None, True)
            trouble = None
        except (StoreError, OSError) as error:
            trouble = str(error)
            warn_once(f"{trouble}; going on without it")
        return cls(path, empty_database(), trouble, True)

    @classmethod
    def in_memory(cls, records: Iterable[Record]) -> Store:
        """A store of these winners, in no file."""
        store = cls(Path(":memory:"), empty_database(), None, False)
        store.merge(records)
        return store

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        with self._lock, explained(self.path):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self.readonly:
            raise StoreError(
                f"tuning database {self.path} is open for reading only; open it with "
                "Store.open(path)"
            )
        with self._lock, explained(self.path), immediate(self._db.conn):
            yield

    def begin_trial(
        self, key: RecordKey, config: KernelConfig, workload: str | None = None
    ) -> Trial:
        """Mark a config as running, and commit. Run it only if the returned status is "running".

        The row of one that was measured before keeps its time until there is a new verdict. A row
        that a process left when it died is one crash, and `MAX_CRASHES` of them quarantine the
        config for this key; one that another process runs now is none.
        """
        with self._writing():
            old = self._trial(key, config)
            if old is not None and old.status == "quarantined":
                return old
            died = old is not None and old.was_left
            crashes = (old.crashes if old else 0) + died
            reason = "the process ended while this config ran" if died else None
            if crashes >= MAX_CRASHES:
                reason = quarantine_reason(crashes, reason)
                return self._put_trial(key, config, "quarantined", reason=reason, crashes=crashes)
            owner = this_process()
            if old is not None and is_timed(old):
                self._update_trial(key, config, owner=owner, crashes=crashes)
                return replace(old, status="running", owner=owner, crashes=crashes)
            return self._put_trial(
                key,
                config,
                "running",
                reason=reason,
                crashes=crashes,
                workload=workload,
                owner=owner,
            )

    def finish_trial(
        self,
        key: RecordKey,
        config: KernelConfig,
        status: Outcome,
        *,
        median_us: float | None = None,
        spread_us: float | None = None,
        reason: str | None = None,
        origin: Origin = "measured",
        workload: str | None = None,
    ) -> Trial:
        """Record how a trial ended, and commit; one that never began (skipped) may end too.

        Returns the stored row: a "crashed" one may have become "quarantined", and a quarantined
        config stays so. A prediction changes nothing that was measured, and a skip no time.

        Raises:
            StoreError: a measured "ok" without a time above 0.
        """
        if status == "ok" and origin == "measured" and not (median_us and 0 < median_us < math.inf):
            raise StoreError(
                f"median_us of a measured trial must be a time above 0, got {median_us!r}; "
                'finish it as "failed" with a reason'
            )
        with self._writing():
            old = self._trial(key, config)
            if old is not None and origin == "predicted" and old.origin == "measured":
                return old
            if old is not None and status == "skipped" and is_timed(old):
                self._update_trial(key, config, owner=None)
                return replace(old, owner=None)
            crashes = (old.crashes if old else 0) + (status == "crashed")
            stored: Status = status
            if old is not None and old.status == "quarantined":
                stored, reason = old.status, old.reason
            elif crashes >= MAX_CRASHES and status == "crashed":
                stored, reason = "quarantined", quarantine_reason(crashes, reason)
            return self._put_trial(
                key,
                config,
                stored,
                median_us=median_us,
                spread_us=spread_us,
                reason=reason,
                crashes=crashes,
                origin=origin,
                workload=workload,
            )

    def trial_keys(self) -> list[RecordKey]:
        """The keys that were tuned, with a winner or without one."""
        names = ", ".join(field.name for field in fields(RecordKey))
        with self._reading():
            rows = self._db.query(f"select distinct {names} from trials order by text_key, bucket")
            return [RecordKey(**row) for row in rows]

    def trials(self, key: RecordKey) -> list[Trial]:
        """Every config tried for a key, fastest first, untimed ones last."""
        return self._trials(key, "median_us is null, median_us, config_key")

    def history(self, key: RecordKey) -> list[Trial]:
        """Every config tried for a key, in the order in which they were first taken up."""
        return self._trials(key, "rowid")  # an upsert keeps it, a date is that of the last change

    def _trials(self, key: RecordKey, order: str) -> list[Trial]:
        with self._reading():
            rows = self._db["trials"].rows_where("key_hash = ?", [key.digest], order_by=order)
            return list(self._readable(rows))

    def _readable(self, rows: Iterable[dict[str, Any]]) -> Iterator[Trial]:
        """The trials of rows; a damaged one is skipped with a warning."""
        for row in rows:
            try:
                yield trial_of(row)
            except StoreError as error:
                warn_once(f"{self.path}: {error}; it is skipped")

    def top(self, key: RecordKey, n: int = 16, workload: str | None = None) -> list[Trial]:
        """The `n` fastest configs that ran and were correct; those timed on `workload` first."""
        return best_first(filter(is_timed, self.trials(key)), workload)[:n]

    def top_of_other_versions(
        self, key: RecordKey, n: int = 16, workload: str | None = None
    ) -> list[Trial]:
        """The `n` fastest that ran under another Triton or other templates, all else equal."""
        same = ("text_key", "bucket", "device_key", "policy")
        where = " and ".join(f"{name} = ?" for name in same)
        with self._reading():
            rows = self._db["trials"].rows_where(
                f"{where} and key_hash != ? and status = 'ok' and median_us is not null",
                [*(getattr(key, name) for name in same), key.digest],
            )
            best: dict[str, Trial] = {}
            for trial in best_first(self._readable(rows), workload):
                best.setdefault(trial.config_key, trial)
            return list(best.values())[:n]

    def _trial(self, key: RecordKey, config: KernelConfig) -> Trial | None:
        where = "key_hash = ? and config_key = ?"
        rows = self._db["trials"].rows_where(where, [key.digest, config.key])
        return next(self._readable(rows), None)

    def _put_trial(
        self, key: RecordKey, config: KernelConfig, status: Status, **named: Any
    ) -> Trial:
        trial = Trial(
            **{
                "config": config.as_dict(),
                "config_key": config.key,
                "status": status,
                "median_us": None,
                "spread_us": None,
                "origin": "measured",
                "date": now(),
            }
            | named
        )
        row = asdict(trial) | asdict(key) | {"key_hash": key.digest}
        row["config"] = json.dumps(trial.config)
        if trial.reason is not None:
            row["reason"] = trial.reason.encode(errors="replace").decode()[:MAX_REASON]
        self._db["trials"].upsert(row, pk=("key_hash", "config_key"))
        return trial

    def _update_trial(self, key: RecordKey, config: KernelConfig, **named: Any) -> None:
        self._db["trials"].update((key.digest, config.key), named)

    def record_winner(self, record: Record) -> bool:
        """Store a winner and say whether it was: a predicted one never replaces a measured one."""
        with self._writing():
            where = "key_hash = ? and origin = 'measured'"
            measured = self._db["winners"].count_where(where, [record.key.digest])
            if measured and record.origin == "predicted":
                return False
            self._put_winner(record)
            return True

    def replace_winner(self, record: Record, held: Record | None) -> bool:
        """Store a measured winner in place of `held`, which it was compared with.

        Returns False, and stores nothing, if another process has stored another one meanwhile.
        """
        with self._writing():
            if self.measured_winner(record.key) != held:
                return False
            self._put_winner(record)
            return True

    def measured_winner(self, key: RecordKey) -> Record | None:
        """The winner that is held for a key, if it was measured."""
        found = (r for r in self.winners(key.text_key) if r.key == key and r.origin == "measured")
        return next(found, None)

    def winners(self, text_key: str | None = None) -> list[Record]:
        """Every winner, or those of one spec; an unreadable row is skipped with a warning."""
        found, unreadable = self.read_winners(text_key)
        for why in unreadable:
            warn_once(f"{why}; it is skipped, tune this spec again")
        return found

    def read_winners(self, text_key: str | None = None) -> tuple[list[Record], list[str]]:
        """Every winner, or those of one spec, and what is wrong with each unreadable row."""
        with self._reading():
            where = ("text_key = ?", [text_key]) if text_key is not None else (None, None)
            rows = list(self._db["winners"].rows_where(*where, order_by="key_hash"))
        found, unreadable = [], []
        for row in rows:
            try:
                found.append(_record_of(row, f"{self.path}: winner {row['key_hash']}"))
            except StoreError as error:
                unreadable.append(str(error))
        return found, unreadable

    def merge(self, records: Iterable[Record]) -> tuple[int, int]:
        """Keep the preferred record of each key (`records.preference`), in one transaction.

        Returns how many were added and how many replaced one.
        """
        added = replaced = 0
        with self._writing():
            held = {record.key: record for record in self.winners()}
            for record in records:
                old = held.get(record.key)
                if old is None or preference(record) > preference(old):
                    self._put_winner(record)
                    held[record.key] = record
                    added, replaced = added + (old is None), replaced + (old is not None)
        return added, replaced

    def trial_rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The rows of all trials that have ended, and what is wrong with each damaged one."""
        with self._reading():
            rows = list(self._db["trials"].rows_where("status is not 'running'"))
        good, damaged = [], []
        for row in rows:
            try:
                trial_of(row)
                good.append(row)
            except StoreError as error:
                damaged.append(f"{self.path}: {error}")
        return good, damaged

    def merge_trials(self, rows: Iterable[dict[str, Any]]) -> tuple[int, int]:
        """Keep the better row of each key and config (`worth`), in one transaction.

        Returns how many were added and how many replaced one.
        """
        added = replaced = 0
        with self._writing():
            table = self._db["trials"]
            held = {(row["key_hash"], row["config_key"]): row for row in table.rows}
            for row in rows:
                at = row["key_hash"], row["config_key"]
                old = held.get(at)
                if old is None or worth(row) > worth(old):
                    table.upsert(row | {"owner": None}, pk=("key_hash", "config_key"))
                    held[at] = row
                    added, replaced = added + (old is None), replaced + (old is not None)
        return added, replaced

    def _put_winner(self, record: Record) -> None:
        row = record.as_dict() | {"key_hash": record.key.digest}
        row |= {name: json.dumps(row[name], sort_keys=True) for name in _JSON_COLUMNS}
        self._db["winners"].upsert(row, pk="key_hash")


def _set_aside(path: Path) -> Path:
    """Rename a damaged database, with its WAL files, and return its new name."""
    aside = Path(f"{path}.damaged-{re.sub(r'[^0-9]', '', now())}-{os.getpid()}")
    with explained(path):
        path.rename(aside)
        for suffix in ("-wal", "-shm"):
            if (beside := Path(f"{path}{suffix}")).exists():
                beside.rename(f"{aside}{suffix}")
    return aside


def _record_of(row: dict[str, Any], where: str) -> Record:
    named = {name: value for name, value in row.items() if name != "key_hash"}
    try:
        named |= {name: json.loads(row[name]) for name in _JSON_COLUMNS}
    except (TypeError, ValueError) as error:
        raise StoreError(f"{where}: not JSON ({error})") from None
    return Record.from_dict(named, where)
