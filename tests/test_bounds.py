"""Kernels touch no memory outside the tensors that they were given, whatever masks and offsets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import bounds
import pytest
import torch
import triton.language as tl
from support import SMALL_BWD, SMALL_FWD
from test_packed import offsets
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

import attngen
from attngen import settle
from attngen.pinned import pinned

BATCH, ROWS, KEYS = 2, 37, 53


@InterpretedFunction
def copy(source, to, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(to + at, tl.load(source + at, at < size), at < size)


def test_an_access_outside_is_noticed() -> None:
    """The check can fail: one element too many is read."""
    source, to = torch.zeros(5), torch.zeros(8)
    with bounds.guarded() as guard:
        copy[(1,)](source, to, 5, BLOCK=8)
        assert guard.accesses == 10
        with pytest.raises(Exception, match="load: 1 of 6 leave all tensors"):
            copy[(1,)](source, to, 6, BLOCK=8)
    copy[(1,)](source, to, 5, BLOCK=8)


def normal(*shape: int, learnt: bool = False) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(
        learnt
    )


def packed(*lengths: int, **more: Any) -> dict[str, Any]:
    return {"cu_seqlens_q": offsets(lengths), "cu_seqlens_k": offsets(lengths), **more}


def wrong(*values: int) -> dict[str, Any]:
    """Offsets out of order or out of the tensors: results mean nothing then."""
    cu = torch.tensor(values, dtype=torch.int32)
    return {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "window": (9, 9), "seqused_k": cu[1:].clone()}


TABLE = normal(2, 120, learnt=True)
IDS = torch.arange(KEYS)[None].repeat(BATCH, 1) // 9
USED = {
    "seqused_q": torch.tensor([21, 0, 3, 5], dtype=torch.int32),
    "seqused_k": torch.tensor([3, 0, 30, 5], dtype=torch.int32),
}
TERMS = {
    "sinks": normal(4, 2, learnt=True),
    "alibi_slopes": normal(4, 2).abs().requires_grad_(),
    "dropout_p": 0.2,
    "dropout_seed": 3,
}
PACKED = {
    "packed": packed(21, 0, 37, 5, causal=True),
    "packed-gap": packed(21, 0, 30, 1, window=(9, 9)),
    "packed-used": packed(21, 0, 37, 5, causal=True, **USED),
    "packed-terms": packed(21, 0, 37, 5, causal=True, **TERMS),
    "beyond": wrong(-5, 90, 3, 2**31 - 1, 63),
    "falling": wrong(63, 40, 20, 0, 0),
    "negative": wrong(-(2**31), 0, 0, 7, 63),
}
DENSE: dict[str, dict[str, Any]] = {
    "bias": {"bias": normal(BATCH, 2, ROWS, KEYS, learnt=True)},
    "bias-of-keys": {"bias": normal(BATCH, 1, 1, KEYS, learnt=True), "causal": True},
    "mask": {"attn_mask": normal(BATCH, 1, ROWS, KEYS) > 0.3},
    "alibi-sinks": {
        "alibi_slopes": normal(2).abs().requires_grad_(),
        "sinks": normal(2, learnt=True),
        "causal": True,
    },
    "documents": {"doc_ids_q": IDS[:, :ROWS], "doc_ids_k": IDS, "causal": True},
    "prefix": {"prefix_lens": torch.tensor([7, 60]), "causal": True},
    "tree": {"tree_mask": normal(BATCH, 9, 9) > 0, "causal": True},
    "functions": {
        "score_mod": lambda score, b, h, q_idx, k_idx: score + TABLE[h, q_idx - k_idx + 60],
        "mask_mod": lambda b, h, q_idx, k_idx: q_idx >= k_idx - 20,
        "deterministic": False,
    },
    "chunk": {"chunk": 7, "causal": True},
}


def some(cases: dict[str, dict[str, Any]], *daily: str) -> list[Any]:
    return [
        pytest.param(options, id=name, marks=[] if name in daily else [pytest.mark.slow])
        for name, options in cases.items()
    ]


def step(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any], dq: str) -> None:
    """A call and all its gradients, in small tiles."""
    leaves = [x.requires_grad_() for x in (q, k, v)]
    leaves += [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    with pinned({"fwd": SMALL_FWD, "bwd": replace(SMALL_BWD, dq=dq)}), bounds.guarded() as guard:
        out, lse = attngen.attention(q, k, v, return_lse=True, **options)
        torch.autograd.grad([out.sum() + lse[lse.isfinite()].sum()], leaves)
    assert guard.accesses > 0


@pytest.mark.parametrize("dq", ["kernel", "atomic"])
@pytest.mark.parametrize("options", some(PACKED, "packed-used"))
def test_packed(options: dict[str, Any], dq: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settle, "check_values", lambda *given: None)  # off where nothing may wait
    q, k, v = (normal(63, 2, 16) for _ in range(3))
    step(q, k, v, options, dq)


@pytest.mark.parametrize("dq", ["kernel", "atomic"])
@pytest.mark.parametrize("options", some(DENSE, "bias-of-keys"))
def test_dense(options: dict[str, Any], dq: str) -> None:
    q, k, v = normal(BATCH, 2, ROWS, 24), normal(BATCH, 1, KEYS, 24), normal(BATCH, 1, KEYS, 24)
    step(q, k, v, options, dq)
