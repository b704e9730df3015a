"""`attngen doctor`: each problem is found and comes with what to do."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from samples import MEASURED

from attngen import doctor
from attngen.cli import main
from attngen.store import Store

# numpy's warning about Triton's interpreter, in whatever runs a kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


def problem(finding: doctor.Finding, *words: str) -> None:
    assert finding.state == "problem"
    assert finding.advice
    for word in words:
        assert word in f"{finding.found} {finding.advice}"


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0+git"])
def test_supported_triton(version: str) -> None:
    assert doctor.triton_version(version).state == "ok"


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0", None])
def test_other_triton(version: str | None) -> None:
    problem(doctor.triton_version(version), "pip install 'triton>=3.6,<3.10'")


@pytest.mark.parametrize("version", ["2.10.0", None])
def test_old_torch(version: str | None) -> None:
    problem(doctor.torch_version(version), "pip install 'torch>=2.11'")


def test_numpy_that_breaks_the_interpreter() -> None:
    problem(doctor.interpreter_numpy("2.4.0", "3.6.0"), "numpy 2.4.0", "numpy<2.4")
    problem(doctor.interpreter_numpy(None, "3.6.0"), "numpy<2.4")
    assert doctor.interpreter_numpy("2.3.5", "3.6.0").state == "ok"
    assert doctor.interpreter_numpy("2.4.0", "3.7.0").state == "ok"


def test_driver_without_cuda_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.Finding("driver", "ok", "NVIDIA 570.1")
    monkeypatch.setattr(doctor, "driver", lambda: found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    problem(doctor.devices()[0], "without CUDA", "pytorch.org")
    monkeypatch.setattr("torch.version.cuda", "12.8")
    problem(doctor.devices()[0], "sees no device", "CUDA_VISIBLE_DEVICES")


def test_no_gpu_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.Finding("driver", "note", "no NVIDIA driver found")
    monkeypatch.setattr(doctor, "driver", lambda: found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (gpu,) = doctor.devices()
    assert (gpu.state, "interpreter" in gpu.found) == ("note", True)


def test_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: object, **named: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 10)

    monkeypatch.setattr("shutil.which", lambda name: "/bin/nvidia-smi")
    monkeypatch.setattr("subprocess.run", hang)
    problem(doctor.driver(), "timed out", "driver")


def test_cache_folder_that_cannot_be_written(tmp_path: Path) -> None:
    assert doctor.cache_folder(tmp_path / "not" / "there" / "yet").state == "ok"
    (tmp_path / "file").write_text("")
    problem(doctor.cache_folder(tmp_path / "file"), "is no folder", "ATTNGEN_CACHE_DIR")
    nobody_may = Path("/proc/attngen")  # not even root
    problem(doctor.cache_folder(nobody_may), "not writable", "ATTNGEN_CACHE_DIR")


def test_database_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.db"
    assert "does not exist yet" in doctor.database(path).found
    with Store.open(path) as store:
        store.record_winner(MEASURED)
    assert "1 winners" in doctor.database(path).found
    path.write_text("not a database " * 100)
    problem(doctor.database(path), str(path), "no SQLite database", "rename it")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        pytest.param(".", ("is a folder",), id="folder"),
        pytest.param("/dev/null", ("is a device",), id="device"),
        pytest.param("file/t.db", ("is no folder",), id="below-a-file"),
        pytest.param("a" * 300, ("File name too long",), id="name-too-long"),
        pytest.param("/proc/attngen/t.db", ("cannot be made", "not writable"), id="unwritable"),
    ],
)
def test_impossible_database(place: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problem(doctor.database(tmp_path / place), str(tmp_path / place), *words, "ATTNGEN_DB")


def test_variable_that_switches_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_INTERPRET", "yes")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (finding,) = doctor.environment()
    assert "ATTNGEN_INTERPRET=yes" in finding.found
    assert finding.advice == "ATTNGEN_INTERPRET: only 1 switches it on"


def test_damaged_shipped_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu.jsonl").write_text("not json\n")
    monkeypatch.setattr("attngen.records.tuned_dirs", lambda: [tmp_path])
    try:
        problem(doctor.shipped_records(), "gpu.jsonl:1", "reinstall")
    finally:
        from attngen.records import shipped

        shipped.cache_clear()


def test_small_call_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise OSError("libcuda.so: wrong ELF class")

    monkeypatch.setattr("attngen.verify.verify", broken)
    problem(doctor.small_call(), "wrong ELF class")


def test_a_look_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(doctor, "devices", broken)
    assert any("RuntimeError: no" in each.found for each in doctor.examine())


def test_doctor_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(main, ["doctor", "--json"])
    said = json.loads(result.stdout)
    assert result.exit_code == (0 if said["ok"] else 1)
    names = [each["name"] for each in said["findings"]]
    for name in ("torch", "triton", "interpreter", "driver", "cache folder", "database"):
        assert name in names
    fine = [doctor.Finding("x", "ok", "y")]
    monkeypatch.setattr(doctor, "examine", lambda: fine)
    assert CliRunner().invoke(main, ["doctor"]).exit_code == 0
    monkeypatch.setattr(
        doctor, "examine", lambda: [*fine, doctor.Finding("x", "problem", "y", "z")]
    )
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1
    assert "-> z" in result.stdout


def test_the_switch_of_lowerings_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_LOWERING", "Hopper")
    (found,) = [each for each in doctor.environment() if each.state == "problem"]
    assert "must be hopper or triton, got 'Hopper'" in found.found
    assert found.advice == "unset ATTNGEN_LOWERING"


def test_the_small_call_needs_no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNGEN_LOWERING", "hopper")
    assert doctor.small_call().state == "ok"
    assert os.environ["ATTNGEN_LOWERING"] == "hopper"
