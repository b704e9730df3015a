"""What `attngen bench --json` printed, read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attngen.errors import AttngenError
from attngen.gpu import slug_of
from attngen.one_row import kept_at
from attngen.report.work import Work, work_of
from attngen.spec import AttentionSpec
from attngen.values import shown
from attngen.workload import MAX_SIZE, Direction, Workload, check_direction


@dataclass(frozen=True)
class Contestant:
    """One that took part, or that could not."""

    name: str
    ms: float | None
    ratio: float | None
    """Its time over ours, in that run."""
    reason: str
    config: str


@dataclass(frozen=True)
class BenchLine:
    """One workload and direction, timed beside peers."""

    number: int
    """Counted over all files; the page's id."""
    place: str
    """File and line."""
    about: dict[str, str]
    spec: AttentionSpec
    workload: Workload
    direction: Direction
    rounds: int
    contestants: tuple[Contestant, ...]

    @property
    def anchor(self) -> str:
        return f"bench-{self.number}"

    @property
    def gpu(self) -> str:
        return slug_of(self.about.get("gpu", "unknown"))

    @property
    def place_key(self) -> tuple[str, str, str]:
        """What a record for the same call has: GPU, text key and bucket."""
        served, bucket = kept_at(self.direction, self.spec, self.workload)
        return (self.gpu, served.text_key, bucket.key)

    @property
    def work(self) -> Work:
        w = self.workload
        heads = w.batch * w.num_heads_q
        return work_of(self.spec, self.direction, heads, w.group_size, w.seqlen_q, w.seqlen_k)

    def of(self, name: str) -> Contestant | None:
        return next((each for each in self.contestants if each.name == name), None)


MIN_NUMBER, MAX_NUMBER = 1e-6, 1e9
"""Of times in ms, and of ratios."""
_UNREADABLE = (
    AttngenError,
    ArithmeticError,
    AttributeError,
    KeyError,
    RecursionError,
    TypeError,
    ValueError,
)


def read(files: tuple[Path, ...]) -> list[BenchLine]:
    """Every line of the files.

    Raises:
        AttngenError: a file cannot be read, or a line is none of `attngen bench --json`; names it.
    """
    found: list[BenchLine] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise AttngenError(f"cannot read {file} ({error}); name a bench file") from None
        for number, line in enumerate(lines, 1):
            if line.strip():
                found.append(_line(line, f"{file.name}:{number}", len(found) + 1))
    return found


def _line(text: str, place: str, number: int) -> BenchLine:
    try:
        named = json.loads(text)
        line = BenchLine(
            number=number,
            place=place,
            about={name: value for name, value in named.items() if isinstance(value, str)},
            spec=AttentionSpec.parse(named["spec"]),
            workload=Workload.parse(named["workload"]),
            direction=check_direction(named["direction"]),
            rounds=int(named["rounds"]),
            contestants=tuple(_contestant(name, each) for name, each in named["results"].items()),
        )
        if not all(1 <= size <= MAX_SIZE for size in vars(line.workload).values()):
            raise ValueError(f"a workload of {shown(named['workload'])}")
        return line
    except _UNREADABLE as error:
        raise AttngenError(
            f"{place} is no line of `attngen bench --json` ({type(error).__name__}: {error}); "
            "write the file anew with `attngen bench SPEC --json > FILE`"
        ) from None


def _contestant(name: str, named: dict[str, Any]) -> Contestant:
    ms, ratio = (_time(named[field]) for field in ("ms", "their_time_over_ours"))
    return Contestant(name, ms, ratio, str(named["reason"]), str(named["config"]))


def _time(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    if not MIN_NUMBER <= number <= MAX_NUMBER:
        raise ValueError(f"a number of {shown(value)}")
    return number
