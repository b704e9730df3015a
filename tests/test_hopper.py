"""The hopper kernels, as emitted, in an emulator of one SM: results, and that faults are noticed.

The emulator (tests/gluon_emulator.py) runs the emitted text; the judge is `reference.judge`. A seed
chooses one of many interleavings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gluon_emulator import run
from gluon_machine import Fault
from torch import Tensor

import attngen
from attngen import calls, kernel, memory, reference, settle
from attngen.config import KernelConfig
from attngen.fp8 import Quantized, spread
from attngen.hopper import HopperBwdConfig, HopperFwdConfig
from attngen.remembered import Remembered
from attngen.render import direction_of, render
from attngen.spec import DESCALES, AttentionSpec

UNWRITTEN = 12345.0
"""In results before a launch: a NaN in lse would have a meaning."""


def spec_of(dim: int | tuple[int, int] = 64, **options: Any) -> AttentionSpec:
    head_dim, head_dim_v = (dim, dim) if isinstance(dim, int) else dim
    return AttentionSpec(**{"head_dim": head_dim, "head_dim_v": head_dim_v} | options)


def fwd_config(spec: AttentionSpec, **options: Any) -> HopperFwdConfig:
    """A config that fits the spec's head dims into shared memory."""
    wide = max(spec.head_dim, spec.head_dim_v)
    usual = {"block_n": 64 if wide > 128 else 128, "out_in_q": wide > 192}
    return HopperFwdConfig(**usual | options)


def inputs(
    spec: AttentionSpec,
    rows: int,
    keys: int | None = None,
    heads: tuple[int, int] = (1, 1),
    batch: int = 1,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of out; heads are (query, key/value)."""
    generator = torch.Generator().manual_seed(seed)
    keys = rows if keys is None else keys
    dtype = getattr(torch, spec.dtype)
    shapes = (
        (batch, rows, heads[0], spec.head_dim),
        (batch, keys, heads[1], spec.head_dim),
        (batch, keys, heads[1], spec.head_dim_v),
        (batch, rows, heads[0], spec.head_dim_v),
    )
    q, k, v, do = (torch.randn(s, generator=generator).to(dtype).transpose(1, 2) for s in shapes)
    return q, k, v, do


def load(text: str, name: str, folder: Path) -> ModuleType:
    path = folder / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}.py"
    path.write_text(text)
    module: ModuleType = kernel.load(path, interpret=True)
    return module


@pytest.fixture
def emitted(session_cache: Path) -> Any:
    """(spec, config, *(old, new)) -> module of the emitted file, with text replaced."""

    def emit(spec: AttentionSpec, config: KernelConfig, *changes: tuple[str, str]) -> ModuleType:
        text = render(spec, config)
        for old, new in changes:
            assert old in text, f"the emitted file has no more {old!r}"
            text = text.replace(old, new)
        return load(text, direction_of(config), session_cache)

    return emit


def numbers_of(spec: AttentionSpec, rows: int, keys: int) -> dict[str, Any]:
    """What plan() takes beside tensors."""
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
    if spec.has_positions:
        numbers["align"] = reference.alignment(spec, rows, keys)
    return numbers


def terms_of(spec: AttentionSpec, q: Tensor) -> dict[str, Tensor]:
    """What stands between scores and the softmax; sinks beside rows' sums, and far above."""
    if not spec.sinks:
        return {}
    return {"sinks": torch.linspace(-1.0, 60.0, q.shape[1]).expand(q.shape[:2])}


def unwritten(like: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """A result, stored (batch, seqlen, heads, dim)."""
    batch, heads, rows, _ = like.shape
    return torch.full((batch, rows, heads, dim), UNWRITTEN, dtype=dtype).transpose(1, 2)


def forward(
    module: ModuleType,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    partial: bool = False,
    out: Tensor | None = None,
    seed: int = 0,
    goes_again: bool = False,
    **placed: Any,
) -> tuple[Tensor, Tensor]:
    """out and lse; `goes_again` says whether the careful second kernel must have work to do."""
    if out is None:
        out = unwritten(q, spec.head_dim_v, torch.float32 if partial else q.dtype)
    lse = torch.full(q.shape[:3], UNWRITTEN)
    numbers = numbers_of(spec, q.shape[2], k.shape[2]) | terms_of(spec, q) | placed
    plan = module.plan(q, k, v, out, lse, **numbers)
    run(plan[:1], seed)
    assert bool(lse.isnan().any()) == goes_again
    run(plan[1:], seed)
    return out, lse


def assert_forward(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> None:
    terms = terms_of(spec, q)
    want = reference.attention(spec, q, k, v, **terms)
    yard = reference.yardstick(spec, q, k, v, q.dtype, **terms)
    for name, actual, wanted, about, eps in (
        ("out", out, want[0], yard[0], torch.finfo(out.dtype).eps),
        ("lse", lse, want[1], yard[1], torch.finfo(torch.float32).eps),
    ):
        verdict = reference.judge(actual, wanted, about, eps)
        assert verdict.ok, f"{name}: {verdict.detail}"


FORWARD = [
    pytest.param(64, {"sinks": True, "causal": True}, (130, None, (2, 1)), {}, id="sinks"),
    pytest.param(64, {"chunk": 90, "causal": True}, (300,), {}, id="chunk-causal"),
    pytest.param(64, {"chunk": 70, "window": (50, 20)}, (130, 200), {}, id="chunk-window"),
    pytest.param(64, {}, (200, None, (2, 1)), {}, id="d64"),
    pytest.param(
        64,
        {"causal": True},
        (200, None, (2, 1)),
        {"consumers": 3, "turns": True, "overlap": False},
        id="d64-causal",
    ),
    pytest.param(96, {"causal": True}, (130, None, (2, 1)), {}, id="d96-causal"),
    pytest.param(128, {}, (256,), {}, id="d128"),
    pytest.param(128, {"causal": True}, (256,), {}, id="d128-causal"),
    pytest.param(192, {"causal": True}, (130,), {}, id="d192-causal"),
    pytest.param(256, {"causal": True}, (130,), {}, id="d256-causal"),
    pytest.param((192, 128), {"causal": True}, (130,), {"out_in_q": True}, id="d192-v128"),
    pytest.param(64, {"dtype": "float16", "causal": True}, (65,), {}, id="float16"),
    pytest.param(64, {}, (1,), {}, id="one-row"),
    pytest.param(64, {"causal": True}, (63,), {}, id="less-than-a-tile"),
    pytest.param(64, {}, (1, 200), {}, id="one-row-many-keys"),
    pytest.param(64, {}, (65, 1), {}, id="one-key"),
    pytest.param(64, {"causal": True}, (65, 200), {}, id="more-keys"),
    pytest.param(64, {"causal": True}, (200, 65, (2, 1)), {}, id="rows-without-keys"),
    pytest.param(64, {"causal": "top_left"}, (200, 65), {}, id="top-left-more-rows"),
    pytest.param(64, {"causal": "top_left"}, (65, 300), {}, id="top-left-more-keys"),
    pytest.param(
        64, {"causal": True, "window": (40, 0)}, (300, None, (2, 1)), {}, id="causal-window"
    ),
    pytest.param(
        64, {"window": (10, 5)}, (200, None, (2, 1)), {"block_n": 32}, id="window-both-sides"
    ),
    pytest.param(64, {"window": (0, 0)}, (130,), {}, id="window-of-one"),
    pytest.param(64, {"window": (3, 3)}, (40, 300), {}, id="window-more-keys"),
    pytest.param(64, {"window": (None, 7)}, (200,), {}, id="window-right"),
    pytest.param(64, {"softcap": 2.0, "causal": True}, (130,), {}, id="softcap"),
    pytest.param(64, {"softmax_scale": 0.5}, (130,), {}, id="scale"),
]


@pytest.mark.parametrize(("dim", "options", "sizes", "knobs"), FORWARD)
def test_forward(emitted: Any, dim: Any, options: Any, sizes: Any, knobs: Any) -> None:
    spec = spec_of(dim, **options)
    q, k, v, _ = inputs(spec, *sizes)
    module = emitted(spec, fwd_config(spec, **knobs))
    assert_forward(spec, q, k, v, *forward(module, spec, q, k, v))


KNOBS = [
    {"overlap": False},
    {"turns": True},
    {"q_in_registers": True, "overlap": False, "block_n": 64},
    {"q_buffers": 2},
    {"q_buffers": 2, "turns": True, "consumers": 3, "overlap": False},
    {"out_in_q": True},
    {"out_in_q": True, "q_in_registers": True, "block_n": 64},
    {"out_in_q": True, "q_buffers": 2},
    {"num_stages": 3},
    {"block_n": 32, "num_stages": 4},
    {"consumers": 3, "overlap": False, "turns": True},
    {"conditional_rescale": False},
]


@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: ",".join(knobs))
def test_forward_knobs(emitted: Any, knobs: dict[str, Any]) -> None:
    """Two row tiles in one program, so that buffers and barriers are used again."""
    spec = spec_of(64, causal=True)
    q, k, v, _ = inputs(spec, 200, 270)
    module = emitted(spec, fwd_config(spec, **knobs))
    assert_forward(spec, q, k, v, *forward(module, spec, q, k, v))


def test_forward_batches_and_groups(emitted: Any) -> None:
    spec = spec_of(64, causal=True)
    q, k, v, _ = inputs(spec, 70, 70, heads=(4, 2), batch=2)
    module = emitted(spec, fwd_config(spec))
    assert_forward(spec, q, k, v, *forward(module, spec, q, k, v))


@pytest.mark.parametrize("knobs", [{}, {"out_in_q": True}], ids=["", "out_in_q"])
def test_forward_float32_out(emitted: Any, knobs: dict[str, Any]) -> None:
    spec = spec_of(96, causal=True)
    q, k, v, _ = inputs(spec, 130)
    out, lse = forward(emitted(spec, fwd_config(spec, **knobs)), spec, q, k, v, partial=True)
    assert out.dtype == torch.float32
    assert_forward(spec, q, k, v, out.to(q.dtype), lse)


def test_forward_strides(emitted: Any) -> None:
    """Inputs in the middle of larger tensors; an out whose rows are no multiple of 16 bytes."""
    spec = spec_of(96, causal=True)
    q, k, v = (
        torch.nn.functional.pad(x, (8, 24), value=float("nan"))[..., 8:104].contiguous()
        for x in inputs(spec, 130, heads=(2, 2))[:3]
    )
    q, k, v = (torch.nn.functional.pad(x, (0, 8, 1, 3))[:, :, 1:-3, :96] for x in (q, k, v))
    out = torch.full((1, 2, 130, 97), UNWRITTEN, dtype=q.dtype)
    module = emitted(spec, fwd_config(spec))
    assert_forward(spec, q, k, v, *forward(module, spec, q, k, v, out=out[..., :96]))
    assert (out[..., 96] == torch.tensor(UNWRITTEN, dtype=q.dtype)).all()


def rising(
    spec: AttentionSpec, rows: int, keys: int, only: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v whose scores rise tile after tile, for one row in 16 if `only` says which.

    Keys are walked from the last to the first, so the first must be the largest.
    """
    q, k, v, _ = inputs(spec, rows, keys)
    q, k = q.abs() * 30, k.abs() * torch.linspace(1, 0.05, keys).to(k.dtype)[:, None]
    if only is not None:
        q[:, :, torch.arange(rows) % 16 != only] = 0.0
    return q, k, v


@pytest.mark.parametrize("conditional", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_forward_rising_scores(emitted: Any, overlap: bool, conditional: bool) -> None:
    spec = spec_of(64)
    q, k, v = rising(spec, 130, 300)
    config = fwd_config(spec, overlap=overlap, block_n=32, conditional_rescale=conditional)
    module = emitted(spec, config)
    assert_forward(spec, q, k, v, *forward(module, spec, q, k, v))


@pytest.mark.parametrize("only", [4, 12])
def test_forward_rising_scores_of_one_row(emitted: Any, only: int) -> None:
    """A thread has a row of the first 8 and one of the second 8 of its warp."""
    spec = spec_of(96)
    q, k, v = rising(spec, 130, 300, only)
    module = emitted(spec, fwd_config(spec, block_n=32))
    assert_forward(spec, q, k, v, *forward(module, spec, q, k, v))


@pytest.mark.parametrize("at", [0, 150, 299])
def test_forward_one_huge_key(emitted: Any, at: int) -> None:
    """Some rows of a warp are rescaled by 2^-hundreds, others not at all."""
    spec = spec_of(64, softmax_scale=1.0)
    q, k, v, _ = inputs(spec, 130, 300)
    k[:, :, at] *= 30
    module = emitted(spec, fwd_config(spec, block_n=64))
    assert_forward(spec, q, k, v, *forward(module, spec, q, k, v))


@pytest.mark.parametrize("scale", [1e4, 1e6, 1e25])
def test_forward_large_logits(emitted: Any, scale: float) -> None:
    spec = spec_of(64, causal=True)
    q, k, v, _ = inputs(spec, 70)
    q = q * scale
    module = emitted(spec, fwd_config(spec))
    assert_forward(spec, q, k, v, *forward(module, spec, q, k, v, goes_again=True))


def test_forward_hidden_nan(emitted: Any) -> None:
    """NaN that no row sees changes nothing; rows that see one are NaN."""
    spec = spec_of(64, causal=True)
    q, k, v, _ = inputs(spec, 70)
    clean = forward(emitted(spec, fwd_config(spec)), spec, q, k, v)
    for tainted in (k, v):
        kept = tainted[:, :, 40].clone()
        tainted[:, :, 40] = float("nan")
        out, lse = forward(emitted(spec, fwd_config(spec)), spec, q, k, v, goes_again=True)
        tainted[:, :, 40] = kept
        torch.testing.assert_close(out[:, :, :40], clean[0][:, :, :40], atol=2e-2, rtol=0)
        torch.testing.assert_close(lse[:, :, :40], clean[1][:, :, :40], atol=1e-4, rtol=0)
        assert out[:, :, 40:].isnan().all()


# FP8: V is transposed by a kernel of its own, P is rounded too


def fp8_inputs(spec: AttentionSpec, *sizes: Any, spread_out: float = 1.0) -> Quantized:
    """Operands, each 64 rows of another size, up to `spread_out`-fold."""
    wide = replace(spec, dtype="float32", fp8_scale=None)
    made = []
    for x in inputs(wide, *sizes)[:3]:
        generator = torch.Generator().manual_seed(x.shape[2])
        steps = torch.rand(*x.shape[:2], -(-x.shape[2] // 64), 1, generator=generator)
        made.append(x * spread_out ** steps.repeat_interleave(64, 2)[:, :, : x.shape[2]])
    return attngen.quantize(*made, dtype=spec.dtype, scale=spec.fp8_scale or "tensor")


def fp8_forward(
    module: ModuleType,
    spec: AttentionSpec,
    found: Quantized,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    goes_again: bool = False,
) -> tuple[Tensor, Tensor]:
    q, k, v, *descales = found
    out, lse = unwritten(q, spec.head_dim_v, dtype), torch.full(q.shape[:3], UNWRITTEN)
    v_t = memory.transposed(v).make(v).fill_(float("nan"))
    numbers = numbers_of(spec, q.shape[2], k.shape[2]) | dict(zip(DESCALES, descales, strict=True))
    *first, again = module.plan(q, k, v, out, lse, v_t, **numbers)
    run(first, seed)
    assert bool(lse.isnan().any()) == goes_again
    run([again], seed)
    return out, lse


def assert_fp8_forward(
    spec: AttentionSpec,
    found: Quantized,
    out: Tensor,
    lse: Tensor,
    within: float = 4e-2,
    polynomial: bool = False,
) -> None:
    """As good as PyTorch with P in FP8, and out within some percent on the whole. The polynomial of
    exponentials has an error of 1e-4."""
    exp_error = 1e-4 if polynomial else torch.finfo(torch.float32).eps
    pairs = zip(found[:3], found[3:], strict=True)
    q, k, v = (x.double() * spread(descale, x) for x, descale in pairs)
    want = reference.attention(spec, q, k, v)
    yard = reference.yardstick(spec, q, k, v, torch.bfloat16)
    for name, actual, wanted, about, eps in (
        ("out", out, want[0], yard[0], torch.finfo(torch.bfloat16).eps),
        ("lse", lse, want[1], yard[1], exp_error),
    ):
        verdict = reference.judge(actual, wanted, about, eps)
        assert verdict.ok, f"{name}: {verdict.detail}"
    assert (out - want[0]).norm() < within * want[0].norm()


E4M3, E5M2 = {"dtype": "float8_e4m3fn"}, {"dtype": "float8_e5m2"}
QUIET = {"overlap": False}
FP8_FORWARD = [
    pytest.param(64, {"fp8_scale": "tensor", **E4M3}, (150,), {"exp_polynomial": 1}, id="tensor"),
    pytest.param(
        64,
        {"fp8_scale": "head", "causal": True, **E5M2},
        (200, None, (4, 2), 2),
        {**QUIET, "turns": True},
        id="head-causal-e5m2",
    ),
    pytest.param(
        64,
        {"fp8_scale": "block", "causal": True, **E4M3},
        (200, 450, (2, 1)),
        {**QUIET, "consumers": 3, "turns": True, "q_buffers": 2, "exp_polynomial": 2},
        id="block-causal-3-consumers",
    ),
    pytest.param(
        64,
        {"fp8_scale": "block", "window": (200, 9), "softcap": 2.0, **E4M3},
        (130, 400),
        {"block_n": 32, "exp_polynomial": 3},
        id="block-window-softcap",
    ),
    pytest.param(
        64,
        {"fp8_scale": "head", "softcap": 2.0, **E4M3},
        (70,),
        {"q_in_registers": True, **QUIET},
        id="head-softcap",
    ),
    pytest.param((128, 64), {"fp8_scale": "block", **E4M3}, (65, 300), QUIET, id="d128-v64"),
    pytest.param(
        64,
        {"fp8_scale": "tensor", "causal": True, **E4M3},
        (300, 450),
        {**QUIET, "consumers": 3, "turns": True, "turn_ends": "products"},
        id="turns-of-products",
    ),
    pytest.param(
        64,
        {"fp8_scale": "tensor", **E4M3},
        (300, 450),
        {**QUIET, "turns": True, "turn_ends": "scores"},
        id="turns-of-scores",
    ),
    pytest.param(
        64,
        {"fp8_scale": "tensor", **E4M3},
        (150, 450),
        {"turns": True, "turn_ends": "scores"},
        id="turns-of-scores-overlap",
    ),
    pytest.param(
        64,
        {"fp8_scale": "tensor", "causal": True, **E4M3},
        (300, 450),
        {**QUIET, "turns": True, "turn_ends": "scores", "mask_loop": True, "late_sums": True},
        id="mask-loop",
    ),
    pytest.param(
        64,
        {"fp8_scale": "block", "window": (200, 9), "softcap": 2.0, **E4M3},
        (130, 400),
        {"block_n": 32, "mask_loop": True, "late_sums": True},
        id="mask-loop-window-block",
    ),
    pytest.param(
        64,
        {"fp8_scale": "head", "causal": "top_left", **E4M3},
        (300, 130, (4, 2)),
        {"turns": True, "turn_ends": "scores", "mask_loop": True, "fences": True},
        id="fences-overlap",
    ),
    pytest.param(
        64,
        {"fp8_scale": "tensor", **E4M3},
        (150, 450),
        {**QUIET, "turns": True, "turn_ends": "products", "late_sums": True, "fences": True},
        id="fences-products",
    ),
    pytest.param(
        64,
        {"fp8_scale": "block", "causal": "top_left", "chunk": 64, **E4M3},
        (400, 65),
        {"block_n": 64},
        id="block-rows-far-past-keys",
    ),
    pytest.param(
        256, {"fp8_scale": "tensor", "causal": True, **E4M3}, (130,), QUIET, id="d256-causal"
    ),
]


@pytest.mark.parametrize(("dim", "options", "sizes", "knobs"), FP8_FORWARD)
@pytest.mark.parametrize("conditional", [True, False])
def test_fp8_forward(
    emitted: Any, dim: Any, options: Any, sizes: Any, knobs: Any, conditional: bool
) -> None:
    spec = spec_of(dim, **options)
    config = HopperFwdConfig(**knobs, conditional_rescale=conditional)
    found = fp8_inputs(spec, *sizes, spread_out=4.0 if spec.has_block_scales else 1.0)
    results = fp8_forward(emitted(spec, config), spec, found)
    assert_fp8_forward(spec, found, *results, polynomial=config.exp_polynomial > 0)


@pytest.mark.parametrize("scale", ["tensor", "block"])
def test_fp8_forward_rising_scores(emitted: Any, scale: str) -> None:
    """Maxima that rise by less and by more than what conditional rescaling lets pass."""
    spec = spec_of(64, fp8_scale=scale, **E4M3)
    q, k, v, _ = inputs(replace(spec, dtype="float32", fp8_scale=None), 130, 300)
    q, k = q.abs() * 3, k.abs() * torch.linspace(1, 0.05, 300)[:, None]
    found = attngen.quantize(q, k, v, scale=scale)
    module = emitted(spec, HopperFwdConfig(block_n=32))
    assert_fp8_forward(spec, found, *fp8_forward(module, spec, found))


def test_fp8_forward_many_small_weights(emitted: Any) -> None:
    """One key outweighs each of the others 2^10-fold, and all of them together not."""
    spec = spec_of(64, fp8_scale="tensor", softmax_scale=1.0, **E4M3)
    q, k, v, _ = inputs(replace(spec, dtype="float32", fp8_scale=None), 64, 1500)
    q, k = torch.full_like(q, 0.5), torch.full_like(k, 0.0)
    k[:, :, -1] = 7.0 / 32
    found = attngen.quantize(q, k, v.abs())
    module = emitted(spec, HopperFwdConfig(overlap=False))
    assert_fp8_forward(spec, found, *fp8_forward(module, spec, found))


@pytest.mark.parametrize("scale", ["head", "block"])
def test_fp8_forward_goes_again(emitted: Any, scale: str) -> None:
    """NaN behind a mask, and logits so large that they want care; out in float32."""
    spec = spec_of(64, fp8_scale=scale, causal=True, softmax_scale=1e3, **E4M3)
    found = fp8_inputs(spec, 150)
    found.v[:, :, 149] = float("nan")
    module = emitted(spec, HopperFwdConfig())
    out, lse = fp8_forward(module, spec, found, dtype=torch.float32, goes_again=True)
    assert out[:, :, 149].isnan().all() and lse[:, :, :149].isfinite().all()
    found.v[:, :, 149] = 0.0
    pairs = zip(found[:3], found[3:], strict=True)
    q, k, v = (x.double() * spread(descale, x) for x, descale in pairs)
    want, _ = reference.attention(spec, q, k, v)
    torch.testing.assert_close(out[:, :, :149], want[:, :, :149].float(), atol=2e-2, rtol=0)


def test_fp8_call_brings_memory_for_v(emitted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole call, with the emulator in place of a GPU; the second time as it was remembered."""
    spec = spec_of(64, fp8_scale="head", causal=True, **E4M3)
    config = HopperFwdConfig(overlap=False)
    module = emitted(spec, config)

    def prepared(numbers: dict[str, Any], keywords: tuple[str, ...]) -> Any:
        def launch(tensors: tuple[Tensor, ...]) -> None:
            at = len(tensors) - len(keywords)
            named = dict(zip(keywords, tensors[at:], strict=True))
            run(module.plan(*tensors[:at], **named, **numbers))

        return launch

    fake = SimpleNamespace(config=config, prepared=prepared)
    resolved = SimpleNamespace(kernel=fake, by_pointer=None)
    monkeypatch.setattr(settle, "resolve", lambda *given: resolved)
    monkeypatch.setattr(calls, "_CALLS", Remembered(4))
    found = fp8_inputs(spec, 150, 70, (2, 1))
    scales = dict(zip(DESCALES, found[3:], strict=True))
    for _ in range(2):
        out, lse = attngen.attention(*found[:3], causal=True, return_lse=True, **scales)
        assert_fp8_forward(spec, found, out, lse)


def shards(step: int) -> Iterator[tuple[slice, dict[str, int]]]:
    for start in range(step):
        yield slice(start, None, step), {"start": start, "step": step}


@pytest.mark.parametrize("step", [1, 3])
def test_forward_shards(emitted: Any, step: int) -> None:
    """Every `step`-th query and key, merged, is the dense result."""
    spec = spec_of(64, causal=True)
    q, k, v, _ = inputs(spec, 130, 150)
    module = emitted(spec, fwd_config(spec))
    align: dict[str, Any] = {"align": 20}
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3])
    for rows, place in shards(step):
        placed = {"q_start": place["start"], "q_step": step} | align
        joined = None
        for keys, at in shards(step):
            placed |= {"k_start": at["start"], "k_step": step}
            part = [x[:, :, keys].contiguous() for x in (k, v)]
            one = forward(module, spec, q[:, :, rows].contiguous(), *part, partial=True, **placed)
            joined = one if joined is None else attngen.merge(*joined, *one)
        assert joined is not None
        out[:, :, rows], lse[:, :, rows] = joined[0].to(q.dtype), joined[1]
    assert_forward(spec, q, k, v, out, lse)


# ---- backward


def backward(
    module: ModuleType,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    dlse: Tensor | None = None,
    *,
    results_of: tuple[Tensor, Tensor] | None = None,
    seed: int = 0,
    goes_again: bool = False,
    **placed: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from the oracle's out and lse; `goes_again` as in forward()."""
    batch, heads, rows, dim = q.shape
    terms = terms_of(spec, q)
    out, lse = results_of or reference.attention(spec, q, k, v, **terms)
    out, lse = out.to(q.dtype), lse.float()
    results = [unwritten(x, x.shape[3], x.dtype) for x in (q, k, v)]
    nan = float("nan")
    scratch = [torch.full((batch, heads, 2, -(-rows // 128) * 128), nan)]
    if "dq_sum" in module.plan.__code__.co_varnames:
        scratch.append(torch.full((batch, heads, rows, dim), nan))
    numbers = numbers_of(spec, rows, k.shape[2]) | terms | placed
    plan = module.plan(q, k, v, out, lse, do, dlse, *results, *scratch, **numbers)
    careful = [launch[0].__name__.endswith("again") for launch in plan]
    assert careful == sorted(careful)
    first = len(plan) - sum(careful)
    run(plan[:first], seed)
    if any(careful):
        assert bool(results[0].isnan().any()) == goes_again
    run(plan[first:], seed)
    dq, dk, dv = results
    return dq, dk, dv


def assert_backward(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    got: tuple[Tensor, ...],
    dlse: Tensor | None = None,
) -> None:
    terms = terms_of(spec, q)

    def solve(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = tuple(x.detach().to(dtype).requires_grad_() for x in (q, k, v))
        exact = dtype == torch.float64
        made = (
            reference.attention(spec, *leaves, **terms)
            if exact
            else reference.yardstick(spec, *leaves, q.dtype, **terms)
        )
        grads: tuple[Tensor, ...] = reference.gradients(*made, leaves, do, dlse)
        return grads

    for name, actual, wanted, about in zip(
        ("dq", "dk", "dv"), got, solve(torch.float64), solve(torch.float32), strict=True
    ):
        verdict = reference.judge(actual, wanted, about, torch.finfo(actual.dtype).eps)
        assert verdict.ok, f"{name}: {verdict.detail}"


BACKWARD = [
    pytest.param(64, {"sinks": True, "causal": True}, (130, None, (2, 1)), {}, id="sinks"),
    pytest.param(64, {"chunk": 90, "causal": True}, (300,), {}, id="chunk-causal"),
    pytest.param(64, {"chunk": 70, "window": (50, 20)}, (130, 200), {}, id="chunk-window"),
    pytest.param(64, {}, (200, None, (2, 1)), {}, id="d64"),
    pytest.param(64, {"causal": True}, (200, None, (2, 1)), {"block_m": 128}, id="d64-causal"),
    pytest.param(96, {"causal": True}, (130, None, (2, 1)), {}, id="d96-causal"),
    pytest.param(128, {}, (200,), {}, id="d128"),
    pytest.param(128, {"causal": True}, (256,), {}, id="d128-causal"),
    pytest.param(192, {"causal": True}, (130,), {}, id="d192-causal"),
    pytest.param(256, {"causal": True}, (130,), {}, id="d256-causal"),
    pytest.param((192, 128), {"causal": True}, (130,), {}, id="d192-v128"),
    pytest.param(64, {"dtype": "float16", "causal": True}, (65,), {}, id="float16"),
    pytest.param(64, {}, (1,), {}, id="one-row"),
    pytest.param(64, {"causal": True}, (63,), {}, id="less-than-a-tile"),
    pytest.param(64, {}, (1, 200), {}, id="one-row-many-keys"),
    pytest.param(64, {}, (65, 1), {}, id="one-key"),
    pytest.param(64, {"causal": True}, (65, 200), {}, id="more-keys"),
    pytest.param(64, {"causal": True}, (200, 65, (2, 1)), {}, id="rows-without-keys"),
    pytest.param(64, {"causal": "top_left"}, (200, 65), {}, id="top-left-more-rows"),
    pytest.param(64, {"causal": "top_left"}, (65, 300), {}, id="keys-without-rows"),
    pytest.param(
        64, {"causal": True, "window": (40, 0)}, (300, None, (2, 1)), {}, id="causal-window"
    ),
    pytest.param(64, {"window": (10, 5)}, (200, None, (2, 1)), {}, id="window-both-sides"),
    pytest.param(64, {"window": (3, 3)}, (40, 300), {}, id="window-more-keys"),
    pytest.param(64, {"window": (None, 7)}, (200,), {}, id="window-right"),
    pytest.param(64, {"softcap": 2.0, "causal": True}, (130,), {}, id="softcap"),
    pytest.param(64, {"softmax_scale": 0.5}, (130,), {}, id="scale"),
]
BOTH = pytest.mark.parametrize("dq", ["kernel", "atomic"])


def bwd_config(spec: AttentionSpec, **options: Any) -> HopperBwdConfig:
    """A config that fits the spec's head dims into shared memory."""
    usual = {"dq_v_stages": 1} if spec.head_dim > 192 else {}
    return HopperBwdConfig(**usual | options)


@BOTH
@pytest.mark.parametrize(("dim", "options", "sizes", "knobs"), BACKWARD)
def test_backward(emitted: Any, dim: Any, options: Any, sizes: Any, knobs: Any, dq: str) -> None:
    spec = spec_of(dim, **options)
    q, k, v, do = inputs(spec, *sizes)
    module = emitted(spec, bwd_config(spec, dq=dq, **knobs))
    assert_backward(spec, q, k, v, do, backward(module, spec, q, k, v, do))


@BOTH
def test_backward_gradient_of_lse(emitted: Any, dq: str) -> None:
    spec = spec_of(64, causal=True)
    q, k, v, do = inputs(spec, 130)
    dlse = torch.randn(q.shape[:3])
    got = backward(emitted(spec, bwd_config(spec, dq=dq)), spec, q, k, v, do, dlse)
    assert_backward(spec, q, k, v, do, got, dlse)


@BOTH
def test_backward_batches_and_groups(emitted: Any, dq: str) -> None:
    spec = spec_of(64, causal=True)
    q, k, v, do = inputs(spec, 70, heads=(4, 2), batch=2)
    module = emitted(spec, bwd_config(spec, dq=dq))
    assert_backward(spec, q, k, v, do, backward(module, spec, q, k, v, do))


BWD_KNOBS = [
    ("atomic", {"dv_first": True}),
    ("atomic", {"dv_first": True, "drain_dv": False}),
    ("atomic", {"drain_dv": False, "block_m": 128}),
    ("atomic", {"num_stages": 3}),
    ("kernel", {"dv_first": True}),
    ("kernel", {"block_m": 128, "dq_block_n": 128}),
    ("kernel", {"num_stages": 1, "dq_k_stages": 1, "dq_v_stages": 1}),
    ("kernel", {"num_stages": 3, "dq_k_stages": 3, "dq_v_stages": 1}),
]


@pytest.mark.parametrize(
    ("dq", "knobs"), BWD_KNOBS, ids=lambda x: x if isinstance(x, str) else ",".join(x)
)
def test_backward_knobs(emitted: Any, dq: str, knobs: dict[str, Any]) -> None:
    spec = spec_of(64, causal=True)
    q, k, v, do = inputs(spec, 200, 270)
    module = emitted(spec, bwd_config(spec, dq=dq, **knobs))
    assert_backward(spec, q, k, v, do, backward(module, spec, q, k, v, do))


@BOTH
def test_backward_shards(emitted: Any, dq: str) -> None:
    """Gradients of every second query and every third key add up to the dense ones."""
    spec = spec_of(64, causal=True)
    q, k, v, do = inputs(spec, 130, 150)
    results = reference.attention(spec, q, k, v)
    module = emitted(spec, bwd_config(spec, dq=dq))
    sums = [torch.zeros(x.shape) for x in (q, k, v)]
    for r, rows in enumerate(slice(start, None, 2) for start in range(2)):
        for c, keys in enumerate(slice(start, None, 3) for start in range(3)):
            placed: dict[str, Any] = {"q_start": r, "q_step": 2, "k_start": c, "k_step": 3}
            at_rows = [x[:, :, rows].contiguous() for x in (q, do, *results)]
            at_keys = [x[:, :, keys].contiguous() for x in (k, v)]
            placed |= {"align": 20, "results_of": (at_rows[2], at_rows[3])}
            got = backward(module, spec, at_rows[0], at_keys[0], at_keys[1], at_rows[1], **placed)
            for total, at, grad in zip(sums, (rows, keys, keys), got, strict=True):
                total[:, :, at] += grad.float()
    assert_backward(spec, q, k, v, do, tuple(x.to(q.dtype) for x in sums))


@BOTH
def test_backward_hidden_nan(emitted: Any, dq: str) -> None:
    """A key that is NaN reaches no row that does not see it."""
    spec = spec_of(64, causal=True)
    q, k, v, do = inputs(spec, 70)
    module = emitted(spec, bwd_config(spec, dq=dq))
    clean = backward(module, spec, q, k, v, do)
    for tainted in (k, v):
        kept = tainted[:, :, 40].clone()
        tainted[:, :, 40] = float("nan")
        dq_, dk, dv = backward(module, spec, q, k, v, do, goes_again=True)
        tainted[:, :, 40] = kept
        torch.testing.assert_close(dq_[:, :, :40], clean[0][:, :, :40], atol=2e-2, rtol=0)
        assert dq_[:, :, 40:].isnan().all()


@BOTH
def test_backward_value_that_no_query_sees(emitted: Any, dq: str) -> None:
    """NaN there meets P = 0 of all queries, also of the rows past the end."""
    spec = spec_of(64, causal="top_left")
    q, k, v, do = inputs(spec, 65, 300)
    v[:, :, 100] = 0.0
    results_of = reference.attention(spec, q, k, v)
    module = emitted(spec, bwd_config(spec, dq=dq))
    want = backward(module, spec, q, k, v, do, results_of=results_of)
    v[:, :, 100] = float("nan")
    got = backward(module, spec, q, k, v, do, results_of=results_of)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@BOTH
def test_backward_keys_past_the_end(emitted: Any, dq: str) -> None:
    """Their K is zero; where all scores are far below zero, their P would overflow."""
    spec = spec_of(64, causal="top_left", softmax_scale=1.0)
    q, k, v, do = inputs(spec, 300, 65)
    q, k = q.abs() * 2, -k.abs() * 2
    got = backward(emitted(spec, bwd_config(spec, dq=dq)), spec, q, k, v, do)
    assert_backward(spec, q, k, v, do, got)


@BOTH
def test_backward_rising_scores(emitted: Any, dq: str) -> None:
    spec = spec_of(64)
    q, k, v = rising(spec, 130, 200)
    do = torch.randn(v.shape[0], 1, 130, 64).to(v.dtype)
    module = emitted(spec, bwd_config(spec, dq=dq))
    assert_backward(spec, q, k, v, do, backward(module, spec, q, k, v, do))


# ---- does anybody notice?

LOOP_WAIT = "mbarrier.wait(slot_full.index(slot % NUM_STAGES), slot // NUM_STAGES & 1)"
FWD_FAULTS = {
    "no wait for q": ("mbarrier.wait(q_full.index(buffer), count // Q_BUFFERS & 1)", "pass"),
    "no wait for the first slot": (
        "mbarrier.wait(slot_full.index(stage), slot // NUM_STAGES & 1)",
        "pass",
    ),
    "no wait for slots": (LOOP_WAIT, "pass"),
    "slots of the wrong phase": (LOOP_WAIT, LOOP_WAIT.replace("& 1)", "& 1 ^ 1)")),
    "slots overwritten": ("named_barrier(SLOT_FREE + stage, SYNC)", "pass"),
    "slots never freed": ("named_barrier(SLOT_FREE + stage, ARRIVE)", "pass"),
    "q overwritten": ("named_barrier(Q_FREE + buffer, SYNC)", "pass"),
    "q freed too early": (
        "        if not Q_IN_REGISTERS and not OUT_IN_Q:\n"
        "            named_barrier(Q_FREE + buffer, ARRIVE)\n",
        "",
        "        # The last keys first",
        "        named_barrier(Q_FREE + buffer, ARRIVE)  #",
    ),
    "a slot freed under a product": ("qk = warpgroup_mma_wait(0, deps=[qk])", "qk = qk"),
    "scores used in flight": ("qk = warpgroup_mma_wait(1, deps=[qk])", "qk = qk"),
    "one product waited for too few": ("acc = warpgroup_mma_wait(0, deps=[acc])", "acc = acc"),
    "wrong number of bytes": (
        "mbarrier.expect(full, BLOCK_N * ROW_BYTES)",
        "mbarrier.expect(full, 64)",
    ),
    "no fence before the store": (
        "out_rows.reshape([64, 64]).store(out.to(DTYPE))\n            fence_async_shared()",
        "out_rows.reshape([64, 64]).store(out.to(DTYPE))",
    ),
    "no fence after init": (
        "mbarrier.init(slot_full.index(i), count=1)\n    fence_async_shared()",
        "mbarrier.init(slot_full.index(i), count=1)",
    ),
    "stores not waited for": ("tma.store_wait(0)", "pass"),
    "no barrier after store_wait": ("gl.thread_barrier()", "pass"),
    "threads miscounted": ("128 * CONSUMERS.value + 32", "128 * CONSUMERS.value"),
    "Triton's barriers": ("SLOT_FREE = tl.constexpr(8)", "SLOT_FREE = tl.constexpr(1)"),
    "no mask": ("s = hide_keys(s, start_n, hi_i)", "pass"),
    "mask off by one": ("start_n >= full_end", "start_n > full_end"),
    "v of another tile": ("start_n + BLOCK_N, 0]", "start_n, 0]"),
    "sums not rescaled": ("l_i * alpha", "l_i"),
    "out not rescaled": ("mul.f32 ${i}, ${count + i}", "mov.b32 ${i}, ${count + i}"),
    "alphas exchanged": ("i % 4 < 2", "i % 4 >= 2"),
    "one alpha looked at": ("setp.neu.or.f32 p, ${second}", "setp.neu.or.f32 p, ${first}"),
    "maximum kept too long": ("* exp_scale > 8.0", "* exp_scale > 200.0"),
}
BWD_FAULTS = {
    "no wait for k and v": ("mbarrier.wait(kv_full, 0)", "pass"),
    "no wait for slots": ("mbarrier.wait(full.index(slot), step // NUM_STAGES & 1)", "pass"),
    "slots overwritten": ("named_barrier(SLOT + slot, SYNC_288)", "pass"),
    "slots never freed": ("named_barrier(SLOT + slot, ARRIVE_288)", "pass"),
    "dS not exchanged": ("named_barrier(DS_READY, SYNC_256)", "pass"),
    "no fences": ("fence_async_shared()", "pass"),
    "one buffer of dS": ("buffer = step % 2 * 2", "buffer = 0"),
    "stores not waited for": ("tma.store_wait(0)", "pass"),
    "dq used in flight": ("dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))", "dv = dv"),
    "a slot freed under a product": ("dk = warpgroup_mma_wait(0, deps=(dk,))", "dk = dk"),
    "no mask": ("hide_before(p, lo_j - start_m)", "p"),
    "no delta": ("(dp - delta[None, :])", "dp"),
    "heads not counted": ("head_q += (start_m >= end).to(gl.int32)", "pass"),
}
DQ_FAULTS = {
    "no wait for q": ("mbarrier.wait(q_full, 0)", "pass"),
    "no wait for k": ("mbarrier.wait(k_full.index(k_slot), step // K_STAGES & 1)", "pass"),
    "v overwritten": ("named_barrier(V_SLOT + slot, SYNC_288)", "pass"),
    "k freed too early": (
        "named_barrier(K_SLOT + k_slot, ARRIVE_288)",
        "pass",
        "named_barrier(V_SLOT + v_slot, ARRIVE_288)",
        "named_barrier(V_SLOT + v_slot, ARRIVE_288)\n"
        "        named_barrier(K_SLOT + k_slot, ARRIVE_288)",
    ),
    "no mask": ("hide_from(ds, hi_i - start_n)", "ds"),
}


WIDE_FAULTS = {
    "P not waited for": ("named_barrier(P_READY, SYNC_256)", "pass"),
    "P overwritten": ("named_barrier(P_READ, SYNC_256)", "pass"),
    "P never read": ("named_barrier(P_READ, ARRIVE_256)", "pass"),
    "slots never freed": ("named_barrier(SLOT + q_slot, ARRIVE_288)", "pass"),
}


FP8_FAULTS = {
    "keys in another order": ("permute((0, 1, 3, 2, 4))", "permute((0, 1, 2, 3, 4))"),
    "V in another order": ("i // 2 * 8 + i % 2", "i"),
    "tail of V unwritten": (
        "tl.store(v_t_words + (rows[:, None] + words[None, :]), tl.trans(packed))",
        "pass",
    ),
    "sums with V's scale": ("gl.sum(p, 1) / v_part", "gl.sum(p, 1)"),
    "P without V's scale": ("P_BITS + gl.log2(v_part)", "P_BITS"),
    "acc in old units": ("alpha *= old_unit / v_unit", "pass"),
    "lse with P's scale": ("lse -= P_BITS", "pass"),
    "scales of the tile before": ("k_scale = next_k_scale", "pass"),
    "scale of the first block": ("gl.minimum(start_m, seqlen_q - 1) // SCALE_ROWS", "0"),
    "scale of another head": ("at = head // group_size", "at = 0"),
}


def changes(fault: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    yield from zip(fault[::2], fault[1::2], strict=True)


@pytest.mark.parametrize("fault", FWD_FAULTS)
def test_fault_in_forward_is_noticed(emitted: Any, fault: str) -> None:
    """Scores rise where rescaling is meant. There are several tiles of rows and of keys."""
    rises = any(word in fault for word in ("alpha", "rescaled", "maximum"))
    spec = spec_of(64, causal=not rises)
    q, k, v, _ = inputs(spec, 300, 300)
    if rises:
        q, k, v = rising(spec, 130, 300, 12 if "one" in fault else None)
    config = fwd_config(spec, block_n=32, num_stages=2)
    module = emitted(spec, config, *changes(FWD_FAULTS[fault]))
    with pytest.raises((Fault, AssertionError)):
        assert_forward(spec, q, k, v, *forward(module, spec, q, k, v))


@pytest.mark.parametrize("fault", FP8_FAULTS)
def test_fault_in_fp8_forward_is_noticed(emitted: Any, fault: str) -> None:
    spec = spec_of(64, fp8_scale="block", **E4M3)
    found = fp8_inputs(spec, 200, 450, (4, 2), spread_out=4.0)
    module = emitted(spec, HopperFwdConfig(overlap=False), *changes(FP8_FAULTS[fault]))
    with pytest.raises((Fault, AssertionError)):
        assert_fp8_forward(spec, found, *fp8_forward(module, spec, found))


@pytest.mark.parametrize(
    ("dim", "dq", "fault"),
    [
        *(pytest.param(64, "atomic", f, id=name) for name, f in BWD_FAULTS.items()),
        *(pytest.param(64, "kernel", f, id=f"dq, {name}") for name, f in DQ_FAULTS.items()),
        *(pytest.param(192, "kernel", f, id=f"wide, {name}") for name, f in WIDE_FAULTS.items()),
    ],
)
def test_fault_in_backward_is_noticed(emitted: Any, dim: int, dq: str, fault: Any) -> None:
    spec = spec_of(dim, causal=True)
    q, k, v, do = inputs(spec, 200, heads=(2, 1))
    module = emitted(spec, bwd_config(spec, dq=dq), *changes(fault))
    with pytest.raises((Fault, AssertionError)):
        assert_backward(spec, q, k, v, do, backward(module, spec, q, k, v, do))


def test_deadlock_says_who_waits(emitted: Any) -> None:
    spec = spec_of(64)
    q, k, v, _ = inputs(spec, 300)
    never = ("named_barrier(SLOT_FREE + stage, ARRIVE)", "pass")
    module = emitted(spec, fwd_config(spec, block_n=32), never)
    with pytest.raises(Fault, match=r"(?s)deadlock.*default at .*fwd_\w+.py:\d+.*bar.sync 8, 288"):
        forward(module, spec, q, k, v)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("knobs", KNOBS, ids=lambda knobs: ",".join(knobs))
def test_forward_interleavings(emitted: Any, knobs: dict[str, Any], seed: int) -> None:
    spec = spec_of(96, causal=True, window=(100, 0))
    q, k, v, _ = inputs(spec, 270, 300, heads=(2, 1))
    module = emitted(spec, fwd_config(spec, **knobs))
    assert_forward(spec, q, k, v, *forward(module, spec, q, k, v, seed=1000 * seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize(("dq", "knobs"), BWD_KNOBS, ids=str)
def test_backward_interleavings(emitted: Any, dq: str, knobs: dict[str, Any], seed: int) -> None:
    spec = spec_of(64, causal=True, window=(100, 0))
    q, k, v, do = inputs(spec, 270, 300, heads=(2, 1))
    module = emitted(spec, bwd_config(spec, dq=dq, **knobs))
    got = backward(module, spec, q, k, v, do, seed=1000 * seed)
    assert_backward(spec, q, k, v, do, got)
