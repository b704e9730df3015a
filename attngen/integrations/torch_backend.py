"""torch's flash attention by attngen kernels: SDPA's flash path, varlen_attn and their users.

`activate()` puts attngen behind the operators that torch's flash backend consists of, through
`torch.nn.attention.register_flash_attention_impl`. All that ends in these operators follows,
eager and compiled: `F.scaled_dot_product_attention` where it picks the flash backend, however it
was imported, `nn.MultiheadAttention`, jagged nested tensors, `torch.nn.attention.varlen`, and
torch's own context parallelism. Results have the dtypes, shapes and strides of torch's own.

On a machine without a GPU the operators of CPU tensors are replaced, too, and run in Triton's
interpreter.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn import attention as torch_attention

from attngen import interpreter
from attngen.integrations.torch_flash_operators import (
    flash_backward,
    flash_forward,
    flash_forward_out,
)
from attngen.integrations.torch_sdpa_operators import (
    cpu_backward,
    cpu_forward,
    sdpa_backward,
    sdpa_forward,
)

NAME = "ATTNGEN"
"""What torch.nn.attention knows it by."""
_OPERATORS: dict[str, Any] = {
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
    "_flash_attention_forward": flash_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_forward_out,
    "_flash_attention_backward": flash_backward,
}
_OF_CPU: dict[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": cpu_forward,
    "_scaled_dot_product_flash_attention_for_cpu_backward": cpu_backward,
}


def register() -> str:
    """Make it known to `torch.nn.attention.activate_flash_attention_impl`, by the name returned.
    Activates nothing."""
    torch_attention.register_flash_attention_impl(NAME, register_fn=_Handle)
    return NAME


def activate() -> None:
    """Put attngen behind torch's flash attention, in place of what is there."""
    torch_attention.activate_flash_attention_impl(register())


def restore() -> None:
    """Torch's own flash attention again."""
    if torch_attention.current_flash_attention_impl() == NAME:
        torch_attention.restore_flash_attention_impl()


class _Handle:
    """Replaced operators, until `remove`."""

    def __init__(self) -> None:
        self._library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        keys = ["CUDA"] if torch.cuda.is_available() else []
        keys += ["CPU"] if interpreter.enabled() else []
        with warnings.catch_warnings():  # torch 2.11 says that operators are replaced: as asked
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for key in keys:
                table = _OPERATORS | (_OF_CPU if key == "CPU" else {})
                for name, function in table.items():
                    self._library.impl(name, function, key)

    def remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
