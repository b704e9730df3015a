"""The package's oracle against the project's agreed one (tests/cases/oracle.py), and samples
against the whole."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import attngen
from attngen import reference
from attngen.spec import AttentionSpec

_FOUND = importlib.util.spec_from_file_location(
    "oracle", Path(__file__).parent / "cases" / "oracle.py"
)
oracle = importlib.util.module_from_spec(_FOUND)
_FOUND.loader.exec_module(oracle)

SIZES = (2, 4, 2, 9, 13)  # batch, query heads, kv heads, rows, keys
SPECS = [
    pytest.param({}, id="plain"),
    pytest.param({"causal": True}, id="causal"),
    pytest.param({"causal": "top_left", "softmax_scale": -0.3}, id="top-left-negative-scale"),
    pytest.param({"window": (3, 2), "softcap": 1.5}, id="window-softcap"),
    pytest.param({"causal": True, "window": (4, None), "dropout_p": 0.3}, id="dropout"),
]


def example(rows=SIZES[3], keys=SIZES[4]):
    generator = torch.Generator().manual_seed(3)
    batch, heads, heads_kv = SIZES[:3]
    shapes = [(heads, rows, 8), (heads_kv, keys, 8), (heads_kv, keys, 6), (heads, rows, 6)]
    return [
        torch.randn(batch, *s, dtype=torch.float64, generator=generator, requires_grad=True)
        for s in shapes
    ]


def agreed(spec, q, k, v):
    keep = None
    if spec.has_dropout:
        keep = reference.dropout_keep(5, *q.shape[:3], k.shape[2], spec.dropout_p)
    return oracle.attention(
        q,
        k,
        v,
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
    out, lse = reference.attention(spec, q, k, v, seed=5)
    wanted = agreed(spec, q, k, v)
    torch.testing.assert_close(out, wanted.out)
    torch.testing.assert_close(lse, wanted.lse)
    mine = reference.gradients(out, lse, (q, k, v), do.detach(), dlse)
    theirs = reference.gradients(wanted.out, wanted.lse, (q, k, v), do.detach(), dlse)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("shape", [(9, 13), (13, 9)], ids=str)
@pytest.mark.parametrize("named", SPECS)
def test_samples_equal_the_whole(named, shape):
    spec = AttentionSpec(head_dim=8, head_dim_v=6, **named)
    q, k, v, do = example(*shape)
    out, lse = reference.attention(spec, q, k, v, seed=5)
    dq, dk, dv = reference.gradients(out, lse, (q, k, v), do.detach())
    q, k, v, do, out, lse = (x.detach() for x in (q, k, v, do, out, lse))
    batch, heads, heads_kv = SIZES[:3]
    rows = torch.cartesian_prod(*map(torch.arange, (batch, heads, shape[0])))
    keys = torch.cartesian_prod(*map(torch.arange, (batch, heads_kv, shape[1])))
    here = reference.sampled_rows(spec, q, k, v, rows, do=do, seed=5)
    there = reference.sampled_keys(spec, q, k, v, out, lse, do, keys, seed=5)
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
