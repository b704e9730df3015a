"""A private PostgreSQL server for a test: in a folder of its own, on a Unix socket, no TCP."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

USERS = ("postgres", "nobody")
"""Who runs the server where the tests run as root, which PostgreSQL refuses."""


def missing() -> str:
    """Why no server can be started here; empty if one can."""
    if _binaries() is None:
        return "PostgreSQL's initdb and postgres are not installed (apt-get install postgresql)"
    if find_spec("psycopg2") is None and find_spec("psycopg") is None:
        return "no driver for PostgreSQL (pip install 'attngen[storage]')"
    if os.geteuid() == 0 and _user() is None:
        return "the tests run as root, and there is no other user to run PostgreSQL"
    return ""


def _binaries() -> Path | None:
    """Debian keeps them out of the path, by version."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    wanted = ("initdb", "postgres", "pg_ctl")
    return next((f for f in folders if all((f / name).exists() for name in wanted)), None)


def _user() -> str | None:
    known = {entry.pw_name for entry in pwd.getpwall()}
    return next((user for user in USERS if user in known and shutil.which("runuser")), None)


@contextmanager
def server() -> Iterator[str]:
    """The URL of a fresh database."""
    folder, binaries = Path(tempfile.mkdtemp(prefix="attngen-pg-", dir="/tmp")), _binaries()
    assert binaries is not None
    as_user = []
    if os.geteuid() == 0:
        user = _user()
        assert user is not None
        shutil.chown(folder, user)
        as_user = ["runuser", "-u", user, "--"]
    data = folder / "data"

    def run(*command: str) -> None:
        done = subprocess.run([*as_user, *command], capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr

    control = (str(binaries / "pg_ctl"), "-D", str(data), "-w", "-l", str(folder / "log"))
    try:
        run(str(binaries / "initdb"), "-D", str(data), "-A", "trust", "-U", "attngen", "-N")
        run(*control, "-o", f"-c listen_addresses= -c fsync=off -k {folder}", "start")
        try:
            yield f"postgresql://attngen@/postgres?host={folder}"
        finally:
            run(*control, "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)
