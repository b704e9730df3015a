"""Attention of FP8 operands: results and gradients are those of the dequantised ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, oracle, oracle_options
from torch import Tensor

import attngen
import attngen.ops
from attngen.config import FwdConfig, default_config, infeasible
from attngen.fp8 import Quantized, spread
from attngen.gpu import KNOWN_GPUS
from attngen.kernel import file_name
from attngen.pinned import pinned
from attngen.render import structural_variants, template_hash, title
from attngen.spec import DESCALES, AttentionSpec
from attngen.workload import Workload, spec_bucket

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STRUCTURE = {
    "doc_ids_q": (torch.arange(137) + 13) // 60,
    "doc_ids_k": torch.arange(150) // 60,
    "prefix_lens": torch.tensor([40, 130]),
    "tree_mask": torch.ones(30, 30, dtype=torch.bool).tril() ^ (torch.arange(30) % 4 == 1),
}
STRUCTURE["tree_mask"].fill_diagonal_(True)
ONE_OF_EACH_SCALE = [
    pytest.param("block", E4M3, {"causal": True, **STRUCTURE}, id="block-structure"),
    pytest.param("tensor", E4M3, {}, id="tensor"),
    pytest.param("head", E4M3, {"causal": True}, id="head-causal"),
    pytest.param("block", E4M3, {"causal": True, "window": (40, None)}, id="block-window"),
    pytest.param("block", E5M2, {"softcap": 1.5, "window": (70, 9)}, id="block-e5m2-softcap"),
    pytest.param("head", E5M2, {"softcap": 0.7}, id="head-e5m2-softcap", marks=pytest.mark.slow),
    pytest.param(
        "tensor",
        E4M3,
        {"dropout_p": 0.3, "dropout_seed": 7},
        id="tensor-dropout",
        marks=pytest.mark.slow,
    ),
]


def quantized(
    scale: str,
    dtype: torch.dtype = E4M3,
    *,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    lengths: tuple[int, int] = (137, 150),
    dim: int = 16,
) -> Quantized:
    """Operands whose scales differ from head to head and from block to block."""
    generator = torch.Generator().manual_seed(0)

    def made(heads: int, rows: int) -> Tensor:
        x = torch.randn(batch, heads, rows, dim, generator=generator)
        size = 0.5 + torch.rand(batch, heads, -(-rows // 64), 1, generator=generator)
        return x * size.repeat_interleave(64, 2)[:, :, :rows]

    (rows, keys), (heads_q, heads_kv) = lengths, heads
    q, k, v = made(heads_q, rows), made(heads_kv, keys), made(heads_kv, keys)
    return attngen.quantize(q, k, v, dtype=dtype, scale=scale)


def named(found: Quantized) -> dict[str, Tensor]:
    return {name: getattr(found, name) for name in DESCALES}


def leaves(found: Quantized) -> list[Tensor]:
    """q, k and v as leaves whose gradients are not rounded to FP8."""
    made = [x.clone().requires_grad_() for x in found[:3]]
    for leaf in made:
        leaf.grad_dtype = torch.bfloat16
    return made


def attend(found: Quantized, **options: Any) -> Any:
    return attngen.attention(*found[:3], **named(found), **options)


def dequantized(found: Quantized) -> list[Tensor]:
    pairs = zip(found[:3], found[3:], strict=True)
    return [x.double() * spread(descale, x) for x, descale in pairs]


@pytest.mark.rotating
@pytest.mark.parametrize(("scale", "dtype", "options"), ONE_OF_EACH_SCALE)
def test_results_and_gradients_are_those_of_the_dequantised(
    scale: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """As good as plain PyTorch in bfloat16, which rounds the dequantised operands too."""
    found = quantized(scale, dtype, heads=(2, 1))
    given = leaves(found)
    out, lse = attngen.attention(*given, **named(found), **options, return_lse=True)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    dlse = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2))
    got = torch.autograd.grad([out, lse], given, [do, dlse])
    assert [x.dtype for x in (out, lse, *got)] == [torch.bfloat16, torch.float32, *[out.dtype] * 3]

    scales = [spread(descale, x) for x, descale in zip(found[:3], found[3:], strict=True)]

    def solve(narrow: torch.dtype | None, **how: Any) -> Any:
        def of(q: Tensor, k: Tensor, v: Tensor) -> Any:
            wide = [x * s for x, s in zip((q, k, v), scales, strict=True)]
            wide = [x if narrow is None else oracle._round(x, narrow, narrow) for x in wide]
            return oracle.attention(*wide, **oracle_options(options, q, k), round_to=narrow, **how)

        inputs = dict(zip("qkv", found[:3], strict=True))
        leaf = how.get("math_dtype", torch.float64)
        result, grads = oracle.gradients(of, inputs, do, dlse, leaf_dtype=leaf)
        return result.out, result.lse, *grads.values()

    right, yard = solve(None), solve(torch.bfloat16, math_dtype=torch.float32)
    names = ("out", "lse", "dq", "dk", "dv")
    for name, actual, want, about in zip(names, (out, lse, *got), right, yard, strict=True):
        about = want if name in ("out", "lse") else about  # the forward takes them as they are
        good, why = oracle.judge(actual, want, actual.dtype, yard=about)
        assert good, f"{name}: {why}"


@pytest.mark.rotating
@pytest.mark.parametrize("tiles", ["pointer", "descriptor"])
def test_blocks_of_several_tiles(tiles: Any) -> None:
    found = quantized("block", lengths=(200, 270), batch=1)
    right = oracle.attention(*dequantized(found), causal=True)
    with pinned({"fwd": replace(SMALL_FWD, tiles=tiles, block_m=32)}):
        out, lse = attend(found, causal=True, return_lse=True)
    assert oracle.judge(out, right.out, out.dtype)[0]
    assert oracle.judge(lse, right.lse, lse.dtype)[0]


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["tensor", "head", "block"])
def test_every_single_scale_counts(scale: str) -> None:
    found = quantized(scale, heads=(2, 2), lengths=(130, 130), batch=1)
    before = attend(found)
    for name in DESCALES:
        for at in range(getattr(found, name).numel()):
            changed = getattr(found, name).clone()
            changed.view(-1)[at] *= 1.5
            assert not torch.equal(attend(found._replace(**{name: changed})), before), (name, at)


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_value_of_the_dtype_passes(dtype: torch.dtype) -> None:
    """One key has weight 1, so that out is v."""
    v = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 1, 1, 256)
    q = torch.zeros(1, 1, 1, 16).to(dtype)
    one = torch.ones(())
    out = attngen.attention(q, q, v, q_descale=one, k_descale=one, v_descale=one)
    torch.testing.assert_close(out.float(), v.float(), rtol=0, atol=0, equal_nan=True)


def test_a_shard_and_partial_results() -> None:
    found = quantized("head", batch=1, lengths=(60, 100))
    want, want_lse = attend(found, causal=True, return_lse=True)
    parts = []
    for start, end in ((0, 48), (48, 100)):
        piece = found._replace(k=found.k[:, :, start:end], v=found.v[:, :, start:end])
        parts += attend(
            piece,
            causal=True,
            k_start=start,
            seqlen_q_total=60,
            seqlen_k_total=100,
            partial=True,
            return_lse=True,
        )
    out, lse = attngen.merge(*parts)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.bfloat16(), want, atol=8e-3, rtol=0)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.rotating
@pytest.mark.parametrize("softmax_scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(softmax_scale: float) -> None:
    found = quantized("head", batch=1, lengths=(9, 20))
    right = oracle.attention(*dequantized(found), scale=softmax_scale)
    out = attend(found, softmax_scale=softmax_scale)
    assert oracle.judge(out, right.out, out.dtype)[0]


def test_layouts_strides_and_scattered_scales_change_nothing() -> None:
    found = quantized("block", lengths=(20, 30))
    want = attend(found)
    turned = found._replace(**{x: getattr(found, x).transpose(1, 2) for x in "qkv"})
    assert torch.equal(attend(turned, layout="bshd").transpose(1, 2), want)
    strided = {name: torch.stack([x, x], -1)[..., 1] for name, x in named(found).items()}
    narrow = {x: torch.nn.functional.pad(getattr(found, x).float(), (0, 3)) for x in "qkv"}
    narrow = {name: x.to(E4M3)[..., :16] for name, x in narrow.items()}  # rows of 19 bytes
    assert torch.equal(attend(found._replace(**strided, **narrow)), want)


@pytest.mark.rotating
@pytest.mark.parametrize("scale", ["tensor", "block"])
def test_compiled(scale: str) -> None:
    found = quantized(scale, lengths=(20, 30))
    compiled = torch.compile(lambda *x: attend(Quantized(*x)), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*found), attend(found))
    spec = AttentionSpec(head_dim=16, dtype=E4M3, fp8_scale=scale)
    traced = torch.compile(attngen.compile(spec), backend="aot_eager", fullgraph=True)
    assert torch.equal(traced(*found[:3], **named(found)), attend(found))
    out = torch.compile(attend, backend="aot_eager", fullgraph=True)(found, partial=True)
    assert out.dtype == torch.float32


def test_autocast_leaves_fp8_alone() -> None:
    found = quantized("head", lengths=(20, 30))
    with torch.autocast("cpu", torch.float16):
        out = attend(found)
    assert torch.equal(out, attend(found)) and out.dtype == torch.bfloat16
    q = found.q.float()
    with torch.autocast("cpu"), pytest.raises(attngen.DtypeError, match="must all be float8"):
        attngen.compile(AttentionSpec(head_dim=16, dtype=E4M3, fp8_scale="head"))(
            q, *found[1:3], **named(found)
        )


@pytest.mark.rotating
@pytest.mark.parametrize("scale", ["tensor", "head"])
def test_vmap(scale: str) -> None:
    found = quantized(scale, lengths=(20, 30))
    want = attend(found)
    q = torch.stack([found.q, found.q.flip(2)])

    def of(q: Tensor) -> Tensor:
        return attend(found._replace(q=q))

    out = torch.vmap(of)(q)
    assert torch.equal(out[0], want) and torch.equal(out[1], want.flip(2))


# ---- gradients ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_of_the_atomic_and_small_tiles() -> None:
    found = quantized("block", heads=(2, 1), lengths=(40, 150), batch=1)
    do = torch.randn(1, 2, 40, 16).bfloat16()

    def grads() -> tuple[Tensor, ...]:
        given = leaves(found)
        out = attngen.attention(*given, **named(found), causal=True)
        return torch.autograd.grad(out, given, do)

    want = grads()
    with pinned({"fwd": SMALL_FWD, "bwd": replace(SMALL_BWD, dq="atomic")}):
        for x, y in zip(grads(), want, strict=True):
            assert (x - y).norm() < 1e-2 * y.norm()


def test_gradients_that_autograd_would_round_are_refused() -> None:
    found = quantized("tensor", lengths=(4, 4))
    leaf = found.q.clone().requires_grad_()
    message = r"q is torch.float8_e4m3fn and requires grad, and.*q.grad_dtype = torch.bfloat16"
    with pytest.raises(attngen.SpecError, match=message):
        attend(found._replace(q=leaf))
    inner = torch.randn(2, 2, 4, 16, requires_grad=True).to(E4M3)
    with pytest.raises(attngen.SpecError, match="make it a leaf and set k.grad_dtype"):
        attend(found._replace(k=inner))
    with torch.no_grad():
        assert torch.equal(attend(found._replace(q=leaf)), attend(found))


def test_gradients_in_a_compiled_graph() -> None:
    """AOTAutograd forgets grad_dtype: an error, not gradients in FP8."""
    found = quantized("head", heads=(2, 1), lengths=(20, 30))
    do = torch.randn(2, 2, 20, 16).bfloat16()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attngen.attention(q, k, v, **named(found))

    given = leaves(found)
    want = torch.autograd.grad(attend(*given), given, do)
    out = torch.compile(attend, backend="eager", fullgraph=True)(*given)
    for x, y in zip(torch.autograd.grad(out, given, do), want, strict=True):
        assert torch.equal(x, y)
    with pytest.raises(Exception, match="keep the call out of torch.compile"):
        torch.compile(attend, backend="aot_eager", fullgraph=True)(*given)


def test_the_fake_is_like_the_op() -> None:
    """The other checks of opcheck compute with FP8, which torch cannot."""
    found = quantized("block", heads=(2, 1), lengths=(20, 30))
    spec = AttentionSpec(head_dim=16, dtype=E4M3, fp8_scale="block")
    arguments = (spec.text_key, *found[:3], list(found[3:]), [0.25], [0])
    torch.library.opcheck(torch.ops.attngen.fwd, arguments, test_utils="test_faketensor")


def test_scales_have_no_gradient() -> None:
    found = quantized("tensor", lengths=(4, 4))
    scale = found.k_descale.clone().requires_grad_()
    with pytest.raises(attngen.SpecError, match=r"k_descale requires grad.*k_descale.detach"):
        attend(found._replace(k_descale=scale))


# ---- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param(
            {"v_descale": None, "k_descale": None},
            attngen.SpecError,
            "got no k_descale and no v_descale; attngen.quantize makes them",
            id="missing",
        ),
        pytest.param(
            {"q_descale": torch.ones(())},
            attngen.SpecError,
            r"all of shape.*got shapes \(\), \(2, 2\), \(2, 2\)",
            id="of-two-kinds",
        ),
        pytest.param(
            {"k_descale": torch.ones(2, 4)},
            attngen.SpecError,
            r"k_descale must have shape \(2, 2\) for fp8_scale='head', got \(2, 4\)",
            id="of-query-heads",
        ),
        pytest.param(
            {"k_descale": torch.ones(2, 2).double()},
            attngen.DtypeError,
            "k_descale must be float32, got torch.float64",
            id="float64",
        ),
        pytest.param(
            {"v_descale": torch.ones(2, 2, device="meta")},
            attngen.SpecError,
            "v_descale is on meta but q is on cpu",
            id="device",
        ),
        pytest.param(
            {"v_descale": 1.0}, attngen.SpecError, "v_descale must be a torch.Tensor", id="number"
        ),
        pytest.param(
            {"k": torch.ones(2, 2, 30, 16)},
            attngen.DtypeError,
            "q, k and v must all be float8_e4m3fn",
            id="k-not-rounded",
        ),
    ],
)
def test_wrong_scales_are_named(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    found = quantized("head", lengths=(20, 30))
    with pytest.raises(error, match=message):
        attend(found._replace(**changes))


def test_scales_belong_to_fp8_inputs_and_to_their_spec() -> None:
    found = quantized("head", lengths=(20, 30))
    wide = found._replace(**{x: getattr(found, x).float() for x in "qkv"})
    with pytest.raises(attngen.SpecError, match="q_descale belongs to FP8 inputs, got float32"):
        attend(wide)
    attn = attngen.compile(AttentionSpec(head_dim=16, dtype=E4M3, fp8_scale="block"))
    with pytest.raises(attngen.SpecError, match="those of fp8_scale='head', but the spec says"):
        attn(*found[:3], **named(found))
    with pytest.raises(attngen.SpecError, match="need q_descale, k_descale and v_descale"):
        attn(*found[:3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": E4M3}, 'add fp8_scale="tensor", "head" or "block"'),
        ({"fp8_scale": "head"}, "needs an FP8 dtype, got dtype='bfloat16'; add dtype='float8_e4m3"),
        ({"dtype": E5M2, "fp8_scale": "row"}, "fp8_scale must be one of"),
    ],
)
def test_specs_name_dtype_and_scale_together(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(attngen.SpecError, match=message):
        AttentionSpec(head_dim=64, **fields)


# ---- spec, text and configs --------------------------------------------------------------------


@pytest.mark.parametrize("scale", ["tensor", "head", "block"])
def test_specs_round_trip(scale: str) -> None:
    spec = AttentionSpec(head_dim=64, dtype=E5M2, fp8_scale=scale, causal=True, dropout_p=0.1)
    assert AttentionSpec.parse(spec.key) == spec
    assert AttentionSpec.parse(spec.text_key).text_key == spec.text_key
    assert AttentionSpec.from_json(spec.to_json()) == spec
    assert spec.tensor_args == ("dropout_seed", *DESCALES)
    assert (spec.out_dtype, spec.element_size) == ("bfloat16", 1)
    assert f"float8_e5m2 by {scale}" in title(spec, SMALL_FWD)
    assert file_name(spec, "fwd", "").startswith(f"fwd__float8_e5m2_d64_{scale}_scale_causal_")


def test_the_backward_is_that_of_bfloat16() -> None:
    spec = AttentionSpec(head_dim=64, dtype=E4M3, fp8_scale="block", causal=True)
    wide = AttentionSpec(head_dim=64, causal=True)
    assert spec.served_as("bwd") == wide == spec.dequantized
    assert template_hash(spec.text_of("bwd"), "bwd", "sm_90") == template_hash(
        wide.text_of("bwd"), "bwd", "sm_90"
    )
    assert file_name(spec, "bwd", "") == file_name(wide, "bwd", "")


def test_a_tile_has_one_block_scale() -> None:
    spec = AttentionSpec(head_dim=64, dtype=E4M3, fp8_scale="block")
    config = FwdConfig(block_m=256, block_n=64, num_warps=8, num_stages=2)
    (why,) = infeasible(spec, config, KNOWN_GPUS["nvidia_h200"])
    assert why == "block_m=256 must be at most 128: with fp8_scale=block a tile has one scale"


def test_e4m3_needs_a_gpu_that_converts_it() -> None:
    spec = AttentionSpec(head_dim=64, dtype=E4M3, fp8_scale="tensor")
    (config, *_), old = structural_variants("fwd"), KNOWN_GPUS["nvidia_a100"]
    place = spec_bucket("fwd", spec, Workload(1, 2, 2, 128, 128))
    message = "float8_e4m3fn needs sm_89 or later, nvidia_a100 is sm_80; use float8_e5m2 there"
    assert message in infeasible(spec, config, old)[0]
    with pytest.raises(attngen.UnsupportedSpecError, match=message):
        default_config(spec, place, old)
    assert default_config(replace(spec, dtype=E5M2), place, old)


def test_explain_says_that_the_backward_dequantises() -> None:
    found = quantized("head", lengths=(20, 30))
    attn = attngen.compile(AttentionSpec(head_dim=16, dtype=E4M3, fp8_scale="head"))
    forward, backward = attn.explain(*found[:3]).as_dict()["choices"]
    assert "float8_e4m3fn" in forward["file"] and "bfloat16" in backward["file"]
    assert "FP8 inputs are dequantised, and served as dtype=bfloat16" in backward["notes"]
