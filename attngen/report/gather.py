"""What the page shows: stored numbers, and rates and ratios of them, each with its source."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from attngen.bench import DEFAULT, OURS
from attngen.errors import AttngenError
from attngen.gpu import GpuInfo
from attngen.identity import stale_in
from attngen.records import Record, RecordKey
from attngen.render import render
from attngen.report import search_plots
from attngen.report.bench_lines import BenchLine
from attngen.report.charts import Chart, Point, Roof, comparison, roofline
from attngen.report.work import PEAKS, Peak, Work, kind_of, work_of_bucket
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.trials import Trial
from attngen.workload import Bucket, Direction


@dataclass(frozen=True)
class Winner:
    """A stored record, and what is known of its call."""

    record: Record
    bench: BenchLine | None
    """The same call timed beside peers."""
    was_searched: bool
    """The trials that found it are stored, too."""

    @property
    def run_anchor(self) -> str | None:
        return f"search-{self.record.key.digest}" if self.was_searched else None

    @property
    def anchor(self) -> str:
        return f"record-{self.record.key.digest}"

    @property
    def name(self) -> str:
        return call_name(self.record.key)

    @property
    def place_key(self) -> tuple[str, str, str]:
        """What a bench line of the same call has."""
        key = self.record.key
        return (self.record.provenance.gpu, key.text_key, key.bucket)

    @cached_property
    def spec(self) -> AttentionSpec | None:
        """None if this version cannot read the record's spec."""
        try:
            return AttentionSpec.parse(self.record.key.text_key)
        except AttngenError:
            return None

    @cached_property
    def work(self) -> Work | None:
        bucket = Bucket.parse(self.record.key.bucket)
        return work_of_bucket(self.spec, bucket) if self.spec else None

    @property
    def tflops(self) -> float | None:
        """Of a call that fills the bucket."""
        timed = self.record.median_us
        return self.work.tflops(timed) if self.work and timed else None

    @property
    def config_key(self) -> str:
        return self.record.kernel_config.key

    @cached_property
    def source(self) -> str | None:
        """The emitted text of the config; None if this version cannot read the spec."""
        return render(self.spec, self.record.kernel_config) if self.spec else None

    @property
    def is_current(self) -> bool:
        """Is the record of the templates that this version has?"""
        return self.spec is not None and "templates" not in stale_in(self.record)


@dataclass(frozen=True)
class SearchRun:
    """All that was tried for one key."""

    key: RecordKey
    trials: list[Trial]
    """In the order in which they ended."""
    winner: Winner | None
    history: Markup | None
    importances: Markup | None
    on_axes: int
    """Measured trials that lie on the axes: what the importances are of."""

    @property
    def anchor(self) -> str:
        return f"search-{self.key.digest}"

    @property
    def name(self) -> str:
        return call_name(self.key)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(trial.status for trial in self.trials)

    @property
    def measured(self) -> int:
        return sum(trial.median_us is not None for trial in self.trials)

    @property
    def best(self) -> Trial | None:
        timed = [t for t in self.trials if t.status == "ok" and t.median_us]
        return min(timed, key=lambda t: t.median_us or 0.0, default=None)


@dataclass(frozen=True)
class Failure:
    """Trials that did not end well, for one kind of reason."""

    status: str
    reason: str
    """Its first line, with "…" for numbers."""
    cases: list[tuple[SearchRun, Trial]]


@dataclass(frozen=True)
class GpuRoof:
    """The roofline of one GPU."""

    gpu: str
    peak: Peak | None
    chart: Chart | None
    points: list[Point]


@dataclass(frozen=True)
class Contents:
    """Everything on the page."""

    path: str
    winners: list[Winner]
    runs: list[SearchRun]
    failures: list[Failure]
    bench: list[BenchLine]
    roofs: list[GpuRoof]
    comparison: Chart | None
    peers: list[str]
    """Contestants of the bench lines, in their order."""

    @property
    def dates(self) -> tuple[str, str] | None:
        """The first and the last date of the trials and winners."""
        dates = [t.date for run in self.runs for t in run.trials]
        dates += [winner.record.date for winner in self.winners]
        return (min(dates), max(dates)) if dates else None

    @property
    def trials(self) -> int:
        return sum(len(run.trials) for run in self.runs)

    @property
    def outcomes(self) -> Counter[str]:
        return sum((run.outcomes for run in self.runs), Counter())

    @property
    def failed(self) -> int:
        return sum(len(failure.cases) for failure in self.failures)

    @property
    def series(self) -> list[str]:
        """Every contestant; its place gives its color and shape."""
        return list(dict.fromkeys([OURS, DEFAULT, *self.peers]))

    @property
    def absent(self) -> dict[tuple[str, str], list[str]]:
        """Contestants that did not run, with the reason, and in which bench lines."""
        found: dict[tuple[str, str], list[str]] = defaultdict(list)
        for line in self.bench:
            for each in line.contestants:
                if each.ms is None:
                    found[each.name, each.reason or "no reason was given"].append(line.place)
        return found

    @property
    def made(self) -> dict[str, list[str]]:
        """How bench lines were made, and which."""
        found: dict[str, list[str]] = defaultdict(list)
        for line in self.bench:
            about = {n: v for n, v in line.about.items() if n not in ("spec", "workload")}
            found[", ".join(f"{n} {v}" for n, v in about.items() if n != "direction")].append(
                line.place
            )
        return found

    def winner_of(self, line: BenchLine) -> Winner | None:
        """The record of the call that a line timed."""
        return next((winner for winner in self.winners if winner.place_key == line.place_key), None)


def gather(store: Store, gpu: GpuInfo | None, bench: list[BenchLine]) -> Contents:
    """Everything stored, or what is stored for one GPU."""
    keys = [k for k in store.trial_keys() if gpu is None or k.device_key == gpu.device_key]
    lines = {line.place_key: line for line in bench}  # of two, the later one
    winners = []
    for record in sorted(store.winners(), key=lambda record: _order(record.key)):
        if gpu is None or record.key.device_key == gpu.device_key:
            call = (record.provenance.gpu, record.key.text_key, record.key.bucket)
            winners.append(Winner(record, lines.get(call), record.key in keys))
    held = {winner.record.key: winner for winner in winners}
    runs = [_run(store, key, held.get(key)) for key in sorted(keys, key=_order)]
    peers = list(dict.fromkeys(each.name for line in bench for each in line.contestants))
    return Contents(
        path=str(store.path),
        winners=winners,
        runs=runs,
        failures=_failures(runs),
        bench=bench,
        roofs=_roofs(winners, bench, peers),
        comparison=_comparison(winners, bench, peers),
        peers=peers,
    )


_DTYPE_WORDS = {
    "float16": "fp16",
    "float32": "fp32",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


def call_name(key: RecordKey) -> str:
    """A key in few words: `fwd d128 causal 4096x4096 bh64`."""
    try:
        spec, bucket = AttentionSpec.parse(key.text_key), Bucket.parse(key.bucket)
    except AttngenError:
        return f"{key.bucket} {key.text_key}"
    return _name(spec, bucket)


def _name(spec: AttentionSpec, bucket: Bucket) -> str:
    dims = f"d{spec.head_dim}"
    dims += f"/{spec.head_dim_v}" if spec.head_dim_v != spec.head_dim else ""
    words = [bucket.direction, dims]
    words += [_DTYPE_WORDS.get(spec.dtype, "")]
    words += ["causal" if spec.is_causal else ""]
    sizes = f"{bucket.seqlen_q}x{bucket.seqlen_k} bh{bucket.batch_heads}"
    words += [sizes if bucket.batch_heads else "any size"]
    words += [f"g{bucket.group_size}" if bucket.group_size > 1 else ""]
    words += [f"w{bucket.window}" if bucket.window else ""]
    return " ".join(filter(None, words))


def _order(key: RecordKey) -> tuple[object, ...]:
    try:
        bucket = Bucket.parse(key.bucket)
        sizes: tuple[object, ...] = (bucket.direction != "fwd", bucket.seqlen_q, bucket.seqlen_k)
    except AttngenError:
        sizes = (True, 0, 0)
    return (key.device_key, key.text_key, *sizes, key.digest)


def _run(store: Store, key: RecordKey, winner: Winner | None) -> SearchRun:
    trials = store.history(key)
    direction: Direction = "bwd" if key.bucket.startswith("bwd") else "fwd"
    study = search_plots.study_of(direction, trials, search_plots.axes_of(key))
    importances, on_axes = search_plots.importances(study, key.digest)
    history = search_plots.history(study, key.digest)
    return SearchRun(key, trials, winner, history, importances, on_axes)


def _failures(runs: list[SearchRun]) -> list[Failure]:
    cases: dict[tuple[str, str], list[tuple[SearchRun, Trial]]] = defaultdict(list)
    for run in runs:
        for trial in run.trials:
            if trial.status != "ok":
                cases[trial.status, _kind(trial.reason)].append((run, trial))
    ordered = sorted(cases.items(), key=lambda item: (-len(item[1]), item[0]))
    return [Failure(status, kind, these) for (status, kind), these in ordered]


def _kind(reason: str | None) -> str:
    lines = (reason or "").strip().splitlines()
    return re.sub(r"\b\d[\d.,]*(e[+-]?\d+)?\b", "…", lines[0]) if lines else "no reason was stored"


def _roofs(winners: list[Winner], bench: list[BenchLine], peers: list[str]) -> list[GpuRoof]:
    points: dict[str, list[Point]] = defaultdict(list)
    kinds: dict[str, set[str]] = defaultdict(set)
    for winner in winners:
        gpu = winner.record.provenance.gpu
        mine = points[gpu]  # a GPU without a point is named, too
        if winner.spec is not None and winner.tflops is not None:
            kinds[gpu].add(kind_of(winner.spec))
            mine += _record_points(winner)
    matched = {winner.bench.number for winner in winners if winner.bench}
    for line in bench:
        kinds[line.gpu].add(kind_of(line.spec))
        points[line.gpu] += _bench_points(line, line.number in matched)
    series = list(dict.fromkeys([OURS, DEFAULT, *peers]))
    roofs = []
    for gpu, mine in points.items():
        peak = PEAKS.get(gpu)
        ceilings = [
            Roof(kind, peak.tflops[kind], peak.tbytes) for kind in sorted(kinds[gpu]) if peak
        ]
        chart = roofline(mine, ceilings, series) if mine else None
        roofs.append(GpuRoof(gpu, peak, chart, mine))
    return roofs


def _record_points(winner: Winner) -> list[Point]:
    record, work = winner.record, winner.work
    assert work is not None and record.median_us is not None
    times = {OURS: record.median_us}
    if record.default_us and record.default_us != record.median_us:
        times[DEFAULT] = record.default_us
    return [
        Point(
            name,
            work.intensity,
            work.tflops(us),
            record.direction,
            f"{name}, {winner.name}: {work.tflops(us):.0f} TFLOP/s, {us:.1f} us; record "
            f"{record.key.digest}, {record.origin} {record.date}",
            winner.anchor,
        )
        for name, us in times.items()
    ]


def _bench_points(line: BenchLine, is_matched: bool) -> list[Point]:
    """The peers; ours too where no record stands for it."""
    work = line.work
    return [
        Point(
            each.name,
            work.intensity,
            work.tflops(each.ms * 1e3),
            line.direction,
            f"{each.name}, {bench_name(line)}: {work.tflops(each.ms * 1e3):.0f} TFLOP/s, "
            f"{each.ms:.4f} ms; {line.place}",
            line.anchor,
        )
        for each in line.contestants
        if each.ms is not None and not (is_matched and each.name in (OURS, DEFAULT))
    ]


def bench_name(line: BenchLine) -> str:
    """The name of the call that a line timed."""
    _, _, bucket = line.place_key
    return _name(line.spec.text, Bucket.parse(bucket))


def _comparison(winners: list[Winner], bench: list[BenchLine], peers: list[str]) -> Chart | None:
    rows: list[tuple[str, list[Point]]] = []
    for winner in winners:
        record, points = winner.record, []
        if record.gain:
            note = (
                f"{DEFAULT}, {winner.name}: {record.gain:.2f}x our time; record "
                f"{record.key.digest}, {record.origin} {record.date}"
            )
            points = [Point(DEFAULT, record.gain, 0, record.direction, note, winner.anchor)]
        if winner.bench:
            points += _ratios(winner.bench, (OURS, DEFAULT))
        rows.append((winner.name, points))
    matched = {winner.bench.number for winner in winners if winner.bench}
    rows += [
        (bench_name(line), _ratios(line, (OURS,))) for line in bench if line.number not in matched
    ]
    if not any(points for _, points in rows):
        return None
    return comparison(rows, list(dict.fromkeys([DEFAULT, *peers])))


def _ratios(line: BenchLine, but: tuple[str, ...]) -> list[Point]:
    return [
        Point(
            each.name,
            each.ratio,
            0,
            line.direction,
            f"{each.name}, {bench_name(line)}: {each.ratio:.2f}x our time, {each.ms:.4f} ms; "
            f"{line.place}",
            line.anchor,
        )
        for each in line.contestants
        if each.ratio is not None and each.ms is not None and each.name not in but
    ]
