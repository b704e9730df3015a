"""Opening the storage that workers share, by its URL; what cannot be shared is refused."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

from optuna.exceptions import OptunaError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock
from optuna.storages.journal._file import get_lock_file
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, IntegrityError, ProgrammingError, SQLAlchemyError

from attngen.errors import TuningError
from attngen.tuner.search import quiet_optuna

_DRIVERS = {"postgresql": ("psycopg2", "psycopg"), "mysql": ("MySQLdb", "pymysql")}
"""Drivers of each database, SQLAlchemy's own choice first, and its name in a URL."""
_FORMS = "postgresql://USER@HOST/DB, mysql://USER@HOST/DB or journal://FILE"
_TRIES = 5
_SECRET = re.compile("pass|pwd|secret|token", re.IGNORECASE)
LOCK_S = 30
"""After so long the journal's lock counts as left by a dead worker."""


def checked(url: str) -> str:
    """The URL, with a driver that is here.

    Raises:
        TuningError: workers cannot share it, or its driver is missing.
    """
    scheme, separator, rest = url.partition("://")
    dialect, _, driver = scheme.partition("+")
    if dialect == "sqlite":
        raise TuningError(
            "sqlite cannot be shared by workers: its locks fail on network file systems and time "
            "out under several writers, so that claims are lost; use journal://FILE on a disk that "
            "all workers see, or postgresql://USER@HOST/DB"
        )
    if not separator or not rest or dialect not in (*_DRIVERS, "journal"):
        raise TuningError(f"storage {hidden(url)!r} is not known; write {_FORMS}")
    if dialect == "journal":
        return url
    known = (driver.lower(),) if driver else _DRIVERS[dialect]
    here = next((name for name in known if _is_here(name)), None)
    if here is None:
        wanted = {"postgresql": "psycopg2-binary", "mysql": "pymysql"}[dialect]
        raise TuningError(
            f"{dialect} needs a driver, and {' or '.join(known)} is not installed; run "
            f"`pip install {wanted}`, or `pip install 'attngen[storage]'` for all"
        )
    try:
        made = make_url(f"{dialect}+{here.lower()}://{rest}")
    except (ArgumentError, ValueError):
        raise TuningError(f"storage {hidden(url)!r} is no URL; write {_FORMS}") from None
    return str(made.render_as_string(hide_password=False))


def _is_here(driver: str) -> bool:
    module = {"mysqldb": "MySQLdb"}.get(driver, driver)
    return module.isidentifier() and find_spec(module) is not None


def hidden(url: str) -> str:
    """The URL without its passwords, for messages; those in the query are masked."""
    scheme, separator, rest = url.partition("://")
    rest = re.sub(r"^([^:/@?]*):[^@]*@", r"\1@", rest)
    place, mark, query = rest.partition("?")
    account, at, host = place.rpartition("@")
    pieces = (piece.partition("=") for piece in query.split("&"))
    shown = (
        name + equals + (value if equals and not _SECRET.search(unquote(name)) else "***")
        for name, equals, value in pieces
    )
    return f"{scheme}{separator}{account.partition(':')[0]}{at}{host}{mark}" + (
        "&".join(shown) if mark else ""
    )


_DAMAGE = (ValueError, AssertionError, KeyError, TypeError)
_TROUBLE = (SQLAlchemyError, OptunaError, OSError, RuntimeError, *_DAMAGE)


@contextmanager
def reaching(url: str) -> Iterator[None]:
    """Trouble with the storage in one line."""
    try:
        yield
    except _TROUBLE as error:
        if url.startswith("journal://") and isinstance(error, _DAMAGE):
            raise TuningError(
                f"the journal {url.removeprefix('journal://')} is damaged "
                f"({type(error).__name__}: {error}); rename it and start again: what was measured "
                "is published anew from the workers' databases"
            ) from None
        cause = error.__cause__ if isinstance(error.__cause__, SQLAlchemyError) else error
        why = (str(getattr(cause, "orig", cause)).strip() or type(cause).__name__).splitlines()[0]
        raise TuningError(
            f"the shared storage {hidden(url)} cannot be used: {why}; what this worker measured is "
            "in its own database, start again once the storage is back"
        ) from None


@contextmanager
def opened(url: str) -> Iterator[BaseStorage]:
    """The storage behind a URL.

    Raises:
        TuningError: see `checked`; or it cannot be reached.
    """
    url = checked(url)
    with quiet_optuna(), reaching(url):
        if url.startswith("journal://"):
            path = Path(url.removeprefix("journal://")).expanduser()
            lock = JournalFileSymlinkLock(str(path), grace_period=LOCK_S)
            _cut_torn_line(path, lock)
            storage: BaseStorage = JournalStorage(JournalFileBackend(str(path), lock))
        else:
            storage = _database(url)
    try:
        yield storage
    finally:
        storage.remove_session()
        if isinstance(storage, RDBStorage):
            storage.engine.dispose()


def _cut_torn_line(path: Path, lock: JournalFileSymlinkLock) -> None:
    """Remove what a worker that died left of its last line: Optuna would read no further, ever."""
    if not path.exists():
        return
    with get_lock_file(lock), path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        while size > 0:
            start = max(0, size - 4096)
            file.seek(start)
            end = file.read(size - start).rfind(b"\n")
            size = start if end < 0 else start + end + 1
            if end >= 0:
                break
        file.truncate(size)


def _database(url: str) -> RDBStorage:
    """Workers that come first at the same time may trip over each other's new tables."""
    for _ in range(_TRIES - 1):
        try:
            return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
        except (IntegrityError, ProgrammingError):
            time.sleep(random.uniform(0.1, 0.5))
    return RDBStorage(url, engine_kwargs={"pool_pre_ping": True})
