"""The torch ops `attngen::fwd` and `attngen::bwd`, registered when this module is imported.

One opaque pair serves every spec: the spec's text key travels as a string that a fresh process can
parse, numbers as lists whose entries `spec.scalar_args`, `spec.int_args` and `spec.tensor_args`
name, and the config is chosen inside on concrete sizes (`calls`), so that
`torch.compile(dynamic=True)` sees one graph for all lengths. Tensors are (batch, heads, seqlen,
dim) views; results are stored (batch, seqlen, heads, dim) and returned as such views.

The Autograd key is implemented here rather than by `torch.library.register_autograd`, so that a
call without gradients goes straight on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from attngen import calls, transforms
from attngen.checks import check_gradient_dtypes, is_cast
from attngen.errors import UnsupportedSpecError
from attngen.identity import parsed
from attngen.memory import empty_bshd

_USE_MATH = "compute it with torch.nn.functional.scaled_dot_product_attention under SDPBackend.MATH"
_NO_SECOND = (
    f"attngen::bwd cannot be differentiated (a second derivative of attention); {_USE_MATH}"
)
_NO_TANGENTS = f"attngen::fwd has no forward-mode derivative; {_USE_MATH}"
_LIBRARY = torch.library.Library("attngen", "DEF")
_LIBRARY.define(
    "fwd(str spec, Tensor q, Tensor k, Tensor v, Tensor?[] extra, float[] scalars, SymInt[] ints)"
    " -> Tensor[]"
)
_LIBRARY.define(
    "bwd(str spec, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout,"
    " Tensor? dlse, Tensor?[] extra, float[] scalars, SymInt[] ints, bool[] needs=[]) -> Tensor[]"
)
_LIBRARY.define("refuse(str[] reasons, Tensor q) -> Tensor")


def _fake_forward(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, extra: Any, scalars: Any, ints: Any
) -> list[Tensor]:
    batch, heads, seqlen_q, _ = q.shape
    dtype = torch.float32 if ints[0] else getattr(torch, parsed(text_key).out_dtype)
    out = empty_bshd(q, batch, heads, seqlen_q, v.shape[3], dtype)
    return [out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)]


def _fake_backward(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    extra: Any,
    scalars: Any,
    ints: Any,
    needs: Sequence[bool] = (),
) -> list[Tensor]:
    spec = parsed(text_key)
    dtype = getattr(torch, spec.out_dtype)
    found = [
        empty_bshd(x, x.shape[0], x.shape[1], x.shape[2], x.shape[3], dtype) for x in (q, k, v)
    ]
    if any(needs):
        given = dict(zip(spec.tensor_args, extra, strict=True))
        wanted = zip(spec.gradient_args, needs, strict=True)
        found += [given[name].new_empty(given[name].shape) for name, need in wanted if need]
    return found


def forward(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
) -> Sequence[Tensor]:
    """`torch.ops.attngen.fwd`, past the dispatcher where nothing in it would act.

    The dispatcher's two passes through Python (Autograd, then the device) cost more than a launch.
    Modes, functorch transforms, tensor subclasses and autocast still go through it.
    """
    if not (_is_plain(q, k, v) and _have_plain_types(extra)) or torch.is_autocast_enabled(
        q.device.type
    ):
        return torch.ops.attngen.fwd(text_key, q, k, v, extra, scalars, ints)  # type: ignore[no-any-return]  # torch.ops is untyped
    _refuse_unsupported_derivatives(q, k, v, *extra)
    if _needs_gradient(q, k, v, extra):
        check_gradient_dtypes(q, k, v)
        return AttngenDirect.apply(text_key, scalars, ints, q, k, v, *extra)  # type: ignore[attr-defined,no-any-return]  # torch types none of it
    return calls.forward(text_key, q, k, v, extra, scalars, ints)


def _needs_gradient(q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor | None]) -> bool:
    if not torch.is_grad_enabled():
        return False
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return any(x is not None and x.requires_grad for x in extra)


def _is_plain(*tensors: Tensor | None) -> bool:
    """Would the dispatcher do nothing but find the kernel?"""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
    ):
        return False
    return all(
        x is None or (type(x) in _PLAIN and not x.is_meta and not x.is_neg()) for x in tensors
    )


def _have_plain_types(extra: Sequence[Tensor | None]) -> bool:
    """Is no tensor of `extra` of a subclass? A meta one among others is for the checks to name."""
    return all(x is None or type(x) in _PLAIN for x in extra)


def _is_batched(*grads: Tensor | None) -> bool:
    """By autograd's own vmap (`is_grads_batched=True`)?"""
    is_legacy = torch._C._functorch.is_legacy_batchedtensor
    return any(x is not None and is_legacy(x) for x in grads)


_PLAIN = (Tensor, torch.nn.Parameter)
# Compiled autograd asks each Function for it; the single-level base has none.
_COMPILED_KEY = staticmethod(torch.autograd.Function._compiled_autograd_key)


class AttngenAttention(torch.autograd.function._SingleLevelFunction):
    """Gradients of `attngen::fwd`: one call of `attngen::bwd`.

    Single-level, because under torch.func the dispatcher has already peeled the other levels off
    when it comes to the Autograd key. A profiler shows its name.
    """

    _compiled_autograd_key = _COMPILED_KEY

    @staticmethod
    def forward(
        text_key: str, scalars: Any, ints: Any, q: Tensor, k: Tensor, v: Tensor, *extra: Any
    ) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.attngen.fwd(text_key, q, k, v, list(extra), scalars, ints))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.text_key, ctx.scalars, ctx.ints, q, k, v, *extra = inputs
        ctx.save_for_backward(q, k, v, *output, *extra)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *extra = ctx.saved_tensors
        dout, dlse = grads
        nothing = (None,) * (6 + len(extra))
        if dout is None and dlse is None:
            return nothing
        tensors = (q, k, v, out, lse, dout, dlse)
        plain = _is_plain(*tensors) and _have_plain_types(extra)
        direct = plain and not torch.is_grad_enabled() and not _is_batched(*grads)
        bwd: Any = calls.backward if direct else torch.ops.attngen.bwd
        needed, needs = ctx.needs_input_grad[3:6], _needs(ctx.text_key, ctx.needs_input_grad[6:])
        arguments = (ctx.text_key, *tensors, extra, ctx.scalars, ctx.ints)
        dq, dk, dv, *more = bwd(*arguments, needs) if needs else bwd(*arguments)
        found = (g if need else None for g, need in zip((dq, dk, dv), needed, strict=True))
        spec = parsed(ctx.text_key)
        others = [
            more.pop(0) if need and name in spec.gradient_args else None
            for name, need in zip(spec.tensor_args, ctx.needs_input_grad[6:], strict=True)
        ]
        return (None, None, None, *found, *others)


def _needs(text_key: str, needed: Sequence[bool]) -> list[bool]:
    """Which of `spec.gradient_args` want a gradient; empty if none does."""
    if not any(needed):
        return []
    spec = parsed(text_key)
    named = dict(zip(spec.tensor_args, needed, strict=True))
    return [named[name] for name in spec.gradient_args]


class AttngenDirect(AttngenAttention):
    """The same without the dispatcher."""

    @staticmethod
    def forward(
        text_key: str, scalars: Any, ints: Any, q: Tensor, k: Tensor, v: Tensor, *extra: Any
    ) -> tuple[Tensor, ...]:
        return tuple(calls.forward(text_key, q, k, v, extra, scalars, ints))


class _Once(torch.autograd.function._SingleLevelFunction):
    """`attngen::bwd` under autograd: computes, and refuses to be differentiated again."""

    _compiled_autograd_key = _COMPILED_KEY

    @staticmethod
    def forward(ctx: Any, arguments: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.attngen.bwd(*arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(_NO_SECOND)


def _refuse_unsupported_derivatives(*tensors: Tensor | None) -> None:
    """Forward-mode and second derivatives are not built: an error, never a silent zero."""
    if torch._C._are_functorch_transforms_active():
        kind = torch._C._functorch.TransformType
        levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
        if kind.Jvp in levels:
            raise NotImplementedError(f"torch.func.jvp: {_NO_TANGENTS}")
        if levels.count(kind.Grad) > 1:
            raise NotImplementedError(f"nested torch.func.grad or vjp: {_NO_SECOND}")
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError(f"dual tensors: {_NO_TANGENTS}")


def _apply(function: Any, *arguments: Any) -> Any:
    if torch._C._are_functorch_transforms_active():
        with enable_single_level_autograd_function():
            return function.apply(*arguments)
    return function.apply(*arguments)


def _autograd_forward(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, extra: Any, scalars: Any, ints: Any
) -> Any:
    _refuse_unsupported_derivatives(q, k, v, *extra)
    direct = _is_plain(q, k, v) and _have_plain_types(extra)
    if _needs_gradient(q, k, v, extra):
        check_gradient_dtypes(q, k, v)
        function = AttngenDirect if direct else AttngenAttention
        return list(_apply(function, text_key, scalars, ints, q, k, v, *extra))
    if direct:
        return calls.forward(text_key, q, k, v, extra, scalars, ints)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.attngen.fwd(text_key, q, k, v, extra, scalars, ints)


def _autograd_backward(*arguments: Any) -> Any:
    tensors = [x for x in arguments[1:8] if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return list(_apply(_Once, arguments, *tensors))
    if _is_plain(*tensors):
        return calls.backward(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.attngen.bwd(*arguments)


def _autocast_forward(device_type: str, key: torch._C.DispatchKey) -> Any:
    def cast_forward(
        text_key: str, q: Tensor, k: Tensor, v: Tensor, extra: Any, scalars: Any, ints: Any
    ) -> Any:
        wanted = getattr(torch, parsed(text_key).dtype)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            if is_cast(wanted):
                q, k, v = (x.to(wanted) if is_cast(x.dtype) else x for x in (q, k, v))
            return torch.ops.attngen.fwd(text_key, q, k, v, extra, scalars, ints)

    return cast_forward


def _refuse(reasons: Sequence[str], q: Tensor) -> Tensor:
    """Raise where a compiled graph runs: dynamo replaces what is raised while it traces."""
    raise UnsupportedSpecError(reasons)


def _register() -> None:
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl("fwd", calls.forward, key)
        _LIBRARY.impl("bwd", calls.backward, key)
    _LIBRARY.impl("fwd", _autograd_forward, "Autograd")
    _LIBRARY.impl("bwd", _autograd_backward, "Autograd")
    for device_type in ("cuda", "cpu"):
        name = f"Autocast{device_type.upper()}"
        key = getattr(torch._C.DispatchKey, name)
        _LIBRARY.impl("fwd", _autocast_forward(device_type, key), name)
    _LIBRARY.impl("refuse", _refuse, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "attngen::refuse", lambda reasons, q: torch.empty_like(q), lib=_LIBRARY
    )
    torch.library.register_fake("attngen::fwd", _fake_forward, lib=_LIBRARY)
    torch.library.register_fake("attngen::bwd", _fake_backward, lib=_LIBRARY)
    transforms.register(_LIBRARY)


_register()
