"""Triton's interpreter, for CPU tensors on a machine without a GPU.

`triton.jit` decides when it decorates whether a function will be interpreted. Emitted files are
decorated under `interpreting()`; the library functions of `triton.language` (max, sum, philox, ...)
were decorated whenever triton was first imported, perhaps by torch, so they are replaced by their
interpreted forms once. After that this process cannot compile kernels: interpreter and compiler do
not share a process (the tuner compiles in child processes).
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton
import triton.experimental.gluon  # copies triton.language's functions: must see them compiled
import triton.language
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction

from attngen.versions import triton_minor

_FORCE = "ATTNGEN_INTERPRET"


@functools.cache
def forced() -> bool:
    """True if ATTNGEN_INTERPRET=1 asks for the interpreter on a machine with a GPU."""
    return os.environ.get(_FORCE, "") == "1"


@functools.cache
def enabled() -> bool:
    """True if this process may interpret: no CUDA device, or ATTNGEN_INTERPRET=1."""
    return forced() or not torch.cuda.is_available()


@functools.cache
def switch_on() -> None:
    """Put triton.language into interpreted form, with one notice. Does it once."""
    if os.environ.get("TRITON_INTERPRET", "") != "1":
        warnings.warn(
            "attngen: no CUDA device in use; kernels run in Triton's interpreter on the CPU, "
            "which checks results and is slow",
            stacklevel=2,
        )
    _repair_products()
    _fuse_multiply_add()
    _pass_over_nan()
    _add_descriptor_atomics()
    if triton_minor() == "3.6":  # the release whose code was looked at
        _patch_once_a_launch()
    for module in _language_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


def _patch_once_a_launch() -> None:
    """Have a launch put triton.language into interpreted form once, where Triton 3.6 does it anew
    for each function that a kernel calls: a third of a launch's time."""
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    modules = (triton.language, triton.language.core)
    done: set[tuple[bool, ...]] = set()

    def patch_lang(function: Any) -> Any:
        seen = tuple(any(x is m for x in function.__globals__.values()) for m in modules)
        if seen in done:
            return interpreter._LangPatchScope()  # of nothing
        done.add(seen)
        return patch(function)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        done.clear()
        return launch(self, *args, **named)

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = call


def _add_descriptor_atomics() -> None:
    """Give the interpreter `descriptor.atomic_add`, which Triton 3.6 leaves out."""

    def create_descriptor_reduce(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> Any:
        if kind != ir.DESCRIPTOR_REDUCE_KIND.ADD or value.dtype.scalar != triton.language.float32:
            raise NotImplementedError("only float32 sums are interpreted")
        ptrs, inside = desc.materialize_pointers(indices)
        mask = TensorHandle(inside, triton.language.int1)
        relaxed = ir.MEM_SEMANTIC.RELAXED
        return self.create_atomic_rmw(ir.ATOMIC_OP.FADD, ptrs, value, mask, relaxed, None)

    InterpreterBuilder.create_descriptor_reduce = create_descriptor_reduce


_FLOATS = (triton.language.float16, triton.language.bfloat16, triton.language.float32)


_FP8: dict[Any, torch.dtype] = {
    triton.language.float8e4nv: torch.float8_e4m3fn,
    triton.language.float8e5: torch.float8_e5m2,
}


def _float64(x: Any) -> np.ndarray:
    """The data of an operand, widened."""
    is_bits = x.dtype.scalar == triton.language.bfloat16
    return (_widen(x.data) if is_bits else x.data).astype(np.float64)


def _repair_products() -> None:
    """Give the interpreter bfloat16 products, rounding to nearest, and sums in one order.

    Triton 3.6 keeps bfloat16 as the bits of a uint16, multiplies those as integers, and truncates
    when it narrows. FP8 it keeps as bits too, and loses NaN, inf and ties when it converts them.
    """
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot
    convert = InterpreterBuilder.create_fp_to_fp
    language = triton.language

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        pair = src.dtype.scalar, dst_type.scalar
        if pair == (language.bfloat16, language.float32):
            return TensorHandle(_widen(src.data), language.float32)
        if pair == (language.float32, language.bfloat16):
            return TensorHandle(_narrow(src.data), language.bfloat16)
        if _FP8.keys() & pair:
            return TensorHandle(_through_float32(src.data, *pair), pair[1])
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if a.dtype.scalar not in _FLOATS:
            return dot(self, a, b, d, *options)
        # BLAS adds in an order of its own for each shape and processor. Forward and backward must
        # agree on a score, and delta with dP.
        product = _float64(a) @ _float64(b) + d.data
        return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        pair = src.dtype.scalar, dst_type.scalar
        if _FP8.keys() & pair:
            return TensorHandle(_through_float32(src.data, *pair), pair[1])
        return convert(self, src, dst_type, rounding)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_dot = create_dot


def _fuse_multiply_add() -> None:
    """Round a float32 multiply-add once, as the hardware does."""
    fma = InterpreterBuilder.create_fma

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        if x.dtype.scalar != triton.language.float32:
            return fma(self, x, y, z)
        wide = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(wide.astype(np.float32), triton.language.float32)

    InterpreterBuilder.create_fma = create_fma


def _pass_over_nan() -> None:
    """Of NaN and a number, minimum and maximum are the number, as the hardware's are."""

    def create_minnumf(self: Any, x: Any, y: Any) -> Any:
        return self.binary_op(x, y, np.fmin)

    def create_maxnumf(self: Any, x: Any, y: Any) -> Any:
        return self.binary_op(x, y, np.fmax)

    InterpreterBuilder.create_minnumf = create_minnumf
    InterpreterBuilder.create_maxnumf = create_maxnumf


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _narrow(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, nearest).astype(np.uint16)


def _through_float32(data: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """A conversion from or to FP8, which saturates, as the hardware's does."""
    if source in _FP8:
        bits = np.arange(256, dtype=np.uint8)
        values = torch.from_numpy(bits).view(_FP8[source]).float().numpy()[data]
    else:
        values = _widen(data) if source == triton.language.bfloat16 else data.astype(np.float32)
    if target in _FP8:
        most = torch.finfo(_FP8[target]).max
        narrow = torch.from_numpy(np.clip(values, -most, most)).to(_FP8[target])
        return narrow.view(torch.uint8).numpy()
    if target == triton.language.bfloat16:
        return _narrow(values)
    wide: np.ndarray = values.astype(f"float{target.primitive_bitwidth}")
    return wide


def _language_modules() -> list[ModuleType]:
    language = triton.language
    return [
        language,
        *(
            value
            for value in vars(language).values()
            if isinstance(value, ModuleType) and value.__name__.startswith("triton.language")
        ),
    ]


@contextlib.contextmanager
def interpreting() -> Iterator[None]:
    """Decorate what is imported inside for the interpreter."""
    switch_on()
    before = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    try:
        yield
    finally:
        triton.knobs.runtime.interpret = before
