"""Quantised caches on the GPU, against SDPA on dequantised float32 ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import attngen
from attngen import kv_cache
from attngen.spec import AttentionSpec
from attngen.spec_rules import KV_SCALES

pytestmark = pytest.mark.gpu


def _in_pages(x: Tensor, page: int, order: Tensor) -> Tensor:
    """(batch, heads, keys, dim) as pages (pages, page, heads, dim), of this order."""
    padded = torch.nn.functional.pad(x.view(torch.int8), (0, 0, 0, -x.shape[2] % page))
    pages = padded.unflatten(2, (-1, page)).permute(0, 2, 3, 1, 4).flatten(0, 1)
    return _moved(pages.contiguous(), order).view(x.dtype)


def _moved(x: Tensor, order: Tensor) -> Tensor:
    moved = torch.empty_like(x)
    moved[order] = x
    return moved


@pytest.mark.parametrize("page", [0, 16, 64, 256])
@pytest.mark.parametrize("kind", KV_SCALES[1:])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(("rows", "dim"), [(1, 128), (3, 96), (70, 128)])
def test_quantised(rows: int, dim: int, kv_dtype: str, kind: str, page: int) -> None:
    check(rows, dim, kv_dtype, kind, page, 1000, "cuda")


def check(rows: int, dim: int, kv_dtype: str, kind: str, page: int, keys: int, device: str) -> None:
    batch = 3
    spec = AttentionSpec(head_dim=dim, kv_dtype=kv_dtype, kv_scale=kind, paged=page > 0)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, dim, device=device, generator=generator)

    q, k, v = random(8, rows).bfloat16(), random(2, keys), random(2, keys)
    call: dict[str, Any] = {}
    if page:
        count = batch * -(-keys // page)
        order = torch.randperm(count, device=device, generator=generator)
        call["block_table"] = order.int().view(batch, -1)
        call["seqused_k"] = torch.full((batch,), keys, dtype=torch.int32, device=device)
    wide, given = [], []
    for name, x in (("k_descale", k), ("v_descale", v)):
        stored, scale = kv_cache.quantized(spec, x, page or keys)
        wide.append((stored.float() * scale[..., None]).repeat_interleave(4, 1))
        call[name] = kv_cache.descale_of(spec, scale, page or keys)
        if page:
            stored = _in_pages(stored, page, order)
            call[name] = call[name] if kind == "tensor" else _moved(call[name], order)
        given.append(stored)
    out = attngen.attention(q, *given, **call)
    want = torch.nn.functional.scaled_dot_product_attention(q.float(), *wide)
    assert (out.float() - want).norm() < 4e-3 * want.norm()
