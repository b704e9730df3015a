"""Which configs to try so that every kernel runs at least once, as outcomes come in.

The backward's two kernels are tried in pairs, and of a pair that fails it is not known at first
which of the two is at fault. So a kernel that has not run yet is tried beside one that has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from attngen.config import KernelConfig
from attngen.search_space import kernel_parts

MAX_PARTNERS = 3
"""Beside so many others that have not run either a kernel is tried."""

Part = tuple[str, tuple[Any, ...]]
"""A kernel's name, and what it depends on."""


def parts_of(config: KernelConfig) -> tuple[Part, ...]:
    """The tuned kernels of a config."""
    return tuple(kernel_parts(config).items())


class Groups:
    """Kernels in groups: two are in one if a chain of configs that run both leads from one to the
    other. Within a group the times of single kernels can be told apart."""

    def __init__(self, configs: Iterable[KernelConfig] = ()) -> None:
        self._further: dict[Part, Part] = {}
        for config in configs:
            self.join(parts_of(config))

    def of(self, part: Part) -> Part:
        """The kernel that stands for the group."""
        while (further := self._further.get(part, part)) != part:
            self._further[part] = self._further[further]
            part = further
        return part

    def join(self, parts: Sequence[Part]) -> None:
        first, *others = (self.of(part) for part in parts)
        self._further |= dict.fromkeys((first, *others), first)

    def gains(self, parts: Sequence[Part]) -> bool:
        """Would a config of these kernels show a new one, or link groups?"""
        new = any(part not in self._further for part in parts)
        return new or len({self.of(part) for part in parts}) > 1


class Cover:
    """The first configs of an order that show every kernel, and link all (Kruskal's spanning
    forest), if those that were asked for run; where one does not, others take its place."""

    def __init__(self, order: Iterable[KernelConfig]) -> None:
        self._order = [(config, parts_of(config)) for config in order]
        self._next = 0
        self._ran: set[Part] = set()
        self._suspects: Counter[Part] = Counter()
        self._broken: set[Part] = set()
        self._under_way: set[KernelConfig] = set()
        self._linked: list[tuple[Part, ...]] = []
        self._groups = Groups()

    def ask(self, seen: set[KernelConfig]) -> KernelConfig | None:
        """The next config that is not among `seen`; None if there is none for now."""
        while self._next < len(self._order):
            config, parts = self._order[self._next]
            if config not in seen and self._groups.gains(parts) and self._may_run(parts):
                self._under_way.add(config)
                self._groups.join(parts)
                return config
            self._next += 1
        return None if self._under_way else self._last_hope(seen)

    def tell(self, config: KernelConfig, ran: bool) -> None:
        """Did a config, asked for here or not, run?"""
        parts = parts_of(config)
        self._under_way.discard(config)
        if ran:
            self._broken -= set(parts)
            self._clear(parts)
            if self._suspects and not self._ran.issuperset(parts):
                self._next = 0  # suspects have another kernel to run beside
            self._ran |= set(parts)
            self._linked.append(parts)
            self._groups.join(parts)
            return
        doubtful = set(parts) - self._ran
        if len(doubtful) == 1:
            self._broken |= doubtful
            self._clear(doubtful)
        else:
            self._suspects.update(doubtful - self._broken)
        self._start_over()

    def unknown(self) -> int:
        """How many kernels were tried only beside others that do not run, or not at all."""
        every = {part for _, parts in self._order for part in parts}
        return len(every - self._ran - self._broken)

    def _may_run(self, parts: Sequence[Part]) -> bool:
        """No kernel that failed, and one under suspicion only beside those that ran."""
        doubtful = set(parts) - self._ran
        suspicious = len(doubtful) > 1 and any(part in self._suspects for part in doubtful)
        return self._broken.isdisjoint(parts) and not suspicious

    def _clear(self, parts: Iterable[Part]) -> None:
        """These are no suspects any more: it is known whether they run."""
        for part in parts:
            del self._suspects[part]  # a Counter minds no absent key

    def _start_over(self) -> None:
        """Without the links of what failed, earlier configs may be needed after all."""
        self._next = 0
        self._groups = Groups(self._under_way)
        for parts in self._linked:
            self._groups.join(parts)

    def _last_hope(self, seen: set[KernelConfig]) -> KernelConfig | None:
        """A config with a suspect that nothing that ran can be put beside."""
        for config, parts in self._order if self._suspects else ():
            if config in seen or not self._broken.isdisjoint(parts):
                continue
            doubtful = set(parts) - self._ran
            if doubtful and max(self._suspects.get(p, 0) for p in doubtful) < MAX_PARTNERS:
                self._under_way.add(config)
                return config
        return None
