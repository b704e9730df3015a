"""How much a kernel computes and moves, and what a GPU could do at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attngen.bench import flops
from attngen.spec import AttentionSpec
from attngen.workload import Bucket, Direction, Workload


class Work(NamedTuple):
    """What one call computes, as `attngen bench` counts, and the bytes it cannot but move."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP a byte."""
        return self.flops / self.bytes

    def tflops(self, microseconds: float) -> float:
        """TFLOP/s of a call that takes so long."""
        return self.flops / microseconds / 1e6


def work_of(
    spec: AttentionSpec,
    direction: Direction,
    batch_heads: int,
    group_size: int,
    seqlen_q: int,
    seqlen_k: int,
) -> Work:
    """The work of a call. Each input is read once and each output written once."""
    spec = spec.served_as(direction)
    queries = batch_heads * seqlen_q
    keys = batch_heads / group_size * seqlen_k
    row = (spec.head_dim + spec.head_dim_v) * spec.element_size
    moved = (queries + keys) * row  # q, k, v, out; the backward's dout is out's size, and so on
    if spec.is_fp8:
        moved += queries * spec.head_dim_v  # out has two bytes an element
    if direction == "bwd":
        moved *= 2
    moved += 4 * queries  # lse
    return Work(flops(spec, Workload(batch_heads, 1, 1, seqlen_q, seqlen_k), direction), moved)


def work_of_bucket(spec: AttentionSpec, bucket: Bucket) -> Work | None:
    """The work of a call that fills a bucket; None for the bucket of all sizes."""
    sizes = (bucket.batch_heads, bucket.group_size, bucket.seqlen_q, bucket.seqlen_k)
    return work_of(spec, bucket.direction, *sizes) if all(sizes) else None


@dataclass(frozen=True)
class Peak:
    """The most a GPU can do, by its maker's word."""

    tflops: dict[str, float]
    """Dense, by kind of product (`kind_of`)."""
    tbytes: float
    """TB/s of the main memory."""
    source: str


PEAKS = {
    "nvidia_h200": Peak(
        {"FP8": 1979.0, "16-bit": 989.0, "tf32": 494.0, "float32": 67.0},
        4.8,
        "NVIDIA H200 datasheet, SXM",
    ),
    "nvidia_h100_80gb_hbm3": Peak(
        {"FP8": 1979.0, "16-bit": 989.0, "tf32": 494.0, "float32": 67.0},
        3.35,
        "NVIDIA H100 datasheet, SXM",
    ),
}
"""By `Provenance.gpu`. Dense figures; the datasheets print twice as much, with sparsity."""


def kind_of(spec: AttentionSpec) -> str:
    """Which of a GPU's peaks bounds a spec."""
    if spec.is_exact:
        return "float32"
    if spec.is_fp8:
        return "FP8"
    return "tf32" if spec.dtype == "float32" else "16-bit"
