"""Decode on the GPU: dense and paged keys, graphs replayed with other lengths, bits in batches."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import oracle
from torch import Tensor

import attngen
from attngen.decode import DecodeConfig
from attngen.pinned import pinned

pytestmark = pytest.mark.gpu


def _inputs(batch: int, heads: int, heads_kv: int, rows: int, keys: int, dim: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((batch, heads, rows, dim), (batch, heads_kv, keys, dim), (batch, heads_kv, keys, dim))
    made = (torch.randn(shape, device="cuda", generator=generator) for shape in shapes)
    return [x.bfloat16() for x in made]


def _compare(
    out: Tensor, lse: Tensor, *tensors: Tensor, lse_yard: Tensor | None = None, **named: Any
) -> None:
    want, yard = oracle.attention(*tensors, **named), oracle.unfused(*tensors, **named)
    for got, right, about, dtype in (
        (out, want.out, yard.out, out.dtype),
        (lse, want.lse, yard.lse if lse_yard is None else lse_yard, torch.float32),
    ):
        ok, why = oracle.judge(got, right, dtype, yard=about)
        assert ok, why


def _lse_by_cublas(q: Tensor, k: Tensor, count: int) -> Tensor:
    """lse of one batch row, one kv head and one query row, over the first `count` keys: scores by
    cuBLAS in float32, the rest in float64.

    Hopper's tensor cores truncate what they add, so that float32 matmuls, which round, are no
    yardstick of great scores of many columns (docs/hopper.md, Rescaling).
    """
    scores = torch.mm(q[0, :, 0], k[0, 0].T, out_dtype=torch.float32)[:, :count]
    return torch.logsumexp(scores.double() * q.shape[-1] ** -0.5, -1)[None, :, None]


def _paged(x: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Every key in shuffled pages, and the table."""
    batch, heads, keys, dim = x.shape
    count = keys // page
    order = torch.randperm(batch * count, generator=torch.Generator().manual_seed(1)).cuda()
    pages = x.new_empty(batch * count, page, heads, dim)
    pages[order] = x.transpose(1, 2).reshape(batch * count, page, heads, dim)
    return pages, order.int().view(batch, count)


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize(("heads", "heads_kv", "rows"), [(8, 8, 1), (32, 4, 1), (6, 2, 16)])
def test_dense(dim: int, heads: int, heads_kv: int, rows: int) -> None:
    tensors = _inputs(2, heads, heads_kv, rows, 777, dim)
    out, lse = attngen.attention(*tensors, causal=True, return_lse=True)
    _compare(out, lse, *tensors, causal=True)


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("rows", [1, 130])
def test_paged(page: int, rows: int) -> None:
    q, k, v = _inputs(3, 8, 2, rows, 1024, 128)
    (keys, table), (values, _) = _paged(k, page), _paged(v, page)
    used = torch.tensor([1024, 300, 131], device="cuda", dtype=torch.int32)
    call = {"block_table": table, "seqused_k": used, "causal": True, "return_lse": True}
    out, lse = attngen.attention(q, keys, values, **call)
    for b, n in enumerate(used.tolist()):
        at = slice(b, b + 1)
        _compare(out[at], lse[at], q[at], k[at, :, :n], v[at, :, :n], causal=True)


@pytest.mark.parametrize(("heads", "rows"), [(128, 1), (16, 1), (128, 2)])
@pytest.mark.parametrize("is_view", [True, False], ids=["view", "copy"])
def test_latent_attention(heads: int, rows: int, is_view: bool) -> None:
    """One kv head of 576 columns, v its first 512, and a v that lies elsewhere."""
    q, k, _ = _inputs(3, heads, 1, rows, 1024, 576)
    keys, table = _paged(k, 64)
    values = keys[..., :512] if is_view else keys[..., :512].clone()
    used = torch.tensor([1024, 300, 0], device="cuda", dtype=torch.int32)
    call = {"block_table": table, "seqused_k": used, "causal": rows > 1, "return_lse": True}
    out, lse = attngen.attention(q, keys, values, **call)
    for b, n in enumerate(used.tolist()):
        at = slice(b, b + 1)
        _compare(out[at], lse[at], q[at], k[at, :, :n], k[at, :, :n, :512], causal=rows > 1)


@pytest.mark.parametrize("page", [0, 16, 64, 256])
def test_latent_attention_by_hopper(page: int) -> None:
    """Lengths around pages and tiles, splits, other tensors of the same layout, and a graph, in the
    kernel that serves them by default on sm_90."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper lowering is for sm_90")
    q, k, _ = _inputs(5, 128, 1, 1, 1024, 576)
    lengths = [0, 1, 1024, 257, 63] if page else [1024] * 5
    cache, options = k, dict[str, Any](return_lse=True)
    if page:
        cache, table = _paged(k, page)
        used = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        options |= {"block_table": table, "seqused_k": used}
    named = {"block_table": options["block_table"]} if page else {}
    for causal in (False, True):
        spec = attngen.AttentionSpec(head_dim=576, head_dim_v=512, paged=page > 0, causal=causal)
        choice = attngen.compile(spec).explain(q, cache, cache[..., :512], **named).choices[0]
        assert choice.config.lowering == "hopper"

    def compare(out: Tensor, lse: Tensor, q: Tensor, k: Tensor, great: bool = False) -> None:
        for b, n in enumerate(lengths):
            at = slice(b, b + 1)
            yard = _lse_by_cublas(q[at], k[at], n) if great else None
            _compare(out[at], lse[at], q[at], k[at, :, :n], k[at, :, :n, :512], lse_yard=yard)

    for causal in (False, True, False, True):
        compare(*attngen.attention(q, cache, cache[..., :512], causal=causal, **options), q, k)
    static_q, static_cache = q * 30, cache.clone()
    found = attngen.attention(static_q, static_cache, static_cache[..., :512], **options)
    compare(*found, q * 30, k, great=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = attngen.attention(static_q, static_cache, static_cache[..., :512], **options)
    static_q.copy_(-q)
    if page:
        lengths.reverse()
        used.copy_(torch.tensor(lengths))
    graph.replay()
    compare(*made, -q, k)


def test_latent_attention_in_any_batch() -> None:
    """batch_invariant: the bits of a row alone."""
    spec = attngen.AttentionSpec(head_dim=576, head_dim_v=512, paged=True, batch_invariant=True)
    attend = attngen.compile(spec)
    q, k, _ = _inputs(4, 128, 1, 1, 2048, 576)
    pages, table = _paged(k, 64)
    used = torch.tensor([2048, 700, 64, 1], device="cuda", dtype=torch.int32)
    out = attend(q, pages, pages[..., :512], block_table=table, seqused_k=used)
    for b in range(4):
        at = slice(b, b + 1)
        call = {"block_table": table[at], "seqused_k": used[at]}
        assert torch.equal(attend(q[at], pages, pages[..., :512], **call), out[at])


def test_a_graph_follows_lengths() -> None:
    q, k, v = _inputs(4, 32, 8, 1, 2048, 128)
    used = torch.full((4,), 2048, device="cuda", dtype=torch.int32)
    attngen.attention(q, k, v, seqused_k=used)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attngen.attention(q, k, v, seqused_k=used, return_lse=True)
    for lengths in ((2048, 1, 100, 0), (17, 2048, 1, 640)):
        used.copy_(torch.tensor(lengths))
        graph.replay()
        for b, n in enumerate(lengths):
            at = slice(b, b + 1)
            _compare(out[at], lse[at], q[at], k[at, :, :n], v[at, :, :n])


def test_bits_depend_on_the_row_alone() -> None:
    spec = attngen.AttentionSpec(head_dim=128, paged=True, batch_invariant=True)
    attend = attngen.compile(spec)
    q, k, v = _inputs(64, 8, 2, 1, 2048, 128)
    (keys, table), (values, _) = _paged(k, 64), _paged(v, 64)
    used = torch.randint(1, 2048, (64,), device="cuda", dtype=torch.int32)
    out = attend(q, keys, values, block_table=table, seqused_k=used)
    for count in (1, 7, 33):
        at = torch.randperm(64, device="cuda")[:count]
        most = int(-(-used[at].max() // 64))
        rows = {"block_table": table[at, :most], "seqused_k": used[at]}
        assert torch.equal(attend(q[at], keys, values, **rows), out[at])


def test_append_then_attend() -> None:
    q, k, v = _inputs(2, 8, 2, 65, 65, 128)
    keys, values = torch.full((2, 10, 16, 2, 128), float("nan"), device="cuda").bfloat16()
    table = torch.randperm(10, device="cuda").int().view(2, 5)
    at = torch.zeros(2, device="cuda", dtype=torch.int32)
    attngen.append_kv(k[:, :, :64], v[:, :, :64], keys, values, positions=at, block_table=table)
    last = at + 64
    attngen.append_kv(k[:, :, 64:], v[:, :, 64:], keys, values, positions=last, block_table=table)
    call = {"block_table": table, "seqused_k": last + 1, "return_lse": True}
    out, lse = attngen.attention(q[:, :, -1:], keys, values, **call)
    _compare(out, lse, q[:, :, -1:], k, v)


LAST = DecodeConfig(
    block_m=16, block_n=64, num_warps=4, num_stages=3, programs_per_sm=2, merge="last"
)


def test_the_last_split_merges_call_after_call_and_in_graphs() -> None:
    """Counters are zero again after each launch; graphs have their own, beside other streams."""
    q, k, v = _inputs(3, 32, 8, 1, 2048, 128)
    used = torch.full((3,), 2048, device="cuda", dtype=torch.int32)
    with pinned({"decode": LAST}):
        for _ in range(50):
            out, lse = attngen.attention(q, k, v, seqused_k=used, return_lse=True)
        _compare(out, lse, q, k, v)
        graph, made = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for _ in range(3):
                made.append(attngen.attention(q, k, v, seqused_k=used, return_lse=True))
        side = torch.cuda.Stream()
        for lengths in ((2048, 1, 0), (100, 2048, 64)):
            torch.cuda.synchronize()
            used.copy_(torch.tensor(lengths))
            torch.cuda.synchronize()
            graph.replay()
            with torch.cuda.stream(side):
                made.append(attngen.attention(q, k, v, seqused_k=used, return_lse=True))
            torch.cuda.synchronize()
            for out, lse in made:
                for b, n in enumerate(lengths):
                    at = slice(b, b + 1)
                    _compare(out[at], lse[at], q[at], k[at, :, :n], v[at, :, :n])
            made.pop()


@pytest.mark.parametrize("merge", ["kernel", "last"])
def test_packed_queries_over_pages(merge: str) -> None:
    rows, used = (1, 0, 100, 17, 1), (700, 5, 100, 1024, 1)
    heads, total = 8, sum(rows)
    q, _, _ = _inputs(1, heads, 2, total, 16, 128)
    _, k, v = _inputs(len(rows), heads, 2, 1, 1024, 128)
    (keys, table), (values, _) = _paged(k, 16), _paged(v, 16)
    offsets = [0, *itertools.accumulate(rows)]
    call = {
        "cu_seqlens_q": torch.tensor(offsets, device="cuda", dtype=torch.int32),
        "seqused_k": torch.tensor(used, device="cuda", dtype=torch.int32),
        "block_table": table,
        "causal": True,
        "return_lse": True,
    }
    with pinned({"decode": replace(LAST, block_m=32, merge=merge)}):
        for _ in range(3):
            out, lse = attngen.attention(q[0].transpose(0, 1), keys, values, **call)
    for b, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if begin < end:
            tensors = (q[:, :, begin:end], k[b : b + 1, :, : used[b]], v[b : b + 1, :, : used[b]])
            found = (x[begin:end].transpose(0, 1)[None] for x in (out, lse))
            _compare(*found, *tensors, causal=True)


def test_out_is_the_callers() -> None:
    q, k, v = _inputs(2, 8, 2, 1, 777, 128)
    want = attngen.attention(q, k, v)
    for rows in (q, torch.cat([q] * 130, 2)):
        want, out = attngen.attention(rows, k, v), torch.empty_like(rows)
        for _ in range(3):
            out.zero_()
            assert attngen.attention(rows, k, v, out=out) is out and torch.equal(out, want)
