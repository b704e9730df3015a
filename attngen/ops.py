"""The torch ops `attngen::fwd` and `attngen::bwd`, registered when this module is imported.

One opaque pair serves every spec: the spec's text key travels as a string that a fresh process can
parse, numbers as lists whose entries `spec.scalar_args`, `spec.int_args` and `spec.tensor_args`
name, and the config is chosen inside on concrete sizes, so that `torch.compile(dynamic=True)` sees
one graph for all lengths. Inside the ops tensors are (batch, heads, seqlen, dim) views; results are
stored (batch, seqlen, heads, dim) and returned as such views.

The Autograd key is implemented here rather than by `torch.library.register_autograd`, so that a
call without gradients goes straight on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from attngen import interpreter, transforms
from attngen.errors import DtypeError, SpecError
from attngen.kernel import Kernel
from attngen.memory import addressable, aligned, empty_bshd
from attngen.resolve import device_index_of, on_reset, parsed, resolve
from attngen.spec import AttentionSpec
from attngen.workload import Direction, Workload, bucket

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
    " Tensor? dlse, Tensor?[] extra, float[] scalars, SymInt[] ints) -> Tensor[]"
)
MAX_POSITION = 1 << 30
"""Window sides are cut to this, so that sums of positions stay within 32 bits."""


class _Layout(NamedTuple):
    """What a text key says of the op's lists; made once a process."""

    spec: AttentionSpec
    ints: tuple[str, ...]
    scalars: tuple[str, ...]
    dtype: torch.dtype


@functools.lru_cache(maxsize=1024)
def _layout(text_key: str) -> _Layout:
    spec = parsed(text_key)
    return _Layout(spec, spec.int_args, spec.scalar_args, getattr(torch, spec.dtype))


class _Call(NamedTuple):
    """What is settled once for all calls of one shape, layout and numbers."""

    kernel: Kernel
    by_pointer: Kernel
    numbers: dict[str, int]
    """Keyword arguments of the emitted plan(), but for scalars and the seed."""
    partial: bool
    device: int | None


_CALLS: dict[tuple[Any, ...], _Call] = {}
_MAX_CALLS = 4096
on_reset(_CALLS.clear)


def _call(
    direction: Direction,
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ints: Sequence[int],
) -> _Call:
    """Checks and the look-up, once for each shape, dtype, device and list of ints."""
    shapes, dtypes = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype)
    at = (direction, text_key, *shapes, *dtypes, q.device, k.device, v.device, *ints)
    call = _CALLS.get(at)
    if call is None:
        if len(_CALLS) >= _MAX_CALLS:
            _CALLS.clear()
        call = _CALLS[at] = _prepare(direction, text_key, q, k, v, ints)
    return call


def _prepare(
    direction: Direction, text_key: str, q: Tensor, k: Tensor, v: Tensor, ints: Sequence[int]
) -> _Call:
    layout = _layout(text_key)
    spec = layout.spec
    _check(layout, q, k, v)
    named = dict(zip(layout.ints, ints, strict=True))
    batch, heads_q, seqlen_q, _ = q.shape
    left, right = named.get("window_left"), named.get("window_right")
    if left is not None and spec.is_causal:
        right = 0
    sizes = Workload(batch, heads_q, k.shape[1], seqlen_q, k.shape[2])
    at = bucket(direction, sizes, (left, right), batch_invariant=spec.batch_invariant)
    device = device_index_of(q)
    resolved = resolve(text_key, at, device)
    numbers = _numbers(spec, named, seqlen_q, k.shape[2])
    return _Call(resolved.kernel, resolved.by_pointer, numbers, bool(named["partial"]), device)


def _numbers(
    spec: AttentionSpec, named: dict[str, int], seqlen_q: int, seqlen_k: int
) -> dict[str, int]:
    """The ints of a call as the emitted file's plan() takes them."""
    placed = ("q_start", "q_step", "k_start", "k_step", "batch_start", "head_start")
    numbers = {name: named[name] for name in placed if name in named}
    for side in ("window_left", "window_right"):
        if side in named:
            numbers[side] = min(named[side], MAX_POSITION)
    if spec.has_positions:
        total_q, total_k = named["seqlen_q_total"], named["seqlen_k_total"]
        total_q = seqlen_q if total_q < 0 else total_q
        total_k = seqlen_k if total_k < 0 else total_k
        numbers["align"] = total_k - total_q if named["bottom_right"] else 0
    return numbers


def _check(layout: _Layout, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse what a kernel must never see. `api` has friendlier checks before this one."""
    spec, wanted = layout.spec, layout.dtype
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != wanted:
            raise DtypeError(
                f"{name} is {x.dtype} but the spec says dtype={spec.dtype}; cast it, or use a "
                f"spec of that dtype"
            )
        if x.device != q.device:
            raise SpecError(
                f"{name} is on {x.device} but q is on {q.device}; move it with .to(q.device)"
            )
    if q.is_cpu and not interpreter.enabled():
        raise SpecError(
            "q is on the CPU but this machine has a GPU; move the tensors with .cuda(), or set "
            "ATTNGEN_INTERPRET=1 to run Triton's interpreter"
        )


def _launch(
    call: _Call,
    layout: _Layout,
    tensors: tuple[Tensor | None, ...],
    inputs: tuple[Tensor, ...],
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
) -> None:
    """Run the call's kernel on its device; by pointers where descriptors cannot address inputs."""
    run = call.kernel
    if run is not call.by_pointer and not addressable(*inputs):
        run = call.by_pointer
    named: dict[str, Any] = dict(zip(layout.scalars, scalars, strict=True), **call.numbers)
    if extra:
        named["seed"] = extra[0]
    if call.device is None or call.device == torch.cuda.current_device():
        run(*tensors, **named)
    else:
        with torch.cuda.device(call.device):
            run(*tensors, **named)


def _forward(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
) -> list[Tensor]:
    layout = _layout(text_key)
    batch, heads, seqlen_q, _ = q.shape
    dtype = torch.float32 if ints[0] else q.dtype
    out = empty_bshd(q, batch, heads, seqlen_q, v.shape[3], dtype)
    lse = q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
    if lse.numel() == 0 or k.numel() == 0:
        _check(layout, q, k, v)
        return [out.zero_(), lse.fill_(float("-inf"))]
    call = _call("fwd", text_key, q, k, v, ints)
    q, k, v = aligned(q), aligned(k), aligned(v)
    _launch(call, layout, (q, k, v, out, lse), (q, k, v), extra, scalars)
    return [out, lse]


def _backward(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
) -> list[Tensor]:
    layout = _layout(text_key)
    batch, heads, seqlen_q, dim = q.shape
    heads_kv, seqlen_k, dim_v = v.shape[1:]
    dq = empty_bshd(q, batch, heads, seqlen_q, dim, q.dtype)
    dk = empty_bshd(k, batch, heads_kv, seqlen_k, dim, k.dtype)
    dv = empty_bshd(v, batch, heads_kv, seqlen_k, dim_v, v.dtype)
    if lse.numel() == 0 or k.numel() == 0:
        _check(layout, q, k, v)
        return [dq.zero_(), dk.zero_(), dv.zero_()]
    call = _call("bwd", text_key, q, k, v, ints)
    q, k, v = aligned(q), aligned(k), aligned(v)
    dout = aligned(torch.zeros_like(out) if dout is None else dout)
    out = out if out.stride(-1) == 1 else out.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    padded = -(-seqlen_q // 128) * 128
    scratch = [q.new_empty((batch, heads, 2, padded), dtype=torch.float32)]
    if call.kernel.config.dq == "atomic":  # type: ignore[union-attr]  # a backward config
        scratch.append(q.new_empty((batch, heads, seqlen_q, dim), dtype=torch.float32))
    tensors = (q, k, v, out, lse.contiguous(), dout, dlse, dq, dk, dv, *scratch)
    _launch(call, layout, tensors, (q, k, v, dout), extra, scalars)
    return [dq, dk, dv]


def _fake_forward(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, extra: Any, scalars: Any, ints: Any
) -> list[Tensor]:
    batch, heads, seqlen_q, _ = q.shape
    dtype = torch.float32 if ints[0] else q.dtype
    out = empty_bshd(q, batch, heads, seqlen_q, v.shape[3], dtype)
    return [out, q.new_empty((batch, heads, seqlen_q), dtype=torch.float32)]


def _fake_backward(text_key: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> list[Tensor]:
    return [
        empty_bshd(x, x.shape[0], x.shape[1], x.shape[2], x.shape[3], x.dtype) for x in (q, k, v)
    ]


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
    plain = (
        _is_plain(q)
        and _is_plain(k)
        and _is_plain(v)
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled(q.device.type)
    )
    if torch.is_grad_enabled():
        _refuse_unsupported_derivatives(q, k, v)
    if not plain:
        return torch.ops.attngen.fwd(text_key, q, k, v, extra, scalars, ints)  # type: ignore[no-any-return]
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        results: Sequence[Tensor] = _apply(_Direct, text_key, scalars, ints, q, k, v, *extra)
        return results
    return _forward(text_key, q, k, v, extra, scalars, ints)


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor or type(x) is torch.nn.Parameter


class _Attention(torch.autograd.function._SingleLevelFunction):
    """Gradients of `attngen::fwd`: one call of `attngen::bwd`.

    Single-level, because under torch.func the dispatcher has already peeled the other levels off
    when it comes to the Autograd key.
    """

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
        dq, dk, dv = torch.ops.attngen.bwd(
            ctx.text_key, q, k, v, out, lse, dout, dlse, extra, ctx.scalars, ctx.ints
        )
        needed = ctx.needs_input_grad[3:6]
        found = (g if need else None for g, need in zip((dq, dk, dv), needed, strict=True))
        return (None, None, None, *found, *(None,) * len(extra))


class _Direct(_Attention):
    """The same without the dispatcher."""

    @staticmethod
    def forward(
        text_key: str, scalars: Any, ints: Any, q: Tensor, k: Tensor, v: Tensor, *extra: Any
    ) -> tuple[Tensor, ...]:
        return tuple(_forward(text_key, q, k, v, extra, scalars, ints))


class _Once(torch.autograd.function._SingleLevelFunction):
    """`attngen::bwd` under autograd: computes, and refuses to be differentiated again."""

    @staticmethod
    def forward(ctx: Any, arguments: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.attngen.bwd(*arguments))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        raise NotImplementedError(_NO_SECOND)


def _refuse_unsupported_derivatives(*tensors: Tensor) -> None:
    """Forward-mode and second derivatives are not built: an error, never a silent zero."""
    if torch._C._are_functorch_transforms_active():
        kind = torch._C._functorch.TransformType
        levels = [level.key() for level in torch._C._functorch.get_interpreter_stack() or ()]
        if kind.Jvp in levels:
            raise NotImplementedError(f"torch.func.jvp: {_NO_TANGENTS}")
        if levels.count(kind.Grad) > 1:
            raise NotImplementedError(f"nested torch.func.grad or vjp: {_NO_SECOND}")
    if forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
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
    _refuse_unsupported_derivatives(q, k, v)
    if (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled():
        return list(_apply(_Attention, text_key, scalars, ints, q, k, v, *extra))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.attngen.fwd(text_key, q, k, v, extra, scalars, ints)


def _autograd_backward(*arguments: Any) -> Any:
    tensors = [x for x in arguments[1:8] if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return list(_apply(_Once, arguments, *tensors))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.attngen.bwd(*arguments)


def _autocast_forward(device_type: str, key: torch._C.DispatchKey) -> Any:
    def cast_forward(
        text_key: str, q: Tensor, k: Tensor, v: Tensor, extra: Any, scalars: Any, ints: Any
    ) -> Any:
        wanted = getattr(torch, parsed(text_key).dtype)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            q, k, v = (x.to(wanted) if x.is_floating_point() else x for x in (q, k, v))
            return torch.ops.attngen.fwd(text_key, q, k, v, extra, scalars, ints)

    return cast_forward


def _register() -> None:
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl("fwd", _forward, key)
        _LIBRARY.impl("bwd", _backward, key)
    _LIBRARY.impl("fwd", _autograd_forward, "Autograd")
    _LIBRARY.impl("bwd", _autograd_backward, "Autograd")
    for device_type in ("cuda", "cpu"):
        name = f"Autocast{device_type.upper()}"
        key = getattr(torch._C.DispatchKey, name)
        _LIBRARY.impl("fwd", _autocast_forward(device_type, key), name)
    torch.library.register_fake("attngen::fwd", _fake_forward, lib=_LIBRARY)
    torch.library.register_fake("attngen::bwd", _fake_backward, lib=_LIBRARY)
    transforms.register(_LIBRARY)


_register()
