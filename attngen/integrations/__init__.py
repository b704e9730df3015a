"""attngen under the names of other libraries: each module imports its own, and only when used.

transformers     register(): attn_implementation="attngen"
diffusers        register(): model.set_attention_backend("attngen")
flash_attn       flash_attn_func and its relatives, by attngen's kernels
flex_attention   flex_attention(), with torch's BlockMask; the module can be called itself
torch_backend    the flash path of torch's own attention
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = ("diffusers", "flash_attn", "flex_attention", "torch_backend", "transformers")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"attngen.integrations.{name}")
    raise AttributeError(f"module 'attngen.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
