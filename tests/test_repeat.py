"""The short way of a call: which calls take it, and that they give what the other way gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import kernel, repeat

Call = Callable[[], tuple[list[Tensor], dict[str, Any]]]


def _dense(rows: int = 2, layout: str = "bhsd") -> list[Tensor]:
    q, k, v = torch.randn(2, 4, rows, 16), torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16)
    return [x.transpose(1, 2) for x in (q, k, v)] if layout == "bshd" else [q, k, v]


def _packed() -> tuple[list[Tensor], dict[str, Any]]:
    at = torch.tensor([0, 3, 9], dtype=torch.int32)
    q, k, v = torch.randn(3, 9, 2, 16)
    return [q, k, v], {"cu_seqlens_q": at, "cu_seqlens_k": at.clone()}


def _lengths() -> Tensor:
    return torch.tensor([20, 7], dtype=torch.int32)


def _paged() -> tuple[list[Tensor], dict[str, Any]]:
    pages = torch.randn(2, 6, 16, 2, 16)
    table = torch.tensor([[4, 2], [1, -1]], dtype=torch.int32)
    return [torch.randn(2, 4, 1, 16), *pages], {"block_table": table, "seqused_k": _lengths() // 2}


CALLS: dict[str, Call] = {
    "dense": lambda: (_dense(), {}),
    "rows": lambda: (_dense(20), {"causal": True}),
    "window": lambda: (_dense(), {"window": (5, 0), "causal": True, "return_lse": True}),
    "scale": lambda: (_dense(), {"softmax_scale": 0.3, "softcap": 2.0}),
    "bshd": lambda: (_dense(layout="bshd"), {"layout": "bshd", "return_lse": True}),
    "lengths": lambda: (_dense(), {"seqused_k": _lengths()}),
    "paged": _paged,
    "packed": _packed,
    "sinks": lambda: (_dense(), {"sinks": torch.randn(4)}),
    "alibi": lambda: (_dense(), {"alibi_slopes": torch.rand(2, 4)}),
    "bias": lambda: (_dense(), {"bias": torch.randn(1, 4, 2, 20)}),
    "mask": lambda: (_dense(), {"attn_mask": torch.rand(2, 20) > 0.3}),
    "partial": lambda: (_dense(), {"partial": True}),
}
SPEC_FIELDS = ("causal", "window", "softmax_scale", "softcap", "layout")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What took the short way; nothing is known at first."""
    found = []
    again = repeat._again

    def spy(known: Any, tensors: list[Any]) -> Any:
        found.append(known)
        return again(known, tensors)

    attngen.reload()
    monkeypatch.setattr(repeat, "_again", spy)
    return found


def _attend(options: dict[str, Any], is_object: bool) -> Callable[..., Any]:
    """attngen.attention, or a compiled spec of the same options."""
    if not is_object:
        return attngen.attention
    fields = {name: x for name, x in options.items() if name in SPEC_FIELDS}
    fields |= {
        "bias": "bias" in options,
        "attn_mask": "attn_mask" in options,
        "sinks": "sinks" in options,
        "alibi": "alibi_slopes" in options,
        "paged": "block_table" in options,
        "key_lengths": "seqused_k" in options,
    }
    if "cu_seqlens_q" in options:
        fields["layout"] = "thd"
    attn = attngen.compile(attngen.AttentionSpec(head_dim=16, dtype="float32", **fields))
    return lambda *tensors, **named: attn(
        *tensors, **{name: x for name, x in named.items() if name not in SPEC_FIELDS}
    )


ALWAYS = ("dense", "paged", "packed", "bias")
"""The others take their time in the interpreter."""


def _each(*always: str) -> list[Any]:
    rest = [pytest.mark.slow]
    return [pytest.param(x, id=n, marks=[] if n in always else rest) for n, x in CALLS.items()]


@pytest.mark.parametrize("is_object", [False, True], ids=["function", "object"])
@pytest.mark.parametrize("make", _each(*ALWAYS))
def test_the_third_call_is_short(make: Call, is_object: bool, taken: list[Any]) -> None:
    """And gives what the first way gives of its own tensors, in the same strides."""
    tensors, options = make()
    attend = _attend(options, is_object)
    for _ in range(2):
        first = attend(*tensors, **options)
    assert not taken
    tensors, options = make()
    found = attend(*tensors, **options)
    assert len(taken) == 1
    attngen.reload()
    wanted = attend(*tensors, **options)
    assert len(taken) == 1
    pairs = [(found, wanted)] if isinstance(found, Tensor) else zip(found, wanted, strict=True)
    for got, want in pairs:
        assert torch.equal(got, want) and got.stride() == want.stride()
        assert got.dtype == want.dtype
    assert type(found) is type(first)


@pytest.mark.parametrize("make", _each("paged"))
def test_kernels_are_given_the_addresses_of_arguments(
    make: Call, taken: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where nothing else of a tensor counts."""
    seen: list[list[int | None]] = []

    def run(self: kernel.Prepared, given: Any) -> bool:
        seen.append([None if x is None else x.data_ptr() for x in given])
        return False

    monkeypatch.setattr(kernel.Prepared, "repeat", run)
    launches: list[list[int | None]] = []
    slow = kernel.Prepared.__call__

    def launched(self: kernel.Prepared, given: Any) -> None:
        launches.append([None if x is None else x.data_ptr() for x in given])
        slow(self, given)

    monkeypatch.setattr(kernel.Prepared, "__call__", launched)
    for _ in range(3):
        tensors, options = make()
        attngen.attention(*tensors, **options)
    assert seen and seen[-1] == launches[-1]


def test_equal_specs_share_what_is_known(taken: list[Any]) -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32")
    for _ in range(3):
        attngen.compile(spec)(*_dense())
    assert len(taken) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"causal": 1},
        {"window": (5, False)},
        {"window": (5, 0, 0)},
        {"softmax_scale": "0.3"},
        {"layout": "sbhd"},
        {"bias": [1.0]},
        {"nonsense": None},
    ],
    ids=str,
)
def test_what_is_wrong_is_seen_whatever_was_called_before(changed: dict[str, Any]) -> None:
    right = {"causal": True, "window": (5, 0), "softmax_scale": 0.3, "layout": "bhsd"}
    tensors = _dense()
    for _ in range(3):
        attngen.attention(*tensors, **right)
    with pytest.raises((attngen.SpecError, TypeError)):
        attngen.attention(*tensors, **{**right, **changed})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func
def test_what_acts_on_a_call_keeps_it_from_the_short_way(taken: list[Any]) -> None:
    q, k, v = _dense()
    for _ in range(3):
        attngen.attention(q, k, v)
    assert len(taken) == 1
    learnt = q.clone().requires_grad_()
    out = attngen.attention(learnt, k, v)
    assert out.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attngen.attention(q, k, v).dtype == torch.bfloat16
    out = torch.func.vmap(attngen.attention)(q[None], k[None], v[None])
    assert out.shape == (1, *q.shape)
    _, moved = torch.func.jvp(lambda x: attngen.attention(x, k, v), (q,), (q,))
    assert moved.abs().max() > 0
    assert len(taken) == 1
    with torch.no_grad():
        attngen.attention(learnt, k, v)
    assert len(taken) == 2  # no gradient is asked for


def test_a_tensor_off_16_bytes_goes_the_other_way(taken: list[Any]) -> None:
    q, k, v = _dense()
    for _ in range(3):
        attngen.attention(q, k, v)
    moved = torch.empty(q.numel() + 1)[1:].view(q.shape).copy_(q)
    assert torch.equal(attngen.attention(moved, k, v), attngen.attention(q, k, v))
    assert len(taken) == 2


def test_a_v_that_is_no_longer_part_of_k_is_told(taken: list[Any]) -> None:
    """Kernels load keys once for both where v is their first columns."""
    q, k = torch.randn(1, 4, 1, 32), torch.randn(1, 1, 20, 32)
    for _ in range(3):
        attngen.attention(q, k, k[..., :16])
    assert len(taken) == 1
    other = torch.randn(1, 1, 20, 32)[..., :16]
    found = attngen.attention(q, k, other)
    torch.testing.assert_close(found, attngen.attention(q, k, other.clone()))


def test_lengths_are_looked_at_on_the_cpu(taken: list[Any]) -> None:
    tensors = _dense()
    for _ in range(3):
        attngen.attention(*tensors, seqused_k=_lengths())
    assert len(taken) == 1
    with pytest.raises(attngen.SpecError, match="seqused_k"):
        attngen.attention(*tensors, seqused_k=_lengths() + 1)


def test_a_compiled_call_is_one_graph(taken: list[Any]) -> None:
    q, k, v = _dense()
    attn = attngen.compile(attngen.AttentionSpec(head_dim=16, dtype="float32"))
    for call in (attngen.attention, attn):
        found = torch.compile(call, backend="eager", fullgraph=True)(q, k, v)
        torch.testing.assert_close(found, call(q, k, v))
