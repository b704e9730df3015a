"""What attngen finds on this machine, and what to do about each problem."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from attngen import gpu as gpus
from attngen import lowering, paths
from attngen.errors import SpecError

TORCH_OLDEST = (2, 11)
TRITON_OLDEST, TRITON_BEYOND = (3, 6), (3, 10)
# The interpreter of this Triton breaks with this numpy: "only 0-dimensional arrays".
NUMPY_BEYOND = (2, 4)
VARIABLES = (
    "ATTNGEN_CACHE_DIR",
    "ATTNGEN_DB",
    "ATTNGEN_INTERPRET",
    "ATTNGEN_LOWERING",
    "TRITON_INTERPRET",
)

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    found: str
    advice: str = ""
    """What to do; never empty for a problem."""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)

    def __str__(self) -> str:
        line = f"{self.state:8} {self.name:16} {self.found}"
        return f"{line}\n{'':8} {'':16} -> {self.advice}" if self.advice else line


def examine() -> list[Finding]:
    """Look at everything; never raises."""
    looks: tuple[Callable[[], list[Finding]], ...] = (
        lambda: [python_version()],
        lambda: [torch_version(_installed("torch"))],
        lambda: [triton_version(_installed("triton"))],
        lambda: [interpreter_numpy(_installed("numpy"), _installed("triton"))],
        lambda: [driver()],
        devices,
        lambda: [compiler()],
        lambda: [cache_folder(paths.cache_dir())],
        lambda: [database(paths.database_path())],
        lambda: [shipped_records()],
        environment,
        lambda: [small_call()],
    )
    found: list[Finding] = []
    for look in looks:
        try:
            found += look()
        except Exception as error:  # a broken torch or driver fails in any way, and is a finding
            found.append(failure("check", error))
    return found


def failure(name: str, error: BaseException) -> Finding:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return Finding(name, "problem", text, "reinstall the package that the message names")


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(piece) for piece in re.findall(r"\d+", version)[:2])


def python_version() -> Finding:
    return Finding("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def torch_version(version: str | None) -> Finding:
    if version is None:
        return Finding("torch", "problem", "not installed", "pip install 'torch>=2.11'")
    if _numbers(version) < TORCH_OLDEST:
        return Finding("torch", "problem", f"{version} is too old", "pip install 'torch>=2.11'")
    return Finding("torch", "ok", version)


def triton_version(version: str | None) -> Finding:
    """Supported are 3.6 to 3.9."""
    fix = "pip install 'triton>=3.6,<3.10'"
    if version is None:
        return Finding("triton", "problem", "not installed", fix)
    if _numbers(version) < TRITON_OLDEST:
        return Finding("triton", "problem", f"{version} is older than 3.6", fix)
    if _numbers(version) >= TRITON_BEYOND:
        return Finding("triton", "problem", f"{version} is newer than 3.9, untried", fix)
    return Finding("triton", "ok", f"{version} (3.6 to 3.9 are supported)")


def interpreter_numpy(numpy: str | None, triton: str | None) -> Finding:
    """Can Triton's interpreter, which serves CPU tensors, work with this numpy?"""
    fix = "pip install 'numpy<2.4'"
    if numpy is None:
        return Finding("interpreter", "problem", "numpy is not installed", fix)
    if triton is not None and _numbers(triton) == (3, 6) and _numbers(numpy) >= NUMPY_BEYOND:
        found = f"Triton {triton} cannot interpret kernels with numpy {numpy}"
        return Finding("interpreter", "problem", found, fix)
    return Finding("interpreter", "ok", f"usable, numpy {numpy}")


def driver() -> Finding:
    """The NVIDIA driver, by its command and then by its kernel module."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Finding(
                "driver", "problem", f"nvidia-smi: {error}", "restart or reinstall the driver"
            )
        if done.returncode == 0 and done.stdout.strip():
            return Finding("driver", "ok", f"NVIDIA {done.stdout.split()[0]}")
    module = Path("/proc/driver/nvidia/version")
    if module.exists():
        found = re.search(r"\d+\.\d+(\.\d+)?", module.read_text())
        return Finding("driver", "ok", f"NVIDIA {found.group(0) if found else '(version unknown)'}")
    return Finding("driver", "note", "no NVIDIA driver found")


def devices() -> list[Finding]:
    """Every CUDA device, or why there is none."""
    import torch

    if torch.cuda.is_available():
        return [_device(index) for index in range(torch.cuda.device_count())]
    if torch.version.cuda is None and driver().state == "ok":
        found = f"there is a driver, but torch {torch.__version__} is built without CUDA"
        fix = "install a CUDA build of torch (https://pytorch.org/get-started)"
        return [Finding("gpu", "problem", found, fix)]
    if torch.version.cuda is not None and driver().state == "ok":
        found = f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no device"
        fix = "check CUDA_VISIBLE_DEVICES and that the driver supports this CUDA version"
        return [Finding("gpu", "problem", found, fix)]
    found = "none: kernels run in Triton's interpreter, which checks results and is slow"
    return [Finding("gpu", "note", found, "`attngen tune SPEC --gpu NAME` predicts for a GPU")]


def _device(index: int) -> Finding:
    gpu = gpus.from_device(index)
    name = f"gpu {index}"
    if gpu.capability < 80:
        found = f"{gpu.name} is {gpu.arch}"
        return Finding(name, "problem", found, "kernels need sm_80 or later; use another GPU")
    return Finding(name, "ok", f"{gpu.name} ({gpu.device_key})")


def compiler() -> Finding:
    """Triton builds its launchers with a C compiler."""
    import torch

    found = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), "")
    if found:
        return Finding("c compiler", "ok", found)
    needed = torch.cuda.is_available()
    return Finding(
        "c compiler",
        "problem" if needed else "note",
        "none found; Triton needs one to launch kernels on a GPU",
        "install gcc or clang, or name one in CC",
    )


def cache_folder(folder: Path) -> Finding:
    """Where emitted kernels go; it need not exist yet."""
    if trouble := _unwritable(folder / "kernels"):
        fix = "make it a folder that you may write to, or set ATTNGEN_CACHE_DIR to another one"
        return Finding("cache folder", "problem", f"{folder}: {trouble}", fix)
    kernels = len(list((folder / "kernels").glob("*.py")))
    return Finding("cache folder", "ok", f"{folder} ({kernels} emitted kernels)")


def _unwritable(folder: Path) -> str:
    """Why no file can be made in a folder, or in the one where it would be made; "" if one can."""
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is no folder"
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        return f"{there} is not writable ({error.strerror})"
    return ""


def database(path: Path) -> Finding:
    """The user's tuning database: absent, usable, or what is wrong with it."""
    from attngen.store import Store

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with Store.open(path, readonly=True) as store:
            if store.trouble is not None:
                what, _, step = store.trouble.rpartition("; ")
                return Finding("database", "problem", what, step)
            winners = len(store.winners())
    if not path.exists():
        if trouble := _unwritable(path.parent):
            found = f"{path} does not exist and cannot be made: {trouble}"
            return Finding("database", "problem", found, "set ATTNGEN_DB to a file you may write")
        return Finding("database", "ok", f"{path} does not exist yet; `attngen tune` makes it")
    if not os.access(path, os.W_OK):
        found = f"{path} ({winners} winners) can be read but not written"
        return Finding("database", "note", found, "set ATTNGEN_DB to a file you may write to tune")
    return Finding("database", "ok", f"{path} ({winners} winners)")


def shipped_records() -> Finding:
    """How many shipped winners this GPU can use."""
    from attngen.records import shipped

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shipped.cache_clear()
        records = shipped()
    if said:
        fix = "restore tuning_db from the repository, or reinstall attngen"
        return Finding("shipped records", "problem", str(said[0].message), fix)
    here = gpus.current()
    if here.is_interpreter:
        return Finding("shipped records", "ok", f"{len(records)}, none is used without a GPU")
    fitting = sum(record.key.device_key == here.device_key for record in records)
    advice = "" if fitting else "`attngen tune` finds configs for this GPU"
    state: State = "ok" if fitting else "note"
    return Finding("shipped records", state, f"{fitting} for {here.name} of {len(records)}", advice)


def environment() -> list[Finding]:
    """The variables that change what attngen does, if they are set."""
    values = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    found = " ".join(f"{name}={value}" for name, value in values.items())
    odd = [n for n, v in values.items() if n.endswith("_INTERPRET") and v not in ("0", "1")]
    advice = f"{' and '.join(odd)}: only 1 switches it on" if odd else ""
    findings = [Finding("environment", "note", found, advice)] if values else []
    try:
        lowering.forced()
    except SpecError as error:
        findings.append(Finding("lowering", "problem", str(error), f"unset {lowering.SWITCH}"))
    return findings


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Within, an environment variable is not set."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


def small_call() -> Finding:
    """A forward and a backward of a tiny shape: does a kernel run at all?"""
    from attngen import interpreter
    from attngen.spec import AttentionSpec
    from attngen.verify import verify
    from attngen.workload import DIRECTIONS, Workload

    device = "cpu" if interpreter.enabled() else "cuda"
    spec = AttentionSpec(head_dim=16, dtype="float32", causal=True)
    sizes = Workload(1, 1, 1, 17, 17)
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="attngen: no CUDA device")
            with _without(lowering.SWITCH):  # float32 needs the portable one
                wrong = [x for x in verify(spec, [sizes], DIRECTIONS, device) if not x.ok]
    except Exception as error:  # whatever is broken here is what the user came to hear
        return failure("small call", error)
    if wrong:
        found = f"{wrong[0].result} is wrong ({wrong[0].detail})"
        return Finding("small call", "problem", found, f"run `attngen verify {spec.key}`")
    where = "in the interpreter" if device == "cpu" else "on the GPU"
    return Finding("small call", "ok", f"right {where}, {time.perf_counter() - begin:.1f} s")


def summary(found: list[Finding]) -> dict[str, Any]:
    """For machines."""
    return {
        "ok": all(each.state != "problem" for each in found),
        "findings": [each.as_dict() for each in found],
    }
