"""Calls that run a named config instead of the stored one: for `verify --config` and `bench`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from attngen import decode, resolve
from attngen.config import KernelConfig
from attngen.gpu import GpuInfo
from attngen.identity import record_key
from attngen.lookup import Found
from attngen.records import RecordKey
from attngen.spec import AttentionSpec
from attngen.workload import Bucket, Direction


@contextmanager
def pinned(configs: Mapping[Direction, KernelConfig]) -> Iterator[None]:
    """Within, every call of a direction in `configs` runs that config, whatever its bucket; one of
    "fwd" without one of "decode" serves few query rows, too.

    Kernels already resolved are forgotten at both ends, so that the next call looks again. Not for
    a process that serves other threads.
    """
    look_up = resolve.find

    def find(
        spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo, refused: resolve.Refused | None = None
    ) -> tuple[KernelConfig, Found, RecordKey]:
        config = configs.get(bucket.direction)
        if config is None:
            return look_up(spec, bucket, gpu, refused)
        return config, Found(None, "default", ["pinned"]), record_key(spec, bucket, gpu)

    gave_way = decode.gives_way
    resolve.reset()
    resolve.find = find
    decode.gives_way = "fwd" in configs and "decode" not in configs
    try:
        yield
    finally:
        resolve.find = look_up
        decode.gives_way = gave_way
        resolve.reset()
