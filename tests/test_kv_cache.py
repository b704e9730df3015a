"""Quantised caches: k and v of 8 bits beside a q of 16, against the oracle of dequantised ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_qkv, oracle, oracle_options, run_file
from torch import Tensor

import attngen
from attngen.decode import DecodeConfig
from attngen.kv_cache import dequantized
from attngen.pinned import pinned
from attngen.render import render
from attngen.spec import AttentionSpec
from attngen.spec_rules import KV_SCALES

SPLIT = DecodeConfig(block_m=16, block_n=32, num_warps=1, num_stages=1, split_keys=32)
TALL = DecodeConfig(block_m=64, block_n=32, num_warps=1, num_stages=1)
PAGE = 16
LENGTHS = (0, 1, PAGE - 1, PAGE, PAGE + 1, 70)
E4M3, INT8 = "float8_e4m3fn", "int8"
SCALES = KV_SCALES[1:]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (21, 0), "causal": True},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
    "alibi-sinks": {"alibi": True, "sinks": True, "causal": True},
    "chunk": {"chunk": 20},
}


def _quantized(x: Tensor, kind: str, kv_dtype: str, page: int) -> tuple[Tensor, Tensor]:
    """x (batch, heads, keys, dim) in 8 bits, and its scales, one for each key of each head; equal
    ones where `kind` has them shared, by pages of so many keys."""
    wide = x.float()
    peak = wide.abs().amax(3)
    if kind == "tensor":
        peak = peak.amax().expand_as(peak)
    elif kind == "head":
        count = -(-x.shape[2] // page)
        padded = torch.nn.functional.pad(peak, (0, count * page - x.shape[2]))
        pages = padded.unflatten(2, (count, page)).amax(3, keepdim=True)
        peak = pages.expand(-1, -1, -1, page).flatten(2)[:, :, : x.shape[2]]
    most = 127.0 if kv_dtype == INT8 else 448.0
    scale = peak / most
    stored = wide / scale[..., None]
    stored = stored.round() if kv_dtype == INT8 else stored
    return stored.clamp(-most, most).to(getattr(torch, kv_dtype)), scale


def _spoiled(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Memory for x's values that holds NaN, or the largest int8, in either."""
    if x.dtype == torch.int8:
        return torch.full(shape, 127, dtype=x.dtype)
    return torch.full(shape, float("nan")).to(x.dtype)


def _in_pages(
    x: Tensor, scale: Tensor, kind: str, lengths: tuple[int, ...], page: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffled pages (pages, page, heads, dim), their scales, NaN where there is no key, and the
    table."""
    need = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(need) + 2, generator=torch.Generator().manual_seed(1)).tolist()
    heads = x.shape[1]
    pages = _spoiled(x, (len(order), page, heads, x.shape[3]))
    scales = torch.full((len(order), page, heads), float("nan"))
    table = torch.full((len(lengths), max(1, *need) + 1), -1, dtype=torch.int32)
    for b, length in enumerate(lengths):
        for n in range(need[b]):
            table[b, n] = order.pop()
            at = slice(n * page, min(length, (n + 1) * page))
            part = x[b, :, at].transpose(0, 1)
            pages[table[b, n], : part.shape[0]] = part
            scales[table[b, n], : part.shape[0]] = scale[b, :, at].T
    if kind == "tensor":
        return pages, scale.amax(), table
    return pages, scales[:, 0] if kind == "head" else scales, table


def _check(
    kv_dtype: str,
    kind: str,
    options: dict[str, Any],
    rows: int,
    *,
    is_paged: bool,
    dtype: torch.dtype = torch.bfloat16,
    page: int = PAGE,
    dims: tuple[int, int] = (16, 16),
    lengths: tuple[int, ...] | None = LENGTHS,
    config: DecodeConfig | None = SPLIT,
    spread: float = 1.0,
) -> None:
    keys = 70 if lengths is None else max(lengths)
    batch = 2 if lengths is None else len(lengths)
    sizes = (batch, 6, rows, keys, dims[0])
    tensors = make_qkv(*sizes, heads_kv=2, dim_v=dims[1], dtype=dtype)
    q, k, v = (x.detach() for x in tensors)
    generator = torch.Generator().manual_seed(7)
    # Keys of very different sizes.
    sizes_of = torch.exp(spread * torch.randn(batch, 2, keys, 1, generator=generator))
    k, v = k * sizes_of.clamp(max=3.0), v * sizes_of
    per = page if is_paged else keys
    pairs = [_quantized(x, kind, kv_dtype, per) for x in (k, v)]
    call: dict[str, Any] = {"return_lse": True}
    used = lengths or (keys,) * batch
    if lengths is not None:
        call["seqused_k"] = torch.tensor(lengths, dtype=torch.int32)
    given, descales = [], []
    for x, scale in pairs:
        if is_paged:
            pages, descale, call["block_table"] = _in_pages(x, scale, kind, used, page)
            given.append(pages)
        else:
            stored, descale = x.clone(), scale.clone()
            for b, length in enumerate(used):
                stored[b, :, length:] = _spoiled(x, stored[b, :, length:].shape)
                if kind == "key":
                    descale[b, :, length:] = float("nan")
            given.append(stored)
            descale = {"tensor": scale.amax(), "head": scale[:, :, 0], "key": descale}[kind]
        descales.append(descale)
    call |= dict(zip(("k_descale", "v_descale"), descales, strict=True))
    named, terms = dict(options), {}
    if named.pop("alibi", False):
        terms["alibi_slopes"] = torch.rand(6, generator=generator)
    if named.pop("sinks", False):
        terms["sinks"] = torch.randn(6, generator=generator)
    with pinned({"decode": config} if config else {}):
        out, lse = attngen.attention(q, *given, **named, **terms, **call)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    wide = [x.double() * scale.double()[..., None] for x, scale in pairs]
    for b, length in enumerate(used):
        at = slice(b, b + 1)
        exact = (q[at], *(x[at, :, :length] for x in wide))
        plain = (q[at], *(x.to(dtype) for x in exact[1:]))
        which = {**oracle_options(named, *exact[:2]), **terms}
        want, yard = oracle.attention(*exact, **which), oracle.unfused(*plain, **which)
        for got, wanted, measure, unit in (
            (out[at], want.out, yard.out, dtype),
            (lse[at], want.lse, yard.lse, torch.float32),
        ):
            ok, why = oracle.judge(got, wanted, unit, yard=measure)
            assert ok, why


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("kv_dtype", [E4M3, INT8])
@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
def test_lengths(kv_dtype: str, kind: str, is_paged: bool) -> None:
    """Lengths of none to several pages; NaN behind them, in keys and scales."""
    _check(kv_dtype, kind, {}, 1, is_paged=is_paged)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("kv_dtype", "kind", "is_paged"),
    [(E4M3, "key", True), (INT8, "head", True), (E4M3, "head", False), (INT8, "key", False)],
    ids=str,
)
def test_options(name: str, kv_dtype: str, kind: str, is_paged: bool) -> None:
    _check(kv_dtype, kind, OPTIONS[name], 3, is_paged=is_paged, dtype=torch.float16)


@pytest.mark.parametrize("kind", SCALES)
def test_prefill(kind: str) -> None:
    """Many query rows are served by decode's kernels, too."""
    _check(E4M3, kind, {"causal": True}, 20, is_paged=True, config=TALL)


@pytest.mark.parametrize("dims", [(64, 64), (96, 40), (128, 128)], ids=str)
@pytest.mark.parametrize("kv_dtype", [E4M3, INT8])
def test_head_dims_of_a_dense_cache(kv_dtype: str, dims: tuple[int, int]) -> None:
    _check(kv_dtype, "tensor", {}, 1, is_paged=False, dims=dims, lengths=None, config=None)


@pytest.mark.parametrize("page", [32, 48, 64])
@pytest.mark.parametrize("kind", ["head", "key"])
def test_page_sizes(page: int, kind: str) -> None:
    """Pages that tiles divide, that divide tiles, and neither."""
    _check(E4M3, kind, {"window": (40, 0)}, 2, is_paged=True, page=page, lengths=(70, 33))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scales_of_any_size(dtype: torch.dtype) -> None:
    """Scales from 1e-6 to 1e4: weights times scales leave float16's range."""
    _check(INT8, "key", {}, 1, is_paged=True, dtype=dtype, spread=5.0)


def test_every_value_is_held() -> None:
    """Each of the 256 values of either dtype, in k and in v, by the kernels' conversions."""
    every = torch.arange(256).to(torch.uint8)
    for name in (E4M3, INT8):
        stored = every.view(getattr(torch, name))
        stored = stored[~stored.float().isnan()]
        keys = stored.repeat_interleave(16).view(1, 1, -1, 16)
        q, one = torch.ones(keys.shape, dtype=torch.float16), torch.ones(())
        mask = torch.eye(keys.shape[2], dtype=torch.bool)  # row j sees the key of value j
        named = {"attn_mask": mask, "k_descale": one, "v_descale": one, "softmax_scale": 0.25}
        with pinned({"decode": DecodeConfig(block_m=128, block_n=256, num_warps=4, num_stages=1)}):
            out, lse = attngen.attention(q, keys, keys, return_lse=True, **named)
        assert torch.equal(out.float(), keys.float())
        torch.testing.assert_close(lse[0, 0], 4.0 * stored.float())


def test_rows_of_any_size() -> None:
    """bfloat16 rows beyond float16's range."""
    q, k, v = (x.detach() for x in make_qkv(1, 2, 1, 40, 16, dtype=torch.bfloat16))
    (k8, k_scale), (v8, v_scale) = (_quantized(x, "tensor", E4M3, 16) for x in (k, v))
    named = {"k_descale": k_scale.amax(), "v_descale": v_scale.amax()}
    want = attngen.attention(q, k8, v8, **named)
    for factor in (2.0**100, 2.0**-100):
        scaled = {"softmax_scale": 0.25 / factor, **named}
        torch.testing.assert_close(attngen.attention(q * factor, k8, v8, **scaled), want)


def test_compiled_and_specs() -> None:
    q, k, v = (x.detach() for x in make_qkv(2, 4, 1, 40, 16, heads_kv=2, dtype=torch.bfloat16))
    (k8, k_scale), (v8, v_scale) = (_quantized(x, "key", INT8, 16) for x in (k, v))
    scales = {"k_descale": k_scale, "v_descale": v_scale}
    spec = AttentionSpec(head_dim=16, kv_dtype=torch.int8, kv_scale="key")
    assert AttentionSpec.parse(spec.key) == spec
    assert "kv_dtype=int8,kv_scale=key" in spec.text_key
    attend = attngen.compile(spec)
    out = attend(q, k8, v8, **scales)
    assert torch.equal(attngen.attention(q, k8, v8, **scales), out)
    rows = [x.transpose(1, 2) for x in (q, k8, v8)]
    swapped = attngen.attention(*rows, layout="bshd", **scales)
    assert torch.equal(swapped.transpose(1, 2), out)

    def call(q: Tensor) -> Tensor:
        return attngen.attention(q, k8, v8, causal=True, **scales)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(q), call(q))
    op = torch.ops.attngen.fwd.default
    torch.library.opcheck(op, (spec.text_key, q, k8, v8, [k_scale, v_scale], [0.25], [0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attngen.attention(q.float(), k8, v8, **scales), out)


def test_packed_queries_and_a_step_of_generation() -> None:
    """One launch over quantised pages for sequences of several rows; and append_and_attend."""
    lengths = (20, 33)
    q, k, v = (x.detach() for x in make_qkv(2, 4, 3, 33, 16, heads_kv=2, dtype=torch.float16))
    pairs = [_quantized(x, "key", E4M3, PAGE) for x in (k, v)]
    found = [_in_pages(x, scale, "key", lengths, PAGE) for x, scale in pairs]
    (keys, k_scale, table), (values, v_scale, _) = found
    named: dict[str, Any] = {"k_descale": k_scale, "v_descale": v_scale, "causal": True}
    used = torch.tensor(lengths, dtype=torch.int32)
    tables = {"block_table": table, "seqused_k": used}
    want = attngen.attention(q, keys, values, **tables, **named)
    rows = torch.cat([q[0].transpose(0, 1)[:2], q[1].transpose(0, 1)])
    begins = torch.tensor([0, 2, 5], dtype=torch.int32)
    used[0] -= 1  # whose last row is not there
    out = attngen.attention(rows, keys, values, cu_seqlens_q=begins, **tables, **named)
    torch.testing.assert_close(out[2:], want[1].transpose(0, 1))
    torch.testing.assert_close(out[:2], want[0].transpose(0, 1)[:2])
    new_k, new_v = (x[:, :, :1].clone() for x in (k, v))
    at = torch.tensor([19, 32], dtype=torch.int32)
    call = {"positions": at, "block_table": table}
    copies = keys.clone(), values.clone()
    got = attngen.append_and_attend(q[:, :, :1], new_k, new_v, *copies, **call, **named)
    scales = {name: x for name, x in named.items() if name != "causal"}
    attngen.append_kv(new_k, new_v, keys, values, **call, **scales)
    again = {"block_table": table, "seqused_k": at + 1, **named}
    assert torch.equal(got, attngen.attention(q[:, :, :1], keys, values, **again))
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(copies, (keys, values), strict=True)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0], ids=str)
@pytest.mark.parametrize("config", [SPLIT, TALL], ids=["split", "tall"])
def test_a_row_that_sees_no_key_is_zero_whatever_its_scale(
    bad: float, config: DecodeConfig
) -> None:
    """Of a batch row without keys, and of queries before the first key."""
    q = torch.randn(3, 2, 3, 16, dtype=torch.bfloat16)
    k, v = torch.randint(-9, 9, (2, 3, 1, 40, 16)).to(torch.int8)
    used = torch.tensor([40, 0, 2], dtype=torch.int32)
    scale = torch.tensor([[0.1], [bad], [bad]])
    call = {"seqused_k": used, "k_descale": scale, "v_descale": scale, "causal": True}
    with pinned({"decode": config}):
        out, lse = attngen.attention(q, k, v, return_lse=True, **call)
    assert out[0].isfinite().all() and (out[1] == 0).all() and (out[2, :, 0] == 0).all()
    assert (lse[1] == float("-inf")).all() and (lse[2, :, 0] == float("-inf")).all()


def test_what_is_refused() -> None:
    q, k, v = (x.detach() for x in make_qkv(2, 4, 1, 40, 16, heads_kv=2, dtype=torch.bfloat16))
    (k8, k_scale), (v8, v_scale) = (_quantized(x, "key", INT8, 16) for x in (k, v))
    scales = {"k_descale": k_scale, "v_descale": v_scale}
    cases: list[tuple[type[Exception], str, tuple[Tensor, ...], dict[str, Any]]] = [
        (attngen.SpecError, "got no v_descale", (q, k8, v8), {"k_descale": k_scale}),
        (attngen.SpecError, "leave it out", (q, k8, v8), {**scales, "q_descale": k_scale}),
        (attngen.SpecError, "was divided by", (q, k8, v8), {**scales, "v_descale": v_scale[:, :1]}),
        (attngen.SpecError, "each was", (q, k8, v8), {**scales, "v_descale": v_scale[0, 0]}),
        (attngen.DtypeError, "float32", (q, k8, v8), {**scales, "v_descale": v_scale.half()}),
        (attngen.SpecError, "needs dtype float16", (q.float(), k8, v8), scales),
        (attngen.DtypeError, "must all be", (q, k8, v), scales),
        (attngen.UnsupportedSpecError, "dropout_p", (q, k8, v8), {**scales, "dropout_p": 0.1}),
        (attngen.UnsupportedSpecError, "no backward", (q.clone().requires_grad_(), k8, v8), scales),
        (attngen.UnsupportedSpecError, "odd head_dim_v", (q, k8, v8[..., :15]), scales),
    ]  # fmt: skip
    for error, message, tensors, named in cases:
        with pytest.raises(error, match=message):
            attngen.attention(*tensors, **named)
    attend = attngen.compile(AttentionSpec(head_dim=16, kv_dtype=INT8, kv_scale="head"))
    with pytest.raises(attngen.SpecError, match="those of kv_scale='key'"):
        attend(q, k8, v8, **scales)
    with pytest.raises(attngen.DtypeError, match="k and v int8"):
        attend(q, k, v, k_descale=k_scale[..., 0], v_descale=v_scale[..., 0])
    for fields, message in (
        ({"kv_dtype": INT8}, "go together"),
        ({"kv_scale": "head"}, "go together"),
        ({"kv_dtype": "int4", "kv_scale": "head"}, "must be one of"),
        ({"kv_dtype": INT8, "kv_scale": "head", "dtype": "float32"}, "needs dtype float16"),
    ):
        with pytest.raises(attngen.SpecError, match=message):
            AttentionSpec(head_dim=16, **fields)
    with pytest.raises(attngen.UnsupportedSpecError, match="shared_kv with kv_dtype"):
        AttentionSpec(head_dim=32, head_dim_v=16, shared_kv=True, kv_dtype=INT8, kv_scale="head")
    with pytest.raises(attngen.SpecError, match="vmap over a quantised"):
        torch.vmap(lambda q: attngen.attention(q, k8, v8, **scales))(q[None])


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_scale": "tensor"},
        {"kv_scale": "head", "paged": True, "causal": True},
        {"kv_scale": "key", "paged": True},
        {"kv_scale": "key", "window": (7, 0), "head_dim": 40},
        {"kv_scale": "head", "key_lengths": True, "alibi": True},
    ],
    ids=str,
)
def test_emitted_file_checks_itself(fields: dict[str, Any], tmp_path: Path) -> None:
    kv_dtype = INT8 if "causal" in fields else E4M3
    spec = AttentionSpec(**{"head_dim": 16, "kv_dtype": kv_dtype, **fields})
    file = tmp_path / "kernel.py"
    file.write_text(render(spec, SPLIT))
    done = run_file(file)
    assert done.returncode == 0, done.stderr[-2000:]


def test_dequantized() -> None:
    for paged in (False, True):
        x = torch.arange(48).view(1, 2, 3, 8).to(torch.int8)
        by_key = torch.rand(1, 3, 2) if paged else torch.rand(1, 2, 3)
        for kind, descale in (("tensor", by_key[0, 0, 0]), ("head", by_key[:, 0, :2])):
            spec = AttentionSpec(head_dim=8, kv_dtype=INT8, kv_scale=kind, paged=paged)
            wide = dequantized(spec, x, descale)
            assert torch.equal(wide, x.float() * descale.expand(1, 2)[:, :, None, None])
        spec = AttentionSpec(head_dim=8, kv_dtype=INT8, kv_scale="key", paged=paged)
        scale = by_key.transpose(1, 2) if paged else by_key
        assert torch.equal(dequantized(spec, x, by_key), x.float() * scale[..., None])
