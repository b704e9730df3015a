"""attngen: a code-generating autotuner for exact attention on GPUs.

Public names load lazily (PEP 562), so that `import attngen` starts neither torch nor CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AttentionSpec": "attngen.spec",
    "Workload": "attngen.workload",
    "GpuInfo": "attngen.gpu",
    "AttngenError": "attngen.errors",
    "SpecError": "attngen.errors",
    "UnsupportedSpecError": "attngen.errors",
    "DtypeError": "attngen.errors",
    "KernelCompileError": "attngen.errors",
    "NoFeasibleConfigError": "attngen.errors",
    "RankError": "attngen.errors",
    "StoreError": "attngen.errors",
    "TuningError": "attngen.errors",
    "compile": "attngen.api",
    "Attention": "attngen.api",
    "attention": "attngen.functional",
    "sdpa": "attngen.torch_sdpa",
    "patch_sdpa": "attngen.sdpa_patch",
    "reload": "attngen.api",
    "append_and_attend": "attngen.append_attend",
    "append_kv": "attngen.append",
    "make_block_map": "attngen.block_map",
    "merge": "attngen.merge",
    "dropout_keep": "attngen.dropout",
    "quantize": "attngen.fp8",
    "sync_configs": "attngen.sync",
    "tune": "attngen.tuner",
}

_PARTS = ("aot", "distributed", "integrations")
"""Modules of public names that need no import of their own."""

__all__ = [
    "Attention",
    "AttentionSpec",
    "AttngenError",
    "DtypeError",
    "GpuInfo",
    "KernelCompileError",
    "NoFeasibleConfigError",
    "RankError",
    "SpecError",
    "StoreError",
    "TuningError",
    "UnsupportedSpecError",
    "Workload",
    "append_and_attend",
    "append_kv",
    "attention",
    "compile",
    "dropout_keep",
    "make_block_map",
    "merge",
    "patch_sdpa",
    "quantize",
    "reload",
    "sdpa",
    "sync_configs",
    "tune",
]

if TYPE_CHECKING:
    from attngen import aot as aot
    from attngen import distributed as distributed
    from attngen import integrations as integrations
    from attngen.api import Attention, compile, reload
    from attngen.append import append_kv
    from attngen.append_attend import append_and_attend
    from attngen.block_map import make_block_map
    from attngen.dropout import dropout_keep
    from attngen.errors import (
        AttngenError,
        DtypeError,
        KernelCompileError,
        NoFeasibleConfigError,
        RankError,
        SpecError,
        StoreError,
        TuningError,
        UnsupportedSpecError,
    )
    from attngen.fp8 import quantize
    from attngen.functional import attention
    from attngen.gpu import GpuInfo
    from attngen.merge import merge
    from attngen.sdpa_patch import patch_sdpa
    from attngen.spec import AttentionSpec
    from attngen.sync import sync_configs
    from attngen.torch_sdpa import sdpa
    from attngen.tuner import tune
    from attngen.workload import Workload


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f"attngen.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'attngen' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PARTS})
