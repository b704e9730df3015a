"""Packed sequences on a GPU: offsets past 2^31, very many sequences, graphs, and no waiting."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import oracle
from test_packed import offsets
from torch import Tensor

import attngen
from attngen import hopper, hopper_space, resolve
from attngen.config import BwdConfig, FwdConfig
from attngen.pinned import pinned
from attngen.resolve import device_info
from attngen.search_space import candidates
from attngen.spec import AttentionSpec
from attngen.workload import packed_workload, spec_bucket

pytestmark = pytest.mark.gpu


def inputs(
    total: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16, heads_kv: int = 0
) -> list[Tensor]:
    """q, k, v leaves and do, made on the device."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(total, heads, dim), *[(total, heads_kv or heads, dim)] * 2, (total, heads, dim)]
    made = [torch.randn(s, device="cuda", dtype=dtype, generator=generator) for s in shapes]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


def results(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, cu: Tensor, **options: Any
) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    named = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "return_lse": True, **options}
    out, lse = attngen.attention(q, k, v, **named)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), do)]


def assert_sequence(
    found: list[Tensor],
    inputs: list[Tensor],
    begin: int,
    length: int,
    heads: slice = slice(None),
    causal: bool = False,
) -> None:
    """One sequence of out, lse, dq, dk, dv beside the oracle; for as many kv heads as heads."""
    rows = slice(begin, begin + length)
    q, k, v, do = (x.detach()[rows, heads].transpose(0, 1)[None] for x in inputs)

    def solve(dtype: torch.dtype, **how: Any) -> list[Tensor]:
        r, grads = oracle.gradients(
            lambda **x: oracle.attention(**x, causal=causal, math_dtype=dtype, **how),
            {"q": q, "k": k, "v": v},
            do,
            leaf_dtype=dtype,
        )
        return [r.out, r.lse[..., None], *grads.values()]

    wanted, yard = solve(torch.float64), solve(torch.float32, round_to=q.dtype)
    got = [found[0], found[1][..., None], *found[2:]]
    for name, x, want, about in zip(
        ("out", "lse", "dq", "dk", "dv"), got, wanted, yard, strict=True
    ):
        here = x[rows, heads].transpose(0, 1)[None]
        good, why = oracle.judge(here, want, x.dtype, yard=about)
        assert good, f"{name} of rows {begin} to {begin + length}: {why}"


def test_rows_past_2_31_elements() -> None:
    """I32-3: 64 sequences of 4100 tokens, 64 heads of 128, then one of 300."""
    lengths = [4100] * 64 + [300]
    tensors = inputs(sum(lengths), 64, 128)
    found = results(*tensors, offsets(lengths).cuda())
    assert_sequence(found, tensors, 64 * 4100, 300, slice(0, 64, 21))


@pytest.mark.parametrize("causal", [False, True])
def test_80000_sequences_of_16_tokens(causal: bool) -> None:
    """GRD-3."""
    tensors = inputs(80000 * 16, 2, 64)
    found = results(*tensors, offsets([16] * 80000).cuda(), causal=causal)
    for n in (0, 40001, 79999):
        assert_sequence(found, tensors, 16 * n, 16, causal=causal)
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("deterministic", [True, False])
def test_12288_sequences_of_1_to_3_tokens(deterministic: bool) -> None:
    """VAR-5."""
    lengths = [1 + n % 3 for n in range(12288)]
    cu = offsets(lengths)
    tensors = inputs(sum(lengths), 16, 128, torch.float16)
    found = results(*tensors, cu.cuda(), causal=True, deterministic=deterministic)
    for n in random.Random(0).sample(range(12288), 20):
        assert_sequence(found, tensors, int(cu[n]), lengths[n], causal=True)


def test_one_long_sequence_among_short_ones() -> None:
    lengths = [7] * 300 + [9001] + [0] * 50 + [33] * 40
    cu = offsets(lengths)
    tensors = inputs(sum(lengths), 4, 64)
    found = results(*tensors, cu.cuda(), causal=True)
    for n in (0, 299, 300, 351, 390):
        assert_sequence(found, tensors, int(cu[n]), lengths[n], causal=True)


def _configs(direction: Any, total: int, count: int, step: int) -> list[Any]:
    spec = AttentionSpec(head_dim=64, causal=True, layout="thd", deterministic=False)
    place = spec_bucket(direction, spec, packed_workload(count, 4, 4, total, total))
    return candidates(spec.text, place, device_info(0))[::step]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_configs(direction: Any) -> None:
    """Every so many of the search space, tiles larger than most sequences among them."""
    lengths = [5, 0, 300, 64, 129, 1, 1, 17, 128]
    cu = offsets(lengths)
    tensors = inputs(sum(lengths), 4, 64)
    configs = _configs(direction, sum(lengths), len(lengths), 11 if direction == "fwd" else 400)
    assert len(configs) > 5
    for config in configs:
        with pinned({direction: config}):
            found = results(*tensors, cu.cuda(), causal=True, deterministic=False)
        for n in (0, 2, 4, 7, 8):
            assert_sequence(found, tensors, int(cu[n]), lengths[n], causal=True)


def test_calls_wait_for_nothing() -> None:
    """No value of an offset is read on the host."""
    cu = offsets([100, 28, 0, 72]).cuda()
    slopes = torch.rand(4, 4, device="cuda").requires_grad_()
    sinks = torch.randn(4, 4, device="cuda").requires_grad_()
    q, k, v, do = inputs(200, 4, 64)
    options = {"causal": True, "dropout_p": 0.1, "alibi_slopes": slopes, "sinks": sinks}

    def step() -> None:
        out = attngen.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
        torch.autograd.grad(out, (q, k, v, slopes, sinks), do)

    step()
    torch.cuda.synchronize()
    try:
        with pytest.warns(UserWarning, match="prototype feature"):
            torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_graph_follows_changing_lengths() -> None:
    first, second = offsets([100, 28, 0, 72]).cuda(), offsets([1, 150, 40, 9]).cuda()
    cu = first.clone()
    q, k, v, do = inputs(200, 4, 64)
    results(q, k, v, do, cu, causal=True)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results(q, k, v, do, cu, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        found = results(q, k, v, do, cu, causal=True)
    for lengths in (second, first):
        cu.copy_(lengths)
        graph.replay()
        torch.cuda.synchronize()
        want = results(q, k, v, do, lengths, causal=True)
        for x, y in zip(found, want, strict=True):
            assert torch.equal(x, y)


def test_gradients_by_sequence_are_always_the_same() -> None:
    cu = offsets([1000, 28, 0, 972]).cuda()
    slopes = torch.rand(4, 4, device="cuda").requires_grad_()
    sinks = torch.randn(4, 4, device="cuda").requires_grad_()
    q, k, v, do = inputs(2000, 4, 64)
    options = {"alibi_slopes": slopes, "sinks": sinks, "deterministic": True}
    runs = []
    for _ in range(3):
        out = attngen.attention(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
        runs.append(torch.autograd.grad(out, (slopes, sinks), do))
    assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(run, runs[0], strict=True))


def test_offsets_out_of_order_touch_no_other_memory() -> None:
    """Their results are meaningless, but kernels end, and write nothing outside their outputs."""
    q, k, v, do = inputs(300, 4, 64)
    for values in ([-5, 900, 3, 2**31 - 1], [300, 200, 100, 0], [-(2**31), 0, 0, 7]):
        cu = torch.tensor(values, dtype=torch.int32, device="cuda")
        results(q, k, v, do, cu, window=(9, 9), seqused_k=cu[1:].clone())
    torch.cuda.synchronize()


def _hopper_results(
    spec: AttentionSpec, tensors: list[Tensor], cu: Tensor, **options: Any
) -> list[Tensor]:
    """out and lse of the hopper lowering, whichever config it has for these sizes."""
    q, k, v = (x.detach() for x in tensors[:3])
    place = packed_workload(len(cu) - 1, q.shape[1], k.shape[1], len(q), len(k))
    config = hopper_space.starts(spec, spec_bucket("fwd", spec, place), device_info(0))[0]
    with pinned({"fwd": config}), torch.no_grad():
        named = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "return_lse": True, **options}
        return list(attngen.attention(q, k, v, **named))


HOPPER = [
    (64, {"causal": True}, 4),
    (128, {}, 2),
    (128, {"window": (100, 20)}, 4),
    (96, {"causal": True, "softcap": 5.0}, 2),
    (256, {"causal": True}, 4),
]


@pytest.mark.parametrize(("dim", "options", "heads_kv"), HOPPER, ids=str)
def test_hopper_lowering(dim: int, options: Any, heads_kv: int) -> None:
    """Beside the portable lowering, with 200 sequences of 0 to 995 tokens."""
    spec = AttentionSpec(head_dim=dim, layout="thd", **options).text
    if why := hopper.unserved(spec, device_info(0)):
        pytest.skip("; ".join(why))
    lengths = [(n * 377) % 997 * (n % 4 != 1) for n in range(200)]
    cu = offsets(lengths).cuda()
    tensors = inputs(sum(lengths) + 70, 4, dim, heads_kv=heads_kv)
    with pinned({"fwd": FwdConfig(block_m=64, block_n=32, num_warps=4, num_stages=2)}):
        want = results(*tensors, cu, **options)[:2]
    found = _hopper_results(spec, tensors, cu, **options)
    assert torch.equal(found[1].isneginf(), want[1].isneginf())
    torch.testing.assert_close(found[0], want[0], atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(found[1], want[1], atol=1e-3, rtol=0)
    for _ in range(20):
        assert torch.equal(_hopper_results(spec, tensors, cu, **options)[0], found[0])


@pytest.mark.parametrize("dq", ["kernel", "atomic"])
@pytest.mark.parametrize(("dim", "options", "heads_kv"), HOPPER, ids=str)
def test_hopper_backward(dim: int, options: Any, heads_kv: int, dq: str) -> None:
    """Beside the portable lowering; NaN of some sequences reaches no other."""
    spec = AttentionSpec(head_dim=dim, layout="thd", **options).text
    if why := hopper.unserved(spec, device_info(0)):
        pytest.skip("; ".join(why))
    lengths = [(n * 377) % 997 * (n % 4 != 1) for n in range(200)]
    cu = offsets(lengths).cuda()
    tensors = inputs(sum(lengths) + 70, 4, dim, heads_kv=heads_kv)
    place = packed_workload(len(lengths), 4, heads_kv, len(tensors[0]), len(tensors[1]))
    starts = hopper_space.starts(spec, spec_bucket("bwd", spec, place), device_info(0))
    config = next(each for each in starts if each.sums_dq == (dq == "atomic"))
    portable = BwdConfig(
        block_m=32, block_n=32, num_warps=4, num_stages=1, dq_block_m=32, dq_block_n=32
    )
    with pinned({"bwd": portable}):
        want = results(*tensors, cu, **options)[2:]
    with pinned({"bwd": config}):
        found = results(*tensors, cu, **options)[2:]
        for one, other in zip(found, want, strict=True):
            error = (one.float() - other.float()).norm() / other.float().norm()
            assert error < 1e-2
        again = results(*tensors, cu, **options)[2:]
        first = 0 if dq == "kernel" else 1  # sums of dq have no fixed order
        assert all(map(torch.equal, again[first:], found[first:]))
        within = torch.zeros(len(tensors[0]), dtype=torch.bool, device="cuda")
        with torch.no_grad():
            for n in (3, 50, 198):
                within[int(cu[n]) : int(cu[n + 1])] = True
            for x in tensors:
                x[within] = float("nan")
        tainted = results(*tensors, cu, **options)[2:]
    # Tiles that also held a NaN come from the second pass, whose sums have another order.
    for one, other in zip(tainted, found, strict=True):
        assert one[~within].isfinite().all()
        error = (one[~within].float() - other[~within].float()).norm() / other.float().norm()
        assert error < 1e-2


def test_hopper_lowering_in_a_graph_whose_lengths_change(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(head_dim=64, layout="thd", causal=True).text
    if why := hopper.unserved(spec, device_info(0)):
        pytest.skip("; ".join(why))
    monkeypatch.setenv("ATTNGEN_LOWERING", "hopper")
    resolve.reset()
    cu, total = offsets([300, 28, 0, 972]).cuda(), 1300
    q, k, v, _ = inputs(total, 4, 64)

    def call(at: Tensor) -> Tensor:
        with torch.no_grad():
            return attngen.attention(q, k, v, cu_seqlens_q=at, cu_seqlens_k=at, causal=True)

    call(cu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(cu)
    for lengths in ([1, 450, 840, 9], [1300, 0, 0, 0], [300, 28, 0, 972]):
        cu.copy_(offsets(lengths))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, call(offsets(lengths).cuda()))
    monkeypatch.undo()
    resolve.reset()
