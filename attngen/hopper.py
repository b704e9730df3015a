"""The configs of the `hopper` lowering, and what it can serve.

Its kernels are written in Gluon for sm_90 alone: a producer warp fetches tiles by TMA, and each
consumer, a warpgroup of four warps, multiplies 64 rows at a time. `attngen.config` asks
`infeasible` for a config and `unserved` for the lowering as a whole. Imports neither torch nor
triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from attngen.config_base import NamedFields
from attngen.gpu import GpuInfo
from attngen.spec import SCALE_ROWS, AttentionSpec
from attngen.versions import triton_minor
from attngen.workload import Direction

ARCH = "sm_90"
CHECKED_TRITON = ("3.6",)
"""Gluon is experimental: releases whose code was not looked at are refused."""
ROWS = 64
"""Query rows that one consumer multiplies."""
CONSUMER_REGISTERS = {2: 240, 3: 160}
BLOCKS = {"block_n": (32, 64, 128, 256), "block_m": (64, 128), "dq_block_n": (64, 128)}
MAX_STAGES = 4
BARRIER_BYTES = 512
"""Of shared memory, for barriers and for what partitions of warps are handed; about 300 seen."""
MAX_PARTS, MAX_WIDTH = 2, 256
FP8_WIDTHS = (64, 128, 256)


@dataclass(frozen=True, kw_only=True)
class HopperFwdConfig(NamedFields):
    """Forward: persistent programs, each a producer warp and consumers that compute 64 query rows
    against key tiles of `block_n`. The defaults suit head dims of 128."""

    direction: ClassVar[Direction] = "fwd"
    tiles: ClassVar[Literal["pointer"]] = "pointer"
    """How the portable parts in the file address tiles."""

    lowering: Literal["hopper"] = "hopper"
    consumers: Literal[2, 3] = 2
    """Warpgroups that compute; two have 240 registers a thread, three 160."""
    block_n: int = 128
    """Keys in a tile."""
    num_stages: int = 2
    """Tiles of K and V in flight."""
    overlap: bool = True
    """Softmax of a tile runs while P V of the one before is multiplied."""
    turns: bool = False
    """Consumers take turns at the tensor cores, so that one multiplies while another takes
    exponentials."""
    q_in_registers: bool = False
    """Q leaves shared memory at once, so that the next rows can be fetched early."""
    q_buffers: Literal[1, 2] = 1
    """Two hold the rows at work and the next ones."""
    out_in_q: bool = False
    """Out leaves through the shared memory that held Q, which saves a buffer of its own."""
    conditional_rescale: bool = True
    """The output is rescaled only where a row's maximum rose, with 16 bits by more than 2^8."""
    exp_polynomial: Literal[0, 1, 2, 3] = 0
    """With FP8: of eight exponentials, how many are computed by the units that multiply."""
    turn_ends: Literal["issued", "scores", "products"] = "issued"
    """With FP8 and turns: a turn is over once its products are issued, once Q K^T is done, or once
    both products are. Two consumers that multiply at once would end at once, and both take
    exponentials while nothing multiplies."""
    mask_loop: bool = False
    """With FP8: tiles in which keys are hidden have a loop of their own; others do not branch."""
    late_sums: bool = False
    """With FP8: a thread adds up the weights that it holds; the sum of a row is made at its end."""
    fences: bool = False
    """With FP8: a turn is passed on, and Q K^T asked for, before ptxas may put other work there."""

    @property
    def unused(self) -> tuple[str, ...]:
        return () if self.turns else ("turn_ends",)

    @property
    def block_m(self) -> int:
        """Query rows of a program."""
        return ROWS * self.consumers

    @property
    def maxnreg(self) -> int:
        """Registers a thread at launch, before warpgroups trade them: the SM's 65536 shared out
        among all warps."""
        return 168 if self.consumers == 2 else 128


@dataclass(frozen=True, kw_only=True)
class HopperBwdConfig(NamedFields):
    """Backward: a program keeps 128 keys (or less) and walks query tiles of `block_m`."""

    direction: ClassVar[Direction] = "bwd"
    tiles: ClassVar[Literal["pointer"]] = "pointer"
    """How the portable parts in the file address tiles."""

    lowering: Literal["hopper"] = "hopper"
    dq: Literal["kernel", "atomic"] = "kernel"
    """Where dq is computed: by a kernel of its own (deterministic), or added up in float32 by the
    dk/dv kernel, in no fixed order. The `dq_*` fields are unused then."""
    block_m: int = 64
    """Queries in a tile."""
    num_stages: int = 2
    """Tiles of Q and dO in flight."""
    dv_first: bool = False
    """dV += P^T dO is issued before dS is computed, instead of after it. Unused above 128 columns,
    where dv has a warpgroup of its own."""
    drain_dv: bool = True
    """dV is waited for before dQ is computed, which frees registers. Unused with dq=kernel."""
    dq_block_n: int = 64
    """Keys in a tile of the dq kernel."""
    dq_k_stages: int = 2
    """Tiles of K in flight in the dq kernel."""
    dq_v_stages: int = 2
    """The same of V."""

    @property
    def unused(self) -> tuple[str, ...]:
        return DQ_FIELDS if self.dq == "atomic" else ("drain_dv",)

    @property
    def sums_dq(self) -> bool:
        return self.dq == "atomic"


DQ_FIELDS = ("dq_block_n", "dq_k_stages", "dq_v_stages")
HopperConfig = HopperFwdConfig | HopperBwdConfig


# ---- what the lowering can serve --------------------------------------------------------------


def unserved(spec: AttentionSpec, gpu: GpuInfo) -> list[str]:
    """Why no config of the lowering serves a spec on a GPU; empty if one may."""
    why = []
    if gpu.arch != ARCH:
        why.append(f"lowering=hopper needs {ARCH}, {gpu.name} is {gpu.arch}")
    if triton_minor() not in CHECKED_TRITON:
        why.append(
            f"lowering=hopper needs Triton {' or '.join(CHECKED_TRITON)}, here is {triton_minor()}"
        )
    return why + unserved_anywhere(spec)


def unserved_anywhere(spec: AttentionSpec) -> list[str]:
    """The same, as far as the spec alone says."""
    why = []
    if spec.element_size > 2:
        why.append(f"lowering=hopper needs a dtype of 16 or 8 bits, got dtype={spec.dtype}")
    if spec.has_dropout:
        why.append("lowering=hopper has no dropout")
    if spec.has_lengths:
        why.append(f"lowering=hopper has no {'paged' if spec.paged else 'key_lengths'}")
    if spec.shared_kv:
        why.append("lowering=hopper has no shared_kv")
    if spec.is_quantized:
        why.append("lowering=hopper has no kv_dtype")
    why += [
        f"lowering=hopper has no {name}"
        for name in (
            *("attn_mask", "bias", "alibi", "prefix_lm", "documents", "tree_mask"),
            *("score_mod", "mask_mod"),
        )
        if getattr(spec, name)
    ]
    why += [f"lowering=hopper has no side output {name}" for name in spec.aux]
    for name, parts in (("head_dim", spec.qk_parts), ("head_dim_v", spec.v_parts)):
        dim, width = getattr(spec, name), sum(part.width for part in parts)
        if spec.is_fp8:
            if dim not in FP8_WIDTHS:
                why.append(f"lowering=hopper needs a {name} of 64, 128 or 256 for FP8, got {dim}")
        elif len(parts) > MAX_PARTS or width > MAX_WIDTH or width != dim:
            why.append(
                f"lowering=hopper needs a {name} of one or two powers of two, {MAX_WIDTH} at "
                f"most in sum, got {dim}"
            )
    return why


def infeasible(spec: AttentionSpec, config: HopperConfig, gpu: GpuInfo) -> list[str]:
    """Why a config cannot serve a spec on a GPU; empty if it can."""
    if why := _illegal(config) or unserved(spec, gpu):
        return why
    if config.sums_dq and spec.deterministic:
        return ["dq=atomic adds in no fixed order, and the spec asks for deterministic=true"]
    if isinstance(config, HopperFwdConfig):
        return _forward_limits(spec, config, gpu)
    return _backward_limits(spec, config, gpu)


def _illegal(config: HopperConfig) -> list[str]:
    """Values that no spec can have."""
    why = []
    for name, value in config.as_dict().items():
        if name in BLOCKS and value not in BLOCKS[name]:
            why.append(f"{name}={value} must be one of {', '.join(map(str, BLOCKS[name]))}")
        elif name.endswith("stages") and not 1 <= value <= MAX_STAGES:
            why.append(f"{name}={value} must be from 1 to {MAX_STAGES}")
    return why


def _forward_limits(spec: AttentionSpec, config: HopperFwdConfig, gpu: GpuInfo) -> list[str]:
    """Registers and shared memory.

    The register rule was fitted to what ptxas made of 44 configs: scores and weights of a tile,
    the output, and what softmax holds, more of it where it overlaps the products.
    """
    d, dv, size = spec.head_dim, spec.head_dim_v, spec.element_size
    registers = config.block_n // 2 + config.block_n * size // 8  # scores, and weights
    registers += dv // 2 + (45 if config.overlap else 30)
    if config.fences:  # the next scores arrive while weights are float32, but softmax holds less
        registers += config.block_n // 2 - config.block_n * size // 8 - 15
    registers += d * size // 8 if config.q_in_registers and config.overlap else 0
    q = config.block_m * d * size * config.q_buffers
    out = 0 if config.out_in_q else config.block_m * dv * 2
    ring = config.num_stages * config.block_n * (d + dv) * size
    why = _limits("attn_fwd", registers, CONSUMER_REGISTERS[config.consumers], q + out + ring, gpu)
    if config.num_stages < 2:
        why.append(f"num_stages={config.num_stages} must be at least 2")
    if config.exp_polynomial and not spec.is_fp8:
        why.append(
            f"exp_polynomial={config.exp_polynomial} needs FP8 inputs: 16-bit ones lost 1 to 17 % "
            "by it in every case measured"
        )
    if config.turn_ends != "issued" and not spec.is_fp8:
        why.append(f"turn_ends={config.turn_ends} needs FP8 inputs: not measured with 16-bit ones")
    if config.turn_ends == "products" and config.overlap:
        why.append("turn_ends=products needs overlap=false: softmax overlaps the second product")
    for name in ("mask_loop", "late_sums", "fences"):
        if getattr(config, name) and not spec.is_fp8:
            why.append(f"{name}=true needs FP8 inputs: not measured with 16-bit ones")
    if config.mask_loop and not spec.has_positions:
        why.append("mask_loop=true needs a mask by positions: causal, window or chunk")
    if spec.is_fp8 and config.out_in_q:
        why.append("out_in_q=true needs q and out of one dtype, and q is FP8")
    if spec.has_block_scales and config.block_n > SCALE_ROWS:
        why.append(
            f"block_n={config.block_n} must be at most {SCALE_ROWS}: with fp8_scale=block a tile "
            "has one scale"
        )
    widths, widths_v = ([part.width for part in p] for p in (spec.qk_parts, spec.v_parts))
    if config.out_in_q and widths_v != widths[: len(widths_v)]:
        why.append(f"out_in_q=true needs tiles of v like those of q, got {widths_v} and {widths}")
    return why


def _backward_limits(spec: AttentionSpec, config: HopperBwdConfig, gpu: GpuInfo) -> list[str]:
    """The same: gradients in registers, scores and their gradient, and about 48 more."""
    d, dv, size, most = spec.head_dim, spec.head_dim_v, spec.element_size, CONSUMER_REGISTERS[2]
    m, columns, is_wide = config.block_m, spec.head_dim + spec.head_dim_v, is_wide_backward(spec)
    keys = ROWS if is_wide else 2 * ROWS
    do_stages = 1 if is_wide and config.sums_dq and columns > 384 else config.num_stages
    shared = keys * columns * size
    shared += m * (config.num_stages * (d * size + 4) + do_stages * (dv * size + 4))
    if is_wide:
        shared += ROWS * m * 4  # P
        shared += ROWS * m * size + 2 * ROWS * m * 4 if config.sums_dq else 0  # dS, pieces of dq
    elif config.sums_dq:
        halves = 2 * ROWS * d * size if d <= ROWS and len(spec.qk_parts) == 1 else 0
        shared += 4 * ROWS * m * size + m * d * 4 + halves
    held = max(d, dv) // 2 if is_wide else columns // 2
    held += (m - ROWS) // 4 if spec.has_softcap else 0  # its polynomial, seen at 128 queries
    why = _limits("attn_bwd_dkdv", held + m + 48, most, shared, gpu)
    if config.num_stages > 3:
        why.append(f"num_stages={config.num_stages} must be from 1 to 3")
    if config.sums_dq and not adds_dq(spec):
        why.append(
            "dq=atomic needs a head_dim of at least 32, and above 128 columns one of whole 64s"
        )
    if config.dq == "kernel":
        n = config.dq_block_n
        ring = n * (config.dq_k_stages * d + config.dq_v_stages * dv)
        shared = (2 * ROWS * columns + ring) * size
        why += _limits("attn_bwd_dq", d // 2 + n + 48, most, shared, gpu)
    return why


def adds_dq(spec: AttentionSpec) -> bool:
    """Is there a backward with dq=atomic? A wide one takes 64 columns of dq at a time."""
    if is_wide_backward(spec):
        return all(part.width % ROWS == 0 for part in spec.qk_parts)
    return spec.head_dim >= 32


def is_wide_backward(spec: AttentionSpec) -> bool:
    """Do dk and dv need a warpgroup each? Where not, each warpgroup has both, for half the keys."""
    return max(spec.head_dim, spec.head_dim_v) > 128


def _limits(kernel: str, registers: int, most: int, shared: int, gpu: GpuInfo) -> list[str]:
    why = []
    if registers > most:
        why.append(f"{kernel} needs about {registers} registers a thread, a consumer has {most}")
    shared += BARRIER_BYTES
    if shared > gpu.shared_memory:
        why.append(
            f"{kernel} needs about {shared} bytes of shared memory, {gpu.name} has "
            f"{gpu.shared_memory}"
        )
    return why
