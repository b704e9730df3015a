"""What a record is found by: the key of a (spec, bucket, device) under this installation.

Imports neither torch nor triton.
"""

from __future__ import annotations

import functools

from attngen.errors import SpecError
from attngen.gpu import GpuInfo
from attngen.records import POLICY, Record, RecordKey
from attngen.render import template_hash
from attngen.spec import AttentionSpec
from attngen.versions import triton_minor
from attngen.workload import Bucket


@functools.lru_cache(maxsize=1024)
def parsed(text_key: str) -> AttentionSpec:
    """The spec a text key stands for; parsed once a process."""
    return AttentionSpec.parse(text_key)


def record_key(spec: AttentionSpec, bucket: Bucket, gpu: GpuInfo) -> RecordKey:
    """The key under which the tuner stores, and the look-up seeks, a record."""
    text = spec.tuned.text_of(bucket.direction)
    return RecordKey(
        text_key=text.text_key,
        template_hash=template_hash(text, bucket.direction, gpu.arch),
        bucket=bucket.key,
        device_key=gpu.device_key,
        triton=triton_minor(),
        policy=POLICY,
    )


def stale_in(record: Record) -> list[str]:
    """What of a record's key this installation would not look for: "triton 3.9, here 3.6"."""
    found = []
    if record.key.triton != triton_minor():
        found.append(f"triton {record.key.triton}, here {triton_minor()}")
    try:
        spec = parsed(record.key.text_key)
    except SpecError as error:
        return [*found, f"spec: {error}"]
    arch = record.key.device_key.partition("-")[0]
    text = spec.text_of(record.direction)
    if record.key.template_hash != template_hash(text, record.direction, arch):
        found.append("templates")
    return found
