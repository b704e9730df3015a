"""The command line: what it prints where, its exit codes, and every way of getting it wrong."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from samples import CONFIG, H100, KEY, MEASURED, PREDICTED, at, faster, under

from attngen.cli import main
from attngen.config import BwdConfig, FwdConfig
from attngen.errors import TuningError
from attngen.gpu import by_name
from attngen.render import render
from attngen.spec import AttentionSpec
from attngen.store import Store

SPEC = "head_dim=64,dtype=float32,causal=true"
SIZES = "1,2,1,8,8"
# numpy's warning about Triton's interpreter, in whatever runs a kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
FWD = "block_m=64,block_n=32,num_warps=4,num_stages=1"
TUNE = "tune head_dim=64 --workload 1,2,2,4,4"


def attngen(*arguments: str | int | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments], input=stdin)


def fails(result: Result, code: int, *words: str) -> None:
    """Exit code `code`, nothing on stdout, one line on stderr that holds the words."""
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    (line,) = result.stderr.splitlines()
    for word in words:
        assert word in line
    assert "Traceback" not in line


def json_lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def stored(path: Path, *records: Any) -> Path:
    with Store.open(path) as store:
        for record in records:
            store.record_winner(record)
    return path


# ---- wrong usage: exit code 2 ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("tun", ("'tun'", "'tune'", "--help"), id="unknown-command"),
        pytest.param("emit --bogus", ("--bogus", "attngen emit --help"), id="unknown-option"),
        pytest.param("emit", ("SPEC", "attngen emit --help"), id="no-spec"),
        pytest.param("tune head_dim=64", ("--workload", "attngen tune --help"), id="no-workload"),
        pytest.param(
            "emit head_dim=64,casual=true", ("'casual'", "'causal'", "fields"), id="unknown-field"
        ),
        pytest.param("emit head_dim=9999", ("9999", "1 to 576", "smaller"), id="head-dim"),
        pytest.param("emit head_dim", ("'head_dim'", "head_dim=128"), id="no-equals"),
        pytest.param("emit dtype=float16", ("lacks head_dim", "head_dim=128"), id="no-head-dim"),
        pytest.param("emit head_dim=64,dtype=fp16", ("'fp16'", "float16"), id="dtype"),
        pytest.param("emit head_dim=64,dropout_p=nan", ("nan", "0 to 1"), id="dropout"),
        pytest.param("emit head_dim=64,window=3", ("'3'", "LEFT:RIGHT"), id="window"),
        pytest.param(
            "emit head_dim=64,documents=true,layout=thd", ("documents", "not built"), id="not-built"
        ),
        pytest.param(
            "explain head_dim=64 --workload 1,2,3", ("'1,2,3'", "4,32,8"), id="workload-short"
        ),
        pytest.param(
            "explain head_dim=64 --workload 1,3,2,4,4", ("3 and 2", "multiple"), id="heads"
        ),
        pytest.param(
            "tune head_dim=64 --workload 1,2,2,4,4 --gpu nvidia_h2000",
            ("'nvidia_h2000'", "'nvidia_h200'", "sm_90"),
            id="gpu",
        ),
        pytest.param(
            "tune head_dim=64 --workload 1,2,2,4,4 --direction up", ("'up'", "fwd"), id="direction"
        ),
        pytest.param(
            "tune head_dim=64 --workload 1,2,2,4,4 --budget 0", ("0", "--budget"), id="budget"
        ),
        pytest.param(f"{TUNE} --budget -1", ("'-1'", "above 0"), id="budget-negative"),
        pytest.param(f"{TUNE} --budget nan", ("'nan'", "above 0"), id="budget-nan"),
        pytest.param(f"{TUNE} --budget inf", ("'inf'", "at most 604800"), id="budget-inf"),
        pytest.param(f"{TUNE} --budget 1e400", ("'1e400'", "at most"), id="budget-overflow"),
        pytest.param(f"{TUNE} --budget ten", ("'ten'", "seconds"), id="budget-word"),
        pytest.param(f"{TUNE} --gpu interpreter", ("not tuned", "nvidia_h200"), id="interpreter"),
        pytest.param(f"{TUNE} --budget 5 --budget 6", ("--budget is given twice",), id="twice"),
        pytest.param(
            "verify head_dim=64 --workload 1,1,1,8,8 --workload 1,1,1,9,9",
            ("--workload is given twice", "keep one"),
            id="verify-twice",
        ),
        pytest.param(f"{TUNE} --max-trials 0", ("0", "x>=1"), id="max-trials"),
        pytest.param(f"{TUNE} --max-trials nan", ("'nan'", "integer"), id="max-trials-nan"),
        pytest.param(f"{TUNE} --seed -1", ("-1", "0<=x<=4294967295"), id="seed-negative"),
        pytest.param(f"{TUNE} --seed 4294967296", ("0<=x<=4294967295",), id="seed-large"),
        pytest.param("bench head_dim=64 --rounds 0", ("0", "1<=x<=1000"), id="rounds"),
        pytest.param("bench head_dim=64 --rounds 1e9", ("'1e9'", "integer"), id="rounds-float"),
        pytest.param(f"bench head_dim=64 --rounds {10**18}", ("1<=x<=1000",), id="rounds-large"),
        pytest.param("emit head_dim=64 --config block_m", ("'block_m'", "="), id="config-equals"),
        pytest.param(
            "emit head_dim=64 --config block_m=64",
            ("lacks block_n, num_warps, num_stages;", "fields: lowering, tiles, block_m"),
            id="config-short",
        ),
        pytest.param(
            "emit head_dim=64 --direction bwd --config num_warps=4",
            ("lacks block_m, block_n, num_stages;", "dq_num_stages"),
            id="config-short-bwd",
        ),
        pytest.param("emit head_dim=64 --config ,", ("lacks block_m",), id="config-empty"),
        pytest.param(
            f"emit head_dim=64 --config {FWD},block_m=32",
            ("block_m is given twice",),
            id="config-twice",
        ),
        pytest.param(
            f"emit head_dim=64 --config {FWD},=3", ("field ''", "fields:"), id="config-no-name"
        ),
        pytest.param(
            f"emit head_dim=64 --config {FWD},dq_block_m=64",
            ("'dq_block_m'", "fields:"),
            id="config-other-direction",
        ),
        pytest.param(
            f"emit head_dim=64 --direction bwd --config {FWD},dq=atomic,dq_block_m=64",
            ("dq=atomic", "leave out dq_block_m"),
            id="config-unused",
        ),
        pytest.param(
            "emit head_dim=64 --gpu nvidia_a100 --config lowering=hopper,overlap=yes",
            ("overlap must be true or false", "'yes'"),
            id="config-bool",
        ),
        pytest.param(
            "emit head_dim=64 --gpu nvidia_a100 --config lowering=hopper",
            ("lowering=hopper needs sm_90, nvidia_a100 is sm_80",),
            id="config-hopper",
        ),
        *(
            pytest.param(
                f"emit head_dim=64 --config {FWD.replace(old, new)}", words, id=f"config-{new}"
            )
            for old, new, words in (
                ("block_m=64", "block_m=-64", ("block_m=-64", "power of two from 16 to 1024")),
                ("block_n=32", "block_n=0", ("block_n=0", "power of two from 16 to 1024")),
                ("block_m=64", "block_m=4096", ("block_m=4096", "power of two from 16 to 1024")),
                ("num_warps=4", "num_warps=3", ("num_warps=3", "1, 2, 4, 8 or 16")),
                ("num_stages=1", "num_stages=-1", ("num_stages=-1", "from 1 to 8")),
                ("num_stages=1", "num_stages=1.0", ("num_stages", "an int", "'1.0'")),
                ("num_stages=1", "num_stages=\N{SUPERSCRIPT TWO}", ("num_stages", "an int")),
                ("num_stages=1", "num_stages=", ("num_stages", "an int", "''")),
                ("block_m=64", f"block_m={10**20}", ("block_m", "an int")),
            )
        ),
        pytest.param(
            f"emit head_dim=64 --config {FWD},blok_m=3", ("'blok_m'", "'block_m'"), id="config-name"
        ),
        pytest.param(
            f"emit head_dim=64 --config {FWD.replace('64', '48')}",
            ("block_m=48", "power of two"),
            id="config-value",
        ),
        pytest.param(
            f"emit head_dim=64 --config {FWD.replace('64', 'x')}", ("'x'", "int"), id="config-int"
        ),
        pytest.param(
            f"emit head_dim=64 --config {FWD},tiles=tma",
            ("'tma'", "descriptor"),
            id="config-choice",
        ),
        pytest.param(
            f"emit head_dim=512 --gpu sm_86 --config {FWD}", ("bytes", "sm_86"), id="config-too-big"
        ),
        pytest.param(
            f"verify head_dim=64 --config {FWD}", ("--direction fwd",), id="config-two-directions"
        ),
        *(
            pytest.param(f"{command} --workload {sizes}", words, id=f"{command.split()[0]}-{sizes}")
            for command in (TUNE, "emit head_dim=64", "explain head_dim=64", "verify head_dim=64")
            for sizes, words in (
                ("1,2", ("'1,2'", "B,Hq,Hkv,Sq,Sk", "4,32,8,4096,4096")),
                (",,,,", ("',,,,'", "4,32,8,4096,4096")),
                ("-1,1,1,8,8", ("batch", "-1")),
                ("1,1,1,1.5,8", ("1.5", "4,32,8,4096,4096")),
                (f"1,1,1,{10**18},8", (f"query length is {10**18}", "smaller sizes")),
                (f"{10**18},1,1,0,{10**18}", ("memory", "smaller sizes")),
                ("65536,32,8,4096,4096", ("larger than any GPU's memory", "2147483647")),
            )
        ),
        *(
            pytest.param(
                f"{command} head_dim=64 --workload {sizes}",
                (sizes, "empty", "at least 1"),
                id=f"{command}-{sizes}",
            )
            for command in ("tune", "verify", "bench")
            for sizes in ("0,1,1,8,8", "1,0,1,8,8", "1,1,1,0,8", "1,1,1,8,0")
        ),
        pytest.param("import /nowhere/x.jsonl", ("/nowhere/x.jsonl", "exist"), id="no-file"),
        pytest.param("merge /nowhere/x.db --into y.db", ("/nowhere/x.db",), id="no-database"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(line: str, words: tuple[str, ...]) -> None:
    fails(attngen(*line.split()), 2, *words)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(("emit", SPEC, "--out", ""), id="emit-out"),
        pytest.param(("export", "--out", ""), id="export-out"),
        pytest.param(("import", ""), id="import-file"),
        pytest.param(("merge", "", "--into", "x"), id="merge-source"),
        *(
            pytest.param((command, *rest, "--db", ""), id=f"{command}-db")
            for command, *rest in (["list"], ["export"], ["report"], ["import", "-"])
        ),
    ],
)
def test_empty_path_is_refused(line: tuple[str, ...]) -> None:
    fails(attngen(*line), 2, "empty path", "name a file", f"attngen {line[0]} --help")


def test_empty_workload_text_is_refused() -> None:
    fails(attngen("explain", SPEC, "--workload", ""), 2, "''", "4,32,8,4096,4096")


def test_config_may_have_spaces_and_a_last_comma() -> None:
    result = attngen("emit", SPEC, "--config", FWD.replace(",", " , ") + ",")
    assert result.stdout == attngen("emit", SPEC, "--config", FWD).stdout
    assert result.exit_code == 0


@pytest.mark.parametrize("arguments", [("-h",), ("list", "-h"), ("tune", "-h")])
def test_short_help(arguments: tuple[str, ...]) -> None:
    result = attngen(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("Usage: ")


def test_no_command_shows_the_commands() -> None:
    result = attngen()
    assert result.exit_code == 2
    assert "tune" in result.stderr


# ---- failures: exit code 1 ------------------------------------------------------------------


@pytest.mark.parametrize("command", ["list", "export", "report"])
def test_file_that_is_no_database_is_named(command: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.db"
    bad.write_text("these are not the bytes of a database, and they go on for a while " * 20)
    fails(attngen(command, "--db", bad), 1, str(bad), "no SQLite database", "rename it")


def test_import_into_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_text("not a database " * 100)
    (tmp_path / "x.jsonl").write_text(MEASURED.to_line())
    fails(
        attngen("import", tmp_path / "x.jsonl", "--db", tmp_path / "bad.db"),
        1,
        "no SQLite database",
    )


def test_export_of_nothing_fails() -> None:
    fails(attngen("export", "--gpu", "nvidia_a100"), 1, "nvidia_a100", "attngen tune")


def test_output_into_missing_folder(tmp_path: Path) -> None:
    target = tmp_path / "none" / "kernel.py"
    fails(attngen("emit", SPEC, "--gpu", "sm_90", "--out", target), 1, str(target.parent))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        pytest.param("none/kernel.py", ("No such file",), id="no-folder"),
        pytest.param("file/kernel.py", ("Not a directory",), id="file-as-folder"),
        pytest.param("a" * 300, ("name too long",), id="name-too-long"),
    ],
)
@pytest.mark.parametrize("command", ["emit", "export"])
def test_output_that_cannot_be_written_is_named(
    command: str, target: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    db = stored(tmp_path / "t.db", MEASURED)
    line = ("emit", SPEC) if command == "emit" else ("export", "--db", db)
    result = attngen(*line, "--out", tmp_path / target)
    fails(result, 1, f"cannot write {tmp_path / target} (", *words, "folder that exists")
    assert not list(tmp_path.glob(".attngen-*"))


def test_output_takes_a_long_name_and_follows_a_link(tmp_path: Path) -> None:
    target = tmp_path / ("a" * 250)
    (tmp_path / "link").symlink_to(target)
    assert attngen("emit", SPEC, "--config", FWD, "--out", tmp_path / "link").exit_code == 0
    assert (tmp_path / "link").is_symlink()
    assert target.read_text() == attngen("emit", SPEC, "--config", FWD).stdout


def test_output_into_a_pipe_does_not_replace_it(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    process = python("-m", "attngen", "emit", SPEC, "--config", FWD, "--out", str(fifo))
    with fifo.open() as reader:
        text = reader.read()
    process.communicate()
    assert (process.returncode, fifo.is_fifo()) == (0, True)
    assert text == attngen("emit", SPEC, "--config", FWD).stdout


def test_export_over_its_own_database_is_refused(tmp_path: Path) -> None:
    db = stored(tmp_path / "t.db", MEASURED)
    fails(attngen("export", "--db", db, "--out", db), 2, str(db), "the database itself")
    listed = json_lines(attngen("list", "--db", db, "--gpu", "nvidia_h200", "--json"))
    assert [each["source"] for each in listed].count("user") == 1


def test_import_and_merge_name_each_other(tmp_path: Path) -> None:
    db = stored(tmp_path / "t.db", MEASURED)
    lines = tmp_path / "x.jsonl"
    lines.write_text(MEASURED.to_line())
    fails(attngen("import", db), 2, str(db), "is a database", "`attngen merge`")
    fails(attngen("merge", lines, "--into", db), 2, str(lines), "JSON", "`attngen import`")


# Places at which no database can be, and what is said of each.
PLACES = {
    "folder": (".", "is a folder"),
    "device": ("/dev/null", "is a device or pipe"),
    "text": ("text", "no SQLite database"),
    "below-a-file": ("text/t.db", "which is no folder"),
    "name-too-long": ("a" * 300, "File name too long"),
}
COMMANDS = {
    "list": "list",
    "export": "export",
    "report": "report",
    "import": "import x.jsonl",
    "tune": f"tune {SPEC} --workload {SIZES} --gpu sm_90",
}


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def no_place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """Sets ATTNGEN_DB to where no database can be; gives the path and what is said."""
    place, said = request.param
    (tmp_path / "text").write_text("not a database " * 100)
    (tmp_path / "x.jsonl").write_text(MEASURED.to_line())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATTNGEN_DB", str(tmp_path / place))
    return str(tmp_path / place), said


@pytest.mark.parametrize("line", COMMANDS.values(), ids=COMMANDS)
def test_impossible_database_is_named_with_the_next_step(
    line: str, no_place: tuple[str, str]
) -> None:
    fails(attngen(*line.split()), 1, *no_place, "--db or ATTNGEN_DB")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("command", ["explain", "emit"])
def test_look_up_goes_on_without_an_impossible_database(
    command: str, no_place: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attngen.records._warned", set())
    result = attngen(command, SPEC, "--workload", SIZES, "--gpu", "sm_90")
    assert result.exit_code == 0
    (warning,) = result.stderr.splitlines()
    assert warning.startswith("attngen: warning: ")
    for words in (*no_place, "--db or ATTNGEN_DB", "going on without it"):
        assert words in warning


@pytest.mark.parametrize(
    ("command", "code"), [("list", 0), ("explain", 0), ("verify", 0), ("import", 1), ("tune", 1)]
)
@pytest.mark.filterwarnings("default")
def test_cache_folder_that_cannot_be_made(
    command: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.jsonl").write_text(MEASURED.to_line())
    monkeypatch.delenv("ATTNGEN_DB")
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", "/proc/none")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    line = {"explain": f"explain {SPEC} --workload {SIZES} --gpu sm_90"} | COMMANDS
    line |= {"verify": "verify head_dim=16 --direction fwd"}
    result = attngen(*line[command].replace("x.jsonl", str(tmp_path / "x.jsonl")).split())
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.stderr
    if code:
        fails(result, 1, "/proc/none/tuning.db cannot be made", "--db or ATTNGEN_DB")


def test_home_of_nobody_is_a_name_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_DB", "~nobody-of-this-name/t.db")
    assert attngen("list", "--gpu", "nvidia_a100").exit_code == 0


def test_full_stdout_is_said_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        process = python("-m", "attngen", "emit", SPEC, "--config", FWD, stdout=full)
        error = process.communicate()[1]
    assert (process.returncode, error) == (
        1,
        "attngen: No space left on device: in writing the output\n",
    )


def test_tune_without_gpu_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.tuner import run

    class NoGpu(contextlib.nullcontext[None]):
        gpu = None

        def __enter__(self) -> Any:
            return self

    monkeypatch.setattr(run, "TimingClient", NoGpu)
    result = attngen("tune", SPEC, "--workload", SIZES)
    fails(result, 1, "no GPU", "attngen tune --gpu nvidia_h200", "attngen doctor")
    assert "gpu=" not in result.stderr


def test_bench_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    fails(attngen("bench", SPEC), 1, "CUDA device", "attngen doctor")


def test_spec_that_fits_no_config() -> None:
    spec = "head_dim=512,dtype=float32"
    result = attngen("explain", spec, "--workload", "1,1,1,4096,4096", "--gpu", "sm_86")
    fails(result, 1, "no bwd config fits", "smaller head_dim")


# ---- tune -----------------------------------------------------------------------------------


class FakeReport:
    """What `tune` returns, as far as the command line reads it."""

    def __init__(self) -> None:
        from attngen.workload import Bucket

        self.bucket = Bucket("fwd", 8, 8, 2, 2, 0)
        self.record = MEASURED
        self.tried = 3

    confidence = "clear"

    def __str__(self) -> str:
        return "a report"


@pytest.fixture
def fake_tune(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replaces the tuner; gives the list of its calls' arguments."""
    calls: list[dict[str, Any]] = []

    def tune(
        spec: AttentionSpec, workload: Any, *, progress: Any, **named: Any
    ) -> list[FakeReport]:
        calls.append({"spec": spec, "workload": workload, **named})
        trial = {"event": "trial", "bucket": "fwd-q8", "status": "ok", "tried": 1, "measured": 1}
        progress(trial | {"best_us": 12.34, "reason": None})
        progress({"event": "winner", "bucket": "fwd-q8", "config": {"block_m": 64}})
        return [FakeReport()]

    put_tuner(monkeypatch, tune)
    return calls


def put_tuner(monkeypatch: pytest.MonkeyPatch, tune: Any) -> None:
    module = types.ModuleType("attngen.tuner")
    module.tune = tune
    module.kept_workers = contextlib.nullcontext
    monkeypatch.setitem(sys.modules, "attngen.tuner", module)


def test_tune_hands_every_option_on(fake_tune: list[dict[str, Any]], tmp_path: Path) -> None:
    sizes = ("--workload", SIZES, "--workload", "2,2,1,8,8")
    limits = ("--budget", 5, "--max-trials", 7, "--exhaustive", "--seed", 3, "--revalidate")
    result = attngen(
        "tune",
        SPEC,
        *sizes,
        *limits,
        "--direction",
        "fwd",
        "--gpu",
        "sm_90",
        "--db",
        tmp_path / "t.db",
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == "a report\na report\n"
    first, second = fake_tune
    assert (str(first.pop("workload")), str(second["workload"])) == (SIZES, "2,2,1,8,8")
    assert first == {
        "spec": AttentionSpec.parse(SPEC),
        "direction": "fwd",
        "gpu": by_name("sm_90"),
        "budget": 5.0,
        "max_trials": 7,
        "seed": 3,
        "exhaustive": True,
        "revalidate": True,
        "store": tmp_path / "t.db",
        "storage": None,
    }


def test_tune_says_progress_on_stderr_and_json_on_stdout(fake_tune: list[dict[str, Any]]) -> None:
    result = attngen("tune", SPEC, "--workload", SIZES, "--json")
    (report,) = json_lines(result)
    assert report["tried"] == 3
    assert report["record"]["median_us"] == 100.0
    assert "best 12.3 us; last ok" in result.stderr
    assert "winner block_m=64" in result.stderr


def test_tune_goes_on_with_the_next_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = []

    def tune(spec: AttentionSpec, workload: Any, **named: Any) -> list[FakeReport]:
        tuned.append(str(workload))
        if len(tuned) == 1:
            raise TuningError("too large")
        return [FakeReport()]

    put_tuner(monkeypatch, tune)
    result = attngen("tune", SPEC, "--workload", SIZES, "--workload", "2,2,1,8,8")
    assert (result.exit_code, result.stdout) == (1, "a report\n")
    assert tuned == [SIZES, "2,2,1,8,8"]
    assert f"{SIZES}: too large" in result.stderr and "1 of 2 workloads" in result.stderr


def test_sizes_of_a_model_need_a_model() -> None:
    fails(attngen("tune", "--revalidate", "--seqlen", 3), 2, "--seqlen goes with --model")


def test_tune_interrupted_says_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    put_tuner(monkeypatch, interrupted)
    fails(
        attngen("tune", SPEC, "--workload", SIZES), 130, "measured trials are kept", "same command"
    )


def test_unexpected_error_has_a_traceback_only_with_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **named: Any) -> None:
        raise ZeroDivisionError("on\ntwo lines")

    put_tuner(monkeypatch, broken)
    line = ("tune", SPEC, "--workload", SIZES)
    fails(attngen(*line), 1, "ZeroDivisionError: on | two lines", "--debug")
    for arguments in (("--debug", *line), (*line, "--debug")):
        result = attngen(*arguments)
        assert result.exit_code == 1
        assert "Traceback" in result.stderr


def test_report_counts_outcomes(tmp_path: Path) -> None:
    slow = FwdConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
    with Store.open(tmp_path / "t.db") as store:
        store.finish_trial(KEY, CONFIG, "ok", median_us=50.0)
        store.finish_trial(KEY, slow, "failed", reason="wrong by 0.5\nmore")
    (summary,) = json_lines(attngen("report", "--db", tmp_path / "t.db", "--json"))
    assert summary["outcomes"] == {"ok": 1, "failed": 1}
    assert (summary["best"], summary["best_us"]) == (CONFIG.key, 50.0)
    assert summary["common_reason"] == "wrong by 0.5"
    table = attngen("report", "--db", tmp_path / "t.db").stdout
    assert CONFIG.key in table
    assert KEY.bucket in table


def test_report_of_nothing(tmp_path: Path) -> None:
    result = attngen("report", "--db", tmp_path / "none.db")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "attngen tune" in result.stderr


# ---- emit, explain, verify ------------------------------------------------------------------


def test_emit_prints_what_render_gives() -> None:
    config = FwdConfig(block_m=64, block_n=32, num_warps=4, num_stages=1)
    result = attngen("emit", SPEC, "--config", FWD)
    assert result.exit_code == 0, result.output
    assert result.stdout == render(AttentionSpec.parse(SPEC), config)


def test_emit_reads_the_spec_and_config_of_an_emitted_header() -> None:
    spec = "head_dim=96,dtype=float16,causal=true,window=any:none,dropout_p=any,softcap=any"
    first = attngen("emit", spec, "--gpu", "nvidia_h200", "--direction", "bwd").stdout
    ast.parse(first)
    (key,) = [line.split()[1] for line in first.splitlines() if line.startswith("  spec ")]
    assert key == spec
    config = BwdConfig(block_m=32, block_n=64, num_warps=4, num_stages=1).key
    again = attngen("emit", key, "--gpu", "nvidia_h200", "--direction", "bwd", "--config", config)
    assert again.exit_code == 0, again.output


def test_emit_writes_a_file(tmp_path: Path) -> None:
    target = tmp_path / "kernel.py"
    result = attngen("emit", SPEC, "--config", FWD, "--out", target)
    assert (result.exit_code, result.stdout) == (0, "")
    assert str(target) in result.stderr
    assert target.read_text() == attngen("emit", SPEC, "--config", FWD).stdout
    assert [path.name for path in tmp_path.glob("*kernel*")] == ["kernel.py"]


def test_explain_uses_the_users_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen.identity import record_key
    from attngen.workload import Workload, spec_bucket

    spec, h200 = AttentionSpec.parse(KEY.text_key), by_name("nvidia_h200")
    bucket = spec_bucket("fwd", spec, Workload(2, 32, 4, 4096, 4096))
    record = replace(MEASURED, key=record_key(spec, bucket, h200))
    monkeypatch.setenv("ATTNGEN_DB", str(stored(tmp_path / "mine.db", record)))
    line = ("explain", spec.key, "--workload", "2,32,4,4096,4096", "--gpu", "nvidia_h200")
    (found,) = json_lines(attngen(*line, "--direction", "fwd", "--json"))
    assert found["choices"][0]["tier"] == "user"
    assert found["choices"][0]["config"] == CONFIG.as_dict()
    text = attngen(*line).stdout
    assert "measured 100.0 us, the default of then 130.0 us" in text
    assert "the default config is used" in text  # of the backward, which has no record


@pytest.mark.filterwarnings("default")
def test_explain_goes_on_without_a_damaged_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.db").write_text("not a database " * 100)
    monkeypatch.setenv("ATTNGEN_DB", str(tmp_path / "bad.db"))
    result = attngen("explain", SPEC, "--workload", SIZES, "--gpu", "sm_90")
    assert result.exit_code == 0
    assert "no SQLite database" in result.stdout
    (warning,) = result.stderr.splitlines()
    assert warning.startswith("attngen: warning: ")


def test_verify_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = json_lines(attngen("verify", "head_dim=16,dtype=float32,causal=true", "--json"))
    assert {check["result"] for check in checks} == {"out", "lse", "dq", "dk", "dv"}
    assert all(check["ok"] for check in checks)


def test_verify_runs_the_named_config(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr("attngen.resolve.kernel", spy(ran, "attngen.kernel", "kernel"))
    line = ("verify", "head_dim=16,dtype=float32", "--direction", "fwd", "--workload", "1,1,1,9,9")
    result = attngen(*line, "--config", FWD)
    assert result.exit_code == 0, result.output
    assert {config.key for _, config, _ in ran} == {
        FwdConfig(block_m=64, block_n=32, num_warps=4, num_stages=1).key
    }
    assert "1,1,1,9,9" in result.stdout


def spy(calls: list[Any], module: str, name: str) -> Any:
    original = getattr(__import__(module, fromlist=[name]), name)

    def called(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    return called


def test_verify_of_very_many_heads_checks_fewer() -> None:
    from attngen.verify import MAX_GROUP, shapes
    from attngen.workload import Workload

    huge = Workload(1, 100_000, 1, 8, 8)
    found = shapes(huge, "cpu")
    assert huge not in found
    assert {each.group_size for each in found} == {MAX_GROUP}


def test_verify_exits_1_on_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    from attngen import api

    def wrong(spec: AttentionSpec) -> Any:
        attend = api.compile(spec)

        def call(*tensors: Any, **named: Any) -> Any:
            out, lse = attend(*tensors, **named)
            return out * 1.01, lse

        return call

    monkeypatch.setattr("attngen.verify.compile", wrong)
    result = attngen("verify", "head_dim=16,dtype=float32", "--direction", "fwd")
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    (line,) = result.stderr.splitlines()
    assert "disagree with float64" in line
    assert "head_dim=16" in line


# ---- list, export, import, merge ------------------------------------------------------------


@pytest.fixture
def no_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.records.shipped", lambda: ())


@pytest.mark.usefixtures("no_shipped")
def test_list_shows_winners_of_a_gpu(tmp_path: Path) -> None:
    path = stored(tmp_path / "t.db", MEASURED, under(PREDICTED, device_key=H100.device_key))
    assert len(json_lines(attngen("list", "--db", path, "--json"))) == 2
    (only,) = json_lines(attngen("list", "--db", path, "--gpu", "nvidia_h200", "--json"))
    assert (only["source"], only["median_us"]) == ("user", 100.0)
    head, *rows = attngen("list", "--db", path).stdout.splitlines()
    assert head.split()[:2] == ["source", "gpu"]
    assert len(rows) == 2
    assert any("1.30x" in row for row in rows)


@pytest.mark.usefixtures("no_shipped")
def test_list_of_nothing() -> None:
    result = attngen("list", "--gpu", "nvidia_a100")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "nvidia_a100" in result.stderr


def test_export_then_import_is_the_same(tmp_path: Path) -> None:
    source = stored(tmp_path / "a.db", MEASURED, at(seqlen_q=64))
    assert attngen("export", "--db", source, "--out", tmp_path / "x.jsonl").exit_code == 0
    result = attngen("import", tmp_path / "x.jsonl", "--db", tmp_path / "b.db")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "2 added, 0 replaced, 0 kept, 0 rejected" in result.stdout
    assert attngen("export", "--db", tmp_path / "b.db").stdout == (tmp_path / "x.jsonl").read_text()


def test_import_names_bad_lines_and_keeps_the_good_ones(tmp_path: Path) -> None:
    lines = f"{MEASURED.to_line()}\nnot json\n"
    result = attngen("import", "-", "--db", tmp_path / "t.db", stdin=lines)
    assert result.exit_code == 1
    assert "1 added, 0 replaced, 0 kept, 1 rejected" in result.stdout
    (line,) = result.stderr.splitlines()
    assert "line 2: not JSON" in line


def test_merge_keeps_the_better(tmp_path: Path) -> None:
    sources = stored(tmp_path / "a.db", faster(1.1)), stored(tmp_path / "b.db", faster(1.5))
    into = tmp_path / "c.db"
    assert attngen("merge", *sources, "--into", into).exit_code == 0
    with Store.open(into) as store:
        assert store.winners() == [faster(1.5)]


def test_merge_takes_trials_and_says_so(tmp_path: Path) -> None:
    for name, us in (("a.db", 9.0), ("b.db", 7.0)):
        with Store.open(tmp_path / name) as store:
            store.finish_trial(KEY, CONFIG, "ok", median_us=us)
    into = tmp_path / "c.db"
    result = attngen("merge", tmp_path / "a.db", tmp_path / "b.db", "--into", into)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{tmp_path / 'a.db'}, trials: 1 added, 0 replaced, 0 kept, 0 rejected" in result.stdout
    with Store.open(into) as store:
        assert len(store.top(KEY)) == 1


@pytest.mark.parametrize("table", ["winners", "trials"])
def test_merge_and_export_name_what_they_cannot_read(tmp_path: Path, table: str) -> None:
    source = stored(tmp_path / "a.db", MEASURED, at(seqlen_q=64))
    with Store.open(source) as store:
        store.finish_trial(KEY, CONFIG, "ok", median_us=9.0)
        with store._writing():
            store._db.execute(f"update {table} set config = '{{' where bucket = ?", [KEY.bucket])
    result = attngen("merge", source, "--into", tmp_path / "b.db")
    assert result.exit_code == 1
    assert f", {table}: {int(table == 'winners')} added, 0 replaced, 0 kept, 1 rejected" in (
        result.stdout
    )
    (line,) = result.stderr.splitlines()
    assert f"{source}: {table[:-1]} {KEY.digest}" in line and line.endswith("it is skipped")
    result = attngen("export", "--db", source)
    assert result.exit_code == int(table == "winners")
    assert len(result.stdout.splitlines()) == 2 - int(table == "winners")
    assert (f"winner {KEY.digest}" in result.stderr) == (table == "winners")


def test_merge_writes_nothing_if_a_source_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "bad.db").write_text("not a database " * 100)
    sources = stored(tmp_path / "a.db", MEASURED), tmp_path / "bad.db"
    fails(
        attngen("merge", *sources, "--into", tmp_path / "c.db"), 1, "bad.db", "no SQLite database"
    )
    assert not (tmp_path / "c.db").exists()


# ---- as a process ---------------------------------------------------------------------------


def python(*arguments: str, **named: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments], stderr=subprocess.PIPE, text=True, **named
    )


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, attngen.cli\n"
        "heavy = {'torch', 'triton', 'numpy', 'optuna', 'sqlite_utils', 'rich', 'jinja2'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or None)"
    )
    process = python("-c", code)
    assert process.communicate()[1] == ""
    assert process.returncode == 0


def test_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    process = python("-m", "attngen", "emit", SPEC, "--config", FWD, stdout=writer)
    os.close(writer)
    assert process.communicate()[1] == ""


def test_ctrl_c_ends_a_process_with_130(tmp_path: Path) -> None:
    fifo = tmp_path / "never.jsonl"
    os.mkfifo(fifo)
    # A shell's background job ignores Ctrl-C, and so would what it starts.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = python("-m", "attngen", "import", str(fifo), stdout=subprocess.PIPE)
    signal.signal(signal.SIGINT, ignored)
    with process, fifo.open("w"):  # opens when the process is reading, and holds it there
        process.send_signal(signal.SIGINT)
        try:
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out, error) == (130, "", "attngen: interrupted\n")
