"""Emitted files: names, atomic writes, unwritable folders, errors with file and line, running."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, python

from attngen import kernel
from attngen.config import BwdConfig, KernelConfig
from attngen.errors import KernelCompileError
from attngen.hopper import HopperFwdConfig
from attngen.render import render
from attngen.spec import AttentionSpec

SPEC = AttentionSpec(head_dim=16, dtype="float32", causal=True)


def test_a_table_of_work_is_made_in_no_graphs_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool belongs to the thread that fills it, as CUDA-graph trees do in their warm-up."""
    seen: list[int] = []

    def plan(*tensors: Any, **numbers: Any) -> list[Any]:
        seen.append(threading.get_ident())
        return [(tensors, numbers)]

    one = object.__new__(kernel.Kernel)
    one.config = HopperFwdConfig()
    one.module = cast(Any, SimpleNamespace(plan=plan))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(device))
    assert one.plan(1, two=2) == [((1,), {"two": 2})]
    device, thread = seen
    assert device == 3 and thread != threading.get_ident()
    one.config = SMALL_FWD
    one.plan()
    assert seen[2:] == [threading.get_ident()]


def test_file_name_is_readable_and_ends_in_a_hash_of_the_text(tmp_path: Path) -> None:
    spec = AttentionSpec(
        head_dim=96, head_dim_v=64, causal=True, window=(9, 0), softcap=3.0, dropout_p=0.1
    )
    name = kernel.emit(spec, SMALL_FWD, tmp_path).name
    assert name.startswith("fwd__bfloat16_d96v64_causal_window_softcap_dropout__")
    assert len(name.removesuffix(".py").rpartition("__")[2]) == 8
    other = kernel.emit(spec, SMALL_BWD, tmp_path).name
    assert other.startswith("bwd__") and other[-11:] != name[-11:]


def test_emit_writes_once_and_replaces_what_differs(tmp_path: Path) -> None:
    path = kernel.emit(SPEC, SMALL_FWD, tmp_path)
    written = path.stat().st_mtime_ns
    assert kernel.emit(SPEC, SMALL_FWD, tmp_path).stat().st_mtime_ns == written
    path.write_text("torn")
    assert kernel.emit(SPEC, SMALL_FWD, tmp_path).read_text() == render(SPEC, SMALL_FWD)
    assert list(tmp_path.iterdir()) == [path]


def test_emit_is_atomic_under_many_writers(tmp_path: Path) -> None:
    """A reader sees the whole file or none, and no temporary file is left."""
    text, seen, stop = render(SPEC, SMALL_FWD), [], threading.Event()
    path = kernel.emit(SPEC, SMALL_FWD, tmp_path)

    def read() -> None:
        while not stop.is_set():
            seen.append(path.read_text())

    def write() -> None:
        for _ in range(50):
            kernel._write(path, text)
            kernel._write(path, text + "# edited\n")

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write) for _ in range(3)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert set(seen) <= {text, text + "# edited\n"}
    assert list(tmp_path.iterdir()) == [path]


def test_emit_that_fails_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*names: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no space left"):
        kernel.emit(SPEC, SMALL_FWD, tmp_path)
    assert not list(tmp_path.iterdir())


def test_unwritable_cache_falls_back_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain file in the way stands for a read-only folder, which root could write to."""
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    monkeypatch.setenv("ATTNGEN_CACHE_DIR", str(blocked))
    monkeypatch.setattr(kernel.tempfile, "gettempdir", lambda: str(tmp_path))
    kernel._temporary_folder.cache_clear()
    with pytest.warns(UserWarning, match="cannot write kernels to .*Set ATTNGEN_CACHE_DIR"):
        path = kernel.emit(SPEC, SMALL_FWD)
    assert path.parent.parent == tmp_path and path.read_text() == render(SPEC, SMALL_FWD)
    assert kernel.emit(SPEC, SMALL_FWD) == path  # and no second warning: it would be an error
    kernel._temporary_folder.cache_clear()


def test_a_folder_asked_for_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("")
    with pytest.raises(OSError):
        kernel.emit(SPEC, SMALL_FWD, tmp_path / "blocked")


def test_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import torch\n\ndef launch(:\n")
    with pytest.raises(KernelCompileError, match=rf"{path}:3: "):
        kernel.load(path, interpret=True)


COMPILE_BROKEN = """
import sys, triton
from pathlib import Path
from attngen import kernel
from attngen.config import parse
from attngen.spec import AttentionSpec
from attngen.tuner import case
from attngen.tuner.compile_worker import TargetDriver
from attngen.workload import Workload

triton.runtime.driver.set_active(TargetDriver(90))
write = kernel.render
kernel.render = lambda *x: write(*x).replace("seen = l_i != 0.0", "seen = l_i != no_such_name")
spec = AttentionSpec(head_dim=64, causal=True)
config = parse("fwd", "block_m=64,block_n=64,num_warps=4,num_stages=1")
run = kernel.Kernel(spec, config, interpret=False)
print(run.path, next(
    n for n, line in enumerate(run.path.read_text().splitlines(), 1) if "no_such_name" in line
))
inputs = case.make(spec, Workload(1, 2, 2, 64, 64), "meta", backward=False)
for jit, grid, arguments, constants in run.module.plan(*inputs.tensors(config), **inputs.numbers):
    try:
        jit.warmup(*arguments, grid=grid, **constants)
    except Exception as error:
        why = kernel.explained(error, run.path, spec.text)
        print(type(why).__name__, why)
"""


def test_compile_error_names_file_line_and_spec() -> None:
    done = python(COMPILE_BROKEN)
    assert done.returncode == 0, done.stderr[-2000:]
    where, message = done.stdout.splitlines()[:2]
    path, line = where.split()
    assert message.startswith(f"KernelCompileError {path}:{line}: "), message
    assert "no_such_name" in done.stdout
    assert "(spec head_dim=64,dtype=bfloat16,causal=true)" in done.stdout


STANDALONE: dict[str, tuple[AttentionSpec, KernelConfig]] = {
    "fwd-float32": (SPEC, SMALL_FWD),
    "fwd-bfloat16-d24": (AttentionSpec(head_dim=24, window=(5, 3), softcap=9.0), SMALL_FWD),
    "bwd-bfloat16": (AttentionSpec(head_dim=16, causal=True), SMALL_BWD),
    "bwd-float16-dropout": (
        AttentionSpec(head_dim=16, head_dim_v=32, dtype="float16", dropout_p=0.1),
        SMALL_BWD,
    ),
    "fwd-packed": (AttentionSpec(head_dim=16, causal=True, sinks=True, layout="thd"), SMALL_FWD),
    "bwd-packed": (
        AttentionSpec(head_dim=16, dtype="float32", alibi=True, sinks=True, layout="thd"),
        SMALL_BWD,
    ),
    "bwd-float32-atomic": (
        SPEC,
        BwdConfig(dq="atomic", block_m=16, block_n=16, num_warps=1, num_stages=1),
    ),
}


@pytest.mark.rotating
@pytest.mark.parametrize(("spec", "config"), STANDALONE.values(), ids=STANDALONE)
def test_emitted_file_runs_alone_and_agrees_with_torch(
    spec: AttentionSpec, config: KernelConfig, tmp_path: Path
) -> None:
    """In a folder without attngen on its path, as someone would who was sent the file."""
    path = kernel.emit(spec, config, tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", path],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "relative error" in done.stdout
    assert ("float32 data, not bfloat16" in done.stdout) == (spec.dtype == "bfloat16")
    assert "attngen" not in done.stderr


@pytest.mark.parametrize("config", [SMALL_FWD, SMALL_BWD], ids=["fwd", "bwd"])
def test_emitted_file_without_gpu_or_interpreter_says_how(
    config: KernelConfig, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, kernel.emit(SPEC, config, tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "", "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "no GPU here: run it again with TRITON_INTERPRET=1, in the interpreter\n"
    )
