"""In which order configs are tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attngen.config import BwdConfig, FwdConfig
from attngen.gpu import by_name
from attngen.search_order import known_starts, model_order
from attngen.search_space import candidates
from attngen.spec import AttentionSpec
from attngen.workload import Direction, Workload, spec_bucket

H200, A10G = by_name("nvidia_h200"), by_name("nvidia_a10g")
SPECS = [
    pytest.param(AttentionSpec(head_dim=128, causal=True), id="d128"),
    pytest.param(AttentionSpec(head_dim=256), id="d256"),
    pytest.param(AttentionSpec(head_dim=40, head_dim_v=36), id="no-tma"),
    pytest.param(AttentionSpec(head_dim=64, dtype="float32"), id="float32"),
    pytest.param(AttentionSpec(head_dim=64, deterministic=True), id="deterministic"),
    pytest.param(AttentionSpec(head_dim=64, batch_invariant=True), id="batch-invariant"),
]
DIRECTIONS: list[Direction] = ["fwd", "bwd"]


def bucket_of(direction: Direction, spec: AttentionSpec):
    return spec_bucket(direction, spec, Workload(2, 16, 4, 4096, 4096))


@pytest.mark.parametrize("gpu", [H200, A10G], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("spec", SPECS)
def test_the_order_is_complete_and_of_the_configs_alone(spec, direction, gpu):
    bucket = bucket_of(direction, spec)
    found = candidates(spec, bucket, gpu)
    order = model_order(spec, bucket, gpu, found)
    assert len(order) == len(found) and set(order) == set(found)
    assert order == model_order(spec, bucket, gpu, reversed(found))


@pytest.mark.parametrize(
    ("dim", "direction", "first"),
    [
        (128, "fwd", FwdConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)),
        (64, "fwd", FwdConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        (256, "fwd", FwdConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)),
        (
            64,
            "bwd",
            BwdConfig(
                block_m=64,
                block_n=64,
                num_warps=4,
                num_stages=3,
                dq_block_m=64,
                dq_block_n=64,
                dq_num_warps=4,
                dq_num_stages=3,
            ),
        ),
    ],
)
def test_known_good_starts_lead(dim, direction, first):
    spec = AttentionSpec(head_dim=dim, causal=True)
    bucket = bucket_of(direction, spec)
    order = model_order(spec, bucket, H200, candidates(spec, bucket, H200))
    assert replace(first, tiles="descriptor") in order[:2]
    assert order[0].tiles == "descriptor"
    assert order[: len(known_starts(spec, bucket, H200))] == known_starts(spec, bucket, H200)
