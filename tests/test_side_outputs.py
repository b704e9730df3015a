"""return_aux: lse, the largest score, column sums of P and its entropy, beside the oracle's P."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, make_qkv, oracle, oracle_options, python
from torch import Tensor

import attngen
from attngen import gpu, hopper
from attngen.config import FwdConfig
from attngen.identity import parsed
from attngen.pinned import pinned
from attngen.render import render
from attngen.side_outputs import side_memory
from attngen.tuner.gate import SmallGate

ALL = ("lse", "max_logit", "col_sum", "entropy")
HEADS, ROWS, KEYS = 2, 17, 21
INF = math.inf


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Tiles of 16 by 16, so that short sequences span several."""
    with pinned({"fwd": SMALL_FWD, "bwd": SMALL_BWD}):
        yield


def qkv(dtype: torch.dtype = torch.float32, **sizes: int) -> tuple[Tensor, Tensor, Tensor]:
    usual = {"batch": 2, "heads": HEADS, "heads_kv": 1, "seqlen_q": ROWS, "seqlen_k": KEYS}
    q, k, v = make_qkv(**{**usual, **sizes}, dtype=dtype)
    return q, k, v


def right(
    q: Tensor, k: Tensor, v: Tensor, scores: dict[str, Tensor], options: dict[str, Any]
) -> dict[str, Tensor]:
    named = oracle_options(options, q, k)
    found = oracle.attention(q, k, v, **scores, **named, return_probs=True)
    p, total = found.probs, found.lse
    if "sinks" in scores:
        total = torch.logaddexp(total, scores["sinks"].double()[:, None])
    return {
        "lse": found.lse,
        "max_logit": torch.where(p > 0, p.log() + total[..., None], -INF).amax((2, 3)),
        "col_sum": p.sum(2),
        "entropy": torch.special.entr(p).sum(3),
    }


def check(
    q: Tensor, k: Tensor, v: Tensor, scores: dict[str, Tensor] | None = None, **options: Any
) -> None:
    scores = scores or {}
    q, k, v = (x.detach() for x in (q, k, v))
    out, found = attngen.attention(q, k, v, return_aux=ALL, **scores, **options)
    assert torch.equal(out, attngen.attention(q, k, v, **scores, **options))
    assert tuple(found) == ALL
    for name, want in right(q, k, v, scores, options).items():
        got = found[name]
        assert got.dtype == torch.float32 and got.is_contiguous()
        torch.testing.assert_close(
            got.double(), want, atol=3e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": "top_left"},
    "window": {"window": (4, 3)},
    "causal-window-softcap": {"causal": True, "window": (6, 0), "softcap": 2.0},
    "chunk": {"chunk": 7},
    "negative-scale": {"softmax_scale": -2.0},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 11, "causal": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_side_outputs(options: dict[str, Any], dtype: torch.dtype) -> None:
    check(*qkv(dtype), **options)


@pytest.mark.parametrize(
    "sizes",
    [
        {"seqlen_q": 33, "seqlen_k": 9},
        {"heads": 4, "heads_kv": 2, "dim": 40, "dim_v": 8},
        {"seqlen_q": 1},
    ],
    ids=["rows-that-see-nothing", "gqa", "one-query"],
)
def test_sizes(sizes: dict[str, int]) -> None:
    check(*qkv(**sizes), causal=True)


def test_terms() -> None:
    bias = torch.randn(1, HEADS, ROWS, KEYS)
    bias[..., 5] = -INF
    bias[:, :, 3] = -INF
    slopes, sinks = torch.tensor([0.3, 0.1]), torch.tensor([0.5, 2.0])
    check(*qkv(), {"bias": bias, "alibi_slopes": slopes, "sinks": sinks}, causal=True)
    check(*qkv(), {"sinks": sinks})
    mask = torch.rand(2, 1, ROWS, KEYS) < 0.7
    check(*qkv(), attn_mask=mask)


def test_a_sink_that_takes_all_leaves_no_entropy() -> None:
    q, k, v = (x.detach() for x in qkv())
    sinks = torch.tensor([300.0, INF])
    _, found = attngen.attention(q, k, v, sinks=sinks, return_aux=ALL)
    assert not found["entropy"].any() and not found["col_sum"].any()
    assert torch.isfinite(found["max_logit"]).all()


def test_large_scores() -> None:
    """The careful pass, too, which large scores ask for."""
    q, k, v = (x.detach() for x in qkv(torch.bfloat16))
    q, k = q * 300, k * 300
    _, found = attngen.attention(q, k, v, return_aux=ALL)
    for name, want in right(q, k, v, {}, {}).items():
        near = 2e-2 if name == "col_sum" else 1e-4  # from lse, of which float32 holds few digits
        torch.testing.assert_close(found[name].double(), want, atol=near, rtol=near)


def test_nan_behind_masks_does_not_leak() -> None:
    q, k, v = (x.detach() for x in qkv(seqlen_q=KEYS))
    q = q[:, :, :9]  # which see the first 9 keys at most
    _, want = attngen.attention(q, k, v, causal="top_left", return_aux=ALL)
    for spoiled in (k, v):
        kept = spoiled[:, :, 9:].clone()
        spoiled[:, :, 9:] = math.nan
        _, found = attngen.attention(q, k, v, causal="top_left", return_aux=ALL)
        spoiled[:, :, 9:] = kept
        for name in ALL:
            torch.testing.assert_close(found[name], want[name])
    assert not want["col_sum"][..., 9:].any()


def test_every_subset_in_every_order() -> None:
    q, k, v = (x.detach() for x in qkv())
    _, whole = attngen.attention(q, k, v, return_aux=ALL)
    for names in (("entropy",), ("col_sum", "lse"), ["entropy", "max_logit"]):
        _, found = attngen.attention(q, k, v, return_aux=names)
        assert tuple(found) == tuple(names)
        for name in names:
            assert torch.equal(found[name], whole[name])


def test_layout_and_compiled_specs() -> None:
    q, k, v = (x.detach() for x in qkv())
    _, want = attngen.attention(q, k, v, return_aux=ALL)
    turned = [x.transpose(1, 2) for x in (q, k, v)]
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", layout="bshd")
    out, found = attngen.compile(spec)(*turned, return_aux=ALL)
    assert out.shape == (2, ROWS, HEADS, 16)
    for name in ALL:
        assert torch.equal(found[name], want[name])
    attend = attngen.compile(replace(spec, aux=("entropy", "lse", "max_logit")))
    assert attend.spec.aux == ("max_logit", "entropy")
    _, found = attend(*turned)
    assert list(found) == ["max_logit", "entropy"] and torch.equal(
        found["entropy"], want["entropy"]
    )


def test_gradients_are_those_without_side_outputs_and_none_of_them_has_one() -> None:
    q, k, v = qkv()
    out, found = attngen.attention(q, k, v, causal=True, return_aux=ALL)
    assert found["lse"].requires_grad
    assert not any(found[name].requires_grad for name in ALL[1:])
    loss = out.square().sum() + found["lse"].sin().sum()
    got = torch.autograd.grad(loss, (q, k, v))
    out, lse = attngen.attention(q, k, v, causal=True, return_lse=True)
    want = torch.autograd.grad(out.square().sum() + lse.sin().sum(), (q, k, v))
    for a, w in zip(got, want, strict=True):
        assert torch.equal(a, w)


@pytest.mark.filterwarnings("ignore")  # torch's own, while it traces
def test_torch_compile_with_gradients() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, aux = attngen.attention(q, k, v, causal=True, return_aux=("entropy", "max_logit"))
        return out, aux["entropy"], aux["max_logit"]

    q, k, v = qkv()
    want = run(q, k, v)
    got = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")(q, k, v)
    for a, w in zip(got, want, strict=True):
        assert torch.equal(a, w)
    grads = [torch.autograd.grad(x[0].square().sum(), (q, k, v)) for x in (got, want)]
    for a, w in zip(*grads, strict=True):
        assert torch.equal(a, w)


def test_opcheck_and_vmap() -> None:
    q, k, v = (x.detach() for x in qkv())
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", aux=ALL)
    torch.library.opcheck(
        torch.ops.attngen.fwd.default,
        (spec.text_key, q, k, v, [], [0.25], [0]),
        test_utils=("test_schema", "test_faketensor"),
    )
    _, want = attngen.attention(q, k, v, return_aux=ALL)

    def one(*x: Tensor) -> dict[str, Tensor]:
        return attngen.attention(*(y[None] for y in x), return_aux=ALL)[1]

    found = torch.func.vmap(one)(q, k, v)
    for name in ALL:
        torch.testing.assert_close(found[name].squeeze(1), want[name])


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0)])
def test_empty_calls(rows: int, keys: int) -> None:
    q, k, v = (x.detach() for x in qkv(seqlen_q=rows, seqlen_k=keys))
    _, found = attngen.attention(q, k, v, return_aux=ALL)
    assert found["max_logit"].shape == (2, HEADS) and (found["max_logit"] == -INF).all()
    assert found["col_sum"].shape == (2, HEADS, keys) and not found["col_sum"].any()
    assert found["entropy"].shape == (2, HEADS, rows) and not found["entropy"].any()


def test_specs_name_them_and_texts_without_them_are_as_before() -> None:
    spec = attngen.AttentionSpec(head_dim=64, causal=True, aux=("entropy", "max_logit"))
    assert spec.outputs == ("out", "lse", "max_logit", "entropy")
    assert spec.text_key.endswith("aux=max_logit:entropy")
    assert parsed(spec.text_key).text_key == spec.text_key
    assert attngen.AttentionSpec.from_json(spec.to_json()) == spec
    bare = replace(spec, aux=())
    assert spec.served_as("bwd") == bare and "aux" not in bare.text_key
    config = FwdConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)
    assert "entropy" in render(spec, config)
    assert not any(word in render(bare, config) for word in ("entropy", "row_max", "col_sum"))


@pytest.mark.parametrize("tiles", ["pointer", "descriptor"])
def test_the_tuners_gate_judges_them(tiles: Any) -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", causal=True, sinks=True, aux=ALL)
    gate = SmallGate(spec, "fwd", 2, "cpu")
    verdict = gate.check(replace(SMALL_FWD, block_m=64, block_n=64, tiles=tiles))
    assert verdict.ok, verdict.detail
    assert set(gate.cases[0].results(SMALL_FWD)) == {"out", "lse", *ALL}


def test_what_cannot_be_combined_says_so() -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(attngen.SpecError, match="return_aux must name .*'entropie'.*entropy"):
        attngen.attention(q, k, v, return_aux=("entropie",))
    with pytest.raises(attngen.SpecError, match="exclude each other"):
        attngen.attention(q, k, v, return_lse=True, return_aux=("entropy",))
    with pytest.raises(attngen.SpecError, match="aux must name"):
        attngen.AttentionSpec(head_dim=16, aux=("maximum",))
    with pytest.raises(attngen.SpecError, match="aux must be a tuple"):
        attngen.AttentionSpec(head_dim=16, aux=3)
    fp8 = {"dtype": "float8_e5m2", "fp8_scale": "tensor"}
    with pytest.raises(attngen.UnsupportedSpecError, match="col_sum with FP8"):
        attngen.AttentionSpec(head_dim=16, aux=("col_sum",), **fp8)
    spec = attngen.AttentionSpec(head_dim=128, aux=("col_sum",))
    why = hopper.unserved(spec, gpu.by_name("nvidia_h200"))
    assert any("no side output col_sum" in each for each in why)


def test_fp8() -> None:
    q, k, v = (x.detach() for x in qkv(torch.bfloat16))
    *rounded, a, b, c = attngen.quantize(q, k, v, "float8_e5m2", "head")
    named = {"q_descale": a, "k_descale": b, "v_descale": c}
    _, found = attngen.attention(*rounded, **named, return_aux=("max_logit", "entropy"))
    wide = []
    for x, scale in zip(rounded, (a, b, c), strict=True):
        group = x.shape[1] // scale.shape[1]
        wide.append(x.float() * scale.repeat_interleave(group, 1)[..., None, None])
    want = right(*wide, {}, {})
    for name, got in found.items():
        torch.testing.assert_close(got.double(), want[name], atol=1e-4, rtol=1e-4)


def test_memory_is_linear() -> None:
    """Nothing of seqlen_q x seqlen_k is made: what a call allocates is its results."""
    q, k, v = (x.detach() for x in qkv())
    made = side_memory(ALL[1:], q, k)
    assert [each.shape for each in made] == [
        (2, HEADS, ROWS),
        (2, HEADS, KEYS),
        (2, HEADS, ROWS),
    ]


@pytest.mark.slow
def test_a_file_stands_alone(tmp_path: Any) -> None:
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", causal=True, aux=ALL)
    path = tmp_path / "file.py"
    path.write_text(render(spec, FwdConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)))
    done = python(
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')",
        str(path),
        TRITON_INTERPRET="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0 and "entropy" in done.stdout, done.stderr[-2000:]
