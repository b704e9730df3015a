"""Opening the database: damaged, foreign, locked and older files, and network file systems."""

from __future__ import annotations

import os
import random
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest
from samples import KEY, MEASURED, config, find
from sqlite_utils import Database

from attngen import schema
from attngen.errors import StoreError
from attngen.schema import MIGRATIONS
from attngen.store import Store


def write_text(path: Path) -> None:
    path.write_text("this is a shopping list, not a database\n" * 100)


def write_broken_page(path: Path) -> None:
    with Store.open(path) as store:
        for n in range(200):
            store.finish_trial(KEY, config(n), "failed", reason="x" * 200)
        store.record_winner(MEASURED)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(random.Random(0).randbytes(size - 4096))


def write_newer(path: Path) -> None:
    Store.open(path).close()
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("update _sqlite_migrations set name = '999_future' where name = '001_trials'")


def write_foreign(path: Path) -> None:
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("create table bookmarks (url text)")


def write_folder(path: Path) -> None:
    path.mkdir()


DAMAGE = [
    pytest.param(write_text, "is no SQLite database.*rename it", id="text"),
    pytest.param(write_broken_page, "is damaged.*rename it", id="corrupt"),
    pytest.param(write_newer, "newer attngen.*999_future.*update attngen", id="newer"),
    pytest.param(write_foreign, "another program.*bookmarks.*ATTNGEN_DB", id="foreign"),
    pytest.param(write_folder, "is a folder.*ATTNGEN_DB", id="folder"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_open_to_write_refuses_and_leaves_the_file(path: Path, damage, message: str) -> None:
    damage(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(StoreError, match=message) as caught:
        Store.open(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert before == (path.read_bytes() if path.is_file() else None)


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_lookup_in_a_damaged_store_warns_once_and_goes_on(path: Path, damage, message: str) -> None:
    damage(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with Store.open(path, readonly=True) as store:
                found = find(store, MEASURED)
    assert len(caught) == 1 and str(path) in str(caught[0].message)
    assert "\n" not in str(caught[0].message)
    assert (found.record, found.tier) == (MEASURED, "shipped")
    assert "counts as empty" in "\n".join(found.why)


def test_empty_file_is_warned_of_by_readers_and_filled_by_writers(path: Path) -> None:
    path.touch()
    with pytest.warns(RuntimeWarning, match="0 bytes"), Store.open(path, readonly=True) as store:
        assert store.winners() == [] and store.trouble
    with Store.open(path) as store:
        assert store.record_winner(MEASURED)


def test_missing_file_reads_as_empty_and_is_not_made(path: Path) -> None:
    with warnings.catch_warnings(), Store.open(path, readonly=True) as store:
        warnings.simplefilter("error")
        assert store.winners() == [] and store.trials(KEY) == [] and store.trouble is None
        assert find(store).tier == "default"
    assert not path.exists()


def test_readonly_folder_is_read_without_leaving_files(path: Path, monkeypatch) -> None:
    with Store.open(path) as store:
        store.record_winner(MEASURED)
    monkeypatch.setattr(os, "access", lambda *args: False)
    with Store.open(path, readonly=True) as reader:
        assert find(reader).tier == "user"
        assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_readonly_folder_is_read_with_its_log(path: Path, monkeypatch) -> None:
    with Store.open(path) as writer:
        writer.record_winner(MEASURED)
        monkeypatch.setattr(os, "access", lambda *args: False)
        with Store.open(path, readonly=True) as reader:
            assert reader.winners() == [MEASURED]


def test_locked_store_is_passed_over_by_readers_and_refused_to_writers(
    path: Path, monkeypatch
) -> None:
    Store.open(path).close()
    monkeypatch.setattr(schema, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(schema, "WRITE_TIMEOUT_S", 0.05)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.warns(RuntimeWarning, match="locked by another process"):
            assert find(Store.open(path, readonly=True), MEASURED).tier == "shipped"
        with pytest.raises(StoreError, match="locked by another process.*ATTNGEN_DB"):
            Store.open(path)


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="is no folder.*ATTNGEN_DB"):
        Store.open(tmp_path / "file" / "tuning.db")


def test_older_schema_is_migrated_after_a_backup(path: Path) -> None:
    with closing(sqlite3.connect(path)) as conn:
        MIGRATIONS.apply(Database(conn), stop_before="002_winners")
    with pytest.warns(RuntimeWarning, match="older schema"):
        assert find(Store.open(path, readonly=True)).tier == "default"
    with Store.open(path) as store:
        assert store.record_winner(MEASURED)
    (backup,) = path.parent.glob("tuning.db.backup-*")
    with closing(sqlite3.connect(backup)) as conn:
        tables = {name for (name,) in conn.execute("select name from sqlite_master")}
    assert "trials" in tables and "winners" not in tables
    Store.open(path).close()
    assert list(path.parent.glob("tuning.db.backup-*")) == [backup]


def test_trials_without_workload_and_owner_are_kept(path: Path) -> None:
    with Store.open(path) as store:
        store.finish_trial(KEY, config(16), "ok", median_us=5.0)
        before = store.trials(KEY)
    with closing(sqlite3.connect(path)) as conn, conn:
        for column in ("workload", "owner"):
            conn.execute(f"alter table trials drop column {column}")
        conn.execute("delete from _sqlite_migrations where name = '003_trial_workload_and_owner'")
    with Store.open(path) as store:
        assert store.trials(KEY) == before


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre", "ext4"])
def test_network_file_systems_are_refused(tmp_path: Path, kind: str) -> None:
    share = tmp_path / "my share"
    share.mkdir()
    mounts = tmp_path / "mounts"
    point = str(share).replace(" ", "\\040")
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {point} {kind} rw 0 0\n")
    Store.open(tmp_path / "local.db", mounts=mounts).close()
    if kind == "ext4":
        Store.open(share / "tuning.db", mounts=mounts).close()
        return
    with pytest.raises(StoreError, match=rf"\({kind}\).*attngen export.*attngen import"):
        Store.open(share / "tuning.db", mounts=mounts)
    assert not (share / "tuning.db").exists()
