"""append_kv: dense and paged caches, slots, rotary, padding, against indexing in PyTorch."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import make_qkv, run_file
from torch import Tensor

import attngen
from attngen.append import AppendSpec, source

PAGE = 16


def _new(rows: int, dim: int = 24, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(x.detach() for x in make_qkv(3, 4, rows, dim=dim, heads_kv=2, dtype=dtype))


def _rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (batch, heads, seqlen, dim) turned by the angles of positions (batch, seqlen)."""
    n = cos.shape[1]
    c, s = (t[positions.long()][:, None].double() for t in (cos, sin))
    y = x.double().clone()
    first, second = (
        (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if interleaved else (slice(n), slice(n, 2 * n))
    )
    a, b = x.double()[..., first], x.double()[..., second]
    y[..., first], y[..., second] = a * c - b * s, b * c + a * s
    return y.to(x.dtype)


def _angles(dim: int) -> tuple[Tensor, Tensor]:
    turn = torch.arange(64)[:, None] * 10000 ** (-torch.arange(dim // 2) / (dim // 2))
    return turn.cos(), turn.sin()


@pytest.mark.parametrize("rotary", [None, False, True], ids=["plain", "half", "interleaved"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_dense(rotary: bool | None, rows: int, layout: str) -> None:
    q, k, v = _new(rows)
    positions = torch.tensor([0, 7, 30], dtype=torch.int32)
    k_cache, v_cache = torch.full((2, 3, 2, 40, 24), float("nan"))
    cos, sin = _angles(16)
    each = positions[:, None] + torch.arange(rows)
    want_k, want_q, named = k, q, {}
    if rotary is not None:
        named = {"q": q, "cos": cos, "sin": sin, "interleaved": rotary}
        want_k, want_q = (_rotated(x, each, cos, sin, rotary) for x in (k, q))
    wanted = [k_cache.clone(), v_cache.clone()]
    for b, at in enumerate(positions.tolist()):
        wanted[0][b, :, at : at + rows], wanted[1][b, :, at : at + rows] = want_k[b], v[b]
    caches = [k_cache, v_cache]
    if layout == "bshd":
        k, v, *caches = (x.transpose(1, 2).contiguous() for x in (k, v, *caches))
        if "q" in named:
            named["q"] = q.transpose(1, 2)
    got = attngen.append_kv(k, v, *caches, positions=positions, layout=layout, **named)
    if layout == "bshd":
        caches = [x.transpose(1, 2) for x in caches]
        got = None if got is None else got.transpose(1, 2)
    for cache, want in zip(caches, wanted, strict=True):
        torch.testing.assert_close(cache, want, equal_nan=True)
    if rotary is not None:
        torch.testing.assert_close(got, want_q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["table", "slots", "each"])
def test_paged(way: str, dtype: torch.dtype) -> None:
    """Into shuffled pages, over a page's end; and padding is not written."""
    _, k, v = _new(4, dtype=dtype)
    start = torch.tensor([14, 0, 31], dtype=torch.int32)
    table = torch.tensor([[5, 1, 3], [0, -1, -1], [2, 7, 6]], dtype=torch.int32)
    each = start[:, None] + torch.arange(4, dtype=torch.int32)
    each[1, 2:] = -1
    slots = torch.where(
        each < 0, -1, table.gather(1, (each.clamp(min=0) // PAGE).long()) * PAGE + each % PAGE
    )
    caches = torch.full((2, 8, PAGE, 2, 24), float("nan"), dtype=dtype)
    wanted = caches.clone()
    rows = each if way != "table" else start[:, None] + torch.arange(4)
    for b, n in torch.cartesian_prod(torch.arange(3), torch.arange(4)).tolist():
        at = int(rows[b, n])
        if at >= 0 and table[b, at // PAGE] >= 0:
            wanted[0, table[b, at // PAGE], at % PAGE] = k[b, :, n]
            wanted[1, table[b, at // PAGE], at % PAGE] = v[b, :, n]
    named: dict[str, Any] = {
        "table": {"block_table": table, "positions": start},
        "each": {"block_table": table, "positions": each},
        "slots": {"slots": slots.long()},
    }[way]
    assert attngen.append_kv(k, v, caches[0], caches[1], **named) is None
    torch.testing.assert_close(caches, wanted, equal_nan=True, rtol=0, atol=0)


def test_append_then_attend_is_attention() -> None:
    """Token by token into pages, as generation goes."""
    q, k, v = _new(20, dim=16)
    table = torch.randperm(6, generator=torch.Generator().manual_seed(0)).int().view(3, 2)
    keys, values = torch.full((2, 6, PAGE, 2, 16), float("nan"))
    want = attngen.attention(q, k, v, causal=True)
    for n in (*range(0, 18, 6), 18, 19):
        rows = slice(n, min(n + 6, 18) if n < 18 else n + 1)
        start = torch.full((3,), n, dtype=torch.int32)
        attngen.append_kv(
            k[:, :, rows], v[:, :, rows], keys, values, positions=start, block_table=table
        )
        used = start + (rows.stop - rows.start)
        out = attngen.attention(
            q[:, :, rows], keys, values, causal=True, block_table=table, seqused_k=used
        )
        torch.testing.assert_close(out, want[:, :, rows])


def test_torch_compile() -> None:
    q, k, v = _new(1)
    cos, sin = _angles(24)
    positions = torch.tensor([3, 0, 9], dtype=torch.int32)

    def step(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        turned = attngen.append_kv(
            k, v, k_cache, v_cache, positions=positions, q=q, cos=cos, sin=sin
        )
        used = positions + 1
        out: Tensor = attngen.attention(turned, k_cache, v_cache, seqused_k=used)
        return out

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    one, other = torch.zeros(2, 2, 3, 2, 16, 24)
    with torch.no_grad():
        assert torch.equal(step(*one), compiled(*other))
    assert torch.equal(one, other)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tokens_behind_the_last_angle_are_as_they_were(interleaved: bool) -> None:
    """Whatever they hold; those before the first place are not written, and not rotated either."""
    _, k, v = _new(2)
    k[0, 0, 1, 3] = float("inf")
    caches = torch.zeros(2, 3, 2, 40, 24).unbind()
    cos, sin = (x[:4].contiguous() for x in _angles(24))
    named = {"positions": torch.tensor([3, 3, -2]), "cos": cos, "sin": sin, "q": k}
    rotated = attngen.append_kv(k, v, *caches, interleaved=interleaved, **named)
    assert rotated is not None
    assert torch.equal(rotated[:2, :, 1], k[:2, :, 1]) and torch.equal(rotated[2], k[2])
    assert torch.equal(caches[0][:2, :, 4], k[:2, :, 1]) and not caches[0][2].any()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_autograd_learns_that_caches_were_written(mode: Any) -> None:
    _, k, v = _new(1)
    caches = torch.zeros(2, 3, 2, 40, 24).unbind()
    before = [cache._version for cache in caches]
    with mode():
        attngen.append_kv(k, v, *caches, positions=torch.zeros(3, dtype=torch.int32))
    assert all(cache._version > n for cache, n in zip(caches, before, strict=True))


def test_what_is_refused() -> None:
    q, k, v = _new(2)
    caches = torch.zeros(2, 3, 2, 40, 24)
    at = torch.zeros(3, dtype=torch.int32)
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("positions are missing", (k, v, *caches), {}),
        ("positions must have shape", (k, v, *caches), {"positions": at[:2]}),
        ("int32 or int64", (k, v, *caches), {"positions": at.float()}),
        ("does not fit", (k, v, *caches[:, :2]), {"positions": at}),
        ("cast k", (k, v, *caches.double()), {"positions": at}),
        ("float dtype", (k.long(), v.long(), *caches.long()), {"positions": at}),
        ("one place for each", (k, v, *caches[:, :1].expand(2, 3, 2, 40, 24)), {"positions": at}),
        ("are one tensor", (k, v, *[caches[0]] * 2), {"positions": at}),
        ("pass both", (k, v, *caches), {"positions": at, "q": q}),
        ("multiple of 16", (k, v, *caches.transpose(2, 3)), {"slots": torch.zeros(3, 2).int()}),
    ]
    for message, tensors, named in cases:
        with pytest.raises(attngen.SpecError, match=message):
            attngen.append_kv(*tensors, **named)
    with pytest.raises(attngen.UnsupportedSpecError, match="no backward"):
        attngen.append_kv(k.clone().requires_grad_(), v, *caches, positions=at)
    with pytest.raises(attngen.UnsupportedSpecError, match="vmap over append_kv"):
        torch.func.vmap(lambda k: attngen.append_kv(k, v, *caches, positions=at))(k[None])


def test_every_text_is_formatted_and_checks_itself(tmp_path: Path) -> None:
    for paged, slots, rotary, pairs in [
        (False, False, False, False),
        (True, False, True, False),
        (True, True, True, True),
        (True, True, False, False),
    ]:
        spec = AppendSpec(96, 40, paged, rotary or not slots, slots, rotary, pairs, rotary)
        path = tmp_path / f"{paged}{slots}{rotary}{pairs}.py"
        path.write_text(source(spec))
        done = run_file(path)
        assert done.returncode == 0 and "largest error" in done.stdout, done.stderr[-2000:]
    settings = ["--isolated", "--line-length", "100", "--target-version", "py310", str(tmp_path)]
    for command in (["format", "--check"], ["check", "--select", "F"]):
        found = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *settings], capture_output=True, text=True
        )
        assert found.returncode == 0, found.stdout[:2000]


@pytest.mark.parametrize("kind", ["tensor", "head", "key"])
@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("is_paged", [False, True], ids=["dense", "paged"])
def test_quantised_caches(is_paged: bool, stored: torch.dtype, kind: str) -> None:
    """What is written is what torch rounds to, with the scales given; beyond the range, its end."""
    generator = torch.Generator().manual_seed(2)
    k, v = (torch.randn(2, 2, 5, dim, generator=generator) for dim in (16, 24))
    k[0, 0, 0, :3] = torch.tensor([1e6, -1e6, 0.0])
    starts = torch.tensor([3, 14], dtype=torch.int32)
    named = {"positions": starts}
    if is_paged:
        named["block_table"] = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
        caches = [torch.zeros(4, 16, 2, dim).to(stored) for dim in (16, 24)]
        shape = {"tensor": (), "head": (4, 2), "key": (4, 16, 2)}[kind]
    else:
        caches = [torch.zeros(2, 2, 32, dim).to(stored) for dim in (16, 24)]
        shape = {"tensor": (), "head": (2, 2), "key": (2, 2, 32)}[kind]
    scales = [torch.rand(shape, generator=generator) * 0.02 + 0.01 for _ in range(2)]
    attngen.append_kv(k, v, *caches, **named, k_descale=scales[0], v_descale=scales[1])
    most = 127.0 if stored == torch.int8 else 448.0
    for x, cache, scale in zip((k, v), caches, scales, strict=True):
        seen = 0
        for b, head, n in itertools.product(range(2), range(2), range(5)):
            at: tuple[Any, ...] = (b, head, int(starts[b]) + n)
            if is_paged:
                page, place = divmod(at[2], 16)
                at = (int(named["block_table"][b, page]), place, head)
            of = {"tensor": (), "head": (at[0], head), "key": at}[kind]
            value = x[b, head, n] / scale[of]
            value = value.round() if stored == torch.int8 else value
            want = value.clamp(-most, most).to(stored)
            assert torch.equal(cache[at].float(), want.float())
            seen += 1
        assert (cache.float() != 0).any(-1).sum() == seen


def test_quantised_caches_are_checked() -> None:
    k = torch.zeros(1, 1, 1, 16)
    cache = torch.zeros(1, 1, 4, 16).to(torch.int8)
    starts, one = torch.zeros(1, dtype=torch.int32), torch.ones(())
    for error, message, caches, scales in (
        (attngen.SpecError, "need k_descale", (cache, cache), (None, None)),
        (attngen.SpecError, "of shape", (cache, cache), (one.repeat(2, 2), one.repeat(2, 2))),
        (attngen.SpecError, "float32", (cache, cache), (one.double(), one)),
        (attngen.SpecError, "leave them out", (cache.float(), cache.float()), (one, one)),
        (attngen.DtypeError, "must agree", (cache, cache.to(torch.float8_e4m3fn)), (one, one)),
    ):
        with pytest.raises(error, match=message):
            named = dict(zip(("k_descale", "v_descale"), scales, strict=True))
            attngen.append_kv(k, k, *caches, positions=starts, **named)
