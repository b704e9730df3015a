"""Tuning for a GPU that is not here: everything but the timing.

Candidates are taken in the model's order; the first that compiles within the GPU's limits and that
Triton's interpreter finds correct on a small shape is stored as "predicted". The hopper lowering is
left out: the model does not rank it, and the interpreter cannot run it.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from attngen import config as configs
from attngen.config import KernelConfig
from attngen.errors import NoFeasibleConfigError
from attngen.records import Provenance, Record, now
from attngen.search_order import portable_order
from attngen.store import Store
from attngen.trials import Outcome
from attngen.tuner.report import TuneReport
from attngen.tuner.seeds import best_configs
from attngen.tuner.session import Compiler, Job, Progress, must_run_again
from attngen.tuner.static_check import Compiled, objection
from attngen.tuner.timing_client import TrialFailedError

MAX_CHECKS = 6
"""Configs that are compiled before giving up: a compilation costs 1 to 5 s."""


class Verifier(Protocol):
    """Checks results without a GPU; `timing_client.TimingClient(interpret=True)`, or a test's."""

    def gate(self, config: KernelConfig) -> float: ...


class Prediction:
    """State of one run without the GPU."""

    def __init__(
        self, job: Job, store: Store, compiler: Compiler, verifier: Verifier, progress: Progress
    ) -> None:
        self._job = job
        self._store = store
        self._compiler = compiler
        self._verifier = verifier
        self._progress = progress
        self._reasons: dict[str, str] = {}
        self.report = TuneReport(job.bucket.direction, job.bucket)

    def run(self) -> TuneReport:
        """Predict.

        Raises:
            NoFeasibleConfigError: none of the first `MAX_CHECKS` candidates will run.
        """
        started = time.monotonic()
        held = [r for r in self._store.winners(self._job.key.text_key) if r.key == self._job.key]
        if held:
            self.report.record = held[0]
            self.report.stopped_by = f"a {held[0].origin} winner is stored"
        else:
            self._find()
        self.report.seconds = time.monotonic() - started
        return self.report

    def _find(self) -> None:
        for compiled in self._compiled(self._order()):
            self.report.tried += 1
            error = self._accepted(compiled)
            if error is not None:
                self._win(compiled.config, error)
                return
        raise self._nothing_runs()

    def _order(self) -> list[KernelConfig]:
        """Untried candidates: what was measured here and near, then the model's order."""
        job, direction = self._job, self._job.bucket.direction
        known = {
            configs.from_dict(direction, trial.config): trial
            for trial in self._store.trials(job.key)
            if trial.status != "ok" and not must_run_again(trial, job.workload)
        }
        self.report.resumed = len(known)
        self._reasons |= {trial.config_key: trial.reason or "" for trial in known.values()}
        known_best = best_configs(self._store, job.spec, job.key, job.bucket, job.gpu, job.workload)
        stored = [config for config in known_best if config.lowering == "triton"]
        order = portable_order(job.spec, job.bucket, job.gpu)
        every: dict[KernelConfig, None] = dict.fromkeys([*stored, *order])
        return [config for config in every if config not in known][: self._limit()]

    def _limit(self) -> int:
        return MAX_CHECKS if self._job.max_trials is None else self._job.max_trials

    def _compiled(self, order: Sequence[KernelConfig]) -> Iterator[Compiled]:
        """Compile in order, as many at a time as there are children."""
        waiting = iter(order)
        under_way = [
            self._compiler.submit(c) for c in itertools.islice(waiting, self._compiler.jobs)
        ]
        while under_way:
            yield under_way.pop(0).result()
            under_way += [self._compiler.submit(c) for c in itertools.islice(waiting, 1)]

    def _accepted(self, compiled: Compiled) -> float | None:
        """The config's error in the interpreter; None, and a stored reason, if it must not run."""
        if (why := objection(compiled, self._job.gpu)) is not None:
            self._refuse(compiled.config, why.status, why.kind, why.reason)
            return None
        try:
            return self._verifier.gate(compiled.config)
        except TrialFailedError as error:
            self._refuse(compiled.config, error.status, error.kind, error.reason)
            return None

    def _refuse(self, config: KernelConfig, status: Outcome, kind: str, reason: str) -> None:
        self._store.finish_trial(self._job.key, config, status, reason=reason, origin="predicted")
        self._reasons[config.key] = reason
        if status == "skipped":
            self.report.skipped[kind] += 1
        else:
            self.report.failed.append((config.key, reason))
        self._tell_progress(config, status, reason)

    def _win(self, config: KernelConfig, error: float) -> None:
        job = self._job
        self._store.finish_trial(job.key, config, "ok", origin="predicted")
        self.report.record = Record(
            key=job.key,
            direction=job.bucket.direction,
            config=config.as_dict(),
            median_us=None,
            spread_us=None,
            default_us=None,
            rounds=0,
            error=error,
            origin="predicted",
            clocks_mhz=None,
            provenance=_provenance(job.gpu.name),
            date=now(),
        )
        self._store.record_winner(self.report.record)
        self.report.stopped_by = "the first candidate that will run"
        self._tell_progress(config, "ok", None)

    def _tell_progress(self, config: KernelConfig, status: str, reason: str | None) -> None:
        self._progress(
            {
                "event": "trial",
                "bucket": self._job.bucket.key,
                "config": config.key,
                "status": status,
                "reason": reason,
                "median_us": None,
                "best_us": None,
                "tried": self.report.tried,
                "measured": 0,
            }
        )

    def _nothing_runs(self) -> NoFeasibleConfigError:
        job = self._job
        tried = [f"{config}: {reason}" for config, reason in self._reasons.items()]
        return NoFeasibleConfigError(
            f"none of {len(tried)} {job.bucket.direction} configs of {job.spec.text_key} will run "
            f"on {job.gpu.name}; tried:\n  "
            + "\n  ".join(tried or ["none: the space is empty"])
            + "\ntry more with `--max-trials`, or use a smaller head_dim"
        )


def _provenance(gpu: str) -> Provenance:
    return Provenance(
        gpu=gpu,
        driver=None,
        cuda=None,
        torch=importlib.metadata.version("torch"),
        triton=importlib.metadata.version("triton"),
    )
