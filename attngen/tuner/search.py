"""Which config to try next: Optuna's TPE, with repeats replaced by neighbours of the best.

Plain TPE stalls on repeats in a space this small, plain pattern search needs good starts; together
they need none. The backward's two kernels are also told apart and the best of each paired
(`additive.py`). Sizes are coded as one integer an axis. The study lives in memory: the store is
what a tuning run resumes from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.trial import TrialState

from attngen.config import KernelConfig
from attngen.search_space import Axes, decode, encode, neighbours
from attngen.tuner.additive import best_pairs, links
from attngen.tuner.cover import Cover
from attngen.workload import Direction

_NEAREST = 8  # how many of the best configs lend their neighbours
_REFUSED = 2.0  # a config that cannot run counts as this many times the worst
_WORTH = 1.01  # pairs are tried that should take at most so many times the best
_WORTH_ALL = 1.03  # the same in an exhaustive search
_WORTH_A_LINK = 1.1  # groups of kernels are linked if the best of either comes so near the best


class Search:
    """Asks for configs, each one once.

    Args:
        order: every config that may be tried, most promising first.
        space: the axes they lie on.
        starts: what to try first, in this order (may be off the axes).
        exhaustive: without a sampler, try every kernel of `order`: of the forward each config, of
            the backward each tile of its two kernels, then the pairs of the best.
    """

    def __init__(
        self,
        direction: Direction,
        order: Sequence[KernelConfig],
        space: Axes,
        starts: Iterable[KernelConfig],
        *,
        seed: int = 0,
        exhaustive: bool = False,
    ) -> None:
        self._direction = direction
        self._order = order
        self._cover = Cover(order) if exhaustive else None
        self._rank = {config: rank for rank, config in enumerate(order)}
        self._space = space
        self._starts = deque(dict.fromkeys(starts))
        self._seen: set[KernelConfig] = set()
        self._next = 0
        self._turn = False
        self._pairs: list[tuple[float, KernelConfig]] | None = None
        self._links: list[tuple[float, KernelConfig]] = []
        self._asked: dict[KernelConfig, optuna.trial.Trial] = {}
        self._times: dict[KernelConfig, float] = {}
        self._axes: dict[str, BaseDistribution] = {
            name: IntDistribution(0, len(values) - 1) for name, values in space.items()
        }
        self._study = _study(seed)

    def ask(self) -> KernelConfig | None:
        """A config not asked for before; None once there is none left."""
        if self._cover is not None:
            config = self._start() or self._cover.ask(self._seen) or self._pair(_WORTH_ALL)
        else:
            self._turn = not self._turn
            config = (
                self._start()
                or (self._pair(_WORTH) if self._turn else None)
                or self._off_axes()
                or self._sampled()
            )
        if config is not None:
            self._seen.add(config)
        return config

    def tell(self, config: KernelConfig, median_us: float | None) -> None:
        """What came of a config: its time, or None if it cannot run. It is not asked for again."""
        self._seen.add(config)
        self._times.pop(config, None)  # a finalist may turn out wrong
        if median_us is not None:
            self._times[config] = median_us
        self._pairs = None
        if self._cover is not None:
            self._cover.tell(config, median_us is not None)
        trial = self._asked.pop(config, None) or self._enqueued(config)
        if trial is None:
            return
        worst = max(self._times.values(), default=1.0)
        trial.set_constraint("cannot run", float(median_us is None))
        self._study.tell(trial, math.log(median_us or _REFUSED * worst))

    def again(self, config: KernelConfig) -> None:
        """Ask for a config once more, next: whoever had it gave no verdict."""
        self._seen.discard(config)
        self._starts.appendleft(config)

    def exhausted(self) -> str:
        """What it means that there is none left."""
        unknown = self._cover.unknown() if self._cover is not None else 0
        if unknown:
            return f"every kernel was tried, {unknown} of them only beside others that fail"
        every = "config" if self._seen.issuperset(self._rank) else "kernel"
        return f"every {every} was tried"

    def _start(self) -> KernelConfig | None:
        while self._starts:
            config = self._starts.popleft()
            if config not in self._seen:
                return config
        return None

    def _in_order(self) -> KernelConfig | None:
        while self._next < len(self._order):
            config = self._order[self._next]
            if config not in self._seen:
                return config
            self._next += 1
        return None

    def _pair(self, worth: float) -> KernelConfig | None:
        """The pair of backward kernels that should be fastest, if it comes near the best; before
        that, one that tells more about the others."""
        best = min(self._times.values(), default=0.0)
        if self._pairs is None:
            self._pairs, self._links = best_pairs(self._times), links(self._times)
        for limit, pairs in ((_WORTH_A_LINK, self._links), (worth, self._pairs)):
            for expected, config in pairs:
                if expected > limit * best:
                    break
                if config in self._rank and config not in self._seen:
                    return config
        return None

    def _sampled(self) -> KernelConfig | None:
        trial = self._study.ask(self._axes)
        config = decode(self._direction, trial.params, self._space)
        if config in self._rank and config not in self._seen:
            self._asked[config] = trial
            return config
        self._study.tell(trial, state=TrialState.FAIL)
        return self._neighbour() or self._in_order()

    def _off_axes(self) -> KernelConfig | None:
        """A neighbour of the best config, if that lies where the sampler does not look."""
        best = min(self._times, key=self._times.__getitem__, default=None)
        if best is None or encode(best, self._space) is not None:
            return None
        return self._neighbour(1)

    def _neighbour(self, nearest: int = _NEAREST) -> KernelConfig | None:
        """The most promising unseen neighbour of the best config that has one."""
        best = sorted(self._times, key=self._times.__getitem__)[:nearest]
        for config in best:
            near = [
                c
                for c in neighbours(config, self._space)
                if c in self._rank and c not in self._seen
            ]
            if near:
                return min(near, key=self._rank.__getitem__)
        return None

    def _enqueued(self, config: KernelConfig) -> optuna.trial.Trial | None:
        """A trial of the study for a config that it did not propose; None off the axes."""
        indices = encode(config, self._space)
        if indices is None:
            return None
        self._study.enqueue_trial(indices)
        return self._study.ask(self._axes)


def _study(seed: int) -> Any:
    with quiet_optuna():
        return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Without Optuna's notes about new studies."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
