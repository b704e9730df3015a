"""Workers of a shared search in one process, one after the other, with stand-ins that answer from a
table. (Those at once, in processes of their own, are in `test_shared_study.py`.)"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
from test_tuner import (
    BEST,
    DEFAULT,
    GPU,
    SMALL,
    SPEC,
    FakeCompiler,
    FakeTimer,
    fails,
    job,
    run,
    seconds,
    statuses,
)

from attngen.search_space import axes
from attngen.store import Store
from attngen.tuner import finals
from attngen.tuner.shared_session import SharedSession
from attngen.tuner.shared_study import SharedStudy
from attngen.tuner.storage import opened

pytestmark = pytest.mark.usefixtures("portable")  # a dozen trials must reach the best


@pytest.fixture
def url(tmp_path):
    return f"journal://{tmp_path}/study.log"


@pytest.fixture
def other(tmp_path):
    """Another worker's database."""
    with Store.open(tmp_path / "other.db") as store:
        yield store


@contextmanager
def study(url, what):
    with opened(url) as storage:
        space = axes(SPEC, what.bucket, GPU)
        yield SharedStudy(storage, url, what.key, what.workload, space)


def share(url, store, timer=None, what=None):
    what = what or job(max_trials=12)
    with study(url, what) as place:
        timer = timer or FakeTimer()
        return SharedSession(what, store, FakeCompiler(), timer, lambda event: None, place).run()


def test_each_size_of_a_bucket_has_its_own_study(url, store, other):
    small = replace(job(max_trials=12), workload=SMALL)
    share(url, store, FakeTimer(lambda c: seconds(c) / 4), small)
    report = share(url, other)
    assert report.measured == 12 and report.record.median_us == 80.0


def test_finals_of_old_replace_no_newer_record(url, store, monkeypatch):
    share(url, store)
    monkeypatch.setattr(finals, "now", lambda: "2099-01-01T00:00:00Z")
    faster = FakeTimer(lambda c: seconds(c) / 2)
    revalidated, _ = run(store, faster, what=job(revalidate=True))
    report = share(url, store, faster)
    assert store.winners() == [revalidated.record] == [report.record]


def test_newer_finals_replace_an_older_record(url, store, other):
    old, _ = run(other, FakeTimer(lambda c: 70.0 if c == DEFAULT else seconds(c)))
    share(url, store)
    other.replace_winner(aged := replace(old.record, date="2020-01-01T00:00:00Z"), old.record)
    report = share(url, other)
    assert other.winners() == [report.record] != [aged]


def test_a_merged_winner_takes_part_in_the_finals(url, store, other):
    merged, _ = run(other)
    store.merge([merged.record])
    timer = FakeTimer()
    report = share(url, store, timer, job(max_trials=1))
    assert BEST in timer.compared and report.record.kernel_config == BEST


def test_a_refuted_finalist_is_dropped_by_all(url, store, other):
    wrong = fails("failed", "wrong result", BEST, action="verify")
    report = share(url, store, FakeTimer(trouble=wrong), job(max_trials=30))
    assert report.record.kernel_config == DEFAULT and statuses(store)[BEST.key] == "failed"
    with study(url, job()) as place:
        verdicts = [c.status for c in place.claims() if c.name == BEST.key]
        assert verdicts == ["ok", "failed"]
    timer = FakeTimer(trouble=wrong)
    later = share(url, other, timer, job(max_trials=40))
    assert min(limit for limit in timer.limits if limit) == 200.0, "twice the default's time"
    assert BEST not in timer.compared and later.record.kernel_config == DEFAULT


def test_what_one_gpu_has_no_memory_for_is_left_to_others(url, store, other):
    full = FakeTimer(trouble=fails("skipped", "GPU memory", BEST))
    assert share(url, store, full, job(max_trials=30)).record.kernel_config == DEFAULT
    report = share(url, other, what=job(max_trials=40))
    assert report.record.kernel_config == BEST
