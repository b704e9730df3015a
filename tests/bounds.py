"""In Triton's interpreter: does a kernel touch memory outside the tensors that it was given?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter


class OutOfBoundsError(Exception):
    """A load, store or atomic whose mask lets it leave every tensor of the launch."""


class Guard:
    """The memory of the tensors of the launch that runs, and how many accesses were looked at."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.accesses = 0

    def admit(self, arguments: Any) -> None:
        """Note the tensors among a launch's arguments."""
        self.ranges = []
        self._walk(arguments)

    def _walk(self, x: Any) -> None:
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            self.ranges.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        elif isinstance(x, dict):
            for each in x.values():
                self._walk(each)
        elif isinstance(x, (list, tuple)):
            for each in x:
                self._walk(each)
        elif hasattr(x, "base"):  # a tensor descriptor
            self._walk(x.base)

    def check(self, what: str, pointers: Any, mask: Any) -> None:
        """Raise if an unmasked pointer of a block lies in no tensor.

        Raises:
            OutOfBoundsError: one does.
        """
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        at, seen = np.broadcast_arrays(pointers.data, mask.data)
        at = at[seen.astype(bool)].astype(np.uint64)
        self.accesses += at.size
        inside = np.zeros(at.shape, bool)
        for begin, end in self.ranges:
            inside |= (at >= begin) & (at + size <= end)
        if not inside.all():
            raise OutOfBoundsError(f"{what}: {(~inside).sum()} of {at.size} leave all tensors")


@contextlib.contextmanager
def guarded() -> Iterator[Guard]:
    """While it lasts, every launch in the interpreter is checked."""
    guard, builder, executor = Guard(), interpreter.InterpreterBuilder, interpreter.GridExecutor
    initial = executor._init_args_hst
    load, store = builder.create_masked_load, builder.create_masked_store
    add = builder.create_atomic_rmw

    def admitted(self: Any, *arguments: Any) -> Any:
        found = initial(self, *arguments)
        guard.admit(found)
        return found

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        guard.check("load", pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        guard.check("store", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self: Any, what: Any, pointers: Any, value: Any, mask: Any, *a: Any) -> Any:
        guard.check("atomic", pointers, mask)
        return add(self, what, pointers, value, mask, *a)

    with (
        mock.patch.object(executor, "_init_args_hst", admitted),
        mock.patch.object(builder, "create_masked_load", checked_load),
        mock.patch.object(builder, "create_masked_store", checked_store),
        mock.patch.object(builder, "create_atomic_rmw", checked_atomic),
    ):
        yield guard
