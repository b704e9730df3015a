"""Looking up the best stored config for a call, tier by tier, and saying why it was chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from attngen.config import KernelConfig
from attngen.errors import StoreError
from attngen.gpu import GpuInfo
from attngen.records import Record, RecordKey, shipped, warn_once
from attngen.store import Store
from attngen.workload import Bucket

Tier = Literal["user", "shipped", "stale", "neighbour bucket", "other sku", "default"]

EXACT_TIERS: tuple[Tier, ...] = ("user", "shipped")
_NEAR_TIERS: tuple[Tier, ...] = ("stale", "neighbour bucket", "other sku")
_VERSION_FIELDS = frozenset({"triton", "template_hash"})
# Lengths that may be one step off, the less harmful first.
_LENGTHS = ("seqlen_k", "seqlen_q")
MAX_NEAR_MISSES = 4


class Found(NamedTuple):
    """What a look-up came to."""

    record: Record | None
    tier: Tier
    why: list[str]
    """Readable lines: what was looked for, what was used or nearly matched, and why not."""


@dataclass(frozen=True)
class _Candidate:
    """A stored record of the wanted spec, and how far it is from what is wanted."""

    source: Literal["user", "shipped"]
    record: Record
    differing: dict[str, tuple[Any, Any]]
    tier: Tier | None

    def __str__(self) -> str:
        name = f"{self.source} {self.record.origin} record {self.record.key.bucket}"
        found = (f"{field} {had}, wanted {want}" for field, (had, want) in self.differing.items())
        return f"{name} ({'; '.join(found)})" if self.differing else name


def lookup(
    store: Store | None,
    key: RecordKey,
    bucket: Bucket,
    gpu: GpuInfo,
    accept: Callable[[KernelConfig], list[str]],
    *,
    shipped_records: Iterable[Record] | None = None,
) -> Found:
    """The best stored config for a call; never raises for trouble with the database.

    Args:
        store: the user's database, or None for the shipped records alone.
        key: what is wanted; `key.bucket` is `bucket.key`.
        bucket: the bucket, for steps to its neighbours.
        gpu: the device, for other devices of its arch.
        accept: reasons against a config on this GPU, empty if there are none.
        shipped_records: default `records.shipped()`.

    Order: exact (the user's before shipped, but measured before predicted), other Triton or
    templates ("stale"), neighbour buckets, same arch on another SKU. The last two take other Triton
    and template versions too, after the same ones. A neighbour's lengths are at most one step off:
    one of them, or both together, as in self-attention. Its batch * heads may be any.
    """
    where = f"{key.bucket} of {key.text_key} on {gpu.name} ({key.device_key})"
    why = [
        f"looked for {where}, triton {key.triton}, templates {key.template_hash}, "
        f"timed {key.policy}"
    ]
    ours = [r for r in _user_records(store, key.text_key, why) if r.direction == bucket.direction]
    pool = shipped() if shipped_records is None else shipped_records
    theirs = [r for r in pool if r.key.text_key == key.text_key and r.direction == bucket.direction]
    near = [_candidate("user", record, key, bucket, gpu) for record in ours]
    near += [_candidate("shipped", record, key, bucket, gpu) for record in theirs]
    for candidate in sorted(near, key=_rank):
        if candidate.tier is None:
            continue
        against = accept(candidate.record.kernel_config)
        if not against:
            why.append(f"used {candidate}, tier {candidate.tier!r}")
            return Found(candidate.record, candidate.tier, why)
        why.append(f"{candidate} is refused on {gpu.name}: {'; '.join(against)}")
    return Found(None, "default", why + _near_misses(near))


def _user_records(store: Store | None, text_key: str, why: list[str]) -> list[Record]:
    if store is None:
        why.append("there is no user database")
        return []
    if store.trouble is not None:
        why.append(f"the user database counts as empty: {store.trouble}")
    try:
        return store.winners(text_key)
    except StoreError as error:
        warn_once(f"{error}; going on without it")
        why.append(f"the user database counts as empty: {error}")
        return []


def _candidate(
    source: Literal["user", "shipped"], record: Record, key: RecordKey, bucket: Bucket, gpu: GpuInfo
) -> _Candidate:
    differing = _differences(key, bucket, record.key)
    tier = _tier_of(differing, bucket, gpu.arch) if differing else source
    return _Candidate(source, record, differing, tier)


def _differences(key: RecordKey, bucket: Bucket, found: RecordKey) -> dict[str, tuple[Any, Any]]:
    """(found, wanted) of each field that differs, the bucket axis by axis."""
    wanted, had = asdict(key) | asdict(bucket), asdict(found) | asdict(Bucket.parse(found.bucket))
    return {
        name: (had[name], wanted[name])
        for name in wanted
        if name != "bucket" and had[name] != wanted[name]
    }


def _tier_of(differing: dict[str, tuple[Any, Any]], bucket: Bucket, arch: str) -> Tier | None:
    """Which near tier a record with these differences may serve, if any.

    Triton and template hash are soft: they make an exact match stale, and a near one stays near.
    Everything else may differ in one respect only: the device, or the sizes.
    """
    hard = differing.keys() - _VERSION_FIELDS
    if not hard:
        return "stale"
    if hard == {"device_key"}:
        found, _ = differing["device_key"]
        return "other sku" if found.split("-")[0] == arch else None
    return "neighbour bucket" if _is_neighbour({n: differing[n] for n in hard}, bucket) else None


def _is_neighbour(sizes: dict[str, tuple[int, int]], bucket: Bucket) -> bool:
    """Are the lengths at most one step off, in one direction?

    A window is cut to seqlen_k, and so may step with it. Batch * heads decides how many programs
    run, hardly which tile is best for one.
    """
    if sizes.keys() - {*_LENGTHS, "batch_heads", "window"} or 0 in itertools.chain(*sizes.values()):
        return False
    if "window" in sizes:
        widths, keys = sizes["window"], sizes.get("seqlen_k", (bucket.seqlen_k,) * 2)
        if widths != tuple(min(max(widths), each) for each in keys):
            return False
    lengths = (sizes[name] for name in _LENGTHS if name in sizes)
    steps = {had.bit_length() - want.bit_length() for had, want in lengths}
    return steps <= {1} or steps <= {-1}


def _rank(candidate: _Candidate) -> tuple[Any, ...]:
    """Sort key, best first: tier, measured, same versions, the user's, the mildest step of the
    lengths, the nearest batch * heads."""
    tier, record, differing = candidate.tier, candidate.record, candidate.differing
    had, wanted = differing.get("batch_heads", (0, 0))
    return (
        1 + _NEAR_TIERS.index(tier) if tier in _NEAR_TIERS else 0,
        record.origin != "measured",
        "triton" in differing,
        "template_hash" in differing,
        candidate.source != "user",
        sum(1 + i for i, axis in enumerate(_LENGTHS) if axis in differing),
        abs(had.bit_length() - wanted.bit_length()),
        -record.gain,
        record.to_line(),
    )


def _near_misses(near: list[_Candidate]) -> list[str]:
    """Field by field why the nearest records do not serve."""
    misses = sorted((c for c in near if c.tier is None), key=lambda c: (len(c.differing), _rank(c)))
    lines = [f"{candidate} is too far" for candidate in misses[:MAX_NEAR_MISSES]]
    if len(misses) > MAX_NEAR_MISSES:
        lines.append(f"{len(misses) - MAX_NEAR_MISSES} more records of this spec are further off")
    if not near:
        lines.append("no record of this spec and direction is stored or shipped")
    return [*lines, "the default config is used"]
