"""The short way of a call: a call like one that was made before, without looking at it again.

All that follows from how a call looks was settled then: whether it may be, what is launched, how
its results lie. A call looks like another if the same arguments are given, tensors with the same
layouts and everything else equal, and if nothing around it would act on them: autograd, a mode, a
transform. Arguments are not told apart by name here, so that one more needs nothing: a call can be
repeated if each tensor that its kernel takes has the address of the argument of that name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attngen import calls, in_place
from attngen.identity import parsed
from attngen.memory import Memory
from attngen.remembered import Remembered
from attngen.settle import Call, Counters


class _Known(NamedTuple):
    """How a call is repeated."""

    call: Call
    """What `calls` remembers of it."""
    memory: list[Memory]
    """Of the results as they are returned, then of the scratch."""
    counters: Counters | None
    order: list[int]
    """Of each tensor that the kernel takes, its number among the tensors of the call, those of
    `memory`, and None."""
    views: list[Any]
    """Their shapes and strides, as the kernel takes them; None for None."""
    at: tuple[int, ...]
    """Which of them are returned."""
    fresh: int
    """How many of them are results and scratch."""
    out: int | None
    """The caller's tensor for the result among those of the call."""
    extents: tuple[int, ...]
    """Bytes that q, k, v and it span; none without it."""


_PLAIN = (Tensor, torch.nn.Parameter)
_CONSTANTS = (bool, int, float, str, type(None))
_KNOWN: Remembered[Any, _Known] = Remembered(4096)
_ALLOCATE: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
"""What code of Inductor allocates with: no dispatcher."""

_F = TypeVar("_F", bound=Callable[..., Any])


def repeated(call: _F) -> _F:
    """`attention(q, k, v, **options)` that takes the short way where it can."""

    @functools.wraps(call)
    def short(q: Any, k: Any, v: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(q, k, v, **named)
        owner = torch.are_deterministic_algorithms_enabled()
        return _made(owner, q, k, v, named, call, ())

    return short  # type: ignore[return-value]  # of the same signature


def repeated_method(call: _F) -> _F:
    """The same for a method of an object whose `_owner` is equal for equal objects."""

    @functools.wraps(call)
    def short(self: Any, q: Any, k: Any, v: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(self, q, k, v, **named)
        return _made(self._owner, q, k, v, named, call, (self,))

    return short  # type: ignore[return-value]  # of the same signature


def _made(
    owner: Any, q: Any, k: Any, v: Any, named: dict[str, Any], call: Any, lead: tuple[Any, ...]
) -> Any:
    """A call by the short way if it is known, else by the other one, which it is learnt from."""
    tensors = [q, k, v]
    at = _key(owner, tensors, named)
    if at is None:
        return call(*lead, q, k, v, **named)
    try:
        known = _KNOWN.get(at)
    except TypeError:  # sizes without a value
        return call(*lead, q, k, v, **named)
    if known is not None:
        bits = 0
        for x in tensors:
            bits |= x.data_ptr()
        if bits % 16 == 0 and (known.out is None or _is_apart(known, tensors[known.out], tensors)):
            return _again(known, tensors)
    resets = _KNOWN.resets
    with calls.watched() as seen:
        result = call(*lead, q, k, v, **named)
    if known is None and len(seen) == 1:
        names = ["q", "k", "v", *(name for name, x in named.items() if type(x) in _PLAIN)]
        found = _learnt(seen[0], dict(zip(names, tensors, strict=True)), result)
        if found is not None:
            _KNOWN.keep(at, found, resets)
    return result


def _key(owner: Any, tensors: list[Any], named: dict[str, Any]) -> tuple[Any, ...] | None:
    """How a call looks, and to `tensors` those of its options; None if it cannot be repeated."""
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._is_any_autocast_enabled()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    ):
        return None
    q, k, v = tensors
    if type(q) not in _PLAIN or type(k) not in _PLAIN or type(v) not in _PLAIN:
        return None
    key: list[Any] = [owner]
    for name, x in named.items():
        kind = type(x)
        if kind in _PLAIN:
            tensors.append(x)
            key.append(name)
        elif kind in _CONSTANTS:
            key += (name, kind, x)
        elif kind is tuple and all(type(y) in _CONSTANTS for y in x):
            key += (name, *map(type, x), x)
        else:
            return None
    learns = torch.is_grad_enabled()
    try:
        for x in tensors:
            if (learns and x.requires_grad) or x.is_neg():
                return None
            key += (x.shape, x.stride(), x.dtype, x.device)
        if v.shape[-1] != k.shape[-1]:
            key.append(v.data_ptr() == k.data_ptr())  # then it may be k's first columns
    except (RuntimeError, IndexError):  # no strides, no dims
        return None
    return tuple(key)


def _again(known: _Known, tensors: list[Any]) -> Any:
    """Launch what is known for these tensors."""
    q, device = tensors[0], known.call.device
    if _ALLOCATE is not None and device is not None and device == torch._C._cuda_getDevice():
        for shape, strides, dtype in known.memory:
            tensors.append(_ALLOCATE(shape, strides, dtype))
    else:
        for each in known.memory:
            tensors.append(each.make(q))
    if known.counters is not None:
        tensors.append(known.counters.make(q))
    tensors.append(None)
    given = [tensors[n] for n in known.order]
    if not known.call.repeat(given):
        pairs = zip(given, known.views, strict=True)
        views = tuple(x if x is None else _as(x, *view) for x, view in pairs)
        known.call.launch(views, known.fresh)
    if known.out is not None:
        in_place.count_write(tensors[known.out])
    first, *rest = known.at
    return (tensors[first], *(tensors[n] for n in rest)) if rest else tensors[first]


def _is_apart(known: _Known, out: Tensor, tensors: list[Any]) -> bool:
    """Does out lie before or behind each of q, k and v? Else the other way looks closer."""
    begin = out.data_ptr()
    *sizes, size = known.extents
    for x, extent in zip(tensors, sizes, strict=False):
        at = x.data_ptr()
        if at < begin + size and begin < at + extent:
            return False
    return True


def _as(x: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """x as the kernel takes it."""
    return x.detach().as_strided(shape, strides, x.storage_offset())


def _learnt(launched: calls.Launched, given: dict[str, Tensor], result: Any) -> _Known | None:
    """How to repeat a call; None if it took more than its arguments' addresses say."""
    results = result if type(result) is tuple else (result,)
    made = launched.made
    if len(results) > 2 or any(type(x) not in _PLAIN for x in results):
        return None
    numbers = {name: n for n, name in enumerate(given)}
    order: list[int] = []
    memory: list[Memory] = []
    at: list[int] = []
    names = ("q", "k", "v", *(None for _ in made), *parsed(launched.text_key).tensor_args)
    tensors = (*launched.inputs, *made, *launched.extra)
    for place, (name, x) in enumerate(zip(names, tensors, strict=True), -3):
        if place == 0 and "out" in given:
            name = "out"
        if x is None:
            order.append(-1)
        elif name is not None:
            mine = given.get(name)
            if mine is None or not _is_same(x, mine):
                return None
            order.append(numbers[name])
        else:
            shown = next((y for y in results if _is_same(x, y)), x)
            order.append(len(given) + len(memory))
            if isinstance(launched.call.memory[place], Counters):
                continue
            memory.append(Memory(tuple(shown.shape), shown.stride(), x.dtype))
    if not set(order).issuperset(range(len(given))):
        return None  # of a tensor that no kernel takes, the value may matter
    for number, x in enumerate(results):
        if not _is_same(x, made[number]):
            return None
        at.append(order[3 + number])
    views = [None if x is None else (x.shape, x.stride()) for x in tensors]
    last = launched.call.memory[-1]
    counters = last if isinstance(last, Counters) else None
    extents: tuple[int, ...] = ()
    if "out" in given:
        extents = tuple(in_place.extent(given[name]) for name in ("q", "k", "v", "out"))
    return _Known(
        launched.call,
        memory,
        counters,
        order,
        views,
        tuple(at),
        len(made),
        numbers.get("out"),
        extents,
    )


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Do two tensors that hold something begin at one address, with elements of one dtype?"""
    return x.data_ptr() == y.data_ptr() and x.dtype == y.dtype and x.numel() > 0
