"""The seams: positions and merge rebuild a dense call from shards, dropout bits included."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import SMALL_BWD, SMALL_FWD, assert_close, make_qkv
from torch import Tensor

import attngen
from attngen import kernel, render
from attngen.pinned import pinned

SEQLEN = 38  # no world, scheme or tile of 16 divides it
Piece = tuple[int, int, int]  # first row, step, number of rows


def _pieces(world: int, scheme: str) -> list[list[Piece]]:
    """Which rows each rank holds, as runs of rows `start + i * step`."""
    if scheme == "striped":
        return [[(rank, world, len(range(rank, SEQLEN, world)))] for rank in range(world)]

    def cut(parts: int) -> list[Piece]:
        chunks = torch.tensor_split(torch.arange(SEQLEN), parts)
        return [(int(chunk[0]), 1, len(chunk)) for chunk in chunks]

    if scheme == "contiguous":
        return [[piece] for piece in cut(world)]
    chunks = cut(2 * world)  # zigzag: rank r holds chunk r and its mirror
    return [[chunks[rank], chunks[-1 - rank]] for rank in range(world)]


def _rows(piece: Piece) -> Tensor:
    start, step, count = piece
    return start + step * torch.arange(count)


def _ring(
    q: Tensor, k: Tensor, v: Tensor, world: int, scheme: str, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """What a ring of `world` ranks returns, in the order of the whole sequence."""
    outs, lses, order = [], [], []
    ranks = _pieces(world, scheme)
    for mine in (piece for rank in ranks for piece in rank):
        found = None
        for theirs in (piece for rank in ranks for piece in rank):
            part = attngen.attention(
                q[:, :, _rows(mine)],
                k[:, :, _rows(theirs)],
                v[:, :, _rows(theirs)],
                return_lse=True,
                partial=True,
                q_start=mine[0],
                q_step=mine[1],
                k_start=theirs[0],
                k_step=theirs[1],
                seqlen_q_total=SEQLEN,
                seqlen_k_total=SEQLEN,
                **options,
            )
            found = part if found is None else attngen.merge(*found, *part)
        assert found is not None
        outs.append(found[0])
        lses.append(found[1])
        order.append(_rows(mine))
    back = torch.argsort(torch.cat(order))
    return torch.cat(outs, 2)[:, :, back], torch.cat(lses, 2)[:, :, back]


OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "causal-window": {"causal": True, "window": (11, 0)},
    "window-both": {"window": (7, 5)},
    "causal-dropout": {"causal": True, "dropout_p": 0.3, "dropout_seed": 7},
}

ALSO_OF_3 = ("causal-dropout", "striped")


def _rings() -> list[Any]:
    """A ring of 3 costs 9 to 36 calls: the default run has one."""
    return [
        pytest.param(
            world,
            scheme,
            options,
            id=f"{name}-{scheme}-{world}",
            marks=[pytest.mark.slow] if world == 3 and (name, scheme) != ALSO_OF_3 else [],
        )
        for name, options in OPTIONS.items()
        for scheme in ("contiguous", "zigzag", "striped")
        for world in (2, 3)
    ]


@pytest.mark.parametrize(("world", "scheme", "options"), _rings())
def test_ring_equals_dense(world: int, scheme: str, options: dict[str, Any]) -> None:
    q, k, v = make_qkv(heads=2, heads_kv=1, seqlen_q=SEQLEN)
    do = torch.randn(q.shape)
    dlse = torch.randn(q.shape[:3])
    want = attngen.attention(q, k, v, return_lse=True, **options)
    got = _ring(q, k, v, world, scheme, options)
    assert_close(got, want)
    assert_close(
        torch.autograd.grad(got, (q, k, v), (do, dlse)),
        torch.autograd.grad(want, (q, k, v), (do, dlse)),
    )


def _identity_values(seqlen: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with v = identity, so that zeros of out are the entries that dropout removed."""
    q, k, _ = make_qkv(batch=3, heads=4, seqlen_q=seqlen)
    return q, k, torch.eye(seqlen).expand(3, 4, seqlen, seqlen)


def test_shards_of_heads_and_batch_draw_the_bits_of_the_whole() -> None:
    q, k, v = _identity_values(18)
    options = {"dropout_p": 0.4, "dropout_seed": 123}
    whole = attngen.attention(q, k, v, **options)
    assert torch.equal(whole != 0, attngen.dropout_keep(123, 3, 4, 18, 18, 0.4))
    shard = attngen.attention(
        q[1:, 2:], k[1:, 2:], v[1:, 2:], batch_start=1, head_start=2, **options
    )
    assert torch.equal(shard, whole[1:, 2:])
    unplaced = attngen.attention(q[1:, 2:], k[1:, 2:], v[1:, 2:], **options)
    assert not torch.equal(unplaced != 0, whole[1:, 2:] != 0)


def test_heads_shard_of_grouped_queries_draws_the_bits_of_the_whole_backward_too() -> None:
    q, k, v = make_qkv(heads=4, heads_kv=2, seqlen_q=18)
    do = torch.randn(q.shape)
    options = {"dropout_p": 0.4, "dropout_seed": 5, "causal": True}
    want = torch.autograd.grad(attngen.attention(q, k, v, **options), (q, k, v), do)
    shard = attngen.attention(q[:, 2:], k[:, 1:], v[:, 1:], head_start=2, **options)
    got = torch.autograd.grad(shard, (q, k, v), do[:, 2:])
    assert torch.equal(got[0][:, 2:], want[0][:, 2:])
    assert torch.equal(got[1][:, 1:], want[1][:, 1:])
    assert torch.equal(got[2][:, 1:], want[2][:, 1:])


# ---- the online softmax ---------------------------------------------------------------------

FIRST = [[10.0, 20.0], [10.0, 10.0]]
SECOND = [[30.0, 5.0], [5.0, 5.0]]
"""The worked example of the papers: the maximum of row 0 moves from 20 to 30, row 1's stays."""

ONE_TILE = """

@triton.jit
def one_tile(
    state_ptr, acc_ptr, q_ptr, k_ptr, v_ptr, hi, BLOCK: tl.constexpr, CAREFUL: tl.constexpr
):
    rows = tl.arange(0, BLOCK)
    at = rows[:, None] * BLOCK + rows[None, :]
    acc, l_i, m_i = attend(
        acc=tl.load(acc_ptr + at),
        l_i=tl.load(state_ptr + BLOCK + rows),
        m_i=tl.load(state_ptr + rows),
        q=tl.load(q_ptr + at),
        k_head=k_ptr,
        stride_ks=BLOCK,
        v_head=v_ptr,
        stride_vs=BLOCK,
        start_m=0,
        lo=0,
        hi=hi,
        hi_i=tl.zeros([BLOCK], tl.int32) + hi,
        seqlen_k=hi,
        qk_scale=1.0,
        exp_scale=1.4426950408889634,
        BLOCK_M=BLOCK,
        BLOCK_N=BLOCK,
        PARTIAL=True,
        CAREFUL=CAREFUL,
    )
    tl.store(state_ptr + rows, m_i)
    tl.store(state_ptr + BLOCK + rows, l_i)
    tl.store(acc_ptr + at, acc)
"""
"""Appended to an emitted file: load (m, l, acc), attend to one tile of keys, store them again."""


@pytest.mark.parametrize(
    ("precision", "careful", "unit"),
    [
        pytest.param("ieee", False, 1.0, id="exact"),
        pytest.param("tf32", False, math.log2(math.e), id="usual"),  # m in units of exp2
        pytest.param("tf32", True, 1.0, id="careful"),
    ],
)
def test_softmax_part_follows_the_worked_example(
    precision: str, careful: bool, unit: float, tmp_path: Path
) -> None:
    """m, l and acc after each tile, for v = identity (so acc holds the unnormalised P)."""
    spec = attngen.AttentionSpec(head_dim=16, dtype="float32", precision=precision)
    path = tmp_path / "softmax_part.py"
    path.write_text(render.render(spec, SMALL_FWD) + ONE_TILE)
    one_tile = kernel.load(path, interpret=True).one_tile

    block = 16
    state = torch.stack([torch.full((block,), -math.inf), torch.zeros(block)])
    acc = torch.zeros(block, block)
    q, v = torch.eye(block), torch.eye(block)

    def attend(scores: list[list[float]], values: Tensor) -> None:
        k = torch.zeros(block, block)
        k[:2, :2] = torch.tensor(scores).T  # q is the identity, so q @ k.T are the scores
        one_tile[(1,)](state, acc, q, k, values, 2, BLOCK=block, CAREFUL=careful)

    e = math.exp

    def assert_state(m: list[float], total: list[float], p: list[list[float]]) -> None:
        right = torch.tensor([[x * unit for x in m], total])
        torch.testing.assert_close(state[:, :2], right, rtol=3e-6, atol=0)
        wanted = torch.tensor(p)
        torch.testing.assert_close(acc[:2, : wanted.shape[1]], wanted, rtol=1e-5, atol=1e-12)

    attend(FIRST, v)
    assert_state([20, 10], [e(-10) + 1, 2], [[e(-10), 1], [1, 1]])
    attend(SECOND, v.roll(2, 1))
    assert_state(
        [30, 10],
        [e(-20) + e(-10) + 1 + e(-25), 2 + 2 * e(-5)],
        [[e(-20), e(-10), 1, e(-25)], [1, 1, e(-5), e(-5)]],
    )


def _worked_example() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v that give the scores above, and the right out and lse."""
    scores = torch.cat([torch.tensor(FIRST), torch.tensor(SECOND)], 1)
    q, k, v = torch.eye(2), scores.T.contiguous(), torch.eye(4)
    wide = scores.double()
    right = (torch.softmax(wide, -1).float(), torch.logsumexp(wide, -1).float())
    return q[None, None], k[None, None], v[None, None], *(x[None, None] for x in right)


def test_whole_call_follows_the_worked_example() -> None:
    q, k, v, out, lse = _worked_example()
    got = attngen.attention(q, k, v, softmax_scale=1.0, return_lse=True)
    assert_close(got, (out, lse), atol=2e-6)


def test_merge_follows_the_worked_example() -> None:
    q, k, v, out, lse = _worked_example()
    halves = [
        attngen.attention(
            q, k[:, :, at], v[:, :, at], softmax_scale=1.0, return_lse=True, partial=True
        )
        for at in (slice(0, 2), slice(2, 4))
    ]
    first_lse = [20 + math.log1p(math.exp(-10)), 10 + math.log(2)]
    torch.testing.assert_close(halves[0][1].flatten(), torch.tensor(first_lse))
    assert_close(attngen.merge(*halves[0], *halves[1]), (out, lse), atol=2e-6)
    assert_close(attngen.merge(*halves[1], *halves[0]), (out, lse), atol=2e-6)


# ---- merge ----------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [-math.inf, math.inf], ids=["minus-inf", "plus-inf"])
def test_merge_with_an_empty_side_returns_the_other(nothing: float) -> None:
    out, lse = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
    empty = torch.zeros_like(out), torch.full_like(lse, nothing)
    assert_close(attngen.merge(out, lse, *empty), (out, lse), atol=1e-6)
    assert_close(attngen.merge(*empty, out, lse), (out, lse), atol=1e-6)
    both_out, both_lse = attngen.merge(*empty, *empty)
    assert torch.equal(both_out, empty[0])
    assert torch.equal(both_lse, torch.full_like(lse, -math.inf))


def test_merge_gradients_are_finite_and_right_with_empty_rows() -> None:
    leaves = [
        x.requires_grad_()
        for x in (torch.randn(1, 1, 4, 3), torch.randn(1, 1, 4), torch.randn(1, 1, 4, 3))
    ]
    out_a, lse_a, out_b = leaves
    # row 0: side b is empty; row 1: both are; rows 2, 3: neither
    lse_b = torch.tensor([[[-math.inf, -math.inf, 0.3, -0.7]]]).requires_grad_()
    hidden = torch.tensor([[[False, True, False, False]]])
    out, lse = attngen.merge(out_a, lse_a.masked_fill(hidden, -math.inf), out_b, lse_b)
    loss = out.sum() + lse[~torch.isinf(lse)].sum()
    grads = torch.autograd.grad(loss, [*leaves, lse_b])
    assert all(torch.isfinite(g).all() for g in grads)
    weight = torch.softmax(torch.stack([lse_a, lse_b], -1)[0, 0, 2], -1)
    torch.testing.assert_close(grads[0][0, 0, 2], weight[0].expand(3))
    torch.testing.assert_close(grads[0][0, 0, 0], torch.ones(3))
    assert not grads[0][0, 0, 1].any() and not grads[2][0, 0, :2].any()


def test_merge_refuses_shapes_that_do_not_belong_together() -> None:
    out, lse = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
    with pytest.raises(attngen.SpecError, match=r"one shape, got out \(1, 2, 5, 8\) and \(1, 2, 4"):
        attngen.merge(out, lse, out[:, :, :4], lse[:, :, :4])
    with pytest.raises(attngen.SpecError, match="transpose a bshd out to bhsd first"):
        attngen.merge(*(out.transpose(1, 2), lse) * 2)


def test_merge_keeps_the_dtype_of_the_outs() -> None:
    out, lse = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5)
    assert attngen.merge(out.half(), lse, out.half(), lse)[0].dtype == torch.float16
    assert attngen.merge(out, lse, out.half(), lse)[0].dtype == torch.float32


# ---- dropout bits ---------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 3], ids=["aligned", "unaligned"])
def test_dropout_bits_do_not_depend_on_tiles(start: int) -> None:
    """Small tiles against the default's, keys from a row that is (not) a multiple of 4."""
    q, k, v = _identity_values(36)
    options: dict[str, Any] = {
        "dropout_p": 0.5,
        "dropout_seed": 9,
        "k_start": start,
        "q_start": 2,
        "return_lse": True,
    }
    out, lse = attngen.attention(q, k, v, **options)
    with pinned({"fwd": SMALL_FWD, "bwd": SMALL_BWD}):
        small, small_lse = attngen.attention(q, k, v, **options)
    assert torch.equal(out != 0, small != 0)
    assert_close((small, small_lse), (out, lse))
    bits = attngen.dropout_keep(9, 3, 4, 40, 40, 0.5)[:, :, 2:38, start : start + 36]
    assert torch.equal(out != 0, bits)
