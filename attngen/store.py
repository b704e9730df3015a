"""The user's tuning database: SQLite through sqlite-utils, and the look-up over it.

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
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

from sqlite_utils import Database, Migrations

from attngen.config import KernelConfig
from attngen.errors import StoreError
from attngen.gpu import GpuInfo
from attngen.paths import database_path
from attngen.records import (
    STEP_AXES,
    Origin,
    Record,
    RecordKey,
    Tier,
    differences,
    now,
    preference,
    shipped,
    tier_of,
    warn_once,
)
from attngen.workload import Bucket

Status = Literal["ok", "failed", "running", "crashed", "skipped", "quarantined"]
Outcome = Literal["ok", "failed", "crashed", "skipped"]

WRITE_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 2.0  # a look-up holds up a model: better no record than a long wait
MAX_CRASHES = 2
MAX_REASON = 2000

PROC_MOUNTS = Path("/proc/mounts")
NETWORK_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "fuse.sshfs", "lustre", "gpfs")
)

# What to do about an SQLite or operating system message, by a piece of its text.
_NEXT_STEPS = (
    ("not a database", "is no SQLite database", "set it aside with Store.set_aside(path)"),
    ("malformed", "is damaged", "set it aside with Store.set_aside(path) and tune again"),
    ("locked", "is locked by another process", "wait for it, or set ATTNGEN_DB to another file"),
    ("full", "cannot be written", "free some space, then run again"),
    ("No space left", "cannot be written", "free some space, then run again"),
    ("readonly", "cannot be written", "set ATTNGEN_DB to a file you may write"),
)


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


@dataclass(frozen=True)
class ImportReport:
    """What an import did; `kept` counts lines that changed nothing."""

    added: int
    replaced: int
    kept: int
    rejected: tuple[tuple[int, str], ...]
    """(line number, reason)."""


# ---- schema ---------------------------------------------------------------------------------

_KEY_COLUMNS: dict[str, type] = {field.name: str for field in fields(RecordKey)}


def _create_trials(db: Database) -> None:
    columns = {"key_hash": str, "config_key": str, **_KEY_COLUMNS, "config": str, "status": str}
    columns |= {"median_us": float, "spread_us": float, "reason": str, "crashes": int}
    columns |= {"origin": str, "date": str}
    db["trials"].create(columns, pk=("key_hash", "config_key"))


def _create_winners(db: Database) -> None:
    columns = {"key_hash": str, **_KEY_COLUMNS, "direction": str, "config": str}
    columns |= {"median_us": float, "spread_us": float, "default_us": float, "rounds": int}
    columns |= {"error": float, "origin": str, "clocks_mhz": str, "provenance": str, "date": str}
    db["winners"].create(columns, pk="key_hash")
    db["winners"].create_index(["text_key"])


SCHEMA = {"001_trials": _create_trials, "002_winners": _create_winners}
MIGRATIONS = Migrations("attngen")
for _name, _step in SCHEMA.items():
    MIGRATIONS(name=_name)(_step)

_JSON_COLUMNS = ("config", "clocks_mhz", "provenance")


# ---- opening --------------------------------------------------------------------------------


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn database and file trouble into a StoreError that names the file and the next step."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        message = (error.strerror if isinstance(error, OSError) else None) or str(error)
        for piece, what, step in _NEXT_STEPS:
            if piece in message:
                raise StoreError(f"tuning database {path} {what} ({error}); {step}") from error
        raise StoreError(
            f"tuning database {path} cannot be used ({error}); set ATTNGEN_DB to another file"
        ) from error


@contextmanager
def _immediate(conn: sqlite3.Connection) -> Iterator[None]:
    """A transaction that holds the write lock before it reads, so that no update is lost."""
    conn.execute("BEGIN IMMEDIATE")
    try:
        yield
        conn.commit()
    except BaseException:
        conn.rollback()
        raise


def filesystem_of(path: Path, mounts: Path = PROC_MOUNTS) -> str:
    """Type of the file system that holds `path`, as "ext4" or "nfs4"; "" where it is unknown."""
    try:
        lines = mounts.read_text(errors="replace").splitlines()
        real = path.resolve()
    except OSError:
        return ""
    best, kind = -1, ""
    for line in lines:
        _, point, found, *_ = [*line.split(" "), "", "", ""]
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), point)
        if point and real.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), found
    return kind


def _refuse_network(path: Path, mounts: Path) -> None:
    kind = filesystem_of(path, mounts)
    if kind in NETWORK_FILESYSTEMS:
        raise StoreError(
            f"tuning database {path} lies on a network file system ({kind}), where SQLite loses "
            "data; set ATTNGEN_DB to a local file and carry records over with `attngen export` "
            "and `attngen import`"
        )


def _refuse_foreign(db: Database, path: Path) -> None:
    applied = [step.name for step in MIGRATIONS.applied(db)]
    newer = [name for name in applied if name not in SCHEMA]
    if newer:
        raise StoreError(
            f"tuning database {path} was written by a newer attngen (schema {newer[-1]}, this one "
            f"knows up to {list(SCHEMA)[-1]}); update attngen, or set ATTNGEN_DB to another file"
        )
    if db.table_names() and not applied:
        raise StoreError(
            f"{path} is a database of another program (tables: {', '.join(db.table_names())}); "
            "set ATTNGEN_DB to a file of its own"
        )


def _open_writer(path: Path, mounts: Path) -> Database:
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_network(path, mounts)
        conn = sqlite3.connect(path, timeout=WRITE_TIMEOUT_S, check_same_thread=False)
        try:
            db = Database(conn, execute_plugins=False)
            (verdict,) = conn.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(f"malformed: {' '.join(verdict.split())}")
            _refuse_foreign(db, path)
            _use_wal(conn)
            if MIGRATIONS.pending(db):
                _migrate(db, path)
            return db
        except BaseException:
            conn.close()
            raise


def _use_wal(conn: sqlite3.Connection) -> None:
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while True:
        try:
            (mode,) = conn.execute("PRAGMA journal_mode=WAL").fetchone()
            break
        except sqlite3.OperationalError:
            # Two openers of a fresh file refuse each other at once, whatever the timeout says.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    if mode != "wal":
        raise sqlite3.OperationalError(f"no write-ahead log here, journal mode stays {mode}")


def _migrate(db: Database, path: Path) -> None:
    """Bring the schema up to date, after a backup copy if there is anything to lose."""
    if MIGRATIONS.applied(db):
        stamp = re.sub(r"\W", "", now())
        with closing(sqlite3.connect(f"{path}.backup-{stamp}-{os.getpid()}")) as copy:
            db.conn.backup(copy)
    with _immediate(db.conn):
        MIGRATIONS.apply(db)


def _open_reader(path: Path, mounts: Path) -> Database:
    with _explained(path):
        if path.stat().st_size == 0:
            raise StoreError(f"tuning database {path} is empty (0 bytes); `attngen tune` fills it")
        _refuse_network(path, mounts)
        # Without write access to the folder SQLite cannot share a WAL file: read it as it lies.
        frozen = not os.access(path.parent, os.W_OK)
        uri = f"file:{quote(str(path.resolve()))}?mode=ro{'&immutable=1' if frozen else ''}"
        conn = sqlite3.connect(uri, uri=True, timeout=READ_TIMEOUT_S, check_same_thread=False)
        try:
            db = Database(conn, execute_plugins=False)
            _refuse_foreign(db, path)
            if MIGRATIONS.pending(db):
                raise StoreError(
                    f"tuning database {path} has an older schema; `attngen tune` or "
                    "`attngen import` brings it up to date"
                )
            return db
        except BaseException:
            conn.close()
            raise


def _empty_database() -> Database:
    conn = sqlite3.connect(":memory:", check_same_thread=False)
    db = Database(conn, execute_plugins=False)
    MIGRATIONS.apply(db)
    return db


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

        Raises:
            StoreError: opened to write, and the file is damaged, locked, of a newer schema, on a
                network file system, or not writable; says what to do.
        """
        path = Path(path) if path is not None else database_path()
        if not readonly:
            return cls(path, _open_writer(path, mounts), None, False)
        try:
            if path.exists():
                return cls(path, _open_reader(path, mounts), None, True)
            trouble = None
        except (StoreError, OSError) as error:
            trouble = str(error)
            warn_once(f"{trouble}; going on without it")
        return cls(path, _empty_database(), trouble, True)

    @staticmethod
    def set_aside(path: Path | str) -> Path:
        """Rename a damaged database, with its WAL files, and return its new name.

        Raises:
            StoreError: there is no such file, or it cannot be renamed.
        """
        path = Path(path)
        stamp = re.sub(r"\W", "", now())
        aside = Path(f"{path}.damaged-{stamp}-{os.getpid()}")
        with _explained(path):
            path.rename(aside)
            for suffix in ("-wal", "-shm"):
                if (beside := Path(f"{path}{suffix}")).exists():
                    beside.rename(f"{aside}{suffix}")
        return aside

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
        with self._lock, _explained(self.path):
            yield

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self.readonly:
            raise StoreError(
                f"tuning database {self.path} is open for reading only; open it with "
                "Store.open(path)"
            )
        with self._lock, _explained(self.path), _immediate(self._db.conn):
            yield

    # ---- trials ------------------------------------------------------------------------------

    def begin_trial(self, key: RecordKey, config: KernelConfig) -> Trial:
        """Mark a config as running, and commit. Run it only if the returned status is "running".

        The row's earlier times, if any, are dropped. A row found still "running" was left by a
        process that died on it: that is one crash, and `MAX_CRASHES` of them quarantine the config
        for this key.
        """
        with self._writing():
            old = self._trial(key, config)
            if old is not None and old.status == "quarantined":
                return old
            died = old is not None and old.status == "running"
            crashes = (old.crashes if old else 0) + died
            status: Status = "running"
            reason = "the process ended while this config ran" if died else None
            if crashes >= MAX_CRASHES:
                status, reason = "quarantined", _quarantine_reason(crashes, reason)
            return self._put_trial(key, config, status, reason=reason, crashes=crashes)

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
    ) -> Trial:
        """Record how a trial ended, and commit; one that never began (skipped) may end too.

        Returns the stored row: a "crashed" one may have become "quarantined", and a quarantined
        config stays so.

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
            crashes = (old.crashes if old else 0) + (status == "crashed")
            stored: Status = status
            if old is not None and old.status == "quarantined":
                stored, reason = old.status, old.reason
            elif crashes >= MAX_CRASHES and status == "crashed":
                stored, reason = "quarantined", _quarantine_reason(crashes, reason)
            return self._put_trial(
                key,
                config,
                stored,
                median_us=median_us,
                spread_us=spread_us,
                reason=reason,
                crashes=crashes,
                origin=origin,
            )

    def trials(self, key: RecordKey) -> list[Trial]:
        """Every config tried for a key, fastest first, untimed ones last."""
        with self._reading():
            rows = self._db["trials"].rows_where(
                "key_hash = ?",
                [key.digest],
                order_by="median_us is null, median_us, config_key",
            )
            return [_trial_of(row) for row in rows]

    def top(self, key: RecordKey, n: int = 16) -> list[Trial]:
        """The `n` fastest configs that ran and were correct."""
        good = [t for t in self.trials(key) if t.status == "ok" and t.median_us is not None]
        return good[:n]

    def _trial(self, key: RecordKey, config: KernelConfig) -> Trial | None:
        where = "key_hash = ? and config_key = ?"
        rows = list(self._db["trials"].rows_where(where, [key.digest, config.key]))
        return _trial_of(rows[0]) if rows else None

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

    # ---- winners -----------------------------------------------------------------------------

    def record_winner(self, record: Record) -> bool:
        """Store a winner and say whether it was: a predicted one never replaces a measured one."""
        with self._writing():
            where = "key_hash = ? and origin = 'measured'"
            measured = self._db["winners"].count_where(where, [record.key.digest])
            if measured and record.origin == "predicted":
                return False
            self._put_winner(record)
            return True

    def winners(self, text_key: str | None = None) -> list[Record]:
        """Every winner, or those of one spec; an unreadable row is skipped with a warning."""
        with self._reading():
            where = ("text_key = ?", [text_key]) if text_key is not None else (None, None)
            rows = list(self._db["winners"].rows_where(*where, order_by="key_hash"))
        found = []
        for row in rows:
            try:
                found.append(_record_of(row, f"{self.path}: winner {row['key_hash']}"))
            except StoreError as error:
                warn_once(f"{error}; it is skipped, tune this spec again")
        return found

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

    def _put_winner(self, record: Record) -> None:
        row = record.as_dict() | {"key_hash": record.key.digest}
        row |= {name: json.dumps(row[name], sort_keys=True) for name in _JSON_COLUMNS}
        self._db["winners"].upsert(row, pk="key_hash")


def _quarantine_reason(crashes: int, last: str | None) -> str:
    return f"crashed {crashes} times; last: {last or 'no reason given'}"


def _trial_of(row: dict[str, Any]) -> Trial:
    named = {field.name: row[field.name] for field in fields(Trial)}
    return Trial(**named | {"config": json.loads(row["config"])})


def _record_of(row: dict[str, Any], where: str) -> Record:
    named = {name: value for name, value in row.items() if name != "key_hash"}
    try:
        named |= {name: json.loads(row[name]) for name in _JSON_COLUMNS}
    except (TypeError, ValueError) as error:
        raise StoreError(f"{where}: not JSON ({error})") from None
    return Record.from_dict(named, where)


# ---- exchange -------------------------------------------------------------------------------


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


# ---- look-up --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What a look-up came to."""

    record: Record | None
    tier: Tier
    why: list[str]
    """Readable lines: what was looked for, what was used or nearly matched, and why not."""


@dataclass(frozen=True)
class _Candidate:
    """A stored record of the wanted spec, and how far it is from what is wanted."""

    source: Literal["user", "shipped"]
    record: Record
    differing: dict[str, tuple[Any, Any]]
    tier: Tier | None

    def __str__(self) -> str:
        name = f"{self.source} {self.record.origin} record {self.record.key.bucket}"
        found = (f"{field} {had}, wanted {want}" for field, (had, want) in self.differing.items())
        return f"{name} ({'; '.join(found)})" if self.differing else name


_NEAR_TIERS: tuple[Tier, ...] = ("stale", "neighbour bucket", "other sku")
MAX_NEAR_MISSES = 4


def lookup(
    store: Store | None,
    key: RecordKey,
    bucket: Bucket,
    gpu: GpuInfo,
    accept: Callable[[KernelConfig], list[str]],
    *,
    shipped_records: Iterable[Record] | None = None,
) -> Found:
    """The best stored config for a call; never raises for trouble with the database.

    Args:
        store: the user's database, or None for the shipped records alone.
        key: what is wanted; `key.bucket` is `bucket.key`.
        bucket: the bucket, for steps to its neighbours.
        gpu: the device, for other devices of its arch.
        accept: reasons against a config on this GPU, empty if there are none.
        shipped_records: default `records.shipped()`.

    Order: exact (the user's before shipped, but measured before predicted), other Triton or
    templates ("stale"), one bucket step on one axis, same arch on another SKU. The last two take
    other Triton and template versions too, after the same ones.
    """
    where = f"{key.bucket} of {key.text_key} on {gpu.name} ({key.device_key})"
    why = [
        f"looked for {where}, triton {key.triton}, templates {key.template_hash}, "
        f"timed {key.policy}"
    ]
    ours = [r for r in _user_records(store, key.text_key, why) if r.direction == bucket.direction]
    pool = shipped() if shipped_records is None else shipped_records
    theirs = [r for r in pool if r.key.text_key == key.text_key and r.direction == bucket.direction]
    near = [_candidate("user", record, key, bucket, gpu) for record in ours]
    near += [_candidate("shipped", record, key, bucket, gpu) for record in theirs]
    for candidate in sorted(near, key=_rank):
        if candidate.tier is None:
            continue
        against = accept(candidate.record.kernel_config)
        if not against:
            why.append(f"used {candidate}, tier {candidate.tier!r}")
            return Found(candidate.record, candidate.tier, why)
        why.append(f"{candidate} is refused on {gpu.name}: {'; '.join(against)}")
    return Found(None, "default", why + _near_misses(near))


def _user_records(store: Store | None, text_key: str, why: list[str]) -> list[Record]:
    if store is None:
        why.append("there is no user database")
        return []
    if store.trouble is not None:
        why.append(f"the user database counts as empty: {store.trouble}")
    try:
        return store.winners(text_key)
    except StoreError as error:
        warn_once(f"{error}; going on without it")
        why.append(f"the user database counts as empty: {error}")
        return []


def _candidate(
    source: Literal["user", "shipped"], record: Record, key: RecordKey, bucket: Bucket, gpu: GpuInfo
) -> _Candidate:
    differing = differences(key, bucket, record.key)
    tier = tier_of(differing, gpu.arch) if differing else source
    return _Candidate(source, record, differing, tier)


def _rank(candidate: _Candidate) -> tuple[Any, ...]:
    """Sort key, best first: tier, measured, same versions, the user's, the mildest step."""
    tier, record, differing = candidate.tier, candidate.record, candidate.differing
    return (
        1 + _NEAR_TIERS.index(tier) if tier in _NEAR_TIERS else 0,
        record.origin != "measured",
        "triton" in differing,
        "template_hash" in differing,
        candidate.source != "user",
        next((i for i, axis in enumerate(STEP_AXES) if axis in differing), 0),
        -record.gain,
        record.to_line(),
    )


def _near_misses(near: list[_Candidate]) -> list[str]:
    """Field by field why the nearest records do not serve."""
    misses = sorted((c for c in near if c.tier is None), key=lambda c: (len(c.differing), _rank(c)))
    lines = [f"{candidate} is too far" for candidate in misses[:MAX_NEAR_MISSES]]
    if len(misses) > MAX_NEAR_MISSES:
        lines.append(f"{len(misses) - MAX_NEAR_MISSES} more records of this spec are further off")
    if not near:
        lines.append("no record of this spec and direction is stored or shipped")
    return [*lines, "the default config is used"]
