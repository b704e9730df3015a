"""A folder of kernels that a project can keep: files for a list of specs and GPUs, a function that
picks among them, and tests. It needs torch and triton, and no attngen.

Imports neither of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attngen.config import KernelConfig, default_config
from attngen.decode import family
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.gpu import GpuInfo, by_name
from attngen.lowering import by_pointer
from attngen.render import TEXT_VERSION, environment, render
from attngen.resolve import find
from attngen.spec import AttentionSpec
from attngen.workload import DIRECTIONS, Direction, Workload, spec_bucket

ANY = "sm_80"
"""The GPU whose default config serves those that are not named: what it holds, later ones hold."""
SIZES = (Workload(4, 16, 16, 1024, 1024), Workload(1, 16, 16, 4096, 4096))
_BUILT = (
    *("head_dim", "head_dim_v", "dtype", "causal", "window", "chunk", "softcap", "softmax_scale"),
    *("dropout_p", "layout", "precision", "deterministic", "batch_invariant"),
)
"""Spec fields that the folder's function knows."""


def unserved(spec: AttentionSpec) -> list[str]:
    """Why a folder cannot hold a spec; empty if it can."""
    plain = AttentionSpec(head_dim=spec.head_dim, head_dim_v=spec.head_dim_v)
    found = [
        f"{name} in a standalone folder is not built yet; emit its files one by one"
        for name, value in vars(spec).items()
        if name not in _BUILT and value != getattr(plain, name)
    ]
    if spec.is_fp8:
        found = [
            f"dtype={spec.dtype} in a standalone folder is not built yet; emit its files one by one"
        ]
    return found


def emit_folder(
    folder: Path,
    specs: Sequence[AttentionSpec],
    gpus: Sequence[GpuInfo],
    workloads: Sequence[Workload] = (),
) -> Iterator[tuple[Path, str]]:
    """(path, text) of each file.

    Args:
        folder: its name is the package's.
        gpus: those for which winners are looked up; any other GPU gets a config that fits all.
        workloads: sizes for which they are; a call gets the nearest. Default: 1024 and 4096 rows.

    Raises:
        SpecError: the folder's name is no Python name, or two specs are one.
        UnsupportedSpecError: a spec whose calls take more than q, k, v and numbers.
    """
    if not folder.name.isidentifier():
        raise SpecError(
            f"the folder becomes a Python package, so that its name must be an identifier, got "
            f"{folder.name!r}; write {re.sub('[^0-9A-Za-z_]', '_', folder.name) or 'attention'}"
        )
    reasons = [why for spec in specs for why in unserved(spec)]
    if reasons:
        raise UnsupportedSpecError(list(dict.fromkeys(reasons)))
    traits = [_traits(spec) for spec in specs]
    for number, each in enumerate(traits):
        if each in traits[:number]:
            raise SpecError(
                f"{specs[number].key} is there twice, but for what a call does not tell: numbers, "
                "precision, deterministic and batch_invariant; leave one out"
            )
    files: dict[str, str] = {}
    kernels = []
    for number, spec in enumerate(specs):
        for direction in DIRECTIONS:
            kernels += _kernels(number, spec, direction, gpus, workloads or SIZES, files)
    named = {
        "name": folder.name,
        "version": TEXT_VERSION,
        "gpus": [gpu.name for gpu in gpus],
        "specs": traits,
        "kernels": kernels,
    }
    for template, target in (("", "__init__.py"), ("_test", f"test_{folder.name}.py")):
        text = environment().get_template(f"standalone{template}.py.jinja").render(named)
        yield folder / target, text
    yield folder / "kernels" / "__init__.py", ""
    for name, text in files.items():
        yield folder / "kernels" / name, text


def _traits(spec: AttentionSpec) -> tuple[tuple[str, str], ...]:
    """The fields of the folder's Spec, as text."""
    named: dict[str, Any] = {
        "head_dim": spec.head_dim,
        "head_dim_v": spec.head_dim_v,
        "dtype": f'"{spec.dtype}"',
        "causal": spec.is_causal,
        "window_left": spec.has_window_left,
        "window_right": spec.has_window_right,
        "chunk": spec.has_chunk,
        "softcap": spec.has_softcap,
        "dropout": spec.has_dropout,
        "packed": spec.is_packed,
    }
    return tuple((name, str(value)) for name, value in named.items())


def _kernels(
    number: int,
    spec: AttentionSpec,
    direction: Direction,
    gpus: Sequence[GpuInfo],
    workloads: Sequence[Workload],
    files: dict[str, str],
) -> list[tuple[tuple[str, str], ...]]:
    """The entries of one direction, whose texts go to `files`."""
    from attngen.kernel import file_name

    text_spec = spec.text_of(direction)
    found: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {}

    def add(gpu: str, arch: str, workload: Workload, config: KernelConfig) -> None:
        text = render(text_spec, config)
        name = file_name(text_spec, direction, text)
        files[name] = text
        named = {
            "spec": number,
            "direction": f'"{direction}"',
            "gpu": f'"{gpu}"',
            "arch": f'"{arch}"',
            "rows": workload.seqlen_q,
            "keys": workload.seqlen_k,
            "file": f'"{name.removesuffix(".py")}"',
            "lowering": f'"{config.lowering}"',
            "tiles": f'"{config.tiles}"',
            "sums_dq": direction == "bwd" and bool(getattr(config, "sums_dq", False)),
        }
        entry = tuple((key, str(value)) for key, value in named.items())
        found.setdefault((gpu, name), entry)

    for gpu in gpus:
        for workload in workloads:
            if direction == "fwd" and family("fwd", spec.text, workload.seqlen_q) != "fwd":
                raise SpecError(
                    f"workload {workload} has few rows, which the decode family serves; a "
                    "standalone folder has none, so name one of more rows"
                )
            config, _, _ = find(spec.text, spec_bucket(direction, spec, workload), gpu)
            add(gpu.name, gpu.arch, workload, config)
    others = by_name(ANY)
    place = spec_bucket(direction, spec, workloads[0])
    portable = default_config(text_spec, place, others)
    add("any", "any", workloads[0], by_pointer(text_spec, portable, place, others))
    return list(found.values())
