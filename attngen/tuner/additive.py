"""What each kernel of the backward takes, told from times of the two together.

The dk/dv kernel and the dq kernel run one after the other, so that a config's time is the sum of
theirs. On an H200 (D 64 and 128, 12 workloads of 70 to 149 measured configs each) sums fitted by
least squares met 9 of 10 measured times within 1.8 %.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attngen.config import KernelConfig
from attngen.search_space import joined, kernel_parts

_BEST = 12  # of each kernel, how many tiles are paired with those of the other


def best_pairs(times: Mapping[KernelConfig, float]) -> list[tuple[float, KernelConfig]]:
    """Unmeasured pairs of a dk/dv and a dq kernel that were measured with others.

    Args:
        times: median of each measured config, in us.

    Returns:
        The expected time of each pair and its config, fastest first.
    """
    pairs = [config for config in times if len(kernel_parts(config)) == 2]
    shown = {part: config for config in pairs for part in kernel_parts(config).items()}
    column = {part: at for at, part in enumerate(shown)}
    runs = np.zeros((len(pairs), len(column)))
    for row, config in enumerate(pairs):
        runs[row, [column[part] for part in kernel_parts(config).items()]] = 1.0
    fitted = np.linalg.lstsq(runs, np.array([times[config] for config in pairs]), rcond=None)[0]

    def fastest(kernel: str) -> list[tuple[float, KernelConfig]]:
        those = [(fitted[column[part]], shown[part]) for part in shown if part[0] == kernel]
        return sorted(those, key=lambda pair: pair[0])[:_BEST]

    expected = {
        pair: float(first + second)
        for first, one in fastest("attn_bwd_dkdv")
        for second, other in fastest("attn_bwd_dq")
        if (pair := joined(one, other)) is not None and pair not in times
    }
    return sorted(((time, config) for config, time in expected.items()), key=lambda pair: pair[0])
