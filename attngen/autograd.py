"""What the Autograd key makes of the ops: their derivatives, by one Function each.

It is implemented here rather than by `torch.library.register_autograd`, so that a call without
gradients goes straight on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from attngen import calls, recompute, sharding
from attngen.dual_tensors import dual, have_tangents, may_have_tangents, primal_of, tangent_of
from attngen.fp8 import check_gradient_dtypes
from attngen.identity import parsed
from attngen.paged import refuse_gradients
from attngen.text_keys import with_aux

_USE_MATH = "compute it with torch.nn.functional.scaled_dot_product_attention under SDPBackend.MATH"
_NO_FP8 = f"second derivatives of FP8 inputs are not built; dequantise them, or {_USE_MATH}"
_PLAIN = (Tensor, torch.nn.Parameter)
# Compiled autograd asks each Function for it; the single-level base has none.
_COMPILED_KEY = staticmethod(torch.autograd.Function._compiled_autograd_key)


def forward(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, extra: Any, scalars: Any, ints: Any
) -> Any:
    if have_tangents(q, k, v, *extra):
        return _forward_with_tangents(text_key, q, k, v, extra, scalars, ints)
    direct = is_plain(q, k, v) and have_plain_types(extra)
    if needs_gradient(q, k, v, extra):
        check_gradient_dtypes(q, k, v)
        refuse_gradients(parsed(text_key))
        sharding.meet(q, k, v)
        function = AttngenDirect if direct else AttngenAttention
        return list(_apply(function, text_key, scalars, ints, q, k, v, *extra))
    if direct:
        return calls.forward(text_key, q, k, v, extra, scalars, ints)
    sharding.meet(q, k, v)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.attngen.fwd(text_key, q, k, v, extra, scalars, ints)


def _forward_with_tangents(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, extra: Any, scalars: Any, ints: Any
) -> Any:
    """out and lse as dual tensors, of one kernel."""
    if have_tangents(*extra):
        names = zip(parsed(text_key).tensor_args, extra, strict=True)
        why = ", ".join(name for name, x in names if tangent_of(x) is not None)
        raise NotImplementedError(
            f"attngen::fwd has no forward-mode derivative by {why}; {_USE_MATH}"
        )
    if needs_gradient(q, k, v, extra):  # out gets a gradient, too
        return list(_apply(AttngenAttention, text_key, scalars, ints, q, k, v, *extra))
    primals, moved = [primal_of(x) for x in (q, k, v)], [tangent_of(x) for x in (q, k, v)]
    key = with_aux(text_key, ())
    out, lse, tout, tlse = torch.ops.attngen.jvp(key, *primals, *moved, extra, scalars, ints)
    aux = []
    if key != text_key:
        _, _, *aux = torch.ops.attngen.fwd(text_key, *primals, extra, scalars, ints)
    return [dual(out, tout), dual(lse, tlse), *aux]


def jvp(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    extra: Sequence[Tensor | None],
    scalars: Any,
    ints: Any,
) -> Any:
    def run(*tensors: Tensor | None) -> Any:
        return torch.ops.attngen.jvp(text_key, *tensors[:6], list(tensors[6:]), scalars, ints)

    def recomputed(*tensors: Any) -> list[Tensor]:
        return recompute.tangents(text_key, *tensors[:6], tensors[6:], scalars, ints)

    return _differentiable(text_key, run, recomputed, (q, k, v, tq, tk, tv, *extra))


def backward(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    extra: Sequence[Tensor | None],
    scalars: Any,
    ints: Any,
    needs: Sequence[bool] = (),
) -> Any:
    given = (q, k, v, out, lse, dout, dlse)
    plain = is_plain(*given) and have_plain_types(extra)
    if plain and not (may_have_tangents() or torch.is_grad_enabled() or _is_batched(dout, dlse)):
        return calls.backward(text_key, *given, extra, scalars, ints, needs)

    def run(*tensors: Tensor | None) -> Any:
        lists = (list(tensors[5:]), scalars, ints)
        inputs = (*tensors[:3], out, lse, *tensors[3:5])
        return torch.ops.attngen.bwd(text_key, *inputs, *lists, *([needs] if needs else []))

    def recomputed(*tensors: Any) -> list[Tensor]:
        q, k, v, dout, dlse, *others = tensors
        inputs = (q, k, v, dout, dlse, others)
        return recompute.gradients(text_key, *inputs, scalars, ints, needs)

    return _differentiable(text_key, run, recomputed, (q, k, v, dout, dlse, *extra))


def _differentiable(
    text_key: str, run: Any, recomputed: Any, tensors: Sequence[Tensor | None]
) -> Any:
    """The results of an op whose results are derivatives; out and lse count as made of q, k and
    v."""
    moves = have_tangents(*tensors)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if parsed(text_key).is_fp8:
        recomputed = _refuse_fp8
    if moves:
        return recomputed(*tensors)
    if learns:
        return list(_apply(_Again, run, recomputed, *tensors))
    with torch._C._AutoDispatchBelowAutograd():
        return run(*tensors)


def _refuse_fp8(*tensors: Tensor | None) -> list[Tensor]:
    raise NotImplementedError(_NO_FP8)


def needs_gradient(q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor | None]) -> bool:
    if not torch.is_grad_enabled():
        return False
    if q.requires_grad or k.requires_grad or v.requires_grad:
        return True
    return any(x is not None and x.requires_grad for x in extra)


def is_plain(*tensors: Tensor | None) -> bool:
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


def have_plain_types(extra: Sequence[Tensor | None]) -> bool:
    """Is no tensor of `extra` of a subclass? A meta one among others is for the checks to name."""
    return all(x is None or type(x) in _PLAIN for x in extra)


def _is_batched(*grads: Tensor | None) -> bool:
    """By autograd's own vmap (`is_grads_batched=True`)?"""
    is_legacy = torch._C._functorch.is_legacy_batchedtensor
    return any(x is not None and is_legacy(x) for x in grads)


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
        with _below():
            return tuple(torch.ops.attngen.fwd(text_key, q, k, v, list(extra), scalars, ints))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        text_key, ctx.scalars, ctx.ints, q, k, v, *extra = inputs
        ctx.full_key, ctx.text_key = text_key, with_aux(text_key, ())
        out, lse, *aux = output
        ctx.save_for_backward(q, k, v, out, lse, *extra)
        if aux:
            ctx.mark_non_differentiable(*aux)
        if may_have_tangents():
            ctx.save_for_forward(q, k, v, *extra)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, lse, *extra = ctx.saved_tensors
        dout, dlse, *_ = grads
        nothing = (None,) * (6 + len(extra))
        if dout is None and dlse is None:
            return nothing
        tensors = (q, k, v, out, lse, dout, dlse)
        plain = is_plain(*tensors) and have_plain_types(extra)
        direct = plain and not torch.is_grad_enabled() and not _is_batched(*grads)
        direct = direct and not have_tangents(*tensors)
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

    @staticmethod
    def jvp(ctx: Any, *moved: Any) -> tuple[Tensor, ...]:
        q, k, v, *extra = ctx.saved_tensors
        primals = [primal_of(x) for x in (q, k, v)]
        arguments = (ctx.text_key, *primals, *moved[3:6], extra, ctx.scalars, ctx.ints)
        _, _, tout, tlse = torch.ops.attngen.jvp(*arguments)
        return tout, tlse, *(None,) * len(parsed(ctx.full_key).aux)


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


class _Again(torch.autograd.function._SingleLevelFunction):
    """An op whose results are derivatives, under autograd: computed by kernels, and if they are
    differentiated again, by `recompute`."""

    _compiled_autograd_key = _COMPILED_KEY

    @staticmethod
    def forward(run: Any, recomputed: Any, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with _below():
            return tuple(run(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.recomputed, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        is_further = torch.is_grad_enabled()
        with torch.enable_grad():
            # Copies: one tensor may stand in several places.
            own = [x if x is None else x.view_as(x) for x in tensors]
            wanted = [x for x, need in zip(own, needed, strict=True) if need and x is not None]
            pairs = zip(ctx.recomputed(*own), grads, strict=True)
            given = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
            found: list[Tensor | None] = [None] * len(wanted)
            if given and wanted:
                found = list(
                    torch.autograd.grad(
                        [y for y, _ in given],
                        wanted,
                        [g for _, g in given],
                        allow_unused=True,
                        create_graph=is_further,
                    )
                )
        return (None, None, *(found.pop(0) if need else None for need in needed))


@contextmanager
def _below() -> Iterator[None]:
    """Dispatch below autograd. A Function switches derivatives off for its forward: the further
    levels of torch.func, which are below, need them."""
    if not torch._C._are_functorch_transforms_active():
        with torch._C._AutoDispatchBelowAutograd():
            yield
        return
    on = torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True)
    with on[0], on[1], torch._C._AutoDispatchBelowAutograd():
        yield


def _apply(function: Any, *arguments: Any) -> Any:
    if torch._C._are_functorch_transforms_active():
        with enable_single_level_autograd_function():
            return function.apply(*arguments)
    return function.apply(*arguments)
