"""The one timing protocol: medians of runs that each begin with the L2 cache flushed.

Every time that attngen stores or prints comes from here, so that two of them may be compared
(`records.POLICY` names the protocol). A short call is timed by CUDA graph replay, because the
host cannot launch it as fast as it runs.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

GRAPH_BELOW_US = 2000.0
"""By a first, eager run. A call of less than 100 us mostly waits for the host, and one of several
launches does, too, while compilers keep the host busy: 500 us were seen to take 1000."""
TARGET_US = 40_000.0
"""Device time that one measurement aims at."""
MIN_RUNS = 7
MAX_RUNS = 100
RUNS_PER_ROUND = 3
LONG_CALL_US = 1e6
"""A call that takes longer is run less often: `MIN_RUNS_LONG` times, and once a round."""
MIN_RUNS_LONG = 3
HOPELESS = 2.0
"""A call slower than this many times the best is not timed to the end."""
FLUSH_BYTES = 256 << 20
CLOCK_DROP = 0.05
"""A measurement during which the SM clock fell by more than this is taken again."""

Call = Callable[[], None]


class Timing(NamedTuple):
    """Microseconds of one call."""

    median_us: float
    spread_us: float
    """80th less 20th percentile."""
    runs: int
    stopped: bool = False
    """True if it was given up as hopeless after one run: an estimate."""


class Clock(Protocol):
    """Times single runs of a call, each with a cold L2."""

    def prepare(self, call: Call) -> Call:
        """The call in the form that will be timed, warmed up."""
        ...

    def run(self, call: Call, count: int) -> list[float]:
        """Microseconds of each of `count` runs."""
        ...


class CudaClock:
    """CUDA events around each run, after a write that evicts the L2 cache."""

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def prepare(self, call: Call) -> Call:
        call()
        self._torch.cuda.synchronize()
        if self.run(call, 1)[0] >= GRAPH_BELOW_US:
            return call
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            call()
        graph.replay()
        self._torch.cuda.synchronize()
        replay: Call = graph.replay
        return replay

    def run(self, call: Call, count: int) -> list[float]:
        event = self._torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(count)]
        for begin, end in pairs:
            self._flush.zero_()
            begin.record()
            call()
            end.record()
        self._torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs]


class HostClock:
    """The host's clock, for calls that Triton's interpreter runs on the CPU."""

    def prepare(self, call: Call) -> Call:
        call()
        return call

    def run(self, call: Call, count: int) -> list[float]:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begin))
        return times


def measure(clock: Clock, call: Call, stop_above_us: float | None = None) -> Timing:
    """Time one call; give up after one run if that took longer than `stop_above_us`."""
    call = clock.prepare(call)
    (first,) = clock.run(call, 1)
    if stop_above_us is not None and first > stop_above_us:
        return Timing(first, 0.0, 1, stopped=True)
    least = MIN_RUNS_LONG if first > LONG_CALL_US else MIN_RUNS
    runs = max(least, min(MAX_RUNS, round(TARGET_US / max(first, 1e-3))))
    return summary(clock.run(call, runs))


def compare(clock: Clock, calls: Sequence[Call], rounds: int) -> list[Timing]:
    """Time calls against each other: each round runs all of them, in a rotating order.

    Drift of clocks and temperature then meets all alike. A round's time is the median of
    `RUNS_PER_ROUND` runs; long calls run once.
    """
    ready = [clock.prepare(call) for call in calls]
    times: list[list[float]] = [[] for _ in ready]
    for turn in range(rounds):
        for step in range(len(ready)):
            at = (turn + step) % len(ready)
            is_long = turn > 0 and times[at][0] > LONG_CALL_US
            runs = 1 if is_long else RUNS_PER_ROUND
            times[at].append(statistics.median(clock.run(ready[at], runs)))
    return [summary(each) for each in times]


def summary(times: Sequence[float]) -> Timing:
    """Median and spread of single times."""
    ordered = sorted(times)
    last = len(ordered) - 1
    spread = ordered[round(0.8 * last)] - ordered[round(0.2 * last)]
    return Timing(statistics.median(ordered), spread, len(ordered))


def slowed_down(clocks_mhz: tuple[int, int] | None) -> bool:
    """Did the SM clock fall by more than `CLOCK_DROP` between (before, after)?"""
    if clocks_mhz is None:
        return False
    before, after = clocks_mhz
    return after < (1 - CLOCK_DROP) * before


def sm_clock_mhz(device: int = 0) -> int | None:
    """The SM clock now, or None where it cannot be read."""
    with contextlib.suppress(Exception):  # NVML is optional and fails in many ways
        import torch

        return int(torch.cuda.clock_rate(device))
    return None
