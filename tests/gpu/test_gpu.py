"""What only a GPU can show. `make gpu-test`; under three minutes on one H200."""

from __future__ import annotations

import gc
import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from support import REPO, assert_exact, make_qkv, oracle
from test_cases import _params
from torch import Tensor

import attngen
from attngen import kernel, resolve
from attngen.config import BwdConfig, FwdConfig
from attngen.pinned import pinned
from attngen.resolve import device_info
from attngen.search_space import candidates
from attngen.workload import Workload, spec_bucket

import build  # isort: skip  (beside the cases; support put their folder on the path)
import run  # isort: skip  (likewise)

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    """A leaf that requires grad, made on the device."""
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_()


def results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: Any) -> list[Tensor]:
    """out, lse, dq, dk, dv."""
    out, lse = attngen.attention(q, k, v, return_lse=True, **options)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), do)]


# ---- the cases ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["own", "float32"])
@pytest.mark.parametrize(("case", "over"), _params())
def test_case_equals_oracle(case: dict[str, Any], over: dict[str, Any], dtype: str) -> None:
    over = over if dtype == "own" else {**over, "dtype": dtype}
    verdict, why = run.judge(case, over, attngen.attention, attngen.dropout_keep, "cuda")
    assert verdict == "passed", why


# Every length of one compiled program, so few compilations: the rest is `run.py --compile`.
COMPILED_IDS = ("ALN-3", "TAI-2", "STR-10", "DVD-3", "GQA-1", "DRP-3", "WIN-2", "CAP-3", "LSE-1")


@pytest.mark.parametrize(
    ("case", "over"),
    [p for p in _params() if p.values[0]["id"] in COMPILED_IDS],
)
def test_compiled_case_equals_oracle(case: dict[str, Any], over: dict[str, Any]) -> None:
    torch._dynamo.reset()
    attend = torch.compile(attngen.attention, fullgraph=True, dynamic=True)
    verdict, why = run.judge(case, over, attend, attngen.dropout_keep, "cuda")
    assert verdict == "passed", why


# ---- offsets past 2^31, long sequences, large grids -----------------------------------------


def _case(name: str) -> dict[str, Any]:
    lines = (REPO / "tests/cases/hand.jsonl").read_text().splitlines()
    (case,) = [case for case in map(json.loads, lines) if case["id"] == name]
    n: dict[str, Any] = case["n"]
    return n


def _assert_slice(
    got: list[Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor, batch: int, head: int
) -> None:
    """One (batch, head) of out, lse, dq, dk, dv against the oracle in float64, on the GPU."""
    part = [x[batch : batch + 1, head : head + 1].detach() for x in (q, k, v)]
    inputs = dict(zip("qkv", part, strict=True))
    dout = do[batch : batch + 1, head : head + 1]
    narrow = q.dtype if q.dtype != torch.float32 else None
    right, right_grads = oracle.gradients(oracle.attention, inputs, dout)
    yard, yard_grads = oracle.gradients(
        lambda **x: oracle.attention(**x, math_dtype=torch.float32, round_to=narrow),
        inputs,
        dout,
        leaf_dtype=torch.float32,
    )
    wanted = [right.out, right.lse, *right_grads.values()]
    about = [yard.out, yard.lse, *yard_grads.values()]
    for name, x, want, yardstick in zip(
        ("out", "lse", "dq", "dk", "dv"), got, wanted, about, strict=True
    ):
        dtype = torch.float32 if name == "lse" else q.dtype
        actual = x[batch : batch + 1, head : head + 1]
        good, why = oracle.judge(actual, want, dtype, yard=yardstick)
        assert good, f"{name} of batch {batch}, head {head}: {why}"


def test_row_stride_times_key_index_passes_2_to_the_31() -> None:
    """I32-1: k and v are stored with the batch innermost, so one row step is 90,112 elements."""
    n = _case("I32-1")
    b, sq, sk, d = n["b"], n["sq"], n["sk"], n["d"]
    q = random(b, 1, sq, d)
    k, v = (
        torch.randn(sk, b, d, device="cuda", dtype=torch.bfloat16)
        .permute(1, 0, 2)
        .unsqueeze(1)
        .requires_grad_()
        for _ in "kv"
    )
    assert k.stride(2) * (sk - 1) > 2**31
    do = torch.randn_like(q)
    got = results(q, k, v, do)
    for batch in (0, b - 1):
        _assert_slice(got, q, k, v, do, batch, 0)


def test_head_offset_passes_2_to_the_31() -> None:
    """I32-5: the last rows of the last head, forward only (about 10^15 operations)."""
    n = _case("I32-5")
    b, h, s, d = n["b"], n["h"], n["sq"], n["d"]
    q, k, v = (torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16) for _ in "qkv")
    assert q.numel() > 2**31
    out, lse = attngen.attention(q, k, v, return_lse=True)
    rows, keys, values = (x[1:, 63:] for x in (q[:, :, -32:], k, v))
    right = oracle.attention(rows, keys, values)
    yard = oracle.attention(rows, keys, values, math_dtype=torch.float32, round_to=torch.bfloat16)
    for name, got, want, about, dtype in (
        ("out", out[1:, 63:, -32:], right.out, yard.out, torch.bfloat16),
        ("lse", lse[1:, 63:, -32:], right.lse, yard.lse, torch.float32),
    ):
        good, why = oracle.judge(got, want, dtype, yard=about)
        assert good, f"{name}: {why}"


def test_length_past_2_to_the_15_of_zeros() -> None:
    """I32-6."""
    n = _case("I32-6")
    q, k, v = (
        torch.zeros(1, 1, n["sq"], n["d"], device="cuda", dtype=torch.float16).requires_grad_()
        for _ in "qkv"
    )
    out, lse, *grads = results(q, k, v, torch.ones_like(q))
    assert not out.any()
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(n["sq"])))
    assert all(torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("name", ["GRD-1", "GRD-5"])
def test_more_heads_than_a_grid_axis_holds(name: str) -> None:
    n = _case(name)
    b, h, s, d = n.get("b", 1), n["h"], n["sq"], n["d"]
    dtype = build.DT[n.get("dtype", "bfloat16")]
    q, k, v = (random(b, h, s, d, dtype=dtype) for _ in "qkv")
    do = torch.randn_like(q)
    got = results(q, k, v, do)
    for batch, head in ((0, 0), (b - 1, h - 1)):
        _assert_slice(got, q, k, v, do, batch, head)


# ---- CUDA graphs ----------------------------------------------------------------------------


def _capture(step: Any, warm_up: int = 3) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_graph_draws_a_new_dropout_mask_at_each_replay() -> None:
    """GRA-1: with v = identity the zeros of out are the mask, which the seed tensor explains."""
    q, k, _ = (x.detach() for x in make_qkv(heads=4, seqlen_q=64, dim=64, device="cuda"))
    v = torch.eye(64, device="cuda").expand(1, 4, 64, 64)
    out, seed = torch.empty_like(q), torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> None:
        seed.copy_(torch.randint(0, 2**62, (1,), device="cuda"))
        out.copy_(attngen.attention(q, k, v, dropout_p=0.1, dropout_seed=seed))

    graph = _capture(step)
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(out != 0)
        assert torch.equal(masks[-1], attngen.dropout_keep(seed, 1, 4, 64, 64, 0.1))
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])

    def unseeded() -> None:
        out.copy_(attngen.attention(q, k, v, dropout_p=0.1))

    graph = _capture(unseeded)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first != 0, out != 0)


def test_graph_of_forward_and_backward_follows_new_data() -> None:
    """GRA-3."""
    static = make_qkv(batch=2, heads=4, seqlen_q=100, dim=64, device="cuda")
    do = torch.randn_like(static[0])
    found: list[Tensor] = []

    def step() -> None:
        found[:] = results(*static, do, causal=True)

    graph = _capture(step)
    for seed in (1, 2):
        fresh = make_qkv(batch=2, heads=4, seqlen_q=100, dim=64, device="cuda", seed=seed)
        with torch.no_grad():
            for old, new in zip(static, fresh, strict=True):
                old.copy_(new)
        graph.replay()
        want = results(*fresh, do, causal=True)
        for got, right in zip(found, want, strict=True):
            torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-5)


def test_first_call_of_a_shape_inside_a_capture_works_or_says_why() -> None:
    """GRA-4: no database record; nothing is tuned or benchmarked."""
    attngen.reload()
    q, k, v = (x.detach() for x in make_qkv(heads=3, seqlen_q=77, dim=40, device="cuda"))
    out = torch.empty_like(q)
    graph = _capture(lambda: out.copy_(attngen.attention(q, k, v)), warm_up=0)
    graph.replay()
    torch.testing.assert_close(out, attngen.attention(q, k, v), atol=0, rtol=0)


# ---- devices --------------------------------------------------------------------------------


@two_gpus
def test_tensors_on_a_device_that_is_not_current() -> None:
    """DEV-1."""
    torch.cuda.set_device(0)
    before = torch.cuda.memory_allocated(0)
    q, k, v = make_qkv(seqlen_q=70, dim=64, device="cuda:1")
    attend = partial(attngen.attention, return_lse=True, causal=True)
    assert_exact(attend, q, k, v, {"causal": True})
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before


@two_gpus
def test_one_backward_through_layers_on_two_devices() -> None:
    """DEV-3."""
    q, k, v = make_qkv(seqlen_q=70, dim=64, device="cuda:0")

    def layers(attend: Any) -> list[Tensor]:
        first = attend(q, k, v)
        second = attend(first.to("cuda:1"), k.to("cuda:1"), v.to("cuda:1"))
        return [second, *torch.autograd.grad(second.sum(), (q, k, v))]

    got = layers(attngen.attention)
    want = layers(torch.nn.functional.scaled_dot_product_attention)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("left", ["k", "v", "dropout_seed"])
def test_argument_left_on_the_cpu_is_named(left: str) -> None:
    """DEV-4."""
    q, k, v = make_qkv(device="cuda")
    call: dict[str, Any] = {"k": k, "v": v, "dropout_seed": torch.tensor([1], device="cuda")}
    call[left] = call[left].detach().cpu()
    with pytest.raises(attngen.SpecError) as raised:
        attngen.attention(q, dropout_p=0.1, **call)
    assert f"{left} is on cpu but q is on cuda:0" in str(raised.value)


def test_cpu_tensors_are_refused_with_the_way_out() -> None:
    q, k, v = make_qkv()
    with pytest.raises(attngen.SpecError, match=r"\.cuda\(\), or set ATTNGEN_INTERPRET=1"):
        attngen.attention(q, k, v)


# ---- determinism ----------------------------------------------------------------------------

ATOMIC = BwdConfig(dq="atomic", block_m=64, block_n=64, num_warps=4, num_stages=2)


def test_deterministic_backward_gives_the_same_bits_20_times() -> None:
    """DET-1."""
    q, k, v = (random(2, 8, 1024, 128) for _ in "qkv")
    do = torch.randn_like(q)
    first = results(q, k, v, do, causal=True, deterministic=True)
    for _ in range(19):
        again = results(q, k, v, do, causal=True, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_atomic_backward_is_within_the_judge() -> None:
    q, k, v = make_qkv(
        batch=2, heads=4, heads_kv=2, seqlen_q=300, dim=64, dtype=torch.bfloat16, device="cuda"
    )
    attend = partial(attngen.attention, return_lse=True, causal=True)
    with pinned({"bwd": ATOMIC}):
        for _ in range(3):
            assert_exact(attend, q, k, v, {"causal": True})


def test_forward_gives_the_same_bits_for_every_tile() -> None:
    """DET-3, on a sample of the search space."""
    q, k, v = (random(2, 8, 512, 128).detach() for _ in "qkv")
    spec = attngen.AttentionSpec(head_dim=128, causal=True)
    bucket = spec_bucket("fwd", spec, Workload(2, 8, 8, 512, 512))
    tiles = list(candidates(spec, bucket, device_info(0)))
    for config in tiles[:: max(1, len(tiles) // 8)]:
        with pinned({"fwd": config}):
            first = attngen.attention(q, k, v, causal=True)
            for _ in range(19):
                assert torch.equal(attngen.attention(q, k, v, causal=True), first), config.key


# ---- memory, addressing, dropout ------------------------------------------------------------


def test_peak_memory_is_linear_in_the_length() -> None:
    """Beyond inputs, out and gradients: less than one more q at 16k, and twice that of 8k."""

    def extra(seqlen: int) -> int:
        q, k, v = (random(1, 8, seqlen, 128) for _ in "qkv")
        do = torch.randn_like(q)
        results(q, k, v, do, causal=True)
        gc.collect()  # what earlier tests left must not be freed in between
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        kept = results(q, k, v, do, causal=True)
        own = sum(x.numel() * x.element_size() for x in kept)
        return torch.cuda.max_memory_allocated() - before - own

    short, long = extra(8192), extra(16384)
    assert long <= 2.1 * short + (1 << 20)
    assert long < 3 * 8 * 16384 * 128 * 2


@pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)),
    reason="tensor descriptors need sm_90",
)
@pytest.mark.parametrize("dq", ["kernel", "atomic"])
@pytest.mark.parametrize("dim", [64, 96])
def test_descriptors_and_pointers_agree(dim: int, dq: Any) -> None:
    q, k, v = (random(2, 4, 333, dim) for _ in "qkv")
    do = torch.randn_like(q)

    def through(tiles: Any) -> list[Tensor]:
        fwd = FwdConfig(tiles=tiles, block_m=64, block_n=64, num_warps=4, num_stages=2)
        bwd = BwdConfig(tiles=tiles, dq=dq, block_m=64, block_n=64, num_warps=4, num_stages=2)
        with pinned({"fwd": fwd, "bwd": bwd}):
            return results(q, k, v, do, causal=True, window=(100, 0))

    for got, want in zip(through("descriptor"), through("pointer"), strict=True):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_unaligned_tensors_fall_back_from_descriptors_to_pointers() -> None:
    config = FwdConfig(tiles="descriptor", block_m=64, block_n=64, num_warps=4, num_stages=2)
    flat = torch.randn(3, 1 + 2 * 100 * 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x[1:].view(1, 2, 100, 64) for x in flat)
    want = attngen.attention(*(x.clone() for x in (q, k, v)))
    with pinned({"fwd": config}):
        got = attngen.attention(q, k, v)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_repeated_launches_equal_ordinary_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call of a layout on nothing is planned. Calls of one shape that differ in
    anything else take turns, after one whose q, k and v were one tensor."""
    shape = (2, 3, 130, 64)
    first, *others = (tuple(random(*shape) for _ in range(3)) for _ in range(3))
    do = random(*shape).detach()
    half = tuple(x.detach().half().requires_grad_() for x in first)
    by_rows = tuple(
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in first
    )
    expanded = (first[0], first[1], first[2][:1].detach().expand(shape).requires_grad_())
    inputs = [(first[0],) * 3, first, *others, half, by_rows, expanded]
    causal = {"causal": True, "dropout_p": 0.3}
    options: list[dict[str, Any]] = [
        {},
        {"softmax_scale": 0.3},
        {"softmax_scale": -0.3},
        {"window": (20, 5)},
        {"window": (25, 5)},
        {"softcap": 9.0},
        {"softcap": 5.0},
        {**causal, "dropout_seed": 5},
        {**causal, "dropout_seed": 6},
        {**causal, "dropout_seed": 6, "q_start": 130, "seqlen_q_total": 260},
        {**causal, "dropout_p": 0.5, "dropout_seed": 6},
    ]
    calls = [(tensors, {}) for tensors in inputs] + [(first, each) for each in options]

    def run_all() -> list[list[Tensor]]:
        found = []
        for tensors, each in calls:
            grad = do.to(tensors[0].dtype)
            found.append(results(*tensors, grad, **each, deterministic=True))
        return found

    resolve.reset()
    passes = [run_all() for _ in range(3)]
    resolve.reset()
    passes.append(run_all())
    monkeypatch.setattr(kernel, "may_bind", lambda: False)
    wanted = run_all()
    for found in passes:
        for got, want, (_, each) in zip(found, wanted, calls, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), each


def test_seed_lse_and_gradients_at_odd_addresses() -> None:
    q, k, v = (random(1, 2, 40, 64) for _ in range(3))
    seeds = torch.tensor([1, 2, 3], device="cuda")
    for seed in seeds:
        options = {"dropout_p": 0.4, "return_lse": True}
        got = attngen.attention(q, k, v, dropout_seed=seed, **options)
        wanted = attngen.attention(q, k, v, dropout_seed=int(seed), **options)
        assert torch.equal(got[0], wanted[0])
        d_lse = torch.randn(1 + 1 * 2 * 40, device="cuda")
        odd, even = d_lse[1:].view(1, 2, 40), d_lse[1:].clone().view(1, 2, 40)
        torch.autograd.backward(got, [torch.ones_like(got[0]), odd])
        by_odd, q.grad = q.grad, None
        torch.autograd.backward(wanted, [torch.ones_like(got[0]), even])
        by_even, q.grad = q.grad, None
        torch.testing.assert_close(by_odd, by_even)


@pytest.mark.parametrize("k_start", [0, 3], ids=["aligned", "unaligned"])
def test_dropout_bits_equal_dropout_keep_for_every_tile(k_start: int) -> None:
    q, k, _ = (x.detach() for x in make_qkv(batch=2, heads=3, seqlen_q=100, device="cuda"))
    v = torch.eye(100, device="cuda").expand(2, 3, 100, 100)
    keep = attngen.dropout_keep(2**40 + 5, 2, 3, 100, 100 + k_start, 0.3)[..., k_start:].cuda()
    for block_m, block_n, warps in ((16, 16, 1), (64, 32, 4), (128, 64, 8), (32, 128, 4)):
        config = FwdConfig(block_m=block_m, block_n=block_n, num_warps=warps, num_stages=2)
        with pinned({"fwd": config}):
            out = attngen.attention(q, k, v, dropout_p=0.3, dropout_seed=2**40 + 5, k_start=k_start)
        assert torch.equal(out != 0, keep), config.key


def test_forward_and_backward_draw_one_mask_whatever_their_tiles() -> None:
    options = {"dropout_p": 0.3, "dropout_seed": 77, "causal": True}
    q, k, v = make_qkv(heads=4, heads_kv=2, seqlen_q=150, dim=32, device="cuda")
    fwd = FwdConfig(block_m=128, block_n=16, num_warps=4, num_stages=2)
    for bwd in (
        BwdConfig(block_m=16, block_n=64, num_warps=4, num_stages=1, dq_block_m=32),
        BwdConfig(dq="atomic", block_m=32, block_n=32, num_warps=4, num_stages=2),
    ):
        with pinned({"fwd": fwd, "bwd": bwd}):
            assert_exact(
                lambda *x: attngen.attention(*x, return_lse=True, **options), q, k, v, options
            )
