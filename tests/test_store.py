"""The tuning database: records, trials, damaged files, import, and the tiers of a look-up."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlite_utils import Database

from attngen import records
from attngen import store as store_module
from attngen.config import FwdConfig, KernelConfig
from attngen.errors import StoreError
from attngen.gpu import by_name
from attngen.records import Provenance, Record, RecordKey, shipped
from attngen.store import MIGRATIONS, Store, export_lines, import_lines, lookup
from attngen.workload import Bucket

H200, H100, A100 = by_name("nvidia_h200"), by_name("nvidia_h100_sxm"), by_name("nvidia_a100")
BUCKET = Bucket("fwd", 4096, 4096, 64, 8, 0)
KEY = RecordKey(
    text_key="head_dim=128,dtype=bfloat16,causal=true",
    template_hash="3f2a91c0",
    bucket=BUCKET.key,
    device_key=H200.device_key,
    triton="3.6",
    policy="graph-cold",
)
CONFIG = FwdConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
MEASURED = Record(
    key=KEY,
    direction="fwd",
    config=CONFIG.as_dict(),
    median_us=100.0,
    spread_us=1.5,
    default_us=130.0,
    rounds=9,
    error=0.002,
    origin="measured",
    clocks_mhz=(1980, 1965),
    provenance=Provenance(
        gpu="nvidia_h200", driver="570.1", cuda="12.8", torch="2.11.0", triton="3.6.0"
    ),
    date="2026-11-29T21:38:00Z",
)
PREDICTED = replace(
    MEASURED, origin="predicted", median_us=None, default_us=None, rounds=0, clocks_mhz=None
)


def config(n: int) -> FwdConfig:
    return replace(CONFIG, block_n=n)


def faster(gain: float) -> Record:
    return replace(MEASURED, default_us=gain * 100.0)


def under(record: Record = MEASURED, **changes: str) -> Record:
    """The same record filed under another key."""
    return replace(record, key=replace(record.key, **changes))


def at(**sizes: int) -> Record:
    return under(bucket=replace(BUCKET, **sizes).key)


def accept_all(config: KernelConfig) -> list[str]:
    return []


def find(store: Store | None, *pool: Record, gpu=H200, accept=accept_all, bucket=BUCKET):
    key = replace(KEY, device_key=gpu.device_key, bucket=bucket.key)
    return lookup(store, key, bucket, gpu, accept, shipped_records=pool)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def store(path: Path):
    with Store.open(path) as opened:
        yield opened


# ---- records --------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [MEASURED, PREDICTED], ids=["measured", "predicted"])
def test_record_line_and_row_round_trip(store: Store, record: Record) -> None:
    line = record.to_line()
    assert "\n" not in line and list(json.loads(line)) == sorted(json.loads(line))
    assert Record.from_line(line) == record
    assert store.record_winner(record)
    assert store.winners() == [record]
    assert store.winners()[0].kernel_config == CONFIG


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"rounds": -1}, "rounds must be", id="negative"),
        pytest.param({"rounds": True}, "rounds must be", id="bool-is-no-int"),
        pytest.param({"median_us": float("nan")}, "median_us must be", id="nan"),
        pytest.param({"median_us": 10**400}, "median_us must be", id="beyond-float"),
        pytest.param({"median_us": None}, "median_us must be a time", id="measured-needs-time"),
        pytest.param({"origin": ["measured"]}, "origin must be", id="unhashable"),
        pytest.param({"direction": "bwd"}, "contradicts bucket", id="direction"),
        pytest.param({"bucket": "fwd-q4096"}, "bucket must be", id="bucket"),
        pytest.param({"triton": "3.6.0"}, "triton must be major.minor", id="triton"),
        pytest.param({"date": "2026-11-29"}, "date must be UTC", id="date"),
        pytest.param({"policy": "\ud800"}, "policy must be", id="lone-surrogate"),
        pytest.param({"hostname": "me"}, "unknown field 'hostname'", id="unknown"),
        pytest.param({"config": {"block_m": 64}}, "config: fwd config", id="config-incomplete"),
        pytest.param(
            {"config": CONFIG.as_dict() | {"num_warps": "8"}}, "config.num_warps", id="config-type"
        ),
        pytest.param(
            {"config": CONFIG.as_dict() | {"tiles": "cloud"}}, "config.tiles", id="config-choice"
        ),
        pytest.param({"provenance": {"gpu": "x"}}, "provenance field 'driver'", id="provenance"),
    ],
)
def test_record_line_names_line_and_field(changes: dict, message: str) -> None:
    line = json.dumps(MEASURED.as_dict() | changes)
    with pytest.raises(StoreError, match="^line 7: ") as caught:
        Record.from_line(line, "line 7")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "line", ["{", "[]", "null", "[" * 100_000], ids=["{", "[]", "null", "deep"]
)
def test_record_line_that_is_no_object(line: str) -> None:
    with pytest.raises(StoreError, match="^line 1: "):
        Record.from_line(line, "line 1")


def test_record_line_lacking_a_field() -> None:
    named = MEASURED.as_dict()
    del named["median_us"]
    with pytest.raises(StoreError, match="field 'median_us' is missing"):
        Record.from_dict(named)


def test_record_made_in_code_is_checked_too() -> None:
    with pytest.raises(StoreError, match="rounds must be"):
        replace(MEASURED, rounds=-3)


def test_key_digest_differs_in_every_field() -> None:
    digests = {KEY.digest} | {
        replace(KEY, **{name: "other"}).digest for name in RecordKey.__dataclass_fields__
    }
    assert len(digests) == 1 + len(RecordKey.__dataclass_fields__)


# ---- winners and trials ---------------------------------------------------------------------


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


# ---- many processes -------------------------------------------------------------------------

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
    root = Path(store_module.__file__).parents[1]
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


# ---- damaged and foreign files --------------------------------------------------------------


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
    pytest.param(write_text, "is no SQLite database.*set_aside", id="text"),
    pytest.param(write_broken_page, "is damaged.*set_aside", id="corrupt"),
    pytest.param(write_newer, "newer attngen.*999_future.*update attngen", id="newer"),
    pytest.param(write_foreign, "another program.*bookmarks.*ATTNGEN_DB", id="foreign"),
    pytest.param(write_folder, "cannot be used.*ATTNGEN_DB", id="folder"),
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


def test_readonly_store_reads_and_refuses_to_write(store: Store, path: Path) -> None:
    store.record_winner(MEASURED)
    with Store.open(path, readonly=True) as reader:
        assert find(reader).tier == "user"
        with pytest.raises(StoreError, match="open for reading only"):
            reader.record_winner(MEASURED)


def test_readonly_folder_is_read_without_leaving_files(path: Path, monkeypatch) -> None:
    with Store.open(path) as store:
        store.record_winner(MEASURED)
    monkeypatch.setattr(os, "access", lambda *args: False)
    with Store.open(path, readonly=True) as reader:
        assert find(reader).tier == "user"
        assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_locked_store_is_passed_over_by_readers_and_refused_to_writers(
    path: Path, monkeypatch
) -> None:
    Store.open(path).close()
    monkeypatch.setattr(store_module, "READ_TIMEOUT_S", 0.05)
    monkeypatch.setattr(store_module, "WRITE_TIMEOUT_S", 0.05)
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA locking_mode=EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.warns(RuntimeWarning, match="locked by another process"):
            assert find(Store.open(path, readonly=True), MEASURED).tier == "shipped"
        with pytest.raises(StoreError, match="locked by another process.*ATTNGEN_DB"):
            Store.open(path)


def test_trouble_after_opening_is_survived_by_a_lookup(path: Path) -> None:
    with Store.open(path) as store:
        store.record_winner(MEASURED)
        store._db.execute("alter table winners rename column text_key to gone")
        with pytest.warns(RuntimeWarning, match="no such column"):
            found = find(store, MEASURED)
    assert found.tier == "shipped" and "no such column" in "\n".join(found.why)


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


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used.*ATTNGEN_DB"):
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


def test_set_aside_renames_and_deletes_nothing(path: Path) -> None:
    write_text(path)
    Path(f"{path}-wal").write_text("log")
    before = path.read_bytes()
    aside = Store.set_aside(path)
    assert aside.read_bytes() == before and Path(f"{aside}-wal").read_text() == "log"
    with Store.open(path) as store:
        assert store.winners() == []
    with pytest.raises(StoreError, match="cannot be used"):
        Store.set_aside(path.with_name("absent.db"))


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


def test_threads_may_share_a_store(store: Store) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store.record_winner(MEASURED)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store.begin_trial(KEY, CONFIG), range(20)))
        assert set(pool.map(lambda _: find(store).tier, range(8))) == {"user"}
    assert store.trials(KEY)[0].status == "quarantined"


# ---- look-up --------------------------------------------------------------------------------


def test_lookup_exact_user_before_shipped(store: Store) -> None:
    store.record_winner(MEASURED)
    found = find(store, faster(9.0))
    assert (found.record, found.tier) == (MEASURED, "user")


def test_lookup_exact_measured_shipped_before_predicted_user(store: Store) -> None:
    store.record_winner(PREDICTED)
    assert find(store, MEASURED).tier == "shipped"
    assert find(store).tier == "user"


@pytest.mark.parametrize(
    ("record", "tier"),
    [
        pytest.param(MEASURED, "shipped", id="exact"),
        pytest.param(under(triton="3.5"), "stale", id="triton"),
        pytest.param(under(template_hash="old"), "stale", id="templates"),
        pytest.param(under(triton="3.5", template_hash="old"), "stale", id="both"),
        pytest.param(at(seqlen_q=2048), "neighbour bucket", id="half-q"),
        pytest.param(at(seqlen_k=8192), "neighbour bucket", id="double-k"),
        pytest.param(at(batch_heads=32), "neighbour bucket", id="half-heads"),
        pytest.param(under(at(seqlen_q=2048), triton="3.5"), "neighbour bucket", id="old-half-q"),
        pytest.param(under(device_key=H100.device_key), "other sku", id="h100"),
        pytest.param(under(device_key=A100.device_key), "default", id="other-arch"),
        pytest.param(at(seqlen_q=1024), "default", id="two-steps"),
        pytest.param(at(seqlen_q=2048, seqlen_k=2048), "default", id="two-axes"),
        pytest.param(at(group_size=4), "default", id="group-size"),
        pytest.param(at(window=1024), "default", id="window"),
        pytest.param(at(page_size=16), "default", id="page-size"),
        pytest.param(under(policy="eager"), "default", id="policy"),
        pytest.param(under(text_key="head_dim=64,dtype=bfloat16"), "default", id="spec"),
        pytest.param(
            under(at(seqlen_q=2048), device_key=H100.device_key), "default", id="step-and-sku"
        ),
    ],
)
@pytest.mark.parametrize("source", ["user", "shipped"])
def test_lookup_tier(store: Store, record: Record, tier: str, source: str) -> None:
    if source == "user":
        store.record_winner(record)
        found = find(store)
        tier = "user" if tier == "shipped" else tier
    else:
        found = find(store, record)
    assert found.tier == tier
    assert found.record == (None if tier == "default" else record)


def test_lookup_follows_the_tiers_in_order() -> None:
    ladder = [
        (MEASURED, "shipped"),
        (under(template_hash="old"), "stale"),
        (under(triton="3.5"), "stale"),
        (at(batch_heads=128), "neighbour bucket"),
        (at(seqlen_k=8192), "neighbour bucket"),
        (under(at(batch_heads=128), triton="3.5"), "neighbour bucket"),
        (under(device_key=H100.device_key), "other sku"),
    ]
    for start in range(len(ladder)):
        pool = [record for record, _ in ladder[start:]]
        found = find(None, *reversed(pool))
        assert (found.record, found.tier) == ladder[start]


def test_lookup_redoes_the_static_check_and_says_so() -> None:
    big = replace(under(triton="3.5"), config=config(256).as_dict())
    other = under(device_key=H100.device_key)

    def accept(config: KernelConfig) -> list[str]:
        return ["needs 300000 bytes of shared memory"] if config.block_n == 256 else []

    found = find(None, big, other, accept=accept)
    assert (found.record, found.tier) == (other, "other sku")
    why = "\n".join(found.why)
    assert "triton 3.5, wanted 3.6" in why and "needs 300000 bytes" in why
    assert find(None, big, accept=accept).tier == "default"


def test_lookup_says_field_by_field_what_nearly_matched() -> None:
    near = under(at(seqlen_q=1024, group_size=4), policy="eager")
    far = [at(seqlen_q=1 << n, seqlen_k=1 << n, group_size=2, batch_heads=1) for n in range(4, 10)]
    why = find(None, *far, near).why
    assert why[0].startswith(f"looked for {BUCKET.key} of {KEY.text_key} on nvidia_h200")
    text = "\n".join(why)
    for piece in ("seqlen_q 1024, wanted 4096", "group_size 4, wanted 8", "policy eager, wanted"):
        assert piece in text
    assert "3 more records of this spec are further off" in text
    assert why[-1] == "the default config is used"


def test_lookup_without_any_record_says_so() -> None:
    found = find(None, under(text_key="head_dim=64,dtype=bfloat16"))
    assert "no record of this spec and direction is stored or shipped" in found.why
    assert "there is no user database" in found.why


def test_lookup_of_the_batch_invariant_bucket_has_no_neighbours() -> None:
    anything = Bucket("fwd", 0, 0, 0, 0, 0)
    record = under(bucket=anything.key)
    assert find(None, record, bucket=anything).tier == "shipped"
    assert find(None, at(seqlen_q=1), bucket=anything).tier == "default"


def test_lookup_uses_the_shipped_files_by_default(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "nvidia_h200.jsonl").write_text(MEASURED.to_line() + "\n")
    monkeypatch.setattr(records, "data_dir", lambda name: tmp_path)
    shipped.cache_clear()
    try:
        assert lookup(None, KEY, BUCKET, H200, accept_all).record == MEASURED
    finally:
        shipped.cache_clear()


# ---- shipped files, export and import -------------------------------------------------------


def test_shipped_skips_a_bad_line_and_names_it(tmp_path: Path) -> None:
    file = tmp_path / "nvidia_h200.jsonl"
    bad = json.dumps(MEASURED.as_dict() | {"rounds": "nine"})
    file.write_text(f"{MEASURED.to_line()}\n\n{bad}\n{at(seqlen_q=64).to_line()}\n")
    with pytest.warns(RuntimeWarning, match=rf"{file}:3: rounds must be .*skipped"):
        found = shipped(tmp_path)
    assert found == (MEASURED, at(seqlen_q=64))
    file.unlink()
    assert shipped(tmp_path) is found  # read once


def test_shipped_records_of_this_checkout_are_valid() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shipped.cache_clear()
        assert len({record.key for record in shipped()}) == len(shipped())


def test_export_is_sorted_and_filtered_by_gpu(store: Store) -> None:
    everywhere = [MEASURED, at(seqlen_q=64), under(device_key=H100.device_key)]
    for record in everywhere:
        store.record_winner(record)
    assert export_lines(store) == sorted(record.to_line() for record in everywhere)
    assert export_lines(store, H100) == [everywhere[2].to_line()]


def test_import_of_an_export_is_the_same_store(store: Store, tmp_path: Path) -> None:
    store.record_winner(MEASURED)
    store.record_winner(at(seqlen_q=64))
    with Store.open(tmp_path / "second.db") as second:
        report = import_lines(second, export_lines(store))
        assert (report.added, report.replaced, report.kept, report.rejected) == (2, 0, 0, ())
        assert export_lines(second) == export_lines(store)
        assert import_lines(second, export_lines(store)).kept == 2


ANOTHER_TRITON = replace(MEASURED.provenance, triton="3.5.1")


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(MEASURED, PREDICTED, id="measured"),
        pytest.param(
            MEASURED, replace(faster(9.0), provenance=ANOTHER_TRITON), id="same-triton-before-gain"
        ),
        pytest.param(
            faster(1.5), replace(faster(1.2), date="2027-01-01T00:00:00Z"), id="gain-before-date"
        ),
        pytest.param(replace(MEASURED, date="2027-01-01T00:00:00Z"), MEASURED, id="newer"),
    ],
)
def test_import_keeps_the_better(store: Store, better: Record, worse: Record) -> None:
    assert import_lines(store, [worse.to_line()]).added == 1
    assert import_lines(store, [better.to_line()]).replaced == 1
    assert import_lines(store, [worse.to_line()]).kept == 1
    assert store.winners() == [better]


def test_import_does_not_depend_on_order(tmp_path: Path) -> None:
    rivals = [MEASURED, PREDICTED, faster(1.5), replace(MEASURED, error=None), at(seqlen_q=64)]
    lines = [record.to_line() for record in rivals] + ["{"]
    results = set()
    for number, order in enumerate(itertools.islice(itertools.permutations(lines), 0, 720, 90)):
        with Store.open(tmp_path / f"{number}.db") as whole:
            report = import_lines(whole, order)
            counts = (report.added, report.replaced, report.kept, len(report.rejected))
            results.add((*export_lines(whole), counts))
        with Store.open(tmp_path / f"{number}-by-line.db") as split:
            for line in order:
                import_lines(split, [line])
            results.add((*export_lines(split), counts))
    assert results == {(*sorted([faster(1.5).to_line(), lines[4]]), (2, 0, 3, 1))}


def test_import_rejects_bad_lines_with_number_and_reason(store: Store) -> None:
    nan = MEASURED.to_line().replace("100.0", "NaN")
    huge = MEASURED.to_line().replace('"rounds": 9', '"rounds": ' + "9" * 5000)
    report = import_lines(store, ["", "nonsense", MEASURED.to_line(), nan, huge, "[" * 100_000])
    assert report.added == 1 and store.winners() == [MEASURED]
    assert [number for number, _ in report.rejected] == [2, 4, 5, 6]
    assert report.rejected[0][1].startswith("line 2: not JSON")
    assert report.rejected[1][1].startswith("line 4: median_us must be")


def test_store_needs_neither_torch_nor_triton() -> None:
    check = (
        "import sys, attngen.store\n"
        "assert not {'torch', 'triton'} & set(sys.modules), 'imported too much'"
    )
    root = Path(store_module.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", check], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
