"""Attention over two GPUs, by NCCL, against attention of the whole on one."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import attngen
from attngen import distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
TERMS = ("sinks", "alibi_slopes", "doc_ids_q")
CASES: list[dict[str, Any]] = [
    {},
    {"causal": True},
    {"causal": True, "window": (700, 0), "sinks": True},
    {"causal": True, "dropout_p": 0.2, "dropout_seed": 7},
    {"causal": True, "alibi_slopes": True},
    {"causal": True, "softcap": 20.0, "doc_ids_q": True},
]


def _rank(rank: int, world: int, store: str, case: dict[str, Any]) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=store,
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
        timeout=timedelta(seconds=120),
    )
    group = dist.group.WORLD
    device = torch.device("cuda", rank)
    seqlen, heads, heads_kv = 2050, 8, 2
    torch.manual_seed(0)
    shapes = [(2, n, seqlen, 128) for n in (heads, heads_kv, heads_kv, heads)]
    q, k, v, do = (torch.randn(s).to(device, torch.bfloat16) for s in shapes)
    options = {n: x for n, x in case.items() if n not in TERMS}
    terms: dict[str, Any] = {}
    if "sinks" in case:
        terms["sinks"] = torch.randn(heads).to(device)
    if "alibi_slopes" in case:
        terms["alibi_slopes"] = torch.rand(heads).to(device) / 8
    ids = (torch.arange(seqlen, device=device) // 300).int()[None]
    extra = {"doc_ids_q": ids, "doc_ids_k": ids} if "doc_ids_q" in case else {}
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attngen.attention(*whole, **options, **terms, **extra)
    want = [out, *torch.autograd.grad(out, whole, do)]
    for method in ("ring", "ulysses", "allgather"):
        for layout in ("contiguous", "zigzag", "striped"):
            near = [distributed.shard(x, layout, dim=2, group=group) for x in (q, k, v, do)]
            leaves = [x.requires_grad_() for x in near[:3]]
            ids_near = {
                n: distributed.shard(x, layout, dim=1, group=group) for n, x in extra.items()
            }
            got = distributed.attention(
                *leaves, group=group, method=method, layout=layout, **options, **terms,
                **ids_near, seqlen_q_total=seqlen, seqlen_k_total=seqlen,
            )  # fmt: skip
            results = [got, *torch.autograd.grad(got, leaves, near[3])]
            for name, a, w in zip(("out", "dq", "dk", "dv"), results, want, strict=True):
                w = distributed.shard(w.detach(), layout, dim=2, group=group)
                error = (a.float() - w.float()).abs().max() / w.float().abs().max()
                assert error < 2e-2, f"{case} {method} {layout} {name}: {error:.1e}"
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case) or "full")
def test_two_gpus_equal_one(case: dict[str, Any]) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (2, f"file://{folder}/store", case), nprocs=2)
