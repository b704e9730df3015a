"""What the spec and the public calls refuse, and what they take for the same value."""

from __future__ import annotations

import copy
import enum
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_close, make_qkv
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import attngen
from attngen import ops, values

SPEC = attngen.AttentionSpec(head_dim=16, dtype="float32")
CAUSAL = attngen.AttentionSpec(head_dim=16, dtype="float32", causal=True)
Q = torch.ones(1, 2, 5, 16)
TENSOR = torch.tensor([[1, 2], [3, 4]])


def refused(
    call: Callable[[], Any], kind: type[Exception] = attngen.SpecError, *pieces: str
) -> None:
    """`call` raises exactly `kind`, in one line that holds every piece."""
    with pytest.raises(attngen.AttngenError) as raised:
        call()
    message = str(raised.value)
    assert type(raised.value) is kind, repr(raised.value)
    assert "\n" not in message and len(message) < 1000
    for piece in pieces:
        assert piece in message, message


def cases(*rows: tuple[dict[str, Any], str, str]) -> Any:
    """(fields, the value the message names, what is allowed or the next step)."""
    ids = [f"{name}={values.shown(value)}" for fields, *_ in rows for name, value in fields.items()]
    return pytest.mark.parametrize(("fields", "value", "step"), rows, ids=ids[: len(rows)])


# ---- options: the same words in the spec and in attention() ---------------------------------

RANGE, OPEN = "1.2e-38 to 8.5e37", "None is the only way to say 'no limit'"


@pytest.mark.parametrize("through", ["spec", "attention"])
@cases(
    ({"softmax_scale": 1e39}, "1e+39", RANGE),
    ({"softmax_scale": -1e39}, "-1e+39", RANGE),
    ({"softmax_scale": 1e-300}, "1e-300", RANGE),
    ({"softmax_scale": -5e-324}, "-5e-324", RANGE),
    ({"softmax_scale": 10**40}, "1e+40", RANGE),
    ({"softmax_scale": 10**400}, "1000000", RANGE),
    ({"softmax_scale": 10**5000}, "thousands of digits", RANGE),
    ({"softmax_scale": math.inf}, "inf", "None means 1/sqrt(head_dim)"),
    ({"softmax_scale": np.float64("nan")}, "nan", "None means 1/sqrt(head_dim)"),
    ({"softmax_scale": "0.5"}, "'0.5'", "write softmax_scale=0.5"),
    ({"softmax_scale": True}, "True", "None means 1/sqrt(head_dim)"),
    ({"softmax_scale": 1j}, "1j", "a finite number"),
    ({"softmax_scale": torch.tensor(0.5)}, "tensor(0.5000)", "multiply q"),
    ({"softcap": 1e39}, "1e+39", RANGE),
    ({"softcap": 1e-300}, "1e-300", RANGE),
    ({"softcap": math.nan}, "nan", "None switches it off"),
    ({"softcap": False}, "False", "None switches it off"),
    ({"softcap": "30"}, "'30'", "write softcap=30.0"),
    ({"softcap": [30.0]}, "[30.0]", "None switches it off"),
    ({"softmax_scale": 1e20, "softcap": 1e-20}, "1e+20 / 1e-20", "raise softcap"),
    ({"dropout_p": "0.1"}, "'0.1'", "write dropout_p=0.1"),
    ({"dropout_p": None}, "None", "from 0 to 1, got None; 0.0 switches dropout off"),
    ({"dropout_p": math.nan}, "nan", "from 0 to 1"),
    ({"dropout_p": True}, "True", "from 0 to 1"),
    ({"dropout_p": 2}, "2.0", "from 0 to 1"),
    ({"dropout_p": 10**400}, "10000", "from 0 to 1"),
    ({"dropout_p": torch.tensor(0.1)}, "tensor(0.1000)", ".item()"),
    ({"window": (3,)}, "(3,)", "(W - 1, 0)"),
    ({"window": (1, 2, 3)}, "(1, 2, 3)", "(W - 1, 0)"),
    ({"window": 4}, "4", "(W - 1, 0)"),
    ({"window": "ab"}, "'ab'", "(W - 1, 0)"),
    ({"window": np.array([3, 0])}, "array([3, 0])", "(W - 1, 0)"),
    ({"window": (3.0, 0)}, "3.0", "write 3"),
    ({"window": (0, "3")}, "'3'", "write 3"),
    ({"window": (True, 0)}, "True", OPEN),
    ({"window": (np.int64(-1), 0)}, "-1", OPEN),
    ({"window": (TENSOR, TENSOR)}, "tensor([[1, 2], [3, 4]])", OPEN),
    ({"window": (np.array([1, 2]), None)}, "array([1, 2])", OPEN),
    ({"causal": "true"}, "'true'", "write causal=True"),
    ({"causal": 0}, "0", "write causal=False"),
    ({"causal": None}, "None", "write causal=False"),
    ({"causal": np.array([True, False])}, "array([ True, False])", "False, True"),
    ({"causal": ["top_left"]}, "['top_left']", "'top_left'"),
    ({"layout": 5}, "5", "leave layout out for 'bhsd'"),
    ({"layout": ["bhsd"]}, "['bhsd']", "'bhsd', 'bshd'"),
    ({"layout": np.array(["a", "b"])}, "'a'", "'bhsd', 'bshd'"),
    ({"precision": {}}, "{}", "leave precision out for 'ieee'"),
    ({"deterministic": "yes"}, "'yes'", "leave deterministic out for its default"),
    ({"deterministic": 1}, "1", "write deterministic=True"),
    ({"deterministic": np.array([1, 0])}, "array([1, 0])", "None, True or False"),
    ({"batch_invariant": "false"}, "'false'", "write batch_invariant=False"),
)
def test_option_is_refused(through: str, fields: dict[str, Any], value: str, step: str) -> None:
    if through == "spec":
        refused(
            lambda: attngen.AttentionSpec(head_dim=16, **fields), attngen.SpecError, value, step
        )
    else:
        refused(lambda: attngen.attention(Q, Q, Q, **fields), attngen.SpecError, value, step)


@cases(
    ({"head_dim": "64"}, "'64'", "write head_dim=64"),
    ({"head_dim": 64.0}, "64.0", "write head_dim=64"),
    ({"head_dim": "600"}, "'600'", "split the heads"),
    ({"head_dim": 10**5000}, "thousands of digits", "from 1 to 576"),
    ({"head_dim": None}, "None", "from 1 to 576, got None; it is the last dim of q and k"),
    ({"head_dim": 0}, "0", "it is the last dim of q and k"),
    ({"head_dim_v": -1}, "-1", "it is the last dim of v"),
    ({"head_dim": TENSOR}, "tensor([[1, 2], [3, 4]])", "from 1 to 576"),
    ({"head_dim_v": np.float64(64)}, "64.0", "write head_dim_v=64"),
    ({"head_dim_v": np.bool_(True)}, "True", "from 1 to 512"),
    ({"dtype": np.array([1, 2])}, "[1 2]", "'bfloat16'"),
    ({"dtype": torch.float64}, "'float64'", "cast tensors with .to(torch.float32)"),
    ({"dtype": "int32"}, "'int32'", "cast tensors with .to(torch.float32)"),
    ({"layout": "BSHD"}, "'BSHD'", "did you mean 'bshd'?"),
    ({"chunk": 0}, "0", "from 1 to 1073741824, got 0; None switches it off"),
    ({"dtype": "fp8"}, "'fp8'", "leave dtype out for 'bfloat16'"),
    ({"kv_dtype": "fp4"}, "'fp4'", "leave kv_dtype out for None"),
    ({"aux": ("foo",)}, "'foo'", "leave aux out for out and lse alone"),
    ({"shared_kv": True}, "head_dim_v=16", "or leave shared_kv out"),
    (
        {"kv_dtype": "int8", "kv_scale": "head", "dtype": "float32"},
        "'float32'",
        "leave kv_dtype and kv_scale out",
    ),
    ({"chunk": "8"}, "'8'", "write chunk=8"),
    ({"score_mod": False}, "False", "leave score_mod out for None"),
    ({"fp8_scale": True}, "True", "'tensor', 'head', 'block'"),
    ({"bias": "no"}, "'no'", "leave bias out for its default"),
    ({"scale": 1.0}, "'scale'", "did you mean 'softmax_scale'?"),
    ({"is_causal": True}, "'is_causal'", "did you mean 'causal'?"),
)
def test_spec_field_is_refused(fields: dict[str, Any], value: str, step: str) -> None:
    refused(
        lambda: attngen.AttentionSpec(**{"head_dim": 16, **fields}), attngen.SpecError, value, step
    )


def test_spec_by_position_or_without_head_dim_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got 64; write AttentionSpec\(head_dim") as raised:
        attngen.AttentionSpec(64)
    assert isinstance(raised.value, attngen.SpecError)
    for call in (
        lambda: attngen.AttentionSpec(causal=True),
        lambda: attngen.AttentionSpec.from_json('{"causal": true}'),
    ):
        refused(call, attngen.SpecError, "lacks head_dim", "head_dim=128")


@pytest.mark.parametrize("line", [5, None, b"head_dim=8"], ids=str)
def test_spec_line_that_is_no_str_is_refused(line: Any) -> None:
    refused(
        lambda: attngen.AttentionSpec.parse(line), attngen.SpecError, repr(line), "head_dim=128"
    )


def test_spec_json_that_is_no_str_is_refused() -> None:
    refused(lambda: attngen.AttentionSpec.from_json(5), attngen.SpecError, "int", "spec.to_json()")


# ---- the same value in another type ---------------------------------------------------------


class Size(enum.IntEnum):
    SMALL = 16


class Layout(str, enum.Enum):
    HEADS_LAST = "bshd"


def test_numpy_and_subclassed_values_leave_no_trace_in_the_spec() -> None:
    spec = attngen.AttentionSpec(
        head_dim=np.int64(16),
        head_dim_v=Size.SMALL,
        dtype=np.dtype("float32"),
        causal=np.True_,
        window=[np.int32(3), np.uint8(0)],
        dropout_p=np.float32(0.5),
        softmax_scale=np.float64(0.25),
        softcap=np.int16(30),
        layout=Layout.HEADS_LAST,
        precision=np.str_("tf32"),
        deterministic=np.False_,
        batch_invariant=np.bool_(True),
        bias=np.False_,
    )
    plain = attngen.AttentionSpec(
        head_dim=16,
        dtype="float32",
        causal=True,
        window=(3, 0),
        dropout_p=0.5,
        softmax_scale=0.25,
        softcap=30.0,
        layout="bshd",
        precision="tf32",
        deterministic=False,
        batch_invariant=True,
    )
    assert spec.key == plain.key and spec.to_json() == plain.to_json() and spec == plain
    for name, value in plain.as_dict().items():
        assert type(getattr(spec, name)) is type(value), name
    assert str(attngen.Workload(*np.array([1, 4, 2, 8, 8]))) == "1,4,2,8,8"


def test_numpy_numbers_are_taken_by_calls() -> None:
    q, k, v = make_qkv(seqlen_q=6)
    options: dict[str, Any] = {"window": (3, 1), "softmax_scale": 0.5, "causal": True}
    call: dict[str, Any] = {"q_start": 2, "seqlen_q_total": 8, "partial": True, "return_lse": True}
    want = attngen.attention(q, k, v, **options, **call)
    got = attngen.attention(
        q,
        k,
        v,
        window=[np.int64(3), np.uint8(1)],
        softmax_scale=np.float32(0.5),
        causal=np.True_,
        q_start=np.int32(2),
        seqlen_q_total=np.int64(8),
        partial=np.True_,
        return_lse=np.True_,
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    seeded = [
        attngen.attention(q, k, v, dropout_p=p, dropout_seed=seed)
        for p, seed in ((0.5, 7), (np.float32(0.5), np.int64(7)))
    ]
    assert torch.equal(*seeded)


@pytest.mark.rotating
@pytest.mark.parametrize("side", [values.MAX_POSITION, 2**31, 2**63 - 1, 2**63, 10**30])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_window_beyond_every_row_is_an_open_one(side: int, causal: bool) -> None:
    q, k, v = make_qkv(seqlen_q=7, seqlen_k=9)
    window = (side, side)
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", causal=causal, window=window)
    assert attngen.AttentionSpec.parse(spec.key) == spec
    want = attngen.attention(q, k, v, causal=causal)
    for got in (
        attngen.attention(q, k, v, causal=causal, window=window),
        attngen.compile(spec)(q, k, v),
    ):
        assert_close([got], [want])
        assert_close(
            torch.autograd.grad(got.sum(), (q, k, v)),
            torch.autograd.grad(want.sum(), (q, k, v), retain_graph=True),
        )


@pytest.mark.parametrize(
    ("scale", "softcap"),
    [
        (values.SMALLEST, None),
        (-values.SMALLEST, values.LARGEST),
        (1.0, values.SMALLEST),
        (values.LARGEST, 1.0),
        (values.LARGEST, values.LARGEST),
        (0.0, values.SMALLEST),
    ],
)
def test_scales_at_the_limits_give_numbers(scale: float, softcap: float | None) -> None:
    q, k, v = make_qkv(seqlen_q=6)
    out, lse = attngen.attention(
        q, k, v, softmax_scale=scale, softcap=softcap, causal=True, return_lse=True
    )
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


# ---- arguments of one call ------------------------------------------------------------------

BAD_CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({"dropout_p": "0.1"}, "'0.1'", "write dropout_p=0.1"),
    ({"dropout_p": math.nan}, "nan", "from 0 to 1"),
    ({"dropout_p": False}, "False", "from 0 to 1"),
    ({"dropout_seed": 1.5}, "1.5", "an int or an int64 tensor"),
    ({"dropout_seed": True}, "True", "an int or an int64 tensor"),
    ({"dropout_seed": "7"}, "'7'", "write dropout_seed=7"),
    ({"dropout_seed": 2**64}, "18446744073709551616", "64 bits"),
    ({"dropout_seed": -(2**63) - 1}, "-9223372036854775809", "64 bits"),
    ({"dropout_seed": torch.tensor([1, 2])}, "(2,)", "int64 tensor of one element"),
    ({"q_start": 1.5}, "1.5", "an int from 0"),
    ({"q_start": "a"}, "'a'", "an int from 0"),
    ({"q_start": 0.0}, "0.0", "write q_start=0"),
    ({"q_start": False}, "False", "an int from 0"),
    ({"q_start": None}, "None", "0 is the first row"),
    ({"q_step": 0}, "got 0", "1 takes every row"),
    ({"seqlen_k_total": -1}, "-1", "the length of the whole sequence"),
    ({"k_start": torch.tensor(3)}, "tensor(3)", "an int from 0"),
    ({"k_start": 10**30}, "1000000", "to 1073741824"),
    ({"q_step": 1.0}, "1.0", "write q_step=1"),
    ({"k_step": -1}, "-1", "from 1"),
    ({"seqlen_q_total": -1}, "-1", "from 0"),
    ({"seqlen_k_total": "9"}, "'9'", "write seqlen_k_total=9"),
    ({"seqlen_q_total": 4}, "end at row 5", "length of the whole sequence"),
    ({"seqlen_k_total": 12, "k_start": 8}, "k_start=8", "end at row 13, beyond seqlen_k_total=12"),
    ({"seqlen_q_total": 12, "q_step": 3}, "q_step=3", "end at row 13, beyond seqlen_q_total=12"),
    ({"q_step": 2**30}, "q_step=1073741824", "beyond 1073741824, the most"),
    ({"batch_start": -1}, "-1", "leave it out where the call is whole"),
    ({"head_start": 1.5}, "1.5", "head_start must be an int from 0"),
    ({"head_start": 2**40}, "1099511627776", "to 1073741824"),
    ({"partial": 2}, "2", "True or False"),
    ({"partial": 1}, "1", "write partial=True"),
    ({"partial": None}, "None", "True or False"),
    ({"return_lse": "no"}, "'no'", "True or False"),
    ({"return_lse": 1}, "1", "write return_lse=True"),
    ({"return_aux": "lse"}, "'lse'", 'write ("lse",)'),
    ({"return_aux": True}, "True", 'write ("lse",)'),
    ({"return_aux": None}, "None", 'write ("lse",)'),
    ({"return_aux": np.array(["lse"])}, "'lse'", 'write ("lse",)'),
    ({"return_aux": (5,)}, "5", "lse, max_logit"),
    ({"return_aux": ("max_logits",)}, "'max_logits'", "did you mean 'max_logit'?"),
    ({"return_aux": ("lse",), "return_lse": True}, "('lse',)", 'return_aux=("lse",) alone'),
    ({"biaz": None}, "'biaz'", "did you mean 'bias'?"),
    ({"return_lsee": True}, "'return_lsee'", "did you mean 'return_lse'?"),
    ({"dropout": 0.1}, "'dropout'", "did you mean 'dropout_p'?"),
    ({"xyz": 1}, "'xyz'", "options: "),
]


@pytest.mark.parametrize("through", ["attention", "compile"])
@cases(*BAD_CALLS)
def test_call_argument_is_refused_before_a_kernel_runs(
    through: str, fields: dict[str, Any], value: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "forward", lambda *_: pytest.fail("a kernel ran"))
    attend = attngen.attention if through == "attention" else attngen.compile(SPEC)
    refused(lambda: attend(Q, Q, Q, **fields), attngen.SpecError, value, step)


@pytest.mark.parametrize("side", ["q", "k"])
def test_shard_of_a_bottom_right_call_needs_the_whole_length(side: str) -> None:
    call = {f"{side}_start": 3}
    pieces = (f"{side}_start=3", f"needs seqlen_{side}_total")
    refused(lambda: attngen.attention(Q, Q, Q, causal=True, **call), attngen.SpecError, *pieces)
    refused(lambda: attngen.attention(Q, Q, Q, window=(3, 0), **call), attngen.SpecError, *pieces)
    refused(lambda: attngen.compile(CAUSAL)(Q, Q, Q, **call), attngen.SpecError, *pieces)
    attngen.attention(Q, Q, Q, causal="top_left", **call)
    attngen.attention(Q, Q, Q, **call)
    attngen.attention(Q, Q, Q, causal=True, **call, **{f"seqlen_{side}_total": 8})


def test_unknown_arguments_name_the_option_of_their_own_call() -> None:
    refused(
        lambda: attngen.attention(Q, Q, Q, scale=1.0),
        attngen.SpecError,
        "'scale'",
        "did you mean 'softmax_scale'?",
    )
    refused(
        lambda: attngen.attention(Q, Q, Q, is_causal=True),
        attngen.SpecError,
        "did you mean 'causal'?",
    )
    refused(
        lambda: attngen.compile(SPEC)(Q, Q, Q, causal=True),
        attngen.SpecError,
        "'causal' belongs to the spec",
        "AttentionSpec(..., causal=...)",
    )
    refused(
        lambda: attngen.compile(SPEC, causal=True),
        attngen.SpecError,
        "causal=True",
        "attngen.compile(attngen.AttentionSpec(..., causal=True))",
    )
    refused(lambda: attngen.compile(SPEC, casual=True), attngen.SpecError, "did you mean 'causal'?")


@cases(
    ({"is_causal": "yes"}, "'yes'", "True or False"),
    ({"is_causal": 1}, "1", "write is_causal=True"),
    ({"enable_gqa": None}, "None", "leave enable_gqa out for its default"),
    ({"key": Q[:, :0], "value": Q[:, :0]}, "got 0 and 0, with 2 of query", "can be left out"),
    ({"scale": 1e39}, "scale must be", "1.2e-38"),
    ({"scale": "0.5"}, "'0.5'", "write scale=0.5"),
    ({"dropout_p": None}, "None", "from 0 to 1"),
    ({"key": [1]}, "got list", "torch.as_tensor(key)"),
    ({"query": np.zeros((1, 2, 5, 16))}, "numpy.ndarray", "torch.as_tensor(query)"),
    (
        {"query": Q.expand(2, 2, 5, 16), "key": Q.expand(3, 2, 5, 16)},
        "leading dims that are equal or 1",
        "expand them",
    ),
    ({"key": Q[0, 0, 0]}, "key must have at least 2 dims", ".unsqueeze(0)"),
    ({"attn_mask": Q[0, :, :, :5, None]}, "attn_mask must be broadcastable", "1 or full"),
)
def test_sdpa_argument_is_refused(fields: dict[str, Any], value: str, step: str) -> None:
    call = {"query": Q, "key": Q, "value": Q, **fields}
    refused(lambda: attngen.sdpa(**call), attngen.SpecError, value, step)


def test_sdpa_compares_leading_dims_one_by_one() -> None:
    q, k = torch.randn(2, 3, 1, 4, 16), torch.randn(3, 2, 1, 4, 16)
    refused(lambda: attngen.sdpa(q, k, k), attngen.SpecError, "(3, 2, 1, 4, 16)", "expand them")


# ---- q, k and v -----------------------------------------------------------------------------


BAD_KINDS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "numpy": (Q.numpy, "numpy.ndarray", "torch.as_tensor"),
    "list": (Q.tolist, "got list", "torch.as_tensor"),
    "none": (lambda: None, "NoneType", "pass one"),
    "str": (lambda: "q", "got str", "pass one"),
    "coo": (Q.to_sparse, "torch.sparse_coo", ".to_dense()"),
    "csr": (Q.to_sparse_csr, "torch.sparse_csr", ".to_dense()"),
    "nested": (
        lambda: torch.nested.nested_tensor([Q[0], Q[0]], layout=torch.jagged),
        "nested",
        "to_padded_tensor",
    ),
    "nested-strided": (
        lambda: torch.nested.nested_tensor([Q[0], Q[0]]),
        "nested",
        "to_padded_tensor",
    ),
}


@pytest.mark.rotating
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize(("make", "value", "step"), BAD_KINDS.values(), ids=BAD_KINDS)
def test_what_is_no_dense_tensor_is_refused(
    make: Callable[[], Any], value: str, step: str, which: int, layout: str
) -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", layout=layout)
    attn = attngen.compile(spec)
    attn(Q, Q, Q)  # a sparse tensor of a shape that passed before is still refused
    tensors = [Q, Q, Q]
    tensors[which] = make()
    refused(lambda: attn(*tensors), attngen.SpecError, value, step)
    refused(lambda: attngen.attention(*tensors, layout=layout), attngen.SpecError, value, step)
    refused(lambda: attn.explain(*tensors), attngen.SpecError, value, step)


@pytest.mark.parametrize("shape", [(), (5,), (5, 16), (2, 5, 16), (1, 1, 2, 5, 16)], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_other_than_four_dims_are_refused_with_the_callers_shape(
    shape: tuple[int, ...], layout: str
) -> None:
    x = torch.randn(shape)
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", layout=layout)
    for attend in (
        lambda: attngen.attention(x, x, x, layout=layout),
        lambda: attngen.compile(spec)(x, x, x),
    ):
        refused(attend, attngen.SpecError, f"4 dims, got shape {shape}", ".unsqueeze()")


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_meta_tensors_are_refused(autocast: bool) -> None:
    q = torch.empty(1, 2, 5, 16, device="meta")
    attn = attngen.compile(CAUSAL)
    with torch.autocast("cpu", enabled=autocast):
        for attend in (attngen.attention, attn, attn.explain):
            for tensors in ((q, q, q), (q, Q, q), (Q, q, q)):
                refused(lambda a=attend, t=tensors: a(*t), attngen.SpecError, "meta", "device")


def test_fake_and_symbolic_tensors_are_taken() -> None:
    attn = attngen.compile(CAUSAL)
    with FakeTensorMode():
        q = torch.randn(1, 2, 5, 16)
        assert attn(q, q, q).shape == q.shape
        assert attngen.attention(q, q, q, window=(3, 0)).shape == q.shape

    def attend(q: Tensor) -> Tensor:
        rows = q.shape[2]  # a SymInt
        return attngen.attention(
            q, q, q, causal=True, window=(rows, 0), seqlen_q_total=rows, seqlen_k_total=rows
        )

    traced = make_fx(attend, tracing_mode="symbolic")(Q)
    assert_close([traced(Q)], [attend(Q)])


# ---- torch.compile --------------------------------------------------------------------------


def test_symbolic_ints_pass_in_one_graph() -> None:
    def attend(q: Tensor, left: int, start: int, total: int, seed: int) -> Any:
        return attngen.attention(
            q,
            q,
            q,
            causal=True,
            window=(left, 0),
            softmax_scale=np.float32(0.5),
            softcap=3,
            dropout_p=0.2,
            dropout_seed=seed,
            q_start=start,
            k_start=start,
            seqlen_q_total=total,
            seqlen_k_total=total,
            batch_start=start,
            head_start=start,
            return_lse=True,
        )

    torch._dynamo.reset()
    counters.clear()
    fast = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows, numbers in ((17, (5, 3, 40, 7)), (33, (9, 6, 50, 2**40)), (20, (2**40, 2, 64, 3))):
        q = torch.randn(1, 2, rows, 16)
        assert_close(fast(q, *numbers), attend(q, *numbers))
    assert counters["stats"]["unique_graphs"] == 2  # a window that is cut has its own


@pytest.mark.slow
def test_symbolic_floats_pass() -> None:
    def attend(q: Tensor, scale: float, cap: float, p: float) -> Any:
        call = {"dropout_p": p, "dropout_seed": 3, "return_lse": True}
        return (
            *attngen.attention(q, q, q, softmax_scale=scale, softcap=cap, **call),
            *attngen.compile(SPEC)(q, q, q, **call),
        )

    torch._dynamo.reset()
    fast = torch.compile(attend, backend="aot_eager", dynamic=True)
    for numbers in ((0.5, 3.0, 0.2), (-0.7, 5.0, 0.3), (2, 4, 1), (0.0, 1.5, 0.0)):
        assert_close(fast(Q, *numbers), attend(Q, *numbers))


# ---- Attention objects ----------------------------------------------------------------------


def test_equal_specs_make_equal_attentions() -> None:
    attn, same, other = (attngen.compile(s) for s in (SPEC, copy.copy(SPEC), CAUSAL))
    assert attn == same and hash(attn) == hash(same) and attn != other
    assert attn != SPEC and len({attn, same, other}) == 2
    assert repr(attn) == repr(same) != repr(other)


@pytest.mark.parametrize(
    "again",
    [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy],
    ids=["pickle", "copy", "deepcopy"],
)
def test_copies_of_specs_and_attentions_are_equal_and_work(again: Callable[[Any], Any]) -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", window=(3, None), softcap=2.5)
    assert again(spec) == spec and again(spec).key == spec.key
    attn = attngen.compile(spec)
    made = again(attn)
    assert made == attn and repr(made) == repr(attn)
    assert torch.equal(made(Q, Q, Q), attn(Q, Q, Q))
    module = torch.nn.Module()
    module.attend = attn
    assert again(module).attend == attn


@pytest.mark.parametrize("direction", ["sideways", "FWD", None, 5, ["fwd"]], ids=str)
def test_unknown_direction_lists_the_allowed_ones(direction: Any) -> None:
    pieces = (repr(direction), "'fwd', 'bwd' or 'decode'")
    attn = attngen.compile(SPEC)
    refused(lambda: attn.source(direction), attngen.SpecError, *pieces)
    refused(lambda: attn.explain(Q, Q, Q).source(direction), attngen.SpecError, *pieces)


@cases(
    ({"workload": (1, 2, 2, 5, 5)}, "(1, 2, 2, 5, 5)", "attngen.Workload(batch"),
    ({"workload": "1,2,2,5,5"}, "'1,2,2,5,5'", "attngen.Workload(batch"),
    ({"workload": 0}, "got 0", "attngen.Workload(batch"),
)
def test_source_refuses_what_is_no_workload(fields: dict[str, Any], value: str, step: str) -> None:
    refused(lambda: attngen.compile(SPEC).source(**fields), attngen.SpecError, value, step)


@pytest.mark.parametrize("size", [1.0, "8", True, -1, None], ids=repr)
def test_workload_refuses_what_is_no_size(size: Any) -> None:
    refused(lambda: attngen.Workload(1, 2, 2, size, 8), attngen.SpecError, repr(size), "from 0 up")
    refused(lambda: attngen.Workload.parse(8), attngen.SpecError, "8", "4,32,8,4096,4096")


# ---- merge and dropout_keep -----------------------------------------------------------------

OUT, LSE = torch.ones(1, 2, 5, 8), torch.ones(1, 2, 5)


@pytest.mark.parametrize(
    ("changed", "kind", "value", "step"),
    [
        ({"out_b": OUT.numpy()}, attngen.SpecError, "numpy.ndarray", "torch.as_tensor(out_b)"),
        ({"lse_a": None}, attngen.SpecError, "NoneType", "lse_a must be a torch.Tensor"),
        ({"out_a": OUT.to_sparse()}, attngen.SpecError, "torch.sparse_coo", "out_a.to_dense()"),
        ({"lse_b": LSE.int()}, attngen.DtypeError, "torch.int32", "float32"),
        ({"lse_a": LSE.bfloat16()}, attngen.DtypeError, "torch.bfloat16", "float32"),
        ({"out_a": OUT.int()}, attngen.DtypeError, "torch.int32", ".float()"),
        ({"lse_b": LSE.to("meta")}, attngen.SpecError, "lse_b is on meta", ".to(out_a.device)"),
        ({"lse_b": LSE[0]}, attngen.SpecError, "(2, 5)", "one shape"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_merge_argument_is_refused(
    changed: dict[str, Any], kind: type[Exception], value: str, step: str
) -> None:
    call = {"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE, **changed}
    refused(lambda: attngen.merge(**call), kind, value, step)


@cases(
    ({"seed": 1.5}, "1.5", "an int or an int64 tensor"),
    ({"seed": True}, "True", "an int or an int64 tensor"),
    ({"seed": None}, "None", "must be an int"),
    ({"seed": 2**64}, "18446744073709551616", "64 bits"),
    ({"seed": torch.tensor([1, 2])}, "(2,)", "of one element"),
    ({"seed": torch.tensor(1.0)}, "torch.float32", "int64"),
    ({"batch": -1}, "-1", "batch must be an int from 0"),
    ({"heads": 2.0}, "2.0", "write heads=2"),
    ({"seqlen_q": "4"}, "'4'", "write seqlen_q=4"),
    ({"seqlen_k": None}, "None", "an int from 0"),
    ({"seqlen_k": True}, "True", "an int from 0"),
    ({"dropout_p": "0.1"}, "'0.1'", "write dropout_p=0.1"),
    ({"dropout_p": None}, "None", "from 0 to 1"),
)
def test_dropout_keep_argument_is_refused(fields: dict[str, Any], value: str, step: str) -> None:
    call = dict(seed=7, batch=1, heads=2, seqlen_q=4, seqlen_k=5, dropout_p=0.5)
    refused(lambda: attngen.dropout_keep(**{**call, **fields}), attngen.SpecError, value, step)
    attngen.dropout_keep(**{name: np.asarray(value)[()] for name, value in call.items()})
