"""Several workers, one search: by a journal file and by PostgreSQL.

The workers are processes of their own with stand-ins for compiler and timer (`tests/faults`); some
configs hang, crash or lie.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import postgres
import pytest
from faults import session, table
from optuna.study import StudyDirection
from support import REPO

from attngen.errors import TuningError
from attngen.search_space import axes
from attngen.store import Store
from attngen.tuner import compile_pool, shared_study, timing_client, tune
from attngen.tuner.shared_study import Claim, SharedStudy
from attngen.tuner.storage import hidden, opened

pytestmark = pytest.mark.usefixtures("portable")  # the faults are planned for its configs

COUNT = 60
AHEAD = 5
"""Configs that a worker may have claimed at a time: two a compiler child, one being timed."""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    if why := postgres.missing():
        pytest.skip(why)
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["journal", pytest.param("postgres", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "journal":
        return f"journal://{tmp_path}/study.log"
    found: str = request.getfixturevalue("server")
    with opened(found) as storage:
        for study in storage.get_all_studies():
            storage.delete_study(study._study_id)
    return found


class Worker:
    """A tuning run in a process of its own, that shares its search if there is a URL."""

    def __init__(self, database: Path, *url: str, count: int = COUNT) -> None:
        self.database = database
        paths = [str(REPO / "tests"), str(REPO), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "faults.session", str(database), str(count), *url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )

    def measured(self) -> list[str]:
        """The configs it said it had measured, once it has ended."""
        out, err = self.process.communicate(timeout=120)
        lines = out.splitlines()
        assert lines[-1:] == ["done"] or self.process.returncode == -signal.SIGKILL, err[-2000:]
        return [json.loads(line)[0] for line in lines if line.startswith("[")]

    def winner(self) -> dict:
        with Store.open(self.database, readonly=True) as store:
            (record,) = store.winners()
            return record.config


def workers(folder: Path, url: str, names: str = "abc", **how: int) -> list[Worker]:
    return [Worker(folder / f"{name}.db", url, **how) for name in names]


def claims(url: str) -> list[Claim]:
    with opened(url) as storage:
        space = axes(session.SPEC, session.BUCKET, session.GPU)
        return SharedStudy(storage, url, session.KEY, session.SIZES, space).claims()


def wait_for(url: str, good: int) -> None:
    """Until the study holds so many times."""
    deadline = time.monotonic() + 60
    while sum(claim.status == "ok" for claim in claims(url)) < good:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], dict]:
    """What one worker measures by itself, and its winner."""
    worker = Worker(tmp_path_factory.mktemp("alone") / "tuning.db")
    measured = set(worker.measured())
    return measured, worker.winner()


@pytest.mark.rotating
def test_two_workers_measure_each_config_once(
    url: str, tmp_path: Path, alone: tuple[set[str], dict]
) -> None:
    all_workers = workers(tmp_path, url, "ab")
    measured = [worker.measured() for worker in all_workers]
    counts = Counter(config for each in measured for config in each)
    assert set(counts.values()) == {1}
    assert set(counts) == alone[0]
    assert all(measured), "every worker had its share"
    assert [worker.winner() for worker in all_workers] == [alone[1]] * 2
    found = claims(url)
    assert len(shared_study.taken(found)) == COUNT
    assert sum(claim.status == "played" for claim in found) == 1
    assert all(c.median_us == table.median_us(c.config) for c in found if c.status == "ok")


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(
    url: str, tmp_path: Path, alone: tuple[set[str], dict]
) -> None:
    first, *others = workers(tmp_path, url)
    wait_for(url, 10)
    first.process.kill()
    measured = [worker.measured() for worker in (first, *others)]
    counts = Counter(config for each in measured for config in each)
    twice = [config for config, times in counts.items() if times > 1]
    assert set(counts) == alone[0]
    assert len(twice) <= 1, "only what it had measured and not yet told may run again"
    assert [worker.winner() for worker in others] == [alone[1]] * 2
    late = Worker(first.database, url)
    assert late.measured() == [] and late.winner() == alone[1]


@pytest.mark.slow
def test_workers_go_on_after_all_were_killed(
    url: str, tmp_path: Path, alone: tuple[set[str], dict]
) -> None:
    killed = workers(tmp_path, url)
    wait_for(url, 15)
    for worker in killed:
        worker.process.kill()
    before = [worker.measured() for worker in killed]
    elsewhere = workers(tmp_path, url, "xy")
    after = [worker.measured() for worker in elsewhere]
    counts = Counter(config for each in (*before, *after) for config in each)
    assert set(counts) == alone[0]
    assert sum(counts.values()) - len(counts) <= len(killed)
    assert [worker.winner() for worker in elsewhere] == [alone[1]] * 2
    assert sum(claim.status == "running" for claim in claims(url)) == 0


@pytest.mark.slow
def test_a_larger_run_goes_on_where_a_smaller_ended(url: str, tmp_path: Path) -> None:
    (small,) = workers(tmp_path, url, "a", count=10)
    first = small.measured()
    (large,) = workers(tmp_path, url, "b", count=20)
    second = large.measured()
    assert first and second and not set(first) & set(second)
    assert len(shared_study.taken(claims(url))) == 20


@pytest.mark.rotating
def test_measurements_made_alone_are_told_to_the_study(url: str, tmp_path: Path) -> None:
    database = tmp_path / "tuning.db"
    first = Worker(database, count=10).measured()
    assert not set(Worker(database, url, count=20).measured()) & set(first)
    assert set(first) < {claim.name for claim in claims(url) if claim.status == "ok"}


def test_tune_with_a_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPO / 'tests'}{os.pathsep}{REPO}")
    monkeypatch.setattr(compile_pool, "MODULE", "faults.compile_worker")
    monkeypatch.setattr(timing_client, "MODULE", "faults.timing_worker")
    monkeypatch.setattr(compile_pool, "COMPILE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(timing_client, "RUN_TIMEOUT_S", 0.5)
    how = {"direction": "fwd", "max_trials": 6, "storage": f"journal://{tmp_path}/study.log"}
    first, second = (
        tune(session.SPEC, session.SIZES, store=tmp_path / name, jobs=1, **how)[0]
        for name in ("a.db", "b.db")
    )
    assert first.tried == 6 and (second.tried, second.resumed) == (0, 6)
    assert second.record == first.record
    with pytest.raises(TuningError, match="is not here"):
        tune(session.SPEC, session.SIZES, gpu="nvidia_a100", store=tmp_path / "c.db", **how)
    with pytest.raises(TuningError, match="is not shared"):
        tune(session.SPEC, session.SIZES, revalidate=True, store=tmp_path / "c.db", **how)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[SharedStudy, SharedStudy]]:
    """Two workers of one study."""
    url = f"journal://{tmp_path}/study.log"
    space = axes(session.SPEC, session.BUCKET, session.GPU)
    with opened(url) as one, opened(url) as other:
        yield tuple(
            SharedStudy(each, url, session.KEY, session.SIZES, space) for each in (one, other)
        )


DEFAULT = session.job(COUNT).default()


def test_a_claim_holds_until_it_is_given_up(pair: tuple[SharedStudy, SharedStudy]) -> None:
    one, other = pair
    with one.present(), other.present():
        assert one.claim("config", DEFAULT) and not other.claim("config", DEFAULT)
        one.release("config")
        assert other.claim("config", DEFAULT)
        other.finish("config", "ok", median_us=5.0)
        assert not one.claim("config", DEFAULT)


def test_no_claim_beyond_the_limit(pair: tuple[SharedStudy, SharedStudy]) -> None:
    one, other = pair
    with one.present(), other.present():
        assert one.claim("a", DEFAULT, limit=2) and other.claim("b", DEFAULT, limit=2)
        assert not one.claim("c", DEFAULT, limit=2)
        other.release("b")
        assert one.claim("c", DEFAULT, limit=2)


def test_a_config_that_two_workers_died_on_is_left_alone(
    pair: tuple[SharedStudy, SharedStudy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_study, "SILENT_S", 0.0)
    one, other = pair
    for worker in (one, other):
        worker._beat()
        assert worker.claim("config", DEFAULT)
        worker.begin("config")
    one._beat()  # by now `other` counts `one` as silent, and the reverse
    assert {claim.status for claim in one.claims()} == {None}
    assert not one.claim("config", DEFAULT)


def test_a_worker_given_up_while_it_was_slow_harms_nothing(
    pair: tuple[SharedStudy, SharedStudy],
) -> None:
    slow, other = pair
    with other.present():
        assert slow.claim("config", DEFAULT)  # without a beat
        assert other.claim("config", DEFAULT)
        slow.begin("config")
        slow.finish("config", "ok", median_us=5.0)
        other.finish("config", "ok", median_us=6.0)
        assert [c.median_us for c in other.claims() if c.status == "ok"] == [6.0]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite:///tuning.db", "cannot be shared"),
        ("redis://host", "is not known"),
        ("journal://", "is not known"),
        ("tuning.log", "is not known"),
        ("postgresql+nosuch://u:secret@host/db", "pip install psycopg2-binary"),
        ("mysql+a.b://u:secret@host/db", "pip install pymysql"),
        ("journal:///no/such/folder/study.log", "cannot be used"),
    ],
)
def test_storage_that_cannot_be_used_is_refused_in_a_line(url: str, says: str) -> None:
    with pytest.raises(TuningError, match=says) as caught, opened(url):
        pass
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.postgres
def test_unreachable_postgres_is_said_without_the_password() -> None:
    if why := postgres.missing():
        pytest.skip(why)
    with (
        pytest.raises(TuningError, match="cannot be used") as caught,
        opened("postgresql://attngen:secret@127.0.0.1:1/none"),
    ):
        pass
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("torn", [b'{"op_code":', b"x" * 9000])
def test_a_torn_last_line_of_a_journal_is_cut(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "study.log"
    with opened(f"journal://{file}") as storage:
        storage.create_new_study([StudyDirection.MINIMIZE], "one")
    whole = file.read_bytes()
    file.write_bytes(whole + torn)
    with opened(f"journal://{file}") as storage:
        assert [study.study_name for study in storage.get_all_studies()] == ["one"]
    assert file.read_bytes() == whole


@pytest.mark.parametrize("line", ["{", '{"op_code": 4}', "[]", "7"])
def test_a_damaged_journal_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "study.log"
    file.write_text(f"{line}\n{line}\n")
    with pytest.raises(TuningError, match=f"{file} .*"), opened(f"journal://{file}"):
        pass


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@host/db",
        "postgresql://me:se?ret@host/db",
        "postgresql://host/db?user=me&password=secret",
        "postgresql://host/db?password=a@secret&passfile=/secret",
        "mysql://host/db?%70assword=secret",
        "postgresql://me:secret@host/db?sslpassword=secret&connect_timeout=3",
    ],
)
def test_no_password_is_printed(url: str) -> None:
    assert "secret" not in hidden(url) and "se?ret" not in hidden(url)
    assert "host/db" in hidden(url)
    assert ("connect_timeout=3" in hidden(url)) == ("connect_timeout=3" in url)
