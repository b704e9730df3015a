"""Counters of kernels whose last program finishes the work of all: zero before a launch, and again
after it.

Launches that may run at one time must not share them. Those of one stream do not; a CUDA graph has
counters of its own for each launch that it captures, since it may be replayed beside anything.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_IN_GRAPHS = 1 << 20
"""Counters that graphs of a device get; further ones are set to zero by each replay."""
_AT_LEAST = 1024
_OF_STREAMS: dict[tuple[int, int], Tensor] = {}
_OF_GRAPHS: dict[int, Tensor] = {}
"""Those of a device that no graph has yet."""
_LOCK = threading.Lock()


def zeros(like: Tensor, count: int) -> Tensor:
    """So many counters for a launch on the current stream, or more."""
    if not like.is_cuda:
        return torch.zeros(count, dtype=torch.int32, device=like.device)
    device = like.device.index
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return zeros(like, count)
    if torch.cuda.is_current_stream_capturing():
        return _of_graph(like, count)
    at = device, torch._C._cuda_getCurrentRawStream(device)
    found = _OF_STREAMS.get(at)
    if found is None or found.numel() < count:
        found = _made(like, max(count, _AT_LEAST))
        with _LOCK:
            _OF_STREAMS[at] = found
            if device not in _OF_GRAPHS:  # a capture cannot make them
                _OF_GRAPHS[device] = _made(like, _IN_GRAPHS)
                torch.cuda.current_stream(device).synchronize()  # once: any stream may use them
    return found


def _made(like: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=like.device)


def _of_graph(like: Tensor, count: int) -> Tensor:
    with _LOCK:
        free = _OF_GRAPHS.get(like.device.index)
        if free is None or free.numel() < count:
            return _made(like, count)
        taken = -(-count // 4) * 4  # pointers are multiples of 16 bytes
        _OF_GRAPHS[like.device.index] = free[taken:]
        return free[:count]
