"""Ranks look up what rank 0 has, whatever their own databases hold."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from samples import MEASURED

from attngen import resolve, sync_configs
from attngen.config import FwdConfig
from attngen.errors import StoreError
from attngen.gpu import by_name
from attngen.identity import record_key
from attngen.records import Record
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.workload import Workload, spec_bucket

GPU = by_name("nvidia_h200")
SPEC = AttentionSpec(head_dim=96, dtype="float16", softcap=7.0)
BUCKET = spec_bucket("fwd", SPEC, Workload(2, 4, 4, 512, 512))
WARPS = {0: 4, 1: 8}


def found() -> tuple[int, str]:
    config, why, _ = resolve.find(SPEC, BUCKET, GPU)
    return config.num_warps, why.tier


def rank(number: int, folder: str) -> None:
    """One rank with a winner of its own."""
    os.environ |= {"ATTNGEN_DB": f"{folder}/{number}.db", "ATTNGEN_TUNED_DIR": ""}
    config = FwdConfig(block_m=64, block_n=32, num_warps=WARPS[number], num_stages=1)
    key = record_key(SPEC, BUCKET, GPU)
    with Store.open(f"{folder}/{number}.db") as store:
        store.record_winner(replace(MEASURED, key=key, config=config.as_dict()))
    assert found() == (WARPS[number], "user")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=number, world_size=len(WARPS)
    )
    sync_configs()
    assert found() == (WARPS[0], "user")
    with Store.open(f"{folder}/{number}.db") as store:  # a change on one rank comes too late
        store.record_winner(replace(MEASURED, key=key, config=config.as_dict() | {"num_warps": 2}))
    assert found() == (WARPS[0], "user")
    resolve.reset()
    assert found() == (2, "user")
    dist.destroy_process_group()


def test_all_ranks_use_the_records_of_rank_0(tmp_path: Path) -> None:
    multiprocessing.spawn(rank, (str(tmp_path),), nprocs=len(WARPS))


def test_without_torch_distributed_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "freeze", lambda *records: pytest.fail("nothing to sync"))
    sync_configs()


def test_trouble_with_the_database_of_rank_0_stops_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.winners

    def broken(store: Store, *args: str) -> list[Record]:
        if store.readonly:
            raise StoreError("the database is locked")
        return real(store, *args)

    monkeypatch.setattr(Store, "winners", broken)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        with pytest.warns(RuntimeWarning, match="is locked; the ranks go on with the shipped"):
            sync_configs()
    finally:
        dist.destroy_process_group()
        resolve.reset()
