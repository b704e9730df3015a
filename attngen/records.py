"""What a tuning record is: its key, its evidence, its JSON line, and which of two records wins.

Pure data, so that a record in the user's SQLite file, in `tuning_db/*.jsonl` and in an export is
checked by the same rules (`attngen.record_checks`). `attngen.store` keeps records,
`attngen.lookup` looks them up.
"""

from __future__ import annotations

import functools
import hashlib
import json
import warnings
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attngen import config as configs
from attngen.config import KernelConfig
from attngen.errors import StoreError
from attngen.paths import tuned_dirs
from attngen.record_checks import DATE_FORMAT, Origin, problem_of
from attngen.versions import minor_of
from attngen.workload import Direction

# The measurement policy of every record: the median of runs that each begin with the L2 flushed;
# short kernels are timed by graph replay.
POLICY = "l2-flushed-median"


def now() -> str:
    """The time as records write it: UTC, to the second, so that text order is time order."""
    return datetime.now(timezone.utc).strftime(DATE_FORMAT)


@dataclass(frozen=True)
class RecordKey:
    """What a record is found by: what is computed, by which templates, how large, where."""

    text_key: str
    """`AttentionSpec.text_key`."""
    template_hash: str
    bucket: str
    """`Bucket.key`; begins with the direction."""
    device_key: str
    """`GpuInfo.device_key`."""
    triton: str
    """"major.minor" of the Triton that compiled it."""
    policy: str
    """How it was timed: `POLICY`; times of two policies are never compared."""

    @property
    def digest(self) -> str:
        """A short hash: the database's primary key."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """On what a record was made. Never matched on, and names no host."""

    gpu: str
    driver: str | None
    cuda: str | None
    torch: str | None
    triton: str
    """The full version, as "3.6.0"."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """A winning config for one key, with its evidence.

    Raises:
        StoreError: a value is out of range; names the field.
    """

    key: RecordKey
    direction: Direction
    config: dict[str, Any]
    """Named fields of a `KernelConfig`; fields with a default may be missing."""
    median_us: float | None
    """Microseconds; None only for a predicted record."""
    spread_us: float | None
    default_us: float | None
    """The default config's median in the same run; None only for a predicted record."""
    rounds: int
    error: float | None
    """Largest error against the oracle, None if it was not run."""
    origin: Origin
    clocks_mhz: tuple[int, int] | None
    """SM clock (before, after) the measurement."""
    provenance: Provenance
    date: str
    """UTC, as "2026-11-29T21:38:00Z"."""

    def __post_init__(self) -> None:
        if problem := problem_of(self.as_dict()):
            raise StoreError(f"record: {problem}")

    @property
    def kernel_config(self) -> KernelConfig:
        return configs.from_dict(self.direction, self.config)

    @property
    def gain(self) -> float:
        """Time of the default over time of this config; 0 where either is unknown."""
        return self.default_us / self.median_us if self.default_us and self.median_us else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values: the key's fields beside the record's own."""
        named = asdict(self)
        named |= named.pop("key")
        if self.clocks_mhz is not None:
            named["clocks_mhz"] = list(self.clocks_mhz)
        return named

    def to_line(self) -> str:
        """One line of JSON, keys sorted, so that equal records are equal lines."""
        return json.dumps(self.as_dict(), sort_keys=True)

    @classmethod
    def from_line(cls, line: str, where: str = "record") -> Record:
        """The inverse of `to_line`; `where` (as "line 3") begins each error message."""
        try:
            named = json.loads(line, object_pairs_hook=_each_once)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{where}: not JSON ({error}); export it again") from None
        return cls.from_dict(named, where)

    @classmethod
    def from_dict(cls, named: Any, where: str = "record") -> Record:
        """The inverse of `as_dict`; refuses unknown, missing and ill-typed fields."""
        if problem := problem_of(named):
            raise StoreError(f"{where}: {problem}")
        named = dict(named)
        for name in ("median_us", "spread_us", "default_us", "error"):
            named[name] = None if named[name] is None else float(named[name])
        clocks = named.pop("clocks_mhz")
        return cls(
            key=RecordKey(**{f.name: named.pop(f.name) for f in fields(RecordKey)}),
            provenance=Provenance(**named.pop("provenance")),
            clocks_mhz=None if clocks is None else (clocks[0], clocks[1]),
            **named,
        )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two values for one name a reader could believe either."""
    named = dict(pairs)
    if len(named) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return named


def preference(record: Record) -> tuple[bool, bool, float, str, str]:
    """Greater is better, and no two different records are equal, so that merging is a maximum.

    Measured before predicted; then made by the Triton it is filed under; then the larger gain over
    the default; then the newer.
    """
    return (
        record.origin == "measured",
        minor_of(record.provenance.triton) == record.key.triton,
        record.gain,
        record.date,
        record.to_line(),
    )


@functools.cache
def shipped(folder: Path | None = None) -> tuple[Record, ...]:
    """The records in `*.jsonl` of a folder (default: `paths.tuned_dirs()`), read once. A bad line
    is skipped with a warning.

    `shipped.cache_clear()` makes the next call read again.
    """
    best: dict[RecordKey, Record] = {}
    texts = []
    for each in [folder] if folder else tuned_dirs():
        try:
            files = sorted(path for path in each.iterdir() if path.suffix == ".jsonl")
            texts += [(file, file.read_text(encoding="utf-8", errors="replace")) for file in files]
        except OSError as error:
            warn_once(f"tuning records in {each} cannot be read ({error}); going on without them")
    for file, text in texts:
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            try:
                record = Record.from_line(line, f"{file}:{number}")
            except StoreError as error:
                warn_once(f"{error}; the line is skipped")
                continue
            best[record.key] = max(record, best.get(record.key, record), key=preference)
    return tuple(best.values())


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn the first time this process has this to say."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)
