"""The portable configs that a search may try: axes, the candidates on them, single steps, indices.

Imports neither torch nor triton. `config.infeasible` decides what can run at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from attngen import decode as families
from attngen import hopper_space
from attngen.config import (
    MIN_BLOCK,
    BwdConfig,
    FwdConfig,
    KernelConfig,
    PortableConfig,
    descriptors_pay,
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

DKDV_AXES = ("block_m", "block_n", "num_warps", "num_stages")
DQ_AXES = ("dq_block_m", "dq_block_n", "dq_num_warps", "dq_num_stages")

_BLOCKS = (16, 32, 64, 128)


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
