"""The store: trials, winners, many processes and threads."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from samples import BUCKET, CONFIG, KEY, MEASURED, PREDICTED, at, config, faster, find

import attngen.store
from attngen.errors import StoreError
from attngen.records import Record
from attngen.store import Store


@pytest.mark.parametrize("record", [MEASURED, PREDICTED], ids=["measured", "predicted"])
def test_winner_row_round_trip(store: Store, record: Record) -> None:
    assert store.record_winner(record)
    assert store.winners() == [record]
    assert store.winners()[0].kernel_config == CONFIG


def test_winner_measured_outranks_predicted(store: Store) -> None:
    assert store.record_winner(PREDICTED)
    assert store.record_winner(MEASURED)
    assert not store.record_winner(PREDICTED)
    assert store.winners() == [MEASURED]


def test_winner_later_measured_replaces_even_a_faster_one(store: Store) -> None:
    store.record_winner(faster(2.0))
    assert store.record_winner(faster(1.1))
    assert store.winners() == [faster(1.1)]


def test_winner_row_that_is_unreadable_is_skipped_with_a_warning(store: Store, path: Path) -> None:
    store.record_winner(MEASURED)
    store.record_winner(at(seqlen_q=2048))
    with closing(sqlite3.connect(path)) as conn, conn:
        conn.execute("update winners set config = '{' where bucket = ?", [BUCKET.key])
    with pytest.warns(RuntimeWarning, match=f"winner {KEY.digest}: not JSON"):
        assert store.winners() == [at(seqlen_q=2048)]


def test_trials_are_listed_fastest_first_and_top_holds_the_good(store: Store) -> None:
    for n, median in ((16, 30.0), (32, 10.0), (64, 20.0)):
        assert store.begin_trial(KEY, config(n)).status == "running"
        store.finish_trial(KEY, config(n), "ok", median_us=median, spread_us=0.1)
    store.finish_trial(KEY, config(128), "skipped", reason="too much shared memory")
    assert [t.median_us for t in store.trials(KEY)] == [10.0, 20.0, 30.0, None]
    assert store.trials(KEY)[-1].reason == "too much shared memory"
    assert [t.config["block_n"] for t in store.top(KEY, 2)] == [32, 64]
    assert store.trials(replace(KEY, triton="3.7")) == []


def test_trial_ok_needs_a_time(store: Store) -> None:
    store.begin_trial(KEY, CONFIG)
    with pytest.raises(StoreError, match="median_us of a measured trial"):
        store.finish_trial(KEY, CONFIG, "ok")
    store.finish_trial(KEY, CONFIG, "ok", origin="predicted")
    assert store.top(KEY) == []


def test_trial_left_running_twice_is_quarantined(path: Path) -> None:
    seen = []
    for _ in range(4):
        with Store.open(path) as store:
            seen.append(store.begin_trial(KEY, CONFIG))
    assert [t.status for t in seen] == ["running", "running", "quarantined", "quarantined"]
    assert [t.crashes for t in seen] == [0, 1, 2, 2]
    assert seen[-1].reason == "crashed 2 times; last: the process ended while this config ran"


def test_trial_crashed_and_left_running_add_up(store: Store) -> None:
    store.begin_trial(KEY, CONFIG)
    assert store.finish_trial(KEY, CONFIG, "crashed", reason="illegal access").status == "crashed"
    store.begin_trial(KEY, CONFIG)
    assert store.begin_trial(KEY, CONFIG).status == "quarantined"
    assert store.finish_trial(KEY, CONFIG, "ok", median_us=1.0).status == "quarantined"
    assert store.top(KEY) == []
    assert store.begin_trial(replace(KEY, triton="3.7"), CONFIG).status == "running"


def test_trial_that_ends_well_is_no_crash(store: Store) -> None:
    for _ in range(3):
        assert store.begin_trial(KEY, CONFIG).status == "running"
        store.finish_trial(KEY, CONFIG, "failed", reason="wrong by 0.3")
    assert store.trials(KEY)[0].crashes == 0


def test_trial_reason_that_is_no_utf8_is_kept_readable(store: Store) -> None:
    store.finish_trial(KEY, CONFIG, "failed", reason="bad \udcff byte")
    assert store.trials(KEY)[0].reason == "bad ? byte"


PRELUDE = """
import sys, time
from tests_shared import CONFIG, KEY
from attngen.store import Store
"""
KILLED = """
with Store.open(sys.argv[1]) as store:
    for _ in range(3):
        store.begin_trial(KEY, CONFIG)
        store.finish_trial(KEY, CONFIG, "failed", reason="committed")
    with store._writing():
        store._put_trial(KEY, CONFIG, "ok", reason="not committed", crashes=0)
        print("inside", flush=True)
        time.sleep(60)
"""
CRASHER = """
with Store.open(sys.argv[1]) as store:
    for _ in range(150):
        store.finish_trial(KEY, CONFIG, "crashed", reason="illegal access")
"""


@pytest.fixture
def start(tmp_path: Path, path: Path):
    """Start a child process that runs a script on the store at `path`."""
    shared = f"from attngen.config import *\nfrom attngen.records import *\n{CONFIG=}\n{KEY=}\n"
    (tmp_path / "tests_shared.py").write_text(shared)
    root = Path(attngen.store.__file__).parents[1]
    env = os.environ | {"PYTHONPATH": f"{root}{os.pathsep}{tmp_path}"}
    children = []

    def run(script: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PRELUDE + script, str(path)]
        children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.communicate()


def test_sigkill_inside_a_transaction_keeps_what_was_committed(start, path: Path) -> None:
    child = start(KILLED)
    assert child.stdout.readline() == "inside\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    with Store.open(path) as store:
        (trial,) = store.trials(KEY)
        assert (trial.status, trial.reason) == ("failed", "committed")
        assert store.record_winner(MEASURED)


def test_eight_writers_lose_no_update(start, path: Path) -> None:
    children = [start(CRASHER) for _ in range(8)]
    assert [child.wait() for child in children] == [0] * 8
    with Store.open(path, readonly=True) as store:
        (trial,) = store.trials(KEY)
    assert (trial.crashes, trial.status) == (8 * 150, "quarantined")


def test_readonly_store_reads_and_refuses_to_write(store: Store, path: Path) -> None:
    store.record_winner(MEASURED)
    with Store.open(path, readonly=True) as reader:
        assert find(reader).tier == "user"
        with pytest.raises(StoreError, match="open for reading only"):
            reader.record_winner(MEASURED)


def test_full_disk_names_the_file_and_keeps_the_store_usable(store: Store, path: Path) -> None:
    store.record_winner(MEASURED)
    conn = store._db.conn
    (pages,) = conn.execute("PRAGMA page_count").fetchone()
    conn.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreError, match=f"{path} cannot be written.*full.*free some space"):
        for n in range(100):
            store.finish_trial(KEY, config(n), "failed", reason="x" * 2000)
    conn.execute("PRAGMA max_page_count=100000")
    assert find(store).tier == "user" and store.record_winner(MEASURED)


def test_set_aside_renames_and_deletes_nothing(path: Path) -> None:
    path.write_text("no database")
    Path(f"{path}-wal").write_text("log")
    before = path.read_bytes()
    aside = Store.set_aside(path)
    assert aside.read_bytes() == before and Path(f"{aside}-wal").read_text() == "log"
    with Store.open(path) as store:
        assert store.winners() == []
    with pytest.raises(StoreError, match="cannot be used"):
        Store.set_aside(path.with_name("absent.db"))


def test_threads_may_share_a_store(store: Store) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store.record_winner(MEASURED)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store.begin_trial(KEY, CONFIG), range(20)))
        assert set(pool.map(lambda _: find(store).tier, range(8))) == {"user"}
    assert store.trials(KEY)[0].status == "quarantined"


@pytest.mark.parametrize(
    "module", ["schema", "store", "exchange", "lookup", "records", "record_checks"]
)
def test_modules_need_neither_torch_nor_triton(module: str) -> None:
    check = (
        f"import sys, attngen.{module}\n"
        "assert not {'torch', 'triton'} & set(sys.modules), 'imported too much'"
    )
    root = Path(attngen.store.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", check], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
