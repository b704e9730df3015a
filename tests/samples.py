"""Sample records and a look-up around them, shared by the tests of the tuning database."""

from __future__ import annotations

from dataclasses import replace

from attngen.config import FwdConfig, KernelConfig
from attngen.gpu import by_name
from attngen.lookup import lookup
from attngen.records import POLICY, Provenance, Record, RecordKey
from attngen.store import Store
from attngen.workload import Bucket

H200, H100, A100 = by_name("nvidia_h200"), by_name("nvidia_h100_sxm"), by_name("nvidia_a100")
BUCKET = Bucket("fwd", 4096, 4096, 64, 8, 0)
KEY = RecordKey(
    text_key="head_dim=128,dtype=bfloat16,causal=true",
    template_hash="3f2a91c0",
    bucket=BUCKET.key,
    device_key=H200.device_key,
    triton="3.6",
    policy=POLICY,
)
CONFIG = FwdConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)
MEASURED = Record(
    key=KEY,
    direction="fwd",
    config=CONFIG.as_dict(),
    median_us=100.0,
    spread_us=1.5,
    default_us=130.0,
    rounds=9,
    error=0.002,
    origin="measured",
    clocks_mhz=(1980, 1965),
    provenance=Provenance(
        gpu="nvidia_h200", driver="570.1", cuda="12.8", torch="2.11.0", triton="3.6.0"
    ),
    date="2026-11-29T21:38:00Z",
)
PREDICTED = replace(
    MEASURED, origin="predicted", median_us=None, default_us=None, rounds=0, clocks_mhz=None
)


def config(n: int) -> FwdConfig:
    return replace(CONFIG, block_n=n)


def faster(gain: float) -> Record:
    return replace(MEASURED, default_us=gain * 100.0)


def under(record: Record = MEASURED, **changes: str) -> Record:
    """The same record filed under another key."""
    return replace(record, key=replace(record.key, **changes))


def at(**sizes: int) -> Record:
    return under(bucket=replace(BUCKET, **sizes).key)


def accept_all(config: KernelConfig) -> list[str]:
    return []


def find(store: Store | None, *pool: Record, gpu=H200, accept=accept_all, bucket=BUCKET):
    key = replace(KEY, device_key=gpu.device_key, bucket=bucket.key)
    return lookup(store, key, bucket, gpu, accept, shipped_records=pool)
