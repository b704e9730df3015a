"""The public functions: what they refuse and how they say it, SDPA's meaning, dropout, scales."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import assert_close, assert_exact, make_qkv
from torch import Tensor
from torch.nn import functional as F

import attngen

SPEC = attngen.AttentionSpec(head_dim=16, dtype="float32")


def _call(**changes: Callable[[Tensor], Tensor] | Any) -> Callable[[Any], Any]:
    """A call with some of q, k, v changed (functions), or options added (values)."""

    def call(attend: Any) -> Any:
        tensors = dict(zip("qkv", make_qkv(heads=4, heads_kv=2, seqlen_q=5), strict=True))
        options = {}
        for name, change in changes.items():
            if name in tensors:
                tensors[name] = change(tensors[name].detach())
            else:
                options[name] = change
        return attend(*tensors.values(), **options)

    return call


# name: (call, the error, the value it names, what is allowed or the next step)
BAD_TENSORS: dict[str, tuple[Callable[[Any], Any], type[Exception], str, str]] = {
    "dtype-of-v": (_call(v=Tensor.half), TypeError, "torch.float16", "cast them, use autocast"),
    "dtype-int": (
        _call(q=Tensor.int, k=Tensor.int, v=Tensor.int),
        attngen.SpecError,
        "int32",
        "float",
    ),
    "three-dims": (_call(q=lambda q: q[0]), attngen.SpecError, "(4, 5, 16)", "4 dims"),
    "device": (_call(k=lambda k: k.to("meta")), attngen.SpecError, "meta", ".to(q.device)"),
    "head-ratio": (
        _call(q=lambda q: q[:, :3]),
        attngen.SpecError,
        "3 and 2",
        "check the layout (bhsd or bshd), or pad the kv heads",
    ),
    "no-kv-heads": (
        _call(k=lambda k: k[:, :0], v=lambda v: v[:, :0]),
        attngen.SpecError,
        "got 0, with 4 of q",
        "or leave the call out",
    ),
    "batch": (
        _call(k=lambda k: k.repeat(2, 1, 1, 1)),
        attngen.SpecError,
        "1, 2, 1",
        "give a shared one the others' with .expand()",
    ),
    "k-v-lengths": (
        _call(v=lambda v: v[:, :, :4]),
        attngen.SpecError,
        "(1, 2, 4, 16)",
        "cut them to one length",
    ),
    "head-dim-of-k": (_call(k=lambda k: k[..., :8]), attngen.SpecError, "8", "pad one with zeros"),
    "unknown-argument": (_call(biaz=None), attngen.SpecError, "'biaz'", "options: "),
    "dropout-above-1": (_call(dropout_p=1.5), attngen.SpecError, "1.5", "from 0 to 1"),
    "dropout-negative": (_call(dropout_p=-0.1), attngen.SpecError, "-0.1", "from 0 to 1"),
    "dropout-nan": (_call(dropout_p=math.nan), attngen.SpecError, "nan", "from 0 to 1"),
    "seed-dtype": (
        _call(dropout_p=0.5, dropout_seed=torch.tensor([1.0])),
        attngen.SpecError,
        "torch.float32",
        "an int or an int64 tensor of one element",
    ),
    "seed-shape": (
        _call(dropout_p=0.5, dropout_seed=torch.tensor([1, 2])),
        attngen.SpecError,
        "(2,)",
        "an int or an int64 tensor of one element",
    ),
    "seed-device": (
        _call(dropout_p=0.5, dropout_seed=torch.ones(1, dtype=torch.int64, device="meta")),
        attngen.SpecError,
        "meta",
        ".to(q.device)",
    ),
    "step-zero": (_call(q_step=0), attngen.SpecError, "q_step must be an int from 1", "got 0"),
    "start-negative": (
        _call(k_start=-2),
        attngen.SpecError,
        "k_start must be an int from 0",
        "got -2",
    ),
    "aux-unknown": (_call(return_aux=("max",)), attngen.SpecError, "'max'", "lse, max_logit"),
    "aux-far": (_call(return_aux=("foo",)), attngen.SpecError, "'foo'", "leave return_aux out"),
}


def _says(error: BaseException, *pieces: str) -> None:
    message = str(error)
    assert "\n" not in message, "errors are one line"
    for piece in pieces:
        assert piece in message, message


@pytest.mark.parametrize("through", ["attention", "compile"])
@pytest.mark.parametrize(("call", "kind", "value", "step"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_call_names_the_value_and_the_next_step(
    call: Callable[[Any], Any], kind: type[Exception], value: str, step: str, through: str
) -> None:
    attend = attngen.compile(SPEC) if through == "compile" else attngen.attention
    with pytest.raises(kind) as raised:
        call(attend)
    assert isinstance(raised.value, (attngen.SpecError, ValueError))
    _says(raised.value, value, step)


# Options that a spec settles: attention() alone takes them.
BAD_OPTIONS = {
    "window-negative": (_call(window=(-1, -3)), "-1", "None is the only way to say 'no limit'"),
    "window-right": (_call(window=(None, -3)), "-3", "None is the only way to say 'no limit'"),
    "scale-nan": (_call(softmax_scale=math.nan), "nan", "None means 1/sqrt(head_dim)"),
    "softcap-zero": (_call(softcap=0.0), "0.0", "None switches it off"),
    "softcap-negative": (_call(softcap=-1.0), "-1.0", "positive number"),
    "causal": (_call(causal="bottom"), "'bottom'", "bottom_right"),
    "layout": (_call(layout="bdhs"), "'bdhs'", "bhsd"),
    "precision": (_call(precision="fp32"), "'fp32'", "'ieee', 'tf32'"),
}


@pytest.mark.parametrize(("call", "value", "step"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_option_names_the_value_and_the_next_step(
    call: Callable[[Any], Any], value: str, step: str
) -> None:
    with pytest.raises(ValueError) as raised:
        call(attngen.attention)
    assert isinstance(raised.value, attngen.SpecError)
    _says(raised.value, value, step)


def test_tensor_that_does_not_fit_the_compiled_spec_is_refused() -> None:
    q, k, v = make_qkv(dim=32)
    with pytest.raises(attngen.SpecError) as raised:
        attngen.compile(SPEC)(q, k, v)
    _says(raised.value, "q has head dim 32 but the spec says 16", "head_dim=32")
    q, k, v = make_qkv(dtype=torch.float16)
    with pytest.raises(TypeError) as raised:
        attngen.compile(SPEC)(q, k, v)
    _says(raised.value, "must all be float32", "float16", "compile a spec of that dtype")


def test_compile_refuses_what_is_no_spec() -> None:
    with pytest.raises(attngen.SpecError) as raised:
        attngen.compile("head_dim=64")
    _says(raised.value, "str", "attngen.AttentionSpec(head_dim=128, causal=True)")


def test_op_refuses_a_dtype_and_a_device_it_was_not_made_for() -> None:
    """The last guard, for callers of torch.ops who bypass the API."""
    q, k, v = (x.detach() for x in make_qkv())
    lists = ([], [0.25], [0])
    with pytest.raises(TypeError, match="q is torch.float16 but the spec says dtype=float32"):
        torch.ops.attngen.fwd(SPEC.text_key, q.half(), k, v, *lists)


# ---- SDPA -----------------------------------------------------------------------------------

SDPA_CALLS = {
    "three-dims": (((3, 9, 16), (3, 11, 16)), {}),
    "four-dims": (((2, 3, 9, 16), (2, 3, 11, 16)), {}),
    "five-dims": (((2, 2, 3, 9, 16), (2, 2, 3, 11, 16)), {}),
    "causal-more-keys": (((1, 2, 9, 16), (1, 2, 13, 16)), {"is_causal": True}),
    "causal-more-queries": (((1, 2, 13, 16), (1, 2, 9, 16)), {"is_causal": True}),
    "scale": (((1, 2, 9, 16), (1, 2, 9, 16)), {"scale": 0.7}),
    "scale-negative": (((1, 2, 9, 16), (1, 2, 9, 16)), {"scale": -0.7}),
    "gqa": (((2, 6, 9, 16), (2, 2, 9, 16)), {"enable_gqa": True}),
    "gqa-five-dims": (((2, 2, 6, 9, 16), (2, 2, 2, 9, 16)), {"enable_gqa": True}),
}


@pytest.mark.parametrize(("shapes", "options"), SDPA_CALLS.values(), ids=SDPA_CALLS)
def test_sdpa_means_what_torch_means(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], options: dict[str, Any]
) -> None:
    q, k, v = (torch.randn(s).requires_grad_() for s in (shapes[0], shapes[1], shapes[1]))
    got = attngen.sdpa(q, k, v, **options)
    want = F.scaled_dot_product_attention(q, k, v, **options)
    do = torch.randn(want.shape)
    assert_close([got], [want])
    assert_close(torch.autograd.grad(got, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do))


def test_sdpa_refuses_grouped_heads_without_enable_gqa() -> None:
    q, k, v = make_qkv(heads=4, heads_kv=2)
    with pytest.raises(attngen.SpecError) as raised:
        attngen.sdpa(q, k, v)
    _says(raised.value, "4 heads and key 2", "enable_gqa=True")


def test_sdpa_refuses_tensors_of_one_dim() -> None:
    q, k, v = make_qkv()
    with pytest.raises(attngen.SpecError, match=r"at least 2 dims, got shape \(16,\)"):
        attngen.sdpa(q[0, 0, 0], k[0, 0], v[0, 0])


def test_sdpa_drops_whenever_p_is_given() -> None:
    q, k, _ = make_qkv(seqlen_q=16)
    dropped = attngen.sdpa(q, k, torch.eye(16).expand(1, 2, 16, 16), dropout_p=0.5)
    assert 0.3 < (dropped == 0).float().mean() < 0.7


# ---- scales ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, -0.5, 2, 1e-3], ids=["zero", "negative", "int", "small"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
def test_any_finite_scale_is_legal(scale: float, softcap: float | None) -> None:
    options = {"softmax_scale": scale, "softcap": softcap, "causal": True}
    q, k, v = make_qkv(seqlen_k=25)
    assert_exact(lambda *x: attngen.attention(*x, return_lse=True, **options), q, k, v, options)


def test_scale_zero_gives_zero_gradients_to_q_and_k() -> None:
    q, k, v = make_qkv(seqlen_q=6)
    out = attngen.attention(q, k, v, softmax_scale=0.0)
    assert_close([out], [v.mean(2, keepdim=True).expand_as(out)], atol=1e-6)
    dq, dk, _ = torch.autograd.grad(out.sum(), (q, k, v))
    assert not dq.any() and not dk.any()


# ---- dropout --------------------------------------------------------------------------------


def _mask_of(p: float, **options: Any) -> Tensor:
    """The mask of one call, seen as zeros of out where v is the identity."""
    q, k, _ = make_qkv(heads=4, seqlen_q=64)
    out: Tensor = attngen.attention(
        q, k, torch.eye(64).expand(1, 4, 64, 64), dropout_p=p, **options
    )
    return out != 0


def test_dropout_draws_anew_and_repeats_under_one_seed() -> None:
    torch.manual_seed(0)
    first, second = _mask_of(0.5), _mask_of(0.5)
    torch.manual_seed(0)
    again = _mask_of(0.5)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
    other = torch.equal(_mask_of(0.5, dropout_seed=1), _mask_of(0.5, dropout_seed=2))
    assert not other


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_its_share(p: float) -> None:
    kept = _mask_of(p, dropout_seed=31).float().mean().item()
    four_sigma = 4 * math.sqrt(p * (1 - p) / (4 * 64 * 64))
    assert abs(kept - (1 - p)) < four_sigma


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**64 - 1, -1])
def test_dropout_seed_may_be_any_64_bit_int_or_a_tensor(seed: int) -> None:
    signed = (seed + 2**63) % 2**64 - 2**63
    from_int = _mask_of(0.4, dropout_seed=seed)
    assert torch.equal(from_int, _mask_of(0.4, dropout_seed=torch.tensor(signed)))
    assert torch.equal(from_int, attngen.dropout_keep(seed, 1, 4, 64, 64, 0.4))


def test_dropout_is_overridden_for_evaluation() -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", dropout_p=0.4)
    attn, plain = attngen.compile(spec), attngen.compile(SPEC)
    q, k, v = make_qkv()
    assert torch.equal(attn(q, k, v, dropout_p=0.0), plain(q, k, v))
    assert not torch.equal(attn(q, k, v), plain(q, k, v))
    wanted = attngen.attention(q, k, v, dropout_p=0.2, dropout_seed=3)
    assert torch.equal(plain(q, k, v, dropout_p=0.2, dropout_seed=3), wanted)


def test_dropout_keep_refuses_what_is_no_probability() -> None:
    with pytest.raises(attngen.SpecError, match="from 0 to 1, got 1.5"):
        attngen.dropout_keep(0, 1, 1, 4, 4, 1.5)


# ---- what comes back ------------------------------------------------------------------------


def test_results_on_request() -> None:
    q, k, v = make_qkv(dtype=torch.bfloat16)
    out, lse = attngen.attention(q, k, v, return_lse=True)
    again, aux = attngen.attention(q, k, v, return_aux=("lse",))
    assert torch.equal(out, again) and torch.equal(aux["lse"], lse)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    part = attngen.attention(q, k, v, partial=True)
    assert part.dtype == torch.float32
    assert torch.equal(part.bfloat16(), out)


def test_explain_and_source_name_the_kernel_that_runs() -> None:
    attn = attngen.compile(SPEC)
    q, k, v = make_qkv()
    explained = attn.explain(q, k, v)
    data = explained.as_dict()
    assert [choice["direction"] for choice in data["choices"]] == ["fwd", "bwd"]
    assert data["workload"] == "1,2,2,20,20"
    assert data["choices"][0]["tier"] == "default"
    assert data["choices"][0]["file"].startswith("fwd__float32_d16__")
    assert "chosen   from default" in str(explained)
    text = explained.source("fwd")
    assert text.startswith('"""Attention forward: float32, head_dim 16')
    assert "def launch(" in attn.source("bwd")


def test_explain_says_that_a_tensor_is_copied() -> None:
    q, k, v = make_qkv()
    wide = q.detach().repeat_interleave(2, 3)[..., ::2]
    assert "q is copied: its strides (1280, 640, 32, 2) are not 1" in str(
        attngen.compile(SPEC).explain(wide, k, v)
    )


def test_repr_is_readable() -> None:
    assert repr(attngen.compile(SPEC)) == (
        "attngen.compile(head_dim=16,dtype=float32,deterministic=false)"
    )


def test_causal_spelled_as_an_int_is_refused_whatever_was_called_before() -> None:
    q = torch.randn(1, 1, 4, 16)
    attngen.attention(q, q, q, causal=True)
    for spelled in (0, 1):
        with pytest.raises(attngen.SpecError, match="causal must be one of"):
            attngen.attention(q, q, q, causal=spelled)


def test_a_learned_scale_is_refused_with_the_way_out() -> None:
    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(attngen.SpecError, match="multiply q"):
        attngen.attention(q, q, q, softmax_scale=torch.nn.Parameter(torch.tensor(0.3)))


def test_errors_survive_pickling() -> None:
    error = attngen.UnsupportedSpecError(["a", "b"])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.reasons == ("a", "b")
