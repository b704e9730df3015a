"""The documents say what the code does: commands, variables, parts, links and excerpts."""

from __future__ import annotations

import ast
import itertools
import math
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from pkgutil import resolve_name

import pytest
from click.testing import CliRunner

from attngen.cli import COMMANDS, main
from attngen.config import CONFIG_CLASSES, parse
from attngen.doctor import VARIABLES
from attngen.spec import FIELDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [
    path
    for folder in (".", "docs", "templates", "tuning_db")
    for path in sorted((ROOT / folder).glob("*.md"))
]
ALL_DOCUMENTS = "\n".join(path.read_text() for path in DOCUMENTS)
DESIGN = (ROOT / "docs" / "design.md").read_text()
NAMES = {command.name for command in COMMANDS}


def section(title: str, text: str = README) -> str:
    """A section of a document, by its heading."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def code(text: str, language: str = "") -> list[str]:
    """The fenced blocks of a text."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [block for named, block in blocks if named == language]


@pytest.mark.parametrize("name", sorted(NAMES))
def test_command_is_documented(name: str):
    assert f"`attngen {name}" in section("Tune")


def test_documents_name_only_commands_that_exist():
    quoted = re.findall(r"`attngen ([a-z]+)", ALL_DOCUMENTS)
    typed = re.findall(r"^attngen ([a-z]+)", "\n".join(code(ALL_DOCUMENTS)), re.MULTILINE)
    assert {*quoted, *typed} <= NAMES


def test_options_in_documents_exist():
    options = {o for c in COMMANDS for p in c.params for o in getattr(p, "opts", ())}
    lines = re.findall(r"^attngen .*|`attngen [^`]*`", ALL_DOCUMENTS, re.MULTILINE)
    used = {option for line in lines for option in re.findall(r"--[a-z][a-z-]*", line)}
    assert used - {"--help"} <= options


def test_names_in_documents_exist():
    for name in set(re.findall(r"(?<![\w./])attngen(?:\.[A-Za-z_]\w*)+", ALL_DOCUMENTS)):
        resolve_name(name)


def test_environment_variables_are_documented():
    source = "\n".join(path.read_text() for path in (ROOT / "attngen").rglob("*.py"))
    known = {*VARIABLES, *re.findall(r"\bATTNGEN_[A-Z_]+", source)}
    documented = set(re.findall(r"^\| `(\w+)`", section("Environment variables"), re.MULTILINE))
    assert documented == known


def test_every_spec_field_is_in_the_support_table():
    table = section("What works").split("\n\n")[0]
    named = set(
        re.findall(r"`(\w+)`", "\n".join(row.split("|")[1] for row in table.strip().splitlines()))
    )
    assert named == set(FIELDS)


def test_every_config_field_is_in_its_table():
    table = section("Tune").partition("| config field |")[2]
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`[^|]*)", table, re.MULTILINE))))
    classes = [cls for each in CONFIG_CLASSES.values() for cls in each.values()]
    assert named == {field.name for cls in classes for field in fields(cls)}


@pytest.mark.parametrize("line", [line for line in README.splitlines() if "--config " in line])
def test_configs_in_the_readme_are_accepted(line: str):
    for text in re.findall(r"--config (\w+=[^` ]+)", line):
        assert parse("fwd", text).key


# Numbers of the README's example, as few as its features need: the interpreter computes it.
SMALLER = {"8": "4", "9.0": "5.0", "100": "40", "200": "80", "199": "79", "99": "39"}


def test_readme_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    example = "\n".join(code(section("Use"), "python"))
    numbers = r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])"
    example = re.sub(numbers, lambda found: SMALLER.get(found[0], found[0]), example)
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "bwd: lowering=triton" in done.stdout


def test_readme_kernel_is_what_is_emitted():
    (excerpt,) = code(section("A kernel"), "python")
    (command,) = re.findall(r"printed by `attngen (emit .*?)`", section("A kernel"))
    text = CliRunner().invoke(main, command.split()).stdout
    now = text[text.index("        s = score(") : text.index("        m_i = m_new\n")]
    assert excerpt in text, f"README shows an older kernel; the loop reads now:\n{now}"


def test_contributing_names_five_commands():
    assert len(re.findall(r"^make [a-z-]+", code(section("Contributing"))[0], re.MULTILINE)) == 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path):
    prose = re.sub(r"```.*?```|`[^`]*`", "", document.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", prose):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_templates_named_in_documents_exist():
    named = set(re.findall(r"`(?:templates/)?([\w./]+\.jinja)\b", ALL_DOCUMENTS))
    assert named
    for name in named:
        places = (ROOT / "templates" / name, ROOT / "templates" / "parts" / name)
        assert any(path.is_file() for path in places) or "<" in name, name


def test_functions_named_in_algorithms_are_in_their_templates():
    text = (ROOT / "docs" / "algorithms.md").read_text()
    places = set(re.findall(r"`([\w./]+\.jinja): (\w+)\(\)`", text))
    assert len(places) > 15
    for name, function in places:
        assert f"def {function}(" in (ROOT / "templates" / name).read_text(), (name, function)


def test_worked_example_of_the_online_softmax():
    text = section("Online softmax", (ROOT / "docs" / "algorithms.md").read_text())
    for scores in ((10, 20, 30, 5), (10, 10, 5, 5)):
        weights = [math.exp(score) for score in scores]
        out = sum(w * value for w, value in zip(weights, (1, 2, 3, 4), strict=True)) / sum(weights)
        assert f"out {out:.7f} and lse {math.log(sum(weights)):.7f}" in text


def test_modules_named_in_the_design_exist():
    for name in re.findall(r"`(\w+\.py)`", DESIGN):
        places = (ROOT / "attngen" / name, ROOT / "attngen" / "tuner" / name)
        assert any(path.is_file() for path in places), name
    for row in re.findall(r"^\| (`[^|]*) \|", section("Modules", DESIGN), re.MULTILINE):
        for name in re.findall(r"`([\w/]+)`", row):
            assert (ROOT / "attngen" / name).is_dir() or (ROOT / "attngen" / f"{name}.py").is_file()


def test_every_module_has_a_row_in_the_design():
    rows = re.findall(r"^\| (`[^|]*) \|", section("Modules", DESIGN), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w/]+)`", row)}
    assert {path.stem for path in (ROOT / "attngen").glob("[a-z]*.py")} <= named


def imported(path: Path) -> set[str]:
    """Modules of attngen that a module imports when it is imported."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module == "attngen":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attngen."):
            found.add(str(node.module).split(".")[1])
    return found


def test_arrows_of_the_design_are_imports_and_never_turn_back():
    direct = {path.stem: imported(path) for path in (ROOT / "attngen").glob("*.py")}
    direct |= {
        name: set().union(*map(imported, (ROOT / "attngen" / name).glob("*.py"))) - {name}
        for name in ("distributed", "tuner")
    }
    reached = {name: set(names) for name, names in direct.items()}
    for _ in reached:
        for names in reached.values():
            names |= set().union(*(reached.get(name, set()) for name in names))
    assert not [name for name, names in reached.items() if name in names]
    arrows = code(section("Modules", DESIGN))[0].split("everything")[0]
    for chain in re.split(r";|\n", arrows):
        places = [re.findall(r"\w+", place) for place in chain.split("<-")]
        for below, above in itertools.pairwise(places):
            for one, other in itertools.product(below, above):
                assert one in reached[other], f"{other} does not import {one}"


def test_documents_name_no_machine_path():
    assert not re.search(r"/(root|home|work|tmp)/", ALL_DOCUMENTS)
