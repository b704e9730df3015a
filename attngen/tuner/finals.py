"""The last comparison: the best configs and the default, timed against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from attngen.config import KernelConfig
from attngen.records import Provenance, Record, RecordKey, now
from attngen.timing import slowed_down
from attngen.trials import Outcome
from attngen.tuner.timing_client import Measured, TrialFailedError
from attngen.workload import Direction

FINALISTS = 8
ROUNDS = 9
MARGIN = 0.01
"""A challenger must be this much faster than what is in use, or by the noise if that is more."""

Refuse = Callable[[KernelConfig, Outcome, str, str], None]


class Timer(Protocol):
    """Times configs of the workload at hand; `timing_client.TimingClient`, or a test's."""

    provenance: Provenance | None

    def measure(self, config: KernelConfig, stop_above_us: float | None) -> Measured: ...

    def verify(self, config: KernelConfig) -> float: ...

    def compare(
        self, configs: Sequence[KernelConfig], rounds: int, expected_us: float
    ) -> list[Measured]: ...


class Finalists:
    """The configs of the last comparison, and what came of it.

    Args:
        times: medians of everything that ran.
        default: takes part if it ran.
        held: the stored winner, which takes part and must be beaten by the margin.
        errors: largest error of each config on small shapes.
    """

    def __init__(
        self,
        timer: Timer,
        times: dict[KernelConfig, float],
        default: KernelConfig | None,
        held: Record | None,
        errors: dict[KernelConfig, float],
    ) -> None:
        self._timer = timer
        self._times = dict(times)
        self._default = default if default in times else None
        self._default_us = times.get(default) if default is not None else None
        holder = held.kernel_config if held is not None else default
        self._holder = holder if holder in times else self._default
        self._errors = errors
        self.results: dict[KernelConfig, Measured] = {}
        self.noise: float | None = None
        """How far apart two times of one config came out in the comparison, as a fraction."""

    def play(self, refuse: Refuse) -> None:
        """Verify the finalists on the tuned shape, then time them in turns.

        A config that fails is refused, and the next best takes its place.
        """
        ranked = sorted(self._times, key=self._times.__getitem__)
        always = [c for c in (self._default, self._holder) if c is not None]
        places = len({*always, *ranked[:FINALISTS]})
        chosen: list[KernelConfig] = []
        for config in dict.fromkeys([*always, *ranked]):
            if len(chosen) == places:
                break
            if self._verified(config, refuse):
                chosen.append(config)
        repeated = False
        while chosen:
            try:
                *found, again = self._in_turns([*chosen, chosen[0]])
            except TrialFailedError as error:
                if not repeated:  # a hiccup is no finalist's doing
                    repeated = True
                    continue
                guilty = self._guilty(chosen, error)
                refuse(guilty, error.status, error.kind, error.reason)
                chosen.remove(guilty)
                repeated = False
                continue
            self.results = dict(zip(chosen, found, strict=True))
            self.noise = abs(again.median_us / found[0].median_us - 1)
            return

    def _in_turns(self, configs: Sequence[KernelConfig]) -> list[Measured]:
        """Time configs against each other, a second time if the clock fell meanwhile."""
        expected = sum(self._times[config] for config in configs)
        found = self._timer.compare(configs, ROUNDS, expected)
        if slowed_down(found[0].clocks_mhz):
            found = self._timer.compare(configs, ROUNDS, expected)
        return found

    def _verified(self, config: KernelConfig, refuse: Refuse) -> bool:
        try:
            error = self._timer.verify(config)
        except TrialFailedError as failure:
            refuse(config, failure.status, failure.kind, failure.reason)
            return False
        self._errors[config] = max(error, self._errors.get(config, 0.0))
        return True

    def _guilty(self, chosen: Sequence[KernelConfig], failure: TrialFailedError) -> KernelConfig:
        """The config that brings the worker down alone; the slowest if none does."""
        for config in chosen:
            try:
                self._timer.compare([config], 1, self._times[config])
            except TrialFailedError:
                return config
        return max(chosen, key=self._times.__getitem__)

    def winner(self) -> KernelConfig:
        """The fastest, if it beats what is in use by more than margin and noise."""
        medians = {config: found.median_us for config, found in self.results.items()}
        best = min(medians, key=medians.__getitem__)
        holder = self._holder
        margin = max(MARGIN, self.noise or 0.0)
        if holder in medians and medians[best] > (1 - margin) * medians[holder]:
            return holder
        return best

    def record(self, key: RecordKey, direction: Direction) -> Record:
        """The winner with its evidence."""
        config = self.winner()
        found = self.results[config]
        # A default that was dropped has its time of the search. Without one that runs there is
        # nothing to gain against: the winner's own time.
        default_us = self._default_us or found.median_us
        if self._default in self.results:
            default_us = self.results[self._default].median_us
        assert self._timer.provenance is not None
        return Record(
            key=key,
            direction=direction,
            config=config.as_dict(),
            median_us=found.median_us,
            spread_us=found.spread_us,
            default_us=default_us,
            rounds=ROUNDS,
            error=self._errors.get(config),
            origin="measured",
            clocks_mhz=found.clocks_mhz,
            provenance=self._timer.provenance,
            date=now(),
        )
