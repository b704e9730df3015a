"""Launching compiled kernels without Triton's per-call argument analysis.

`kernel[grid](...)` specialises every argument anew, which costs more host time than all the rest of
a call. Emitted kernels specialise by value on few of their arguments (the strides of results), so
the compiled kernel is remembered under what can change it: tensor dtypes and their 16-byte
alignment, the values of specialised ints, and which ints need 64 bits. Triton releases whose
launcher has not been checked go the ordinary way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

CHECKED = ("3.6",)
_MAX_COMPILED = 4096
_INT32 = 1 << 31

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_by_value: dict[Any, tuple[bool, ...]] = {}
_is_checked = triton.__version__.rsplit(".", 1)[0] in CHECKED


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Any) -> None:
    """Run a Triton kernel on the current stream, compiling it if need be."""
    if not _is_checked:
        kernel[grid](*arguments, **constants)
        return
    device = torch.cuda.current_device()
    at = (kernel, device, *constants.values(), *_specialised(kernel, arguments))
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


def _specialised(kernel: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """What of the arguments chooses the compiled kernel."""
    by_value = _by_value.get(kernel)
    if by_value is None:
        by_value = tuple(not p.do_not_specialize for p in kernel.params[: len(arguments)])
        _by_value[kernel] = by_value
    key: list[Any] = []
    for argument, specialise in zip(arguments, by_value, strict=True):
        kind = type(argument)
        if kind is int:
            if specialise:
                key.append(argument)
            elif argument >= _INT32:
                key.append(_INT32)
            else:
                key.append(0)
        elif kind is float:
            continue
        elif isinstance(argument, torch.Tensor):
            key.append((argument.dtype, argument.data_ptr() % 16))
        else:  # a tensor descriptor
            key.append((argument.base.dtype, *argument.block_shape))
    return key
