"""What a tuning record is: its key, its evidence, its JSON line, and which of two records wins.

Pure data, so that a record in the user's SQLite file, in `tuning_db/*.jsonl` and in an export is
checked by the same rules. `attngen.store` keeps records and looks them up.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from attngen import config as configs
from attngen.config import KernelConfig
from attngen.errors import SpecError, StoreError, nearest
from attngen.paths import data_dir
from attngen.workload import DIRECTIONS, Bucket, Direction

Origin = Literal["measured", "predicted"]
ORIGINS: tuple[Origin, ...] = ("measured", "predicted")
Tier = Literal["user", "shipped", "stale", "neighbour bucket", "other sku", "default"]

DATE_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
MAX_MICROSECONDS = 1e12
MAX_COUNT = 10**6

VERSION_FIELDS = frozenset({"triton", "template_hash"})
# Bucket axes that may be one step off, the least harmful first.
STEP_AXES = ("batch_heads", "seqlen_k", "seqlen_q")


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
    """How it was timed, as "graph-cold"; times of two policies are never compared."""

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
        if problem := _problem(self.as_dict()):
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
            named = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise StoreError(f"{where}: not JSON ({error}); export it again") from None
        return cls.from_dict(named, where)

    @classmethod
    def from_dict(cls, named: Any, where: str = "record") -> Record:
        """The inverse of `as_dict`; refuses unknown, missing and ill-typed fields."""
        if problem := _problem(named):
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


def minor_of(version: str) -> str:
    """`3.6.0` -> `3.6`."""
    return ".".join(version.split(".")[:2])


# ---- what is legal in a record --------------------------------------------------------------


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and 0 <= value < MAX_COUNT


def _is_time(value: Any) -> bool:
    return value is None or (_is_number(value) and 0 < value < MAX_MICROSECONDS)


def _is_bound(value: Any) -> bool:
    return value is None or (_is_number(value) and 0 <= value < MAX_MICROSECONDS)


def _is_bucket(value: Any) -> bool:
    try:
        return isinstance(value, str) and Bucket.parse(value).key == value
    except SpecError:
        return False


def _is_date(value: Any) -> bool:
    try:
        return bool(datetime.strptime(value, DATE_FORMAT).strftime(DATE_FORMAT) == value)
    except (TypeError, ValueError):
        return False


def _is_clocks(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 2 and all(_is_count(clock) for clock in value)
    )


_TEXT = (_is_text, "a non-empty line of text")
_TIME = (_is_time, "microseconds above 0, or null")
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text_key": _TEXT,
    "template_hash": _TEXT,
    "bucket": (_is_bucket, "a bucket key such as fwd-q4096-k4096-bh64-g8-w0-p0"),
    "device_key": _TEXT,
    "triton": (
        lambda v: isinstance(v, str) and re.fullmatch(r"[0-9]+\.[0-9]+", v) is not None,
        'major.minor, as "3.6"',
    ),
    "policy": _TEXT,
    "direction": (lambda v: v in DIRECTIONS, '"fwd" or "bwd"'),
    "config": (lambda v: isinstance(v, dict), "an object of named config fields"),
    "median_us": _TIME,
    "spread_us": (_is_bound, "microseconds from 0 up, or null"),
    "default_us": _TIME,
    "rounds": (_is_count, f"an int from 0 to {MAX_COUNT - 1}"),
    "error": (_is_bound, "a finite number from 0 up, or null"),
    "origin": (lambda v: v in ORIGINS, '"measured" or "predicted"'),
    "clocks_mhz": (_is_clocks, "[before, after] in MHz, or null"),
    "provenance": (lambda v: isinstance(v, dict), "an object"),
    "date": (_is_date, 'UTC as "2026-11-29T21:38:00Z"'),
}


def _problem(named: Any) -> str | None:
    """What is wrong with a record's plain form, by field; None if nothing is."""
    if not isinstance(named, dict):
        return f"a record must be a JSON object, got {type(named).__name__}"
    if problem := _names_problem("field", named, list(_RULES)):
        return problem
    for name, (is_legal, allowed) in _RULES.items():
        if not is_legal(named[name]):
            return f"{name} must be {allowed}, got {_short(named[name])}"
    if not named["bucket"].startswith(named["direction"]):
        return f"direction {named['direction']!r} contradicts bucket {named['bucket']!r}"
    return (
        _evidence_problem(named)
        or _config_problem(named["direction"], named["config"])
        or _provenance_problem(named["provenance"])
    )


def _names_problem(what: str, named: dict[str, Any], known: list[str]) -> str | None:
    for name in named:
        if name not in known:
            return f"unknown {what} {_short(name)}{nearest(name, known)} known: {', '.join(known)}"
    missing = [name for name in known if name not in named]
    return f"{what} {missing[0]!r} is missing" if missing else None


def _evidence_problem(named: dict[str, Any]) -> str | None:
    if named["origin"] == "measured":
        for name in ("median_us", "default_us"):
            if named[name] is None:
                return f"{name} must be a time in a measured record, got null"
        if named["rounds"] == 0:
            return "rounds must be at least 1 in a measured record, got 0"
    return None


def _config_problem(direction: Direction, config: dict[str, Any]) -> str | None:
    try:
        whole = configs.from_dict(direction, config).as_dict()
    except SpecError as error:
        return f"config: {error}"
    for name, kind in get_type_hints(configs.CONFIG_CLASS[direction]).items():
        value, allowed = whole[name], get_args(kind)
        if allowed and value not in allowed:
            return f"config.{name} must be one of {list(allowed)}, got {_short(value)}"
        if kind is int and not _is_count(value):
            return f"config.{name} must be an int from 0 to {MAX_COUNT - 1}, got {_short(value)}"
    return None


def _provenance_problem(named: dict[str, Any]) -> str | None:
    if problem := _names_problem("provenance field", named, [f.name for f in fields(Provenance)]):
        return problem
    for name, value in named.items():
        if not (_is_text(value) or (value is None and name not in ("gpu", "triton"))):
            return f"provenance.{name} must be {_TEXT[1]}, got {_short(value)}"
    return None


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- how near a record is to what is wanted -------------------------------------------------


def differences(key: RecordKey, bucket: Bucket, found: RecordKey) -> dict[str, tuple[Any, Any]]:
    """(found, wanted) of each field that differs, the bucket axis by axis."""
    wanted, had = asdict(key) | asdict(bucket), asdict(found) | asdict(Bucket.parse(found.bucket))
    return {
        name: (had[name], wanted[name])
        for name in wanted
        if name != "bucket" and had[name] != wanted[name]
    }


def tier_of(differing: dict[str, tuple[Any, Any]], arch: str) -> Tier | None:
    """Which near tier a record with these differences may serve, if any.

    Triton and template hash are soft: they make an exact match stale, and a near one stays near.
    Everything else may differ in one respect only.
    """
    hard = differing.keys() - VERSION_FIELDS
    if not hard:
        return "stale"
    if len(hard) > 1:
        return None
    (name,) = hard
    found, wanted = differing[name]
    if name in STEP_AXES:
        low, high = sorted((found, wanted))
        return "neighbour bucket" if low > 0 and high == 2 * low else None
    if name == "device_key":
        return "other sku" if found.split("-")[0] == arch else None
    return None


# ---- shipped records ------------------------------------------------------------------------


@functools.cache
def shipped(gpu_dir: Path | None = None) -> tuple[Record, ...]:
    """The records in `tuning_db/*.jsonl`, read once. A bad line is skipped with a warning.

    `shipped.cache_clear()` makes the next call read again.
    """
    best: dict[RecordKey, Record] = {}
    try:
        files = sorted((gpu_dir or data_dir("tuning_db")).glob("*.jsonl"))
        texts = [(file, file.read_text(encoding="utf-8", errors="replace")) for file in files]
    except OSError as error:
        warn_once(f"shipped tuning records cannot be read ({error}); going on without them")
        return ()
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
