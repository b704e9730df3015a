"""append_and_attend: a step of generation in one call, as append_kv and attention give it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen

PAGE = 16


def _angles() -> dict[str, Tensor]:
    turn = torch.arange(64)[:, None] * 100 ** (-torch.arange(8) / 8)
    return {"cos": turn.cos(), "sin": turn.sin()}


def _new(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, rows, 16), torch.randn(2, 2, rows, 16), torch.randn(2, 2, rows, 16)


def _two_calls(q: Tensor, k: Tensor, v: Tensor, caches: list[Tensor], **named: Any) -> Tensor:
    """By the two functions, with layout "bhsd"."""
    at, turned = named.pop("positions"), named.pop("rotary", {})
    table = {name: named[name] for name in ("block_table",) if name in named}
    found = attngen.append_kv(
        k, v, *caches, positions=at, **table, **({"q": q, **turned} if turned else {})
    )
    used = (at + q.shape[2]).int()
    q = q if found is None else found
    out: Tensor = attngen.attention(q, *caches, seqused_k=used, causal=True, **named)
    return out


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("has_rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_dense(layout: str, has_rotary: bool, rows: int) -> None:
    tensors = _new(rows)
    at = torch.tensor([7, 0])
    turned = _angles() if has_rotary else {}
    caches = [torch.randn(2, 2, 24, 16) for _ in range(2)]
    mine = [x.clone() for x in caches]
    want = _two_calls(*tensors, caches, positions=at, rotary=turned)
    if layout == "bshd":
        given = [x.transpose(1, 2) for x in (*tensors, *mine)]
        got = attngen.append_and_attend(*given, positions=at, layout=layout, **turned)
        got = got.transpose(1, 2)
    else:
        got = attngen.append_and_attend(*tensors, *mine, positions=at, **turned)
    assert torch.equal(got, want)
    for cache, wanted in zip(mine, caches, strict=True):
        assert torch.equal(cache, wanted)


def test_pages_step_by_step() -> None:
    """Each step sees what those before it have written; out and lse on request."""
    table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    caches = [torch.full((5, PAGE, 2, 16), float("nan")) for _ in range(2)]
    at, kept = torch.tensor([0, 0], dtype=torch.int32), []
    for rows in (14, 1, 1, 1):
        q, k, v = _new(rows)
        kept.append((k, v))
        out = torch.empty_like(q)
        got, lse = attngen.append_and_attend(
            q, k, v, *caches, positions=at, block_table=table, return_lse=True, out=out
        )
        at += rows
        keys, values = (torch.cat(x, 2) for x in zip(*kept, strict=True))
        want, want_lse = attngen.attention(q, keys, values, causal=True, return_lse=True)
        assert got is out
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(lse, want_lse)


def test_packed() -> None:
    """Sequences of several lengths, some of which begin and some go on."""
    table = torch.tensor([[3, 1], [0, 4]], dtype=torch.int32)
    caches = [torch.randn(5, PAGE, 2, 16) for _ in range(2)]
    mine = [x.clone() for x in caches]
    rows, before = (5, 1), (0, 17)
    q, k, v = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    places = [(b, i) for b in range(2) for i in range(before[b], before[b] + rows[b])]
    slots = torch.tensor([int(table[b, i // PAGE]) * PAGE + i % PAGE for b, i in places])
    named: dict[str, Any] = {
        "cu_seqlens_q": torch.tensor([0, 5, 6], dtype=torch.int32),
        "seqused_k": torch.tensor([5, 18], dtype=torch.int32),
        "block_table": table,
        "layout": "thd",
    }
    turned = _angles()
    positions = torch.tensor([i for _, i in places])
    got = attngen.append_and_attend(
        q, k, v, *mine, slots=slots, positions=positions, **named, **turned
    )
    for b, (begin, end) in enumerate(((0, 5), (5, 6))):
        one = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        at = torch.tensor([before[b]])
        here = table[b : b + 1]
        want = _two_calls(*one, caches, positions=at, rotary=turned, block_table=here)
        torch.testing.assert_close(got[begin:end].transpose(0, 1)[None], want)
    for cache, wanted in zip(mine, caches, strict=True):
        torch.testing.assert_close(cache, wanted)


def test_what_is_missing_is_named() -> None:
    q, k, v = _new(1)
    caches = [torch.zeros(2, 2, 24, 16) for _ in range(2)]
    with pytest.raises(attngen.SpecError, match="seqused_k is missing"):
        attngen.append_and_attend(q, k, v, *caches)
    with pytest.raises(attngen.SpecError, match="needs cu_seqlens_q, slots, seqused_k"):
        attngen.append_and_attend(q[:, 0], k[:, 0], v[:, 0], *caches, layout="thd")
    at = torch.tensor([0, 1])
    with pytest.raises(attngen.SpecError, match='pass layout="thd"'):
        attngen.append_and_attend(q, k, v, *caches, positions=at, cu_seqlens_q=at.int())
    with pytest.raises(attngen.SpecError, match="slots without block_table"):
        attngen.append_and_attend(q, k, v, *caches, slots=at[:, None], seqused_k=at.int())
    with pytest.raises(attngen.SpecError, match="seqused_k is missing"):
        attngen.append_and_attend(q, k, v, *caches, positions=[0, 1])
    with pytest.raises(attngen.UnsupportedSpecError):
        attngen.append_and_attend(q, k.clone().requires_grad_(), v, *caches, positions=at)
