"""Workload: *how large* a call is, and the one function that buckets it.

The tuner, the look-up and `explain` all call `bucket`; a second bucketing would give records that
are written under one key and sought under another.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from attngen.errors import SpecError, nearest
from attngen.spec import AttentionSpec
from attngen.values import shown, whole

Direction = Literal["fwd", "bwd", "jvp", "map", "decode"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "bwd")
"""Those that a call has: "jvp", the forward with tangents, runs by default configs, and "map", the
kernel of block maps, by one."""
FAMILIES: tuple[Direction, ...] = (*DIRECTIONS, "decode")
"""Kernels that are tuned: "decode" serves forwards of few query rows (`attngen.decode`)."""


@dataclass(frozen=True)
class Workload:
    """Sizes of one call: batch, query heads, key/value heads and the two lengths.

    Raises:
        SpecError: a size is negative, or the head counts do not divide.
    """

    batch: int
    num_heads_q: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int

    def __post_init__(self) -> None:
        for field in fields(self):
            size = whole(field.name, getattr(self, field.name), 0, None)
            object.__setattr__(self, field.name, size)  # the class is frozen
        if self.num_heads_kv == 0:
            raise SpecError(
                f"num_heads_kv must be at least 1, got 0, with num_heads_q={self.num_heads_q}; "
                "tune for the heads of one call"
            )
        if self.num_heads_q % self.num_heads_kv:
            raise SpecError(
                f"num_heads_q must be a multiple of num_heads_kv, got {self.num_heads_q} and "
                f"{self.num_heads_kv}; pad or repeat the kv heads"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads_q // self.num_heads_kv

    @classmethod
    def parse(cls, text: str) -> Workload:
        """Read `B,Hq,Hkv,Sq,Sk`, as 4,32,8,4096,4096."""
        try:
            sizes = [int(piece) for piece in text.split(",")]
        except (ValueError, AttributeError):
            sizes = []
        if len(sizes) != 5:
            raise SpecError(
                f"workload must be five ints B,Hq,Hkv,Sq,Sk, got {shown(text)}; "
                "for example 4,32,8,4096,4096"
            )
        return cls(*sizes)

    def __str__(self) -> str:
        return ",".join(str(getattr(self, field.name)) for field in fields(self))


def packed_workload(
    count: int, num_heads_q: int, num_heads_kv: int, total_q: int, total_k: int
) -> Workload:
    """The workload of packed sequences: so many, of the mean length, rounded up.

    Their lengths are values on the device, which a bucket must not depend on; totals are shapes.
    """
    count = max(count, 1)
    return Workload(count, num_heads_q, num_heads_kv, -(-total_q // count), -(-total_k // count))


TUNED_PAGE = 16
"""Keys of a page, of a workload that names none."""
MAX_SIZE = 2**31
"""Of a length, or of batch times heads, rounded up to a power of two."""


@dataclass(frozen=True)
class Bucket:
    """What a tuning record is looked up by, beside the spec's text and the device."""

    direction: Direction
    seqlen_q: int
    seqlen_k: int
    batch_heads: int
    group_size: int
    window: int
    """Keys a window lets a query see, rounded up to a power of two; 0 without a window."""
    page_size: int = 0

    @property
    def key(self) -> str:
        """Readable and canonical, as `fwd-q4096-k4096-bh64-g8-w0-p0`."""
        return (
            f"{self.direction}-q{self.seqlen_q}-k{self.seqlen_k}-bh{self.batch_heads}"
            f"-g{self.group_size}-w{self.window}-p{self.page_size}"
        )

    @property
    def is_possible(self) -> bool:
        """Can a call have this bucket?"""
        sizes = (self.seqlen_q, self.seqlen_k, self.batch_heads, self.window)
        if self.batch_heads == 0:
            return not any(sizes) and self.group_size == 0
        whole = all(0 <= size <= MAX_SIZE and ceil_pow2(size) == size for size in sizes)
        return whole and 1 <= self.group_size <= MAX_SIZE and 0 <= self.page_size <= MAX_SIZE

    @property
    def workload(self) -> Workload | None:
        """The largest workload of the bucket, batch 1; None for the bucket of all sizes."""
        if self.batch_heads == 0:
            return None
        heads_kv = max(1, self.batch_heads // self.group_size)
        heads_q = heads_kv * self.group_size
        return Workload(1, heads_q, heads_kv, self.seqlen_q, self.seqlen_k)

    @classmethod
    def parse(cls, key: str) -> Bucket:
        """The inverse of `key`."""
        try:
            direction, *sizes = key.split("-")
            q, k, bh, g, w, p = (int(s.lstrip("abcdefghijklmnopqrstuvwxyz")) for s in sizes)
        except ValueError:
            raise SpecError(
                f"{key!r} is no bucket key such as fwd-q4096-k4096-bh64-g8-w0-p0"
            ) from None
        return cls(check_direction(direction), q, k, bh, g, w, p)


def check_direction(direction: str) -> Direction:
    """The direction; refuses what is none of `FAMILIES`."""
    for known in FAMILIES:
        if isinstance(direction, str) and direction == known:
            return known
    hint = nearest(direction, FAMILIES) if isinstance(direction, str) else ""
    raise SpecError(f"direction must be 'fwd', 'bwd' or 'decode', got {shown(direction)}{hint}")


def ceil_pow2(n: int) -> int:
    """The least power of two >= n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def bucket(
    direction: Direction,
    workload: Workload,
    window: tuple[int | None, int | None] = (None, None),
    *,
    batch_invariant: bool = False,
) -> Bucket:
    """The bucket of a call, from shapes and Python ints only, never from device values.

    Args:
        direction: "fwd" or "bwd".
        workload: the call's sizes.
        window: (left, right) of the call; None is an open side.
        batch_invariant: one bucket for all sizes, whose sizes read 0 ("any").
    """
    if batch_invariant:
        return Bucket(direction, 0, 0, 0, 0, 0)
    seqlen_k = ceil_pow2(workload.seqlen_k)
    width = 0
    if window != (None, None):
        left, right = (workload.seqlen_k if side is None else side for side in window)
        width = min(ceil_pow2(left + right + 1), seqlen_k)
    return Bucket(
        direction,
        ceil_pow2(workload.seqlen_q),
        seqlen_k,
        ceil_pow2(workload.batch * workload.num_heads_q),
        workload.group_size,
        width,
    )


def spec_bucket(direction: Direction, spec: AttentionSpec, workload: Workload) -> Bucket:
    """The bucket of a workload under a spec's own window."""
    found = bucket(direction, workload, spec_window(spec), batch_invariant=spec.batch_invariant)
    return replace(found, page_size=TUNED_PAGE) if spec.paged else found


def spec_window(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """The window as look-ups see it: plain causal has none, causal with a left side ends at 0."""
    left, right = spec.window or (None, None)
    if spec.is_causal:
        left, right = (left, 0) if left is not None else (None, None)
    if spec.chunk is not None:
        return in_chunk((left, right), spec.chunk, spec.is_causal)
    return left, right


def in_chunk(
    window: tuple[int | None, int | None], chunk: int, is_causal: bool
) -> tuple[int | None, int | None]:
    """The window of look-ups of a chunked attention: what a chunk's last query sees."""
    left, right = window
    left = chunk - 1 if left is None else min(left, chunk - 1)
    if is_causal:
        return left, 0
    return left, 0 if right is None else min(right, chunk - 1 - left)


def flops(spec: AttentionSpec, workload: Workload, direction: Direction) -> float:
    """Floating point operations that a time is divided into; `attngen.bench` says which."""
    scores = workload.batch * workload.num_heads_q * workload.seqlen_q * workload.seqlen_k
    forward = 2.0 * scores * (spec.head_dim + spec.head_dim_v) * (0.5 if spec.is_causal else 1.0)
    return forward if direction == "fwd" else 2.5 * forward
