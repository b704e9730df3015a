"""What a call must be before it reaches the op: errors that name the argument and the way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attngen.errors import DtypeError, SpecError, UnsupportedSpecError

# Tensor arguments whose spec field exists but whose kernels are not built yet.
_TENSOR_FIELD = {
    "bias": "bias",
    "attn_mask": "attn_mask",
    "alibi_slopes": "alibi",
    "sinks": "sinks",
    "cu_seqlens_q": 'layout="thd"',
    "cu_seqlens_k": 'layout="thd"',
    "seqused_q": 'layout="thd"',
    "seqused_k": 'layout="thd" or paged',
    "block_table": "paged",
    "prefix_lens": "prefix_lm",
    "doc_ids_q": "documents",
    "doc_ids_k": "documents",
    "tree_mask": "tree_mask",
    "block_map": "block_map",
    "q_descale": "fp8_scale",
    "k_descale": "fp8_scale",
    "v_descale": "fp8_scale",
    "aux_tensors": "score_mod or mask_mod",
}


def refuse_tensors(tensors: dict[str, Any]) -> None:
    """Refuse tensor arguments: unknown names, and features that are not built."""
    for name in tensors:
        if name not in _TENSOR_FIELD:
            raise SpecError(
                f"unknown argument {name!r}; tensor arguments: {', '.join(_TENSOR_FIELD)}"
            )
    reasons = [
        f"{name}= needs {_TENSOR_FIELD[name]}, which is not built yet"
        for name, value in tensors.items()
        if value is not None
    ]
    if reasons:
        raise UnsupportedSpecError(reasons)


_PASSED: set[tuple[Any, ...]] = set()
_MAX_PASSED = 4096


def check_call(q: Tensor, k: Tensor, v: Tensor, head_dim: int, head_dim_v: int, dtype: str) -> None:
    """Shapes, devices and dtypes; what passed once is not looked at again."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(q.device.type):
        check_tensors(q, k, v, head_dim, head_dim_v)
        check_dtypes(q, k, v, dtype)
        return
    shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
    at = (*shapes, *dtypes, q.device, k.device, v.device, head_dim, head_dim_v, dtype)
    if at in _PASSED:
        return
    check_tensors(q, k, v, head_dim, head_dim_v)
    check_dtypes(q, k, v, dtype)
    if len(_PASSED) >= _MAX_PASSED:
        _PASSED.clear()
    _PASSED.add(at)


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, head_dim: int | None = None, head_dim_v: int | None = None
) -> None:
    """Shapes and devices of q, k, v as (batch, heads, seqlen, dim)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise SpecError(f"{name} must have 4 dims, got shape {tuple(x.shape)}")
        if x.device != q.device:
            raise SpecError(
                f"{name} is on {x.device} but q is on {q.device}; move it with .to(q.device)"
            )
    if q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0]:
        raise SpecError(
            f"q, k and v must have one batch size, got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}"
        )
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise SpecError(
            f"k and v must agree in heads and length, got shapes {tuple(k.shape)} and "
            f"{tuple(v.shape)} (batch, heads, seqlen, dim)"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise SpecError(
            f"num_heads_q must be a multiple of num_heads_kv, got {q.shape[1]} and {k.shape[1]}; "
            "check the layout (bhsd or bshd), or pad the kv heads"
        )
    if q.shape[3] != k.shape[3]:
        raise SpecError(f"q has head_dim {q.shape[3]} but k has {k.shape[3]}; they must be equal")
    for name, x, dim in (("q", q, head_dim), ("v", v, head_dim_v)):
        if dim is not None and x.shape[3] != dim:
            raise SpecError(
                f"{name} has head dim {x.shape[3]} but the spec says {dim}; compile a spec with "
                f"{'head_dim_v' if name == 'v' else 'head_dim'}={x.shape[3]}"
            )


def check_dtypes(q: Tensor, k: Tensor, v: Tensor, dtype: str) -> None:
    """One dtype, the spec's; under autocast the op casts."""
    if torch.is_autocast_enabled(q.device.type):
        return
    wanted = getattr(torch, dtype, None)
    if q.dtype == wanted and k.dtype == wanted and v.dtype == wanted:
        return
    raise DtypeError(
        f"q, k and v must all be {dtype}, got {q.dtype}, {k.dtype}, {v.dtype}; cast them, use "
        "autocast, or compile a spec of that dtype"
    )
