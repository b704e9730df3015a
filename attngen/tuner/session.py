"""One tuning run of one direction: search, check, time, decide, record.

Knows neither processes nor devices: the compiler and the timer are handed in, so that tests can
play both. Every outcome is committed to the store as it comes, and a later run under the same key
starts from what is stored.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from attngen import config as configs
from attngen import lowering
from attngen.config import KernelConfig
from attngen.errors import NoFeasibleConfigError
from attngen.gpu import GpuInfo
from attngen.records import Record, RecordKey
from attngen.search_order import MODEL_SEEDS, search_order, search_starts
from attngen.search_space import axes
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.timing import HOPELESS, slowed_down
from attngen.trials import Outcome, Trial
from attngen.tuner.finals import Finalists, Timer
from attngen.tuner.report import TuneReport
from attngen.tuner.search import Search
from attngen.tuner.seeds import best_configs, stored_configs
from attngen.tuner.static_check import Compiled, objection
from attngen.tuner.timing_client import GPU_MEMORY, TrialFailedError
from attngen.workload import Bucket, Workload

PATIENCE = 40
"""Measurements without a gain after which the search ends."""
INTERRUPTED = "interrupted"
Progress = Callable[[dict[str, Any]], None]


class Compiler(Protocol):
    """Compiles configs in the background."""

    jobs: int

    def submit(self, config: KernelConfig) -> Future[Compiled]: ...


@dataclass(frozen=True)
class Job:
    """What to tune, and how long."""

    spec: AttentionSpec
    workload: Workload
    bucket: Bucket
    gpu: GpuInfo
    key: RecordKey
    budget: float = 60.0
    max_trials: int | None = None
    seed: int = 0
    exhaustive: bool = False
    revalidate: bool = False
    """Time the stored top again, and search no further."""

    def default(self) -> KernelConfig | None:
        """What runs untuned; None if nothing on its list fits."""
        try:
            return lowering.default(self.spec, self.bucket, self.gpu)
        except NoFeasibleConfigError:
            return None


class Session:
    """State of one run."""

    def __init__(
        self, job: Job, store: Store, compiler: Compiler, timer: Timer, progress: Progress
    ) -> None:
        self._job = job
        self._store = store
        self._compiler = compiler
        self._timer = timer
        self._progress = progress
        self._started = time.monotonic()
        self._times: dict[KernelConfig, float] = {}
        self._errors: dict[KernelConfig, float] = {}
        self._reasons: dict[str, str] = {}
        self._refuted: set[KernelConfig] = set()
        """What failed in this run, or must not run."""
        self._slowed: set[KernelConfig] = set()
        self._since_gain = 0
        self._default = job.default()
        self._search = self._make_search()
        self._pending: deque[tuple[KernelConfig, Future[Compiled]]] = deque()
        self.report = TuneReport(job.bucket.direction, job.bucket)

    def _make_search(self) -> Search:
        job = self._job
        space = axes(job.spec, job.bucket, job.gpu)
        direction = job.bucket.direction
        if job.revalidate:
            known = best_configs(self._store, job.spec, job.key, job.bucket, job.gpu, job.workload)
            first = [self._default, *known] if self._default is not None else known
            return Search(direction, first, space, first, seed=job.seed, exhaustive=True)
        order = search_order(job.spec, job.bucket, job.gpu)
        starts = [] if self._default is None else [self._default]
        starts += stored_configs(self._store, job.spec, job.key, job.bucket, job.gpu, job.workload)
        starts += search_starts(job.spec, job.bucket, job.gpu, order)
        return Search(direction, order, space, starts, seed=job.seed, exhaustive=job.exhaustive)

    def run(self) -> TuneReport:
        """Tune.

        Raises:
            NoFeasibleConfigError: no config ran; lists each with its reason.
        """
        if not self._job.revalidate:
            self._resume()
        self._explore()
        if not self._times:
            raise self._nothing_ran()
        self._conclude()
        self.report.seconds = time.monotonic() - self._started
        return self.report

    def _resume(self) -> None:
        """Tell the search every stored outcome, in the order in which they came."""
        for trial in self._store.history(self._job.key):
            config = configs.from_dict(self._job.bucket.direction, trial.config)
            if must_run_again(trial, self._job.workload):
                continue
            self.report.resumed += 1
            self._reasons[trial.config_key] = trial.reason or ""
            self._note(config, trial.median_us)

    def _conclude(self) -> None:
        """Decide, unless nothing new was measured."""
        held = self._store.measured_winner(self._job.key)
        if held is not None and self.report.measured == 0:
            self.report.record = held
        else:
            self._decide(held)

    def _explore(self) -> None:
        """Compile ahead and time what compiled, until a stop rule says so."""
        while True:
            self._fill()
            if not self._pending:
                self.report.stopped_by = self.report.stopped_by or self._search.exhausted()
                return
            compiled = self._next_compiled()
            if compiled is None:
                self.report.stopped_by = f"budget of {self._job.budget:g} s"
                return
            self.report.tried += compiled.config not in self._slowed
            self._take(compiled)

    def _stop_rule(self) -> str:
        job = self._job
        if self._since_gain >= PATIENCE and not (job.exhaustive or job.revalidate):
            return f"{PATIENCE} measurements without a gain"
        if job.max_trials is not None and self._taken() >= job.max_trials:
            return f"max_trials {job.max_trials}"
        enough = self._times or self.report.tried >= MODEL_SEEDS
        if enough and self._elapsed() >= job.budget:
            return f"budget of {job.budget:g} s"
        return ""

    def _taken(self) -> int:
        """How many configs `max_trials` counts."""
        return self.report.resumed + self.report.tried + len(self._pending)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _fill(self) -> None:
        """Keep two compilations a child under way."""
        while len(self._pending) < 2 * self._compiler.jobs:
            self.report.stopped_by = self._stop_rule()
            config = None if self.report.stopped_by else self._next()
            if config is None:
                return
            self._pending.append((config, self._compiler.submit(config)))

    def _next(self) -> KernelConfig | None:
        """The config to take up; None once there is none left."""
        return self._search.ask()

    def _begin(self, config: KernelConfig) -> Trial:
        return self._store.begin_trial(self._job.key, config, str(self._job.workload))

    def _finish(self, config: KernelConfig, status: Outcome, **found: Any) -> None:
        """Record what came of a config."""
        sizes = str(self._job.workload)
        self._store.finish_trial(self._job.key, config, status, workload=sizes, **found)

    def _give_back(self, config: KernelConfig) -> None:
        """A config that was begun has no verdict: it keeps the one it had."""
        self._store.finish_trial(self._job.key, config, "skipped", reason=INTERRUPTED)

    def _next_compiled(self) -> Compiled | None:
        """A compiled config, of several the one that spills least; None when time is up. The
        default is waited for at any rate: what is chosen must have been compared with it."""
        futures = {config: future for config, future in self._pending}
        left = max(self._job.budget - self._elapsed(), 0.0)
        patience = None if not self._times else min(left, threading.TIMEOUT_MAX)
        wait(futures.values(), timeout=patience, return_when=FIRST_COMPLETED)
        if self._default in futures and self._elapsed() >= self._job.budget:
            wait([futures[self._default]])
        ready = [(config, future) for config, future in self._pending if future.done()]
        if not ready:
            for future in futures.values():
                future.cancel()
            return None
        best = min(ready, key=lambda pair: pair[1].result().stack_bytes)
        self._pending.remove(best)
        return best[1].result()

    def _take(self, compiled: Compiled) -> None:
        """Refuse or time a compiled config, and record what came of it."""
        config = compiled.config
        if (why := objection(compiled, self._job.gpu)) is not None:
            self._refuse(config, why.status, why.kind, why.reason)
            return
        best = min(self._times.values(), default=None)
        try:
            trial = self._begin(config)
            if trial.status != "running":
                self._refuse(config, "skipped", trial.status, trial.reason or trial.status)
                return
            found = self._timer.measure(config, None if best is None else HOPELESS * best)
            if slowed_down(found.clocks_mhz) and config not in self._slowed:
                self._take_later(compiled)
                return
        except TrialFailedError as error:
            self._refuse(config, error.status, error.kind, error.reason)
            return
        except KeyboardInterrupt:
            self._give_back(config)
            raise
        self._finish(
            config,
            "ok",
            median_us=found.median_us,
            spread_us=found.spread_us,
            reason="stopped early: an estimate" if found.stopped else None,
        )
        self.report.measured += 1
        if found.error is not None:
            self._errors[config] = found.error
        self._note(config, found.median_us)
        self._tell_progress(config, "ok", found.median_us)

    def _take_later(self, compiled: Compiled) -> None:
        """The clock fell while a config was timed: it has another turn, one only."""
        config = compiled.config
        self._give_back(config)
        self._slowed.add(config)
        ready: Future[Compiled] = Future()
        ready.set_result(compiled)
        self._pending.append((config, ready))

    def _note(self, config: KernelConfig, median_us: float | None) -> None:
        """Pass an outcome on to the search and the stop rule."""
        self._search.tell(config, median_us)
        if median_us is None:
            return
        self._refuted.discard(config)
        self._since_gain += 1
        if median_us < min(self._times.values(), default=float("inf")):
            self._since_gain = 0
        self._times[config] = median_us

    def _refuse(self, config: KernelConfig, status: Outcome, kind: str, reason: str) -> None:
        """Record that a config gave no time."""
        self._finish(config, status, reason=reason)
        self._times.pop(config, None)
        if kind != GPU_MEMORY:
            self._refuted.add(config)
        self._reasons[config.key] = reason
        if status == "skipped":
            self.report.skipped[kind] += 1
        else:
            self.report.failed.append((config.key, reason))
        self._search.tell(config, None)
        self._tell_progress(config, status, None)

    def _tell_progress(self, config: KernelConfig, status: str, median_us: float | None) -> None:
        self._progress(
            {
                "event": "trial",
                "bucket": self._job.bucket.key,
                "config": config.key,
                "status": status,
                "reason": self._reasons.get(config.key),
                "median_us": median_us,
                "best_us": min(self._times.values(), default=None),
                "tried": self.report.tried,
                "measured": self.report.measured,
                "seconds": self._elapsed(),
            }
        )

    def _nothing_ran(self) -> NoFeasibleConfigError:
        job = self._job
        tried: Sequence[str] = [f"{config}: {why}" for config, why in self._reasons.items()]
        return NoFeasibleConfigError(
            f"no {job.bucket.direction} config of {job.spec.text_key} runs on {job.gpu.name}; "
            f"tried {len(tried)}:\n  "
            + "\n  ".join(tried or ["none: the space is empty"])
            + "\nuse a smaller head_dim or a 16-bit dtype, or raise the budget"
        )

    def _decide(self, held: Record | None) -> None:
        """Re-measure the best against each other and store the winner."""
        while True:
            if held is not None:
                self._time_held(held.kernel_config)
            record = self._play(held)
            if record is held or self._store.replace_winner(record, held):
                break
            held = self._store.measured_winner(self._job.key)  # another process was faster
        self.report.record = record
        self._progress({"event": "winner", "bucket": self._job.bucket.key, "config": record.config})

    def _time_held(self, config: KernelConfig) -> None:
        """What is in use takes part in the last comparison: time it, if that was not done."""
        self._pending.clear()
        if config in self._times or config in self._refuted:
            return
        self.report.tried += 1
        self._take(self._compiler.submit(config).result())
        while self._pending:  # the clock fell meanwhile
            self._take(self._pending.popleft()[1].result())

    def _play(self, held: Record | None) -> Record:
        """The last comparison's record; `held` itself if that could neither lose nor fail."""
        finalists = Finalists(self._timer, self._times, self._default, held, self._errors)
        finalists.play(self._refuse)
        in_use = None if held is None else held.kernel_config
        untried = in_use not in finalists.results and in_use not in self._refuted
        if held is not None and untried:
            return held
        if not finalists.results:
            raise self._nothing_ran()
        for config, found in finalists.results.items():
            sizes = str(self._job.workload)
            self._store.finish_trial(
                self._job.key,
                config,
                "ok",
                median_us=found.median_us,
                spread_us=found.spread_us,
                workload=sizes,
            )
        self.report.noise = finalists.noise
        return finalists.record(self._job.key, self._job.bucket.direction)


def must_run_again(trial: Trial, workload: Workload) -> bool:
    """Did an earlier run leave a config without a verdict for this workload?"""
    if trial.status == "ok":
        return trial.median_us is None or trial.workload != str(workload)
    if trial.status == "skipped":
        return trial.reason is not None and trial.reason.startswith((INTERRUPTED, GPU_MEMORY))
    return trial.status in ("running", "crashed")
