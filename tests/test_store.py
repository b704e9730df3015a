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
import attngen.trials
from attngen import owner
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


@pytest.fixture
def owners_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever began a trial is gone when another looks."""
    monkeypatch.setattr(attngen.trials, "is_gone", lambda owner: True)


@pytest.mark.usefixtures("owners_die")
def test_trial_left_running_twice_is_quarantined(path: Path) -> None:
    seen = []
    for _ in range(4):
        with Store.open(path) as store:
            seen.append(store.begin_trial(KEY, CONFIG))
    assert [t.status for t in seen] == ["running", "running", "quarantined", "quarantined"]
    assert [t.crashes for t in seen] == [0, 1, 2, 2]
    assert seen[-1].reason == "crashed 2 times; last: the process ended while this config ran"


def test_trial_that_another_process_runs_now_is_no_crash(path: Path) -> None:
    with Store.open(path) as one, Store.open(path) as other, Store.open(path) as third:
        for each in (one, other, third):
            assert each.begin_trial(KEY, CONFIG).status == "running"
        one.finish_trial(KEY, CONFIG, "ok", median_us=5.0)
        assert third.trials(KEY)[0].crashes == 0 and third.top(KEY)


def test_owner_is_gone_once_its_process_ended_or_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", "from attngen.owner import this_process; print(this_process())"],
        cwd=Path(attngen.store.__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    mine = owner.this_process()
    host, pid, started, since = mine.rsplit(" ", 3)
    assert not owner.is_gone(mine) and owner.is_gone(child.stdout.strip())
    assert owner.is_gone(f"{host} {pid} {int(started) + 1} {since}"), "the same id, used again"
    elsewhere = f"another {pid} {started}"
    assert not owner.is_gone(f"{elsewhere} {since}")
    assert owner.is_gone(f"{elsewhere} {int(since) - 2 * owner.FOREIGN_S:.0f}")


def test_trial_of_a_process_that_did_not_say_who_it_is_was_left(store: Store) -> None:
    """Rows of an older schema."""
    store.begin_trial(KEY, CONFIG)
    store._update_trial(KEY, CONFIG, owner=None)
    assert store.begin_trial(KEY, CONFIG).crashes == 1


@pytest.mark.usefixtures("owners_die")
def test_trial_keeps_its_time_until_there_is_a_new_verdict(store: Store) -> None:
    store.finish_trial(KEY, CONFIG, "ok", median_us=5.0, spread_us=0.1, workload="1,1,1,9,9")
    before = store.trials(KEY)
    assert store.begin_trial(KEY, CONFIG, "1,1,1,16,16").status == "running"
    assert store.top(KEY)[0].median_us == 5.0, "while it runs"
    store.finish_trial(KEY, CONFIG, "skipped", reason="interrupted")
    assert store.trials(KEY) == before
    store.begin_trial(KEY, CONFIG)
    assert store.begin_trial(KEY, CONFIG).crashes == 1
    assert store.top(KEY)[0].median_us == 5.0, "when its process died"
    store.finish_trial(KEY, CONFIG, "failed", reason="wrong by 0.3")
    assert not store.top(KEY)


def test_prediction_changes_nothing_that_was_measured(store: Store) -> None:
    store.finish_trial(KEY, CONFIG, "ok", median_us=5.0)
    store.finish_trial(KEY, config(16), "failed", reason="wrong by 0.3")
    store.begin_trial(KEY, config(32))
    before = store.trials(KEY)
    for n in (64, 16, 32):
        store.finish_trial(KEY, config(n), "ok", origin="predicted")
        store.finish_trial(KEY, config(n), "failed", origin="predicted")
    assert store.trials(KEY)[:3] == before


def test_history_is_the_order_in_which_trials_began(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in (64, 16, 32):
        store.finish_trial(KEY, config(n), "ok", median_us=5.0)
    monkeypatch.setattr(attngen.store, "now", lambda: "2099-01-01T00:00:00Z")
    store.finish_trial(KEY, config(64), "ok", median_us=4.0)
    assert [t.config["block_n"] for t in store.history(KEY)] == [64, 16, 32]


def test_top_compares_times_of_one_size_only(store: Store) -> None:
    times = {16: (80.0, "large"), 32: (100.0, "large"), 64: (11.0, "small"), 128: (10.0, "small")}
    for n, (median, workload) in times.items():
        store.finish_trial(KEY, config(n), "ok", median_us=median, workload=workload)
    assert [t.config["block_n"] for t in store.top(KEY, workload="large")] == [16, 32, 128, 64]
    other = replace(KEY, triton="3.7")
    found = store.top_of_other_versions(other, 3, "small")
    assert [t.config["block_n"] for t in found] == [128, 64, 16]


def test_winner_that_another_process_stored_meanwhile_is_not_replaced(store: Store) -> None:
    assert store.replace_winner(faster(1.1), None)
    assert not store.replace_winner(faster(1.2), None)
    assert store.replace_winner(faster(1.3), faster(1.1))
    assert store.winners() == [faster(1.3)] and store.measured_winner(KEY) == faster(1.3)


@pytest.mark.usefixtures("owners_die")
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


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("config", "{", "config is not JSON"),
        ("config", None, "config is not JSON"),
        ("config", "[]", "config must be"),
        ("config", '{"block_x": 3}', "config: unknown fwd config field 'block_x'"),
        ("status", "fine", "status must be one of ok, failed"),
        ("median_us", "fast", "median_us must be"),
        ("crashes", -1, "crashes must be"),
        ("date", 7, "date must be"),
    ],
)
def test_trial_row_that_is_damaged_is_skipped_with_a_warning(
    store: Store, path: Path, column: str, value: object, says: str
) -> None:
    for n in (32, 64):
        store.finish_trial(KEY, config(n), "ok", median_us=float(n))
    with closing(sqlite3.connect(path)) as conn, conn:
        where = f"update trials set {column} = ? where config_key = ?"
        conn.execute(where, [value, config(32).key])
    with pytest.warns(RuntimeWarning, match=f"trial {KEY.digest} {config(32).key}: {says}"):
        assert [trial.median_us for trial in store.trials(KEY)] == [64.0]
    assert [trial.median_us for trial in store.history(KEY)] == [64.0]
    other = replace(KEY, triton="3.7")
    assert [trial.median_us for trial in store.top_of_other_versions(other)] == [64.0]
    assert store.begin_trial(KEY, config(32)).status == "running"  # it is tried anew


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


def test_threads_may_share_a_store(store: Store) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store.record_winner(MEASURED)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store.begin_trial(KEY, CONFIG), range(20)))
        assert set(pool.map(lambda _: find(store).tier, range(8))) == {"user"}
    assert (store.trials(KEY)[0].status, store.trials(KEY)[0].crashes) == ("running", 0)


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


@pytest.mark.parametrize(
    "content", [b"no database at all " * 50, b"SQLite format 3\0" + b"x" * 5000]
)
def test_a_damaged_file_in_the_cache_folder_is_set_aside(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATTNGEN_DB", raising=False)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "tuning.db").write_bytes(content)
    with (
        pytest.warns(RuntimeWarning, match="was renamed to .*tuning.db.damaged-"),
        Store.open() as store,
    ):
        store.record_winner(MEASURED)
        assert store.winners() == [MEASURED]
    (aside,) = tmp_path.glob("tuning.db.damaged-*[0-9]")
    assert aside.read_bytes() == content


def test_a_damaged_file_that_was_named_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_bytes(b"no database at all " * 50)
    monkeypatch.setenv("ATTNGEN_DB", str(notes))
    for path in (None, notes):
        with pytest.raises(StoreError, match="is no SQLite database"):
            Store.open(path)
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]
