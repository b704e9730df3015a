"""The ring: keys and values go from rank to rank, and each computes with those it holds.

In hop t a rank holds the keys of the rank t before it. The next keys are under way while a hop
computes, in memory of their own; on CUDA, on the stream of the process group. Keys that no rank
further on needs are not sent on, and a hop of which nothing is seen is not computed. Partial
results are float32 and joined by their lse, the larger one subtracted first.

Backward, keys go round again, and their gradients, float32, follow one hop behind: each rank adds
its share and sends them on, and from the last rank that needs the keys they go home.

All ranks know all messages of a step and begin them in one order, so that none waits in a circle.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from attngen.distributed import comm
from attngen.distributed.blocks import Block, Rules, blocks
from attngen.distributed.comm import Message
from attngen.distributed.heads import Run
from attngen.distributed.layouts import Pieces, length
from attngen.distributed.work import Keys, Work

Shards = tuple[Pieces, ...]
"""Which rows each rank of a ring holds."""


class Ring(NamedTuple):
    """Who computes what, and who sends what to whom, of all ranks."""

    hops: tuple[tuple[Block, ...], ...]
    """What this rank computes in each hop."""
    keys: tuple[tuple[Message, ...], ...]
    """Messages that bring the keys of hop t, by t; none for hop 0."""
    grads: tuple[tuple[Message, ...], ...]
    """Messages after hop t - 1 that bring gradients of keys, by t; one step more than hops."""


@functools.lru_cache(maxsize=1024)
def ring_of(rank: int, q_shards: Shards, k_shards: Shards, rules: Rules) -> Ring:
    """The ring of a rank."""
    world = len(q_shards)

    def at(who: int, source: int) -> tuple[Block, ...]:
        return blocks(q_shards[who], k_shards[source], rules)

    last = []
    for source in range(world):
        needed = [t for t in range(world) if at((source + t) % world, source)]
        last.append(max(needed, default=0))
    keys: list[tuple[Message, ...]] = []
    grads: list[tuple[Message, ...]] = []
    for t in range(world + 1):
        moved = [
            Message((source + t - 1) % world, (source + t) % world, source)
            for source in range(world)
            if 0 < t <= last[source]
        ]
        home = [
            Message((source + t - 1) % world, source, source)
            for source in range(world)
            if t - 1 == last[source] > 0
        ]
        keys.append(tuple(moved))
        grads.append((*moved, *home))
    hops = tuple(at(rank, (rank - t) % world) for t in range(world))
    return Ring(hops, tuple(keys), tuple(grads))


class _Joined:
    """The online softmax over hops."""

    def __init__(self, q: Tensor, dim_v: int) -> None:
        self.shape, self.like = (*q.shape[:3], dim_v), q
        self.out: Tensor | None = None
        self.lse: Tensor | None = None

    def add(self, block: Block, out: Tensor, lse: Tensor) -> None:
        rows = block.rows
        if self.out is None and rows == (0, self.shape[2]):
            self.out, self.lse = out, lse
            return
        all_out, all_lse = self._made()
        part, known = all_out[:, :, rows[0] : rows[1]], all_lse[:, :, rows[0] : rows[1]]
        top = torch.maximum(known, lse)
        empty = top == float("-inf")
        top = top.masked_fill(empty, 0.0)
        old, new = torch.exp(known - top), torch.exp(lse - top)
        total = (old + new).masked_fill_(empty, 1.0)
        part.lerp_(out, (new / total).unsqueeze(-1))
        known.copy_(torch.log(total).add_(top).masked_fill_(empty, float("-inf")))

    def _made(self) -> tuple[Tensor, Tensor]:
        if self.out is None or self.lse is None:
            self.out = self.like.new_zeros(self.shape, dtype=torch.float32)
            self.lse = self.like.new_full(self.shape[:3], float("-inf"), dtype=torch.float32)
        return self.out, self.lse

    def result(self) -> tuple[Tensor, Tensor]:
        return self._made()


class _Under:
    """Keys that go round: those of this hop, and the next under way."""

    def __init__(self, keys: Keys, k_shards: Shards, ring: Ring, group: Any, what: str) -> None:
        self.ring, self.group, self.what, self.k_shards = ring, group, what, k_shards
        self.world = len(k_shards)
        self.rank = 0 if self.world == 1 else dist.get_rank(group)
        self.first, self.held = keys, {self.rank: keys}
        self.pending: comm.Pending | None = None

    def begin(self, hop: int) -> Keys | None:
        """The keys of a hop, None if they were not needed; sets out those of the next."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        source = (self.rank - hop) % self.world
        keys = self.held.get(source)
        self.held = {} if keys is None else {source: keys}
        if hop + 1 < self.world:
            self._send(self.ring.keys[hop + 1])
        return keys

    def _send(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        incoming = {
            m.block: self.first.like(length(self.k_shards[m.block]))
            for m in messages
            if m.target == self.rank
        }
        outgoing = {block: keys.tensors for block, keys in self.held.items()}
        into = {block: keys.tensors for block, keys in incoming.items()}
        self.pending = comm.post(messages, outgoing, into, self.group, self.what, "keys and values")
        self.held |= incoming


def forward(
    work: Work, q: Tensor, keys: Keys, q_shards: Shards, k_shards: Shards, group: Any, what: str
) -> tuple[Tensor, Tensor]:
    """out and lse of this rank's queries, float32, without sinks."""
    rank = 0 if len(q_shards) == 1 else dist.get_rank(group)
    ring = ring_of(rank, q_shards, k_shards, work.rules)
    under, joined = _Under(keys, k_shards, ring, group, what), _Joined(q, keys.v.shape[3])
    for hop, todo in enumerate(ring.hops):
        here = under.begin(hop)
        for block in todo:
            assert here is not None
            joined.add(block, *work.forward(block, q, here))
    return joined.result()


def backward(
    work: Work,
    q: Tensor,
    keys: Keys,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    q_shards: Shards,
    k_shards: Shards,
    group: Any,
    what: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of this rank's rows, float32 unless one call made them."""
    world = len(q_shards)
    rank = 0 if world == 1 else dist.get_rank(group)
    ring = ring_of(rank, q_shards, k_shards, work.rules)
    under = _Under(keys, k_shards, ring, group, what)
    if world == 1 and len(work.runs) == 1 and len(ring.hops[0]) == 1:
        (block,) = ring.hops[0]
        if block.rows == (0, q.shape[2]) and block.keys == (0, keys.k.shape[2]):
            ((_, dq, dk, dv),) = work.backward(block, q, keys, out, lse, dout, dlse)
            return dq, dk, dv
    total = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    grads: dict[int, list[Tensor]] = {rank: keys.sums(keys.k.shape[2], zero=True)}
    home: list[Tensor] | None = None
    pending: comm.Pending | None = None
    for hop in range(world + 1):
        parts: list[tuple[Block, Run, Tensor, Tensor]] = []
        source = (rank - hop) % world
        if hop < world:
            here = under.begin(hop)
            for block in ring.hops[hop]:
                assert here is not None
                for run, dq, dk, dv in work.backward(block, q, here, out, lse, dout, dlse):
                    total[:, slice(*run.q), slice(*block.rows)].add_(dq)
                    parts.append((block, run, dk, dv))
        if pending is not None:
            pending.wait()
            pending = None
        if any(m.target == m.block == rank for m in ring.grads[hop]):
            home = grads.pop(rank)
        if hop == world:
            break
        for block, run, dk, dv in parts:
            at = (slice(None), slice(*run.kv), slice(*block.keys))
            grads[source][0][at].add_(dk)
            grads[source][1][at].add_(dv)
        messages = ring.grads[hop + 1]
        leaving = [m.block for m in messages if m.source == rank]
        if hop == 0 and rank not in leaving:
            home = grads.pop(rank)
        outgoing = {block: grads.pop(block) for block in leaving}
        into = {m.block: keys.sums(length(k_shards[m.block])) for m in messages if m.target == rank}
        if messages:
            pending = comm.post(messages, outgoing, into, group, what, "gradients of keys")
        grads |= into
    assert home is not None
    return total, home[0], home[1]
