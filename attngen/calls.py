"""Calls on concrete tensors: checks, the choice of a kernel, allocation and launch.

What is settled for one layout (shapes, strides, dtypes, devices, numbers) is remembered, so that
the next call of that layout costs a look-up, the allocation of its results and the launch. Tensors
are (batch, heads, seqlen, dim) views; results are stored (batch, seqlen, heads, dim) and returned
as such views.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attngen import counters, interpreter, kv_cache, paged
from attngen.block_map import check_lists
from attngen.checks import check_descales, check_out, check_tensors
from attngen.config import AnyDecodeConfig
from attngen.decode import (
    counter_count,
    forward_direction,
    partial_shape,
    row_tiles,
    split_count,
)
from attngen.errors import DtypeError, SpecError
from attngen.fp8 import spread
from attngen.identity import parsed
from attngen.kernel import Prepared, Tensors
from attngen.masks import document_scratch
from attngen.memory import (
    Memory,
    addressable,
    aligned,
    bshd,
    float32,
    on_16_bytes,
    order_of,
    transposed,
)
from attngen.packed import (
    check_offsets,
    check_values,
    maxima_of_rows,
    packed_of,
    padded_rows,
)
from attngen.resolve import device_index_of, on_reset, resolve
from attngen.score_terms import Sums, placed
from attngen.shared_kv import key_of
from attngen.spec import DESCALES, AttentionSpec
from attngen.values import MAX_POSITION
from attngen.workload import Direction, Workload, bucket, in_chunk, packed_workload


class Counters(Memory):
    """Counters of a kernel, which are not allocated for each call; the last thing it takes."""

    def make(self, like: Tensor) -> Tensor:
        return counters.zeros(like, self.shape[0])


class Call(NamedTuple):
    """What is remembered for a layout."""

    run: Callable[[Tensors], None]
    device: int | None
    memory: list[Memory]
    """Of the results, then of the scratch."""
    aux: tuple[str, ...] = ()
    """Side outputs that follow out and lse."""
    places: AttentionSpec | None = None
    """Set if `extra` must be placed first, as kernels take it: the spec."""
    sequences: AttentionSpec | None = None
    """Set if the values of offsets must be looked at, on the CPU: the spec."""

    def repeat(self, tensors: list[Tensor | None]) -> bool:
        """Launch for tensors that have the addresses of those that kernels take; False if these
        must have their shapes, too."""
        if not isinstance(self.run, Prepared):
            return False
        if self.device is None or self.device == torch._C._cuda_getDevice():
            return self.run.repeat(tensors)
        with torch.cuda.device(self.device):
            return self.run.repeat(tensors)

    def launch(self, tensors: Tensors, count: int) -> None:
        """Launch for tensors as kernels take them, of which `count` are results and scratch."""
        if self.device is None and self.sequences is not None:
            extra = tensors[3 + count :]
            q: Tensor = tensors[0]  # type: ignore[assignment]  # never None
            k: Tensor = tensors[1]  # type: ignore[assignment]  # never None
            if self.sequences.has_lengths:
                paged.check_values(self.sequences, q.shape[2], k, extra)
            else:
                check_values(packed_of(self.sequences, extra), q.shape[2], k.shape[2])
        if self.device is None or self.device == torch._C._cuda_getDevice():
            self.run(tensors)
        else:
            with torch.cuda.device(self.device):
                self.run(tensors)


class Launched(NamedTuple):
    """A call of a layout that was remembered, as it was launched."""

    text_key: str
    call: Call
    inputs: Tensors
    made: list[Tensor]
    extra: Sequence[Tensor | None]


_CALLS: dict[tuple[Any, ...], Call] = {}
_MAX_CALLS = 4096
_LOCK = threading.Lock()
_resets = 0


def _forget() -> None:
    global _resets
    with _LOCK:
        _resets += 1
        _CALLS.clear()


def _remember(at: tuple[Any, ...], call: Call, resets: int) -> None:
    """Keep a call, unless what it was resolved from has been forgotten meanwhile."""
    with _LOCK:
        if resets != _resets:
            return
        if len(_CALLS) >= _MAX_CALLS:
            for oldest in list(_CALLS)[: _MAX_CALLS // 2]:
                del _CALLS[oldest]
        _CALLS[at] = call


on_reset(_forget)


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
    text_key = key_of(text_key, q, k, v)
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


def side_memory(aux: tuple[str, ...], q: Tensor, k: Tensor) -> list[Memory]:
    """What kernels write for side outputs; of max_logit, the largest score of each row."""
    batch, heads, rows, _ = q.shape
    return [float32(batch, heads, k.shape[2] if name == "col_sum" else rows) for name in aux]


def side_outputs(
    aux: tuple[str, ...], made: Sequence[Tensor], cu_seqlens_q: Tensor | None = None
) -> list[Tensor]:
    """The side outputs, from what kernels wrote; cu_seqlens_q of packed sequences."""

    def largest(x: Tensor) -> Tensor:
        if cu_seqlens_q is None:
            return x.amax(2)
        return maxima_of_rows(x.squeeze(0), cu_seqlens_q)

    pairs = zip(aux, made[: len(aux)], strict=True)
    return [largest(x) if name == "max_logit" else x for name, x in pairs]


def no_side_outputs(
    spec: AttentionSpec, extra: Sequence[Tensor | None], q: Tensor, k: Tensor
) -> list[Tensor]:
    """Those of a call in which nothing is seen."""
    fresh = [q.new_zeros(shape, dtype=torch.float32) for shape in side_shapes(spec, extra, q, k)]
    return [
        x.fill_(float("-inf")) if name == "max_logit" else x
        for name, x in zip(spec.aux, fresh, strict=True)
    ]


def side_shapes(
    spec: AttentionSpec, extra: Sequence[Tensor | None], q: Tensor, k: Tensor
) -> list[tuple[int, ...]]:
    """Shapes of the side outputs."""
    batch, heads, rows, _ = q.shape
    count = packed_of(spec, extra).num_seqs if spec.is_packed else batch
    shapes = {
        "max_logit": (count, heads),
        "col_sum": (batch, heads, k.shape[2]),
        "entropy": (batch, heads, rows),
    }
    return [shapes[name] for name in spec.aux]


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
    """The call of a layout that kernels can take; `tiles` are what descriptors must address.

    `also` is the layout as it was given, if `extra` alone had to be placed for this one: it is
    remembered, too. `extra` ends with tensors that plan() takes as `buffers` names them. `out` is
    the caller's tensor for the first result.
    """
    at = (*layout_of(text_key, (*inputs, *extra), scalars, ints), *buffers)
    if out is not None:
        at = (*at, "out", out.shape, out.stride(), out.dtype, out.device)
    spec = parsed(text_key)
    call = _CALLS.get(at)
    resets = _resets
    if call is not None:
        if also is not None and also != at:
            _remember(also, call._replace(places=spec), resets)
        return call
    named = dict(zip(spec.int_args, ints, strict=True))
    q, k, v, *_ = tiles
    batch, heads, seqlen_q, dim = q.shape
    dim_v = v.shape[3]
    left, right = named.get("window_left"), named.get("window_right")
    if left is not None and spec.is_causal:
        right = 0
    if "chunk" in named:
        left, right = in_chunk((left, right), named["chunk"], spec.is_causal)
    seqlen_k = paged.key_capacity(spec, k, extra)
    sizes = Workload(batch, heads, k.shape[1], seqlen_q, seqlen_k)
    if spec.is_packed:
        count = packed_of(spec, extra).num_seqs
        sizes = packed_workload(count, heads, k.shape[1], seqlen_q, k.shape[2])
    if spec.packs_queries:
        count = paged.num_seqs(spec, extra)
        sizes = packed_workload(count, heads, k.shape[1], seqlen_q, k.shape[2])
        sizes = replace(sizes, seqlen_k=seqlen_k)
    place = bucket(direction, sizes, (left, right), batch_invariant=spec.batch_invariant)
    if spec.paged:
        place = replace(place, page_size=k.shape[2])
    device = device_index_of(q)
    resolved = resolve(text_key, place, device)
    kernel = resolved.kernel
    is_hopper = kernel.config.lowering == "hopper"
    captured = is_hopper and direction != "decode" and _is_captured(device)
    mixed = is_hopper and any(x.dtype != q.dtype for x in tiles)  # the gradient of a partial out
    addressed = tiles if out is None else (*tiles, out)
    has_others = kernel is not resolved.by_pointer
    if captured or mixed or (has_others and not addressable(*addressed)):
        kernel = resolved.by_pointer
    memory = [*results]
    if spec.is_fp8 and kernel.config.lowering == "hopper":
        memory.append(transposed(tiles[2]))
    if isinstance(kernel.config, AnyDecodeConfig):
        total = seqlen_q if spec.packs_queries else None
        sms = resolved.gpu.sm_count
        memory += partials(kernel.config, sizes, (left, right), dim_v, sms, total)
    if spec.is_packed and kernel.config.lowering == "hopper" and direction == "fwd":
        memory.append(order_of(packed_of(spec, extra).num_seqs))
    if direction == "bwd":
        padded = -(-seqlen_q // 128) * 128
        if spec.is_packed and kernel.config.lowering == "hopper":
            padded = padded_rows(seqlen_q, packed_of(spec, extra).num_seqs)
        memory.append(float32(batch, heads, spec.row_numbers, padded))
        if kernel.config.sums_dq:
            memory.append(float32(batch, heads, seqlen_q, dim))
    if spec.documents:
        sizes_of = document_scratch(batch, seqlen_q, k.shape[2])
        memory.append(float32(*sizes_of)._replace(dtype=torch.int64))
    numbers = numbers_of(spec, named, seqlen_q, seqlen_k)
    numbers |= zip(spec.scalar_args, scalars, strict=True)
    keywords = tuple(name.removeprefix("dropout_") for name in spec.tensor_args) + buffers
    run = kernel.prepared(numbers, keywords)
    aux = spec.aux if direction != "bwd" else ()
    has_sequences = spec.is_packed or spec.has_lengths
    call = Call(run, device, memory, aux, sequences=spec if has_sequences else None)
    if not captured:
        _remember(at, call, resets)
        if also is not None and also != at:
            _remember(also, call._replace(places=spec), resets)
    return call


def partials(
    config: AnyDecodeConfig,
    sizes: Workload,
    window: tuple[int | None, int | None],
    dim_v: int,
    sm_count: int,
    total_q: int | None = None,
) -> list[Memory]:
    """Scratch of a decode's splits; none if there is one. `total_q` is of packed queries."""
    rows, group, seen = sizes.seqlen_q, sizes.group_size, sizes.seqlen_k
    left, right = window
    if left is not None and right is not None and not config.split_keys:
        seen = min(seen, left + right + rows)
    tiles = sizes.batch * row_tiles(config, rows, group)
    total = sizes.batch * rows if total_q is None else total_q
    splits = split_count(config, tiles * sizes.num_heads_kv, seen, sm_count)
    if splits == 1:
        return []
    if total_q is not None:
        tiles = total_q * group // config.block_m + sizes.batch + 2
    made = [float32(*partial_shape(splits, total * sizes.num_heads_q, dim_v))]
    count = counter_count(config, tiles, sizes.num_heads_kv)
    return [*made, Counters((count,), (1,), torch.int32)] if count else made


def _is_captured(device: int | None) -> bool:
    """Is a CUDA graph being captured? plan() of a hopper file may copy its table of work to the
    device, which a capture forbids."""
    return device is not None and torch.cuda.is_current_stream_capturing()


def numbers_of(
    spec: AttentionSpec, named: dict[str, int], seqlen_q: int, seqlen_k: int
) -> dict[str, Any]:
    """The ints of a call as the emitted file's plan() takes them."""
    placed = ("q_start", "q_step", "k_start", "k_step", "batch_start", "head_start")
    numbers: dict[str, Any] = {name: named[name] for name in placed if name in named}
    for side in ("window_left", "window_right"):
        if side in named:
            numbers[side] = min(named[side], MAX_POSITION)
    if "chunk" in named:
        numbers["chunk"] = named["chunk"]
    if spec.aligns_rows:
        total_q, total_k = named["seqlen_q_total"], named["seqlen_k_total"]
        total_q = seqlen_q if total_q < 0 else total_q
        total_k = seqlen_k if total_k < 0 else total_k
        numbers["align"] = total_k - total_q if named["bottom_right"] else 0
        if spec.tree_mask:
            numbers["tree_end"] = total_k
    if (spec.is_packed or spec.has_lengths) and spec.aligns_rows:  # each sequence has its own
        numbers["align"] = int(bool(named["bottom_right"]))
    return numbers


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
