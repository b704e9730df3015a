"""Repeated launches: what stays from the first plan, and what each call's tensors replace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from attngen import launcher


class Recorder:
    """Stands in for a compiled Triton kernel and for the function that compiles it."""

    function = packed_metadata = None
    __name__ = "kernel"

    def __init__(self, *names: str) -> None:
        self.params = [SimpleNamespace(name=name) for name in names]
        self.runs: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: self

    def run(self, *arguments: Any) -> None:
        grid_stream_and_hooks = 9
        self.runs.append(arguments[grid_stream_and_hooks:])


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)


def plan(kernel: Recorder, x: torch.Tensor, y: torch.Tensor) -> list[Any]:
    """Two launches, of a pointer and a descriptor each."""
    rows = TensorDescriptor(y, list(y.shape), list(y.stride()), [1, 4])
    return [
        (kernel, (1, 1, 1), (x, rows, 7), {"BLOCK": 16}),
        (kernel, (2, 1, 1), (y, rows, 0.5), {"BLOCK": 32}),
    ]


def test_a_repeat_takes_its_own_tensors_and_the_first_plans_numbers() -> None:
    kernel = Recorder("x", "rows", "number", "BLOCK")
    first, other = ((torch.empty(3, 4), torch.empty(3, 4)) for _ in range(2))
    bound = launcher.bind(plan(kernel, *first), first)
    assert kernel.runs == []
    bound(other)
    one, two = kernel.runs
    assert one[0] == other[0].data_ptr()
    assert two[0] == other[1].data_ptr()
    assert one[2:] == (7, 16)
    assert two[2:] == (0.5, 32)
    for _, rows, *_ in kernel.runs:
        assert rows.base is other[1]
        assert (rows.shape, rows.strides, rows.padding) == ([3, 4], [4, 1], "zero")


def test_bound_launches_hold_no_tensor() -> None:
    kernel = Recorder("x", "rows", "number", "BLOCK")
    tensors = (torch.empty(3, 4), torch.empty(3, 4))
    held = launcher.bind(plan(kernel, *tensors), tensors)
    for each in held._launches:
        assert not any(isinstance(x, torch.Tensor) for x in each.arguments)
        assert all(like.base is None for _, _, like in each.descriptors)


def test_what_plan_made_itself_stays() -> None:
    """A table of work is the same for every call of a layout."""
    kernel = Recorder("x", "table", "rows", "BLOCK")
    first, other = (torch.empty(3, 4),), (torch.empty(3, 4),)
    table = torch.arange(4)
    rows = TensorDescriptor(table, [4], [1], [4])
    made = [(kernel, (1, 1, 1), (first[0], table, rows), {"BLOCK": 16})]
    launcher.bind(made, first)(other)
    (run,) = kernel.runs
    assert run == (other[0].data_ptr(), table, rows, 16)


def test_what_a_graph_captured_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(launcher, "_IN_GRAPHS", kept)
    x, table = (torch.empty(3, 4),), torch.arange(4)
    bound = launcher.bind([(Recorder("x", "table"), (1, 1, 1), (x[0], table), {})], x)
    bound(x)
    assert not kept
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    bound(x)
    assert len(kept) == 1 and kept[0] is table


@pytest.mark.parametrize("as_descriptor", [False, True])
def test_a_view_of_a_calls_tensor_is_refused(as_descriptor: bool) -> None:
    """It would point at the first call's memory for ever."""
    x = torch.empty(3, 4)
    view: Any = x[1:]
    if as_descriptor:
        view = TensorDescriptor(view, [2, 4], [4, 1], [1, 4])
    kernel = Recorder("x")
    with pytest.raises(ValueError, match="a view of one of its tensors"):
        launcher.bind([(kernel, (1, 1, 1), (view,), {})], (x,))


def test_a_profiler_sees_ordinary_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(launcher, "_is_checked", True)
    assert launcher.may_bind()

    def hook(metadata: Any) -> None: ...

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        assert not launcher.may_bind()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert launcher.may_bind()
