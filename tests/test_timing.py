"""The timing protocol, with a clock that plays back recorded times."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attngen import timing


class Tape:
    """A clock on which each call takes its own time, plus a drift that grows with every run."""

    def __init__(self, times: dict, drift: float = 0.0) -> None:
        self._times = times
        self._drift = drift
        self.order: list = []
        self.prepared: list = []

    def prepare(self, call):
        self.prepared.append(call)
        return call

    def run(self, call, count):
        self.order.append(call)
        return [self._times[call] + self._drift * len(self.order)] * count


def test_measure_takes_more_runs_of_shorter_calls():
    tape = Tape({"short": 10.0, "long": 50_000.0})
    assert timing.measure(tape, "short").runs == timing.MAX_RUNS
    assert timing.measure(tape, "long").runs == timing.MIN_RUNS
    assert timing.measure(tape, "long").median_us == 50_000.0


def test_calls_of_seconds_run_a_few_times_only():
    tape = Tape({"slow": 5e6, "long": 50_000.0})
    assert timing.measure(tape, "slow").runs == timing.MIN_RUNS_LONG
    counts: list[tuple] = []
    run = tape.run
    tape.run = lambda call, count: counts.append((call, count)) or run(call, count)
    timing.compare(tape, ["slow", "long"], rounds=9)
    total = {call: sum(n for each, n in counts if each == call) for call in ("slow", "long")}
    assert total == {"slow": 8 + timing.RUNS_PER_ROUND, "long": 9 * timing.RUNS_PER_ROUND}


@pytest.mark.parametrize(("limit", "stopped"), [(None, False), (200.0, False), (99.0, True)])
def test_measure_gives_up_on_hopeless_calls(limit, stopped):
    found = timing.measure(Tape({"call": 100.0}), "call", limit)
    assert found.stopped is stopped and found.median_us == 100.0
    assert found.runs == 1 if stopped else found.runs > 1


def test_compare_meets_drift_alike():
    tape = Tape({"a": 100.0, "b": 101.0, "c": 100.5}, drift=0.2)
    found = timing.compare(tape, ["a", "b", "c"], rounds=9)
    assert tape.prepared == ["a", "b", "c"] and len(tape.order) == 27
    assert tape.order[:6] == ["a", "b", "c", "b", "c", "a"]
    medians = [each.median_us for each in found]
    assert sorted(medians) == [medians[0], medians[2], medians[1]]


def test_summary_is_the_median_and_the_middle_of_the_spread():
    found = timing.summary([5.0, 1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.median_us == 3.5
    assert found.spread_us == 3.0  # neither the slowest nor the fastest run counts


def test_host_clock_measures_the_host():
    calls = []
    found = timing.measure(timing.HostClock(), lambda: calls.append(1))
    assert found.median_us > 0 and len(calls) == found.runs + 2


def test_timing_needs_no_torch_until_it_times():
    code = "import sys, attngen.timing; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
