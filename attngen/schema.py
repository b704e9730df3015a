"""The tuning database's file: its tables and migrations, and opening it to read or to write.

A file that SQLite or another program damaged, made or holds, that a newer attngen wrote, or that
lies on a network file system is refused with a StoreError that names it and the next step.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from urllib.parse import quote

from sqlite_utils import Database, Migrations

from attngen.errors import DamagedStoreError, StoreError
from attngen.records import RecordKey, now

WRITE_TIMEOUT_S = 60.0
READ_TIMEOUT_S = 2.0  # a look-up holds up a model: better no record than a long wait

PROC_MOUNTS = Path("/proc/mounts")
NETWORK_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "fuse.sshfs", "lustre", "gpfs")
)

ELSEWHERE = "name another file with --db or ATTNGEN_DB"
# What to do about an SQLite or operating system message, by a piece of its text.
_NEXT_STEPS = (
    ("not a database", "is no SQLite database", f"rename it, or {ELSEWHERE}"),
    ("malformed", "is damaged", f"rename it and tune again, or {ELSEWHERE}"),
    ("locked", "is locked by another process", f"wait for it, or {ELSEWHERE}"),
    ("full", "cannot be written", "free some space, then run again"),
    ("No space left", "cannot be written", "free some space, then run again"),
    (
        "unable to open",
        "cannot be opened; you need the right to read it, and to write to its folder",
        ELSEWHERE,
    ),
    ("readonly", "cannot be written", "name one that you may write with --db or ATTNGEN_DB"),
)

_DAMAGE = ("not a database", "malformed")

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


def _add_workload_and_owner(db: Database) -> None:
    db["trials"].add_column("workload", str)
    db["trials"].add_column("owner", str)


SCHEMA = {
    "001_trials": _create_trials,
    "002_winners": _create_winners,
    "003_trial_workload_and_owner": _add_workload_and_owner,
}
MIGRATIONS = Migrations("attngen")
for _name, _step in SCHEMA.items():
    MIGRATIONS(name=_name)(_step)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn database and file trouble into a StoreError that names the file and the next step."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        message = (error.strerror if isinstance(error, OSError) else None) or str(error)
        for piece, what, step in _NEXT_STEPS:
            if piece in message:
                kind = DamagedStoreError if piece in _DAMAGE else StoreError
                raise kind(f"tuning database {path} {what} ({error}); {step}") from error
        raise StoreError(
            f"tuning database {path} cannot be used ({message}); {ELSEWHERE}"
        ) from error


@contextmanager
def immediate(conn: sqlite3.Connection) -> Iterator[None]:
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
            "data; name a local file with --db or ATTNGEN_DB, and carry records over with "
            "`attngen export` and `attngen import`"
        )


def refuse_place(path: Path) -> None:
    """Refuse a path where no database can be, because something else is there.

    Raises:
        StoreError: says what is there.
        OSError: the path cannot be looked at.
    """
    if path.exists() and not path.is_file():
        raise StoreError(
            f"tuning database {path} is a {'folder' if path.is_dir() else 'device or pipe'}; "
            f"{ELSEWHERE}"
        )
    there = next(each for each in path.absolute().parents if each.exists())
    if not there.is_dir():
        raise StoreError(
            f"tuning database {path} would lie in {there}, which is no folder; {ELSEWHERE}"
        )


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"tuning database {path} cannot be made, nor its folder ({error.strerror}); {ELSEWHERE}"
        ) from error


def _refuse_foreign(db: Database, path: Path) -> None:
    applied = [step.name for step in MIGRATIONS.applied(db)]
    newer = [name for name in applied if name not in SCHEMA]
    if newer:
        raise StoreError(
            f"tuning database {path} was written by a newer attngen (schema {newer[-1]}, this one "
            f"knows up to {list(SCHEMA)[-1]}); update attngen, or {ELSEWHERE}"
        )
    if db.table_names() and not applied:
        raise StoreError(
            f"{path} is a database of another program (tables: {', '.join(db.table_names())}); "
            "name a file of its own with --db or ATTNGEN_DB"
        )


def open_writer(path: Path, mounts: Path) -> Database:
    with explained(path):
        refuse_place(path)
        _make_folder(path)
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
    with immediate(db.conn):
        MIGRATIONS.apply(db)


def open_reader(path: Path, mounts: Path) -> Database:
    with explained(path):
        if path.stat().st_size == 0:
            raise StoreError(f"tuning database {path} is empty (0 bytes); `attngen tune` fills it")
        _refuse_network(path, mounts)
        # Without write access to the folder SQLite cannot make a WAL file: read the database as it
        # lies. One that has a log is read with it, or refused.
        log = Path(f"{path.resolve()}-wal")
        has_log = log.exists() and log.stat().st_size > 0
        frozen = not has_log and not os.access(path.parent, os.W_OK)
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


def empty_database() -> Database:
    conn = sqlite3.connect(":memory:", check_same_thread=False)
    db = Database(conn, execute_plugins=False)
    MIGRATIONS.apply(db)
    return db
