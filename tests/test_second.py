"""Derivatives of derivatives, which `attngen.recompute` makes: beside the oracle's in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, make_qkv, oracle, oracle_options
from torch import Tensor
from torch.autograd import forward_ad

import attngen
from attngen import recompute
from attngen.pinned import pinned

# torch.func builds its jvp decompositions with torch.jit.script.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.*is deprecated")

HEADS, ROWS, KEYS = 2, 7, 9
INF = math.inf


@pytest.fixture(autouse=True)
def small() -> Any:
    with pinned({"fwd": SMALL_FWD, "bwd": SMALL_BWD}):
        yield


def leaves(dtype: torch.dtype = torch.float32, **sizes: int) -> dict[str, Tensor]:
    usual = {"heads": HEADS, "heads_kv": 1, "seqlen_q": ROWS, "seqlen_k": KEYS, "dim": 8}
    return dict(zip("qkv", make_qkv(**{**usual, **sizes}, dtype=dtype), strict=True))


def weights(*like: Tensor) -> list[Tensor]:
    """Fixed numbers, so that a loss meets each entry in its own way."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in like]


def second(attend: Any, inputs: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a loss of out and lse, and those of a loss of these."""
    out, lse = attend(**inputs)
    lse = lse.masked_fill(lse == -INF, 0.0)
    on_out, on_lse = (w.to(x) for w, x in zip(weights(out, lse), (out, lse), strict=True))
    loss = (out.float() if out.dtype == torch.bfloat16 else out) * on_out
    loss = (loss * out).sum() + (lse.sin() * on_lse).sum()
    first = torch.autograd.grad(loss, list(inputs.values()), create_graph=True)
    mixed = sum((g * w.to(g)).sum() for g, w in zip(first, weights(*first), strict=True))
    return list(first), list(torch.autograd.grad(mixed, list(inputs.values())))


def check(
    inputs: dict[str, Tensor], scores: dict[str, Tensor], tolerance: float = 2e-5, **options: Any
) -> None:
    """First and second gradients by all that requires one, beside the oracle's in float64."""
    named = oracle_options(options, inputs["q"], inputs["k"])
    learnt = {**inputs, **{n: x for n, x in scores.items() if x.requires_grad}}
    fixed = {n: x for n, x in scores.items() if not x.requires_grad}

    def right(**x: Tensor) -> tuple[Tensor, Tensor]:
        result = oracle.attention(**x, **fixed, **named)
        return result.out, result.lse

    got = second(lambda **x: attngen.attention(**x, **fixed, return_lse=True, **options), learnt)
    wide = {n: x.detach().double().requires_grad_() for n, x in learnt.items()}
    for actual, wanted in zip(got, second(right, wide), strict=True):
        for name, a, w in zip(learnt, actual, wanted, strict=True):
            error = (a.double() - w).abs().max() / w.abs().max().clamp(min=1.0)
            assert error < tolerance, f"{name}: {error}"


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top-left-chunk": {"causal": "top_left", "chunk": 4},
    "window-softcap": {"window": (3, 2), "softcap": 2.0},
    "negative-scale": {"softmax_scale": -0.4},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 5, "causal": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_gradients(options: dict[str, Any]) -> None:
    check(leaves(), {}, **options)


def test_rows_that_see_nothing() -> None:
    check(leaves(seqlen_q=9, seqlen_k=4), {}, causal=True)


def test_terms() -> None:
    bias = torch.randn(1, HEADS, ROWS, KEYS, generator=torch.Generator().manual_seed(1))
    bias[..., 4] = -INF
    mask = torch.rand(1, 1, ROWS, KEYS, generator=torch.Generator().manual_seed(2)) < 0.8
    scores = {
        "bias": bias.requires_grad_(),
        "alibi_slopes": torch.tensor([0.3, -0.1], requires_grad=True),
        "sinks": torch.tensor([0.5, -1.0], requires_grad=True),
    }
    check(leaves(), scores, softcap=3.0)
    fixed = {name: x.detach() for name, x in scores.items()}
    check(leaves(), {**fixed, "sinks": scores["sinks"]}, attn_mask=mask)


def test_bfloat16() -> None:
    check(leaves(torch.bfloat16), {}, tolerance=4e-2, causal=True)


def test_grad_grad_check() -> None:
    """The recomputed gradient is the derivative of a function, and so are its own, in float64."""
    spec = attngen.AttentionSpec(head_dim=4, dtype="float32", causal=True, softcap=2.0)
    named = {"bottom_right": 1, "seqlen_q_total": -1, "seqlen_k_total": -1, "q_step": 1}
    ints = [{**named, "k_step": 1}.get(name, 0) for name in spec.int_args]
    q, k, v = (x.detach() for x in make_qkv(heads=1, seqlen_q=3, seqlen_k=4, dim=4))
    dout, dlse = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3)

    def wide(x: Tensor) -> Tensor:
        return x.double().requires_grad_()

    def gradients(*x: Tensor) -> Any:
        return tuple(recompute.gradients(spec.text_key, *x, [], [0.5, 2.0], ints))

    def double(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        return x.double()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", double)
        inputs = tuple(wide(x) for x in (q, k, v, dout, dlse))
        assert torch.autograd.gradcheck(gradients, inputs)
        assert torch.autograd.gradgradcheck(gradients, inputs)


def loss_of(attend: Any) -> Any:
    return lambda q, k, v: attend(q, k, v)[0].square().sum() + attend(q, k, v)[1].sin().sum()


def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return attngen.attention(q, k, v, causal=True, return_lse=True)


def theirs(q: Tensor, k: Tensor, v: Tensor) -> Any:
    result = oracle.attention(q, k, v, causal=True)
    return result.out, result.lse


NESTED: dict[str, Any] = {
    "grad-grad": lambda f, q, k, v: torch.func.grad(
        lambda x: torch.func.grad(f)(x, k, v).square().sum()
    )(q),
    "forward-over-reverse": lambda f, q, k, v: torch.func.jvp(
        lambda x: torch.func.grad(f, argnums=1)(q, x, v), (k,), (k.flip(2),)
    )[1],
    "reverse-over-forward": lambda f, q, k, v: torch.func.grad(
        lambda x: torch.func.jvp(lambda y: f(q, k, y), (x,), (q.mean() + v.flip(2),))[1].square()
    )(v),
    "forward-over-forward": lambda f, q, k, v: torch.func.jvp(
        lambda x: torch.func.jvp(lambda y: f(y, k, v), (x,), (q.flip(2),))[1], (q,), (q.sin(),)
    )[1],
    "hessian": lambda f, q, k, v: torch.func.hessian(lambda x: f(x, k, v))(q[:, :, :2]),
    "vmap-of-grad-grad": lambda f, q, k, v: torch.func.vmap(
        lambda s: torch.func.grad(lambda x: torch.func.grad(f)(x * s, k, v).square().sum())(q)
    )(q.new_tensor([0.5, 1.0])),
}


@pytest.mark.parametrize("derive", NESTED.values(), ids=NESTED)
def test_nested_transforms(derive: Any) -> None:
    q, k, v = (x.detach() for x in make_qkv(heads=1, seqlen_q=5, dim=4))
    got = derive(loss_of(ours), q, k, v)
    want = derive(loss_of(theirs), q.double(), k.double(), v.double())
    torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=1e-4)


def test_dual_tensors_that_require_grad() -> None:
    """Both ways through one call: the tangent of a gradient, and the gradient of a tangent."""
    inputs = leaves(heads_kv=HEADS)
    q, k, v = inputs.values()
    t = torch.randn(q.shape, generator=torch.Generator().manual_seed(4))

    def both(attend: Any, q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> list[Tensor]:
        with forward_ad.dual_level():
            out, lse = attend(forward_ad.make_dual(q, t), k, v)
            tangent = forward_ad.unpack_dual(out).tangent
            (grad,) = torch.autograd.grad(
                out.square().sum() + lse.sin().sum(), q, retain_graph=True
            )
            of_grad = forward_ad.unpack_dual(grad).tangent
            (of_tangent,) = torch.autograd.grad(tangent.square().sum(), q)
        return [tangent, of_grad, of_tangent]

    got = both(ours, q, k, v, t)
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = both(theirs, *doubles, t.double())
    for a, w in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), w, atol=1e-4, rtol=1e-4)


def test_a_tensor_outside_the_transform_keeps_its_gradient() -> None:
    q, k, v = leaves().values()
    inner = torch.func.grad(lambda x: ours(x, k, v)[0].square().sum())(q.detach())
    (got,) = torch.autograd.grad(inner.square().sum(), k)
    q2, k2, v2 = (x.detach().double().requires_grad_() for x in (q, k, v))
    first = torch.autograd.grad(theirs(q2, k2, v2)[0].square().sum(), q2, create_graph=True)
    (want,) = torch.autograd.grad(first[0].square().sum(), k2)
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-4)


def test_shards_recompute_their_own_rows() -> None:
    """Positions count in second derivatives, too."""
    q, k, v = leaves(seqlen_q=8, seqlen_k=8, heads_kv=HEADS).values()

    def grads(*parts: Tensor) -> Tensor:
        first = torch.autograd.grad(
            sum(x.square().sum() for x in parts), (q, k, v), create_graph=True
        )
        return torch.stack(torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v)))

    options = {"causal": True, "dropout_p": 0.3, "dropout_seed": 9}
    halves = [
        attngen.attention(
            q[:, :, n::2], k, v, q_start=n, q_step=2, seqlen_q_total=8, seqlen_k_total=8, **options
        )
        for n in (0, 1)
    ]
    got, want = grads(*halves), grads(attngen.attention(q, k, v, **options))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_hidden_nan_and_empty_calls() -> None:
    q, k, v = (x.detach() for x in leaves(seqlen_q=KEYS).values())
    k[:, :, 5:], v[:, :, 6:] = math.nan, INF
    q.requires_grad_()
    (dq,) = torch.autograd.grad(ours(q, k, v)[0].square().sum(), q, create_graph=True)
    (found,) = torch.autograd.grad(dq[:, :, :5].square().sum(), q)
    assert torch.isfinite(found[:, :, :5]).all() and found[:, :, :5].any()
    q = torch.zeros(1, 1, 0, 8, requires_grad=True)
    (dq,) = torch.autograd.grad(ours(q, q, q)[0].sum(), q, create_graph=True)
    (found,) = torch.autograd.grad(dq.sum(), q)
    assert found.shape == q.shape


def test_fp8_has_gradients_and_refuses_second_ones() -> None:
    q, k, v = (x.detach() for x in make_qkv(heads=1, seqlen_q=4, dim=16, dtype=torch.bfloat16))
    *rounded, a, b, c = attngen.quantize(q, k, v, "float8_e5m2", "tensor")
    for x in rounded:
        x.requires_grad_().grad_dtype = torch.bfloat16
    out = attngen.attention(*rounded, q_descale=a, k_descale=b, v_descale=c)
    (grad,) = torch.autograd.grad(out.square().sum(), rounded[2], create_graph=True)
    assert torch.isfinite(grad).all() and grad.any()
    with pytest.raises(NotImplementedError, match="second derivatives of FP8 .* SDPBackend.MATH"):
        torch.autograd.grad(grad.square().sum(), rounded[2])


def test_rows_that_see_no_key_beside_sinks_of_minus_infinity() -> None:
    """Which are no sinks: nothing is NaN."""
    q, k, v = (torch.randn(1, 2, n, 16).requires_grad_() for n in (6, 3, 3))
    sinks = torch.full((2,), float("-inf"), requires_grad=True)
    leaves = [q, k, v, sinks]
    out = attngen.attention(q, k, v, causal=True, sinks=sinks)
    first = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves)
    assert all(x.isfinite().all() for x in (out, *first, *second))
