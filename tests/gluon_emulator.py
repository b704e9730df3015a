"""Runs emitted Gluon files on the CPU, for tests.

`run(plan)` takes what `plan()` of an emitted file returns. Gluon kernels run here, one CTA after
the other, as the Python that they are: their globals are replaced by stand-ins, of `gl`, of `tl`
(whose scalar functions Gluon kernels share with portable ones) and of `nvidia.hopper`. Portable
kernels of the same plan run in Triton's interpreter.

What is modelled, and found wrong: see `gluon_machine` (partitions, barriers, races, TMA, wgmma),
`gluon_tensors` (rounding, integers, bounds of global memory) and `gluon_ptx`. A product of narrow
values is a float32 product of the rounded values. Not modelled: whether Gluon compiles the file;
layouts are compared where operations need equal ones, but most of what the compiler refuses
passes.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gluon_tensors
import numpy as np
import torch
import triton
from gluon_machine import Fault, Machine, MBarrier
from gluon_ptx import Threads
from gluon_tensors import (
    Accumulator,
    Descriptor,
    Pointer,
    Shared,
    Tensor,
    as_tensor,
    elements,
    elementwise,
    fused,
    pair,
    rounded,
)
from triton.experimental.gluon import language as real
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language._layouts import DotOperandLayout, SliceLayout
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
_machine: Machine
"""The CTA that runs."""


def run(plan: Sequence[tuple[Any, Any, Any, Any]], seed: int = 0) -> None:
    """Every launch of a plan: (kernel, grid, arguments, constants)."""
    with np.errstate(all="ignore"):  # inf - inf of a masked score is meant
        for kernel, grid, arguments, constants in plan:
            if isinstance(kernel, GluonJITFunction):
                launch(kernel, grid, arguments, constants, seed)
            else:
                kernel[grid](*arguments, **constants)


def launch(kernel: Any, grid: Any, arguments: Any, constants: Any, seed: int = 0) -> None:
    """One Gluon kernel. The seed chooses the interleaving."""
    global _machine
    options = {name: constants[name] for name in OPTIONS if name in constants}
    named = {name: value for name, value in constants.items() if name not in OPTIONS}
    names = [p.name for p in kernel.params if p.name not in named]
    values = dict(zip(names, arguments, strict=True)) | named
    constant = {p.name for p in kernel.params if p.is_constexpr}
    inside = {n: v if n in constant else _argument(v) for n, v in values.items()}
    function = _emulated(kernel.fn)
    sizes = (*grid, 1, 1)[:3]
    for number in range(sizes[0] * sizes[1] * sizes[2]):
        program = (number % sizes[0], number // sizes[0] % sizes[1], number // sizes[0] // sizes[1])
        _machine = Machine(program, options.get("num_warps", 4), seed + number)
        _machine.grid = sizes
        function(**inside)
        _machine.finish()


def _argument(value: Any) -> Any:
    """What a kernel sees of an argument that is no constexpr."""
    if isinstance(value, torch.Tensor):
        return Pointer.of(value)
    if isinstance(value, TensorDescriptor):
        return Descriptor(value)
    if isinstance(value, (tuple, list)):
        return tuple(_argument(entry) for entry in value)
    return value if value is None else as_tensor(value)


# Stand-ins of modules and functions


def _emulated(function: types.FunctionType) -> types.FunctionType:
    """A kernel's function among stand-ins."""
    names = _world(_Globals(function.__globals__))
    copy = types.FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Globals:
    """A dict by identity, as key of a cache."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def __hash__(self) -> int:
        return id(self.names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Globals) and other.names is self.names


@functools.cache
def _world(source: _Globals) -> dict[str, Any]:
    names: dict[str, Any] = {}
    _WORLDS[id(source.names)] = names
    for name, value in source.names.items():
        names[name] = _stand_in(value)
    names["range"] = _range
    return names


_WORLDS: dict[int, dict[str, Any]] = {}


def _stand_in(value: Any) -> Any:
    if isinstance(value, real.constexpr):
        return value.value
    if isinstance(value, types.ModuleType):
        return _MODULES.get(value.__name__, value)
    if isinstance(value, (JITFunction, InterpretedFunction)):
        return _Lazy(value.fn)
    if isinstance(value, types.FunctionType):
        if value in _FUNCTIONS:
            return _FUNCTIONS[value]
        if getattr(value, "__triton_builtin__", False):
            return functools.partial(value, _semantic=_Semantic())
    return value


class _Lazy:
    """A jitted function, emulated when it is first called."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function

    @functools.cached_property
    def _inside(self) -> Callable[..., Any]:
        return _emulated(self._function)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._inside(*arguments, **named)


class _Semantic:
    """Serves builtins that an emitted file defines itself: a TMA reduction has no wrapper."""

    builder = property(lambda self: self)

    def _convert_to_ir_values(self, values: Any, require_i64: bool = True) -> Any:
        return values

    def create_async_tma_reduce(self, kind: Any, desc: Any, coordinates: Any, source: Any) -> None:
        if "ADD" not in str(kind):
            raise Fault(f"a TMA reduction of kind {kind} is not emulated")
        _machine.store(source.at, source.box, desc.write(coordinates, source, add=True))


class _Stand:
    """Attributes of a module: ours, else the module's own if it is a class or a dtype."""

    def __init__(self, module: types.ModuleType, **ours: Any) -> None:
        self._module = module
        self.__dict__.update(ours)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, types.ModuleType):
            return _MODULES.get(value.__name__, value)
        if isinstance(value, (type, real.dtype)):
            return value
        raise Fault(f"{self._module.__name__}.{name} is not emulated")


def _range(*bounds: Any, **options: Any) -> Iterator[Tensor]:
    for value in range(*(int(bound) for bound in bounds)):
        yield as_tensor(value)


# Functions of gl and tl


def _unary(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Tensor]:
    def apply(x: Any) -> Tensor:
        x = as_tensor(x)
        return Tensor(rounded(function(x.data), x.dtype), x.dtype, x.layout)

    return apply


def _arange(start: Any, end: Any, layout: Any = None) -> Tensor:
    return Tensor(np.arange(int(start), int(end), dtype=np.int32), real.int32, layout)


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    x = as_tensor(value).to(dtype).data
    return Tensor(np.full([int(s) for s in shape], x, x.dtype), dtype, layout)


def _zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return _full(shape, 0, dtype, layout)


def _full_like(x: Tensor, value: Any, shape: Any = None, dtype: Any = None) -> Tensor:
    return _full(shape or x.shape, value, dtype or x.dtype, x.layout)


def _where(condition: Any, x: Any, y: Any) -> Tensor:
    chooses = as_tensor(condition)
    chosen = elementwise(lambda a, b: np.where(chooses.data, a, b), x, y)
    layout = gluon_tensors.common_layout(chooses, chosen)
    return Tensor(chosen.data, chosen.dtype, layout)


def _reduction(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def reduce(input: Any, axis: Any = None, keep_dims: bool = False) -> Tensor:
        x = as_tensor(input)
        dtype = real.int32 if x.dtype is real.int1 else x.dtype
        data = function(x.to(dtype).data, axis=axis, keepdims=keep_dims)
        layout = x.layout if keep_dims or x.layout is None else SliceLayout(axis or 0, x.layout)
        return Tensor(rounded(data, dtype), dtype, layout if np.ndim(data) else None)

    return reduce


def _cdiv(x: Any, div: Any) -> Any:
    return (x + div - 1) // div


def _fma(x: Any, y: Any, z: Any) -> Tensor:
    x, y = pair(x, y)
    _, z = pair(x, z)
    return fused((x.data, y.data), z.data, 1, 1, gluon_tensors.common_layout(x, y, z))


def _cast(input: Any, dtype: Any) -> Any:
    return as_tensor(input).to(dtype)


def _convert_layout(value: Any, layout: Any, assert_trivial: bool = False) -> Tensor:
    x = as_tensor(value)
    return Tensor(x.data, x.dtype, layout)


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **hints: Any) -> Tensor:
    element = pointer.dtype.element_ty
    at, seen = pointer.reach(mask)
    fill: Any = float("nan") if element.is_floating() else -1
    if other is not None:
        fill = as_tensor(other).data
    data: np.ndarray = np.full(pointer.offsets.shape, fill, gluon_tensors.NUMPY[element.name])
    narrow = element.name in gluon_tensors.NARROW
    values = pointer.memory[at]
    found = (values.float() if narrow else values).numpy()
    if data.ndim:
        data[seen] = found
    elif seen:
        data = found.reshape(())
    return Tensor(data, element, pointer.layout)


def _values(pointer: Pointer, value: Any, seen: np.ndarray) -> torch.Tensor:
    x = as_tensor(value)
    whole = np.broadcast_to(x.to(pointer.dtype.element_ty).data, pointer.offsets.shape)
    return torch.from_numpy(np.atleast_1d(whole[seen])).to(pointer.memory.dtype)


def _store(pointer: Pointer, value: Any, mask: Any = None, **hints: Any) -> None:
    at, seen = pointer.reach(mask)
    pointer.memory[at] = _values(pointer, value, seen)


def _atomic_add(pointer: Pointer, value: Any, mask: Any = None, **hints: Any) -> Tensor:
    """What was there before, for elements of which no two have one place."""
    at, seen = pointer.reach(mask)
    before = _load(pointer, mask)
    pointer.memory.index_put_((at,), _values(pointer, value, seen), accumulate=True)
    return before


def _program_id(axis: int) -> Tensor:
    return as_tensor(_machine.program[axis])


def _num_programs(axis: int) -> Tensor:
    return as_tensor(_machine.grid[axis])


def _allocate(dtype: Any, shape: Any, layout: Any, value: Any = None) -> Shared:
    sizes = tuple(int(size) for size in shape)
    kind = gluon_tensors.NUMPY[dtype.name]
    data: np.ndarray = np.full(sizes, np.nan if dtype.is_floating() else -1, kind)
    at = _machine.allocate(data, dtype, layout, sys._getframe())
    view = Shared(_machine, at, data, tuple((0, s) for s in sizes), tuple(range(len(sizes))))
    if value is not None:
        view.store(value)
    return view


def _warp_specialize(
    functions_and_args: Any, worker_num_warps: Sequence[int], worker_num_regs: Sequence[int]
) -> Any:
    if not len(functions_and_args) - 1 == len(worker_num_warps) == len(worker_num_regs):
        raise Fault(f"workers do not agree with {worker_num_warps} and {worker_num_regs}")
    return _machine.specialize(functions_and_args, list(worker_num_warps))


def _inline_asm(
    asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int
) -> Tensor:
    """Outputs are $0 .. $(pack - 1), then come the operands of each argument."""
    tensors = [as_tensor(x) for x in args]
    shape = np.broadcast_shapes(*(x.data.shape for x in tensors))
    widest = next(x for x in tensors if x.data.shape == shape)
    threads = 32 * _machine.current.num_warps
    held = elements(widest.layout, list(shape), threads)
    if short := -held.shape[1] % pack:  # the last pack is filled up with anything
        held = np.concatenate([held, np.repeat(held[:, -1:], short, axis=1)], axis=1)
    result: np.ndarray = np.zeros(int(np.prod(shape)), gluon_tensors.NUMPY[dtype.name])
    for order in np.split(held, held.shape[1] // pack, axis=1):
        _run_asm(asm, constraints, tensors, order, result)
    return Tensor(result.reshape(shape), dtype, widest.layout)


def _run_asm(
    asm: str, constraints: str, tensors: list[Tensor], order: np.ndarray, result: np.ndarray
) -> None:
    """One pack: the elements that `order` [threads, pack] names."""
    threads, pack = order.shape
    shape = np.broadcast_shapes(*(x.data.shape for x in tensors))
    columns = [np.zeros(threads, result.dtype) for _ in range(pack)]
    for x in tensors:
        flat = np.broadcast_to(x.data, shape).reshape(-1)
        columns += [flat[order[:, e]] for e in range(pack)]
    asked = [entry.strip() for entry in constraints.split(",") if not entry.startswith("~")]
    if len(asked) != len(columns):
        raise Fault(f"{len(asked)} constraints for {len(columns)} operands")
    for number, constraint in enumerate(asked):
        if constraint.isdigit():  # in the register of an output
            columns[int(constraint)] = columns[number]
    registers = {f"${number}": column for number, column in enumerate(columns)}
    Threads(_machine, registers, threads).run(asm)
    for e in range(pack):
        result[order[:, e]] = registers[f"${e}"]


# Functions of nvidia.hopper


def _barrier(view: Shared) -> MBarrier:
    key = tuple(low for low, _ in view.box)
    found = view.at.barriers.get(hash(key))
    if found is None:
        raise Fault(f"{view.at.name}{list(key)} is no initialised mbarrier")
    return found


def _init(mbarrier: Shared, count: int) -> None:
    view = mbarrier
    key = tuple(low for low, _ in view.box)
    if view.dtype is not real.int64 or view.data.size != 1:
        raise Fault(f"{view.at.name}{view.shape} cannot hold an mbarrier")
    view.at.barriers[hash(key)] = MBarrier(f"{view.at.name}[{key[0]}]", int(count), int(count))


def _expect(mbarrier: Shared, bytes: Any, pred: Any = True) -> None:
    if pred:
        _machine.barrier_arrive(_barrier(mbarrier), 1, int(bytes))


def _arrive(mbarrier: Shared, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        _machine.barrier_arrive(_barrier(mbarrier), int(count))


def _wait(mbarrier: Shared, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        _machine.barrier_wait(_barrier(mbarrier), int(phase))


def _tma_load(
    tensor_desc: Descriptor, coord: Any, barrier: Shared, result: Shared, pred: Any = True
) -> None:
    if pred:
        copy, size = tensor_desc.read(coord, result), tensor_desc.block_type.nbytes
        _machine.load(result.at, result.box, copy, _barrier(barrier), size)


def _tma_store(tensor_desc: Descriptor, coord: Any, src: Shared) -> None:
    _machine.store(src.at, src.box, tensor_desc.write(coord, src))


def _warpgroup_mma(
    a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False, **options: Any
) -> Any:
    before = acc.value if isinstance(acc, Accumulator) else as_tensor(acc)
    _check_mma(a, b, before)
    reads = [(x.at, x.box) for x in (a, b) if isinstance(x, Shared)]
    product = (torch.from_numpy(a.data) @ torch.from_numpy(b.data)).numpy()
    data = product + before.data if use_acc else product
    issued = Accumulator(Tensor(data, real.float32, before.layout), _machine.mma(reads))
    return issued if is_async else _wgmma_wait(0, (issued,))


def _check_mma(a: Any, b: Any, acc: Tensor) -> None:
    if not isinstance(b, Shared) or not isinstance(a, (Shared, Tensor)):
        raise Fault("wgmma takes a from registers or shared memory, b from shared memory")
    shapes = (a.shape[0], b.shape[1]), a.shape[1]
    if shapes != (tuple(acc.shape), b.shape[0]):
        raise Fault(f"wgmma of {a.shape} and {b.shape} into {acc.shape}")
    layout, is_fp8 = acc.layout, a.dtype.name in gluon_tensors.FP8
    both_fp8 = is_fp8 and b.dtype.name in gluon_tensors.FP8
    if (
        not (a.dtype is b.dtype or both_fp8)
        or a.dtype.name not in gluon_tensors.NARROW
        or acc.dtype is not real.float32
    ):
        raise Fault(f"wgmma of {a.dtype} and {b.dtype} into {acc.dtype}")
    if isinstance(a, Tensor) and a.layout != DotOperandLayout(0, layout, 4 if is_fp8 else 2):
        raise Fault(f"wgmma's a is in {a.layout}, the result in {layout}")
    if is_fp8:
        if layout.instr_shape[2] != 32 or a.shape[1] % 32:
            raise Fault(f"wgmma of FP8 takes 32 columns of a, got {a.shape} in {layout}")
        if b.data.strides[0] > b.data.strides[1]:
            raise Fault("wgmma of FP8 needs the rows of b next to each other in shared memory")
    rows, warps = acc.shape[0], _machine.current.num_warps
    if np.prod(layout.warps_per_cta) != warps or rows % (16 * layout.warps_per_cta[0]):
        raise Fault(f"wgmma into {rows} rows by {warps} warps in {layout}")


def _wgmma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    if deps is None:
        raise Fault("warpgroup_mma_wait needs deps")
    _machine.mma_wait(int(num_outstanding))
    results = tuple(
        dep.value if isinstance(dep, Accumulator) and dep.mma.done else dep for dep in deps
    )
    return results[0] if len(results) == 1 else results


_LANGUAGE: dict[str, Any] = {
    "arange": _arange,
    "full": _full,
    "zeros": _zeros,
    "full_like": _full_like,
    "zeros_like": lambda x: _full_like(x, 0),
    "where": _where,
    "cdiv": _cdiv,
    "fma": _fma,
    "cast": _cast,
    "to_tensor": as_tensor,
    "minimum": lambda x, y: elementwise(np.fmin, x, y),
    "maximum": lambda x, y: elementwise(np.fmax, x, y),
    "max": _reduction(np.fmax.reduce),
    "min": _reduction(np.fmin.reduce),
    "sum": _reduction(np.sum),
    "exp": _unary(np.exp),
    "exp2": _unary(np.exp2),
    "log": _unary(np.log),
    "log2": _unary(np.log2),
    "sqrt": _unary(np.sqrt),
    "abs": _unary(np.abs),
    "floor": _unary(np.floor),
    "expand_dims": gluon_tensors.expand_dims,
    "convert_layout": _convert_layout,
    "reshape": Tensor.reshape,
    "permute": Tensor.permute,
    "load": _load,
    "store": _store,
    "atomic_add": _atomic_add,
    "program_id": _program_id,
    "num_programs": _num_programs,
    "num_warps": lambda: _machine.current.num_warps,
    "allocate_shared_memory": _allocate,
    "warp_specialize": _warp_specialize,
    "thread_barrier": lambda: _machine.thread_barrier(),
    "inline_asm_elementwise": _inline_asm,
    "static_range": range,
    "range": _range,
    "static_assert": lambda condition, message="": None if condition else _fail(message),
    "assume": lambda condition: None if condition else _fail("an assumption does not hold"),
    "multiple_of": lambda x, of: x,
    "max_contiguous": lambda x, of: x,
    "constexpr": lambda value: value,
}


def _fail(message: str) -> None:
    raise Fault(message)


_MBARRIER = _Stand(
    hopper.mbarrier,
    init=_init,
    expect=_expect,
    arrive=_arrive,
    wait=_wait,
    invalidate=lambda view: view.at.barriers.clear(),
)
_TMA = _Stand(
    hopper.tma,
    async_copy_global_to_shared=_tma_load,
    async_copy_shared_to_global=_tma_store,
    store_wait=lambda pendings: _machine.store_wait(int(pendings)),
)
_FUNCTIONS: dict[Any, Any] = {
    hopper.fence_async_shared: lambda cluster=False: _machine.fence(),
    hopper.warpgroup_mma: _warpgroup_mma,
    hopper.warpgroup_mma_wait: _wgmma_wait,
}
_MODULES: dict[str, Any] = {
    real.__name__: _Stand(real, **_LANGUAGE),
    "triton.language": _Stand(triton.language, **_LANGUAGE),
    hopper.mbarrier.__name__: _MBARRIER,
    hopper.tma.__name__: _TMA,
    hopper.__name__: _Stand(
        hopper,
        fence_async_shared=_FUNCTIONS[hopper.fence_async_shared],
        warpgroup_mma=_warpgroup_mma,
        warpgroup_mma_wait=_wgmma_wait,
    ),
}
