"""The forward of packed sequences in the hopper lowering, in the emulator: results, and faults."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from gluon_emulator import run
from gluon_machine import Fault
from support import oracle
from test_hopper import UNWRITTEN, emitted, fwd_config, spec_of
from torch import Tensor

from attngen import gpu, hopper, lowering, memory, reference
from attngen.config import FwdConfig
from attngen.spec import AttentionSpec
from attngen.tuner import case
from attngen.workload import Workload, packed_workload, spec_bucket

__all__ = ["emitted"]
UNEVEN = ([5, 0, 137, 1, 70], [9, 3, 200, 0, 133])
SAME = ([130, 1, 0, 65, 200],) * 2


def packed_spec(dim: Any = 64, **options: Any) -> AttentionSpec:
    return spec_of(dim, layout="thd", **options)


def offsets(lengths: Any, first: int = 0) -> Tensor:
    return torch.tensor([*itertools.accumulate(lengths, initial=first)]).int()


def inputs(
    spec: AttentionSpec,
    lengths: Any,
    heads: tuple[int, int] = (2, 1),
    before: int = 0,
    spare: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v (1, heads, total, dim), with rows of no sequence before and behind."""
    generator = torch.Generator().manual_seed(0)
    rows, keys = (before + sum(each) + spare for each in lengths)
    shapes = ((rows, heads[0], spec.head_dim), (keys, heads[1], spec.head_dim))
    shapes += ((keys, heads[1], spec.head_dim_v),)
    dtype = getattr(torch, spec.dtype)
    made = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    q, k, v = (x.transpose(0, 1)[None] for x in made)
    return q, k, v


def numbers_of(spec: AttentionSpec) -> dict[str, Any]:
    numbers: dict[str, Any] = {"softmax_scale": reference.scale_of(spec)}
    if spec.has_softcap:
        numbers["softcap"] = spec.softcap
    left, right = spec.window or (None, None)
    if spec.has_window_left:
        numbers["window_left"] = left
    if spec.has_window_right:
        numbers["window_right"] = right
    if spec.has_chunk:
        numbers["chunk"] = spec.chunk
    if spec.aligns_rows:
        numbers["align"] = int(spec.causal != "top_left")
    return numbers


def forward(
    module: Any,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    seed: int = 0,
    goes_again: bool = False,
    dtype: torch.dtype | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    heads, rows = q.shape[1:3]
    out = torch.full((1, rows, heads, spec.head_dim_v), UNWRITTEN, dtype=dtype or q.dtype)
    out = out.transpose(1, 2)
    lse = torch.full(q.shape[:3], UNWRITTEN)
    order = memory.order_of(cu_q.shape[0] - 1).make(q).fill_(-1)
    named = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k} | numbers_of(spec) | more
    plan = module.plan(q, k, v, out, lse, order, **named)
    run(plan[:2], seed)
    assert bool(lse.isnan().any()) == goes_again
    run(plan[2:], seed)
    return out, lse


def assert_forward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    out: Tensor,
    lse: Tensor,
    **more: Any,
) -> None:
    sinks = more.pop("sinks", None)
    named: dict[str, Any] = {
        "causal": spec.is_causal,
        "align": "top_left" if spec.causal == "top_left" else "bottom_right",
        "window": spec.window,
        "scale": spec.softmax_scale,
        "softcap": spec.softcap or 0.0,
        "sinks": sinks,
        **more,
    }
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]

    def solve(**how: Any) -> Any:
        return oracle.varlen(*rows, cu_q, cu_k, **named, **how)

    right, yard = solve(), solve(math_dtype=torch.float32, round_to=q.dtype)
    for name, actual, want, about, kind in (
        ("out", out[0].transpose(0, 1), right.out, yard.out, q.dtype),
        ("lse", lse[0].transpose(0, 1), right.lse, yard.lse, torch.float32),
    ):
        good, why = oracle.judge(actual.to(kind), want, kind, yard=about)
        assert good, f"{name}: {why}"


SLOW = pytest.mark.slow
FORWARD = [
    pytest.param(64, {}, UNEVEN, {}, id="full"),
    pytest.param(64, {"causal": True}, UNEVEN, {}, id="causal"),
    pytest.param(64, {"causal": "top_left"}, UNEVEN, {}, id="top-left", marks=SLOW),
    pytest.param(128, {"causal": True}, SAME, {"turns": True, "q_buffers": 2}, id="d128"),
    pytest.param(128, {}, SAME, {"q_buffers": 2}, id="d128-full", marks=SLOW),
    pytest.param(96, {"causal": True}, UNEVEN, {"q_in_registers": True}, id="d96", marks=SLOW),
    pytest.param(192, {"causal": True}, UNEVEN, {}, id="d192", marks=SLOW),
    pytest.param(256, {"causal": True}, UNEVEN, {}, id="d256"),
    pytest.param(
        (192, 128), {"causal": True}, UNEVEN, {"out_in_q": True}, id="d192-v128", marks=SLOW
    ),
    pytest.param(64, {"window": (20, 10)}, UNEVEN, {"block_n": 32}, id="window"),
    pytest.param(64, {"causal": True, "window": (40, 0)}, SAME, {}, id="causal-window"),
    pytest.param(64, {"softcap": 2.0, "causal": True}, UNEVEN, {}, id="softcap", marks=SLOW),
    pytest.param(64, {"softcap": 2.0}, UNEVEN, {}, id="softcap-full", marks=SLOW),
    pytest.param(64, {"dtype": "float16"}, UNEVEN, {}, id="float16", marks=SLOW),
    pytest.param(
        64, {"causal": True}, SAME, {"consumers": 3, "turns": True, "overlap": False}, id="three"
    ),
    pytest.param(64, {}, ([1] * 5, [1] * 5), {}, id="single-tokens"),
    pytest.param(64, {"causal": True}, ([0, 7], [5, 0]), {}, id="no-queries", marks=SLOW),
    pytest.param(64, {"softmax_scale": 0.5}, ([300], [100]), {}, id="one", marks=SLOW),
]


@pytest.mark.parametrize(("dim", "options", "lengths", "knobs"), FORWARD)
def test_forward(emitted: Any, dim: Any, options: Any, lengths: Any, knobs: Any) -> None:
    spec = packed_spec(dim, **options)
    tensors = (*inputs(spec, lengths), *map(offsets, lengths))
    module = emitted(spec, fwd_config(spec, **knobs))
    assert_forward(spec, *tensors, *forward(module, spec, *tensors))


@pytest.mark.parametrize("causal", [pytest.param(False, marks=SLOW), True])
def test_rows_of_no_sequence(emitted: Any, causal: bool) -> None:
    """Rows before, between and behind what is used: out 0 and lse -inf."""
    spec = packed_spec(64, causal=causal)
    lengths = [70, 0, 130, 9], [66, 40, 200, 0]
    cu = [offsets(each, 3) for each in lengths]
    used = {
        "seqused_q": torch.tensor([0, 0, 80, 9]).int(),
        "seqused_k": torch.tensor([66, 0, 90, 0]).int(),
    }
    tensors = (*inputs(spec, lengths, before=3, spare=70), *cu)
    out, lse = forward(emitted(spec, fwd_config(spec)), spec, *tensors, **used)
    assert_forward(spec, *tensors, out, lse, **used)
    assert (out[:, :, :73] == 0).all() and (out[:, :, 212:] == 0).all()
    assert (lse[:, :, :73] == float("-inf")).all() and (lse[:, :, 212:] == float("-inf")).all()


def test_sinks(emitted: Any) -> None:
    spec = packed_spec(64, causal=True, sinks=True)
    tensors = (*inputs(spec, UNEVEN), *map(offsets, UNEVEN))
    sinks = torch.tensor([1.0, -0.5])
    module = emitted(spec, fwd_config(spec))
    found = forward(module, spec, *tensors, sinks=sinks.expand(5, 2))
    assert_forward(spec, *tensors, *found, sinks=sinks)


def test_groups_of_heads(emitted: Any) -> None:
    """Runs of heads of which the last is shorter."""
    spec = packed_spec(64, causal=True)
    lengths = [140, 3], [140, 70]
    tensors = (*inputs(spec, lengths, heads=(6, 3)), *map(offsets, lengths))
    few = ("RUN_KEYS = tl.constexpr(65536)", "RUN_KEYS = tl.constexpr(300)")
    module = emitted(spec, fwd_config(spec), few)
    assert_forward(spec, *tensors, *forward(module, spec, *tensors))


@SLOW
def test_float32_out(emitted: Any) -> None:
    spec = packed_spec(96, causal=True)
    tensors = (*inputs(spec, UNEVEN), *map(offsets, UNEVEN))
    found = forward(emitted(spec, fwd_config(spec)), spec, *tensors, dtype=torch.float32)
    assert_forward(spec, *tensors, *found)


@pytest.mark.filterwarnings("ignore:All-NaN")
@pytest.mark.parametrize("causal", [pytest.param(False, marks=SLOW), True])
@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=SLOW)])
def test_sequences_are_apart(emitted: Any, causal: bool, value: float) -> None:
    """What one holds reaches no other; the one itself is NaN."""
    spec = packed_spec(64, causal=causal)
    lengths = ([40, 66, 90],) * 2
    q, k, v = inputs(spec, lengths)
    cu = offsets(lengths[0])
    module = emitted(spec, fwd_config(spec))
    clean = forward(module, spec, q, k, v, cu, cu)
    for tainted in (q, k, v):
        kept = tainted[:, :, 40:106].clone()
        tainted[:, :, 40:106] = value
        out, lse = forward(module, spec, q, k, v, cu, cu, goes_again=True)
        tainted[:, :, 40:106] = kept
        for x, y, atol in zip((out, lse), clean, (2e-2, 1e-4), strict=True):
            for rows in (slice(0, 40), slice(106, 196)):
                torch.testing.assert_close(x[:, :, rows], y[:, :, rows], atol=atol, rtol=0)
        assert not out[:, :, 40:106].isfinite().any() or tainted is not v


@SLOW
def test_large_logits(emitted: Any) -> None:
    spec = packed_spec(64, causal=True)
    q, k, v = inputs(spec, UNEVEN)
    tensors = (q * 1e6, k, v, *map(offsets, UNEVEN))
    module = emitted(spec, fwd_config(spec))
    assert_forward(spec, *tensors, *forward(module, spec, *tensors, goes_again=True))


@pytest.mark.parametrize(
    "values",
    [
        [-5, 900, 3, 2**31 - 1],
        pytest.param([300, 200, 100, 0], marks=SLOW),
        pytest.param([-(2**31), 0, 0, 7], marks=SLOW),
    ],
)
def test_offsets_out_of_order_touch_no_other_memory(emitted: Any, values: list[int]) -> None:
    spec = packed_spec(64, window=(9, 9))
    q, k, v = inputs(spec, ([300], [300]))
    cu = torch.tensor(values).int()
    module = emitted(spec, fwd_config(spec))
    for changed in (q, q * float("nan")):
        out = torch.full((1, 302, 2, 64), UNWRITTEN, dtype=q.dtype)
        lse = torch.full((2, 302), UNWRITTEN)
        order = memory.order_of(3).make(q)
        within = (out[:, 1:-1].transpose(1, 2), lse.flatten()[1:601].view(1, 2, 300))
        named = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "seqused_k": cu[1:].clone()}
        run(module.plan(changed, k, v, *within, order, **named, **numbers_of(spec)))
        assert (out[:, [0, -1]].float() == torch.tensor(UNWRITTEN).to(q.dtype).float()).all()
        assert (lse.flatten()[[0, *range(601, 604)]] == UNWRITTEN).all()


def order_of(module: Any, cu: Tensor, total: int, heads: int = 2) -> Tensor:
    order = memory.order_of(len(cu) - 1).make(cu).fill_(-1)
    sequences = (total, total, cu, cu, cu, cu, len(cu) - 1)
    used = {"HAS_USED_Q": False, "HAS_USED_K": False}
    grid = (-(-(len(cu) + 1) // 32), 1, 1)
    constants = {**module.CONFIG_ORDER, "BLOCK_M": 128, **used}
    run([(module.attn_fwd_order, grid, (order, heads, *sequences), constants)])
    return order


def test_order_of_sequences(emitted: Any) -> None:
    """By keys, the most first; more sequences than a program places and than a step looks at."""
    spec = packed_spec(64)
    lengths = [(n * 377) % 997 for n in range(300)]
    cu, total = offsets(lengths, 5), sum(lengths) + 7
    order = order_of(emitted(spec, fwd_config(spec)), cu, total)
    owned = [5, *lengths, 2]
    keys = [0, *lengths, 0]
    begins = [0, *cu.tolist()]
    ranks = sorted(range(302), key=lambda n: (-keys[n], n))
    tiles = [-(-owned[n] // 128) for n in ranks]
    firsts = [0, *itertools.accumulate(tiles)]
    assert order[:2].tolist() == [0, 2 * firsts[-1]]
    rows = order[2:].view(7, 302).tolist()
    by_rank = [[x[n] for n in ranks] for x in (begins, owned, keys, begins, keys)]
    assert rows == [firsts[:-1], *by_rank, [n - 1 for n in ranks]]


def test_order_of_offsets_that_add_up_to_too_much(emitted: Any) -> None:
    spec = packed_spec(64)
    total = 2**31 - 256
    cu = torch.tensor([0, total] * 100).int()
    order = order_of(emitted(spec, fwd_config(spec)), cu, total)
    firsts = order[2:203]
    assert order[1] == 2**30 and (firsts.diff() >= 0).all() and firsts.max() == 2**30


def test_the_tuner_knows_the_scratch(emitted: Any) -> None:
    spec, config = packed_spec(64, causal=True), fwd_config(packed_spec(64))
    made = case.make(spec, Workload(3, 2, 1, 100, 100), "meta", backward=False)
    taken = inspect.signature(emitted(spec, config).plan).parameters.values()
    names = [each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert names == ["q", "k", "v", "out", "lse", "order"]
    assert len(made.tensors(config)) == len(names)
    portable = FwdConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
    assert len(made.tensors(portable)) == len(names) - 1


@pytest.mark.parametrize(("mean", "wanted"), [(64, "triton"), (65, "hopper"), (4096, "hopper")])
def test_where_it_serves(monkeypatch: pytest.MonkeyPatch, mean: int, wanted: str) -> None:
    """Sequences of half a tile leave too many rows empty."""
    monkeypatch.setattr(hopper, "triton_minor", lambda: "3.6")
    spec, h200 = packed_spec(128, causal=True), gpu.by_name("nvidia_h200")
    at = spec_bucket("fwd", spec, packed_workload(40, 16, 16, 40 * mean, 40 * mean))
    assert lowering.default(spec, at, h200).lowering == wanted


KNOBS = [
    {"q_buffers": 2, "turns": True},
    {"q_buffers": 2, "out_in_q": True},
    {"q_in_registers": True, "block_n": 64},
    {"consumers": 3, "overlap": False, "q_buffers": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: ",".join(knobs))
def test_interleavings(emitted: Any, knobs: dict[str, Any], seed: int) -> None:
    spec = packed_spec(96, causal=True, window=(100, 0))
    tensors = (*inputs(spec, UNEVEN), *map(offsets, UNEVEN))
    module = emitted(spec, fwd_config(spec, **knobs))
    assert_forward(spec, *tensors, *forward(module, spec, *tensors, seed=1000 * seed))


FAULTS = {
    "items overwritten": ("[2 * Q_BUFFERS, 8]", "[1, 8]", "count % (2 * Q_BUFFERS)", "0"),
    "no end": ("mbarrier.arrive(q_full.index(buffer), count=1)", "pass"),
    "q of no wait": ("mbarrier.wait(q_full.index(0), 0)", "pass"),
    "an item not waited for": (
        "mbarrier.wait(q_full.index(count % Q_BUFFERS), count // Q_BUFFERS & 1)",
        "pass",
    ),
    "keys of another sequence": ("start_n = begin_k + begin", "start_n = begin"),
    "rows of the next sequence written": ("if first_row + 64 <= end_row:", "if True:"),
    "unused rows seen": ("seen &= rows < seqlen_q", "pass"),
    "an order without the first": ("others[:, None] < own_number", "others[:, None] <= own_number"),
    "one alignment for all": ("given_align * (seqlen_k - seqlen_q)", "given_align"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[] if n % 3 == 0 else SLOW) for n, f in enumerate(FAULTS)]
)
def test_fault_is_noticed(emitted: Any, fault: str) -> None:
    spec = packed_spec(64, causal=True)
    lengths = [70, 200, 9, 130], [90, 200, 9, 150]
    used = {"seqused_q": torch.tensor([70, 100, 9, 130]).int()}
    tensors = (*inputs(spec, lengths), *map(offsets, lengths))
    text = FAULTS[fault]
    changes = zip(text[::2], text[1::2], strict=True)
    module = emitted(spec, fwd_config(spec, block_n=64), *changes)
    with pytest.raises((Fault, AssertionError)):
        assert_forward(spec, *tensors, *forward(module, spec, *tensors, **used), **used)
