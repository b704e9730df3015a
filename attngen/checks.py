"""What a call must be before it reaches the op: errors that name the argument and the way out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from attngen.errors import DtypeError, SpecError, nearest
from attngen.spec import FIELDS
from attngen.spec_rules import AUX, FP8_DTYPES
from attngen.values import flag, shown

_AUX = ("lse", *AUX)


def refuse_names(given: dict[str, Any], call: Callable[..., Any]) -> NoReturn:
    """Refuse further arguments of `call`, which has none of these names.

    Raises:
        SpecError: always; names the nearest options.
    """
    name = next(iter(given))
    parameters = inspect.signature(call).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if name in FIELDS and "causal" not in options:
        raise SpecError(
            f"{name!r} belongs to the spec, not to a call; write "
            f"attngen.compile(attngen.AttentionSpec(..., {name}=...))"
        )
    raise SpecError(
        f"unknown argument {name!r}{nearest(name, options)}; options: {', '.join(options)}"
    )


def check_results(return_lse: Any, return_aux: Any) -> None:
    """What a call is asked to return besides out."""
    flag("return_lse", return_lse)
    if not isinstance(return_aux, (tuple, list)):
        raise SpecError(
            f'return_aux must be a tuple of names, got {shown(return_aux)}; write ("lse",)'
        )
    for name in return_aux:
        if not isinstance(name, str) or name not in _AUX:
            hint = nearest(name, _AUX) if isinstance(name, str) else ""
            hint = hint or "; leave return_aux out for out alone"
            raise SpecError(f"return_aux must name {', '.join(_AUX)}, got {shown(name)}{hint}")
    if return_lse and return_aux:
        raise SpecError(
            f"return_lse=True and return_aux={tuple(return_aux)!r} exclude each other; aux has the "
            'lse: return_aux=("lse",) alone'
        )


def check_fields(fields: Mapping[str, str], wanted: Sequence[str], given: Collection[str]) -> None:
    """What a call brings is what its spec has.

    Args:
        fields: the spec's, by the names of their tensors.
        wanted: those that the spec turns on.
        given: names of the tensors that the call brings.
    """
    for name, field in fields.items():
        if field in wanted and name not in given:
            raise SpecError(
                f"the spec says {field}=True, but the call has no {name}; pass {name}=, or compile "
                f"a spec without {field}"
            )
        if name in given and field not in wanted:
            raise SpecError(
                f"{name} is given, but the spec says {field}=False; compile a spec with "
                f"{field}=True, or leave {name} out"
            )


def check_place(name: str, x: Any, q: Tensor) -> None:
    """A dense tensor on q's device."""
    check_kinds({name: x})
    if x.device != q.device:
        raise elsewhere(name, x.device, q.device)


def check_beside(name: str, x: Tensor, dtype: torch.dtype, q: Tensor) -> None:
    """Dtype, float32 or int32, and device of a tensor that kernels take beside q."""
    if x.dtype != dtype:
        cast = "float" if dtype.is_floating_point else "int"
        raise DtypeError(f"{name} must be {cast}32, got {x.dtype}; cast it with {name}.{cast}()")
    if x.device != q.device:
        raise elsewhere(name, x.device, q.device)


def elsewhere(name: str, device: torch.device, wanted: torch.device) -> SpecError:
    """The error of a tensor on another device than q."""
    return SpecError(f"{name} is on {device} but q is on {wanted}; move it with .to(q.device)")


def check_kinds(tensors: dict[str, Any]) -> None:
    """Dense torch tensors, by their names in the call."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            kind = f"{type(x).__module__}.{type(x).__name__}".removeprefix("builtins.")
            is_text = x is None or isinstance(x, str)  # of which torch makes none
            step = "pass one" if is_text else f"make one with torch.as_tensor({name})"
            raise SpecError(f"{name} must be a torch.Tensor, got {kind}; {step}")
        if x.is_nested:
            raise SpecError(
                f'{name} is a nested tensor, which attngen.attention and specs with layout="thd" '
                "take where q, k and v are jagged; pad it with torch.nested.to_padded_tensor, or "
                "call once for each sequence"
            )
        if x.layout is not torch.strided:
            raise SpecError(f"{name} is {x.layout}, not dense; call {name}.to_dense()")


def heads_first(q: Any, k: Any, v: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, seqlen, heads, dim) as (batch, heads, seqlen, dim) views."""
    try:
        if q.dim() == k.dim() == v.dim() == 4:
            return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    except (AttributeError, RuntimeError):
        check_kinds({"q": q, "k": k, "v": v})
        raise
    check_tensors(q, k, v)
    raise AssertionError("a tensor that has not 4 dims was let pass")


def compute_dtype(q: Any) -> str:
    """The dtype a functional call computes in: q's, or autocast's."""
    if not isinstance(q, Tensor):
        check_kinds({"q": q})
    dtype = q.dtype
    if _autocasts(q) and is_cast(dtype):
        dtype = torch.get_autocast_dtype(q.device.type)
    return str(dtype).removeprefix("torch.")


def is_cast(dtype: torch.dtype) -> bool:
    """Does autocast cast tensors of this dtype? Not float64 and no integers, as torch does, and no
    FP8, whose values mean nothing without their scales."""
    return dtype.is_floating_point and dtype.itemsize > 1 and dtype != torch.float64


def _autocasts(q: Tensor) -> bool:
    return q.device.type != "meta" and torch.is_autocast_enabled(q.device.type)


_PASSED: set[tuple[Any, ...]] = set()
_MAX_PASSED = 4096


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int | None,
    head_dim_v: int | None,
    dtype: str,
    *,
    is_paged: bool = False,
    kv_dtype: str | None = None,
) -> None:
    """Kinds, shapes, devices and dtypes; what passed once is not looked at again."""
    at = None
    if not torch.compiler.is_compiling():
        try:
            shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
            dims = (head_dim, head_dim_v, dtype, is_paged, kv_dtype)
            at = (*shapes, *dtypes, q.device, k.device, v.device, *dims)
            if at in _PASSED and not torch.is_autocast_enabled(q.device.type):
                return
        except (AttributeError, RuntimeError, TypeError):
            at = None  # no plain tensors, or sizes without a value
    check_tensors(q, k, v, head_dim, head_dim_v, is_paged=is_paged)
    check_dtypes(q, k, v, dtype, kv_dtype)
    if at is None or _autocasts(q):
        return
    if len(_PASSED) >= _MAX_PASSED:
        _PASSED.clear()
    _PASSED.add(at)


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    *,
    is_paged: bool = False,
) -> None:
    """Kinds, shapes and devices of q, k, v as (batch, heads, seqlen, dim); of paged k and v as
    (pages, heads, page size, dim)."""
    if torch._C._get_tracing_state() is not None:
        raise SpecError(
            "torch.jit.trace would hold this call's sizes for ever; use torch.export or "
            "torch.compile"
        )
    check_kinds({"q": q, "k": k, "v": v})
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise SpecError(
                f"{name} must have 4 dims, got shape {tuple(x.shape)}; "
                "add the missing ones with .unsqueeze(), or use attngen.sdpa"
            )
        if x.device != q.device:
            raise elsewhere(name, x.device, q.device)
    if q.device.type == "meta" and not torch.compiler.is_compiling():
        raise SpecError(
            "q, k and v are on the meta device, which holds no data; make them on a real device, "
            "or trace the call with torch.compile or torch.export for shapes alone"
        )
    if is_paged and k.shape[0] != v.shape[0]:
        raise SpecError(
            f"k and v must have equally many pages, got {k.shape[0]} and {v.shape[0]}; one "
            "block_table serves both, so allocate them together"
        )
    if not is_paged and (q.shape[0] != k.shape[0] or q.shape[0] != v.shape[0]):
        raise SpecError(
            f"q, k and v must have one batch size, got {q.shape[0]}, {k.shape[0]}, {v.shape[0]}; "
            "give a shared one the others' with .expand()"
        )
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        raise SpecError(
            f"k and v must agree in heads and length, got shapes {tuple(k.shape)} and "
            f"{tuple(v.shape)} (batch, heads, seqlen, dim); check the layout (bhsd or bshd), or "
            "cut them to one length"
        )
    if k.shape[1] == 0:
        raise SpecError(
            f"k and v must have at least one head, got {k.shape[1]}, with {q.shape[1]} of q; check "
            "the layout (bhsd or bshd), or leave the call out"
        )
    if q.shape[1] % k.shape[1] != 0:
        raise SpecError(
            f"num_heads_q must be a multiple of num_heads_kv, got {q.shape[1]} and {k.shape[1]}; "
            "check the layout (bhsd or bshd), or pad the kv heads"
        )
    if q.shape[3] != k.shape[3]:
        raise SpecError(
            f"q has head_dim {q.shape[3]} but k has {k.shape[3]}; they must be equal: check the "
            "layout, or pad one with zeros and give softmax_scale"
        )
    for name, x, dim in (("q", q, head_dim), ("v", v, head_dim_v)):
        if dim is not None and x.shape[3] != dim:
            raise SpecError(
                f"{name} has head dim {x.shape[3]} but the spec says {dim}; compile a spec with "
                f"{'head_dim_v' if name == 'v' else 'head_dim'}={x.shape[3]}"
            )


def check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, q: Tensor) -> None:
    """Can kernels write a caller's out, a (batch, heads, seqlen, dim) view?"""
    if tuple(out.shape) != tuple(shape):
        raise SpecError(
            f"out must have shape {tuple(shape)} (batch, heads, seqlen, dim), got "
            f"{tuple(out.shape)}; make it with q's sizes and v's last dim"
        )
    if out.dtype != dtype:
        raise DtypeError(f"out must be {dtype}, got {out.dtype}; make it of that dtype")
    if out.device != q.device:
        raise SpecError(f"out is on {out.device} but q is on {q.device}; make it there")
    if out.shape[3] > 1 and out.stride(3) != 1:
        raise SpecError(
            f"out must have a last stride of 1, got strides {out.stride()}; make it with "
            "torch.empty"
        )
    extent = 1
    for stride, size in sorted(zip(out.stride(), out.shape, strict=True)):
        if size > 1 and stride < extent:
            raise SpecError(
                f"out must have one place for each element, got shape {tuple(out.shape)} with "
                f"strides {out.stride()}; make it with torch.empty"
            )
        extent = max(extent, stride * size)
    if out.data_ptr() % 16:
        raise SpecError("out must begin at a multiple of 16 bytes; make it with torch.empty")


def check_dtypes(q: Tensor, k: Tensor, v: Tensor, dtype: str, kv_dtype: str | None = None) -> None:
    """One dtype, the spec's; under autocast the op casts. Of a quantised cache, two."""
    if kv_dtype is not None:
        stored = getattr(torch, kv_dtype)
        is_cast_here = _autocasts(q) and is_cast(q.dtype)
        if k.dtype == v.dtype == stored and (is_cast_here or q.dtype == getattr(torch, dtype)):
            return
        raise DtypeError(
            f"q must be {dtype}, and k and v {kv_dtype}, got {q.dtype}, {k.dtype}, {v.dtype}; cast "
            "q, quantise k and v, or compile a spec of those dtypes"
        )
    given = (q.dtype, k.dtype, v.dtype)
    if _autocasts(q) and not any(str(x).endswith(FP8_DTYPES) for x in (dtype, *given)):
        return
    wanted = getattr(torch, dtype, None)
    if q.dtype == wanted and k.dtype == wanted and v.dtype == wanted:
        return
    raise DtypeError(
        f"q, k and v must all be {dtype}, got {q.dtype}, {k.dtype}, {v.dtype}; cast them, use "
        "autocast, or compile a spec of that dtype"
    )
