"""Packed sequences with prefixes, functions and side outputs: each as a call of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, assert_close
from torch import Tensor

import attngen
from attngen.pinned import pinned
from attngen.spec import AttentionSpec
from attngen.tuner import case, gate
from attngen.verify import verify
from attngen.workload import Workload

SCORE_MOD = "aux0:float1;t0:index aux0 h;t1:tanh score;t2:mul t1 t0;add t2 0.25"
MASK_MOD = "aux0:long2;t0:index aux0 b q;t1:index aux0 b k;eq t0 t1"
SPECS: dict[str, dict[str, Any]] = {
    "prefix": {"prefix_lm": True, "causal": True},
    "prefix-window": {"prefix_lm": True, "causal": "top_left", "window": (7, None), "sinks": True},
    "mask": {"mask_mod": MASK_MOD, "deterministic": True},
    "score": {"score_mod": SCORE_MOD, "causal": True, "dropout_p": 0.2},
    "both": {"score_mod": SCORE_MOD, "mask_mod": MASK_MOD, "window": (9, 4), "alibi": True},
    "all": {"score_mod": SCORE_MOD, "prefix_lm": True, "causal": True, "softcap": 4.0},
}
ROWS, KEYS = [5, 0, 21, 1, 16], [9, 3, 18, 0, 20]
AT_Q, AT_K = (
    torch.tensor([2, 0, 0, 0, 0, 0]) + torch.tensor([0, *x]).cumsum(0) for x in (ROWS, KEYS)
)
IDS = torch.arange(5 * 30).view(5, 30) // 4


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles of 16 by 16; dq by atomic adds where a test asks for it."""
    named = getattr(request.node, "callspec", None)
    dq = named.params.get("dq", "kernel") if named is not None else "kernel"
    with pinned({"fwd": SMALL_FWD, "bwd": replace(SMALL_BWD, dq=dq)}):
        yield


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dq", ["kernel", "atomic"])
@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS)
def test_results_and_gradients_beside_the_oracle(
    fields: dict[str, Any], dq: str, dtype: str
) -> None:
    if fields.get("deterministic") and dq == "atomic":
        pytest.skip("adds in no fixed order")
    spec = AttentionSpec(head_dim=16, dtype=dtype, layout="thd", **fields)
    for check in verify(spec, [Workload(3, 2, 1, 21, 25)], ("fwd", "bwd"), "cpu"):
        assert check.ok, check


@pytest.mark.slow
@pytest.mark.parametrize("fields", [SPECS["both"], SPECS["prefix"], {"aux": ("entropy",)}], ids=str)
def test_gate_accepts_both_directions(fields: dict[str, Any]) -> None:
    fields = {**fields, "aux": ("max_logit", "entropy")}
    spec = AttentionSpec(head_dim=16, dtype="float32", layout="thd", deterministic=False, **fields)
    for config in (SMALL_FWD, replace(SMALL_BWD, dq="atomic")):
        served = spec.served_as(config.direction)
        verdict = gate.SmallGate(served, config.direction, 2, "cpu").check(config)
        assert verdict.ok, verdict
        each = case.make(
            served, Workload(3, 2, 1, 20, 24), "cpu", backward=config.direction == "bwd"
        )
        if config.direction == "fwd":
            assert gate.sampled(each, config).ok, fields


def _alone(n: int, x: Tensor, at: Tensor, used: int) -> Tensor:
    first = int(at[n])
    return x[first : first + used].transpose(0, 1)[None]


@pytest.mark.parametrize("masked", [False, True])
def test_side_outputs_are_those_of_each_sequence(masked: bool) -> None:
    """With rows of no sequence before and behind, and rows that are not used, which hold NaN."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(2 + sum(lengths) + 3, heads, 16, generator=generator)
        for lengths, heads in ((ROWS, 2), (KEYS, 1), (KEYS, 1))
    )
    used_q, used_k = ([max(n - 2, 0) for n in lengths] for lengths in (ROWS, KEYS))
    for x, at, used in ((q, AT_Q, used_q), (k, AT_K, used_k), (v, AT_K, used_k)):
        inside = torch.zeros(x.shape[0], dtype=torch.bool)
        for first, n in zip(at.tolist(), used, strict=False):
            inside[first : first + n] = True
        x[~inside] = torch.nan
    fields: dict[str, Any] = {"causal": True, "sinks": torch.tensor([0.5, -1.0])}
    if masked:
        fields["mask_mod"] = lambda b, h, i, j: IDS[b, i] >= IDS[b, j]
    names = ("lse", "max_logit", "entropy")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, aux = attngen.attention(
        *leaves,
        cu_seqlens_q=AT_Q.int(),
        cu_seqlens_k=AT_K.int(),
        seqused_q=torch.tensor(used_q).int(),
        seqused_k=torch.tensor(used_k).int(),
        return_aux=names,
        **fields,
    )
    assert aux["max_logit"].shape == (5, 2)
    assert aux["entropy"].shape == q.shape[:2]
    assert not any(torch.isnan(x).any() for x in (out, *aux.values()))
    assert not any(torch.isnan(x).any() for x in torch.autograd.grad(out.square().sum(), leaves))
    rest = torch.ones(q.shape[0], dtype=torch.bool)
    for n, (rows, keys) in enumerate(zip(used_q, used_k, strict=True)):
        first = int(AT_Q[n])
        rest[first : first + rows] = False
        one = _alone(n, q, AT_Q, rows), _alone(n, k, AT_K, keys), _alone(n, v, AT_K, keys)
        more = {**fields, **({"batch_start": n} if masked else {})}
        want, sides = attngen.attention(*one, return_aux=names, **more)
        got = out[first : first + rows].transpose(0, 1)[None]
        assert_close([got], [want])
        for name in names:
            found = aux[name][n][None]
            if name != "max_logit":
                found = aux[name][first : first + rows].T[None]
            assert_close([found], [sides[name]])
    assert not aux["entropy"][rest].any()


def test_nested_tensors_have_side_outputs_too() -> None:
    parts = [torch.randn(n, 2, 16) for n in (3, 7)]
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    out, aux = attngen.attention(q, q, q, return_aux=("max_logit", "entropy"))
    assert out.is_nested and aux["entropy"].is_nested
    assert aux["max_logit"].shape == (2, 2)


def test_no_sequence_and_graphs() -> None:
    spec = AttentionSpec(head_dim=16, dtype="float32", layout="thd", mask_mod="ge q k")
    attn = attngen.compile(spec)
    q = torch.randn(9, 2, 16)
    none = torch.zeros(1, dtype=torch.int32)
    out, aux = attn(q, q, q, cu_seqlens_q=none, cu_seqlens_k=none, return_aux=("max_logit",))
    assert not out.any()
    assert aux["max_logit"].shape == (0, 2)
    at = torch.tensor([0, 4, 9]).int()

    def call(x: Tensor) -> Any:
        return attn(x, x, x, cu_seqlens_q=at, cu_seqlens_k=at, return_aux=("max_logit", "entropy"))

    (a, b), (c, d) = call(q), torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert_close([a, *b.values()], [c, *d.values()])


def test_what_is_left_is_refused() -> None:
    with pytest.raises(attngen.UnsupportedSpecError, match="aux=col_sum with layout"):
        AttentionSpec(head_dim=16, layout="thd", aux=("col_sum",))
    q, at = torch.randn(9, 2, 16), torch.tensor([0, 4, 9]).int()
    with pytest.raises(attngen.SpecError, match=r"prefix_lens must have shape \(batch,\) \(2,\)"):
        attngen.attention(q, q, q, causal=True, cu_seqlens_q=at, cu_seqlens_k=at, prefix_lens=at)
