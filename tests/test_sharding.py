"""DTensor and FSDP2 with attngen: two ranks on the CPU, gloo."""

from __future__ import annotations

import pytest
from support import python

pytestmark = pytest.mark.slow  # processes that import torch

# Each rank runs `check(rank)`.
RANKS = """
import os, socket, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import (
    DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
)
import attngen
from support import assert_close, make_qkv

def run(rank, port):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    check(rank)
    dist.destroy_process_group()

def start():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(run, (port,), nprocs=2, start_method="fork")
"""

DTENSOR = """
def check(rank):
    mesh = init_device_mesh("cpu", (2,))

    def compare(placements, wanted, heads_kv=2, batch=2, **beside):
        tensors = [x.detach() for x in make_qkv(batch, 4, 9, heads_kv=heads_kv)]
        tensors += [x for x in beside.values() if isinstance(x, torch.Tensor)]

        def solve(tensors):
            leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
            more = iter(leaves[3:])
            named = {n: next(more) if isinstance(x, torch.Tensor) else x for n, x in beside.items()}
            out, lse = attngen.attention(*leaves[:3], return_lse=True, **named)
            (out.sin().sum() + lse.sum()).backward()
            return [out, lse, *(x.grad for x in leaves if x.requires_grad)]

        right = solve(tensors)
        found = solve([distribute_tensor(x, mesh, [p]) for x, p in zip(tensors, placements)])
        assert [x.placements[0] for x in found] == wanted, [x.placements for x in found]
        assert_close([x.full_tensor() for x in found], right)

    batch, heads, rows, whole, part = Shard(0), Shard(1), Shard(2), Replicate(), Partial()
    compare([batch] * 3, [batch] * 5, causal=True)
    compare([heads] * 3, [heads] * 5, causal=True)
    compare([rows] * 3, [whole] * 5, causal=True)  # gathered first
    compare([heads, whole, whole], [heads] * 3 + [part] * 2, heads_kv=1)
    bias = torch.randn(1, 4, 9, 9)
    compare([batch] * 3 + [whole], [batch] * 5 + [part], bias=bias)
    compare([heads] * 3 + [heads], [heads] * 6, bias=bias)
    compare([heads] * 3 + [batch], [heads] * 5 + [batch], sinks=torch.randn(4))  # its dim 0
    compare([batch] * 3 + [whole], [batch] * 5, attn_mask=torch.rand(9, 9) > 0.3)
    seed = torch.tensor([7])  # bits are numbered by batch rows and heads: computed whole
    compare([heads] * 3 + [whole], [whole] * 5, dropout_p=0.3, dropout_seed=seed)
    q, k, v = (distribute_tensor(x.detach(), mesh, [heads]) for x in make_qkv(heads=4))
    with torch.inference_mode():
        out = attngen.attention(q, k, v)
    assert out.placements == (heads,)

    # A cache of pages, quantised by key: heads are the last dim of its scales.
    table, used = torch.tensor([[0, 1], [2, 3]]).int(), torch.tensor([20, 30]).int()
    pages = [torch.randint(-99, 99, (4, 16, 2, 16), dtype=torch.int8) for _ in "kv"]
    scales = [torch.rand(4, 16, 2) for _ in "kv"]
    query = torch.randn(2, 4, 3, 16, dtype=torch.bfloat16)

    def decode(query, k, v, k_descale, v_descale, used, table):
        named = {"k_descale": k_descale, "v_descale": v_descale}
        return attngen.attention(query, k, v, seqused_k=used, block_table=table, **named)

    tensors = [query, *pages, *scales, used, table]
    places = [heads, rows, rows, rows, rows, whole, whole]
    out = decode(*[distribute_tensor(x, mesh, [p]) for x, p in zip(tensors, places)])
    assert out.placements == (heads,) and torch.equal(out.full_tensor(), decode(*tensors))

start()
"""

FSDP2 = """
from torch.distributed.fsdp import fully_shard

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        spec = attngen.AttentionSpec(head_dim=16, dtype="float32", causal=True, layout="bshd")
        self.attend = attngen.compile(spec)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 16)).unbind(2)
        return x + self.out(self.attend(q, k, v).flatten(2))

def check(rank):
    torch.manual_seed(0)
    data = torch.randn(2, 1, 12, 32)

    def model():
        torch.manual_seed(1)
        return nn.Sequential(Layer(), Layer())

    whole = model()
    sum(whole(x).square().mean() for x in data).div(2).backward()
    sharded = model()
    for layer in sharded:
        fully_shard(layer)
    fully_shard(sharded)
    sharded(data[rank]).square().mean().backward()
    pairs = list(zip(sharded.parameters(), whole.parameters()))
    assert all(isinstance(x.grad, DTensor) for x, _ in pairs)
    assert_close([x.grad.full_tensor() for x, _ in pairs], [x.grad for _, x in pairs])
    torch.optim.SGD(sharded.parameters(), 0.1).step()

start()
"""


@pytest.mark.parametrize("check", [DTENSOR, FSDP2], ids=["dtensor", "fsdp2"])
def test_two_ranks(check: str) -> None:
    done = python(RANKS + check)
    assert done.returncode == 0, done.stderr[-3000:]
