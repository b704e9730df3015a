"""What context parallelism is planned by, without any process group: layouts, blocks, rings, heads.

And what docs/context_parallel.md says of it.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from support import REPO
from torch import Tensor

import attngen
from attngen import distributed
from attngen.distributed.blocks import Rules, blocks
from attngen.distributed.heads import runs, shares
from attngen.distributed.layouts import LAYOUTS, in_order, pieces, rows_of
from attngen.distributed.op import sinks_gradient
from attngen.distributed.ring import ring_of

LENGTHS = (1, 7, 24, 37)


def rules(options: dict[str, Any], totals: tuple[int, int]) -> Rules:
    spec = attngen.AttentionSpec(head_dim=16, **options)
    left, right = spec.window or (None, None)
    return Rules.of(spec, left, right, spec.chunk, totals, spec.causal != "top_left")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("seqlen", LENGTHS)
def test_layouts_share_out_every_row_once(layout: str, world: int, seqlen: int) -> None:
    shards = tuple(pieces(layout, rank, world, seqlen) for rank in range(world))
    rows = [row for shard in shards for row in rows_of(shard)]
    assert sorted(rows) == list(range(seqlen))
    sizes = [len(rows_of(shard)) for shard in shards]
    assert max(sizes) - min(sizes) <= (2 if layout == "zigzag" else 1)
    held, _ = in_order(shards)
    assert rows_of(held) == list(range(seqlen))


OPTIONS = (
    {},
    {"causal": True},
    {"causal": "top_left"},
    {"window": (5, 2)},
    {"causal": True, "window": (4, 0)},
    {"causal": True, "chunk": 6},
    {"causal": True, "alibi": True},
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("totals", [(37, 37), (24, 31), (31, 24)])
def test_blocks_cover_what_is_seen_once(
    layout: str, options: dict[str, Any], totals: tuple[int, int]
) -> None:
    world, rule = 3, rules(options, totals)
    i, j = torch.arange(totals[0])[:, None], torch.arange(totals[1])
    spec = attngen.AttentionSpec(head_dim=16, **options)
    from attngen.softmax_reference import visible

    seen = visible(spec, i + rule.align, j)
    for mine in range(world):
        for theirs in range(world):
            q, k = (
                pieces(layout, r, world, total)
                for r, total in zip((mine, theirs), totals, strict=True)
            )
            rows, keys = rows_of(q), rows_of(k)
            want = seen[rows][:, keys].int()
            got = torch.zeros_like(want)
            for block in blocks(q, k, rule):
                at = slice(*block.rows), slice(*block.keys)
                got[at] += _sees(block, rule, rows, keys)
            assert torch.equal(got, want), f"{mine} {theirs}"


def _sees(block: Any, rule: Rules, rows: list[int], keys: list[int]) -> Tensor:
    """What a block's call sees, by its own numbers."""
    (a, b), (c, d) = block.rows, block.keys
    n, m = b - a, d - c
    if block.kind == "full":
        return torch.ones(n, m, dtype=torch.int32)
    if block.kind == "causal":
        return torch.ones(n, m, dtype=torch.int32).tril(m - n)
    q = block.q.start + rule.align + block.q.step * torch.arange(n)[:, None]
    k = block.k.start + block.k.step * torch.arange(m)
    seen = torch.ones(n, m, dtype=torch.bool)
    if rule.right is not None:
        seen &= k - q <= rule.right
    if rule.left is not None:
        seen &= k - q >= -rule.left
    if rule.chunk is not None:
        seen &= k // rule.chunk == q // rule.chunk
    return seen.int()


@pytest.mark.parametrize("world", [2, 4])
def test_zigzag_is_made_of_calls_without_positions(world: int) -> None:
    """One call a hop, and as much work for every rank."""
    rule = rules({"causal": True}, (64, 64))
    shards = tuple(pieces("zigzag", r, world, 64) for r in range(world))
    for rank in range(world):
        hops = ring_of(rank, shards, shards, rule).hops
        assert [len(hop) for hop in hops] == [1] * world
        assert [hop[0].kind for hop in hops] == ["causal"] + ["full"] * (world - 1)
        areas = [(b[0].rows[1] - b[0].rows[0]) * (b[0].keys[1] - b[0].keys[0]) for b in hops[1:]]
        assert areas == [(64 // world) ** 2 // 2] * (world - 1)


def test_contiguous_causal_ring_skips_and_does_not_send() -> None:
    rule, world = rules({"causal": True}, (40, 40)), 4
    shards = tuple(pieces("contiguous", r, world, 40) for r in range(world))
    ring = ring_of(1, shards, shards, rule)
    assert [len(hop) for hop in ring.hops] == [1, 1, 0, 0]
    assert [len(step) for step in ring.keys] == [0, 3, 2, 1, 0]
    # Gradients follow, and go home from the last rank that needs the keys.
    homes = [(m.source, m.target) for step in ring.grads for m in step if m.target == m.block]
    assert sorted(homes) == [(3, 0), (3, 1), (3, 2)]


def test_window_needs_neighbours_alone() -> None:
    rule, world = rules({"causal": True, "window": (9, 0)}, (80, 80)), 8
    shards = tuple(pieces("contiguous", r, world, 80) for r in range(world))
    ring = ring_of(3, shards, shards, rule)
    assert [len(hop) for hop in ring.hops] == [1, 1, 0, 0, 0, 0, 0, 0]
    assert [len(step) for step in ring.keys] == [0, 7, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("heads", "heads_kv", "world"),
    [(40, 8, 8), (40, 8, 16), (40, 8, 40), (28, 4, 8), (6, 3, 4), (7, 1, 3), (5, 5, 4)],
)
def test_ulysses_gives_every_head_to_a_rank_with_its_keys(
    heads: int, heads_kv: int, world: int
) -> None:
    """ULY-1 and ULY-4 among them."""
    group, done = heads // heads_kv, []
    for share in shares(heads, heads_kv, world):
        for run in runs(share, group):
            size = (run.q[1] - run.q[0]) // (run.kv[1] - run.kv[0])
            for n in range(*run.q):
                head = share.q[0] + n
                assert share.kv[0] + run.kv[0] + (n - run.q[0]) // size == head // group
                done.append(head)
    assert done == list(range(heads))


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(attngen.UnsupportedSpecError, match=r"8, over 16 ranks; use method=.ring"):
        shares(8, 8, 16)


def test_unknown_words_are_refused() -> None:
    with pytest.raises(attngen.SpecError, match="layout must say which rows"):
        distributed.positions("bshd", 0, 2, 8)
    with pytest.raises(attngen.SpecError, match=r"did you mean .ulysses"):
        distributed.ContextParallel(method="ulises")
    with pytest.raises(attngen.SpecError, match="torch.distributed is not initialised"):
        distributed.attention(*[torch.randn(1, 1, 4, 16)] * 3)
    spec = attngen.AttentionSpec(head_dim=16)
    with pytest.raises(attngen.SpecError, match="must be an attngen.distributed.ContextParallel"):
        attngen.compile(spec, context_parallel="ring")


def _output(name: str) -> str:
    done = subprocess.run(
        [sys.executable, str(REPO / "examples" / name)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_document_has_the_tables_of_the_model() -> None:
    assert _output("context_parallel_model.py") in (REPO / "docs/context_parallel.md").read_text()


@pytest.mark.slow
def test_ring_training_loses_as_one_process() -> None:
    assert "largest difference" in _output("ring_training.py")


def test_the_gradient_of_a_sink_of_minus_infinity_is_zero_where_nothing_is_seen() -> None:
    nothing = torch.full((1, 2, 3), float("-inf"))
    sinks, zeros = nothing[0, :, 0], torch.zeros(1, 2, 3, 4)
    assert (sinks_gradient(sinks, zeros, nothing, zeros + 1) == 0).all()
