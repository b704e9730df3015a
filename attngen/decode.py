"""The decode family: few query rows against many keys, which several programs share out.

A program takes all query heads of a key/value head, and a run of its keys (FlashDecoding); a second
kernel merges what the runs gave, by the maths of `attngen.merge`. It serves forwards of few query
rows, and those of any length over a paged cache or keys of several lengths. Imports neither torch
nor triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal, Protocol

from attngen.config_base import NamedFields
from attngen.gpu import GpuInfo
from attngen.spec import AttentionSpec
from attngen.spec_rules import undecoded
from attngen.workload import Bucket, Direction, ceil_pow2

MAX_ROWS = 16
"""Query rows of a call that decode serves by itself."""
MAX_SPLITS = 256
INVARIANT_KEYS = 512
"""Keys of a split where a row's bits may depend on nothing else in the batch."""
gives_way = False
"""Set while a forward config is pinned (`attngen.pinned`): only what needs decode runs it."""
_MIN_BLOCK, _MAX_BLOCK = 16, 256
_REGISTERS = 255
_ROWS_OF_LAST = 8
"""Rows that the last split merges, one after the other, in less time than a launch takes."""
_ENOUGH = 0.95
"""Of the best occupation of the last wave: fewer splits that reach it are better."""


class Cut(Protocol):
    """How a config of either lowering cuts up rows and keys."""

    @property
    def block_m(self) -> int: ...
    @property
    def block_n(self) -> int: ...
    @property
    def programs_per_sm(self) -> int: ...
    @property
    def split_keys(self) -> int: ...
    @property
    def merge(self) -> Literal["kernel", "last"]: ...


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(NamedFields):
    """Decode: one program computes `block_m` rows, query rows times the heads of a group, against
    key tiles of `block_n`."""

    direction: ClassVar[Direction] = "decode"

    lowering: Literal["triton"] = "triton"
    tiles: Literal["pointer"] = "pointer"
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1
    """How many programs splits are to give each SM."""
    split_keys: int = 0
    """Keys of a split, whatever the sizes; 0: as programs_per_sm has it, which is unused else."""
    merge: Literal["kernel", "last"] = "kernel"
    """Splits are merged by a second kernel, or by the last one that is done with its rows."""

    @property
    def unused(self) -> tuple[str, ...]:
        return ("programs_per_sm",) if self.split_keys else ()


def serves(spec: AttentionSpec, seqlen_q: int) -> bool:
    """Does decode serve a forward of so many query rows?"""
    if spec.has_lengths or spec.shared_kv or spec.is_quantized:
        return True
    return seqlen_q <= MAX_ROWS and not gives_way and not undecoded(spec)


def forward_direction(spec: AttentionSpec, seqlen_q: int) -> Direction:
    """Which family of kernels serves a forward."""
    return "decode" if serves(spec, seqlen_q) else "fwd"


def family(direction: Direction, spec: AttentionSpec, seqlen_q: int) -> Direction:
    """The same for any direction."""
    return forward_direction(spec, seqlen_q) if direction == "fwd" else direction


def split_count(config: Cut, programs: int, seqlen_k: int, sm_count: int) -> int:
    """Into how many splits the keys of each program are cut.

    The rule: as many as give each SM `programs_per_sm` programs; where there are about so many
    anyway, the fewest that fill the last wave well. A split has a tile at least.

    Args:
        programs: batch * num_heads_kv * tiles of rows.
        seqlen_k: keys that a row may see.
    """
    tiles = max(1, -(-seqlen_k // config.block_n))
    if config.split_keys:
        return max(1, -(-tiles * config.block_n // config.split_keys))
    slots = config.programs_per_sm * max(1, sm_count)
    most = min(tiles, MAX_SPLITS, max(4, slots // max(1, programs)))
    filled = [_filled(count * programs / slots) for count in range(1, most + 1)]
    count = 1 + next(n for n, part in enumerate(filled) if part >= _ENOUGH * max(filled))
    return -(-tiles // -(-tiles // count))  # without splits that would be empty


def _filled(waves: float) -> float:
    """The part of so many waves of programs that has work."""
    return waves / -(-waves // 1)


def row_tiles(config: Cut, seqlen_q: int, group_size: int) -> int:
    """Tiles of the rows that share a key/value head."""
    return -(-seqlen_q * group_size // config.block_m)


def partial_shape(splits: int, rows: int, dim_v: int) -> tuple[int, int]:
    """The scratch of several splits, float32: of each the outs of all rows, then their sums of
    weights, then the maxima that these are relative to."""
    return splits, rows * (dim_v + 2)


def counter_count(config: Cut, tiles: int, num_heads_kv: int) -> int:
    """How many counters several splits need, of tiles of rows of each head."""
    return tiles * num_heads_kv if config.merge == "last" else 0


def footprint(spec: AttentionSpec, config: DecodeConfig, capability: int = 90) -> tuple[int, int]:
    """(bytes of shared memory, registers a thread for accumulators and scores), by a formula.

    From 64 rows on, Hopper multiplies from shared memory: a tile stays there until it is done with,
    and with several stages there are two at least.
    """
    d, dv = (sum(part.width for part in parts) for parts in (spec.qk_parts, spec.v_parts))
    m, n, size = config.block_m, config.block_n, spec.element_size
    columns = d if spec.shared_kv else d + dv
    buffers = max(1, config.num_stages - 1)
    if m >= 64 and not spec.is_exact and capability >= 90:
        buffers = config.num_stages
    shared = m * d * size + buffers * n * columns * (1 if spec.is_quantized else size)
    registers = (m * dv + m * n) // (32 * config.num_warps)
    return shared, registers


def infeasible(spec: AttentionSpec, config: DecodeConfig, gpu: GpuInfo) -> list[str]:
    """Why a config cannot serve a spec on a GPU; empty if it can."""
    why = list(undecoded(spec))
    for name in ("block_m", "block_n"):
        value = getattr(config, name)
        if not _MIN_BLOCK <= value <= _MAX_BLOCK or value & (value - 1):
            why.append(f"{name}={value} must be a power of two from {_MIN_BLOCK} to {_MAX_BLOCK}")
    if config.num_warps not in (1, 2, 4, 8, 16):
        why.append(f"num_warps={config.num_warps} must be 1, 2, 4, 8 or 16")
    if not 1 <= config.num_stages <= 8:
        why.append(f"num_stages={config.num_stages} must be from 1 to 8")
    if not 1 <= config.programs_per_sm <= 32:
        why.append(f"programs_per_sm={config.programs_per_sm} must be from 1 to 32")
    if config.split_keys < 0 or (config.split_keys and config.split_keys % config.block_n):
        why.append(f"split_keys={config.split_keys} must be a multiple of block_n={config.block_n}")
    if config.merge not in ("kernel", "last"):
        why.append(f'merge={config.merge} must be "kernel" or "last"')
    if spec.batch_invariant and not config.split_keys:
        why.append("split_keys=0 makes splits of other sizes in other batches: batch_invariant")
    if why or gpu.is_interpreter:
        return why
    shared, registers = footprint(spec, config, gpu.capability)
    if shared > gpu.shared_memory:
        why.append(
            f"attn_decode needs about {shared} bytes of shared memory, {gpu.name} has "
            f"{gpu.shared_memory}"
        )
    if registers > 2 * _REGISTERS:
        why.append(f"attn_decode needs about {registers} registers a thread")
    return why


def default(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> DecodeConfig | None:
    """The config used when nothing was measured: the first that fits; None if none does."""
    return next((c for c in _defaults(spec, bucket) if not infeasible(spec, c, gpu)), None)


def _defaults(spec: AttentionSpec, bucket: Bucket) -> Iterator[DecodeConfig]:
    """Candidates for the default, best guess first."""
    rows = ceil_pow2(bucket.seqlen_q * bucket.group_size)
    block_m = min(max(_MIN_BLOCK, rows), 64)
    keys = max(_MIN_BLOCK, bucket.seqlen_k or _MAX_BLOCK)
    split_keys = INVARIANT_KEYS if spec.batch_invariant else 0
    wide, long = max(spec.head_dim, spec.head_dim_v) > 128, bucket.seqlen_k > 1024
    # On an H200, bfloat16, D 128, 1 to 128 sequences of 512 to 65536 keys: 0.98 of the best in the
    # mean. Pages, whose addresses take registers, are best in smaller tiles.
    sizes = [(64, 4, 3, 2), (64, 4, 2, 2), (32, 4, 2, 2), (16, 4, 1, 2)]
    if spec.is_quantized:
        sizes = [_of_quantized(spec, bucket.page_size), *sizes]
    elif spec.paged:
        sizes = [(64, 4, 4, 2), *sizes]
    elif long and not wide:
        sizes = [(128, 8 if block_m == _MIN_BLOCK else 4, 3, 1), *sizes]
    if spec.shared_kv and wide:
        sizes = [(32, 8, 3, 1), (32, 8, 2, 1), (16, 8, 1, 2)]
        block_m = block_m if rows else 64  # of any size: heads that share k are many
        if block_m == 64 and not spec.hides_keys:
            sizes = [(64, 8, 2, 1), *sizes]  # spills, and is faster even so
    if spec.is_exact:
        sizes = [(32, 4, 1, 4), (16, 4, 1, 4)]
        block_m = 16
    spills = block_m == 64 and max(spec.head_dim, spec.head_dim_v) > 64  # with 4 warps
    for n, warps, stages, programs in sizes:
        yield DecodeConfig(
            block_m=block_m,
            block_n=min(n, keys),
            num_warps=8 if spills else warps,
            num_stages=stages,
            programs_per_sm=1 if split_keys else programs,
            split_keys=split_keys,
            merge="last" if 0 < rows <= _ROWS_OF_LAST else "kernel",
        )


def _of_quantized(spec: AttentionSpec, page_size: int) -> tuple[int, int, int, int]:
    """The same of a quantised cache, D 128: few warps, which exchange little."""
    by_page = spec.kv_scale == "head" and spec.paged
    if by_page and page_size >= 128 or spec.kv_scale == "key" and not spec.paged:
        return (128, 4, 3, 2)
    if by_page and page_size >= 64:
        return (64, 4, 3, 4)
    return (64, 2, 3, 4)


def axes(spec: AttentionSpec, bucket: Bucket) -> dict[str, tuple[Any, ...]]:
    """Every value of every config field that is worth a compilation."""
    rows = ceil_pow2(bucket.seqlen_q * bucket.group_size) or _MIN_BLOCK
    keys = bucket.seqlen_k
    return {
        "tiles": ("pointer",),
        "block_m": tuple(m for m in (16, 32, 64, 128) if m == 16 or m <= rows),
        "block_n": tuple(n for n in (16, 32, 64, 128, 256) if n == 16 or not keys or n <= keys),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2, 3, 4, 5),
        "programs_per_sm": (1,) if spec.batch_invariant else (1, 2, 3, 4, 6, 8),
        "merge": ("kernel", "last"),
        "split_keys": (256, 512, 1024, 2048) if spec.batch_invariant else (0,),
    }


def candidates(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[DecodeConfig]:
    """Every feasible config of the axes, the defaults first."""
    space = axes(spec, bucket)
    every = [DecodeConfig(**dict(zip(space, x, strict=True))) for x in product(*space.values())]
    order = dict.fromkeys([*_defaults(spec, bucket), *every])
    return [config for config in order if not infeasible(spec, config, gpu)]
