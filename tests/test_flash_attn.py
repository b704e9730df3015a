"""The functions of attngen.integrations.flash_attn over their arguments, against the oracle."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, assert_exact, make_qkv, oracle
from torch import Tensor

import attngen
from attngen.decode import DecodeConfig
from attngen.integrations import flash_attn as functions
from attngen.pinned import pinned

CACHE, PAGE = 48, 16
SLOPES = torch.tensor([0.5, 0.25])
COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
    f"{COMMON}, block_table=None",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_varlen_kvpacked_func": "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, "
    f"max_seqlen_k, {COMMON}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, "
    "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, "
    "block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
    "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
}
OPTIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"causal": True}, id="causal"),
    pytest.param({"causal": True, "window_size": (5, 3)}, id="causal-window"),
    pytest.param({"window_size": (4, 2)}, id="window"),
    pytest.param({"window_size": (-1, 0)}, id="window-right"),
    pytest.param({"softcap": 1.5, "softmax_scale": 0.7}, id="softcap-scale"),
    pytest.param({"alibi_slopes": SLOPES, "causal": True}, id="alibi"),
    pytest.param({"deterministic": True, "causal": True}, id="deterministic"),
]


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Tiles of 16 by 16, so that short sequences span several."""
    decode = DecodeConfig(block_m=16, block_n=16, num_warps=1, num_stages=1)
    with pinned({"fwd": SMALL_FWD, "bwd": SMALL_BWD, "decode": decode}):
        yield


def in_oracle(options: dict[str, Any]) -> dict[str, Any]:
    """Options in the oracle's words."""
    left, right = (None if n < 0 else n for n in options.get("window_size", (-1, -1)))
    causal = options.get("causal", False)
    return {
        "causal": causal,
        "window": (left, None if causal else right),
        "scale": options.get("softmax_scale"),
        "softcap": options.get("softcap", 0.0),
        "alibi_slopes": options.get("alibi_slopes"),
    }


def in_attngen(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The same for `assert_exact`, and what acts on scores."""
    named = in_oracle(options)
    slopes = named.pop("alibi_slopes")
    named["softmax_scale"] = named.pop("scale")
    return named, {} if slopes is None else {"alibi_slopes": slopes}


def rows_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def judge(got: tuple[Tensor, Tensor], q: Tensor, k: Tensor, v: Tensor, **named: Any) -> None:
    """Out (rows, heads, dim) and lse (heads, rows) of one sequence, of any layout that has them."""
    q, k, v = (x.detach().transpose(0, 1)[None] for x in (q, k, v))
    want, yard = oracle.attention(q, k, v, **named), oracle.unfused(q, k, v, **named)
    out, lse = got[0].transpose(0, 1)[None], got[1][None]
    for mine, right, about, dtype in (
        (out, want.out, yard.out, q.dtype),
        (lse, want.lse, yard.lse, torch.float32),
    ):
        good, why = oracle.judge(mine, right, dtype, yard=about)
        assert good, why


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str):
    found = inspect.signature(getattr(functions, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    assert str(found.replace(parameters=bare, return_annotation=found.empty)) == (
        f"({SIGNATURES[name]})"
    )
    assert sorted(SIGNATURES) == functions.__all__


@pytest.mark.parametrize("options", OPTIONS)
def test_func(options: dict[str, Any]):
    """Longer keys than queries, which alignment shows, and an lse with a gradient."""
    q, k, v = make_qkv(2, 2, 19, 23, heads_kv=1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, none = functions.flash_attn_func(
            *rows_first(q, k, v), **options, return_attn_probs=True
        )
        assert none.numel() == 0
        return out.transpose(1, 2), lse

    named, scores = in_attngen(options)
    assert_exact(attend, q, k, v, named, scores=scores)


def test_func_returns_out_alone():
    q, k, v = (x.detach().bfloat16() for x in rows_first(*make_qkv(1, 2, 7, 21)))
    out = functions.flash_attn_func(q, k, v, 0.0, None, True)
    both = functions.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.shape == (1, 7, 2, 16) and out.dtype == torch.bfloat16
    assert torch.equal(out, both[0])
    assert not functions.flash_attn_func(q, k[:, :2], v[:, :2], causal=True)[:, :5].any()


def test_func_dropout_follows_the_seed():
    q, k, v = rows_first(*make_qkv(1, 2, 19))
    torch.manual_seed(5)
    first = functions.flash_attn_func(q, k, v, dropout_p=0.3)
    again = functions.flash_attn_func(q, k, v, 0.3)
    torch.manual_seed(5)
    assert torch.equal(first, functions.flash_attn_func(q, k, v, 0.3))
    assert not torch.equal(first, again)


@pytest.mark.parametrize("options", OPTIONS)
def test_packed_forms(options: dict[str, Any]):
    q, k, v = make_qkv(1, 2, 18)
    named, scores = in_attngen(options)

    def of_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        qkv = torch.stack(rows_first(q, k, v), 2)
        out, lse, _ = functions.flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **options)
        return out.transpose(1, 2), lse

    def of_kv(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, *pair = rows_first(q, k, v)
        out, lse, _ = functions.flash_attn_kvpacked_func(
            q, torch.stack(pair, 2), return_attn_probs=True, **options
        )
        return out.transpose(1, 2), lse

    for attend in (of_qkv, of_kv):
        assert_exact(attend, q, k, v, named, scores=scores)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_paged", [False, True], ids=["packed", "paged"])
def test_varlen(options: dict[str, Any], is_paged: bool):
    lengths_q, lengths_k = [5, 0, 17, 1], [20, 3, 21, 33]
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(sum(lengths_q) + 2, 2, 16, generator=generator)  # two rows of no sequence
    ks, vs = ([torch.randn(n, 1, 16, generator=generator) for n in lengths_k] for _ in range(2))
    k, v, table = torch.cat(ks), torch.cat(vs), None
    if is_paged:
        k, table = pages(ks)
        v, _ = pages(vs)
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))
    out, lse, _ = functions.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 1, 1, return_attn_probs=True, block_table=table, **options
    )  # the largest lengths are not read
    assert out.shape == q.shape and lse.shape == (2, len(q))
    assert torch.all(out[-2:] == 0) and torch.all(lse[:, -2:] == float("-inf"))
    for n in range(4):
        rows = slice(int(cu_q[n]), int(cu_q[n + 1]))
        judge((out[rows], lse[:, rows]), q[rows], ks[n], vs[n], **in_oracle(options))


@pytest.mark.parametrize("options", OPTIONS)
def test_varlen_gradients(options: dict[str, Any]):
    """Those of each sequence by itself, of out and of lse."""
    lengths_q, lengths_k = [5, 17, 1], [20, 21, 3]
    generator = torch.Generator().manual_seed(4)
    counts = ((sum(lengths_q), 2), (sum(lengths_k), 1), (sum(lengths_k), 1))
    leaves = [torch.randn(*n, 16, generator=generator).requires_grad_() for n in counts]
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k))
    named = {**options, "return_attn_probs": True}
    out, lse, _ = functions.flash_attn_varlen_func(*leaves, cu_q, cu_k, 17, 21, **named)
    do, dlse = torch.randn(out.shape), torch.randn(lse.shape).masked_fill(lse.isinf(), 0.0)
    got = torch.autograd.grad((out, lse), leaves, (do, dlse))
    qs, ks, vs = leaves[0].split(lengths_q), leaves[1].split(lengths_k), leaves[2].split(lengths_k)
    want = []
    for n, part in enumerate(zip(qs, ks, vs, strict=True)):
        at = slice(int(cu_q[n]), int(cu_q[n + 1]))
        one, one_lse, _ = functions.flash_attn_func(*(x[None] for x in part), **named)
        grads = (do[at][None], dlse[None, :, at])
        want.append(torch.autograd.grad((one, one_lse), part, grads))
    for x, right in zip(got, map(torch.cat, zip(*want, strict=True)), strict=True):
        torch.testing.assert_close(x, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("form", ["func", "qkvpacked", "kvpacked", "varlen", "varlen_qkvpacked"])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_every_form(form: str, causal: bool):
    """out and gradients, with the bits of the seed that torch's generator gives."""
    rows, p = [11, 19] if "varlen" in form else [19, 19], 0.3
    shape = (sum(rows), 3, 2, 16) if "varlen" in form else (2, 19, 3, 2, 16)
    qkv = torch.randn(shape, generator=torch.Generator().manual_seed(7)).requires_grad_()
    q, k, v = qkv.unbind(-3)
    cu = torch.tensor([0, rows[0], sum(rows)], dtype=torch.int32)
    tensors = {
        "func": (q, k, v),
        "qkvpacked": (qkv,),
        "kvpacked": (q, qkv[:, :, 1:]),
        "varlen": (q, k, v, cu, cu, 19, 19),
        "varlen_qkvpacked": (qkv, cu, 19),
    }[form]
    name = "flash_attn_func" if form == "func" else f"flash_attn_{form}_func"
    attend = getattr(functions, name)
    torch.manual_seed(5)
    out = attend(*tensors, dropout_p=p, causal=causal)
    torch.manual_seed(5)
    keep = attngen.dropout_keep(torch.randint(0, 2**63 - 1, (1,)), 2, 2, 19, 19, p)
    found = []
    for n, length in enumerate(rows):
        one = qkv.flatten(0, 1) if "varlen" not in form else qkv
        one = one[sum(rows[:n]) : sum(rows[: n + 1])].double().permute(1, 2, 0, 3)
        s = one[0] @ one[1].mT / 4
        seen = torch.ones(length, length, dtype=torch.bool).tril() if causal else s > -torch.inf
        weights = s.masked_fill(~seen, -torch.inf).softmax(-1) * keep[n, :, :length, :length]
        found.append((weights / (1 - p) @ one[2]).transpose(0, 1))
    want = torch.cat(found).view(out.shape)
    do = torch.randn(out.shape)
    (got_grad,), (grad,) = (torch.autograd.grad(x, qkv, do.to(x.dtype)) for x in (out, want))
    torch.testing.assert_close(out, want.float(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got_grad, grad, atol=1e-5, rtol=1e-4)


def pages(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Tensors (length, heads, dim) in pages, the last ones first, and their table."""
    need = [-(-len(x) // PAGE) for x in tensors]
    found = tensors[0].new_full((sum(need), PAGE, *tensors[0].shape[1:]), float("nan"))
    table = torch.zeros((len(tensors), max(need)), dtype=torch.int32)
    free = sum(need)
    for n, x in enumerate(tensors):
        for m, part in enumerate(x.split(PAGE)):
            free -= 1
            found[free, : len(part)] = part
            table[n, m] = free
    return found, table


def test_varlen_packed_forms():
    generator = torch.Generator().manual_seed(4)
    qkv = torch.randn(21, 3, 2, 16, generator=generator, requires_grad=True)
    cu = torch.tensor([0, 4, 21], dtype=torch.int32)
    want = functions.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 17, 17, causal=True)
    one = functions.flash_attn_varlen_qkvpacked_func(qkv, cu, 17, causal=True)
    q, kv = qkv[:, 0], qkv[:, 1:]
    two = functions.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 17, 17, causal=True)
    assert torch.equal(one, want) and torch.equal(two, want)
    (grad,) = torch.autograd.grad(one.square().sum(), qkv)
    assert grad.shape == qkv.shape and grad[:, 1].any()


# ---- caches -----------------------------------------------------------------------------------


def cache(batch: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    k, v = (torch.randn(batch, CACHE, 1, 16, generator=generator) for _ in range(2))
    return k, v


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("options", OPTIONS[:-1])
def test_kvcache(options: dict[str, Any], rows: int):
    k, v = cache()
    used = torch.tensor([0, 17, CACHE], dtype=torch.int32)
    q = torch.randn(3, rows, 2, 16, generator=torch.Generator().manual_seed(9))
    out, lse = functions.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, return_softmax_lse=True, **options
    )
    assert out.shape == q.shape and lse.shape == (3, 2, rows)
    for n, length in enumerate(used.tolist()):
        judge((out[n], lse[n]), q[n], k[n, :length], v[n, :length], **in_oracle(options))


@pytest.mark.parametrize("place", ["rows", "chosen", "pages"])
@pytest.mark.parametrize("interleaved", [None, True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_kvcache_appends(place: str, interleaved: bool | None, causal: bool):
    """New keys, rotated or not, in rows, in rows of an order, and in pages."""
    generator = torch.Generator().manual_seed(9)
    q, new = (torch.randn(2, n, h, 16, generator=generator) for n, h in ((3, 2), (3, 2)))
    k, v = new[:, :, :1], new[:, :, 1:]
    angles = torch.rand(CACHE, 4, generator=generator) * 6
    cos, sin = (None, None) if interleaved is None else (angles.cos(), angles.sin())
    used, order = torch.tensor([2, 30], dtype=torch.int32), [0, 1]
    old = cache()
    k_cache, v_cache = (x[:2].clone() for x in old)
    named: dict[str, Any] = {}
    if place == "chosen":
        order, (k_cache, v_cache) = [2, 0], (x.clone() for x in old)
        named["cache_batch_idx"] = torch.tensor(order, dtype=torch.int32)
    if place == "pages":
        (k_cache, table), (v_cache, _) = (pages(list(x[:2])) for x in old)
        named["block_table"] = table
    out, lse = functions.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cos,
        sin,
        used,
        causal=causal,
        rotary_interleaved=bool(interleaved),
        return_softmax_lse=True,
        **named,
    )
    for n, length in enumerate(used.tolist()):
        keys, values = (x[order[n], :length] for x in old)
        at = torch.arange(length, length + 3)
        rows = at if causal else at[:1].expand(3)
        turned_q = rotated(q[n], cos, sin, rows, interleaved)
        turned_k = rotated(k[n], cos, sin, at, interleaved)
        keys, values = torch.cat([keys, turned_k]), torch.cat([values, v[n]])
        judge((out[n], lse[n]), turned_q, keys, values, causal=causal)
        if place != "pages":
            torch.testing.assert_close(k_cache[order[n], : length + 3], keys)
            assert torch.equal(k_cache[order[n], length + 3 :], old[0][order[n], length + 3 :])


def rotated(x: Tensor, cos: Any, sin: Any, at: Tensor, interleaved: bool | None) -> Tensor:
    """x (rows, heads, dim) with pairs of its first columns turned, as complex numbers."""
    if interleaved is None:
        return x
    count = 2 * cos.shape[1]
    turn = torch.complex(cos[at], sin[at])[:, None]
    head = x[..., :count]
    if interleaved:
        pairs = torch.view_as_complex(head.unflatten(-1, (-1, 2)).contiguous()) * turn
        head = torch.view_as_real(pairs).flatten(-2)
    else:
        pairs = torch.complex(head[..., : count // 2], head[..., count // 2 :]) * turn
        head = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([head, x[..., count:]], -1)


def test_kvcache_left_padding():
    k, v = cache(2)
    q = torch.randn(2, 2, 2, 16, generator=torch.Generator().manual_seed(9))
    first, used = [3, 0], [20, 9]
    out, lse = functions.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=torch.tensor(used, dtype=torch.int32),
        cache_leftpad=torch.tensor(first, dtype=torch.int32),
        causal=True,
        return_softmax_lse=True,
    )
    for n in range(2):
        keys, values = (x[n, first[n] : used[n]] for x in (k, v))
        judge((out[n], lse[n]), q[n], keys, values, causal=True)


def test_kvcache_whole():
    """Without cache_seqlens all of the cache counts; an int counts for each row."""
    k, v = cache(1)
    q = torch.randn(1, 1, 2, 16, generator=torch.Generator().manual_seed(9))
    for named, length in (({}, CACHE), ({"cache_seqlens": 11}, 11), ({"num_splits": 1}, CACHE)):
        out, lse = functions.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **named)
        judge((out[0], lse[0]), q[0], k[0, :length], v[0, :length])
    table = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    paged = functions.flash_attn_with_kvcache(
        q, k.view(3, PAGE, 1, 16), v.view(3, PAGE, 1, 16), block_table=table
    )
    torch.testing.assert_close(paged, functions.flash_attn_with_kvcache(q, k, v))


def test_refusals():
    """What is not served is named."""
    q, k, v = rows_first(*make_qkv(1, 2, 5))
    used = torch.tensor([2], dtype=torch.int32)
    with pytest.raises(attngen.UnsupportedSpecError, match="return_attn_probs with dropout_p"):
        functions.flash_attn_func(q, k, v, 0.1, return_attn_probs=True)
    with pytest.raises(attngen.SpecError, match=r"qkv must be \(batch, seqlen, 3, num_heads"):
        functions.flash_attn_qkvpacked_func(torch.zeros(1, 5, 2, 2, 16))
    with pytest.raises(attngen.SpecError, match="window_size must be"):
        functions.flash_attn_func(q, k, v, window_size=3)
    with torch.no_grad():
        old = cache(1)
        one = q[:, :1]
        call = functions.flash_attn_with_kvcache
        with pytest.raises(attngen.SpecError, match="k without cache_seqlens"):
            call(one, *old, k[:, :1, :1], v[:, :1, :1])
        with pytest.raises(attngen.SpecError, match="pass both, or neither"):
            call(one, *old, k[:, :1, :1], cache_seqlens=used)
        with pytest.raises(attngen.SpecError, match="rotary_cos without k"):
            call(one, *old, None, None, torch.ones(9, 4), torch.ones(9, 4), used)
        with pytest.raises(attngen.UnsupportedSpecError, match="cache_leftpad with block_table"):
            call(one, *old, cache_leftpad=used, cache_seqlens=used, block_table=used[:, None])
        with pytest.raises(attngen.UnsupportedSpecError, match="no multiple of 16"):
            short = (x[:, :20] for x in old)
            call(one, *short, cache_batch_idx=torch.zeros_like(used), cache_seqlens=used)
        with pytest.raises(attngen.SpecError, match="names the pages"):
            call(one, *old, cache_batch_idx=used, block_table=used[:, None], cache_seqlens=used)
        with pytest.raises(attngen.DtypeError, match=r"cast it with cache_seqlens\.int"):
            call(one, *old, cache_seqlens=used + 0.7)
        for seqlens in (-1, CACHE, 2.5, [2]):  # an int is looked at: the host has it
            with pytest.raises(
                attngen.SpecError, match=f"cache_seqlens must be an int from 0 to {CACHE - 1}"
            ):
                call(one, *old, k[:, :1, :1], v[:, :1, :1], cache_seqlens=seqlens)
        with pytest.raises(
            attngen.SpecError, match=f"rotary_cos must have a row for .* {CACHE}, got 9"
        ):
            call(one, *old, k[:, :1, :1], v[:, :1, :1], torch.ones(9, 4), torch.ones(9, 4), used)
        with pytest.raises(attngen.SpecError, match="cache_batch_idx must be a torch.Tensor"):
            call(one, *old, cache_seqlens=used, cache_batch_idx=[0])
    with pytest.raises(attngen.SpecError, match="window left must be None"):
        functions.flash_attn_func(q, k, v, window_size=("a", 0))
    cu = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(attngen.UnsupportedSpecError, match="dropout_p with block_table"):
        functions.flash_attn_varlen_func(q[0], k, v, cu, cu, 5, 5, 0.1, block_table=used[:, None])
    with pytest.raises(attngen.UnsupportedSpecError, match="no backward"):
        page = torch.randn(1, PAGE, 2, 16)
        functions.flash_attn_varlen_func(
            q[0], page, page, cu, cu, 5, 5, block_table=torch.zeros(1, 1, dtype=torch.int32)
        )
