"""torch's flash attention by attngen: SDPA, varlen_attn, modules and nested tensors, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import assert_close, make_qkv
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    current_flash_attention_impl,
    list_flash_attention_impls,
    sdpa_kernel,
    varlen,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import attngen
from attngen import calls
from attngen.integrations import torch_backend

flash = torch.ops.aten._scaled_dot_product_flash_attention
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


@pytest.fixture
def active() -> Iterator[None]:
    torch_backend.activate()
    yield
    torch_backend.restore()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with each kernel call."""
    seen: list[None] = []
    launch = calls.launch

    def counting(*arguments: Any) -> Any:
        seen.append(None)
        return launch(*arguments)

    monkeypatch.setattr(calls, "launch", counting)
    return seen


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """SDPA, which picks its flash backend."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, **options)


def with_gradients(out: Tensor, leaves: Any) -> list[Tensor]:
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, do)]


def math(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, **options)


def test_registering_activates_nothing_and_restoring_undoes_all(launches: list[None]) -> None:
    assert torch_backend.register() == "ATTNGEN" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    q, k, v = make_qkv()
    before = attend(q, k, v)
    assert not launches
    torch_backend.activate()
    try:
        assert current_flash_attention_impl() == "ATTNGEN"
        assert_close([attend(q, k, v)], [before])
        assert len(launches) == 1
    finally:
        torch_backend.restore()
    assert current_flash_attention_impl() is None
    assert torch.equal(attend(q, k, v), before)
    assert len(launches) == 1
    torch_backend.restore()  # which does nothing
    with pytest.raises(NotImplementedError):
        flash(q, k, v)


@pytest.mark.parametrize("order", ["rows", "heads"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": -0.3},
        {"attn_mask": torch.arange(20) % 3 > 0},
        {"attn_mask": torch.linspace(-2, 2, 400).reshape(20, 20)},
        {"enable_gqa": True},
    ],
    ids=["plain", "causal", "scale", "bool", "float", "gqa"],
)
def test_sdpa(active: None, launches: list[None], options: dict[str, Any], order: str) -> None:
    options = dict(options)
    if "attn_mask" in options and options["attn_mask"].dim() == 1:
        options["attn_mask"] = options["attn_mask"].expand(20, 20)
    leaves = make_qkv(heads=2, heads_kv=1 if "enable_gqa" in options else None)
    if order == "heads":  # stored (batch, seqlen, heads, dim)
        leaves = tuple(
            x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves
        )
    got = with_gradients(attend(*leaves, **options), leaves)
    assert len(launches) == 2
    assert got[0].stride() == leaves[0].stride()
    assert_close(got, with_gradients(math(*leaves, **options), leaves))


def test_a_name_imported_before_and_modules(active: None, launches: list[None]) -> None:
    module = torch.nn.MultiheadAttention(32, 2, batch_first=True)
    x = torch.randn(2, 9, 32)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(9)
    got = [module(x, x, x, attn_mask=mask, need_weights=False)[0]]
    got += [module.eval()(x, x, x, need_weights=False)[0]]
    assert launches
    torch_backend.restore()
    want = [module.train()(x, x, x, attn_mask=mask, need_weights=False)[0]]
    want += [module.eval()(x, x, x, need_weights=False)[0]]
    assert_close(got, want)


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(("heads_kv", "causal"), [(2, True), (1, False)])
def test_operator_of_gpus(active: None, contiguous: bool, heads_kv: int, causal: bool) -> None:
    """The one that SDPA calls for CUDA tensors, which are square where causal."""
    leaves = make_qkv(heads=2, heads_kv=heads_kv, dtype=torch.bfloat16)
    if not contiguous:
        leaves = tuple(
            x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves
        )
    out, lse, *offsets, max_q, max_k, state, offset, mask = flash(*leaves, 0.0, causal)
    assert offsets == [None, None] and (max_q, max_k) == (20, 20) and mask.numel() == 0
    assert state.dtype == offset.dtype == torch.uint64 and state.shape == (2,)
    want, want_lse = attngen.attention(*leaves, causal=causal, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, do)
    assert_close(grads, torch.autograd.grad(want, leaves, do), atol=0.0)
    for x, leaf in zip((out, *grads), (leaves[0], *leaves), strict=True):
        order = zip(x.shape, x.stride(), torch.empty_like(leaf).stride(), strict=True)
        assert all(size == 1 or ours == torchs for size, ours, torchs in order)


def test_fakes_of_torch_describe_the_results(active: None) -> None:
    for swap in (False, True):
        leaves = [x.detach().requires_grad_() for x in make_qkv(heads=2)]
        if swap:
            leaves = [x.detach().mT.contiguous().mT.requires_grad_() for x in leaves]
        torch.library.opcheck(flash.default, (*leaves, 0.0, True), test_utils=("test_faketensor",))


def test_dropout_is_repeated_in_the_backward(active: None) -> None:
    leaves = make_qkv(heads=2, seqlen_q=16)
    torch.manual_seed(1)
    out, lse, _, _, _, _, state, _, _ = flash(*leaves, 0.5, True)
    seed = state.view(torch.int64)[:1]
    want = attngen.attention(*leaves, causal=True, dropout_p=0.5, dropout_seed=seed)
    assert_close(with_gradients(out, leaves), with_gradients(want, leaves), atol=0.0)
    torch.manual_seed(1)
    assert torch.equal(flash(*leaves, 0.5, True)[0], out)


def test_compiled_sdpa(active: None, launches: list[None]) -> None:
    torch._dynamo.reset()
    leaves = make_qkv(heads=2)
    fast = torch.compile(attend, backend="aot_eager", fullgraph=False)
    got = with_gradients(fast(*leaves, is_causal=True), leaves)
    assert launches
    assert_close(got, with_gradients(math(*leaves, is_causal=True), leaves))


def test_a_dtype_that_kernels_do_not_have(active: None) -> None:
    q, k, v = (x.double() for x in make_qkv())
    with pytest.raises(attngen.UnsupportedSpecError, match=r"torch.float64.*restore\(\)"):
        attend(q, k, v)


# ---- varlen_attn ------------------------------------------------------------------------------

LENGTHS_Q, LENGTHS_K = (5, 0, 9, 1), (7, 3, 12, 1)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def packed(total: int, heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(total, heads, 16, generator=generator).requires_grad_()


@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (3, 0), (2, 1)], ids=["full", "causal", "left", "both"]
)
def test_varlen_attn(active: None, window: tuple[int, int]) -> None:
    heads_kv = 2 if window == (3, 0) else 1
    q, k, v = packed(15, 2, 0), packed(23, heads_kv, 1), packed(23, heads_kv, 2)
    cu_q, cu_k = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    how = {"window_size": window, "enable_gqa": heads_kv != 2, "scale": 0.2}
    call = (q, k, v, cu_q, cu_k, 9, 12)
    out, lse = varlen_attn(*call, return_aux=AuxRequest(lse=True), **how)
    assert lse.shape == (2, 15)
    left, right = (None if side < 0 else side for side in window)
    causal = window == (-1, 0)
    parts, rows = [], []
    for n in range(4):
        part = [
            x[cu[n] : cu[n + 1]].transpose(0, 1)[None]
            for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k))
        ]
        made, of_rows = attngen.attention(
            *part,
            causal=causal,
            window=None if causal else (left, right),
            softmax_scale=0.2,
            return_lse=True,
        )
        parts.append(made[0].transpose(0, 1))
        rows.append(of_rows[0])
    want = torch.cat(parts)
    assert_close([lse], [torch.cat(rows, 1)])
    assert_close(with_gradients(out, (q, k, v)), with_gradients(want, (q, k, v)))

    if hasattr(varlen, "varlen_attn_out"):  # not in torch 2.11
        with torch.no_grad():
            made = torch.full_like(q, float("nan"))
            varlen.varlen_attn_out(made, *call, **how)
        assert torch.equal(made, out)


@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("rows", [(1, 1, 1), (3, 3, 3), (2, 0, 4)], ids=["one", "equal", "unequal"])
def test_paged_cache(active: None, rows: tuple[int, ...], num_splits: int | None) -> None:
    lengths, page = [19, 33, 3], 16
    q = packed(sum(rows), 2, 0).detach()
    pages = torch.randn(7, page, 1, 16), torch.randn(7, page, 1, 16)
    table = torch.tensor([[4, 0, 6], [1, 2, 5], [3, 6, 6]], dtype=torch.int32)
    cu = offsets(rows)
    used = torch.tensor(lengths, dtype=torch.int32)
    out, lse = varlen_attn(
        *(q, *pages, cu, None, max(rows), 48),
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=used,
        block_table=table,
        num_splits=num_splits,
        return_aux=AuxRequest(lse=True),
    )
    parts, sums = [], []
    for n, length in enumerate(lengths):
        k, v = (x[table[n].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in pages)
        one = q[cu[n] : cu[n + 1]].transpose(0, 1)[None]
        made, of_rows = attngen.attention(one, k, v, causal=True, return_lse=True)
        parts.append(made[0].transpose(0, 1))
        sums.append(of_rows[0])
    assert_close([out, lse], [torch.cat(parts), torch.cat(sums, 1)])


def test_arguments_that_attngen_does_not_take(active: None) -> None:
    q, k, v = make_qkv()
    with pytest.raises(attngen.UnsupportedSpecError, match="return_debug_mask"):
        flash(q, k, v, 0.0, False, True)
