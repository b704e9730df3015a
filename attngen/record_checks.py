"""What is legal in a record's plain form: which fields, and which values."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal, get_args

from attngen import config as configs
from attngen.errors import SpecError, nearest
from attngen.workload import FAMILIES, Bucket, Direction

Origin = Literal["measured", "predicted"]
ORIGINS: tuple[Origin, ...] = ("measured", "predicted")

Status = Literal["ok", "failed", "running", "crashed", "skipped", "quarantined"]
STATUSES: tuple[Status, ...] = get_args(Status)

DATE_FORMAT = "%Y-%m-%dT%H:%M:%SZ"
MAX_MICROSECONDS = 1e12
MIN_MICROSECONDS = 1e-3  # far below any launch
MAX_COUNT = 10**6


def problem_of(named: Any) -> str | None:
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


def trial_problem(row: dict[str, Any]) -> str | None:
    """What is wrong with a row of trials whose config is parsed; None if nothing is."""
    for name, (is_legal, allowed) in _TRIAL_RULES.items():
        if not is_legal(row[name]):
            return f"{name} must be {allowed}, got {_short(row[name])}"
    named = (each for each in FAMILIES if row["bucket"].startswith(each))
    return _config_problem(next(named, "fwd"), row["config"])


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.isprintable()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value) and 0 <= value < MAX_COUNT


def _is_time(value: Any) -> bool:
    return value is None or (_is_number(value) and MIN_MICROSECONDS <= value < MAX_MICROSECONDS)


def _is_bound(value: Any) -> bool:
    return value is None or (_is_number(value) and 0 <= value < MAX_MICROSECONDS)


def _is_bucket(value: Any) -> bool:
    try:
        if not isinstance(value, str):
            return False
        bucket = Bucket.parse(value)
        return bucket.key == value and bucket.is_possible
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
_TIME = (_is_time, f"microseconds from {MIN_MICROSECONDS} up, or null")
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
    "direction": (lambda v: v in FAMILIES, '"fwd", "bwd" or "decode"'),
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

_TRIAL_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    name: _RULES[name] for name in ("config", "median_us", "spread_us", "origin", "date")
} | {
    "bucket": (lambda v: isinstance(v, str), "a text"),
    "config_key": (lambda v: isinstance(v, str), "a text"),
    "status": (lambda v: v in STATUSES, f"one of {', '.join(STATUSES)}"),
    "reason": (lambda v: v is None or isinstance(v, str), "a text, or null"),
    "crashes": (_is_count, f"an int from 0 to {MAX_COUNT - 1}"),
}

# Fields of a provenance, and whether each must be known.
_PROVENANCE = {"gpu": True, "driver": False, "cuda": False, "torch": False, "triton": True}


def _names_problem(what: str, named: dict[str, Any], known: list[str]) -> str | None:
    for name in named:
        if name not in known:
            hint = nearest(name, known)
            return f"unknown {what} {_short(name)}{hint}; known: {', '.join(known)}"
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
        whole = configs.from_dict(direction, config)
    except SpecError as error:
        return f"config: {error}"
    for name, value in whole.as_dict().items():
        problem = configs.value_problem(type(whole), name, value)
        if problem is None and isinstance(value, int) and not 0 <= value < MAX_COUNT:
            problem = f"must be an int from 0 to {MAX_COUNT - 1}"
        if problem:
            return f"config.{name} {problem}, got {_short(value)}"
    return None


def _provenance_problem(named: dict[str, Any]) -> str | None:
    if problem := _names_problem("provenance field", named, list(_PROVENANCE)):
        return problem
    for name, value in named.items():
        if not (_is_text(value) or (value is None and not _PROVENANCE[name])):
            return f"provenance.{name} must be {_TEXT[1]}, got {_short(value)}"
    return None


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
