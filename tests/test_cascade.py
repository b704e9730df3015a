"""Two levels of a cascade, joined by `attngen.merge`, against the oracle of whole sequences."""

from __future__ import annotations

import runpy

import pytest
import torch
from support import REPO, oracle

LENGTHS = (2, 33, 0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_cascade_is_attention(rows: int, dtype: torch.dtype) -> None:
    """Suffixes of no key, of a page and of several; rows before a suffix see the prefix alone."""
    cascade = runpy.run_path(str(REPO / "examples" / "cascade.py"))["cascade"]
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, prefix = normal(4, 6, rows, 16), tuple(normal(2, 1, 2, 21, 16))
    pages = tuple(normal(2, 12, 16, 2, 16))
    table = torch.randperm(12, generator=generator).int().view(4, 3)
    used = torch.tensor(LENGTHS, dtype=torch.int32)
    out = cascade(q, prefix, pages, table, used)
    assert out.dtype == dtype
    for b, length in enumerate(LENGTHS):
        own = (x[table[b].long()].flatten(0, 1)[:length].transpose(0, 1)[None] for x in pages)
        k, v = (torch.cat(pair, 2) for pair in zip(prefix, own, strict=True))
        keys, at = torch.arange(21 + length), torch.arange(rows)[:, None] + 21 + length - rows
        seen = ((keys < 21) | (keys <= at)).expand(1, 1, rows, -1)
        want, yard = (f(q[[b]], k, v, mask=seen) for f in (oracle.attention, oracle.unfused))
        ok, why = oracle.judge(out[[b]], want.out, dtype, yard=yard.out)
        assert ok, why
