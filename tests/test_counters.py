"""Which launches share counters, on a GPU that is not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attngen import counters

Q: Any = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its stream, and whether that is captured; forgets all counters."""
    state = SimpleNamespace(stream=0, captures=False, made=0)

    def made(like: Any, count: int) -> Tensor:
        state.made += 1
        return torch.zeros(count, dtype=torch.int32)

    monkeypatch.setattr(counters, "_made", made)
    monkeypatch.setattr(counters, "_OF_STREAMS", {})
    monkeypatch.setattr(counters, "_OF_GRAPHS", {})
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda device: state.stream, raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captures)
    done = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: done)
    return state


def test_launches_of_a_stream_share_them(gpu: SimpleNamespace) -> None:
    first = counters.zeros(Q, 5)
    assert counters.zeros(Q, 900) is first
    gpu.stream = 1
    assert counters.zeros(Q, 5) is not first
    gpu.stream = 0
    assert counters.zeros(Q, 5000).numel() >= 5000


def test_each_launch_of_a_graph_has_its_own(gpu: SimpleNamespace) -> None:
    counters.zeros(Q, 5)
    gpu.captures, before = True, gpu.made
    one, two = counters.zeros(Q, 5), counters.zeros(Q, 6)
    assert gpu.made == before
    assert one.numel() == 5 and two.numel() == 6
    assert two.data_ptr() - one.data_ptr() == 32  # multiples of 16 bytes
    counters.zeros(Q, counters._IN_GRAPHS - 16)
    counters.zeros(Q, 5)  # none are left: zeroed by each replay
    assert gpu.made == before + 1


def test_a_capture_before_all_makes_zeros(gpu: SimpleNamespace) -> None:
    gpu.captures = True
    assert counters.zeros(Q, 7).tolist() == [0] * 7 and gpu.made == 1
