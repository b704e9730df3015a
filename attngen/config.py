"""KernelConfig: *how* a kernel runs. Changes speed, never results beyond rounding.

`FwdConfig` and `BwdConfig` are flat records of named fields, so that a stored trial stays readable
and survives a reordering of the search space. `infeasible` is the one statement of the
constraints; search, look-up and default all ask it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_type_hints

from attngen import decode, hopper, hopper_decode
from attngen.config_base import NamedFields
from attngen.decode import DecodeConfig
from attngen.errors import NoFeasibleConfigError, SpecError, UnsupportedSpecError, nearest
from attngen.gpu import GpuInfo
from attngen.head_dim import Part
from attngen.hopper import HopperBwdConfig, HopperConfig, HopperFwdConfig
from attngen.hopper_decode import HopperDecodeConfig
from attngen.spec import MAP_TILE, SCALE_ROWS, AttentionSpec
from attngen.workload import Bucket, Direction

Tiles = Literal["pointer", "descriptor"]
MIN_BLOCK, MAX_BLOCK = 16, 1024  # Triton's largest tile holds MAX_BLOCK**2 numbers
REGISTERS_PER_THREAD = 255
E4M3_CAPABILITY = 89
"""The compute capability from which on Triton converts float8_e4m3fn."""


@dataclass(frozen=True, kw_only=True)
class FwdConfig(NamedFields):
    """Forward: one program computes `block_m` query rows (the paper's B_r) against key tiles of
    `block_n` (B_c)."""

    direction: ClassVar[Direction] = "fwd"

    lowering: Literal["triton"] = "triton"
    tiles: Tiles = "pointer"
    """How K and V tiles are addressed: by pointers, or by tensor descriptors (TMA on Hopper)."""
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class BwdConfig(NamedFields):
    """Backward: the dk/dv kernel keeps `block_n` keys and walks query tiles of `block_m`; the dq
    kernel keeps `dq_block_m` queries and walks key tiles of `dq_block_n`."""

    direction: ClassVar[Direction] = "bwd"

    lowering: Literal["triton"] = "triton"
    tiles: Tiles = "pointer"
    dq: Literal["kernel", "atomic"] = "kernel"
    """Where dq is computed: by a kernel of its own (deterministic), or added up in float32 by the
    dk/dv kernel (five matrix products instead of seven; the order of the adds is free). The
    `dq_*` tile sizes are unused then."""
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    dq_block_m: int = 64
    dq_block_n: int = 64
    dq_num_warps: int = 4
    dq_num_stages: int = 2

    @property
    def unused(self) -> tuple[str, ...]:
        """The tile of the dq kernel, if there is none."""
        return _DQ_TILE if self.dq == "atomic" else ()

    @property
    def sums_dq(self) -> bool:
        return self.dq == "atomic"


_DQ_TILE = ("dq_block_m", "dq_block_n", "dq_num_warps", "dq_num_stages")


PortableConfig = FwdConfig | BwdConfig
AnyDecodeConfig = DecodeConfig | HopperDecodeConfig
KernelConfig = PortableConfig | HopperConfig | AnyDecodeConfig
CONFIG_CLASSES: dict[Direction, dict[str, type[KernelConfig]]] = {
    "fwd": {"triton": FwdConfig, "hopper": HopperFwdConfig},
    "bwd": {"triton": BwdConfig, "hopper": HopperBwdConfig},
    "decode": {"triton": DecodeConfig, "hopper": HopperDecodeConfig},
}


def class_of(direction: Direction, named: dict[str, Any]) -> type[KernelConfig]:
    """The class that named fields belong to: their `lowering` says which.

    Raises:
        SpecError: there is no such lowering.
    """
    classes, lowering = CONFIG_CLASSES[direction], named.get("lowering", "triton")
    if not isinstance(lowering, str) or lowering not in classes:
        raise SpecError(f"lowering must be one of {', '.join(classes)}, got {lowering!r}")
    return classes[lowering]


def from_dict(direction: Direction, named: dict[str, Any]) -> KernelConfig:
    """A config from its named fields.

    Raises:
        SpecError: a field is unknown or missing.
    """
    cls = class_of(direction, named)
    known = [f.name for f in fields(cls)]
    for name in named:
        if name not in known:
            raise SpecError(
                f"unknown {direction} config field {name!r}{_hint(direction, name, known)}; "
                f"fields: {', '.join(known)}"
            )
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in named]
    if missing:
        raise SpecError(
            f"{direction} config lacks {', '.join(missing)}; fields: {', '.join(known)}"
        )
    return cls(**named)


def _hint(direction: Direction, name: str, known: list[str]) -> str:
    """A field of a similar name, or the lowering that has the field."""
    for lowering, cls in CONFIG_CLASSES[direction].items():
        if name in (f.name for f in fields(cls)):
            return f" (a field of lowering={lowering})"
    return nearest(name, known)


_KINDS: dict[Any, dict[str, Any]] = {}
"""The types of a class's fields, once asked for."""


def value_problem(cls: type[KernelConfig], name: str, value: Any) -> str | None:
    """What a config field may be, if that is not what it is: "must be an int"."""
    if cls not in _KINDS:
        _KINDS[cls] = get_type_hints(cls)
    kind = _KINDS[cls][name]
    choices = get_args(kind)
    if choices and (value not in choices or isinstance(value, bool)):
        return f"must be one of {', '.join(map(str, choices))}"
    if kind is bool and not isinstance(value, bool):
        return "must be true or false"
    if kind is int and (not isinstance(value, int) or isinstance(value, bool)):
        return "must be an int"
    return None


def parse(direction: Direction, text: str) -> KernelConfig:
    """Read `block_m=128,block_n=64,num_warps=4,num_stages=2`.

    Raises:
        SpecError: a field is unknown, missing, given twice, unused or of the wrong type.
    """
    named: dict[str, Any] = {}
    for item in filter(None, (piece.strip() for piece in text.split(","))):
        name, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals:
            raise SpecError(
                f"config item {item!r} has no '='; write a config as "
                "block_m=128,block_n=64,num_warps=4,num_stages=2"
            )
        if name in named:
            raise SpecError(f"config field {name} is given twice; keep one")
        named[name] = _read(value)
    config = from_dict(direction, named)
    for name, value in named.items():
        if problem := value_problem(type(config), name, value):
            raise SpecError(f"{name} {problem}, got {value!r}")
    if unused := named.keys() - config.as_dict().keys():
        at = getattr(config, "dq", None)
        raise SpecError(f"dq={at} has no use for them; leave out {', '.join(sorted(unused))}")
    return config


def _read(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch("-?[0-9]{1,9}", text) else text


class Footprint(NamedTuple):
    """What one kernel of a config needs, estimated by a formula (no compiler)."""

    kernel: str
    shared_bytes: int
    registers: int
    """Of 32 bits, per thread, for accumulators and score tiles alone."""


def _width(parts: tuple[Part, ...]) -> int:
    return sum(part.width for part in parts)


def footprints(spec: AttentionSpec, config: PortableConfig) -> list[Footprint]:
    """Estimated shared memory and registers of each kernel of a config."""
    d, dv, size = _width(spec.qk_parts), _width(spec.v_parts), spec.element_size
    stages = max(config.num_stages, 1)
    threads = 32 * config.num_warps
    m, n = config.block_m, config.block_n
    if isinstance(config, FwdConfig):
        shared = m * d * size + stages * n * (d + dv) * size
        registers = (m * dv + m * n) // threads
        return [Footprint("attn_fwd", shared, registers)]
    found = [
        Footprint(
            "attn_bwd_dkdv",
            n * (d + dv) * size + stages * m * (d + dv) * size + m * n * size,
            (n * (d + dv) + 2 * m * n) // threads,
        )
    ]
    if config.dq == "kernel":
        m, n, threads = config.dq_block_m, config.dq_block_n, 32 * config.dq_num_warps
        stages = max(config.dq_num_stages, 1)
        found.append(
            Footprint(
                "attn_bwd_dq",
                m * (d + dv) * size + stages * n * (d + dv) * size,
                (m * d + 2 * m * n) // threads,
            )
        )
    return found


def unserved(spec: AttentionSpec, gpu: GpuInfo) -> list[str]:
    """Why no config serves a spec on a GPU; empty if one may."""
    if spec.dtype == "float8_e4m3fn" and 0 < gpu.capability < E4M3_CAPABILITY:
        return [
            f"dtype=float8_e4m3fn needs sm_{E4M3_CAPABILITY} or later, {gpu.name} is {gpu.arch}; "
            "use float8_e5m2 there"
        ]
    return []


def infeasible(spec: AttentionSpec, config: KernelConfig, gpu: GpuInfo) -> list[str]:
    """Why a config cannot serve a spec on a GPU; empty if it can.

    The formula errs on the side of trying: what it lets through, the compiler's own figures
    decide (`attngen.tuner`).
    """
    if isinstance(config, HopperConfig):
        return hopper.infeasible(spec, config, gpu)
    if isinstance(config, HopperDecodeConfig):
        return hopper_decode.infeasible(spec, config, gpu)
    if isinstance(config, DecodeConfig):
        return decode.infeasible(spec, config, gpu)
    if spec.is_quantized:
        return [f"quantised caches have no kernels of direction {config.direction}"]
    if spec.has_lengths:
        return [f"keys of several lengths have no kernels of direction {config.direction}"]
    why = []
    for name, value in config.as_dict().items():
        if "block_" in name and (not MIN_BLOCK <= value <= MAX_BLOCK or value & (value - 1)):
            why.append(f"{name}={value} must be a power of two from {MIN_BLOCK} to {MAX_BLOCK}")
        elif name.endswith("num_warps") and value not in (1, 2, 4, 8, 16):
            why.append(f"{name}={value} must be 1, 2, 4, 8 or 16")
        elif name.endswith("num_stages") and not 1 <= value <= 8:
            why.append(f"{name}={value} must be from 1 to 8")
    if why:
        return why
    if spec.has_block_scales and isinstance(config, FwdConfig):
        why += [
            f"{name}={size} must be at most {SCALE_ROWS}: with fp8_scale=block a tile has one scale"
            for name, size in (("block_m", config.block_m), ("block_n", config.block_n))
            if size > SCALE_ROWS
        ]
    if spec.block_map:
        why += [
            f"{name}={value} must be at most {MAP_TILE}, the size of a block map's tile"
            for name, value in config.as_dict().items()
            if "block_" in name and value > MAP_TILE
        ]
    if spec.is_packed and config.tiles == "descriptor":
        why.append(
            "tiles=descriptor writes whole tiles, and one of packed sequences may end in the "
            "middle; use tiles=pointer"
        )
    if isinstance(config, BwdConfig) and config.dq == "atomic" and spec.deterministic:
        why.append("dq=atomic adds in no fixed order, and the spec asks for deterministic=true")
    if gpu.is_interpreter:
        return why
    why += unserved(spec, gpu)
    if config.tiles == "descriptor" and not gpu.has_tma:
        why.append(f"tiles=descriptor needs sm_90 or later, {gpu.name} is {gpu.arch}")
    for need in footprints(spec, config):
        if need.shared_bytes > gpu.shared_memory:
            why.append(
                f"{need.kernel} needs about {need.shared_bytes} bytes of shared memory, "
                f"{gpu.name} has {gpu.shared_memory}"
            )
        if need.registers > 2 * REGISTERS_PER_THREAD:
            why.append(f"{need.kernel} needs about {need.registers} registers a thread")
    return why


def descriptors_pay(spec: AttentionSpec, gpu: GpuInfo) -> bool:
    """Are tensor descriptors (TMA) worth trying?

    They address rows of whole 16 bytes, and tiles of packed sequences not at all. Tiles they load
    lie as tensor cores read them: products in full float32, which use none, spill on them.
    """
    whole = all(dim * spec.element_size % 16 == 0 for dim in (spec.head_dim, spec.head_dim_v))
    return gpu.has_tma and whole and not spec.is_exact and not spec.is_packed


def default_config(
    spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo
) -> PortableConfig | DecodeConfig:
    """The config used when nothing was measured: the first feasible one of a short list.

    Raises:
        UnsupportedSpecError: no config serves the spec on this GPU.
        NoFeasibleConfigError: none of the list fits; says why for each.
    """
    if why := unserved(spec, gpu):
        raise UnsupportedSpecError(why)
    if bucket.direction == "decode":
        return _decode_default(spec, bucket, gpu)
    refused = []
    for config in _defaults(spec, bucket, gpu):
        why = infeasible(spec, config, gpu)
        comfortable = all(
            need.registers <= REGISTERS_PER_THREAD for need in footprints(spec, config)
        )
        if not why and (comfortable or gpu.is_interpreter):
            return config
        refused.append(f"{config.key}: {'; '.join(why) or 'too many registers a thread'}")
    raise NoFeasibleConfigError(
        f"no {bucket.direction} config fits {spec.text_key} on {gpu.name}; tried:\n  "
        + "\n  ".join(refused)
        + "\nuse a smaller head_dim or a 16-bit dtype"
    )


def _decode_default(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> DecodeConfig:
    config = decode.default(spec, bucket, gpu)
    if config is None:
        raise NoFeasibleConfigError(
            f"no decode config fits {spec.text_key} on {gpu.name}; use a smaller head_dim or a "
            "16-bit dtype"
        )
    return config


def _defaults(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> Iterator[PortableConfig]:
    """Candidates for the default, best guess first; ever smaller tiles, so that one fits."""
    rows = max(MIN_BLOCK, bucket.seqlen_q or 128)
    keys = max(MIN_BLOCK, bucket.seqlen_k or 128)
    tall: tuple[tuple[int, int, int, int], ...] = (
        (128, 64, 4, 2),
        (64, 64, 4, 2),
        (64, 32, 4, 2),
        (32, 32, 4, 1),
        (16, 32, 4, 1),
    )
    if gpu.is_interpreter:
        tall = ((64, 64, 4, 1), *tall)
    elif spec.dtype == "float32":
        tall = ((64, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1))
        if spec.is_exact:
            tall = ((32, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1))
    tiles: Tiles = "descriptor" if descriptors_pay(spec, gpu) else "pointer"
    widest = max(spec.head_dim, spec.head_dim_v)
    if tiles == "descriptor" and widest <= 128 and spec.dtype != "float32":
        # On an H200, bfloat16, D 64 and 128: within 2 % of the best in the mean of 6 workloads.
        deep = (widest <= 64) == (bucket.direction == "bwd")
        tall = ((64, 64, 4, 3 if deep else 2), *tall)
    for m, n, warps, stages in tall:
        wide = widest > 128 and m == 128
        if bucket.direction == "fwd":
            yield FwdConfig(
                tiles=tiles,
                block_m=min(m, rows),
                block_n=min(n, keys),
                num_warps=8 if wide else warps,
                num_stages=stages,
            )
        else:
            m, n = min(m, 64), min(n, 64)
            yield BwdConfig(
                tiles=tiles,
                dq="kernel",
                block_m=min(n, rows),
                block_n=min(m, keys),
                num_warps=warps,
                num_stages=stages,
                dq_block_m=min(m, rows),
                dq_block_n=min(n, keys),
                dq_num_warps=warps,
                dq_num_stages=stages,
            )
    if bucket.direction == "bwd":
        yield BwdConfig(
            block_m=16,
            block_n=16,
            num_warps=4,
            num_stages=1,
            dq_block_m=16,
            dq_block_n=16,
            dq_num_warps=4,
            dq_num_stages=1,
        )


def with_tiles(
    config: PortableConfig | DecodeConfig, tiles: Tiles
) -> PortableConfig | DecodeConfig:
    """The same config with K and V tiles addressed another way."""
    if isinstance(config, DecodeConfig):
        return config
    return replace(config, tiles=tiles)
