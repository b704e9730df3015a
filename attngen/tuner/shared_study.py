"""One search that many workers share: a study in Optuna's distributed storage.

Each trial of the study is a claim. A worker adds it, running, before it compiles a config, and ends
it with what came of the config. The storage numbers the trials of a study one after the other, so
of two claims to one config the lower number holds, and both workers see that alike: no lock is
needed.

A worker writes a beat every few seconds. Whoever has not seen another's beat change for a minute
(by its own clock: hosts' clocks differ) gives up the claims of that worker, and their configs may
be claimed again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from attngen.config import KernelConfig
from attngen.errors import TuningError
from attngen.records import RecordKey
from attngen.search_space import Axes
from attngen.trials import MAX_CRASHES
from attngen.tuner.search import quiet_optuna
from attngen.tuner.storage import reaching
from attngen.workload import Workload

BEAT_S = 10.0
SILENT_S = 60.0
POLL_S = 0.5


@dataclass(frozen=True)
class Claim:
    """A trial of the study, as it was read."""

    id: int
    number: int
    worker: str
    name: str
    """The config's key, or the name of a last comparison."""
    config: dict[str, Any] | None
    status: str | None
    """"running", or what it came to; None if it was given up."""
    median_us: float | None
    reason: str | None
    begun: bool
    """Did the config run?"""
    winner: str | None
    """Of a last comparison: the record, as a line."""

    @property
    def is_crash(self) -> bool:
        return self.status == "crashed" or (self.status is None and self.begun)


def _claim_of(trial: FrozenTrial) -> Claim:
    attrs = trial.user_attrs
    status = {TrialState.RUNNING: "running", TrialState.COMPLETE: "ok"}.get(trial.state)
    return Claim(
        trial._trial_id,
        trial.number,
        attrs["worker"],
        attrs["name"],
        attrs.get("config"),
        status or attrs.get("status"),
        trial.values[0] if trial.values else None,
        attrs.get("reason"),
        bool(attrs.get("begun")),
        attrs.get("winner"),
    )


def crashes(claims: Sequence[Claim], name: str) -> int:
    """How often a config brought a worker down."""
    return sum(claim.is_crash for claim in claims if claim.name == name)


def taken(claims: Sequence[Claim]) -> set[str]:
    """The configs that are claimed, or came to something."""
    return {c.name for c in claims if c.config is not None and c.status is not None}


class SharedStudy:
    """A worker's place in the study of one key and one workload: a bucket's sizes differ.

    Args:
        url: names the storage in errors.
        space: the axes, which become the study's parameters.
    """

    def __init__(
        self, storage: BaseStorage, url: str, key: RecordKey, workload: Workload, space: Axes
    ) -> None:
        self._storage = storage
        self._url = url
        self._space = space
        self._mine: dict[str, int] = {}
        self._beats: dict[str, tuple[Any, float]] = {}
        self.worker = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.name = f"{key.bucket}-{workload}-{key.digest}"
        with quiet_optuna(), reaching(url):
            try:
                self._study = storage.create_new_study([StudyDirection.MINIMIZE], self.name)
            except DuplicatedStudyError:
                self._study = storage.get_study_id_from_name(self.name)
            # A Study keeps finished trials, so that only the others are read again.
            self._reader = optuna.load_study(study_name=self.name, storage=storage)
            for name, value in (asdict(key) | {"workload": str(workload)}).items():
                storage.set_study_user_attr(self._study, name, value)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Be seen by the others; at the end, open claims are given up."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_S):
                with contextlib.suppress(TuningError):
                    self._beat()

        self._beat()
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with contextlib.suppress(TuningError):
                for name in list(self._mine):
                    self.release(name)
                self._beat("left")

    def _beat(self, beat: str | None = None) -> None:
        with reaching(self._url):
            self._storage.set_study_user_attr(
                self._study, _beat_name(self.worker), beat or secrets.token_hex(4)
            )

    def claims(self) -> list[Claim]:
        """Every claim, in the order of the numbers; those of silent workers are given up."""
        with reaching(self._url):
            read = self._reader.get_trials(deepcopy=False)
            claims = [_claim_of(trial) for trial in read if "name" in trial.user_attrs]
            running = {c.worker for c in claims if c.status == "running"} - {self.worker}
            if not running:
                return claims
            beats = self._storage.get_study_user_attrs(self._study)
            silent = {w for w in running if self._silent(w, beats.get(_beat_name(w)))}
            given_up = [c for c in claims if c.status == "running" and c.worker in silent]
            for claim in given_up:
                self._end(claim.id, TrialState.FAIL)
        return self.claims() if given_up else claims

    def _silent(self, worker: str, beat: str | None) -> bool:
        if beat in (None, "left"):
            return True
        last, since = self._beats.get(worker, (None, 0.0))
        if beat != last:
            since = time.monotonic()
            self._beats[worker] = (beat, since)
        return time.monotonic() - since > SILENT_S

    def claim(
        self, name: str, config: KernelConfig | None = None, limit: int | None = None
    ) -> bool:
        """Take a config, or a last comparison; False if another has it, or `limit` are taken."""
        params, distributions = self._params(config)
        attrs = {"worker": self.worker, "name": name}
        trial = create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions=distributions,
            user_attrs=attrs | ({"config": config.as_dict()} if config is not None else {}),
        )
        with reaching(self._url):
            trial_id = self._storage.create_new_trial(self._study, trial)
        claims = self.claims()
        number = next(c.number for c in claims if c.id == trial_id)
        before = [c for c in claims if c.number < number]
        held = any(c.name == name and c.status not in (None, "crashed") for c in before)
        full = limit is not None and len(taken(before) - {name}) >= limit
        if held or full or crashes(before, name) >= MAX_CRASHES:
            with reaching(self._url):
                self._end(trial_id, TrialState.PRUNED)
            return False
        self._mine[name] = trial_id
        return True

    def begin(self, name: str) -> None:
        """The claimed config runs from now on: if this worker dies, that is one crash."""
        self._note(self._mine[name], begun=True)

    def finish(
        self,
        name: str,
        status: str,
        *,
        median_us: float | None = None,
        reason: str | None = None,
        winner: str | None = None,
    ) -> int | None:
        """End a claim with what came of it. Returns the trial's id; None if it is not held."""
        trial_id = self._mine.pop(name, None)
        if trial_id is None:
            return None
        named = {"reason": reason, "winner": winner, "status": None if status == "ok" else status}
        self._note(trial_id, **{k: v for k, v in named.items() if v is not None})
        failed = status in ("failed", "crashed")
        with reaching(self._url):
            if status == "ok":
                self._end(trial_id, TrialState.COMPLETE, median_us)
            else:
                self._end(trial_id, TrialState.FAIL if failed else TrialState.PRUNED)
        return trial_id

    def refute(self, config: KernelConfig, reason: str | None) -> int:
        """A config that came to a time turned out wrong: say so in a trial of its own."""
        params, distributions = self._params(config)
        trial = create_trial(
            state=TrialState.FAIL,
            params=params,
            distributions=distributions,
            user_attrs={
                "worker": self.worker,
                "name": config.key,
                "config": config.as_dict(),
                "status": "failed",
                "reason": reason,
            },
        )
        with reaching(self._url):
            return int(self._storage.create_new_trial(self._study, trial))

    def release(self, name: str) -> None:
        """Give a claim up: others may have the config."""
        if (trial_id := self._mine.pop(name, None)) is not None:
            self._note(trial_id, begun=False)
            with reaching(self._url):
                self._end(trial_id, TrialState.PRUNED)

    def _note(self, trial_id: int, **attrs: Any) -> None:
        with reaching(self._url), contextlib.suppress(UpdateFinishedTrialError):
            for name, value in attrs.items():
                self._storage.set_trial_user_attr(trial_id, name, value)

    def _end(self, trial_id: int, state: TrialState, median_us: float | None = None) -> None:
        """End a trial, unless another has: a worker may be given up while it is only slow."""
        values = None if median_us is None else [median_us]
        with contextlib.suppress(UpdateFinishedTrialError):
            self._storage.set_trial_state_values(trial_id, state, values)

    def _params(
        self, config: KernelConfig | None
    ) -> tuple[dict[str, Any], dict[str, BaseDistribution]]:
        """A config as the study's parameters; a word that is off the axes is left out."""
        params: dict[str, Any] = {}
        distributions: dict[str, BaseDistribution] = {}
        for name, value in (config.as_dict() if config is not None else {}).items():
            values = self._space.get(name, ())
            if isinstance(value, int) and values:
                every = (*values, value)
                distributions[name] = IntDistribution(min(every), max(every))
            elif value in values:
                distributions[name] = CategoricalDistribution(values)
            else:
                continue
            params[name] = value
        return params, distributions


def _beat_name(worker: str) -> str:
    return f"worker {worker}"
