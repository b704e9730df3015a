"""Which configs are worth trying, in which order, and which are one step apart.

Imports neither torch nor triton. `config.infeasible` decides what can run at all; this module adds
what is worth a compilation: the axes, a cost model that orders, and known good starts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from attngen import decode as families
from attngen import hopper_decode, hopper_space, lowering
from attngen.config import (
    MIN_BLOCK,
    REGISTERS_PER_THREAD,
    BwdConfig,
    Footprint,
    FwdConfig,
    KernelConfig,
    PortableConfig,
    descriptors_pay,
    footprints,
    infeasible,
)
from attngen.decode import DecodeConfig
from attngen.gpu import GpuInfo
from attngen.hopper import DQ_FIELDS, HopperBwdConfig, HopperConfig
from attngen.hopper_decode import HopperDecodeConfig
from attngen.spec import AttentionSpec
from attngen.workload import Bucket, Direction

Axes = dict[str, tuple[Any, ...]]
"""The values of each config field, in the order in which one step is one index."""

Tile = tuple[int, int, int, int]

MODEL_SEEDS = 20
"""So many portable configs are tried in the model's order before a sampler is asked."""
MODEL_SEEDS_BESIDE_HOPPER = 6
"""The same where the hopper lowering serves: on an H200 it won all that was measured."""

DKDV_AXES = ("block_m", "block_n", "num_warps", "num_stages")
DQ_AXES = ("dq_block_m", "dq_block_n", "dq_num_warps", "dq_num_stages")

_BLOCKS = (16, 32, 64, 128)
_REGISTERS_PER_SM = 65536
_MAX_WARPS_PER_SM = 64
_OTHER_REGISTERS = 48  # addresses, row statistics and loop state, beside what footprints count
_WGMMA_ROWS = 64  # one warp group (4 warps) multiplies 64 rows at a time on sm_90


def axes(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> Axes:
    """Every value of every config field for a spec in a bucket on a GPU.

    Tiles never exceed the bucket's lengths.
    """
    tiles: tuple[Any, ...] = ("pointer",)
    if descriptors_pay(spec, gpu):
        tiles = ("pointer", "descriptor")
    rows, keys = bucket.seqlen_q, bucket.seqlen_k
    if bucket.direction == "decode":
        return families.axes(spec, bucket)
    if bucket.direction == "fwd":
        return {
            "tiles": tiles,
            "block_m": _up_to(_BLOCKS, rows),
            "block_n": _up_to(_BLOCKS, keys),
            "num_warps": (2, 4, 8),
            "num_stages": (1, 2, 3, 4),
        }
    return {
        "tiles": tiles,
        "dq": ("kernel",) if spec.deterministic else ("kernel", "atomic"),
        "block_m": _up_to(_BLOCKS, rows),
        "block_n": _up_to(_BLOCKS[1:], keys),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
        "dq_block_m": _up_to(_BLOCKS, rows),
        "dq_block_n": _up_to(_BLOCKS[1:], keys),
        "dq_num_warps": (4, 8),
        "dq_num_stages": (1, 2, 3),
    }


def _up_to(blocks: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The blocks that a length can fill; the smallest one if it fills none. 0 is any length."""
    return tuple(b for b in blocks if not length or b <= length) or (max(MIN_BLOCK, length),)


def candidates(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[PortableConfig]:
    """Every config of the axes that `config.infeasible` lets through: the portable lowering's."""
    space = axes(spec, bucket, gpu)
    if bucket.direction == "fwd":
        every = (FwdConfig(**named) for named in _product(space))
        return [config for config in every if not infeasible(spec, config, gpu)]
    return list(_backward_candidates(spec, space, gpu))


def _backward_candidates(
    spec: AttentionSpec, space: Axes, gpu: GpuInfo
) -> Iterator[PortableConfig]:
    """The two kernels are feasible or not each by itself, so each tile is checked once."""
    least: dict[str, Any] = dict(zip(DQ_AXES, (MIN_BLOCK, MIN_BLOCK, 4, 1), strict=True))
    first: dict[str, Any] = dict(zip(DKDV_AXES, least.values(), strict=True))
    for tiles in space["tiles"]:
        dkdv = [
            tile
            for tile in _product({name: space[name] for name in DKDV_AXES})
            if not infeasible(spec, BwdConfig(tiles=tiles, **tile, **least), gpu)
        ]
        dq = [
            tile
            for tile in _product({name: space[name] for name in DQ_AXES})
            if not infeasible(spec, BwdConfig(tiles=tiles, **first, **tile), gpu)
        ]
        if "atomic" in space["dq"]:
            yield from (BwdConfig(tiles=tiles, dq="atomic", **tile) for tile in dkdv)
        for one, other in itertools.product(dkdv, dq):
            yield BwdConfig(tiles=tiles, **one, **other)


def search_order(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[KernelConfig]:
    """Every config that a search may try, most promising first: those of the hopper lowering where
    it serves, then the portable ones in the model's order."""
    order: list[KernelConfig] = []
    if bucket.direction == "decode":
        asked = lowering.asked_of_decode(spec, bucket, gpu)
        if asked != "triton":
            order += hopper_decode.candidates(spec, bucket, gpu)
        if asked != "hopper":
            order += portable_order(spec, bucket, gpu)
        return order
    wanted = lowering.required(spec, gpu)
    if wanted != "triton":
        order += hopper_space.candidates(spec, bucket, gpu)
    if wanted != "hopper":
        order += portable_order(spec, bucket, gpu)
    return order


def portable_order(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[KernelConfig]:
    """The portable ones of these."""
    if bucket.direction == "decode":
        return [*families.candidates(spec, bucket, gpu)]
    return [*model_order(spec, bucket, gpu, candidates(spec, bucket, gpu))]


def search_starts(
    spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo, order: Sequence[KernelConfig]
) -> list[KernelConfig]:
    """What of an order is tried before a sampler is asked: the known starts of the hopper lowering
    and the first of the portable ones; fewer of these where the other lowering serves."""
    portable = (config for config in order if config.lowering != "hopper")
    if bucket.direction == "decode":
        latent: list[KernelConfig] = [each for each in order if each.lowering == "hopper"]
        return latent + list(itertools.islice(portable, MODEL_SEEDS))
    known = set(hopper_space.starts(spec, bucket, gpu))
    starts: list[KernelConfig] = [config for config in order if config in known]
    count = MODEL_SEEDS_BESIDE_HOPPER if starts else MODEL_SEEDS
    return starts + list(itertools.islice(portable, count))


def _product(space: Axes) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*space.values()):
        yield dict(zip(space, values, strict=True))


def neighbours(config: KernelConfig, space: Axes) -> list[KernelConfig]:
    """The configs one step along one axis away (so one backward kernel at a time changes)."""
    if isinstance(config, HopperConfig):
        return [*hopper_space.neighbours(config)]
    if isinstance(config, HopperDecodeConfig):
        return []  # all are tried
    found: list[KernelConfig] = []
    for name, values in space.items():
        if name in config.unused:
            continue
        value = getattr(config, name)
        if value not in values:
            continue
        at = values.index(value)
        found += [
            replace(config, **{name: values[near]})
            for near in (at - 1, at + 1)
            if 0 <= near < len(values)
        ]
    return found


def encode(config: KernelConfig, space: Axes) -> dict[str, int] | None:
    """A config as one index an axis (a log2 scale for blocks); None if it is off the axes, as all
    of the hopper lowering are."""
    if isinstance(config, HopperConfig | HopperDecodeConfig):
        return None
    indices = {}
    for name, values in space.items():
        value = getattr(config, name)
        if value not in values:
            if name not in config.unused:
                return None
            value = values[0]
        indices[name] = values.index(value)
    return indices


def decode(
    direction: Direction, indices: dict[str, int], space: Axes
) -> PortableConfig | DecodeConfig:
    """The inverse of `encode`."""
    named = {name: values[indices[name]] for name, values in space.items()}
    if direction == "decode":
        return DecodeConfig(**named)
    return FwdConfig(**named) if direction == "fwd" else BwdConfig(**named)


def kernel_parts(config: KernelConfig) -> dict[str, tuple[Any, ...]]:
    """What each tuned kernel of a config depends on: equal parts compile to the same code."""
    named = config.as_dict()
    if config.direction == "decode":
        named.pop("programs_per_sm", None)
        return {"attn_decode": tuple(named.items())}
    if config.direction == "fwd":
        return {"attn_fwd": tuple(named.items())}
    shared = tuple(named.pop(name) for name in ("lowering", "tiles") if name in named)
    of_dq = tuple(named.pop(name) for name in _dq_fields(config) if name in named)
    parts = {"attn_bwd_dkdv": (*shared, *named.values())}
    if of_dq:
        parts["attn_bwd_dq"] = (*shared, *of_dq)
    return parts


def _dq_fields(config: KernelConfig) -> tuple[str, ...]:
    """The fields that the dq kernel alone reads."""
    return DQ_FIELDS if config.lowering == "hopper" else DQ_AXES


def joined(one: KernelConfig, other: KernelConfig) -> KernelConfig | None:
    """The dk/dv kernel of one backward config with the dq kernel of another; None if they differ
    in more, or there are none."""
    both = BwdConfig | HopperBwdConfig
    if not (isinstance(one, both) and isinstance(other, both)):
        return None
    if (one.lowering, one.tiles) != (other.lowering, other.tiles) or "atomic" in (one.dq, other.dq):
        return None
    return replace(one, **{name: getattr(other, name) for name in _dq_fields(other)})


# Tiles (block_m, block_n, num_warps, num_stages) that were among the best on an H200, by the larger
# head dim that they suit.
_FWD_STARTS = {
    64: ((64, 64, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (128, 128, 4, 3)),
    128: ((64, 64, 4, 3), (128, 64, 4, 2), (128, 128, 8, 3), (128, 128, 8, 2)),
    256: ((128, 64, 8, 2), (64, 64, 4, 2)),
}
# The same for the backward: how dq is made, the tile of dk/dv, that of dq.
_ATOMIC: Tile = (64, 64, 4, 2)  # stands where no dq kernel is
_BWD_STARTS: dict[int, tuple[tuple[Literal["kernel", "atomic"], Tile, Tile], ...]] = {
    64: (
        ("kernel", (64, 64, 4, 3), (64, 64, 4, 3)),
        ("kernel", (64, 64, 4, 3), (128, 64, 4, 3)),
        ("kernel", (64, 64, 4, 3), (64, 128, 4, 3)),
        ("atomic", (64, 64, 4, 3), _ATOMIC),
    ),
    128: (
        ("kernel", (64, 64, 4, 2), (64, 64, 4, 2)),
        ("kernel", (64, 64, 4, 2), (128, 64, 8, 2)),
        ("kernel", (64, 128, 8, 2), (64, 64, 4, 2)),
        ("kernel", (64, 128, 8, 2), (128, 64, 8, 2)),
    ),
    256: (
        ("kernel", (64, 64, 8, 2), (64, 64, 8, 2)),
        ("kernel", (64, 64, 8, 1), (64, 64, 8, 1)),
    ),
}
# Products in full float32 use no tensor cores, and keep their operands in registers: small tiles.
_FMA_FWD_STARTS = ((64, 32, 8, 2), (32, 32, 8, 2), (32, 32, 4, 1), (16, 32, 8, 1))
_FMA_BWD_STARTS = (
    ("kernel", (32, 32, 8, 1), (32, 32, 8, 1)),
    ("kernel", (16, 32, 8, 1), (32, 32, 8, 1)),
    ("atomic", (16, 32, 8, 1), _ATOMIC),
    ("kernel", (16, 32, 4, 1), (16, 32, 4, 1)),
)


def known_starts(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[PortableConfig]:
    """Good configs from earlier measurements that fit here, descriptors first where they exist."""
    dim = max(spec.head_dim, spec.head_dim_v)
    table: dict[int, Any] = _FWD_STARTS if bucket.direction == "fwd" else _BWD_STARTS
    starts = table[next((size for size in table if dim <= size), max(table))]
    if spec.is_exact:
        starts = _FMA_FWD_STARTS if bucket.direction == "fwd" else _FMA_BWD_STARTS
    space = axes(spec, bucket, gpu)
    found: list[PortableConfig] = []
    for address, start in itertools.product(reversed(space["tiles"]), starts):
        config = _start(address, start)
        if encode(config, space) is not None and not infeasible(spec, config, gpu):
            found.append(config)
    return found


def _start(address: Any, start: Any) -> PortableConfig:
    if isinstance(start[0], int):
        return FwdConfig(tiles=address, **dict(zip(DKDV_AXES, start, strict=True)))
    dq, tile, dq_tile = start
    named = dict(zip(DKDV_AXES, tile, strict=True)) | dict(zip(DQ_AXES, dq_tile, strict=True))
    return BwdConfig(tiles=address, dq=dq, **named)


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


def model_order(
    spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo, configs: Iterable[PortableConfig]
) -> list[PortableConfig]:
    """The configs, most promising first.

    Known good starts lead. The rest take turns between the kinds of kernel (tiles, dq), so that
    no kind is judged by the model alone; within a kind the cheaper goes first. Of two-kernel
    configs those that pair the best tile of one kernel with any of the other go first.
    """
    kinds: dict[tuple[Any, ...], list[PortableConfig]] = {}
    for config in configs:
        kinds.setdefault((config.tiles, getattr(config, "dq", None)), []).append(config)
    turns = [
        _by_cost(spec, bucket, gpu, kinds[kind])
        for kind in sorted(kinds, key=lambda kind: (kind[0] != "descriptor", kind[1] == "atomic"))
    ]
    everything = {config for kind in kinds.values() for config in kind}
    first = [c for c in known_starts(spec, bucket, gpu) if c in everything]
    taken = set(first)
    rest = [
        config
        for turn in itertools.zip_longest(*turns)
        for config in turn
        if config is not None and config not in taken
    ]
    return first + rest


def _by_cost(
    spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo, configs: list[PortableConfig]
) -> list[PortableConfig]:
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
