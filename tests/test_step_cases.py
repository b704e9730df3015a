"""Cases of `tests/cases/hand.jsonl` that are steps rather than numbers, about tuning and records.

Those that other files test: TUN-3 test_ops (two threads), TUN-6 and TUN-7 test_tuner, TUN-9
test_faults, KEY-4 test_schema, KEY-5 test_recheck, SQL-1 test_store (eight writers), SQL-3
test_schema (damage), SQL-5 test_store (kill in a transaction), SQL-7 test_kernel (a cache that
cannot be written).
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from samples import H200, MEASURED, find, under
from support import REPO, SMALL_BWD, SMALL_FWD, make_qkv, python

import attngen
from attngen import lowering, resolve
from attngen.config import FwdConfig
from attngen.identity import record_key
from attngen.pinned import pinned
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.workload import Workload, spec_bucket


def test_tun_1_repeated_calls_add_nothing_up() -> None:
    """Buffers that a kernel adds to begin at zero in every call."""
    q, k, v = make_qkv(seqlen_q=20, heads=4, heads_kv=2)
    atomic = replace(SMALL_BWD, dq="atomic")
    with pinned({"fwd": SMALL_FWD, "bwd": atomic}):
        passes = []
        for _ in range(3):
            out = attngen.attention(q, k, v, causal=True)
            passes.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for later in passes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(passes[0], later, strict=True))


def test_tun_5_a_record_too_large_for_the_gpu_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_DB", str(tmp_path / "tuning.db"))
    spec = AttentionSpec(head_dim=128, softcap=5.0)
    bucket = spec_bucket("fwd", spec, Workload(2, 8, 8, 777, 777))
    huge = FwdConfig(block_m=128, block_n=128, num_warps=8, num_stages=8)
    with Store.open() as store:
        key = record_key(spec, bucket, H200)
        store.record_winner(replace(MEASURED, key=key, config=huge.as_dict()))
    config, found, _ = resolve.find(spec, bucket, H200)
    assert config == lowering.default(spec, bucket, H200)
    assert any("refused on nvidia_h200" in line and "shared memory" in line for line in found.why)


def test_tun_10_two_configs_in_one_process_give_what_each_gives_alone() -> None:
    q, k, v = (x.detach() for x in make_qkv(seqlen_q=40))
    configs = [SMALL_FWD, replace(SMALL_FWD, block_n=32)]

    def through(config: FwdConfig) -> torch.Tensor:
        with pinned({"fwd": config}):
            out: torch.Tensor = attngen.attention(q, k, v, causal=True)
        return out

    alone = [through(config) for config in configs]
    together = [through(config) for config in [*configs, *configs]]
    for one, other in zip([*alone, *alone], together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"device_key": "sm_120-sm132-smem232448-l2_60"}, id="KEY-1-capability"),
        pytest.param({"policy": "another clock"}, id="KEY-3-policy"),
        pytest.param({"text_key": "head_dim=128,dtype=float16,causal=true"}, id="KEY-3-spec"),
    ],
)
def test_key_1_and_3_records_that_differ_in_a_hard_field_are_not_used(
    changed: dict[str, str],
) -> None:
    assert find(None, under(**changed)).tier == "default"
    assert find(None, MEASURED).record == MEASURED


TWO_WARPS = """
import triton
from attngen.config import parse
from attngen.kernel import Kernel
from attngen.spec import AttentionSpec
from attngen.tuner import case
from attngen.tuner.compile_worker import TargetDriver
from attngen.workload import Workload

triton.runtime.driver.set_active(TargetDriver(90))
spec, found = AttentionSpec(head_dim=64), set()
for warps, stages in ((4, 1), (8, 1), (4, 3)):
    config = parse("fwd", f"block_m=64,block_n=32,num_warps={warps},num_stages={stages}")
    inputs = case.make(spec, Workload(1, 2, 2, 64, 64), "meta", backward=False)
    plan = Kernel(spec, config, interpret=False).module.plan(
        *inputs.tensors(config), **inputs.numbers
    )
    for jit, grid, arguments, constants in plan:
        compiled = jit.warmup(*arguments, grid=grid, **constants)
        found.add((compiled.metadata.num_warps, compiled.asm["cubin"]))
print(len(found), sorted({warps for warps, _ in found}))
"""


def test_key_7_warps_and_stages_make_binaries_of_their_own() -> None:
    done = python(TWO_WARPS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[0] == "3 [4, 8]"


FIRST_CALL = """
import sys
import torch
import attngen

q = torch.arange(2 * 5 * 16, dtype=torch.float32).view(1, 2, 5, 16) / 100
print(attngen.attention(q, q, q, softcap=3.0).sum().item())
"""


@pytest.mark.slow
def test_rac_1_processes_with_one_empty_cache_all_succeed(tmp_path: Path) -> None:
    environment = {**os.environ, "ATTNGEN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", FIRST_CALL],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    ends = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0] * 8, ends[0][1][-2000:]
    assert len({out for out, _ in ends}) == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_sql_2_a_writer_waits_for_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with Store.open(path):
        pass
    held, released = threading.Event(), []

    def hold() -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            held.set()
            time.sleep(2.0)
            released.append(time.monotonic())
            other.execute("COMMIT")

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    with Store.open(path) as store:
        assert store.record_winner(MEASURED)
        assert released and time.monotonic() >= released[0]
        assert store.winners() == [MEASURED]
    holder.join()
    with closing(sqlite3.connect(path)) as check:
        assert check.execute("PRAGMA integrity_check").fetchone() == ("ok",)
