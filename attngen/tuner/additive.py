"""What each kernel of the backward takes, told from times of the two together.

The dk/dv kernel and the dq kernel run one after the other, so that a config's time is the sum of
theirs. On an H200 (D 64 and 128, 12 workloads of 70 to 149 measured configs each) sums fitted by
least squares met 9 of 10 measured times within 1.8 %. That holds within a group of kernels that
measured configs link (`cover.Groups`): between two groups any share of a time could be moved from
one kernel to the other, so that their sums say nothing until one more config links them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np

from attngen.config import KernelConfig
from attngen.search_space import joined
from attngen.tuner.cover import Groups, Part, parts_of

_BEST = 12  # of each kernel of a group, how many tiles are paired with those of the other


def best_pairs(times: Mapping[KernelConfig, float]) -> list[tuple[float, KernelConfig]]:
    """Unmeasured pairs of a dk/dv and a dq kernel that were measured with others of their group.

    Args:
        times: median of each measured config, in us.

    Returns:
        The expected time of each pair and its config, fastest first.
    """
    pairs = _pairs(times)
    groups = Groups(pairs)
    shown = {part: config for config in pairs for part in parts_of(config)}
    fitted = _fitted(times, pairs, list(shown))

    def fastest(kernel: str, group: Part) -> list[tuple[float, KernelConfig]]:
        those = [part for part in shown if part[0] == kernel and groups.of(part) == group]
        those.sort(key=fitted.__getitem__)
        return [(fitted[part], shown[part]) for part in those[:_BEST]]

    expected = {
        pair: first + second
        for group in {groups.of(part) for part in shown}
        for first, one in fastest("attn_bwd_dkdv", group)
        for second, other in fastest("attn_bwd_dq", group)
        if (pair := joined(one, other)) is not None and pair not in times
    }
    return sorted(((time, config) for config, time in expected.items()), key=lambda pair: pair[0])


def links(times: Mapping[KernelConfig, float]) -> list[tuple[float, KernelConfig]]:
    """Configs that would link two groups: of the fastest of each, one kernel of either.

    Returns:
        The time of the slower of the two fastest and the config, least first.
    """
    groups = Groups(pairs := _pairs(times))
    best: dict[Part, KernelConfig] = {}
    for config in sorted(pairs, key=times.__getitem__):
        best.setdefault(groups.of(parts_of(config)[0]), config)
    found = [
        (times[other], link)
        for one, other in itertools.combinations(best.values(), 2)
        if (link := joined(one, other)) is not None and link not in times
    ]
    return sorted(found, key=lambda pair: pair[0])


def _pairs(times: Mapping[KernelConfig, float]) -> list[KernelConfig]:
    return [config for config in times if len(parts_of(config)) == 2]


def _fitted(
    times: Mapping[KernelConfig, float], pairs: list[KernelConfig], kernels: list[Part]
) -> dict[Part, float]:
    """The time of each kernel; between groups only sums within one mean anything."""
    column = {part: at for at, part in enumerate(kernels)}
    runs = np.zeros((len(pairs), len(kernels)))
    for row, config in enumerate(pairs):
        runs[row, [column[part] for part in parts_of(config)]] = 1.0
    found = np.linalg.lstsq(runs, np.array([times[config] for config in pairs]), rcond=None)[0]
    return dict(zip(kernels, map(float, found), strict=True))
