"""Quantised caches: k and v in 8 bits, with scales, beside a q of 16.

A call has k and v of the spec's `kv_dtype`, dense, with lengths or paged, and `k_descale` and
`v_descale`, float32: about x is x_stored * descale, as `attngen.quantize` has it for FP8 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngen.checks import check_kinds
from attngen.errors import SpecError
from attngen.fp8 import check_descale
from attngen.spec import KV_DESCALES, AttentionSpec
from attngen.spec_rules import FP8_DTYPES, KV_DTYPES

_KINDS = {0: "tensor", 2: "head", 3: "key"}


def dtype_of(name: str, k: Any, v: Any) -> str | None:
    """The kv_dtype of a functional call that computes in the dtype of this name; None if k and v
    are not stored in 8 bits."""
    if name in FP8_DTYPES or not isinstance(k, Tensor) or not isinstance(v, Tensor):
        return None
    found = str(k.dtype).removeprefix("torch.")
    return found if found in KV_DTYPES and v.dtype == k.dtype else None


def scale_of(kv_dtype: str, q_descale: Any, k_descale: Any, v_descale: Any) -> str:
    """The kv_scale that the descales of a call make."""
    if q_descale is not None:
        raise SpecError(
            f"q_descale belongs to FP8 inputs, but k and v alone are {kv_dtype}; leave it out"
        )
    given = dict(zip(KV_DESCALES, (k_descale, v_descale), strict=True))
    missing = [name for name, x in given.items() if x is None]
    if missing:
        raise SpecError(
            f"k and v of {kv_dtype} need k_descale and v_descale, float32, got no "
            f"{' and no '.join(missing)}; pass what each was divided by"
        )
    check_kinds(given)
    dims = (k_descale.dim(), v_descale.dim())
    if dims[0] not in _KINDS or dims[0] != dims[1]:
        raise SpecError(
            "k_descale and v_descale must be both of shape (), (batch, num_heads_kv) or (batch, "
            "num_heads_kv, seqlen_k), or with block_table (), (pages, num_heads_kv) or (pages, "
            f"page_size, num_heads_kv), got shapes {tuple(k_descale.shape)} and "
            f"{tuple(v_descale.shape)}; pass what each was divided by"
        )
    return _KINDS[dims[0]]


def check_scale(spec: AttentionSpec, *descales: Any) -> None:
    """Descales as the spec has them."""
    assert spec.kv_dtype is not None
    scale = scale_of(spec.kv_dtype, *descales)
    if scale != spec.kv_scale:
        raise SpecError(
            f"k_descale and v_descale are those of kv_scale={scale!r}, but the spec says "
            f"{spec.kv_scale!r}; compile a spec with kv_scale={scale!r}, or pass other descales"
        )


def descale_shape(spec: AttentionSpec, k: Tensor) -> tuple[int, ...]:
    """The shape of each descale; k has heads first."""
    first, heads, keys, _ = k.shape
    by_key = (first, keys, heads) if spec.paged else (first, heads, keys)
    return {"tensor": (), "head": (first, heads), "key": by_key}[str(spec.kv_scale)]


def check_descales(
    spec: AttentionSpec, q: Tensor, k: Tensor, extra: Sequence[Tensor | None]
) -> None:
    """Shapes, dtypes and devices of the op's descales."""
    named = dict(zip(spec.tensor_args, extra, strict=True))
    shape = descale_shape(spec, k)
    said, step = f"kv_scale={spec.kv_scale!r}", "; pass what each was divided by"
    for name in KV_DESCALES:
        check_descale(name, named[name], shape, said, q, step)


def quantized(spec: AttentionSpec, x: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """x (batch, heads, keys, dim) in 8 bits, and the scale of each key, (batch, heads, keys): equal
    ones where the spec has them shared, of pages of so many keys."""
    assert spec.kv_dtype is not None
    wide = x.float()
    peak = wide.abs().amax(3)
    if spec.kv_scale == "tensor":
        peak = peak.amax().expand_as(peak)
    elif spec.kv_scale == "head" and spec.paged:
        keys = peak.shape[2]
        pages = torch.nn.functional.pad(peak, (0, -keys % page)).unflatten(2, (-1, page)).amax(3)
        peak = pages.repeat_interleave(page, 2)[:, :, :keys]
    elif spec.kv_scale == "head":
        peak = peak.amax(2, keepdim=True).expand_as(peak)
    most = 127.0 if spec.kv_dtype == "int8" else 448.0
    scale = torch.where(peak > 0, peak / most, 1.0)
    stored = wide / scale[..., None]
    stored = stored.round() if spec.kv_dtype == "int8" else stored
    return stored.clamp(-most, most).to(getattr(torch, spec.kv_dtype)), scale


def descale_of(spec: AttentionSpec, scale: Tensor, page: int) -> Tensor:
    """The scale of each key, as `quantized` gives it, as calls take it; the pages of a batch row
    lie one behind another."""
    if spec.kv_scale == "tensor":
        return scale.amax()
    if not spec.paged:
        return scale[:, :, 0].contiguous() if spec.kv_scale == "head" else scale.contiguous()
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[2] % page))
    pages: Tensor = padded.unflatten(2, (-1, page)).permute(0, 2, 3, 1).flatten(0, 1)
    return pages[:, 0].contiguous() if spec.kv_scale == "head" else pages.contiguous()


def dequantized(spec: AttentionSpec, x: Tensor, descale: Tensor) -> Tensor:
    """k or v (batch or pages, heads, keys, dim) times its descale, in float32."""
    wide = x.float()
    if spec.kv_scale == "tensor":
        return wide * descale
    if spec.kv_scale == "head":
        return wide * descale[:, :, None, None]
    by_head = descale.transpose(1, 2) if spec.paged else descale
    return wide * by_head[..., None]
