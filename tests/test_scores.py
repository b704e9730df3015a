"""Masks, biases, ALiBi slopes and sinks: out, lse and all gradients, beside the oracle's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, assert_close, assert_exact, make_qkv
from torch import Tensor
from torch.nn import functional as F

import attngen
from attngen import calls, ops
from attngen.pinned import pinned

BATCH, HEADS, ROWS, KEYS = 2, 2, 17, 21
FULL = (BATCH, HEADS, ROWS, KEYS)
SLOPES = torch.tensor([0.5, -0.1])
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NARROW = [pytest.param(dtype, id=str(dtype)[6:]) for dtype in DTYPES]
INF = math.inf


def slow(value: Any, name: str | None = None) -> Any:
    """A value that `make test` leaves out."""
    return pytest.param(value, id=name, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles of 16 by 16, so that short sequences span several; dq by atomic adds where a test of
    both ways asks for them."""
    named = getattr(request.node, "callspec", None)
    is_atomic = named is not None and named.params.get("deterministic") is False
    with pinned(
        {"fwd": SMALL_FWD, "bwd": replace(SMALL_BWD, dq="atomic" if is_atomic else "kernel")}
    ):
        yield


def qkv(dtype: torch.dtype = torch.float32, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    return make_qkv(
        **{
            "batch": BATCH,
            "heads": HEADS,
            "heads_kv": 1,
            "seqlen_q": ROWS,
            "seqlen_k": KEYS,
            **sizes,
        },
        dtype=dtype,
    )


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that require grad."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    return made.to(dtype).requires_grad_()


def check(
    q: Tensor, k: Tensor, v: Tensor, scores: dict[str, Tensor] | None = None, **options: Any
) -> None:
    """`attngen.attention` with these is as exact as plain PyTorch, and so is a compiled spec."""
    scores = scores or {}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attngen.attention(q, k, v, return_lse=True, **scores, **options)
        return out, lse

    assert_exact(attend, q, k, v, options, scores=scores)


# ---- biases ---------------------------------------------------------------------------------

SHAPES: dict[str, Callable[[], Tensor]] = {
    "rows-keys": lambda: random(1, 1, ROWS, KEYS),
    "keys": lambda: random(BATCH, 1, 1, KEYS),
    "rows": lambda: random(1, HEADS, ROWS, 1),
    "full": lambda: random(*FULL),
    "two-dims": lambda: random(ROWS, KEYS),
    "three-dims": lambda: random(HEADS, 1, KEYS),
    "number": lambda: random(),
    "transposed": lambda: random(1, HEADS, KEYS, ROWS).detach().mT.requires_grad_(),
    "wide": lambda: random(BATCH, 1, ROWS, 24).detach()[..., 1:22].requires_grad_(),
    "every-other": lambda: random(1, 1, ROWS, 2 * KEYS).detach()[..., ::2].requires_grad_(),
    "expanded": lambda: random(1, 1, ROWS, KEYS).detach().expand(FULL).requires_grad_(),
}


@pytest.mark.parametrize(
    ("shape", "deterministic"),
    [
        pytest.param(
            name,
            same_bits,
            marks=[] if same_bits or name in ("keys", "full") else pytest.mark.slow,
        )
        for name in SHAPES
        for same_bits in (True, False)
    ],
)
def test_bias(shape: str, deterministic: bool) -> None:
    check(*qkv(), {"bias": SHAPES[shape]()}, deterministic=deterministic)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("of_bias", [torch.bfloat16, torch.float32, slow(torch.float16)], ids=str)
def test_bias_of_another_dtype(dtype: torch.dtype, of_bias: torch.dtype) -> None:
    check(*qkv(dtype), {"bias": random(1, HEADS, ROWS, KEYS, dtype=of_bias)}, causal=True)


def test_bias_without_a_gradient() -> None:
    check(*qkv(), {"bias": random(ROWS, KEYS).detach()})


def test_gradient_for_the_bias_alone() -> None:
    q, k, v = (x.detach() for x in qkv())
    bias = random(1, HEADS, 1, KEYS)
    (got,) = torch.autograd.grad(attngen.attention(q, k, v, bias=bias).square().sum(), bias)
    scores = q @ k.mT * 0.25 + bias
    want = (scores.softmax(-1) @ v).square().sum()
    assert_close([got], torch.autograd.grad(want, bias), atol=1e-4)


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("lowest", [-INF, LOWEST], ids=["inf", "lowest"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_bias_that_hides_keys_and_whole_rows(lowest: float, causal: bool) -> None:
    bias = random(BATCH, 1, ROWS, KEYS).detach()
    bias[:, :, :, 14:19] = lowest
    bias[:, :, 3:5] = -INF
    bias[1, :, 16:] = -INF
    check(*qkv(), {"bias": bias.requires_grad_()}, causal=causal)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_lowest_bias_is_a_number(dtype: torch.dtype) -> None:
    """A whole row of it averages the values. (Its gradient needs a quiet dout, as float32 holds no
    lse of that size to the last digits.)"""
    q, k, v = qkv(dtype)
    bias = torch.zeros(1, 1, ROWS, KEYS, dtype=dtype)
    bias[:, :, 3] = torch.finfo(dtype).min
    bias.requires_grad_()
    out = attngen.attention(q, k, v, bias=bias)
    if dtype != torch.float16:  # where scores still count beside it
        want = v.float().mean(2).expand(BATCH, HEADS, 16)
        torch.testing.assert_close(out[:, :, 3].float(), want, atol=1e-2, rtol=0)
    do = torch.randn_like(out)
    do[:, :, 3] = 0
    grads = torch.autograd.grad(out, (q, k, v, bias), do)
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[0][:, :, 3].any() and not grads[3][:, :, 3].any()


def test_hidden_rows_have_no_result_and_no_gradient() -> None:
    q, k, v = qkv()
    bias = random(1, 1, ROWS, KEYS).detach()
    bias[:, :, 7] = -INF
    bias.requires_grad_()
    out, lse = attngen.attention(q, k, v, bias=bias, return_lse=True)
    assert not out[:, :, 7].any() and torch.isneginf(lse[:, :, 7]).all()
    dlse = torch.randn(lse.shape)
    dlse[:, :, 7] = math.nan
    grads = torch.autograd.grad((out, lse), (q, k, v, bias), (torch.randn(out.shape), dlse))
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert not grads[0][:, :, 7].any() and not grads[3][:, :, 7].any()


@pytest.mark.parametrize("hide", ["attn_mask", "bias"])
@pytest.mark.parametrize("poison", [math.nan, INF])
def test_what_hidden_keys_hold_does_not_matter(hide: str, poison: float) -> None:
    q, k, v = (x.detach() for x in qkv())
    seen = torch.ones(1, 1, 1, KEYS, dtype=torch.bool)
    seen[..., 5:9] = False
    hidden = seen if hide == "attn_mask" else torch.zeros(seen.shape).masked_fill(~seen, -INF)

    def results(k: Tensor, v: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attngen.attention(*leaves, **{hide: hidden}, return_lse=True)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), leaves)
        return [out, lse, *grads]

    want = results(k, v)
    assert not want[3][:, :, 5:9].any() and not want[4][:, :, 5:9].any()
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, :, 5:9] = poison
    dirty_v[:, :, 5:9] = poison
    assert_close(results(dirty_k, dirty_v), want)


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_runs_of_a_bias_gradient(deterministic: bool) -> None:
    """Same bits where the spec says so; here the interpreter adds in one order anyway."""
    q, k, v = qkv()
    bias = random(1, 1, 1, KEYS)
    first, second = (
        torch.autograd.grad(
            attngen.attention(q, k, v, bias=bias, deterministic=deterministic).sum(), bias
        )[0]
        for _ in range(2)
    )
    assert_close([first], [second], atol=0 if deterministic else 1e-5)


# ---- attn_mask ------------------------------------------------------------------------------


def seen(*shape: int) -> Tensor:
    """A mask that hides a third of the keys."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(6)) > 1 / 3


@pytest.mark.parametrize(
    "shape",
    [FULL, (1, 1, ROWS, KEYS), (BATCH, 1, 1, KEYS), (1, HEADS, ROWS, 1), (ROWS, KEYS), ()],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"causal": True, "window": (9, 0)}], ids=["", "window"])
def test_mask(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    check(*qkv(), attn_mask=seen(*shape), **options)


def test_mask_with_other_strides() -> None:
    check(*qkv(), attn_mask=seen(1, HEADS, KEYS, ROWS).mT)
    check(*qkv(), attn_mask=seen(1, 1, ROWS, 2 * KEYS)[..., 1::2])


@pytest.mark.parametrize("value", [True, False])
def test_mask_that_shows_or_hides_all(value: bool) -> None:
    q, k, v = qkv()
    mask = torch.full((1, 1, ROWS, 1), value)
    check(q, k, v, attn_mask=mask)
    out = attngen.attention(q, k, v, attn_mask=mask)
    assert torch.equal(out, attngen.attention(q, k, v)) if value else not out.any()


# ---- ALiBi ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS, 25], ids=["more-keys", "more-queries"])
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"], ids=str)
@pytest.mark.parametrize("per_batch", [slow(False, "heads"), True], ids=["", "batch"])
def test_alibi(rows: int, causal: bool | str, per_batch: bool) -> None:
    slopes = torch.stack([SLOPES, SLOPES.flip(0)]) if per_batch else SLOPES
    scores = {"alibi_slopes": slopes.clone().requires_grad_()}
    check(*qkv(seqlen_q=rows), scores, causal=causal)


@pytest.mark.parametrize("dtype", NARROW)
def test_alibi_slopes_of_another_dtype(dtype: torch.dtype) -> None:
    check(*qkv(torch.bfloat16), {"alibi_slopes": SLOPES.to(dtype).requires_grad_()}, causal=True)


def test_alibi_by_strided_slopes_and_a_window() -> None:
    slopes = torch.stack([SLOPES, SLOPES + 1]).T[:, :1].T.expand(1, HEADS)
    check(*qkv(), {"alibi_slopes": slopes}, window=(9, 4), softcap=3.0)
    check(*qkv(), {"alibi_slopes": SLOPES.repeat_interleave(2)[::2].requires_grad_()})


@pytest.mark.parametrize("causal", [False, True, "top_left"], ids=str)
def test_shards_of_queries_and_keys_join(causal: bool | str) -> None:
    """Distances count from where rows stand in the whole sequence; biases are cut as rows are."""
    q, k, v = (x.detach() for x in qkv())
    bias, mask = random(1, HEADS, ROWS, KEYS).detach(), seen(BATCH, 1, ROWS, KEYS)
    options: dict[str, Any] = {"causal": causal, "alibi_slopes": SLOPES, "return_lse": True}
    want = attngen.attention(q, k, v, bias=bias, attn_mask=mask, **options)
    whole = {"seqlen_q_total": ROWS, "seqlen_k_total": KEYS, "partial": True}
    found = []
    for rows, start in ((slice(0, ROWS, 2), 0), (slice(1, ROWS, 2), 1)):
        parts = []
        for keys in (slice(0, 11), slice(11, KEYS)):
            part = attngen.attention(
                q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                bias=bias[:, :, rows, keys],
                attn_mask=mask[:, :, rows, keys],
                q_start=start,
                q_step=2,
                k_start=keys.start,
                **whole,
                **options,
            )
            parts += part
        found.append(attngen.merge(*parts))
    for n in range(2):
        assert_close([found[0][n], found[1][n]], [want[n][:, :, ::2], want[n][:, :, 1::2]])


def test_shard_with_alibi_needs_the_whole_lengths() -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(attngen.SpecError, match="needs seqlen_q_total.*ALiBi"):
        attngen.attention(q, k, v, alibi_slopes=SLOPES, q_start=3)
    attngen.attention(q, k, v, sinks=SLOPES, q_start=3)  # no positions are compared


# ---- sinks ----------------------------------------------------------------------------------

SINKS = {
    "usual": [0.3, 2.0],
    "large": [40.0, -60.0],
    "none": [-INF, 0.5],
}


@pytest.mark.parametrize("deterministic", [True, slow(False)])
@pytest.mark.parametrize("values", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sinks(values: list[float], causal: bool, deterministic: bool) -> None:
    scores = {"sinks": torch.tensor(values).requires_grad_()}
    check(*qkv(seqlen_q=25), scores, causal=causal, deterministic=deterministic)


@pytest.mark.parametrize("dtype", NARROW)
def test_sinks_of_another_dtype(dtype: torch.dtype) -> None:
    check(*qkv(torch.bfloat16), {"sinks": random(BATCH, HEADS, dtype=dtype)})


def test_sink_that_outweighs_all_keys() -> None:
    q, k, v = qkv()
    sinks = torch.full((HEADS,), 1e4, requires_grad=True)
    out, lse = attngen.attention(q, k, v, sinks=sinks, return_lse=True)
    _, want = attngen.attention(q, k, v, return_lse=True)
    assert not out.any()
    assert_close([lse], [want])
    for grad in torch.autograd.grad(out.sum(), (q, k, v, sinks)):
        assert not grad.any()


def test_sink_of_a_row_that_sees_no_key() -> None:
    q, k, v = qkv(seqlen_q=25)
    sinks = random(HEADS)
    out, lse = attngen.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert not out[:, :, :3].any() and torch.isneginf(lse[:, :, :3]).all()
    assert torch.isfinite(torch.autograd.grad(out.sum(), sinks)[0]).all()


# ---- together -------------------------------------------------------------------------------


def every_score(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "bias": random(BATCH, 1, ROWS, KEYS, dtype=dtype),
        "alibi_slopes": SLOPES.clone().requires_grad_(),
        "sinks": random(HEADS),
    }


TOGETHER: dict[str, Any] = {
    "causal": True,
    "window": (7, 0),
    "softcap": 2.0,
    "softmax_scale": -0.4,
    "dropout_p": 0.3,
    "dropout_seed": 4,
}


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", NARROW)
def test_all_together(dtype: torch.dtype, deterministic: bool) -> None:
    q, k, v = qkv(dtype, dim_v=24)
    options = {**TOGETHER, "attn_mask": seen(1, HEADS, ROWS, KEYS)}
    check(q, k, v, every_score(dtype), deterministic=deterministic, **options)


PAIRS = [
    ("attn_mask", "bias"),
    ("bias", "sinks"),
    ("alibi_slopes", "sinks"),
    ("attn_mask", "sinks"),
]


@pytest.mark.slow
@pytest.mark.parametrize("option", TOGETHER)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_pair_with_an_option(names: tuple[str, str], option: str) -> None:
    if option == "dropout_seed":
        option = "dropout_p"
    options = {name: TOGETHER[name] for name in {option, "dropout_seed"}}
    scores = {name: x for name, x in every_score().items() if name in names}
    if "attn_mask" in names:
        options["attn_mask"] = seen(BATCH, 1, ROWS, KEYS)
    check(*qkv(), scores, **options)


@pytest.mark.parametrize(
    ("rows", "keys"), [(0, 5), (5, 0), (1, 1), (1, 33)], ids=["no-rows", "no-keys", "one", "decode"]
)
def test_short_sequences(rows: int, keys: int) -> None:
    q, k, v = qkv(seqlen_q=rows, seqlen_k=keys)
    bias, sinks, slopes = random(1, HEADS, rows, keys), random(HEADS), SLOPES.clone()
    slopes.requires_grad_()
    mask = torch.ones(1, 1, rows, keys, dtype=torch.bool)
    scores = {"bias": bias, "alibi_slopes": slopes, "sinks": sinks}
    if rows and keys:
        check(q, k, v, scores, attn_mask=mask)
        return
    out, lse = attngen.attention(q, k, v, attn_mask=mask, **scores, return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()
    leaves = (q, k, v, *scores.values())
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(g.shape == x.shape and not g.any() for g, x in zip(grads, leaves, strict=True))


SPEC = attngen.AttentionSpec(
    head_dim=16,
    dtype="float32",
    causal=True,
    attn_mask=True,
    bias=True,
    alibi=True,
    sinks=True,
    deterministic=False,
)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_compiled_spec_equals_the_function(layout: str) -> None:
    q, k, v = qkv()
    mask, scores = seen(ROWS, KEYS), every_score()
    want = attngen.attention(q, k, v, causal=True, attn_mask=mask, **scores, return_lse=True)
    attn = attngen.compile(replace(SPEC, layout=layout))
    given = [x.transpose(1, 2) if layout == "bshd" else x for x in (q, k, v)]
    out, lse = attn(*given, attn_mask=mask, **scores, return_lse=True)
    if layout == "bshd":
        same = attngen.attention(*given, causal=True, attn_mask=mask, layout=layout, **scores)
        assert torch.equal(same, out)
        out = out.transpose(1, 2)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])


def test_autocast_leaves_scores_in_their_dtype() -> None:
    q, k, v = (x.detach() for x in qkv())
    scores = {name: x.detach() for name, x in every_score().items()}
    with torch.autocast("cpu", torch.bfloat16):
        got = attngen.attention(q, k, v, **scores)
    want = attngen.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **scores)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)


# ---- torch.compile, vmap --------------------------------------------------------------------


@pytest.mark.filterwarnings("default")  # what torch says while it compiles is its own affair
@pytest.mark.parametrize("through", [slow("attention"), "compile"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_torch_compile_in_one_graph(through: str, backend: str) -> None:
    attn = attngen.compile(SPEC)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: dict[str, Tensor]) -> Any:
        call = {"attn_mask": mask, **scores, "return_lse": True}
        if through == "attention":
            return attngen.attention(q, k, v, causal=True, **call)
        return attn(q, k, v, **call)

    torch._dynamo.reset()
    fast = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    for rows in (9, 14):
        q, k, v = qkv(seqlen_q=rows, seqlen_k=rows + 4)
        scores = {**every_score(), "bias": random(1, 1, rows, rows + 4)}
        mask = seen(BATCH, 1, rows, rows + 4)
        leaves = (q, k, v, *scores.values())
        found = []
        for each in (fast, attend):
            out, lse = each(q, k, v, mask, scores)
            found.append([out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), leaves)])
        assert_close(*found)


# in_dims of q, of k and v, of the bias, of slopes and sinks.
VMAPPED = {
    "all": (0, 0, 0, 0),
    "inner": (1, 1, 2, 1),
    "bias": (None, None, 0, None),
    "shared-bias": (0, 0, None, None),
    "slopes-and-sinks": (None, None, None, 0),
}
FAST = ("inner", "shared-bias")


@pytest.mark.parametrize("batch", [slow(1), 2], ids=["one-row", "rows"])
@pytest.mark.parametrize(
    "in_dims",
    [
        pytest.param(dims, id=name, marks=[] if name in FAST else pytest.mark.slow)
        for name, dims in VMAPPED.items()
    ],
)
@pytest.mark.parametrize("per_batch", [False, slow(True)], ids=["shared", "per-batch"])
def test_vmap_equals_a_loop(in_dims: tuple[int | None, ...], batch: int, per_batch: bool) -> None:
    size, lead = 2, batch if per_batch else 1
    shapes = [(batch, 1, 5, 16), (batch, 1, 5, 16), (lead, 1, 5, 5), (lead, 1)]
    stacked = [
        random(*shape) if dim is None else random(*shape[:dim], size, *shape[dim:])
        for shape, dim in zip(shapes, in_dims, strict=True)
    ]
    mask = seen(size, lead, 1, 1, 5)
    dims = (*in_dims, 0)

    def attend(q: Tensor, kv: Tensor, bias: Tensor, heads: Tensor, mask: Tensor) -> Any:
        scores = {"bias": bias, "alibi_slopes": heads, "sinks": heads, "attn_mask": mask}
        return attngen.attention(q, kv, kv, **scores, return_lse=True)

    def loss(*inputs: Tensor) -> Tensor:
        out, lse = attend(*inputs)
        return out.square().sum() + lse.masked_fill(torch.isinf(lse), 0).sum()

    def sample(n: int) -> list[Tensor]:
        inputs = zip((*stacked, mask), dims, strict=True)
        return [x if dim is None else x.select(dim, n) for x, dim in inputs]

    got = torch.vmap(attend, dims)(*stacked, mask)
    want = [torch.stack(x) for x in zip(*(attend(*sample(n)) for n in range(size)), strict=True)]
    assert_close(got, want)
    total = torch.vmap(loss, dims)(*stacked, mask).sum()
    summed = torch.stack([loss(*sample(n)) for n in range(size)]).sum()
    assert_close(
        torch.autograd.grad(total, stacked), torch.autograd.grad(summed, stacked), atol=1e-4
    )
    alone = torch.vmap(torch.func.grad(loss, (0, 1, 2, 3)), dims)(*stacked, mask)
    each = [torch.func.grad(loss, (0, 1, 2, 3))(*sample(n)) for n in range(size)]
    assert_close(alone, [torch.stack(x) for x in zip(*each, strict=True)], atol=1e-4)


def test_checkpoint_keeps_the_gradient_of_a_bias() -> None:
    q, k, v = qkv()
    bias = random(1, HEADS, ROWS, KEYS)

    def attend(q: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = attngen.attention(q, k, v, bias=bias)
        return out

    again = torch.utils.checkpoint.checkpoint(attend, q, bias, use_reentrant=False)
    want = torch.autograd.grad(attend(q, bias).sum(), (q, bias))
    assert_close(torch.autograd.grad(again.sum(), (q, bias)), want)


# ---- SDPA -----------------------------------------------------------------------------------

# The shapes of q and of k, and of a mask.
SDPA = {
    "three-dims": ((3, 9, 16), (3, 11, 16), (3, 9, 11)),
    "three-dims-shared": ((3, 9, 16), (3, 11, 16), (9, 11)),
    "four-dims": ((2, 3, 9, 16), (2, 3, 11, 16), (2, 1, 9, 11)),
    "keys": ((2, 3, 9, 16), (2, 3, 11, 16), (2, 1, 1, 11)),
    "heads": ((2, 3, 9, 16), (2, 3, 11, 16), (3, 9, 1)),
    "five-dims": ((2, 2, 3, 9, 16), (2, 2, 3, 11, 16), (2, 2, 3, 9, 11)),
    "five-dims-inner": ((2, 2, 3, 9, 16), (2, 2, 3, 11, 16), (2, 1, 9, 11)),
    "five-dims-outer": ((2, 2, 3, 9, 16), (2, 2, 3, 11, 16), (2, 1, 3, 9, 11)),
    "five-dims-shared": ((2, 2, 3, 9, 16), (2, 2, 3, 11, 16), (1, 1, 3, 9, 11)),
}


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("of_q", "of_k", "of_mask"), SDPA.values(), ids=SDPA)
def test_sdpa_takes_the_masks_that_torch_takes(
    of_q: tuple[int, ...], of_k: tuple[int, ...], of_mask: tuple[int, ...], kind: str
) -> None:
    q, k, v = (torch.randn(s).requires_grad_() for s in (of_q, of_k, of_k))
    leaves = [q, k, v]
    if kind == "bool":
        mask = seen(*of_mask)
        mask[..., 0] = True  # a row that sees nothing: undefined in torch
    else:
        mask = random(*of_mask)
        leaves.append(mask)
    got = attngen.sdpa(q, k, v, attn_mask=mask)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert_close([got], [want])
    do = torch.randn(want.shape)
    assert_close(torch.autograd.grad(got, leaves, do), torch.autograd.grad(want, leaves, do))


def test_sdpa_refuses_a_mask_beside_is_causal() -> None:
    q, k, v = qkv(heads_kv=2)
    with pytest.raises(attngen.SpecError, match="is_causal=True exclude each other; let the mask"):
        attngen.sdpa(q, k, v, attn_mask=seen(ROWS, KEYS), is_causal=True)


@pytest.mark.parametrize(
    ("mask", "value", "step"),
    [
        ([True], "got list", "torch.as_tensor(attn_mask)"),
        (torch.ones(ROWS, KEYS, dtype=torch.int64), "torch.int64", "write attn_mask.bool()"),
        (torch.ones(ROWS, KEYS, dtype=torch.float64), "torch.float64", "attn_mask.float()"),
        (torch.ones(BATCH, KEYS), "(2, 21)", "make each dim 1 or full"),
        (torch.ones(1, 1, 1, 1, 1), "(1, 1, 1, 1, 1)", "make each dim 1 or full"),
        (torch.ones(ROWS, KEYS, device="meta"), "attn_mask is on meta", ".to(q.device)"),
    ],
    ids=["list", "int", "double", "keys", "five-dims", "device"],
)
def test_sdpa_mask_is_refused(mask: Any, value: str, step: str) -> None:
    q, k, v = qkv(heads_kv=2)
    refused(lambda: attngen.sdpa(q, k, v, attn_mask=mask), value, step)


# ---- what is refused ------------------------------------------------------------------------


def refused(call: Callable[[], Any], *pieces: str) -> None:
    with pytest.raises(attngen.SpecError) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    for piece in pieces:
        assert piece in message, message


ONES = torch.ones(2, 4, 19, 37)
NUMBERS = torch.ones(4)
QKV = tuple(x.detach() for x in make_qkv(2, 4, 19, 37, heads_kv=2))
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "mask-int": ({"attn_mask": ONES.int()}, "torch.int32", "write attn_mask.bool()"),
    "mask-float": ({"attn_mask": ONES}, "torch.float32", "as bias="),
    "mask-numpy": ({"attn_mask": ONES.bool().numpy()}, "numpy.ndarray", "as_tensor(attn_mask)"),
    "mask-sparse": ({"attn_mask": ONES.bool().to_sparse()}, "torch.sparse_coo", ".to_dense()"),
    "mask-keys": ({"attn_mask": ONES.bool()[:, 0, 0]}, "(2, 37)", "attn_mask[:, None, None, :]"),
    "mask-device": ({"attn_mask": ONES.bool().to("meta")}, "attn_mask is on meta", ".to(q.device)"),
    "bias-list": ({"bias": [0.0]}, "got list", "torch.as_tensor(bias)"),
    "bias-bool": ({"bias": ONES.bool()}, "torch.bool", "attn_mask="),
    "bias-int": ({"bias": ONES.int()}, "torch.int32", "bias.float()"),
    "bias-double": ({"bias": ONES.double()}, "torch.float64", "bias.float()"),
    "bias-five-dims": ({"bias": ONES[None]}, "(1, 2, 4, 19, 37)", "each dim 1 or full"),
    "bias-batch": ({"bias": ONES.repeat(2, 1, 1, 1)}, "(4, 4, 19, 37)", "(2, 4, 19, 37)"),
    "bias-kv-heads": ({"bias": ONES[:, :2]}, "(2, 2, 19, 37)", "bias.repeat_interleave(2, 1)"),
    "bias-no-heads": ({"bias": ONES[:, 0]}, "(2, 19, 37)", "bias[:, None]"),
    "bias-bshd": ({"bias": ONES.transpose(1, 2)}, "(2, 19, 4, 37)", "bias.transpose(1, 2)"),
    "bias-rows": ({"bias": ONES[:, :, :7]}, "(2, 4, 7, 37)", "each dim 1 or full"),
    "bias-no-keys": ({"bias": ONES[..., :0]}, "(2, 4, 19, 0)", "each dim 1 or full"),
    "slopes-number": ({"alibi_slopes": 0.5}, "got float", "as_tensor(alibi_slopes)"),
    "slopes-int": ({"alibi_slopes": NUMBERS.int()}, "torch.int32", "alibi_slopes.float()"),
    "slopes-shape": ({"alibi_slopes": NUMBERS[:2]}, "got (2,)", "one number for each query head"),
    "slopes-turned": ({"alibi_slopes": ONES[:, :, 0, 0].T}, "got (4, 2)", "(2, 4)"),
    "slopes-no-dim": ({"alibi_slopes": NUMBERS[0]}, "got ()", "(num_heads_q,) (4,)"),
    "sinks-shape": ({"sinks": torch.ones(4, 1, 1)}, "got (4, 1, 1)", "(num_heads_q,) (4,)"),
    "sinks-fp8": ({"sinks": NUMBERS.to(torch.float8_e5m2)}, "float8_e5m2", "sinks.float()"),
    "sinks-device": ({"sinks": NUMBERS.to("meta")}, "sinks is on meta", ".to(q.device)"),
    "sinks-nested": (
        {"sinks": torch.nested.nested_tensor([NUMBERS, NUMBERS], layout=torch.jagged)},
        "nested",
        "to_padded_tensor",
    ),
}


@pytest.mark.parametrize("through", ["attention", "compile"])
@pytest.mark.parametrize(("given", "value", "step"), BAD.values(), ids=BAD)
def test_bad_tensor_is_refused_before_a_kernel_runs(
    through: str,
    given: dict[str, Any],
    value: str,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "forward", lambda *_: pytest.fail("a kernel ran"))
    (name,) = given
    field = "alibi" if name == "alibi_slopes" else name
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", **{field: True})
    attend = attngen.attention if through == "attention" else attngen.compile(spec)
    refused(lambda: attend(*QKV, **given), value, step)


def test_wrong_dtypes_are_type_errors() -> None:
    for given in ({"attn_mask": ONES}, {"bias": ONES.double()}, {"sinks": NUMBERS.int()}):
        with pytest.raises(TypeError):
            attngen.attention(*QKV, **given)


@pytest.mark.parametrize(
    ("name", "field"),
    [("attn_mask", "attn_mask"), ("bias", "bias"), ("alibi_slopes", "alibi"), ("sinks", "sinks")],
)
def test_spec_and_call_must_agree(name: str, field: str) -> None:
    tensors = {"attn_mask": ONES.bool(), "bias": ONES, "alibi_slopes": NUMBERS, "sinks": NUMBERS}
    without = attngen.compile(attngen.AttentionSpec(head_dim=16, dtype="float32"))
    refused(
        lambda: without(*QKV, **{name: tensors[name]}),
        f"{name} is given, but the spec says {field}=False",
        f"{field}=True",
    )
    attn = attngen.compile(attngen.AttentionSpec(head_dim=16, dtype="float32", **{field: True}))
    refused(lambda: attn(*QKV), f"says {field}=True, but the call has no {name}", f"{name}=")


def test_fp8_inputs_are_refused() -> None:
    made = attngen.quantize(*QKV, dtype="float8_e5m2", scale="tensor")
    scales = {name: getattr(made, name) for name in ("q_descale", "k_descale", "v_descale")}
    with pytest.raises(attngen.UnsupportedSpecError, match="sinks with FP8 inputs is not built"):
        attngen.attention(made.q, made.k, made.v, sinks=NUMBERS, **scales)


def test_numpy_values_are_taken_once_they_are_tensors() -> None:
    slopes = 2.0 ** (-8.0 * np.arange(1, HEADS + 1) / HEADS)
    check(*qkv(), {"alibi_slopes": torch.as_tensor(slopes)}, causal=True)


# ---- what was found by review ---------------------------------------------------------------

TERMS = {
    "bias": (1, HEADS, ROWS, KEYS),
    "alibi_slopes": (HEADS,),
    "sinks": (HEADS,),
}


@pytest.mark.filterwarnings("default")  # torch's own, of what its dual tensors import
@pytest.mark.parametrize("name", TERMS)
def test_tangents_of_terms_are_refused(name: str) -> None:
    term = torch.rand(TERMS[name])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(term, torch.ones_like(term))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attngen.attention(*qkv(), **{name: dual})


def test_sinks_of_parts_are_refused_with_a_way_that_works() -> None:
    q, k, v = (x.detach() for x in qkv())
    sinks = torch.tensor([0.5, 2.0])
    with pytest.raises(attngen.SpecError, match="merge.* would count the sink once for each part"):
        attngen.attention(q, k, v, sinks=sinks, partial=True)
    parts = [
        attngen.attention(q, k[:, :, at], v[:, :, at], partial=True, return_lse=True)
        for at in (slice(0, 9), slice(9, None))
    ]
    out, lse = attngen.merge(*parts[0], *parts[1])
    out = out * torch.sigmoid(lse - sinks[:, None]).unsqueeze(-1)
    assert_close(out, attngen.attention(q, k, v, sinks=sinks))


@pytest.mark.parametrize("name", ["attn_mask", *TERMS])
def test_a_layout_is_settled_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms that repeat are placed at each call, and nothing else is done again."""
    q, k, v = qkv()
    term = random(*TERMS[name]) if name in TERMS else torch.ones(1, 1, ROWS, KEYS).bool()
    settled, times = calls._settled, []

    def counted(*arguments: Any) -> Any:
        times.append(arguments[0])
        return settled(*arguments)

    monkeypatch.setattr(calls, "_settled", counted)
    results = []
    for _ in range(3):
        out = attngen.attention(q, k, v, **{name: term})
        leaves = [x for x in (q, k, v, term) if x.requires_grad]
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert times == ["fwd", "bwd"]
    for one, other in zip(results[0], results[2], strict=True):
        assert torch.equal(one, other)
