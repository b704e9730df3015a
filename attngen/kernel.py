"""Emitted files on disk, imported and launched; compile errors get a file and a line."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attngen.config import KernelConfig
from attngen.errors import KernelCompileError
from attngen.launcher import Bound, bind, interprets, launch, may_bind
from attngen.paths import kernel_dir
from attngen.render import direction_of, render
from attngen.spec import AttentionSpec
from attngen.workload import Direction


def file_name(spec: AttentionSpec, direction: Direction, text: str) -> str:
    """A readable name that ends in a hash of the text: `fwd__bfloat16_d128_causal__3f2a91c0.py`."""
    text_spec = spec.served_as(direction).text
    dims = f"d{spec.head_dim}"
    if spec.head_dim_v != spec.head_dim:
        dims += f"v{spec.head_dim_v}"
    traits = [
        name
        for name, on in (
            (f"{text_spec.fp8_scale}_scale", text_spec.is_fp8),
            ("causal", text_spec.is_causal),
            ("window", spec.has_window_left or spec.has_window_right),
            ("chunked", spec.has_chunk),
            ("prefix", spec.prefix_lm),
            ("documents", spec.documents),
            ("tree", spec.tree_mask),
            ("packed", spec.layout == "thd"),
            ("paged", spec.paged),
            ("lengths", spec.key_lengths),
            ("shared", spec.shared_kv),
            (f"kv_{spec.kv_dtype}_by_{spec.kv_scale}", spec.is_quantized),
            ("softcap", spec.has_softcap),
            ("mask", spec.attn_mask),
            ("bias", spec.bias),
            ("alibi", spec.alibi),
            ("sinks", spec.sinks),
            ("score_mod", spec.score_mod is not None),
            ("mask_mod", spec.mask_mod is not None),
            ("block_map", spec.block_map),
            ("dropout", spec.has_dropout),
            ("_".join(text_spec.aux), text_spec.aux),
        )
        if on
    ]
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{direction}__{'_'.join([text_spec.dtype, dims, *traits])}__{digest}.py"


def emit(spec: AttentionSpec, config: KernelConfig, folder: Path | None = None) -> Path:
    """Write the kernel file of a spec and a config, if it is not there yet.

    The write is atomic: another process sees the whole file or none. A folder that cannot be
    written is replaced by a temporary one, with a warning.
    """
    text = render(spec, config)
    name = file_name(spec, direction_of(config), text)
    target = (folder or kernel_dir()) / name
    try:
        return _write(target, text)
    except OSError as error:
        if folder is not None:
            raise
        return _write(_temporary_folder(error.strerror or str(error)) / name, text)


def write(name: str, text: str) -> Path:
    """Write a kernel file of this name, as `emit` does."""
    try:
        return _write(kernel_dir() / name, text)
    except OSError as error:
        return _write(_temporary_folder(error.strerror or str(error)) / name, text)


def run(plan: list[Any], device_index: int | None) -> None:
    """Run a plan on a CUDA device, or in the interpreter for None."""
    if device_index is None:
        _run_interpreted(plan)
        return
    with torch.cuda.device(device_index):
        launch(plan)


@functools.cache
def _temporary_folder(reason: str) -> Path:
    import warnings

    folder = Path(tempfile.gettempdir()) / f"attngen-{os.getuid()}"
    warnings.warn(
        f"attngen: cannot write kernels to {kernel_dir()} ({reason}); using {folder}. "
        "Set ATTNGEN_CACHE_DIR to a writable folder",
        stacklevel=2,
    )
    return folder


def _write(target: Path, text: str) -> Path:
    if target.exists() and target.read_text() == text:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=target.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(part, target)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return target


_LOADED: dict[tuple[Path, bool], ModuleType] = {}
_LOADING = threading.Lock()


def load(path: Path, *, interpret: bool) -> ModuleType:
    """Import an emitted file; once a process, for the compiler or for the interpreter."""
    with _LOADING:
        module = _LOADED.get((path, interpret))
        if module is None:
            module = _import(path, interpret)
            _LOADED[path, interpret] = module
        return module


def _import(path: Path, interpret: bool) -> ModuleType:
    name = f"attngen_emitted.{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise KernelCompileError(f"{path} cannot be imported; delete it and try again")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        if interpret:
            from attngen.interpreter import interpreting

            with interpreting():
                found.loader.exec_module(module)
        else:
            found.loader.exec_module(module)
    except SyntaxError as error:
        raise KernelCompileError(f"{path}:{error.lineno}: {error.msg}") from error
    return module


Tensors = tuple[Tensor | None, ...]
_INTERPRETING = threading.RLock()
"""Triton's interpreter keeps its grid in globals: one thread at a time."""


class Kernel:
    """One emitted file, imported: call it with what its `launch` takes."""

    def __init__(self, spec: AttentionSpec, config: KernelConfig, *, interpret: bool) -> None:
        self.spec = spec.text
        self.config = config
        self.interpret = interpret or interprets()
        self.path = emit(spec, config)
        self.module = load(self.path, interpret=interpret)

    def __call__(self, *tensors: Any, **numbers: Any) -> None:
        """Run every launch of the file's plan on the current stream.

        Raises:
            KernelCompileError: names the file, the line and the spec.
        """
        try:
            plan = self.plan(*tensors, **numbers)
            if self.interpret:
                _run_interpreted(plan)
            else:
                launch(plan)
        except Exception as error:
            raise explained(error, self.path, self.spec) from error

    def plan(self, *tensors: Any, **numbers: Any) -> list[Any]:
        """The launches of a call, as the emitted file plans them.

        The hopper lowering's plan() makes a table of work, which outlives the call. A graph's
        memory pool belongs to the thread that fills it (CUDA-graph trees warm up in one), so that
        such a plan is made in another.
        """
        if self.config.lowering != "hopper" or not torch.cuda.is_available():
            return list(self.module.plan(*tensors, **numbers))
        device = torch.cuda.current_device()

        def planned() -> list[Any]:
            torch.cuda.set_device(device)
            return list(self.module.plan(*tensors, **numbers))

        with ThreadPoolExecutor(max_workers=1) as thread:
            return thread.submit(planned).result()

    def prepared(self, numbers: dict[str, Any], keywords: tuple[str, ...] = ()) -> Prepared:
        """What runs the plan with these numbers, for tensors that all lie the same way.

        Args:
            numbers: keyword arguments of plan() that are no tensors.
            keywords: names of the tensors that plan() takes by keyword; they come last.
        """
        return Prepared(self, numbers, keywords)


class Prepared:
    """A kernel with its numbers: from the second call on, without planning."""

    def __init__(self, kernel: Kernel, numbers: dict[str, Any], keywords: tuple[str, ...]) -> None:
        self._kernel = kernel
        self._numbers = numbers
        self._keywords = keywords
        self._bound: Bound | None = None

    def __call__(self, tensors: Tensors) -> None:
        """Run on the current stream. Shapes, strides and dtypes are those of the first call, and
        pointers multiples of 16 bytes."""
        if not may_bind() or self._kernel.interpret:
            positional, named = self._split(tensors)
            self._kernel(*positional, **named, **self._numbers)
            return
        try:
            if self._bound is None:
                apart = tuple(None if x is None else x.detach() for x in tensors)  # q may be k
                positional, named = self._split(apart)
                plan = self._kernel.plan(*positional, **named, **self._numbers)
                self._bound = bind(plan, apart)
            else:
                self._bound(tensors)
        except Exception as error:
            raise explained(error, self._kernel.path, self._kernel.spec) from error

    def repeat(self, tensors: Sequence[Tensor | None]) -> bool:
        """The same for tensors of which the addresses alone are those; False if it needs more."""
        if self._bound is None or not may_bind() or self._kernel.interpret:
            return False
        try:
            self._bound(tensors)
        except Exception as error:
            raise explained(error, self._kernel.path, self._kernel.spec) from error
        return True

    def _split(self, tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
        """Those that plan() takes by position, and those by keyword."""
        count = len(tensors) - len(self._keywords)
        return tensors[:count], dict(zip(self._keywords, tensors[count:], strict=True))


def _run_interpreted(plan: list[Any]) -> None:
    import numpy as np

    with _INTERPRETING, np.errstate(all="ignore"):  # inf - inf of a masked score is meant
        launch(plan)


def explained(error: Exception, path: Path, spec: AttentionSpec) -> Exception:
    """A Triton error with the emitted file and line in front; any other error unchanged."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    if isinstance(error, CompilationError):
        line = getattr(error.node, "lineno", 0) + _first_line(path, error.src) - 1
        return KernelCompileError(
            f"{path}:{line}: {error.error_message or error} (spec {spec.text_key})"
        )
    if isinstance(error, (OutOfResources, PTXASError)):
        return KernelCompileError(
            f"{path}: {error} (spec {spec.text_key}); choose smaller tiles: "
            "`attngen tune` finds ones that fit"
        )
    return error


def _first_line(path: Path, source: str | None) -> int:
    """Line of the file at which the function that `source` is the text of begins."""
    if not source:
        return 1
    head = source.strip().splitlines()[0]
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.strip() == head:
            return number
    return 1


@functools.lru_cache(maxsize=512)
def kernel(spec: AttentionSpec, config: KernelConfig, interpret: bool) -> Kernel:
    """The kernel of a spec and a config, once a process."""
    return Kernel(spec, config, interpret=interpret)
