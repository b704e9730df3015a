"""Values of an emulated Gluon kernel: tensors, pointers, shared memory, descriptors, accumulators.

Values of 16-bit floats and of FP8 are kept in float32, rounded. A float32 product that is added to
something is rounded once, as the compiler makes it one instruction. Integers divide as in C.
Layouts are carried along and must agree where Gluon wants it, but say nothing about where a value
lies.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gluon_machine import Allocation, Box, Copy, Fault, Machine, Mma, location
from triton.experimental.gluon import language as real
from triton.experimental.gluon.language._layouts import (
    BlockedLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    SliceLayout,
)

# By name: dtypes hash and compare slowly, and are singletons.
FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16, **FP8}
NUMPY = {
    real.int1.name: np.bool_,
    real.int8.name: np.int8,
    real.int16.name: np.int16,
    real.int32.name: np.int32,
    real.int64.name: np.int64,
    real.uint8.name: np.uint8,
    real.uint32.name: np.uint32,
    real.uint64.name: np.uint64,
    real.float64.name: np.float64,
    real.float32.name: np.float32,
    real.bfloat16.name: np.float32,
    real.float16.name: np.float32,
    real.float8e4nv.name: np.float32,
    real.float8e5.name: np.float32,
}
GLUON = {
    torch.bool: real.int1,
    torch.int32: real.int32,
    torch.int64: real.int64,
    torch.float32: real.float32,
    torch.bfloat16: real.bfloat16,
    torch.float16: real.float16,
    torch.float8_e4m3fn: real.float8e4nv,
    torch.float8_e5m2: real.float8e5,
}

IN_FLIGHT = "the result of a wgmma is used before its wait"


def rounded(data: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 data rounded to a narrower dtype, of 8 bits so that it saturates; other dtypes are
    converted."""
    if dtype.name in NARROW:
        wide = torch.from_numpy(np.array(data, np.float32))
        if dtype.name in FP8:
            most = torch.finfo(FP8[dtype.name]).max
            wide = wide.clamp(-most, most)
        return wide.to(NARROW[dtype.name]).float().numpy()
    return np.asarray(data).astype(NUMPY[dtype.name], copy=False)


@dataclass(frozen=True)
class Inferred:
    """A layout that Gluon works out from another one."""

    parent: Any
    how: str
    numbers: tuple[int, ...]


class Type:
    """`tensor.type`, of which kernels read the layout and the element type."""

    def __init__(self, element: Any, shape: list[int], layout: Any) -> None:
        self.element_ty = self.scalar = element
        self.shape = shape
        self.layout = layout


class Tensor:
    """A block or a scalar in registers."""

    def __init__(self, data: Any, dtype: Any, layout: Any = None) -> None:
        self.data = np.asarray(data)
        self.dtype = dtype
        self.layout = layout
        self.factors: tuple[np.ndarray, np.ndarray] | None = None
        """Of a float32 product, which an addition takes to round once."""

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape, self.layout)

    def reshape(self, *shape: Any) -> Tensor:
        sizes = _numbers(shape)
        return Tensor(self.data.reshape(sizes), self.dtype, Inferred(self.layout, "reshape", sizes))

    def permute(self, *order: Any) -> Tensor:
        dims = _numbers(order)
        return Tensor(self.data.transpose(dims), self.dtype, Inferred(self.layout, "permute", dims))

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        if bitcast:
            raise Fault("bitcasts are not emulated")
        data = self.data
        if dtype is real.int1:
            data = data != 0
        elif not dtype.is_floating() and self.dtype.is_floating():
            data = np.trunc(data)
        return Tensor(rounded(data, dtype), dtype, self.layout)

    def __bool__(self) -> bool:
        return bool(self._scalar())

    def __index__(self) -> int:
        return int(self._scalar())

    __int__ = __index__

    def _scalar(self) -> Any:
        if self.data.ndim:
            raise Fault(f"a block of shape {self.shape} where a scalar is wanted")
        return self.data[()]

    def __getitem__(self, key: Any) -> Tensor:
        result = self
        for axis, entry in enumerate(key if isinstance(key, tuple) else (key,)):
            if entry is None:
                result = expand_dims(result, axis)
            elif entry != slice(None):
                raise Fault("only None and : index a tensor")
        return result

    def __neg__(self) -> Tensor:
        return Tensor(-self.data, self.dtype, self.layout)

    def __invert__(self) -> Tensor:
        return Tensor(~self.data, self.dtype, self.layout)

    __hash__ = None


def _numbers(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes or dimensions, given one by one or as a list."""
    several = given[0] if isinstance(given[0], (list, tuple)) else given
    return tuple(int(number) for number in several)


def expand_dims(input: Tensor, axis: int) -> Tensor:
    x = input
    axis %= x.data.ndim + 1
    layout = x.layout
    if isinstance(layout, SliceLayout):
        if layout.dim != axis:
            raise Fault(f"expand_dims at {axis} of a tensor sliced along {layout.dim}")
        layout = layout.parent
    return Tensor(np.expand_dims(x.data, axis), x.dtype, layout)


def as_tensor(x: Any, like: Any = None) -> Tensor:
    """A Python number as a tensor, of the dtype it takes beside `like`."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Accumulator):
        raise Fault(IN_FLIGHT)
    if isinstance(x, (bool, np.bool_)):
        return Tensor(np.bool_(x), real.int1)
    if isinstance(x, (int, np.integer)):
        dtype = real.int32 if -(2**31) <= x < 2**31 else real.int64
        if like is not None and like is not real.int1:
            dtype = like
        return Tensor(np.asarray(x, NUMPY[dtype.name]), dtype)
    if isinstance(x, (float, np.floating)):
        dtype = like if like is not None and like.is_floating() else real.float32
        return Tensor(rounded(np.asarray(x, np.float32), dtype), dtype)
    raise Fault(f"no tensor: {x!r}")


def common(a: Any, b: Any) -> Any:
    """The dtype in which an operation of two tensors is done."""
    if a is b:
        return a
    if a.is_floating() != b.is_floating():
        return a if a.is_floating() else b
    if a.is_floating() and a.primitive_bitwidth == b.primitive_bitwidth:
        return real.float32
    return max(a, b, key=lambda dtype: dtype.primitive_bitwidth)


def pair(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    """Two operands with the dtypes they have; layouts of two blocks must agree."""
    if not isinstance(x, Tensor):
        y = as_tensor(y)
        return as_tensor(x, y.dtype), y
    return x, as_tensor(y, x.dtype)


def common_layout(*tensors: Tensor) -> Any:
    known = [t.layout for t in tensors if t.layout is not None and t.data.ndim]
    for other in known[1:]:
        if other != known[0]:
            raise Fault(f"layouts differ: {known[0]} and {other}")
    return known[0] if known else None


def elementwise(function: Callable[..., Any], x: Any, y: Any, result: Any = None) -> Tensor:
    """function of two operands in their common dtype, `result` or that dtype."""
    x, y = pair(x, y)
    dtype = common(x.dtype, y.dtype)
    kind = np.int64 if dtype is real.int32 else NUMPY[dtype.name]
    data = function(x.data.astype(kind, copy=False), y.data.astype(kind, copy=False))
    if result is None and dtype.name in NARROW:
        data = rounded(data, dtype)
    elif result is None and dtype is real.int32:
        small = np.asarray(data).astype(np.int32)
        if not (small == data).all():
            raise Fault("an int32 overflows")
        data = small
    return Tensor(data, result or dtype, common_layout(x, y))


def _quotient(x: np.ndarray, y: np.ndarray) -> Any:
    return (np.abs(x) // np.abs(y) * np.sign(x) * np.sign(y)).astype(x.dtype)


def _divide(x: Any, y: Any) -> Tensor:
    x, y = pair(x, y)
    if not common(x.dtype, y.dtype).is_floating():
        x, y = x.to(real.float32), y.to(real.float32)
    return elementwise(operator.truediv, x, y)


def _multiply(x: Any, y: Any) -> Tensor:
    x, y = pair(x, y)
    product = elementwise(operator.mul, x, y)
    if product.dtype is real.float32 and product.data.ndim:
        product.factors = (x.data, y.data)
    return product


def _sum(sign: int) -> Callable[[Any, Any], Any]:
    plain = operator.add if sign > 0 else operator.sub

    def add(x: Any, y: Any) -> Any:
        if isinstance(y, Pointer):
            return y + x
        x, y = pair(x, y)
        if common(x.dtype, y.dtype) is real.float32:
            if x.factors is not None:
                return fused(x.factors, y.data, 1, sign, common_layout(x, y))
            if y.factors is not None:
                return fused(y.factors, x.data, sign, 1, common_layout(x, y))
        return elementwise(plain, x, y)

    return add


def fused(
    factors: tuple[np.ndarray, np.ndarray], c: np.ndarray, product: int, addend: int, layout: Any
) -> Tensor:
    """+-a * b +- c, rounded once."""
    a, b = (np.asarray(factor, np.float64) for factor in factors)
    value = product * (a * b) + addend * c.astype(np.float64)
    return Tensor(value.astype(np.float32), real.float32, layout)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": _sum(1),
    "sub": _sum(-1),
    "mul": _multiply,
    "truediv": _divide,
    "floordiv": lambda x, y: elementwise(_quotient, x, y),
    "mod": lambda x, y: elementwise(lambda a, b: a - _quotient(a, b) * b, x, y),
    "and": lambda x, y: elementwise(operator.and_, x, y),
    "or": lambda x, y: elementwise(operator.or_, x, y),
    "xor": lambda x, y: elementwise(operator.xor, x, y),
    "lshift": lambda x, y: elementwise(operator.lshift, x, y),
    "rshift": lambda x, y: elementwise(operator.rshift, x, y),
}
for _name, _do in _OPERATORS.items():
    setattr(Tensor, f"__{_name}__", lambda self, other, do=_do: do(self, other))
    setattr(Tensor, f"__r{_name}__", lambda self, other, do=_do: do(other, self))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _compare = getattr(operator, _name)
    setattr(
        Tensor,
        f"__{_name}__",
        lambda self, other, do=_compare: elementwise(do, self, other, real.int1),
    )


class Pointer:
    """Addresses in the memory of a torch tensor."""

    def __init__(self, memory: torch.Tensor, offsets: np.ndarray, layout: Any = None) -> None:
        self.memory = memory
        self.offsets = offsets
        self.layout = layout
        self.dtype = real.pointer_type(GLUON[memory.dtype])

    @staticmethod
    def of(tensor: torch.Tensor) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        memory = tensor.detach().as_strided((size,), (1,), 0)
        return Pointer(memory, np.asarray(tensor.storage_offset(), np.int64))

    def __add__(self, other: Any) -> Pointer:
        step = as_tensor(other)
        offsets = self.offsets + step.data.astype(np.int64)
        return Pointer(self.memory, offsets, step.layout or self.layout)

    __radd__ = __add__

    def reach(self, mask: Any) -> tuple[torch.Tensor, np.ndarray]:
        """Offsets where the mask is set, and the mask; outside of the tensor is a fault."""
        seen = np.broadcast_to(True if mask is None else as_tensor(mask).data, self.offsets.shape)
        inside = self.offsets[seen]
        if inside.size and not (inside.min() >= 0 and inside.max() < len(self.memory)):
            raise Fault(f"an access of global memory at {inside.min()} .. {inside.max()}")
        return torch.from_numpy(np.atleast_1d(inside)), seen


class Accumulator:
    """The result of a wgmma that may be in flight."""

    def __init__(self, value: Tensor, mma: Mma) -> None:
        self.value = value
        self.mma = mma
        self.dtype, self.shape = value.dtype, value.shape

    def _refuse(self, *others: Any) -> Any:
        raise Fault(IN_FLIGHT)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __lt__ = __gt__ = __getitem__ = to = reshape = _refuse


class Shared:
    """A view of shared memory. Keeps which box of the allocation it shows."""

    def __init__(
        self,
        machine: Machine,
        at: Allocation,
        data: np.ndarray,
        box: Box,
        dims: tuple[int | None, ...],
    ) -> None:
        self._machine = machine
        self.at = at
        self.data = data
        self.box = box
        self._dims = dims
        """For each dimension of the view that of the allocation; None where it is another."""
        self.handle = self

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        return self.at.dtype

    @property
    def layout(self) -> Any:
        return self.at.layout

    @property
    def type(self) -> Type:
        return Type(self.dtype, self.shape, self.layout)

    def _reinterpret(self, dtype: Any, shape: Sequence[int], layout: Any) -> Pieces:
        return Pieces(self, dtype, [int(size) for size in shape], layout)

    @property
    def rank(self) -> int:
        return self.data.ndim

    def _narrow(self, dim: int, start: int, length: int) -> Box:
        of = self._dims[dim]
        if not 0 <= start <= start + length <= self.data.shape[dim]:
            raise Fault(f"{self.at.name}: {start} .. {start + length} of {self.data.shape[dim]}")
        if of is None:
            return self.box
        first = self.box[of][0] + start
        return (*self.box[:of], (first, first + length), *self.box[of + 1 :])

    def index(self, index: Any) -> Shared:
        box = self._narrow(0, int(index), 1)
        return Shared(self._machine, self.at, self.data[int(index)], box, self._dims[1:])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        box = self._narrow(dim, start, length)
        window = tuple(
            slice(start, start + length) if d == dim else slice(None) for d in range(self.rank)
        )
        return Shared(self._machine, self.at, self.data[window], box, self._dims)

    def permute(self, order: Sequence[int]) -> Shared:
        dims = tuple(self._dims[d] for d in order)
        return Shared(self._machine, self.at, self.data.transpose(order), self.box, dims)

    def reshape(self, shape: Sequence[int]) -> Shared:
        data = self.data.view()
        data.shape = tuple(shape)
        long = [d for d, size in zip(self._dims, self.shape, strict=True) if size != 1]
        dims: list[int | None] = [None] * len(shape)
        if [s for s in shape if s != 1] == [s for s in self.shape if s != 1]:
            dims = [long.pop(0) if size != 1 else None for size in shape]
        return Shared(self._machine, self.at, data, self.box, tuple(dims))

    def load(self, layout: Any) -> Tensor:
        self._machine.access(self.at, self.box, "a read", writes=False)
        return Tensor(self.data.copy(), self.dtype, layout)

    def store(self, value: Any) -> None:
        value = as_tensor(value)
        if value.shape != self.shape or value.dtype is not self.dtype:
            raise Fault(
                f"{value.dtype}{value.shape} stored to {self.at.name}: {self.dtype}{self.shape}"
            )
        self._machine.access(self.at, self.box, "a store", writes=True)
        self.data[...] = value.data


class _Piece(Shared):
    """A view in another layout."""

    def __init__(self, view: Shared, layout: Any) -> None:
        super().__init__(view._machine, view.at, view.data, view.box, view._dims)
        self._layout = layout

    @property
    def layout(self) -> Any:
        return self._layout


class Pieces:
    """A tile [rows, columns] of 16-bit values as the pieces [1, 1, n, 64] that its memory holds one
    after the other, if it is swizzled by 128 bytes: n rows of 64 columns, then the next rows."""

    def __init__(self, tile: Shared, dtype: Any, shape: list[int], layout: Any) -> None:
        count, *_, rows, columns = shape
        size = int(np.prod(tile.shape))
        if dtype is not tile.dtype or dtype.primitive_bitwidth != 16:
            raise Fault(f"{tile.at.name} holds {tile.dtype}, not {dtype}")
        if tile.rank != 2 or columns != 64 or count * rows * 64 != size or rows % 8:
            raise Fault(f"{tile.at.name}{tile.shape} has no pieces {shape}")
        if tile.layout.swizzle_byte_width != 128 or layout.swizzle_byte_width != 128:
            raise Fault(f"{tile.at.name} in {tile.layout} has no pieces in {layout}")
        self._tile, self._rows, self._layout = tile, rows, layout

    def index(self, index: Any) -> Shared:
        column, row = divmod(int(index), self._tile.shape[0] // self._rows)
        part = self._tile.slice(row * self._rows, self._rows).slice(column * 64, 64, dim=1)
        return _Piece(part.reshape([1, 1, self._rows, 64]), self._layout)


class Descriptor:
    """A TensorDescriptor inside a kernel."""

    def __init__(self, host: Any) -> None:
        self.dtype = GLUON[host.base.dtype]
        self.block_shape = list(host.block_shape)
        self.block_type = real.block_type(self.dtype, self.block_shape)
        self.layout = host.layout
        self.shape = [as_tensor(int(size)) for size in host.shape]
        self.strides = [as_tensor(int(stride)) for stride in host.strides]
        self.handle = self
        self._memory = host.base.detach()
        self._sizes = [int(size) for size in host.shape]
        self._steps = [int(stride) for stride in host.strides]
        self._padding = 0.0 if host.padding == "zero" else float("nan")

    def windows(self, coordinates: Sequence[Any]) -> tuple[Any, tuple[slice, ...]]:
        """The part of the tensor that a box covers, and where in the box that part lies."""
        if len(coordinates) != len(self.block_shape):
            raise Fault(f"{len(coordinates)} coordinates for a box {self.block_shape}")
        sizes, inner, offset = [], [], 0
        given = zip(coordinates, self.block_shape, self._sizes, self._steps, strict=True)
        for coordinate, block, size, step in given:
            start = int(coordinate)
            low = min(max(start, 0), size)
            high = max(min(start + block, size), low)
            sizes.append(high - low)
            inner.append(slice(low - start, high - start) if high > low else slice(0, 0))
            offset += low * step
        if 0 in sizes:
            return self._memory.new_empty(sizes), tuple(inner)
        offset %= 2**64 // self._memory.element_size()  # as addresses wrap around
        steps = [step if size > 1 else 1 for step, size in zip(self._steps, sizes, strict=True)]
        offset += self._memory.storage_offset()
        try:
            return self._memory.as_strided(sizes, steps, offset), tuple(inner)
        except RuntimeError as error:
            raise Fault(f"a box at {[int(c) for c in coordinates]} leaves the memory") from error

    def check(self, box: Shared) -> None:
        if (
            box.shape != self.block_shape
            or box.dtype is not self.dtype
            or box.layout != self.layout
        ):
            raise Fault(f"{box.at.name}{box.shape} for boxes {self.block_shape} of another kind")

    def read(self, coordinates: Sequence[Any], into: Shared) -> Copy:
        self.check(into)
        there, inner = self.windows(coordinates)

        def happen() -> None:
            into.data[...] = self._padding
            into.data[inner] = there.to(torch.float32).numpy()

        return Copy(f"the TMA load at {location(sys._getframe())}", happen)

    def write(self, coordinates: Sequence[Any], source: Shared, *, add: bool = False) -> Copy:
        self.check(source)
        there, inner = self.windows(coordinates)

        def happen() -> None:
            values = torch.from_numpy(source.data[inner].copy())
            if add:
                there.add_(values)
            else:
                there.copy_(values)

        return Copy(f"the TMA store at {location(sys._getframe())}", happen)


def elements(layout: Any, shape: list[int], threads: int) -> np.ndarray:
    """[threads, n]: which elements of a block (flat) a thread holds, in their order."""
    if not shape:
        return np.zeros((threads, 1), np.int64)
    if isinstance(layout, DotOperandLayout):
        layout = layout.parent
    if isinstance(layout, BlockedLayout) and shape == [threads]:
        return np.arange(threads)[:, None]
    if isinstance(layout, NVMMADistributedLayout):
        high, wide = layout.warps_per_cta
        width = shape[1] // wide
        fits = shape[0] == 16 * high and threads == 32 * high * wide
        if fits and width % layout.instr_shape[1] == 0:
            warp, lane = np.divmod(np.arange(threads)[:, None], 32)
            e = np.arange(width // 2)
            row = warp % high * 16 + lane // 4 + 8 * (e // 2 % 2)
            column = warp // high * width + e // 4 * 8 + lane % 4 * 2 + e % 2
            return row * shape[1] + column
    raise Fault(f"inline assembly on {shape} in {layout} is not emulated")
