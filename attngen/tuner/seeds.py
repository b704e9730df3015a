"""Configs that earlier tuning suggests for a key: the user's winners and the shipped ones."""

from __future__ import annotations

from attngen.config import KernelConfig, infeasible
from attngen.gpu import GpuInfo
from attngen.lookup import lookup
from attngen.records import RecordKey
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.workload import Bucket

MAX_SEEDS = 5


def stored_configs(
    store: Store, spec: AttentionSpec, key: RecordKey, bucket: Bucket, gpu: GpuInfo
) -> list[KernelConfig]:
    """What a look-up would serve for this key, best first: exact, neighbour buckets, other SKUs.

    The look-up offers its candidates in order until one is accepted; refusing all lists them.
    """
    offered: list[KernelConfig] = []

    def list_only(config: KernelConfig) -> list[str]:
        offered.append(config)
        return ["only listed"]

    lookup(store, key, bucket, gpu, list_only)
    feasible = (config for config in offered if not infeasible(spec, config, gpu))
    return list(dict.fromkeys(feasible))[:MAX_SEEDS]
