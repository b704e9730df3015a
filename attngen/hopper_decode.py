"""The hopper lowering's decode, for multi-head latent attention: v is the first columns of k.

A program has 64 rows. One warp fetches tiles of 64 keys by TMA, one warpgroup computes scores,
weights and half of out's columns, another the other half: k is read once and multiplied twice
where it lies. Imports neither torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from attngen.config_base import NamedFields
from attngen.gpu import GpuInfo
from attngen.hopper import ARCH, BARRIER_BYTES, CHECKED_TRITON
from attngen.spec import AttentionSpec
from attngen.versions import triton_minor
from attngen.workload import Bucket, Direction

ROWS, KEYS, STAGES = 64, 64, 2
WIDTHS = (128, 256, 512)
"""Columns of v; each of two warpgroups has half of them in its registers."""
REST = 64
"""Columns of k that v has not."""
MIN_ROWS = 16
"""Fewer rows, of the 64 of a program, are left to the portable lowering."""
_LACKS = {
    "has_positions": "causal, window or chunk",
    "has_masks": "prefix_lm, documents or tree_mask",
    "has_score_terms": "attn_mask, bias, alibi or functions",
    "has_softcap": "softcap",
    "sinks": "sinks",
    "packs_queries": "packed queries",
    "is_quantized": "kv_dtype",
    "has_dropout": "dropout",
}
"""Properties of specs, and what they stand for."""


@dataclass(frozen=True, kw_only=True)
class HopperDecodeConfig(NamedFields):
    """Decode of latent attention: 64 rows against key tiles of 64, two of them in flight."""

    direction: ClassVar[Direction] = "decode"
    tiles: ClassVar[Literal["pointer"]] = "pointer"
    """How the portable parts in the file address tiles."""
    block_m: ClassVar[int] = ROWS
    block_n: ClassVar[int] = KEYS
    merge: ClassVar[Literal["kernel"]] = "kernel"
    maxnreg: ClassVar[int] = 168
    """Registers a thread at launch, before warpgroups trade them."""

    lowering: Literal["hopper"] = "hopper"
    programs_per_sm: int = 1
    """How many programs splits are to give each SM."""
    split_keys: int = 0
    """Keys of a split, whatever the sizes; 0: as programs_per_sm has it, which is unused else."""

    @property
    def unused(self) -> tuple[str, ...]:
        return ("programs_per_sm",) if self.split_keys else ()


def unserved_anywhere(spec: AttentionSpec) -> list[str]:
    """Why no config serves the decode of a spec, as far as it alone says; empty if one may."""
    if not spec.shared_kv:
        return ["decode with lowering=hopper needs shared_kv"]
    why = [
        f"decode with lowering=hopper has no {name}"
        for has, name in _LACKS.items()
        if getattr(spec, has)
    ]
    if spec.element_size != 2:
        why.append(f"decode with lowering=hopper needs a dtype of 16 bits, got dtype={spec.dtype}")
    *some, last = WIDTHS
    one_of = f"{', '.join(map(str, some))} or {last}"
    if spec.head_dim_v not in WIDTHS or spec.head_dim != spec.head_dim_v + REST:
        why.append(
            f"decode with lowering=hopper needs a head_dim_v of {one_of} and "
            f"a head_dim of {REST} more, got {spec.head_dim_v} and {spec.head_dim}"
        )
    return why


def unserved(spec: AttentionSpec, gpu: GpuInfo) -> list[str]:
    """The same on a GPU."""
    why = []
    if gpu.arch != ARCH:
        why.append(f"lowering=hopper needs {ARCH}, {gpu.name} is {gpu.arch}")
    if triton_minor() not in CHECKED_TRITON:
        why.append(
            f"lowering=hopper needs Triton {' or '.join(CHECKED_TRITON)}, here is {triton_minor()}"
        )
    return why + unserved_anywhere(spec)


def infeasible(spec: AttentionSpec, config: HopperDecodeConfig, gpu: GpuInfo) -> list[str]:
    """Why a config cannot serve a spec on a GPU; empty if it can."""
    why = unserved(spec, gpu)
    if not 1 <= config.programs_per_sm <= 32:
        why.append(f"programs_per_sm={config.programs_per_sm} must be from 1 to 32")
    if config.split_keys < 0 or config.split_keys % KEYS:
        why.append(f"split_keys={config.split_keys} must be 0 or a positive multiple of {KEYS}")
    if spec.batch_invariant and not config.split_keys:
        why.append("split_keys=0 makes splits of other sizes in other batches: batch_invariant")
    if why:
        return why
    shared = (ROWS + STAGES * KEYS) * spec.head_dim * 2 + ROWS * (KEYS * 2 + 4) + BARRIER_BYTES
    if shared > gpu.shared_memory:
        why.append(
            f"attn_decode needs about {shared} bytes of shared memory, {gpu.name} has "
            f"{gpu.shared_memory}"
        )
    return why


def few_rows(bucket: Bucket) -> list[str]:
    """Why calls of these sizes are left to the portable lowering; empty if they are not."""
    rows = bucket.seqlen_q * bucket.group_size
    if not 0 < rows < MIN_ROWS:
        return []
    return [
        f"decode with lowering=hopper has {ROWS} rows a program, and {rows} rows (queries times "
        f"heads) are fewer than {MIN_ROWS}"
    ]


def unserved_here(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[str]:
    """Why no config serves calls of these sizes; empty if one does."""
    default = _every(spec)[0]
    return unserved(spec, gpu) or few_rows(bucket) or infeasible(spec, default, gpu)


def candidates(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> list[HopperDecodeConfig]:
    """Every config that may serve, the default first; none for few rows."""
    return [] if unserved_here(spec, bucket, gpu) else _every(spec)


def _every(spec: AttentionSpec) -> list[HopperDecodeConfig]:
    if spec.batch_invariant:
        return [HopperDecodeConfig(split_keys=keys) for keys in (512, 1024, 2048)]
    return [HopperDecodeConfig(programs_per_sm=count) for count in (1, 2)]
