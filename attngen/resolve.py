"""`(spec, bucket, device) -> kernel`, once a process: look-up, default, import.

A resolved kernel stays for the life of the process, so that recomputation in a checkpoint and ranks
after a broadcast cannot change config in mid-run; `reset` (attngen.reload) forgets them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from attngen import gpu as gpus
from attngen import interpreter, lowering
from attngen.config import KernelConfig, infeasible
from attngen.gpu import GpuInfo
from attngen.identity import parsed, record_key, stale_in
from attngen.kernel import Kernel, kernel
from attngen.lookup import EXACT_TIERS, Found, lookup
from attngen.records import Record, RecordKey, shipped
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.workload import Bucket


@dataclass(frozen=True)
class Resolved:
    """The kernel that serves a (spec, bucket, device), and why."""

    kernel: Kernel
    by_pointer: Kernel
    """`lowering.by_pointer`, for tensors that descriptors cannot address."""
    found: Found
    key: RecordKey
    gpu: GpuInfo


@functools.cache
def device_info(index: int | None) -> GpuInfo:
    """Facts of a CUDA device; of the interpreter for None."""
    return gpus.INTERPRETER if index is None else gpus.from_device(index)


Refused = dict[KernelConfig, list[str]]
"""Configs that must not serve, each with its reasons."""


def find(
    spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo, refused: Refused | None = None
) -> tuple[KernelConfig, Found, RecordKey]:
    """The config that serves a spec: a stored one that fits, else the default. Never tunes."""
    spec = spec.served_as(bucket.direction)
    key = record_key(spec, bucket, gpu)
    if gpu.is_interpreter:
        found = Found(record=None, tier="default", why=["Triton's interpreter is not tuned"])
    else:
        found = _look_up(spec, key, bucket, gpu, refused or {})
    if found.record is None:
        return lowering.default(spec, bucket, gpu), found, key
    config = found.record.kernel_config
    is_guess = found.record.origin == "predicted" or found.tier not in EXACT_TIERS
    if is_guess and lowering.surpasses(spec, config, bucket, gpu):
        why = f"{config.key} was not compared with lowering=hopper, whose default goes first"
        found = Found(record=None, tier="default", why=[*found.why, why])
        return lowering.default(spec, bucket, gpu), found, key
    return config, found, key


def _look_up(
    spec: AttentionSpec, key: RecordKey, bucket: Bucket, gpu: GpuInfo, refused: Refused
) -> Found:
    """The best record, and for a deterministic spec without an exact one, the free spec's.

    What won among all configs, and is deterministic, wins among the deterministic ones.
    """

    def accept(config: KernelConfig) -> list[str]:
        return (
            refused.get(config)
            or lowering.refusal(spec, config, bucket, gpu)
            or infeasible(spec, config, gpu)
        )

    with _records() as (store, pool):
        found = lookup(store, key, bucket, gpu, accept, shipped_records=pool)
        if found.tier in EXACT_TIERS or not spec.text_of(bucket.direction).deterministic:
            return found
        free = record_key(replace(spec, deterministic=False), bucket, gpu)
        other = lookup(store, free, bucket, gpu, accept, shipped_records=pool)
    if other.record is not None and (other.tier in EXACT_TIERS or found.record is None):
        return other._replace(why=[*found.why, *other.why])
    return found


_FROZEN: list[tuple[Store, tuple[Record, ...]]] = []
"""The user's and the shipped records of rank 0, once `attngen.sync_configs` has brought them."""


@contextmanager
def _records() -> Iterator[tuple[Store, tuple[Record, ...] | None]]:
    """What a look-up may find: rank 0's records, or else the database and what is shipped."""
    if _FROZEN:
        yield _FROZEN[0]
        return
    with Store.open(readonly=True) as store:
        yield store, None


def freeze(user: Iterable[Record], theirs: Iterable[Record]) -> None:
    """Resolve anew, from these records alone, until `reset`."""
    with _RESOLVING:
        reset()
        _FROZEN.append((Store.in_memory(user), tuple(theirs)))


_RESOLVED: dict[tuple[str, Bucket, int | None], Resolved] = {}
_RESOLVING = threading.RLock()


def resolve(text_key: str, bucket: Bucket, device_index: int | None) -> Resolved:
    """The kernel of a spec's text in a bucket on a device; None is the interpreter."""
    at = (text_key, bucket, device_index)
    resolved = _RESOLVED.get(at)
    if resolved is None:
        with _RESOLVING:
            resolved = _RESOLVED.get(at)
            if resolved is None:
                resolved = _resolve(text_key, bucket, device_index)
                _RESOLVED[at] = resolved
    return resolved


def find_checked(
    spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo
) -> tuple[KernelConfig, Found, RecordKey]:
    """`find`, on the GPU itself: what another compiler or GPU chose is checked by this one."""
    refused: Refused = {}
    while True:
        config, found, key = find(spec, bucket, gpu, refused)
        chosen_here = found.record is None or not stale_in(found.record)
        if chosen_here and found.tier != "other sku":
            return config, found, key
        from attngen.tuner.recheck import disagreements

        why = disagreements(spec, config, gpu)
        if not why:
            return config, found, key
        refused[config] = why


def _resolve(text_key: str, bucket: Bucket, device_index: int | None) -> Resolved:
    spec = parsed(text_key)
    gpu = device_info(device_index)
    look_up = find if device_index is None else find_checked
    config, found, key = look_up(spec, bucket, gpu)
    interpret = device_index is None
    by_pointer = kernel(spec, lowering.by_pointer(spec, config, bucket, gpu), interpret)
    best = by_pointer if by_pointer.config == config else kernel(spec, config, interpret)
    return Resolved(best, by_pointer, found, key, gpu)


_ON_RESET: list[Any] = []


def on_reset(forget: Any) -> None:
    """Register a cache that must be emptied when resolved kernels are forgotten."""
    _ON_RESET.append(forget)


def reset() -> None:
    """Forget every resolved kernel; the next call reads the database again."""
    with _RESOLVING:
        _RESOLVED.clear()
        _FROZEN.clear()
        shipped.cache_clear()
        for forget in _ON_RESET:
            forget()


def device_index_of(tensor: Any) -> int | None:
    """The CUDA index of a tensor's device, or None where the interpreter serves it."""
    if tensor.is_cuda and not interpreter.forced():
        index = tensor.device.index
        return int(index)
    return None
