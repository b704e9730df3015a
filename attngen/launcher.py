"""Repeating a plan's launches for other tensors, without planning and analysing them again.

What `plan()` gives, and the compiled kernel Triton picks for it, follow from shapes, strides,
dtypes, numbers and 16-byte alignment; between two calls that agree in these only pointers change.
So the launches of the first call are kept with the tensors left open. Triton's own launch, which
specialises every argument anew, takes more host time than all the rest of a call.

This needs Triton's launcher below its public interface, so that releases whose launcher has not
been checked go the ordinary way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

CHECKED = ("3.6",)
_is_checked = triton.__version__.rsplit(".", 1)[0] in CHECKED


class _Descriptor:
    """What the launcher reads of a TensorDescriptor; the one it stands for was checked."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Tensor | None, like: Any) -> None:
        self.base = base
        self.shape = like.shape
        self.strides = like.strides
        self.padding = like.padding


class _Open(NamedTuple):
    """One launch with its tensors left open."""

    run: Any
    arguments: list[Any]
    """Of `run`: what Triton's launcher takes, then what the kernel takes."""
    pointers: list[tuple[int, int]]
    """(position among the arguments, number of the tensor)."""
    descriptors: list[tuple[int, int, _Descriptor]]
    """The same, and the shape and strides."""


_STREAM = 3
"""Its place among what a launcher takes."""
_IN_GRAPHS: list[Tensor] = []
"""Tensors of plans that CUDA graphs have captured: nobody tells when such a graph is gone."""


class Bound:
    """The launches of one plan, for other tensors of the same layout.

    Holds no tensor but those that plan() made itself, as a table of work.
    """

    def __init__(self, launches: list[_Open], device: int) -> None:
        self._launches = launches
        self._device = device
        self._made = [x for each in launches for x in each.arguments if isinstance(x, Tensor)]

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch on the current stream. Pointers are multiples of 16 bytes."""
        if self._made and torch.cuda.is_current_stream_capturing():
            _IN_GRAPHS.extend(self._made)
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        addresses = [0 if x is None else x.data_ptr() for x in tensors]
        for run, template, pointers, descriptors in self._launches:
            arguments = template.copy()
            arguments[_STREAM] = stream
            for at, which in pointers:
                arguments[at] = addresses[which]
            for at, which, like in descriptors:
                arguments[at] = _Descriptor(tensors[which], like)
            run(*arguments)


def may_bind() -> bool:
    """Is Triton's launcher known, and does no profiler listen to launches?"""
    hooks = triton.knobs.runtime
    return _is_checked and not hooks.launch_enter_hook.calls and not hooks.launch_exit_hook.calls


def interprets() -> bool:
    """Does TRITON_INTERPRET make interpreted functions of all kernels, on a GPU too?"""
    return bool(triton.knobs.runtime.interpret)


def launch(plan: list[Any]) -> None:
    """Run the launches of a plan in the ordinary way, compiling what is not compiled."""
    for kernel, grid, arguments, constants in plan:
        kernel[grid](*arguments, **constants)


def bind(plan: list[Any], tensors: tuple[Tensor | None, ...]) -> Bound:
    """Run the launches of a plan made of these tensors, no two of them one object; keep the rest.

    A tensor that plan() made itself is kept too: it is the same for every call of the layout.
    """
    which = {id(x): number for number, x in enumerate(tensors) if x is not None}
    stores = {x.untyped_storage().data_ptr() for x in tensors if x is not None}
    launches = []
    for kernel, grid, arguments, constants in plan:
        compiled = kernel[grid](*arguments, **constants)
        # constants are passed to a compiled kernel too, and ignored
        run, front = _front(compiled, grid)
        rest = (constants[p.name] for p in kernel.params[len(arguments) :])
        template = [*front, *arguments, *rest]
        pointers, descriptors = [], []
        for at, argument in enumerate(arguments, len(front)):
            base = getattr(argument, "base", argument)
            if not isinstance(base, Tensor):
                continue
            if id(base) not in which:
                _refuse_view(base, stores, kernel)
            elif base is argument:
                template[at] = None
                pointers.append((at, which[id(base)]))
            else:
                template[at] = None
                descriptors.append((at, which[id(base)], _Descriptor(None, argument)))
        launches.append(_Open(run, template, pointers, descriptors))
    return Bound(launches, torch.cuda.current_device())


def _front(compiled: Any, grid: tuple[int, int, int]) -> tuple[Any, list[Any]]:
    """What launches a compiled kernel, and what it takes before the kernel's arguments."""
    hooks = (None, None, None)
    run = compiled.run
    sizes = [getattr(run, f"{name}_scratch_size", None) for name in ("global", "profile")]
    if sizes != [0, 0]:
        return run, [*grid, None, compiled.function, compiled.packed_metadata, *hooks]
    # Triton's launcher in Python would only see that there is no scratch.
    modes = (run.launch_cooperative_grid, run.launch_pdl)
    front = [*grid, None, compiled.function, *modes, None, None, compiled.packed_metadata, *hooks]
    return run.launch, front


def _refuse_view(made: Tensor, stores: set[int], kernel: Any) -> None:
    """A view of a call's tensor would go on pointing at the first call's memory."""
    if made.untyped_storage().data_ptr() in stores:
        raise ValueError(
            f"plan() hands {kernel.__name__} a view of one of its tensors; hand on the tensor "
            "itself, and what the view says as numbers"
        )
