"""Tuning runs that are killed, with children that hang, crash and lie: what was measured stays.

The children are stand-ins without torch (`tests/faults`); pool, client, session and store are the
real ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from faults import session, table
from support import REPO

from attngen.config import FwdConfig
from attngen.search_order import model_order
from attngen.search_space import candidates
from attngen.store import Store
from attngen.trials import Trial
from attngen.tuner import compile_pool, timing_client, tune

pytestmark = pytest.mark.usefixtures("portable")  # the faults are planned for its configs

COUNT = 60
LEFT_BEHIND_S = 10.0


class Run:
    """A tuning run in a process of its own, and the configs it said it had measured."""

    def __init__(self, path: Path) -> None:
        tests = str(REPO / "tests")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.session", str(path), str(COUNT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{REPO}"},
        )

    def kill(self, rng: random.Random) -> None:
        """SIGKILL to the run itself or to one of its children."""
        victims = [self._process.pid, *children(self._process.pid)]
        victim = rng.choice([victims[0], *victims])  # often the run itself
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)

    def ended(self, within_s: float) -> bool:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def results(self) -> tuple[list[tuple[str, float]], bool]:
        """What was measured, and whether the run came to its end."""
        out, err = self._process.communicate(timeout=120)
        lines = out.splitlines()
        done = lines[-1:] == ["done"]
        assert done or self._process.returncode == -signal.SIGKILL, err[-2000:]
        whole = [line for line in lines if line.startswith("[") and line.endswith("]")]
        return [(str(key), float(us)) for key, us in map(json.loads, whole)], done


def children(pid: int) -> list[int]:
    """Processes that `pid` started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            if int(stat.rsplit(")", 1)[1].split()[1]) == pid:
                found.append(int(entry.name))
    return found


def workers_of(path: Path) -> list[int]:
    """Stand-in workers (and what they started) that still live."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if f"FAULTS_OF={path}".encode() in environment and state != "Z":
                found.append(int(entry.name))
    return found


def expected_status(config: dict[str, Any]) -> str:
    """What a config must come to in the end."""
    fault = table.compile_fault(config) or table.timing_fault(config)
    return {None: "ok", "error": "failed", "wrong": "failed"}.get(fault, "quarantined")


def check(trials: list[Trial], measured: Counter[tuple[str, float]], kills: int) -> None:
    rows = {trial.config_key: trial for trial in trials}
    for (key, us), times in measured.items():
        assert rows[key].status in ("ok", "quarantined") and times == 1, (key, times)
        assert rows[key].median_us == us or rows[key].status == "quarantined"
    by_kills = 0
    for trial in trials:
        wanted = expected_status(trial.config)
        if trial.status != wanted:  # in flight at two kills: taken for its own doing
            assert trial.status == "quarantined", trial
        if wanted != "quarantined":
            by_kills += trial.crashes
    assert by_kills <= kills


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_random_kills_lose_no_measurement(
    kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, rng = tmp_path / "tuning.db", random.Random(kills)
    monkeypatch.setenv("FAULTS_OF", str(path))
    measured: Counter[tuple[str, float]] = Counter()
    for _ in range(kills):
        run = Run(path)
        if not run.ended(rng.uniform(0.8, 4.0)):
            run.kill(rng)
        found, _ = run.results()
        measured.update(found)
    while True:  # undisturbed: crashed configs run once more, then the rest
        found, done = Run(path).results()
        assert done
        measured.update(found)
        with Store.open(path, readonly=True) as store:
            trials = store.trials(session.KEY)
            (winner,) = store.winners()
        if not any(trial.status in ("running", "crashed") for trial in trials):
            break
    check(trials, measured, kills)
    assert len(trials) == COUNT
    good = [t for t in trials if t.status == "ok"]
    fastest = min(good, key=lambda trial: table.median_us(trial.config))
    default = session.job(COUNT).default()
    assert default is not None
    gain = 1 - table.median_us(fastest.config) / table.median_us(default.as_dict())
    chosen = fastest.config if gain > 0.01 else default.as_dict()
    assert table.median_us(winner.config) == table.median_us(chosen)
    deadline = time.monotonic() + LEFT_BEHIND_S
    while workers_of(path):
        assert time.monotonic() < deadline, f"left behind: {workers_of(path)}"
        time.sleep(0.1)


def test_sigterm_leaves_no_trial_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{REPO / 'tests'}{os.pathsep}{REPO}")
    monkeypatch.setattr(compile_pool, "MODULE", "faults.compile_worker")
    monkeypatch.setattr(timing_client, "MODULE", "faults.timing_worker")
    measured = []

    def progress(event: dict[str, Any]) -> None:
        if event["status"] == "ok":
            measured.append(event["config"])
            signal.raise_signal(signal.SIGTERM)

    path = tmp_path / "tuning.db"
    with pytest.raises(KeyboardInterrupt):
        tune(session.SPEC, session.SIZES, direction="fwd", store=path, jobs=1, progress=progress)
    with Store.open(path, readonly=True) as store:
        (key,) = store.trial_keys()
        trials = store.trials(key)
    assert [t.config_key for t in trials if t.status == "ok"] == measured and len(measured) == 1
    assert not any(t.owner for t in trials)


def test_the_plan_has_every_fault() -> None:
    """Or the test above would show less than it says."""
    order = model_order(
        session.SPEC,
        session.BUCKET,
        session.GPU,
        candidates(session.SPEC, session.BUCKET, session.GPU),
    )
    first = [config.as_dict() for config in order[:COUNT]]
    assert all(isinstance(config, FwdConfig) for config in order[:1])
    assert set(table.COMPILING.values()) <= {table.compile_fault(c) for c in first}
    running = [c for c in first if not table.compile_fault(c)]
    assert set(table.TIMING.values()) <= {table.timing_fault(c) for c in running}
