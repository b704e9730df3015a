"""Calls on concrete tensors: checks, allocation and launch.

What is settled for one layout (shapes, strides, dtypes, devices, numbers) is remembered, so that
the next call of that layout costs a look-up, the allocation of its results and the launch. Tensors
are (batch, heads, seqlen, dim) views; results are stored (batch, seqlen, heads, dim) and returned
as such views.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen import interpreter, kv_cache, paged
from attngen.block_map import check_lists
from attngen.checks import check_out, check_tensors
from attngen.decode import forward_direction
from attngen.errors import DtypeError, SpecError
from attngen.fp8 import check_descales, spread
from attngen.identity import parsed
from attngen.kernel import Tensors
from attngen.memory import Memory, aligned, bshd, float32, on_16_bytes
from attngen.one_row import unordered_call
from attngen.packed import check_offsets, packed_of
from attngen.remembered import Remembered
from attngen.score_terms import Sums, placed
from attngen.settle import Call, settled
from attngen.shared_kv import key_of
from attngen.side_outputs import no_side_outputs, side_memory, side_outputs
from attngen.spec import DESCALES, AttentionSpec
from attngen.workload import Direction


class Launched(NamedTuple):
    """A call of a layout that was remembered, as it was launched."""

    text_key: str
    call: Call
    inputs: Tensors
    made: list[Tensor]
    extra: Sequence[Tensor | None]


_CALLS: Remembered[tuple[Any, ...], Call] = Remembered(4096)


def forward(
    text_key: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
    out: Tensor | None = None,
) -> list[Tensor]:
    """[out, lse] of `attngen::fwd`, and the side outputs of its spec; into `out` if it is given."""
    inputs: Tensors = (q, k, v)
    text_key, ints = unordered_call(key_of(text_key, q, k, v), q, ints)
    at = layout_of(text_key, (*inputs, *extra), scalars, ints)
    if out is not None:
        at = (*at, "out", out.shape, out.stride(), out.dtype, out.device)
    call = _CALLS.get(at)
    is_known = call is not None
    if call is None or _is_off(*inputs, *extra, out):
        is_known = False
        spec = checked_spec(text_key, q, k, v, extra)
        batch, heads, seqlen_q, _ = q.shape
        dtype = torch.float32 if ints[0] else getattr(torch, spec.out_dtype)
        result = bshd(q, v.shape[3], dtype)
        if out is not None:
            check_out(out, result.shape, dtype, q)
            result = Memory(result.shape, out.stride(), dtype)
        lse = float32(batch, heads, seqlen_q)
        if _is_nothing(spec, q, v, extra):
            return [
                (result.make(q) if out is None else out).zero_(),
                lse.make(q).fill_(float("-inf")),
                *no_side_outputs(spec, extra, q, k),
            ]
        inputs = tiles = (aligned(q), aligned(k), aligned(v))
        also = at if _are_same(inputs, (q, k, v)) else None
        extra = placed(spec, extra, q, k)
        results = [result, lse, *side_memory(spec.aux, q, k)]
        family = forward_direction(spec, seqlen_q)
        buffers: tuple[str, ...] = ()
        call = _settled(
            family, text_key, inputs, tiles, extra, scalars, ints, results, also, buffers, out
        )
    elif call.places is not None:
        extra = placed(call.places, extra, q, k)
    made = launch(call, inputs, extra, out)
    seen = getattr(_WATCHED, "seen", None)
    if is_known and seen is not None:
        seen.append(Launched(text_key, call, inputs, made, extra))
    if not call.aux:
        return made[:2]
    first = None if call.sequences is None else packed_of(call.sequences, extra).cu_seqlens_q
    return [*made[:2], *side_outputs(call.aux, made[2:], first)]


_WATCHED = threading.local()


@contextmanager
def watched() -> Iterator[list[Launched]]:
    """To the list, what `forward` launches within, in this thread, of layouts it knew before."""
    before = getattr(_WATCHED, "seen", None)
    _WATCHED.seen = []
    try:
        yield _WATCHED.seen
    finally:
        _WATCHED.seen = before


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
    scalars: Sequence[float],
    ints: Sequence[int],
    needs: Sequence[bool] = (),
) -> list[Tensor]:
    """[dq, dk, dv] of `attngen::bwd`, and the gradients of `spec.gradient_args` that `needs` asks
    for."""
    spec = parsed(text_key)
    if spec.is_fp8:
        return _dequantized_backward(text_key, q, k, v, out, lse, dout, dlse, extra, scalars, ints)
    sums = Sums(spec, needs) if any(needs) else None
    terms = {} if sums is None else dict(zip(spec.tensor_args, extra, strict=True))
    buffers: list[Tensor] = []
    given = inputs = (q, k, v, out, lse, dout, dlse)
    at = (*layout_of(text_key, (*inputs, *extra), scalars, ints), *(needs if sums else ()))
    call = _CALLS.get(at)
    if call is None or _is_off(*inputs, *extra):
        checked_spec(text_key, q, k, v, extra)
        results = [bshd(x, x.shape[3], x.dtype) for x in (q, k, v)]
        if _is_nothing(spec, q, v, extra):
            nothing = [each.make(q).zero_() for each in results]
            return nothing if sums is None else nothing + sums.zeros(terms)
        inputs = _ready(*inputs)
        q, k, v, out, lse, dout, _ = inputs
        names: tuple[str, ...] = ()
        if sums is not None:
            buffers, names = sums.made(terms, q, k), sums.names
        tensors = [*placed(spec, extra, q, k), *buffers]
        also, tiles = at if _are_same(inputs, given) else None, (q, k, v, dout)
        call = _settled(
            "bwd", text_key, inputs, tiles, tensors, scalars, ints, results, also, names
        )
    else:
        buffers = [] if sums is None else sums.made(terms, q, k)
        tensors = [*(extra if call.places is None else placed(spec, extra, q, k)), *buffers]
    made = launch(call, inputs, tensors)
    if sums is None:
        return made[:3]
    assert dout is not None  # see _ready
    return [*made[:3], *sums.gradients(terms, buffers, out, lse, dout)]


def _ready(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """What a backward takes, each such that kernels can address it."""
    return (
        aligned(q),
        aligned(k),
        aligned(v),
        on_16_bytes(out if out.stride(3) == 1 else out.contiguous()),
        on_16_bytes(lse.contiguous()),
        aligned(torch.zeros_like(out) if dout is None else dout),
        None if dlse is None else on_16_bytes(dlse.contiguous()),
    )


def _dequantized_backward(
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
    """The same for FP8 inputs, in bfloat16: a gradient of x * descale, times descale."""
    spec = checked_spec(text_key, q, k, v, extra)
    wide = spec.dequantized
    scales = [
        spread(descale, x)
        for descale, x in zip(extra[-len(DESCALES) :], (q, k, v), strict=True)
        if descale is not None
    ]
    operands = [(x.float() * scale).bfloat16() for x, scale in zip((q, k, v), scales, strict=True)]
    rest = extra[: -len(DESCALES)]
    q, k, v = operands
    grads = backward(wide.text_key, q, k, v, out, lse, dout, dlse, rest, scalars, ints)
    return [grad.mul_(scale) for grad, scale in zip(grads, scales, strict=True)]


def _is_nothing(spec: AttentionSpec, q: Tensor, v: Tensor, extra: Sequence[Tensor | None]) -> bool:
    """Does no query see any key, by the shapes?"""
    if q.numel() == 0 or v.numel() == 0:
        return True
    if spec.packs_queries:
        return paged.num_seqs(spec, extra) == 0
    return spec.is_packed and packed_of(spec, extra).num_seqs == 0


def _are_same(ready: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> bool:
    """Was nothing copied or made?"""
    return all(x is y for x, y in zip(ready, given, strict=True))


def layout_of(
    text_key: str, tensors: Tensors, scalars: Sequence[float], ints: Sequence[int]
) -> tuple[Any, ...]:
    return (
        text_key,
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors],
        *scalars,
        *ints,
    )


def _is_off(*tensors: Tensor | None) -> bool:
    """Does any pointer miss a multiple of 16 bytes?"""
    bits = 0
    for x in tensors:
        if x is not None:
            bits |= x.data_ptr()
    return bits % 16 != 0


def _settled(
    direction: Direction,
    text_key: str,
    inputs: Tensors,
    tiles: tuple[Tensor, ...],
    extra: Sequence[Tensor | None],
    scalars: Sequence[float],
    ints: Sequence[int],
    results: list[Memory],
    also: tuple[Any, ...] | None = None,
    buffers: tuple[str, ...] = (),
    out: Tensor | None = None,
) -> Call:
    """`settle.settled`, remembered.

    `also` is the layout as it was given, if `extra` alone had to be placed for this one: it is
    remembered, too.
    """
    at = (*layout_of(text_key, (*inputs, *extra), scalars, ints), *buffers)
    if out is not None:
        at = (*at, "out", out.shape, out.stride(), out.dtype, out.device)
    call, lasts, resets = _CALLS.get(at), True, _CALLS.resets
    if call is None:
        call, lasts = settled(
            direction, text_key, tiles, extra, scalars, ints, results, buffers, out
        )
        if lasts:
            _CALLS.keep(at, call, resets)
    if lasts and also is not None and also != at:
        _CALLS.keep(also, call._replace(places=parsed(text_key)), resets)
    return call


def launch(
    call: Call, inputs: Tensors, extra: Sequence[Tensor | None], out: Tensor | None = None
) -> list[Tensor]:
    """Run a call's kernel on its device, into new memory, and `out` if it is given."""
    like: Tensor = inputs[0]  # type: ignore[assignment]  # q, never None
    if out is None:
        made = [each.make(like) for each in call.memory]
    else:
        made = [out, *(each.make(like) for each in call.memory[1:])]
    call.launch((*inputs, *made, *extra), len(inputs) - 3 + len(made))
    return made


def checked_spec(
    text_key: str, q: Tensor, k: Tensor, v: Tensor, extra: Sequence[Tensor | None]
) -> AttentionSpec:
    """Refuse what a kernel must never see; the spec of the rest."""
    spec = parsed(text_key)
    check_tensors(q, k, v, spec.head_dim, spec.head_dim_v, is_paged=spec.paged)
    for name, x in (("q", q), ("k", k), ("v", v)):
        wanted = spec.dtype if name == "q" or spec.kv_dtype is None else spec.kv_dtype
        if x.dtype != getattr(torch, wanted):
            raise DtypeError(
                f"{name} is {x.dtype} but the spec says dtype={wanted}; cast it, or use a "
                f"spec of that dtype"
            )
    if q.is_cpu and not interpreter.enabled():
        raise SpecError(
            "q is on the CPU but this machine has a GPU; move the tensors with .cuda(), or set "
            "ATTNGEN_INTERPRET=1 to run Triton's interpreter"
        )
    if spec.fp8_scale is not None:
        check_descales(spec.fp8_scale, q, k, extra[-len(DESCALES) :])
    if spec.is_quantized:
        kv_cache.check_descales(spec, q, k, extra)
    if spec.is_packed:
        check_offsets(spec, q, extra)
    if spec.block_map:
        check_lists(extra[spec.tensor_args.index("block_map")], q, k)
    if spec.has_lengths:
        paged.check_lengths(spec, q, extra)
    if spec.paged:
        paged.check_page_size(k)
    return spec
