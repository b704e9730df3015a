"""The package's oracle against the project's agreed one (tests/cases/oracle.py), and samples
against the whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import attngen
from attngen import reference, sampled_reference
from attngen.spec import AttentionSpec

_FOUND = importlib.util.spec_from_file_location(
    "oracle", Path(__file__).parent / "cases" / "oracle.py"
)
oracle = importlib.util.module_from_spec(_FOUND)
_FOUND.loader.exec_module(oracle)

NEG_INF = float("-inf")
SIZES = (2, 4, 2, 9, 13)  # batch, query heads, kv heads, rows, keys
SPECS = [
    pytest.param({}, id="plain"),
    pytest.param({"causal": True}, id="causal"),
    pytest.param({"causal": "top_left", "softmax_scale": -0.3}, id="top-left-negative-scale"),
    pytest.param({"window": (3, 2), "softcap": 1.5}, id="window-softcap"),
    pytest.param({"causal": True, "window": (4, None), "dropout_p": 0.3}, id="dropout"),
    pytest.param({"attn_mask": True}, id="mask"),
    pytest.param({"bias": True}, id="bias"),
    pytest.param({"alibi": True}, id="alibi"),
    pytest.param({"alibi": True, "causal": "top_left"}, id="alibi-top-left"),
    pytest.param({"sinks": True}, id="sinks"),
    pytest.param({"sinks": True, "causal": True, "dropout_p": 0.3}, id="sinks-causal-dropout"),
    pytest.param({"bias": True, "softcap": 1.5, "window": (3, 2)}, id="bias-softcap-window"),
    pytest.param({"attn_mask": True, "bias": True, "alibi": True, "sinks": True}, id="all"),
    pytest.param(
        {
            "attn_mask": True,
            "bias": True,
            "alibi": True,
            "sinks": True,
            "causal": True,
            "window": (5, None),
            "softcap": 1.5,
            "dropout_p": 0.3,
        },
        id="all-with-positions-softcap-dropout",
    ),
]


def example(rows=SIZES[3], keys=SIZES[4]):
    generator = torch.Generator().manual_seed(3)
    batch, heads, heads_kv = SIZES[:3]
    shapes = [(heads, rows, 8), (heads_kv, keys, 8), (heads_kv, keys, 6), (heads, rows, 6)]
    return [
        torch.randn(batch, *s, dtype=torch.float64, generator=generator, requires_grad=True)
        for s in shapes
    ]


def beside(spec, rows, keys):
    """The tensors a spec asks for, each broadcast in some dims; row 0 sees nothing."""
    generator = torch.Generator().manual_seed(4)
    batch, heads = SIZES[:2]

    def normal(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    bias = normal(1, heads, rows, keys)
    bias[:, 1, :, ::3] = NEG_INF
    mask = normal(batch, 1, rows, keys) < 1
    mask[:, :, 0] = False
    made = {
        "attn_mask": mask,
        "bias": bias.requires_grad_(),
        "alibi_slopes": normal(heads).abs().requires_grad_(),
        "sinks": normal(batch, heads).requires_grad_(),
    }
    return {name: made[name] for name in spec.tensor_args if name in made}


def leaves_of(q, k, v, given):
    return [q, k, v, *(x for x in given.values() if x.requires_grad)]


def agreed(spec, q, k, v, given):
    keep = None
    if spec.has_dropout:
        keep = reference.dropout_keep(5, *q.shape[:3], k.shape[2], spec.dropout_p)
    named = {"mask" if name == "attn_mask" else name: x for name, x in given.items()}
    return oracle.attention(
        q,
        k,
        v,
        **named,
        scale=spec.softmax_scale,
        causal=spec.is_causal,
        align="top_left" if spec.causal == "top_left" else "bottom_right",
        window=spec.window,
        softcap=spec.softcap or 0.0,
        dropout_p=spec.dropout_p,
        keep=keep,
    )


@pytest.mark.parametrize("shape", [(9, 13), (13, 9), (1, 5)], ids=str)
@pytest.mark.parametrize("named", SPECS)
def test_attention_and_gradients_equal_the_oracle(named, shape):
    spec = AttentionSpec(head_dim=8, head_dim_v=6, **named)
    q, k, v, do = example(*shape)
    dlse = torch.randn(q.shape[:3], dtype=torch.float64)
    given = beside(spec, *shape)
    out, lse = reference.attention(spec, q, k, v, **given, seed=5)
    wanted = agreed(spec, q, k, v, given)
    torch.testing.assert_close(out, wanted.out)
    torch.testing.assert_close(lse, wanted.lse)
    leaves = tuple(leaves_of(q, k, v, given))
    mine = reference.gradients(out, lse, leaves, do.detach(), dlse)
    theirs = reference.gradients(wanted.out, wanted.lse, leaves, do.detach(), dlse)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(9, 13), (13, 9)], ids=str)
@pytest.mark.parametrize("named", SPECS)
def test_samples_equal_the_whole(named, shape):
    spec = AttentionSpec(head_dim=8, head_dim_v=6, **named)
    q, k, v, do = example(*shape)
    given = beside(spec, *shape)
    out, lse = reference.attention(spec, q, k, v, **given, seed=5)
    dq, dk, dv = reference.gradients(out, lse, (q, k, v), do.detach())
    q, k, v, do, out, lse = (x.detach() for x in (q, k, v, do, out, lse))
    given = {name: x.detach() for name, x in given.items()}
    batch, heads, heads_kv = SIZES[:3]
    rows = torch.cartesian_prod(*map(torch.arange, (batch, heads, shape[0])))
    keys = torch.cartesian_prod(*map(torch.arange, (batch, heads_kv, shape[1])))
    here = sampled_reference.sampled_rows(spec, q, k, v, rows, do=do, **given, seed=5)
    there = sampled_reference.sampled_keys(spec, q, k, v, out, lse, do, keys, **given, seed=5)
    for found, whole in ((here.out, out), (here.lse, lse), (here.dq, dq)):
        torch.testing.assert_close(found, whole[tuple(rows.T)])
    for found, whole in ((there.dk, dk), (there.dv, dv)):
        torch.testing.assert_close(found, whole[tuple(keys.T)])


def test_what_stands_behind_a_mask_does_not_leak():
    spec = AttentionSpec(head_dim=8, head_dim_v=6, causal=True)
    q, k, v, _ = (x.detach() for x in example(9, 9))
    k[:, :, -1] = float("nan")
    v[:, :, -1] = float("inf")
    out, lse = reference.attention(spec, q, k, v)
    assert torch.isfinite(out[:, :, :-1]).all() and torch.isfinite(lse[:, :, :-1]).all()
    assert not torch.isfinite(out[:, :, -1]).any()


@pytest.mark.parametrize("hidden_by", ["attn_mask", "bias"])
def test_what_a_mask_or_a_bias_hides_does_not_leak(hidden_by):
    """Neither forward nor backward, and a row that sees nothing adds to no gradient."""
    spec = AttentionSpec(head_dim=8, head_dim_v=6, alibi=True, sinks=True, **{hidden_by: True})
    q, k, v, do = example(9, 13)
    given = beside(spec, 9, 13)
    seen = torch.ones(2, 1, 9, 13, dtype=torch.bool)
    seen[..., 5:8] = False
    seen[:, :, 4] = False
    given[hidden_by] = seen if hidden_by == "attn_mask" else torch.where(seen, 0.5, NEG_INF)
    given[hidden_by].requires_grad_(hidden_by == "bias")

    def results(k, v):
        leaves = leaves_of(q, k, v, given)
        out, lse = reference.attention(spec, q, k, v, **given)
        wanted = agreed(spec, q, k, v, given)
        torch.testing.assert_close((out, lse), (wanted.out, wanted.lse))
        return [out, lse, *reference.gradients(out, lse, tuple(leaves), do.detach())]

    clean = results(k, v)
    with torch.no_grad():
        k[:, :, 5:7], v[:, :, 5] = float("nan"), float("nan")
        k[:, :, 7], v[:, :, 6:8] = float("inf"), float("-inf")
    for one, other in zip(clean, results(k, v), strict=True):
        torch.testing.assert_close(one, other)
    out, lse, dq, dk, *_ = clean
    assert not out[:, :, 4].any() and (lse[:, :, 4] == NEG_INF).all()
    assert not dq[:, :, 4].any() and not dk[:, :, 5:8].any()


@pytest.mark.parametrize("sink", [-400.0, 400.0, NEG_INF])
def test_a_sink_of_any_size_leaves_lse_alone(sink):
    """Also in float32, where exp(sink) is no number, and where a row sees nothing."""
    plain = AttentionSpec(head_dim=8, head_dim_v=6, window=(2, None))
    spec = AttentionSpec(head_dim=8, head_dim_v=6, window=(2, None), sinks=True)
    q, k, v, do = example(13, 9)
    sinks = torch.full((4,), sink, requires_grad=True)
    out, lse = reference.attention(spec, q, k, v, sinks=sinks, math_dtype=torch.float32)
    want, want_lse = reference.attention(plain, q, k, v, math_dtype=torch.float32)
    torch.testing.assert_close(lse, want_lse)
    torch.testing.assert_close(out, torch.zeros_like(out) if sink > 0 else want)
    for grad in reference.gradients(out, lse, (q, k, v, sinks), do.detach()):
        assert torch.isfinite(grad).all()


def test_a_bias_of_the_lowest_number_is_no_mask():
    spec = AttentionSpec(head_dim=8, head_dim_v=6, bias=True)
    q, k, v, _ = example(1, 5)
    bias = torch.full((1, 1, 1, 5), torch.finfo(torch.float32).min)
    out, lse = reference.attention(spec, q, k, v, bias=bias)
    assert torch.isfinite(lse).all()
    torch.testing.assert_close(out, agreed(spec, q, k, v, {"bias": bias}).out)


def test_yardstick_equals_the_oracles():
    spec = AttentionSpec(
        head_dim=8, head_dim_v=6, attn_mask=True, bias=True, alibi=True, sinks=True, softcap=1.5
    )
    q, k, v, do = (x.detach().float().requires_grad_() for x in example())
    given = {
        name: x if x.dtype == torch.bool else x.detach().float().requires_grad_()
        for name, x in beside(spec, 9, 13).items()
    }
    out, lse = reference.yardstick(spec, q, k, v, torch.float16, **given)
    named = {"mask" if name == "attn_mask" else name: x for name, x in given.items()}
    wanted = oracle.unfused(q, k, v, dtype=torch.float16, softcap=1.5, **named)
    torch.testing.assert_close((out, lse), (wanted.out, wanted.lse), rtol=1e-3, atol=1e-4)
    leaves = tuple(leaves_of(q, k, v, given))
    mine = reference.gradients(out, lse, leaves, do.detach())
    theirs = reference.gradients(wanted.out, wanted.lse, leaves, do.detach())
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=4e-3, atol=1e-3)


def test_tensors_are_those_that_the_spec_names():
    q, k, v, _ = example()
    with pytest.raises(AssertionError, match="sinks"):
        reference.attention(AttentionSpec(head_dim=8, head_dim_v=6, sinks=True), q, k, v)
    with pytest.raises(AssertionError, match="bias"):
        reference.attention(AttentionSpec(head_dim=8, head_dim_v=6), q, k, v, bias=torch.zeros(1))


def test_dropout_keep_equals_a_published_philox_block():
    """Random123's known answer: Philox4x32-10 of counter 0 and key 0."""
    words = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    zero = torch.zeros(1, dtype=torch.int64)
    for column, word in enumerate(words):
        j = torch.tensor([column])
        kept = reference.philox_keep(0, zero, zero, zero, j, word / 2**32)
        lost = reference.philox_keep(0, zero, zero, zero, j, (word + 1) / 2**32)
        assert bool(kept) and not bool(lost)


@pytest.mark.parametrize("seed", [0, 5, -3, 2**62 + 11])
def test_dropout_keep_equals_the_public_one(seed):
    """Two implementations of one definition: the oracle's must not be the one it judges."""
    sizes = (2, 3, 7, 13, 0.3)
    assert torch.equal(reference.dropout_keep(seed, *sizes), attngen.dropout_keep(seed, *sizes))


def test_dropout_drops_its_share():
    kept = reference.dropout_keep(-7, 2, 3, 64, 96, 0.25)
    assert abs(kept.double().mean().item() - 0.75) < 0.01


@pytest.mark.parametrize(
    ("actual", "ok"),
    [
        ([1.0, float("-inf")], True),
        ([1.1, float("-inf")], False),
        ([float("nan"), float("-inf")], False),
        ([1.0, 0.0], False),
        ([float("inf"), float("-inf")], False),
    ],
    ids=str,
)
def test_judge(actual, ok):
    wanted = torch.tensor([1.0, float("-inf")])
    assert reference.judge(torch.tensor(actual), wanted, wanted, 1e-3).ok is ok
