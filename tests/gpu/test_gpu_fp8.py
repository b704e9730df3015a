"""FP8 on a GPU: both lowerings beside the dequantised operands, and graphs of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_fp8_attention import E4M3, E5M2, dequantized, leaves, named, quantized

import attngen
from attngen import reference
from attngen.fp8 import Quantized, spread
from attngen.spec import AttentionSpec

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["triton", "hopper"])
def lowering(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90")
    monkeypatch.setenv("ATTNGEN_LOWERING", request.param)
    attngen.reload()
    name: str = request.param
    return name


def on_gpu(found: Quantized) -> Quantized:
    return Quantized(*(x.cuda() for x in found))


def assert_right(found: Quantized, options: dict[str, Any], out: Any, lse: Any) -> None:
    scale = {0: "tensor", 2: "head", 3: "block"}[found.q_descale.dim()]
    dim = found.q.shape[3]
    spec = AttentionSpec(head_dim=dim, dtype=found.q.dtype, fp8_scale=scale, **options)
    operands = dequantized(found)
    want = reference.attention(spec, *operands)
    yard = reference.yardstick(spec, *operands, torch.bfloat16)
    for actual, wanted, about in zip((out, lse), want, yard, strict=True):
        eps = reference.FP8_LSE_EPSILON if actual is lse else torch.finfo(actual.dtype).eps
        verdict = reference.judge(actual, wanted, about, eps)
        assert verdict.ok, verdict.detail


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0, "window": (300, 20)}])
@pytest.mark.parametrize(("scale", "dtype"), [("tensor", E4M3), ("head", E5M2), ("block", E4M3)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_forward(
    lowering: str, dim: int, scale: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    found = on_gpu(quantized(scale, dtype, heads=(8, 2), lengths=(1000, 1234), dim=dim))
    out, lse = attngen.attention(*found[:3], **named(found), **options, return_lse=True)
    assert_right(found, options, out, lse)


@pytest.mark.parametrize("scale", ["tensor", "block"])
def test_gradients(lowering: str, scale: str) -> None:
    found = on_gpu(quantized(scale, heads=(4, 2), lengths=(300, 300), dim=64))
    given = leaves(found)
    out = attngen.attention(*given, **named(found), causal=True)
    do = torch.randn_like(out)
    got = torch.autograd.grad(out, given, do)
    wide = [x.double().requires_grad_() for x in found[:3]]
    pairs = zip(wide, found[3:], strict=True)
    operands = [x * spread(descale, x) for x, descale in pairs]
    right, _ = reference.attention(AttentionSpec(head_dim=64, causal=True), *operands)
    want = torch.autograd.grad(right, wide, do.double())
    for x, y in zip(got, want, strict=True):
        assert (x - y).norm() < 4e-2 * y.norm()


def test_captured(lowering: str) -> None:
    """In a CUDA graph, with other operands each time it is replayed."""
    found = on_gpu(quantized("head", heads=(4, 2), lengths=(500, 500), dim=64))
    want = attngen.attention(*found[:3], **named(found))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attngen.attention(*found[:3], **named(found))
    graph.replay()
    assert torch.equal(out, want)
    found.v.copy_(found.v.flip(2))
    graph.replay()
    assert torch.equal(out, attngen.attention(*found[:3], **named(found)))
