"""Configs that earlier tuning suggests for a key."""

from __future__ import annotations

import contextlib

from attngen import config as configs
from attngen import lowering
from attngen.config import KernelConfig, infeasible
from attngen.errors import SpecError
from attngen.gpu import GpuInfo
from attngen.lookup import lookup
from attngen.records import RecordKey
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.trials import Trial
from attngen.workload import Bucket, Workload

MAX_SEEDS = 5
MAX_REVALIDATED = 16


def stored_configs(
    store: Store,
    spec: AttentionSpec,
    key: RecordKey,
    bucket: Bucket,
    gpu: GpuInfo,
    workload: Workload,
) -> list[KernelConfig]:
    """Winners that a look-up would serve for this key, best first (exact, neighbour buckets, other
    SKUs), then the fastest on other sizes of the bucket, and of other Triton and template versions.

    The look-up offers its candidates in order until one is accepted; refusing all lists them.
    """
    offered: list[KernelConfig] = []

    def list_only(config: KernelConfig) -> list[str]:
        offered.append(config)
        return ["only listed"]

    lookup(store, key, bucket, gpu, list_only)
    sizes = str(workload)
    found = [
        *list(dict.fromkeys(offered))[:MAX_SEEDS],
        *_configs(bucket, [t for t in store.top(key, workload=sizes) if t.workload != sizes]),
        *_configs(bucket, store.top_of_other_versions(key, workload=sizes)),
    ]
    return [config for config in dict.fromkeys(found) if _may_serve(spec, config, bucket, gpu)]


def best_configs(
    store: Store,
    spec: AttentionSpec,
    key: RecordKey,
    bucket: Bucket,
    gpu: GpuInfo,
    workload: Workload,
) -> list[KernelConfig]:
    """The stored top of this key, or of its other versions: what `--revalidate` times again."""
    top = store.top(key, workload=str(workload))
    top = top or store.top_of_other_versions(key, workload=str(workload))
    found = [*_configs(bucket, top), *stored_configs(store, spec, key, bucket, gpu, workload)]
    return [c for c in dict.fromkeys(found) if _may_serve(spec, c, bucket, gpu)][:MAX_REVALIDATED]


def _may_serve(spec: AttentionSpec, config: KernelConfig, bucket: Bucket, gpu: GpuInfo) -> bool:
    return not (infeasible(spec, config, gpu) or lowering.refusal(spec, config, bucket, gpu))


def _configs(bucket: Bucket, trials: list[Trial]) -> list[KernelConfig]:
    """The configs of trials; one that this version cannot read is left out."""
    found = []
    for trial in trials:
        with contextlib.suppress(SpecError):
            found.append(configs.from_dict(bucket.direction, trial.config))
    return found
