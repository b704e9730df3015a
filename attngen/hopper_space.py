"""Which configs of the `hopper` lowering are worth a trial, best guess first, and the default.

The space is so small that it is enumerated: no model ranks it. Imports neither torch nor triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from attngen.errors import NoFeasibleConfigError
from attngen.gpu import GpuInfo
from attngen.hopper import (
    ROWS,
    HopperBwdConfig,
    HopperConfig,
    HopperFwdConfig,
    infeasible,
    unserved,
)
from attngen.spec import AttentionSpec
from attngen.workload import Bucket, Direction

AXES: dict[Direction, dict[str, tuple[Any, ...]]] = {
    "fwd": {
        "consumers": (2, 3),
        "block_n": (64, 128),
        "overlap": (False, True),
        "turns": (False, True),
        "q_in_registers": (False, True),
        "q_buffers": (1, 2),
        "out_in_q": (False, True),
        "conditional_rescale": (True, False),
        "exp_polynomial": (0, 1),
        "turn_ends": ("issued", "scores", "products"),
        "mask_loop": (False, True),
        "late_sums": (False, True),
        "fences": (False, True),
    },
    "bwd": {
        "dq": ("kernel", "atomic"),
        "block_m": (64, 128),
        "num_stages": (1, 2),
        "dv_first": (False, True),
        "drain_dv": (False, True),
        "dq_block_n": (64, 128),
        "dq_k_stages": (1, 2),
        "dq_v_stages": (1, 2),
    },
}
"""The values of each field that is searched; the others keep their default."""
FP8_AXES = ("exp_polynomial", "turn_ends")
"""Those that other dtypes leave at their default."""
BESIDE = ("mask_loop", "late_sums", "fences")
"""Of FP8 too, but tried only beside good configs: all combinations would be a thousand."""

SHORT = 1024
"""Lengths up to here have few tiles a row, so that what happens between rows counts."""
LONG = 4096
"""Beyond it nothing between rows counts."""

_BEST = HopperFwdConfig()
_QUIET = replace(_BEST, overlap=False)
# Forward configs that were the fastest on an H200, by the larger head dim that they suit.
_FWD_STARTS: dict[int, tuple[HopperFwdConfig, ...]] = {
    64: (
        replace(_QUIET, consumers=3, turns=True, q_buffers=2),
        replace(_QUIET, consumers=3, turns=True),
        replace(_BEST, q_in_registers=True, turns=True),
        replace(_BEST, q_in_registers=True, turns=True, q_buffers=2),
        replace(_QUIET, q_in_registers=True),
        replace(_QUIET, q_buffers=2),
        _BEST,
    ),
    128: (
        replace(_BEST, turns=True, q_buffers=2),
        replace(_BEST, q_buffers=2),
        _BEST,
        replace(_BEST, turns=True),
        replace(_QUIET, q_in_registers=True),
        replace(_QUIET, turns=True),
    ),
    256: (
        replace(_BEST, out_in_q=True, turns=True),
        replace(_BEST, out_in_q=True),
        replace(_BEST, block_n=64, out_in_q=True, turns=True),
        replace(_BEST, block_n=64, out_in_q=True),
    ),
}
_ALWAYS = replace(_QUIET, conditional_rescale=False)
_SCORES = replace(_BEST, turns=True, turn_ends="scores", conditional_rescale=False)
# The same of FP8.
_FP8_STARTS: dict[int, tuple[HopperFwdConfig, ...]] = {
    64: (
        replace(_QUIET, consumers=3, turns=True, turn_ends="scores"),
        replace(_QUIET, consumers=3, turns=True),
        replace(_QUIET, consumers=3, turns=True, q_in_registers=True, q_buffers=2),
        replace(_ALWAYS, consumers=3, turns=True, q_buffers=2),
        replace(_QUIET, consumers=3, turns=True, q_in_registers=True),
        replace(_QUIET, q_buffers=2),
    ),
    128: (
        replace(_SCORES, q_buffers=2, overlap=False, mask_loop=True, late_sums=True),
        replace(_SCORES, q_buffers=2, mask_loop=True, late_sums=True, fences=True),
        replace(_ALWAYS, turns=True, q_in_registers=True, q_buffers=2, turn_ends="products"),
        replace(_ALWAYS, turns=True, q_buffers=2, turn_ends="products"),
        replace(_BEST, turns=True, q_buffers=2, turn_ends="scores", late_sums=True, fences=True),
        replace(_SCORES, q_buffers=2),
        replace(_ALWAYS, turns=True, q_in_registers=True, q_buffers=2),
        replace(_ALWAYS, turns=True, q_buffers=2),
        replace(_QUIET, turns=True, q_buffers=2),
        _BEST,
    ),
    256: (
        replace(_QUIET, turns=True, turn_ends="scores", mask_loop=True),
        replace(_BEST, turns=True, turn_ends="scores", mask_loop=True),
        replace(_QUIET, turns=True, turn_ends="scores"),
        replace(_SCORES, overlap=False),
        replace(_QUIET, turns=True),
        replace(_ALWAYS, turns=True),
        _QUIET,
    ),
}
_ATOMIC = HopperBwdConfig(dq="atomic")
_KERNEL = HopperBwdConfig(dq="kernel")
_BWD_STARTS: dict[int, tuple[HopperBwdConfig, ...]] = {
    64: (
        _ATOMIC,
        replace(_ATOMIC, block_m=128),
        replace(_ATOMIC, block_m=128, drain_dv=False),
        replace(_ATOMIC, drain_dv=False),
        _KERNEL,
        replace(_KERNEL, block_m=128),
        replace(_KERNEL, dq_block_n=128),
    ),
    128: (
        _ATOMIC,
        replace(_ATOMIC, drain_dv=False),
        _KERNEL,
        replace(_KERNEL, dq_block_n=128),
    ),
    256: (
        _KERNEL,
        replace(_KERNEL, num_stages=1),
        replace(_KERNEL, dq_v_stages=1),
        replace(_KERNEL, num_stages=1, dq_v_stages=1),
        replace(_KERNEL, num_stages=1, dq_k_stages=1, dq_v_stages=1),
        _ATOMIC,
        replace(_ATOMIC, num_stages=1),
    ),
}


def starts(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[HopperConfig]:
    """Good configs from earlier measurements that fit here, best guess first."""
    if unserved(spec, gpu):
        return []
    dim = max(spec.head_dim, spec.head_dim_v)
    table: dict[int, Any] = _FWD_STARTS if bucket.direction == "fwd" else _BWD_STARTS
    if spec.is_fp8:
        table = _FP8_STARTS
    named: list[HopperConfig] = list(table[min(size for size in table if dim <= size)])
    walked = min([bucket.seqlen_k, *([bucket.window] if bucket.window else [])])  # keys of a row
    if spec.is_fp8 and dim <= 64 and 0 < bucket.seqlen_q <= SHORT:
        named.sort(key=lambda config: config.block_m > 2 * ROWS)  # more rows fill fewer SMs
    elif spec.is_fp8 and 64 < dim <= 128 and walked > LONG:
        named.sort(key=_has_no_fences)
    elif bucket.direction == "fwd" and dim <= 64 and 0 < walked <= SHORT:
        named.sort(key=_waits_between_rows)
    elif bucket.direction == "fwd" and 64 < dim <= 128 and walked > LONG:
        named.sort(key=_takes_turns)
    elif bucket.direction == "bwd" and dim <= 64 and not spec.has_positions:
        named.sort(key=lambda config: config.block_m == ROWS)  # larger tiles waste no masked half
    return [config for config in named if not infeasible(spec, config, gpu)]


def _waits_between_rows(config: HopperConfig) -> bool:
    """Are the next queries fetched only once those before are done with?"""
    return isinstance(config, HopperFwdConfig) and not config.q_in_registers


def _has_no_fences(config: HopperConfig) -> bool:
    return isinstance(config, HopperFwdConfig) and not config.fences


def _takes_turns(config: HopperConfig) -> bool:
    return isinstance(config, HopperFwdConfig) and config.turns


def candidates(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[HopperConfig]:
    """Every config worth a trial, a few dozen: the good ones, then what else the axes allow. None
    for lengths that fill no tile, or as a mean of packed ones half a tile."""
    lengths = (bucket.seqlen_q, bucket.seqlen_k)  # powers of two: a mean of 65 has 128
    least = 2 * ROWS if spec.is_packed else ROWS
    return [] if any(0 < each < least for each in lengths) else _fitting(spec, bucket, gpu)


def _fitting(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[HopperConfig]:
    if unserved(spec, gpu):
        return []
    named = starts(spec, bucket, gpu)
    beside = [other for config in named for other in neighbours(config, BESIDE)]
    fits = [c for c in (*beside, *_all(spec, bucket.direction)) if not infeasible(spec, c, gpu)]
    return list(dict.fromkeys([*named, *_worthwhile(spec, fits)]))


def _all(spec: AttentionSpec, direction: Direction) -> Iterator[HopperConfig]:
    left = BESIDE if spec.is_fp8 else (*BESIDE, *FP8_AXES)
    axes = {name: values for name, values in AXES[direction].items() if name not in left}
    for values in itertools.product(*axes.values()):
        named = dict(zip(axes, values, strict=True))
        if direction == "fwd":
            yield HopperFwdConfig(**named)
        else:
            yield HopperBwdConfig(**named)


def _worthwhile(spec: AttentionSpec, configs: list[HopperConfig]) -> Iterator[HopperConfig]:
    """Without what was never the faster of two: small key tiles where large ones fit, out by way
    of q where there is room for both, rescaling always, one tile in flight where two fit, and dv
    first above 64 columns, where registers do not suffice for it."""
    feasible, columns = set(configs), max(spec.head_dim, spec.head_dim_v)
    for config in configs:
        better: list[HopperConfig] = []
        if isinstance(config, HopperFwdConfig):
            better = [replace(config, block_n=2 * config.block_n), replace(config, out_in_q=False)]
            if not spec.is_fp8:  # its products take half as long, so that rescaling hides in them
                better += [replace(config, conditional_rescale=True)]
        else:
            better = [replace(config, num_stages=2)]
            better += [] if columns <= 64 else [replace(config, dv_first=False)]
            if config.dq == "kernel":
                better += [replace(config, dq_k_stages=2), replace(config, dq_v_stages=2)]
        if not any(other != config and other in feasible for other in better):
            yield config


def neighbours(config: HopperConfig, fields: Iterable[str] | None = None) -> list[HopperConfig]:
    """The configs that differ in one field, of all that are searched or of `fields`."""
    found: list[HopperConfig] = []
    for name, values in AXES[config.direction].items():
        if name in config.as_dict() and (fields is None or name in fields):
            here = getattr(config, name)
            found += [replace(config, **{name: value}) for value in values if value != here]
    return found


def default(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> HopperConfig:
    """What runs if nothing was measured: the best guess.

    Raises:
        NoFeasibleConfigError: no config of the lowering fits; says why for one of them.
    """
    found = _fitting(spec, bucket, gpu)
    if found:
        return found[0]
    example = HopperFwdConfig() if bucket.direction == "fwd" else HopperBwdConfig()
    raise NoFeasibleConfigError(
        f"no {bucket.direction} config of lowering=hopper fits {spec.text_key} on {gpu.name}, as "
        f"{example.key}: {'; '.join(infeasible(spec, example, gpu))}; unset ATTNGEN_LOWERING"
    )
