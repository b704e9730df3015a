"""A tuning run that shares its search with other workers through a `SharedStudy`.

What each worker measures it stores in its own database too. The workers end together: one that
finds nothing to claim waits for the others' claims, takes up what a dead one left, and at last one
of them plays the finals with everybody's times, and all store its winner.
"""

from __future__ import annotations

import time
from typing import Any

from attngen import config as configs
from attngen.config import KernelConfig
from attngen.records import Record
from attngen.store import Store
from attngen.trials import MAX_CRASHES, Outcome, Trial
from attngen.tuner import shared_study
from attngen.tuner.finals import Timer
from attngen.tuner.report import TuneReport
from attngen.tuner.session import Compiler, Job, Progress, Session, must_run_again
from attngen.tuner.shared_study import Claim, SharedStudy, crashes, taken
from attngen.tuner.timing_client import GPU_MEMORY


class SharedSession(Session):
    """A session whose configs are claimed from a study."""

    def __init__(
        self,
        job: Job,
        store: Store,
        compiler: Compiler,
        timer: Timer,
        progress: Progress,
        study: SharedStudy,
    ) -> None:
        super().__init__(job, store, compiler, timer, progress)
        self._study = study
        self._told: set[int] = set()
        self._taken_by_all = 0
        self._elsewhere: dict[str, KernelConfig] = {}
        """What others have claimed and not finished."""
        self._released: set[KernelConfig] = set()
        """What this worker had no memory for."""

    def run(self) -> TuneReport:
        with self._study.present():
            return super().run()

    def _resume(self) -> None:
        """Hear every outcome of the study, and tell it those that only this database has."""
        claims = self._study.claims()
        for claim in claims:
            if claim.status == "crashed" and crashes(claims, claim.name) < MAX_CRASHES:
                self._told.add(claim.id)  # it runs once more
        known = taken(claims)
        for trial in self._store.trials(self._job.key):
            again = must_run_again(trial, self._job.workload)
            if not again and trial.config_key not in known:
                self._publish(trial)
        self._hear()
        self.report.resumed, self.report.others = self.report.others, 0

    def _publish(self, trial: Trial) -> None:
        config = configs.from_dict(self._job.bucket.direction, trial.config)
        if self._study.claim(config.key, config):
            status = "skipped" if trial.status == "quarantined" else trial.status
            self._study.finish(config.key, status, median_us=trial.median_us, reason=trial.reason)

    def _hear(self) -> bool:
        """Pass what others found on to the search; True if configs became free."""
        claims = self._study.claims()
        for claim in claims:
            if claim.config is not None:
                self._hear_of(claim)
        held = taken(claims)
        self._taken_by_all = len(held)
        running = {c.name for c in claims if c.status == "running"}
        free = [name for name in self._elsewhere if name not in held]
        for name in [name for name in self._elsewhere if name not in running]:
            config = self._elsewhere.pop(name)
            if name in free and config not in self._released:
                if crashes(claims, name) < MAX_CRASHES:
                    self._search.again(config)
                else:
                    self._note(config, None)
        return bool(free)

    def _hear_of(self, claim: Claim) -> None:
        assert claim.config is not None
        config = configs.from_dict(self._job.bucket.direction, claim.config)
        if claim.status == "running":
            if claim.worker != self._study.worker:
                self._elsewhere[claim.name] = config
        elif claim.status is not None and claim.id not in self._told:
            self._told.add(claim.id)
            self.report.others += 1
            if claim.reason is not None:
                self._reasons[claim.name] = claim.reason
            if claim.median_us is None:
                self._times.pop(config, None)
                self._refuted.add(config)
            self._note(config, claim.median_us)

    def _taken(self) -> int:
        return self._taken_by_all

    def _next(self) -> KernelConfig | None:
        self._hear()
        while True:
            self.report.stopped_by = self._stop_rule()
            config = None if self.report.stopped_by else self._search.ask()
            if config is None:
                return None
            if self._study.claim(config.key, config, self._job.max_trials):
                self._taken_by_all += 1
                return config
            self._elsewhere[config.key] = config
            self._hear()

    def _begin(self, config: KernelConfig) -> Trial:
        self._study.begin(config.key)
        return super()._begin(config)

    def _finish(self, config: KernelConfig, status: Outcome, **found: Any) -> None:
        super()._finish(config, status, **found)
        median_us, reason = found.get("median_us"), found.get("reason")
        if status == "skipped" and (reason or "").startswith(GPU_MEMORY):
            self._released.add(config)
            self._study.release(config.key)  # another GPU may have room
            return
        trial_id = self._study.finish(config.key, status, median_us=median_us, reason=reason)
        if trial_id is None and status in ("failed", "crashed"):  # as a finalist
            trial_id = self._study.refute(config, reason)
        if trial_id is not None:
            self._told.add(trial_id)

    def _explore(self) -> None:
        while True:
            super()._explore()
            for config, _ in self._pending:
                self._study.release(config.key)
            self._pending.clear()
            if not self._others_leave_some():
                return

    def _others_leave_some(self) -> bool:
        """Wait for the others; True once there may be something to take up."""
        while True:
            heard = self.report.others
            free = self._hear()
            if (free or self.report.others > heard) and not self._stop_rule():
                return True
            if not self._elsewhere:
                return False
            time.sleep(shared_study.POLL_S)

    def _conclude(self) -> None:
        """Play the finals, or wait for who does, and store the winner."""
        held = self._store.measured_winner(self._job.key)
        if held is not None:
            self._time_held(held.kernel_config)
        while True:
            self._hear()
            claims = self._study.claims()
            name = f"finals of {sum(c.config is not None and c.status == 'ok' for c in claims)}"
            played = [c for c in claims if c.winner is not None and c.status == "played"]
            for claim in played:
                if claim.name == name:
                    self._keep(claim)
                    return
            if self._study.claim(name):
                if played and self._store.measured_winner(self._job.key) is None:
                    self._keep(played[-1])
                self._decide(self._store.measured_winner(self._job.key))
                assert self.report.record is not None
                self._study.finish(name, "played", winner=self.report.record.to_line())
                return
            time.sleep(shared_study.POLL_S)

    def _time_held(self, config: KernelConfig) -> None:
        """Beyond max_trials, too; what others have claimed is theirs to time."""
        if config in self._times or config in self._refuted:
            return
        if self._study.claim(config.key, config):
            super()._time_held(config)

    def _keep(self, finals: Claim) -> None:
        """Store the winner of finals that another worker played, unless a newer one is held."""
        assert finals.winner is not None
        record = Record.from_line(finals.winner, f"{self._study.name}, {finals.name}")
        while True:
            held = self._store.measured_winner(self._job.key)
            if held is not None and held.date > record.date:
                record = held
            if record is held or self._store.replace_winner(record, held):
                break
        self.report.record = record
