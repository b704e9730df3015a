"""`--shard` and `--storage` on the command line, and what launchers say."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from attngen.cli import main
from attngen.cli.shard import parse_shard, shard_of
from attngen.errors import SpecError

JOBS = "".join(f'[[job]]\nspec = "head_dim={d}"\nworkload = "1,1,1,8,8"\n' for d in (16, 32, 64))
LAUNCHERS = (
    "SLURM_ARRAY_TASK_ID",
    "SLURM_ARRAY_TASK_COUNT",
    "SLURM_ARRAY_TASK_MIN",
    "SLURM_ARRAY_TASK_STEP",
    "RANK",
    "WORLD_SIZE",
)


def array(task: object, count: object = 4, **others: object) -> dict[str, str]:
    named = {"ID": task, "COUNT": count, **others}
    return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in named.items()}


RANK = {"RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "shard"),
    [
        ({}, None),
        ({"RANK": "1"}, None),
        (RANK, (1, 2)),
        (array(3), (3, 4)),
        (array(1, 4, MIN=1) | RANK, (0, 4)),
        (array(4, 4, MIN=1), (3, 4)),
        (array(14, 3, MIN=10, STEP=2), (2, 3)),
    ],
)
def test_shard_of_a_launcher(environment: dict[str, str], shard: tuple[int, int] | None) -> None:
    assert shard_of(environment) == shard


@pytest.mark.parametrize(
    "environment",
    [
        array(4),
        array(0, 4, MIN=1),
        array(5, 3, MIN=2, STEP=2),
        array("x"),
        {"SLURM_ARRAY_TASK_ID": "1"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
    ],
)
def test_launcher_that_makes_no_sense(environment: dict[str, str]) -> None:
    with pytest.raises(SpecError, match="--shard i/n"):
        shard_of(environment)


@pytest.mark.parametrize("text", ["", "1", "1/1", "2/1", "0/0", "-1/2", "1/2/3", "a/b", "0 / 2"])
def test_wrong_shard(text: str) -> None:
    with pytest.raises(SpecError, match="from 0 to n-1"):
        parse_shard(text)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the tuner; gives what it was asked."""
    calls: list[str] = []

    def search(spec: Any, workload: Any, **named: Any) -> list[Any]:
        calls.append(f"{spec.head_dim} {named['storage']}")
        return []

    real = importlib.util.find_spec("attngen.tuner")
    assert real is not None
    module = types.ModuleType("attngen.tuner")
    module.__path__ = real.submodule_search_locations
    module.tune = search
    module.kept_workers = contextlib.nullcontext
    monkeypatch.setitem(sys.modules, "attngen.tuner", module)
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return calls


def tune(folder: Path, line: str = "", environment: dict[str, str] | None = None) -> Result:
    path = folder / "jobs.toml"
    path.write_text(JOBS)
    arguments = ["tune", "--model", str(path), "--gpu", "sm_80", "--db", str(folder / "a.db")]
    return CliRunner().invoke(main, [*arguments, *line.split()], env=environment)


@pytest.mark.parametrize(
    ("line", "environment", "dims"),
    [
        ("", {}, [16, 32, 64]),
        ("--shard 0/2", {}, [16, 64]),
        ("--shard 1/2", {}, [32]),
        ("", RANK, [32]),
        ("--shard 0/1", RANK, [16, 32, 64]),
        ("", array(9, 3, MIN=7), [64]),
    ],
)
def test_jobs_of_a_shard(
    line: str, environment: dict[str, str], dims: list[int], tmp_path: Path, tuned: list[str]
) -> None:
    result = tune(tmp_path, line, environment)
    assert result.exit_code == 0, result.output
    assert tuned == [f"{dim} None" for dim in dims]


def test_with_a_storage_every_rank_joins_every_job(tmp_path: Path, tuned: list[str]) -> None:
    result = tune(tmp_path, "--storage journal://a.log", RANK)
    assert result.exit_code == 0, result.output
    assert tuned == [f"{dim} journal://a.log" for dim in (16, 32, 64)]


def test_empty_shard_is_said(tmp_path: Path, tuned: list[str]) -> None:
    result = tune(tmp_path, "--shard 4/5")
    assert (result.exit_code, tuned) == (0, [])
    assert "shard 4/5 of 3 jobs is empty" in result.stderr


def test_dry_run_shows_the_shard(tmp_path: Path, tuned: list[str]) -> None:
    result = tune(tmp_path, "--shard 1/2 --dry-run")
    assert "head_dim=32" in result.stdout and "head_dim=16" not in result.stdout


@pytest.mark.parametrize(
    ("line", "environment", "words"),
    [
        ("--shard 2/2", {}, ("--shard", "from 0 to n-1", "2/2")),
        ("", array(9), ("SLURM_ARRAY_TASK_ID=9", "--shard i/n")),
        ("--storage sqlite:///a.db", {}, ("cannot be shared", "journal://FILE", "postgresql://")),
        ("--storage a.log", {}, ("'a.log' is not known", "journal://FILE")),
        ("--storage journal://a.log --revalidate", {}, ("--revalidate", "drop --storage")),
    ],
)
def test_wrong_usage(
    line: str, environment: dict[str, str], words: tuple[str, ...], tmp_path: Path, tuned: list[str]
) -> None:
    result = tune(tmp_path, line, environment)
    assert (result.exit_code, result.stdout, tuned) == (2, "", []), result.output
    (said,) = result.stderr.splitlines()
    for word in words:
        assert word in said
