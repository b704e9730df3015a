"""The torch ops `attngen::fwd` and `attngen::bwd`, registered when this module is imported.

One opaque pair serves every spec: the spec's text key travels as a string that a fresh process can
parse, numbers as lists whose entries `spec.scalar_args`, `spec.int_args` and `spec.tensor_args`
name, and the config is chosen inside on concrete sizes (`calls`), so that
`torch.compile(dynamic=True)` sees one graph for all lengths. Tensors are (batch, heads, seqlen,
dim) views; results are stored (batch, seqlen, heads, dim) and returned as such views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngen import autograd, calls, sharding, tangents, transforms
from attngen.autograd import AttngenDirect, have_plain_types, is_plain, needs_gradient
from attngen.checks import is_cast
from attngen.dual_tensors import have_tangents
from attngen.errors import UnsupportedSpecError
from attngen.fp8 import check_gradient_dtypes
from attngen.identity import parsed
from attngen.memory import empty_bshd
from attngen.paged import refuse_gradients
from attngen.side_outputs import side_shapes

_LIBRARY = torch.library.Library("attngen", "DEF")
_LIBRARY.define(
    "fwd(str spec, Tensor q, Tensor k, Tensor v, Tensor?[] extra, float[] scalars, SymInt[] ints)"
    " -> Tensor[]"
)
_LIBRARY.define(
    "bwd(str spec, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout,"
    " Tensor? dlse, Tensor?[] extra, float[] scalars, SymInt[] ints, bool[] needs=[]) -> Tensor[]"
)
_LIBRARY.define(
    "jvp(str spec, Tensor q, Tensor k, Tensor v, Tensor? tq, Tensor? tk, Tensor? tv,"
    " Tensor?[] extra, float[] scalars, SymInt[] ints) -> Tensor[]"
)
_LIBRARY.define("refuse(str[] reasons, Tensor q) -> Tensor")


def _fake_forward(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, extra: Any, scalars: Any, ints: Any
) -> list[Tensor]:
    batch, heads, seqlen_q, _ = q.shape
    dtype = torch.float32 if ints[0] else getattr(torch, parsed(text_key).out_dtype)
    out = empty_bshd(q, batch, heads, seqlen_q, v.shape[3], dtype)
    shapes = [(batch, heads, seqlen_q), *side_shapes(parsed(text_key), extra, q, k)]
    return [out, *(q.new_empty(shape, dtype=torch.float32) for shape in shapes)]


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


def _fake_tangents(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, tq: Any, tk: Any, tv: Any, *rest: Any
) -> list[Tensor]:
    return [x for _ in range(2) for x in _fake_forward(text_key, q, k, v, *rest)[:2]]


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
    if not (is_plain(q, k, v) and have_plain_types(extra)) or torch.is_autocast_enabled(
        q.device.type
    ):
        sharding.meet(q, k, v)
        return torch.ops.attngen.fwd(text_key, q, k, v, extra, scalars, ints)  # type: ignore[no-any-return]  # torch.ops is untyped
    if have_tangents(q, k, v, *extra):
        return torch.ops.attngen.fwd(text_key, q, k, v, extra, scalars, ints)  # type: ignore[no-any-return]  # torch.ops is untyped
    if needs_gradient(q, k, v, extra):
        check_gradient_dtypes(q, k, v)
        refuse_gradients(parsed(text_key))
        return AttngenDirect.apply(text_key, scalars, ints, q, k, v, *extra)  # type: ignore[attr-defined,no-any-return]  # torch types none of it
    return calls.forward(text_key, q, k, v, extra, scalars, ints)


def autocast(op: Any, key: torch._C.DispatchKey) -> Any:
    """An op of a text key, q, k, v and more under autocast, which casts these three."""

    def cast(text_key: str, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Any:
        wanted = getattr(torch, parsed(text_key).dtype)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            if is_cast(wanted):
                q, k, v = (x.to(wanted) if is_cast(x.dtype) else x for x in (q, k, v))
            return op(text_key, q, k, v, *more)

    return cast


def _refuse(reasons: Sequence[str], q: Tensor) -> Tensor:
    """Raise where a compiled graph runs: dynamo replaces what is raised while it traces."""
    raise UnsupportedSpecError(reasons)


def _register() -> None:
    for key in ("CUDA", "CPU"):
        _LIBRARY.impl("jvp", tangents.forward, key)
        _LIBRARY.impl("fwd", calls.forward, key)
        _LIBRARY.impl("bwd", calls.backward, key)
    _LIBRARY.impl("fwd", autograd.forward, "Autograd")
    _LIBRARY.impl("bwd", autograd.backward, "Autograd")
    _LIBRARY.impl("jvp", autograd.jvp, "Autograd")
    for device_type in ("cuda", "cpu"):
        name = f"Autocast{device_type.upper()}"
        key = getattr(torch._C.DispatchKey, name)
        _LIBRARY.impl("fwd", autocast(torch.ops.attngen.fwd, key), name)
    _LIBRARY.impl("refuse", _refuse, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "attngen::refuse", lambda reasons, q: torch.empty_like(q), lib=_LIBRARY
    )
    torch.library.register_fake("attngen::fwd", _fake_forward, lib=_LIBRARY)
    torch.library.register_fake("attngen::bwd", _fake_backward, lib=_LIBRARY)
    torch.library.register_fake("attngen::jvp", _fake_tangents, lib=_LIBRARY)
    transforms.register(_LIBRARY)


_register()
