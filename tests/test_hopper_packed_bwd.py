"""The hopper backward of packed sequences, as emitted, in the emulator; `tests/test_hopper.py` has
the dense one. The judge is `reference.judge`, the oracle `packed_reference`."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gluon_emulator import run
from gluon_machine import Fault
from torch import Tensor

from attngen import kernel, packed_reference, reference
from attngen.hopper import HopperBwdConfig
from attngen.packed_reference import Sequences
from attngen.render import render
from attngen.spec import AttentionSpec
from attngen.tuner import case
from attngen.workload import Workload

BOTH = pytest.mark.parametrize("dq", ["kernel", "atomic"])
UNEVEN = ([70, 0, 129, 1, 64], [100, 30, 129, 0, 200])
"""Lengths of queries and of keys: empty ones on either side, and ones that fill no tile."""


@pytest.fixture
def emitted(session_cache: Path) -> Any:
    """(spec, config, *(old, new)) -> module of the emitted file, with text replaced."""

    def emit(spec: AttentionSpec, config: HopperBwdConfig, *changes: tuple[str, str]) -> ModuleType:
        text = render(spec, config)
        for old, new in changes:
            assert old in text, f"the emitted file has no more {old!r}"
            text = text.replace(old, new)
        path = session_cache / f"bwd_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
        path.write_text(text)
        module: ModuleType = kernel.load(path, interpret=True)
        return module

    return emit


def offsets(lengths: Sequence[int], first: int = 0) -> Tensor:
    return torch.tensor([first, *itertools.accumulate(lengths, initial=first)][1:]).int()


def spec_of(dim: int | tuple[int, int] = 64, **options: Any) -> AttentionSpec:
    head_dim, head_dim_v = (dim, dim) if isinstance(dim, int) else dim
    named = {"head_dim": head_dim, "head_dim_v": head_dim_v, "layout": "thd"}
    return AttentionSpec(**named | options)


def inputs(
    spec: AttentionSpec, rows: int, keys: int, heads: tuple[int, int] = (1, 1)
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of out, (1, heads, total, dim) views."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    shapes = (
        (1, rows, heads[0], spec.head_dim),
        (1, keys, heads[1], spec.head_dim),
        (1, keys, heads[1], spec.head_dim_v),
        (1, rows, heads[0], spec.head_dim_v),
    )
    q, k, v, do = (torch.randn(s, generator=generator).to(dtype).transpose(1, 2) for s in shapes)
    return q, k, v, do


def terms_of(spec: AttentionSpec, q: Tensor, count: int) -> dict[str, Tensor]:
    if not spec.sinks:
        return {}
    return {"sinks": torch.linspace(-1.0, 60.0, count * q.shape[1]).view(count, -1)}


def backward(
    module: ModuleType,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    cu: tuple[Tensor, Tensor],
    dlse: Tensor | None = None,
    *,
    used: tuple[Tensor | None, Tensor | None] = (None, None),
    results_of: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
) -> tuple[Tensor, ...]:
    """dq, dk, dv from the oracle's out and lse."""
    terms = terms_of(spec, q, len(cu[0]) - 1)
    at = Sequences.of(*cu, *used)
    out, lse = results_of or packed_reference.attention(spec, q, k, v, at, **terms)
    out, lse = out.to(q.dtype), lse.float()
    results = [torch.full_like(x, 12345.0) for x in (q, k, v)]
    heads, rows, dim = q.shape[1:]
    nan = float("nan")
    scratch = [torch.full((1, heads, 2, (rows // 128 + len(cu[0]) + 1) * 128), nan)]
    if "dq_sum" in module.plan.__code__.co_varnames:
        scratch.append(torch.full((1, heads, rows, dim), nan))
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
    numbers |= terms | {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]}
    numbers |= {"seqused_q": used[0], "seqused_k": used[1]}
    run(module.plan(q, k, v, out, lse, do, dlse, *results, *scratch, **numbers), seed)
    return tuple(results)


def assert_backward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    cu: tuple[Tensor, Tensor],
    got: tuple[Tensor, ...],
    dlse: Tensor | None = None,
    used: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    terms = terms_of(spec, q, len(cu[0]) - 1)
    at = Sequences.of(*cu, *used)

    def solve(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = tuple(x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        made = (
            packed_reference.attention(spec, *leaves, at, **terms)
            if dtype == torch.float64
            else packed_reference.yardstick(spec, *leaves, q.dtype, at, **terms)
        )
        lse = torch.where(torch.isinf(made[1]), 0.0, made[1])
        loss = (made[0] * do).sum() + (0.0 if dlse is None else (lse * dlse).sum())
        return torch.autograd.grad(loss, leaves)

    for name, actual, wanted, about in zip(
        ("dq", "dk", "dv"), got, solve(torch.float64), solve(torch.float32), strict=True
    ):
        verdict = reference.judge(actual, wanted, about, torch.finfo(actual.dtype).eps)
        assert verdict.ok, f"{name}: {verdict.detail}"


PACKED = [
    pytest.param(64, {}, UNEVEN, {}, (2, 1), id="uneven"),
    pytest.param(64, {"causal": True}, UNEVEN, {}, (2, 1), id="causal"),
    pytest.param(128, {"causal": True}, ([130, 20], [60, 140]), {}, (1, 1), id="d128-causal"),
    pytest.param(128, {}, ([70, 66], [66, 70]), {}, (1, 1), id="d128"),
    pytest.param(96, {"causal": True}, ([70, 66], [66, 70]), {}, (2, 2), id="d96-causal"),
    pytest.param(64, {"causal": "top_left"}, UNEVEN, {"block_m": 128}, (1, 1), id="top-left"),
    pytest.param(64, {"causal": True, "window": (40, 0)}, UNEVEN, {}, (1, 1), id="causal-window"),
    pytest.param(64, {"window": (10, 5)}, UNEVEN, {}, (1, 1), id="window"),
    pytest.param(64, {"window": (None, 7)}, UNEVEN, {}, (1, 1), id="window-right"),
    pytest.param(64, {"softcap": 2.0, "causal": True}, ([70, 66], [66, 70]), {}, (1, 1), id="cap"),
    pytest.param(64, {"sinks": True, "causal": True}, UNEVEN, {}, (2, 1), id="sinks"),
    pytest.param(64, {"chunk": 50, "causal": True}, UNEVEN, {}, (1, 1), id="chunk"),
    pytest.param(64, {"dtype": "float16"}, ([1, 1, 1], [1, 1, 1]), {}, (1, 1), id="float16"),
    pytest.param(192, {"causal": True}, ([70, 66], [66, 70]), {}, (1, 1), id="d192-causal"),
    pytest.param(256, {}, ([70, 20], [30, 70]), {}, (1, 1), id="d256"),
    pytest.param((192, 128), {"causal": True}, ([70, 66], [66, 70]), {}, (1, 1), id="d192-v128"),
]


def bwd_config(spec: AttentionSpec, **options: Any) -> HopperBwdConfig:
    """A config that fits the spec's head dims into shared memory."""
    usual = {"dq_v_stages": 1} if spec.head_dim > 192 else {}
    return HopperBwdConfig(**usual | options)


@BOTH
@pytest.mark.parametrize(("dim", "options", "lengths", "knobs", "heads"), PACKED)
def test_packed_backward(
    emitted: Any, dim: Any, options: Any, lengths: Any, knobs: Any, heads: Any, dq: str
) -> None:
    spec = spec_of(dim, **options)
    q, k, v, do = inputs(spec, *map(sum, lengths), heads)
    cu = offsets(lengths[0]), offsets(lengths[1])
    module = emitted(spec, bwd_config(spec, dq=dq, **knobs))
    assert_backward(spec, q, k, v, do, cu, backward(module, spec, q, k, v, do, cu))


@BOTH
def test_gradient_of_lse(emitted: Any, dq: str) -> None:
    spec = spec_of(64, causal=True)
    q, k, v, do = inputs(spec, *map(sum, UNEVEN))
    cu = offsets(UNEVEN[0]), offsets(UNEVEN[1])
    dlse = torch.randn(q.shape[:3])
    got = backward(emitted(spec, bwd_config(spec, dq=dq)), spec, q, k, v, do, cu, dlse)
    assert_backward(spec, q, k, v, do, cu, got, dlse)


def assert_apart(emitted: Any, dq: str, options: Any, *changes: tuple[str, str]) -> None:
    """Unused rows lie between sequences, before and behind them; NaN there reaches nothing."""
    spec = spec_of(64, **options)
    lengths = ([70, 68, 4, 129], [69, 68, 133, 9])
    used = torch.tensor([70, 1, 0, 67]).int(), torch.tensor([3, 67, 133, 0]).int()
    q, k, v, do = inputs(spec, sum(lengths[0]) + 71, sum(lengths[1]) + 71)
    cu = offsets(lengths[0], 2), offsets(lengths[1], 2)
    at = Sequences.of(*cu, *used)

    def fill_unused(value: float, rows_of: tuple[Tensor, ...]) -> None:
        for each, ranges in ((rows_of, at.rows), ((k, v), at.keys)):
            unused = torch.ones(each[0].shape[2], dtype=torch.bool)
            for rows in ranges:
                unused[rows] = False
            for x in each:
                x[:, :, unused] = value

    fill_unused(0.0, (q, do))
    results_of = packed_reference.attention(spec, q, k, v, at)
    clean = [x.clone() for x in (q, k, v, do)]
    fill_unused(float("nan"), (q, do, *results_of))
    module = emitted(spec, bwd_config(spec, dq=dq), *changes)
    got = backward(module, spec, q, k, v, do, cu, used=used, results_of=results_of)
    assert_backward(spec, *clean, cu, got, used=used)


@BOTH
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (9, 40)}], ids=str)
def test_used_lengths_and_what_the_rest_holds(emitted: Any, options: Any, dq: str) -> None:
    assert_apart(emitted, dq, options)


FAULTS = {
    "q of the next sequence": (
        "head_q, FAR - seqlen_q + start_m, 0]\n        tma",
        "head_q, FAR - seqlen_q + start_m - 128, 0]\n        tma",
        "at = [FAR, begin_q + seqlen_q, ",
        "at = [FAR, begin_q + seqlen_q + 128, ",
    ),
    "k of the next sequence": (
        "FAR - seqlen_k + row",
        "FAR - seqlen_k - 128 + row",
        "begin_k + seqlen_k",
        "begin_k + seqlen_k + 128",
    ),
    "unused keys with gradients": ("rows_of_dv < seqlen_k", "rows_of_dv < owned_k"),
    "keys of the next sequence written": (
        "FAR - owned_k + row",
        "FAR - owned_k - 128 + row",
        "begin_k + owned_k",
        "begin_k + owned_k + 128",
    ),
    "row numbers without padding": ("(begin // PADDING + sequence + 1)", "(begin // PADDING)"),
    "row numbers of unused rows": (
        "first, begin + used",
        "first, begin + owned",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(emitted: Any, fault: str) -> None:
    text = FAULTS[fault]
    with pytest.raises((Fault, AssertionError)):
        assert_apart(emitted, "kernel", {}, *zip(text[::2], text[1::2], strict=True))


@BOTH
def test_a_sequence_of_nan_reaches_no_other(emitted: Any, dq: str) -> None:
    spec = spec_of(64, causal=True)
    lengths = [70, 66, 40]
    cu = offsets(lengths), offsets(lengths)
    q, k, v, do = inputs(spec, sum(lengths), sum(lengths))
    module = emitted(spec, bwd_config(spec, dq=dq))
    want = backward(module, spec, q, k, v, do, cu)
    for x in (q, k, v, do):
        x[:, :, 70:136] = float("nan")
    got = backward(module, spec, q, k, v, do, cu)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one[:, :, :70], other[:, :, :70])
        assert torch.equal(one[:, :, 136:], other[:, :, 136:])
        assert one[:, :, 70:136].isnan().any()


@BOTH
@pytest.mark.parametrize(
    "values", [[-5, 900, 3, 2**31 - 1], [300, 200, 100, 0], [-(2**31), 0, 0, 7]]
)
def test_offsets_out_of_order_touch_no_other_memory(
    emitted: Any, values: list[int], dq: str
) -> None:
    spec = spec_of(64, window=(9, 9))
    q, k, v, do = inputs(spec, 300, 300)
    cu = torch.tensor(values).int()
    module = emitted(spec, bwd_config(spec, dq=dq))
    stored = [torch.full((1, 302, 1, 64), 7.0, dtype=q.dtype) for _ in range(3)]
    results = [x[:, 1:-1].transpose(1, 2) for x in stored]
    rows, dq_sum = torch.full((2, 2 * 7 * 128), 7.0), torch.full((302, 64), 7.0)
    scratch = [rows.flatten()[896:-896].view(1, 1, 2, 896), dq_sum[1:-1].view(1, 1, 300, 64)]
    named = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "seqused_k": cu[1:].clone()}
    named |= {"window_left": 9, "window_right": 9, "softmax_scale": 0.1}
    scratch, lse = scratch[: 2 if dq == "atomic" else 1], torch.zeros(1, 1, 300)
    run(module.plan(q, k, v, q.clone(), lse, do, None, *results, *scratch, **named))
    for x in (*(x[:, [0, -1]] for x in stored), rows[0, :896], rows[1, -896:], dq_sum[[0, -1]]):
        assert (x == 7.0).all()


def test_case_of_the_tuner(emitted: Any) -> None:
    spec = spec_of(64, causal=True)
    for dq in ("kernel", "atomic"):
        config = bwd_config(spec, dq=dq)
        each = case.make(spec, Workload(3, 2, 1, 90, 90), "cpu", backward=True)
        cu = each.offsets
        out, lse = packed_reference.attention(spec, each.q, each.k, each.v, Sequences.of(*cu))
        each.spoil(config)
        each.out.copy_(out)
        each.lse.copy_(lse)
        run(emitted(spec, config).plan(*each.tensors(config), **each.numbers))
        got = (each.dq, each.dk, each.dv)
        assert_backward(spec, each.q, each.k, each.v, each.do, cu, got)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("seed", range(1, 4))
def test_interleavings(emitted: Any, dq: str, seed: int) -> None:
    spec = spec_of(64, causal=True)
    q, k, v, do = inputs(spec, *map(sum, UNEVEN))
    cu = offsets(UNEVEN[0]), offsets(UNEVEN[1])
    module = emitted(spec, bwd_config(spec, dq=dq))
    assert_backward(spec, q, k, v, do, cu, backward(module, spec, q, k, v, do, cu, seed=seed))
