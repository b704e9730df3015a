"""Launching compiled kernels without Triton's per-call argument analysis.

`kernel[grid](...)` specialises every argument anew, which costs more host time than all the rest of
a call. Emitted kernels specialise by value on few of their arguments (the strides of results), so
the compiled kernel is remembered under what can change it: tensor dtypes and their 16-byte
alignment, the values of specialised ints, and which ints need 64 bits. Triton releases whose
launcher has not been checked go the ordinary way.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton

CHECKED = ("3.6",)
_MAX_COMPILED = 4096
_INT32 = 1 << 31

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_positions: dict[Any, _Positions] = {}
_is_checked = triton.__version__.rsplit(".", 1)[0] in CHECKED


class _Positions(NamedTuple):
    """Which arguments of a kernel choose its compiled form."""

    tensors: tuple[int, ...]
    descriptors: tuple[int, ...]
    by_value: Any
    """Gives the ints that are specialised by value."""
    sizes: Any
    """Gives the other ints, which matter only where they need 64 bits."""


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Any) -> None:
    """Run a Triton kernel on the current stream, compiling it if need be."""
    if not _is_checked:
        kernel[grid](*arguments, **constants)
        return
    device = torch.cuda.current_device()
    at = (kernel, device, *constants.values(), *key_of(kernel, arguments))
    found = _compiled.get(at)
    if found is None:
        if len(_compiled) >= _MAX_COMPILED:
            _compiled.clear()
        made = kernel[grid](*arguments, **constants)
        tail = tuple(constants[p.name] for p in kernel.params[len(arguments) :])
        _compiled[at] = (made, tail)
        return
    made, tail = found
    hooks = triton.knobs.runtime
    enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
    stream = torch._C._cuda_getCurrentRawStream(device)
    metadata = None
    if enter is not None:
        metadata = made.launch_metadata(grid, stream, *arguments, *tail)
    made.run(
        *grid,
        stream,
        made.function,
        made.packed_metadata,
        metadata,
        enter,
        leave,
        *arguments,
        *tail,
    )


def key_of(kernel: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What of the arguments chooses the compiled kernel."""
    positions = _positions.get(kernel)
    if positions is None:
        positions = _positions[kernel] = _positions_of(kernel, arguments)
    tensors = [arguments[i] for i in positions.tensors]
    return (
        *[(x.dtype, x.data_ptr() % 16) for x in tensors],
        *[arguments[i].base.dtype for i in positions.descriptors],
        positions.by_value(arguments),
        max(positions.sizes(arguments)) >= _INT32,
    )


def _positions_of(kernel: Any, arguments: tuple[Any, ...]) -> _Positions:
    tensors: list[int] = []
    descriptors: list[int] = []
    by_value: list[int] = []
    sizes: list[int] = []
    for index, (argument, parameter) in enumerate(zip(arguments, kernel.params, strict=False)):
        if isinstance(argument, torch.Tensor):
            tensors.append(index)
        elif isinstance(argument, int):
            (sizes if parameter.do_not_specialize else by_value).append(index)
        elif not isinstance(argument, float):
            descriptors.append(index)
    return _Positions(
        tuple(tensors),
        tuple(descriptors),
        itemgetter(*by_value) if by_value else lambda arguments: (),
        itemgetter(*sizes) if len(sizes) > 1 else lambda arguments: (0,),
    )
