"""The relative time of each kernel of a portable config, from its tiles and the sizes of a bucket.

Imports neither torch nor triton. Less is better, and only the order means anything.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attngen.config import (
    REGISTERS_PER_THREAD,
    Footprint,
    FwdConfig,
    PortableConfig,
    footprints,
)
from attngen.gpu import GpuInfo
from attngen.search_space import kernel_parts
from attngen.spec import AttentionSpec
from attngen.workload import Bucket

_REGISTERS_PER_SM = 65536
_MAX_WARPS_PER_SM = 64
_OTHER_REGISTERS = 48  # addresses, row statistics and loop state, beside what footprints count
_WGMMA_ROWS = 64  # one warp group (4 warps) multiplies 64 rows at a time on sm_90


class _Walk(NamedTuple):
    """One kernel: programs that keep `kept` rows and walk tiles of `walked` rows."""

    products: int
    """Matrix products per tile."""
    kept: int
    walked: int
    num_warps: int
    num_stages: int
    length: int
    """Rows that programs share out among themselves."""


def _walks(config: PortableConfig, bucket: Bucket) -> list[_Walk]:
    """In the order of `config.footprints`."""
    m, n, tail = config.block_m, config.block_n, (config.num_warps, config.num_stages)
    if isinstance(config, FwdConfig):
        return [_Walk(2, m, n, *tail, bucket.seqlen_q)]
    if config.dq == "atomic":
        return [_Walk(5, n, m, *tail, bucket.seqlen_k)]
    dq_tail = (config.dq_num_warps, config.dq_num_stages)
    return [
        _Walk(4, n, m, *tail, bucket.seqlen_k),
        _Walk(3, config.dq_block_m, config.dq_block_n, *dq_tail, bucket.seqlen_q),
    ]


def _cost(walk: _Walk, need: Footprint, bucket: Bucket, gpu: GpuInfo) -> float:
    """Relative time of one kernel: less is better; only the order means anything."""
    # A product of a tile costs its multiply-adds, plus the bytes of both operands: those of the
    # walked rows are shared by the kept ones, and the other way round.
    work = walk.products * (1 + 32 / walk.kept + 24 / walk.walked)
    registers = need.registers + _OTHER_REGISTERS
    if registers > REGISTERS_PER_THREAD:
        work *= 1 + (registers - REGISTERS_PER_THREAD) / 64
    resident = min(
        gpu.shared_memory // max(need.shared_bytes, 1),
        _REGISTERS_PER_SM // (32 * walk.num_warps * min(registers, REGISTERS_PER_THREAD)),
        _MAX_WARPS_PER_SM // walk.num_warps,
    )
    warps = max(resident, 1) * walk.num_warps
    work *= 1 + 1.5 / warps  # few warps hide little latency
    work *= {1: 1.25, 2: 1.0, 3: 0.98}.get(walk.num_stages, 1.0)
    if gpu.capability == 90 and walk.kept < _WGMMA_ROWS * max(1, walk.num_warps // 4):
        work *= 1.6  # falls back to the older matrix instruction
    if walk.length and bucket.batch_heads:
        programs = math.ceil(walk.length / walk.kept) * bucket.batch_heads
        work *= math.ceil(programs / gpu.sm_count) * gpu.sm_count / programs
    return work


def costs(
    spec: AttentionSpec, config: PortableConfig, bucket: Bucket, gpu: GpuInfo
) -> tuple[float, ...]:
    """The model's cost of each tuned kernel of a config."""
    pairs = zip(_walks(config, bucket), footprints(spec, config), strict=True)
    return tuple(_cost(walk, need, bucket, gpu) for walk, need in pairs)


def by_cost(
    spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo, configs: list[PortableConfig]
) -> list[PortableConfig]:
    """The configs, cheapest first; of two-kernel ones those that pair the best tile of one kernel
    with any of the other."""
    known: dict[Any, float] = {}
    cost_of: dict[PortableConfig, list[float]] = {}
    for config in configs:
        parts = list(kernel_parts(config).items())
        if any(part not in known for part in parts):
            known.update(zip(parts, costs(spec, config, bucket, gpu), strict=True))
        cost_of[config] = [known[part] for part in parts]
    ranks = [
        {cost: rank for rank, cost in enumerate(sorted(set(column)))}
        for column in zip(*cost_of.values(), strict=True)
    ]

    def key(config: PortableConfig) -> tuple[Any, ...]:
        each = cost_of[config]
        rank = math.prod(ranks[i][cost] for i, cost in enumerate(each))
        return (rank if len(each) > 1 else 0, sum(each), config.key)

    return sorted(configs, key=key)
