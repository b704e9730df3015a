"""patch_sdpa(): `attngen.sdpa` in place of torch's own function, where attngen serves a call."""

from __future__ import annotations

import threading
import warnings
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attngen import interpreter
from attngen.checks import compute_dtype
from attngen.jagged import are_jagged
from attngen.spec_rules import DTYPES
from attngen.torch_sdpa import sdpa
from attngen.values import flag

_TORCH_SDPA = F.scaled_dot_product_attention
_LOCK = threading.Lock()
_patches: list[SdpaPatch] = []
_told: set[str] = set()


class SdpaPatch:
    """A patch in force. Leave it as a context manager, or call `restore`."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        with _LOCK:
            _patches.append(self)
            _install()

    def restore(self) -> None:
        """Undo this patch, in whatever order; a second call does nothing."""
        with _LOCK:
            if self in _patches:
                _patches.remove(self)
                _install()

    def __enter__(self) -> SdpaPatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()


def patch_sdpa(*, strict: bool = False) -> SdpaPatch:
    """Let `torch.nn.functional.scaled_dot_product_attention` be `attngen.sdpa`, for all threads:
    from this call on, or as a context manager.

    Calls that attngen does not serve go on to torch, with one warning for each reason: other
    dtypes (float64), other devices (CPU tensors beside a GPU), head dims above 256, no heads,
    nested tensors with a mask, attn_mask together with is_causal, and torch.jit.trace. So do calls
    under `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, without a warning.

    Code that imported the function by name before keeps torch's, and so do torch's own fused
    modules (`nn.MultiheadAttention` in evaluation); `attngen.integrations.torch_backend` reaches
    these.

    Args:
        strict: raise attngen's error where a call is not served, instead of going on to torch.
    """
    return SdpaPatch(flag("strict", strict))


def _install() -> None:
    function: Any = _TORCH_SDPA
    if _patches:
        function = _strict if _patches[-1].strict else _patched
    F.scaled_dot_product_attention = function


def _strict(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function in a strict patch."""
    if _wants_math():
        return _TORCH_SDPA(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _patched(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function in a patch."""
    why = _unserved(query, key, value, attn_mask, is_causal)
    if why is None:
        return sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if why and not torch.compiler.is_compiling() and why not in _told:
        _told.add(why)
        warnings.warn(
            f"attngen serves no scaled_dot_product_attention of {why}; torch's runs. "
            "patch_sdpa(strict=True) raises instead",
            stacklevel=2,
        )
    return _TORCH_SDPA(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _wants_math() -> bool:
    """Has the caller switched all fused kernels off?"""
    backends = torch.backends.cuda
    return not (
        backends.flash_sdp_enabled()
        or backends.mem_efficient_sdp_enabled()
        or backends.cudnn_sdp_enabled()
    )


def _interprets() -> bool:
    return interpreter.enabled()


# To torch.compile, which cannot trace them, both are what they were when it traced.
torch.compiler.assume_constant_result(_wants_math)
torch.compiler.assume_constant_result(_interprets)


def _unserved(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: Any) -> str | None:
    """Why a call is torch's; "" where it asked for that."""
    if not all(isinstance(x, Tensor) for x in (query, key, value)) or _wants_math():
        return ""
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    device = query.device.type
    if device not in ("cuda", "cpu") or (device == "cpu" and not _interprets()):
        return f"{device} tensors"
    dtype = compute_dtype(query)
    if dtype not in DTYPES:
        return dtype
    if not all(1 <= x.shape[-1] <= 256 for x in (query, value)):
        return f"head dims {query.shape[-1]} and {value.shape[-1]}"
    if any(x.dim() > 2 and x.shape[-3] == 0 for x in (query, key, value)):
        return "no heads"
    if query.is_nested and (attn_mask is not None or not are_jagged(query, key, value)):
        return "nested tensors with a mask, or not jagged"
    if attn_mask is not None and is_causal:
        return "attn_mask together with is_causal"
    if isinstance(attn_mask, Tensor) and attn_mask.dtype == torch.float64:
        return "a float64 mask"
    return None
