"""The wheel holds every module, template and shipped record. Built offline."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib
from support import REPO


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel of a copy of the tree (a build leaves folders behind)."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("attngen", "templates", "tuning_db"):
        shutil.copytree(REPO / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*REPO.glob("*.toml"), *REPO.glob("*.md")):
        shutil.copy(path, source)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index",
         "-q", "-w", str(target), str(source)],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("attngen-*.whl")
    return zipfile.ZipFile(path)


def _files(folder: Path, *suffixes: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in suffixes and "__pycache__" not in path.parts
    }


def test_wheel_holds_modules_templates_and_records(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    wanted = {f"attngen/{name}" for name in _files(REPO / "attngen", ".py", ".typed", ".jinja")}
    wanted |= {f"attngen/templates/{name}" for name in _files(REPO / "templates", ".jinja", ".md")}
    wanted |= {f"attngen/tuning_db/{name}" for name in _files(REPO / "tuning_db", ".jsonl", ".md")}
    assert "attngen/templates/parts/attend.py.jinja" in wanted
    assert names == wanted


def test_wheel_works_outside_the_checkout(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import attngen; from attngen.render import render; from attngen.config import parse\n"
        "print(attngen.__file__, len(render(attngen.AttentionSpec(head_dim=64), parse('fwd', "
        "'block_m=64,block_n=64,num_warps=4,num_stages=2'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    file, length = done.stdout.split()
    assert Path(file).is_relative_to(tmp_path) and int(length) > 1000


def test_pins_are_within_what_the_package_allows() -> None:
    from packaging.requirements import Requirement

    allowed = {
        requirement.name: requirement.specifier
        for requirement in map(
            Requirement,
            tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"],
        )
    }
    lines = (REPO / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert {pin.name for pin in pins} >= {"torch", "triton", "numpy"}
    for pin in pins:
        for clause in pin.specifier:
            if clause.operator == "==":
                assert allowed[pin.name].contains(clause.version), pin
