"""In which order a search tries configs, and which of them before a sampler is asked.

Imports neither torch nor triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from attngen import decode as families
from attngen import hopper_decode, hopper_space, lowering
from attngen.config import BwdConfig, FwdConfig, KernelConfig, PortableConfig, infeasible
from attngen.cost_model import by_cost
from attngen.gpu import GpuInfo
from attngen.search_space import DKDV_AXES, DQ_AXES, axes, candidates, encode
from attngen.spec import AttentionSpec
from attngen.workload import Bucket

Tile = tuple[int, int, int, int]
"""block_m, block_n, num_warps, num_stages."""

MODEL_SEEDS = 20
"""So many portable configs are tried in the model's order before a sampler is asked."""
MODEL_SEEDS_BESIDE_HOPPER = 6
"""The same where the hopper lowering serves: on an H200 it won all that was measured."""


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
    """Every portable config that a search may try, most promising first."""
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


def model_order(
    spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo, configs: Iterable[PortableConfig]
) -> list[PortableConfig]:
    """The configs, most promising first.

    Known good starts lead. The rest take turns between the kinds of kernel (tiles, dq), so that
    no kind is judged by the model alone; within a kind they go by cost.
    """
    kinds: dict[tuple[Any, ...], list[PortableConfig]] = {}
    for config in configs:
        kinds.setdefault((config.tiles, getattr(config, "dq", None)), []).append(config)
    turns = [
        by_cost(spec, bucket, gpu, kinds[kind])
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


# Tiles that were among the best on an H200, by the larger head dim that they suit.
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
