"""Where the marks of the roofline and of the comparison lie: pixels of an SVG that Jinja writes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Tick(NamedTuple):
    at: float
    label: str


@dataclass(frozen=True)
class LogScale:
    """Values from `low` to `high` on the pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, steps: tuple[float, ...] = (1, 2, 5)) -> list[Tick]:
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = (step * 10.0**power for power in powers for step in steps)
        return [Tick(self(v), f"{v:g}") for v in values if self.low <= v <= self.high]


@dataclass(frozen=True)
class Point:
    """A time as a mark of the roofline, or a ratio as a mark of the comparison."""

    series: str
    x: float
    y: float
    direction: str
    note: str
    """Where the number is from."""
    link: str
    """The page's id of the record or bench line."""


class Mark(NamedTuple):
    point: Point
    x: float
    y: float
    beyond: bool = False
    """The value is off the scale, and the mark stands at its edge."""


class Line(NamedTuple):
    points: str
    label: str
    label_y: float


@dataclass(frozen=True)
class Roof:
    """One ceiling: a peak rate of products and the memory below it."""

    kind: str
    tflops: float
    tbytes: float


@dataclass(frozen=True)
class Chart:
    width: int
    height: int
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    marks: list[Mark]
    lines: list[Line] = field(default_factory=list)
    series: list[str] = field(default_factory=list)


def roofline(points: list[Point], roofs: list[Roof], series: list[str]) -> Chart:
    """TFLOP/s over FLOP a byte, both logarithmic, under the roofs there are."""
    width, height = 760, 460
    left, right, top, bottom = 56.0, 748.0, 14.0, 416.0
    ridges = [roof.tflops / roof.tbytes for roof in roofs]
    xs = [p.x for p in points] + ridges
    ys = [p.y for p in points] + [roof.tflops for roof in roofs]
    x = LogScale(min(xs) / 2, max(xs) * 1.5, left, right)
    y = LogScale(min(ys) / 1.5, max(ys) * 1.4, bottom, top)
    lines = []
    for roof, ridge in zip(roofs, ridges, strict=True):
        foot = max(x.low, y.low / roof.tbytes)
        corners = ((foot, foot * roof.tbytes), (ridge, roof.tflops), (x.high, roof.tflops))
        path = " ".join(f"{x(a)},{y(b)}" for a, b in corners)
        label = f"{roof.kind}: {roof.tflops:g} TFLOP/s, {roof.tbytes:g} TB/s"
        lines.append(Line(path, label, y(roof.tflops) - 6))
    marks = [Mark(p, x(p.x), y(p.y)) for p in points]
    marks.sort(key=lambda mark: -series.index(mark.point.series))  # the first lies on top
    box = (width, height, left, right, top, bottom)
    return Chart(*box, x.ticks(), y.ticks(), marks, lines, _used(series, points))


ROW = 22
MOST = 4.0
"""Ratios beyond this stand at the edge."""


def comparison(rows: list[tuple[str, list[Point]]], series: list[str]) -> Chart:
    """One row a workload: the time of each contestant over ours, logarithmic."""
    points = [p for _, row in rows for p in row]
    width, left, right, top = 760, 250.0, 744.0, 8.0
    bottom = top + ROW * len(rows)
    low = min([0.7, *(p.x / 1.1 for p in points)])
    high = min(MOST, max([1.6, *(p.x * 1.1 for p in points)]))
    x = LogScale(low, high, left, right)
    y_ticks = [Tick(top + ROW * (n + 0.5), label) for n, (label, _) in enumerate(rows)]
    marks = [
        Mark(p, x(min(p.x, high)), tick.at, p.x > high)
        for tick, (_, row) in zip(y_ticks, rows, strict=True)
        for p in row
    ]
    ticks = x.ticks((1, 1.2, 1.5, 2, 3, 5, 7, 8, 9))
    box = (width, int(bottom + 24), left, right, top, bottom)
    return Chart(*box, ticks, y_ticks, marks, series=_used(series, points))


def _used(series: list[str], points: Iterable[Point]) -> list[str]:
    there = {p.series for p in points}
    return [name for name in series if name in there]
