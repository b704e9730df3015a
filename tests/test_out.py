"""`out=`: the result in a tensor of the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen


def _inputs(rows: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, rows, 16), torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 24)


def _places(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Tensors of a shape that lie in several ways."""
    b, h, s, d = shape
    return {
        "bhsd": torch.empty(shape),
        "bshd": torch.empty(b, s, h, d).transpose(1, 2),
        "part": torch.empty(b, h, s, 2 * d + 8)[..., :d],
    }


@pytest.mark.parametrize("rows", [3, 20], ids=["decode", "forward"])
@pytest.mark.parametrize("place", ["bhsd", "bshd", "part"])
def test_out_is_written_and_returned(rows: int, place: str) -> None:
    """Call after call, as the third takes the short way."""
    q, k, v = _inputs(rows)
    want, want_lse = attngen.attention(q, k, v, causal=True, return_lse=True)
    out = _places((2, 4, rows, 24))[place]
    for _ in range(3):
        out.fill_(float("nan"))
        got, lse = attngen.attention(q, k, v, causal=True, return_lse=True, out=out)
        assert got is out and torch.equal(out, want) and torch.equal(lse, want_lse)
    other = torch.empty_strided(out.shape, out.stride())
    assert attngen.attention(q, k, v, causal=True, out=other) is other
    assert torch.equal(other, want)


def test_layouts() -> None:
    q, k, v = _inputs()
    want = attngen.attention(q, k, v)
    rows_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = torch.empty(2, 3, 4, 24)
    assert attngen.attention(*rows_first, layout="bshd", out=out) is out
    assert torch.equal(out.transpose(1, 2), want)
    at = torch.tensor([0, 2, 6], dtype=torch.int32)
    q, k, v = torch.randn(3, 6, 2, 16)
    named = {"cu_seqlens_q": at, "cu_seqlens_k": at}
    out = torch.empty(6, 2, 16)
    assert attngen.attention(q, k, v, **named, out=out) is out
    assert torch.equal(out, attngen.attention(q, k, v, **named))


def test_a_compiled_spec_and_a_graph_take_it() -> None:
    q, k, v = _inputs()
    spec = attngen.AttentionSpec(head_dim=16, head_dim_v=24, dtype="float32")
    attend = attngen.compile(spec)
    want = attend(q, k, v)
    out = torch.zeros(2, 4, 3, 24)
    assert attend(q, k, v, out=out) is out
    assert torch.equal(out, want)
    out.zero_()
    graph = torch.compile(lambda *x: attend(*x[:3], out=x[3]) + 1, backend="aot_eager")
    assert torch.equal(graph(q, k, v, out), want + 1) and torch.equal(out, want)
    half = torch.zeros(2, 4, 3, 24, dtype=torch.float32)
    assert attend(q, k, v, partial=True, out=half) is half


def test_nothing_to_see_is_zero() -> None:
    q, k, v = _inputs()
    out = torch.full((2, 4, 3, 24), float("nan"))
    assert (attngen.attention(q, k[:, :, :0], v[:, :, :0], out=out) == 0).all()


def test_what_is_wrong_is_named() -> None:
    q, k, v = _inputs()
    right = torch.empty(2, 4, 3, 24)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (right[:1], attngen.SpecError, "out must have shape"),
        (right.bfloat16(), attngen.SpecError, "out must be torch.float32"),
        (torch.empty(2, 4, 24, 3).transpose(2, 3), attngen.SpecError, "last stride of 1"),
        (right[:1].expand(2, 4, 3, 24), attngen.SpecError, "one place for each element"),
        (torch.empty(right.numel() + 1)[1:].view(right.shape), attngen.SpecError, "16 bytes"),
        (right[0], attngen.SpecError, "4 dims"),
        ("here", attngen.SpecError, "must be a dense"),
        (right.clone().requires_grad_(), attngen.UnsupportedSpecError, "no derivative"),
    ]
    for out, kind, why in wrong:
        with pytest.raises(kind, match=why):
            attngen.attention(q, k, v, out=out)
    with pytest.raises(attngen.UnsupportedSpecError, match="no derivative"):
        attngen.attention(q.clone().requires_grad_(), k, v, out=right)
    with pytest.raises(attngen.UnsupportedSpecError, match="return_aux"):
        attngen.attention(q, k, v, out=right, return_aux=("entropy",))
    rows = list(q.transpose(1, 2))
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with pytest.raises(attngen.UnsupportedSpecError, match="out= with nested tensors"):
        attngen.attention(nested, nested, nested, out=right)
    with torch.no_grad():
        attngen.attention(q.clone().requires_grad_(), k, v, out=right)


@pytest.mark.parametrize("shift", [0, 16, 80, 176])  # wherever a row begins
def test_out_apart_from_inputs_within_one_buffer(shift: int) -> None:
    """Parts of rows, as of a fused buffer of q, k, v and out; call after call."""
    rows = torch.randn(2 * 5 * 4 * 4 * 16 + shift)[shift:]
    rows = rows.view(2, 5, 4, 4, 16)  # batch, seqlen, which, heads, dim
    q, k, v, out = (rows[:, :, n].transpose(1, 2) for n in range(4))
    want = attngen.attention(q.clone(), k.clone(), v.clone())
    for _ in range(3):
        assert torch.equal(attngen.attention(q, k, v, out=out), want)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_must_share_no_memory_with_inputs(name: str) -> None:
    """Nor in a call like others before, which takes the short way."""
    q, k, v = (torch.randn(2, 4, 8, 16) for _ in range(3))
    inputs, out = {"q": q, "k": k, "v": v}, torch.empty(2, 4, 8, 16)
    for _ in range(3):
        attngen.attention(**inputs, out=out)
    whole = torch.randn(2 * 4 * 8 * 16 + 64)
    parts = [whole[:-64].view_as(q), whole[64:].view_as(q)]
    for x, into in ((out, out), parts):
        with pytest.raises(attngen.SpecError, match=f"out shares memory with {name}"):
            attngen.attention(**inputs | {name: x}, out=into)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_autograd_learns_that_out_was_written(mode: Any) -> None:
    q, k, v = _inputs()
    for _ in range(3):
        out = torch.zeros(2, 4, 3, 24)
        weight = torch.ones(24, requires_grad=True)
        loss = (out * weight).sum()
        with mode():
            attngen.attention(q, k, v, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
