"""`attngen report --html`: one page that holds what is stored, and loads nothing."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from samples import BUCKET, CONFIG, H200, KEY, MEASURED, PREDICTED, at, under

import attngen.cli
from attngen.bench import Comparison, Timed
from attngen.config import FwdConfig
from attngen.gpu import KNOWN_GPUS, from_device_key
from attngen.render import render
from attngen.report import bench_lines
from attngen.report.charts import LogScale
from attngen.report.search_plots import axes_of, importances, study_of
from attngen.report.work import work_of, work_of_bucket
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.workload import Bucket, Workload

HOSTILE = "<script>alert('x')</script> & \"more\"\nsecond line"
SPEC = AttentionSpec.parse(KEY.text_key)
# A hundred microseconds for the winner's config, more for the others, in the order of trials.
TRIED = [
    FwdConfig(tiles=tiles, block_m=m, block_n=n, num_warps=4, num_stages=2)
    for tiles in ("pointer", "descriptor")
    for m in (32, 64, 128)
    for n in (32, 64)
]


class Page(HTMLParser):
    """What a page refers to, its ids, and whether each element that opens is closed."""

    VOID = ("meta", "link", "wbr", "br", "img", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value or "")
            elif name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in ("src", "href", "srcset", "data", "action", "poster"):
                self.loads.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)


def attngen_(*arguments: object) -> Result:
    return CliRunner().invoke(attngen.cli.main, [str(a) for a in arguments])


def fill(path: Path) -> None:
    """Three searches, three winners (one predicted, one on an unknown GPU), and failures."""
    unknown = under(replace(MEASURED, median_us=77.7, spread_us=None), device_key="sm_77-x")
    with Store.open(path) as store:
        for number, config in enumerate(TRIED):
            store.begin_trial(KEY, config)
            store.finish_trial(KEY, config, "ok", median_us=400.0 - 20 * number, spread_us=1.0)
        store.finish_trial(KEY, CONFIG, "failed", reason=HOSTILE)
        other = at(seqlen_q=2048).key
        store.finish_trial(other, CONFIG, "skipped", reason="needs 300000 bytes, it has 232448")
        store.finish_trial(other, TRIED[0], "skipped", reason="needs 400000 bytes, it has 232448")
        foreign = replace(KEY, text_key="<img src=x>", bucket="fwd-&", device_key="sm_78-y")
        store.finish_trial(foreign, CONFIG, "ok", median_us=55.5)
        for record in (
            replace(MEASURED, median_us=123.4, default_us=234.5),
            under(PREDICTED, bucket=replace(BUCKET, seqlen_k=1024).key),
            replace(unknown, provenance=replace(MEASURED.provenance, gpu="nvidia_new")),
        ):
            store.record_winner(record)


def bench_file(path: Path) -> Path:
    """A bench line of the same call as the first winner, with one peer that could not run."""
    timed = (
        Timed("attngen", 0.125, 0.001, 500.0, config=CONFIG.key),
        Timed("attngen default", 0.25, 0.001, 250.0),
        Timed("<b>peer</b>", 0.1, 0.001, 625.0),
        Timed("absent", reason="<i>not installed</i>"),
    )
    line = Comparison(SPEC, Workload(1, 64, 8, 4096, 4096), "fwd", 3, "user", timed).as_dict()
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "command": "attngen bench"} | line) + "\n")
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report")
    fill(folder / "t.db")
    bench = bench_file(folder / "bench.json")
    page = folder / "page.html"
    result = attngen_("report", "--db", folder / "t.db", "--html", page, "--bench", bench)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    assert result.stderr == f"wrote {page}\n"
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(made: str) -> Page:
    return Page(made)


def test_page_is_whole_and_loads_nothing(made: str, page: Page) -> None:
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert all(load == "data:," or load.startswith("#") for load in page.loads)
    assert not page.tags & {"script", "img", "iframe", "object", "embed"}
    assert "://" not in re.sub(r"<pre.*?</pre>", "", made, flags=re.DOTALL)
    assert not re.search(r"@import|url\((?!#)", made)
    assert "default-src 'none'" in made
    assert "prefers-color-scheme: dark" in made


def test_every_number_stands_there_with_its_record(page: Page) -> None:
    for number in ("123.4", "234.5", "77.7", "55.5", "1.900x", "1980 to 1965", "0.002"):
        assert number in page.text
    assert f"record-{KEY.digest}" in page.ids
    assert f"#record-{KEY.digest}" in page.links  # from the marks of the charts
    for number in range(len(TRIED)):
        assert f"{400 - 20 * number:.1f}" in page.text
    assert f"record {KEY.digest}, measured {MEASURED.date}" in page.text
    assert "driver 570.1, cuda 12.8, torch 2.11.0, triton 3.6.0" in page.text


def test_winner_has_its_source(made: str, page: Page) -> None:
    assert render(SPEC, CONFIG) in page.text
    assert (
        "The record is of other templates than these" in page.text
    )  # the sample's hash is made up


def test_missing_is_no_zero(page: Page) -> None:
    assert "—" in page.text
    assert "None" not in page.text.replace(render(SPEC, CONFIG), "")
    assert not re.search(r"(?<![\d.])0\.0 us", page.text)


def test_text_is_escaped(made: str, page: Page) -> None:
    assert "<script" not in made
    assert HOSTILE in page.text
    assert "fwd-& <img src=x>" in page.text
    assert {"b", "i"}.isdisjoint(page.tags)
    assert "<b>peer</b>" in page.text


def test_failures_are_grouped(page: Page) -> None:
    assert "3 of 16 trials did not end with a time" in page.text
    assert "2 skipped: needs … bytes, it has …" in page.text
    assert "needs 300000 bytes, it has 232448" in page.text
    assert "1 failed: <script>alert('x')</script>" in page.text


def test_bench_lines_stand_beside_their_record(page: Page) -> None:
    assert "bench-1" in page.ids
    assert "0.80x" in page.text  # the peer's time over ours
    assert "that of the record" in page.text
    assert "absent: <i>not installed</i>" in page.text
    assert "No roof: attngen knows no peak figures of nvidia_new." in page.text
    assert "NVIDIA H200 datasheet" in page.text


def test_optuna_drew_both_plots(made: str) -> None:
    assert made.count('aria-label="Optimization history') == 2  # the third search timed nothing
    assert made.count('aria-label="Importance') == 1
    assert "No history: nothing was measured." in made


def test_page_of_one_gpu(tmp_path: Path) -> None:
    fill(tmp_path / "t.db")
    result = attngen_("report", "--db", tmp_path / "t.db", "--html", "-", "--gpu", H200.name)
    assert result.exit_code == 0, result.stderr
    assert "123.4" in result.stdout
    assert "nvidia_new" not in result.stdout


@pytest.mark.parametrize("there", [False, True], ids=["no-file", "empty"])
def test_page_of_nothing_is_an_error(tmp_path: Path, there: bool) -> None:
    if there:
        Store.open(tmp_path / "t.db").close()
    result = attngen_("report", "--db", tmp_path / "t.db", "--html", tmp_path / "page.html")
    assert result.exit_code == 1
    assert "holds no trial and no winner; `attngen tune` makes them" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = attngen_("report", "--db", tmp_path / "t.db", "--html", "-")
    assert result.exit_code == 1
    assert "pip install 'attngen[report]'" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(("--html", "-", "--json"), "--html and --json", id="json"),
        pytest.param(("--bench", "b.json"), "add --html FILE", id="bench-alone"),
        pytest.param(("--html", "t.db"), "name another file", id="onto-the-database"),
        pytest.param(("--html", "b.json", "--bench", "b.json"), "name another", id="onto-bench"),
    ],
)
def test_wrong_usage(
    options: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "t.db")
    bench_file(tmp_path / "b.json")
    result = attngen_("report", "--db", "t.db", *options)
    assert result.exit_code == 2
    assert said in result.stderr


def bench_text(workload: str = '"1,1,1,8,8"', rounds: str = "3", ms: str = "1.0") -> str:
    result = f'{{"ms": {ms}, "their_time_over_ours": null, "reason": "", "config": ""}}'
    return (
        f'{{"spec": "head_dim=64", "workload": {workload}, "direction": "fwd", '
        f'"rounds": {rounds}, "results": {{"attngen": {result}}}}}'
    )


def test_the_bench_line_that_the_next_test_spoils_is_good(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(bench_text())
    assert len(bench_lines.read((tmp_path / "b.json",))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        '{"spec": "head_dim=64", "workload": "1,1,1,1,1", "direction": "up"}',
        "\xff",
        "[" * 100_000,
        bench_text(rounds="Infinity"),
        bench_text(ms="1e-320"),
        bench_text(ms="1" + 400 * "0"),
        bench_text(workload='"1,1,1,1,' + 200 * "9" + '"'),
    ],
)
def test_bench_file_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "b.json").write_bytes(text.encode("latin-1"))
    result = attngen_(
        "report", "--db", tmp_path / "t.db", "--html", "-", "--bench", tmp_path / "b.json"
    )
    assert result.exit_code == 1
    assert "b.json" in result.stderr
    assert "Traceback" not in result.stderr


# ---- the numbers ----------------------------------------------------------------------------


def test_work_of_a_square_call() -> None:
    spec = AttentionSpec(head_dim=64, dtype="bfloat16")
    forward = work_of(spec, "fwd", 8, 1, 1024, 1024)
    assert forward.flops == 4 * 8 * 1024 * 1024 * 64
    assert forward.bytes == 4 * (8 * 1024 * 64) * 2 + 4 * 8 * 1024  # q, k, v, out; lse
    backward = work_of(spec, "bwd", 8, 1, 1024, 1024)
    assert backward.flops == 2.5 * forward.flops
    assert backward.bytes == 8 * (8 * 1024 * 64) * 2 + 4 * 8 * 1024  # dout, dq, dk, dv as well
    shared = work_of(spec, "fwd", 8, 4, 1024, 1024)
    assert shared.bytes == (2 * 8 + 2 * 2) * 1024 * 64 * 2 + 4 * 8 * 1024
    assert forward.tflops(100.0) == forward.flops / 100e-6 / 1e12


def test_bucket_of_all_sizes_has_no_work() -> None:
    assert work_of_bucket(SPEC, Bucket("fwd", 0, 0, 0, 0, 0)) is None


@pytest.mark.parametrize("name", KNOWN_GPUS)
def test_device_key_is_read_back(name: str) -> None:
    gpu = KNOWN_GPUS[name]
    assert from_device_key(gpu.device_key) == replace(gpu, name=gpu.device_key)
    assert from_device_key("sm_77-x") is None


def test_log_scale_ends_where_it_says() -> None:
    scale = LogScale(1.0, 100.0, 10.0, 210.0)
    assert (scale(1.0), scale(10.0), scale(100.0)) == (10.0, 110.0, 210.0)
    assert [tick.label for tick in scale.ticks()] == ["1", "2", "5", "10", "20", "50", "100"]


def test_study_keeps_the_order_and_what_is_off_the_axes(store: Store) -> None:
    off = FwdConfig(block_m=512, block_n=16, num_warps=16, num_stages=8)
    for config, status, us in (
        (TRIED[0], "ok", 9.0),
        (off, "ok", 5.0),
        (TRIED[1], "failed", None),
        (TRIED[2], "ok", 7.0),
    ):
        store.begin_trial(KEY, config)
        store.finish_trial(KEY, config, status, median_us=us)
    study = study_of("fwd", store.history(KEY), axes_of(KEY))
    assert [trial.value for trial in study.trials] == [9.0, 5.0, None, 7.0]
    assert study.best_value == 5.0
    assert study.trials[1].params == {}
    assert importances(study, "") == (None, 2)
