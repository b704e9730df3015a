"""`out=`: a forward into a tensor of the caller's, by the op `attngen::fwd_out`. It has no
gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attngen import calls, ops
from attngen.dual_tensors import have_tangents
from attngen.errors import SpecError, UnsupportedSpecError
from attngen.values import shown

_LIBRARY = torch.library.Library("attngen", "FRAGMENT")
_LIBRARY.define(
    "fwd_out(str spec, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor?[] extra,"
    " float[] scalars, SymInt[] ints) -> Tensor"
)


def heads_first(
    out: Any, layout: Any, is_packed: bool, return_aux: Any, nested: Any = None
) -> Tensor:
    """A call's out as a (batch, heads, seqlen, dim) view; `nested` is not None if q is."""
    if nested is not None:
        raise UnsupportedSpecError(
            [
                "out= with nested tensors is not built yet; leave it out, or pass q.values() and "
                "so on with cu_seqlens_q and cu_seqlens_k"
            ]
        )
    if not isinstance(out, Tensor) or out.is_nested:
        raise SpecError(f"out must be a dense torch.Tensor, got {shown(out)}")
    if return_aux:
        raise UnsupportedSpecError(
            [f"return_aux={return_aux!r} with out= is not built yet; return_lse=True is"]
        )
    dims = 3 if is_packed else 4
    if out.dim() != dims:
        raise SpecError(f"out must have {dims} dims, as q has, got shape {tuple(out.shape)}")
    if is_packed:
        return out.transpose(0, 1).unsqueeze(0)
    return out.transpose(1, 2) if layout == "bshd" else out


def results(out: Tensor, found: Any, return_lse: bool) -> Any:
    """What a call returns, with the caller's own out for a view of it."""
    return (out, found[1]) if return_lse else out


def forward(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
) -> Tensor:
    """`torch.ops.attngen.fwd_out`: writes out, gives lse."""
    return torch.ops.attngen.fwd_out(text_key, q, k, v, out, extra, scalars, ints)  # type: ignore[no-any-return]  # torch.ops is untyped


def extent(x: Tensor) -> int:
    """Bytes from the first element of a tensor that has some to behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def count_write(*written: Tensor) -> None:
    """Tell autograd that tensors were written to, as torch's own functions in place do: a backward
    that saved one of them refuses to use it."""
    counted = [x for x in written if not x.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


def check_apart(out: Tensor, **inputs: Tensor) -> None:
    """Refuse an out that shares memory with what other programs may still read."""
    for name, x in inputs.items():
        if out.numel() and x.numel() and not _are_apart(out, x):
            raise SpecError(f"out shares memory with {name}; make it with torch.empty")


def _are_apart(x: Tensor, y: Tensor) -> bool:
    """Do two tensors share no element, as far as strides tell?

    Parts of one buffer lie apart in each of its rows: addresses are compared modulo every stride,
    as arcs of a circle.
    """
    first, other = x.data_ptr(), y.data_ptr()
    if first + extent(x) <= other or other + extent(y) <= first:
        return True
    strides = {z.stride(n) * z.element_size() for z in (x, y) for n in range(z.dim())}
    for circle in sorted(strides - {0}):
        distance = (other - first) % circle
        if _arc(x, circle) <= distance and distance + _arc(y, circle) <= circle:
            return True
    return False


def _arc(x: Tensor, circle: int) -> int:
    """From the first to the last byte of x, less the dims that go around the whole circle."""
    size = x.element_size()
    pairs = zip(x.shape, x.stride(), strict=True)
    return size + sum((n - 1) * stride * size for n, stride in pairs if stride * size % circle)


def _forward(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, extra: Any, scalars: Any, ints: Any
) -> Tensor:
    check_apart(out, q=q, k=k, v=v)
    _, lse = calls.forward(text_key, q, k, v, extra, scalars, ints, out)
    return lse


def _fake(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, extra: Any, scalars: Any, ints: Any
) -> Tensor:
    return q.new_empty(q.shape[:3], dtype=torch.float32)


def _refuse_gradients(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, extra: Any, *numbers: Any
) -> Tensor:
    given = (q, k, v, out, *extra)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if learns or have_tangents(*given):
        raise UnsupportedSpecError(
            ["out= has no derivative; call it under torch.no_grad(), or leave out= out"]
        )
    return _counted(text_key, q, k, v, out, extra, *numbers)


def _counted(text_key: str, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> Tensor:
    """The op below autograd, which learns of the write."""
    with torch._C._AutoDispatchBelowADInplaceOrView():
        lse: Tensor = torch.ops.attngen.fwd_out(text_key, q, k, v, out, *rest)
    count_write(out)
    return lse


def _refuse_vmap(*arguments: Any) -> Any:
    raise UnsupportedSpecError(["vmap over out= is not offered; fold samples into the batch"])


for _key in ("CUDA", "CPU"):
    _LIBRARY.impl("fwd_out", _forward, _key)
    _name = f"Autocast{_key}"
    _cast = ops.autocast(torch.ops.attngen.fwd_out, getattr(torch._C.DispatchKey, _name))
    _LIBRARY.impl("fwd_out", _cast, _name)
_LIBRARY.impl("fwd_out", _refuse_gradients, "Autograd")
_LIBRARY.impl("fwd_out", _counted, "ADInplaceOrView")  # in inference mode
torch.library.register_fake("attngen::fwd_out", _fake, lib=_LIBRARY)
torch.library.register_vmap("attngen::fwd_out", _refuse_vmap, lib=_LIBRARY)
