"""Ulysses: from shards of rows to shards of heads, and back, by one all-to-all each way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from attngen.distributed import comm
from attngen.distributed.heads import Share, is_shared, shares
from attngen.distributed.layouts import Order, Pieces, in_order, length, reordered

Side = Literal["q", "k"]


class Exchange:
    """The two layouts of a group: each rank has all heads of its own rows, or its own heads of the
    rows of all, in the order of the sequence.

    Args:
        group: the ranks that share heads out.
        rank: this one's place among them.
        q_rows, k_rows: which rows each of them holds.
        heads, heads_kv: of the whole attention.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        q_rows: tuple[Pieces, ...],
        k_rows: tuple[Pieces, ...],
        heads: int,
        heads_kv: int,
    ) -> None:
        self.group, self.rank = group, rank
        self.heads = {"q": heads, "k": heads_kv}
        self.each = shares(heads, heads_kv, len(q_rows))
        self.mine = self.each[rank]
        self.counts = {"q": [length(x) for x in q_rows], "k": [length(x) for x in k_rows]}
        self.order: dict[str, Order | None] = {}
        self.held: dict[str, Pieces] = {}
        for side, rows in (("q", q_rows), ("k", k_rows)):
            self.held[side], self.order[side] = in_order(rows)

    @property
    def is_shared(self) -> bool:
        """Does a kv head go to several ranks, whose gradients are then added?"""
        return is_shared(self.each)

    def _heads(self, share: Share, side: Side) -> tuple[int, int]:
        return share.q if side == "q" else share.kv

    def to_heads(self, *given: tuple[Tensor, Side]) -> list[Tensor]:
        """(batch, heads, own rows, ...) as (batch, own heads, rows of all, ...), of one dtype."""
        parts = [[x[:, slice(*self._heads(s, side))] for x, side in given] for s in self.each]
        shapes = []
        for member in range(len(self.each)):
            each = []
            for x, side in given:
                first, last = self._heads(self.mine, side)
                each.append((x.shape[0], last - first, self.counts[side][member], *x.shape[3:]))
            shapes.append(each)
        found = comm.all_to_all(parts, shapes, self.group)
        made = []
        for n, (_, side) in enumerate(given):
            rows = torch.cat([each[n] for each in found], 2)
            made.append(reordered(rows, self.order[side], 2))
        return made

    def to_rows(self, *given: tuple[Tensor, Side]) -> list[Tensor]:
        """The way back, all of one dtype; what several ranks have of a kv head is added."""
        split = [
            reordered(x, self.order[side], 2, back=True).split(self.counts[side], 2)
            for x, side in given
        ]
        parts = [[each[member] for each in split] for member in range(len(self.each))]
        shapes = [
            [
                (x.shape[0], b - a, self.counts[side][self.rank], *x.shape[3:])
                for x, side in given
                for a, b in [self._heads(share, side)]
            ]
            for share in self.each
        ]
        found = comm.all_to_all(parts, shapes, self.group)
        return [
            self._joined([each[n] for each in found], side) for n, (_, side) in enumerate(given)
        ]

    def _joined(self, parts: Sequence[Tensor], side: Side) -> Tensor:
        if side == "q" or not self.is_shared:
            return torch.cat(list(parts), 1)
        first = parts[0]
        total = first.new_zeros((first.shape[0], self.heads[side], *first.shape[2:]))
        for share, part in zip(self.each, parts, strict=True):
            total[:, slice(*share.kv)].add_(part)
        return total

    def ids(self, x: Tensor, side: Side) -> Tensor:
        """Document ids, (1 or batch, own rows), of the rows of all."""
        shapes = [(count, x.shape[0]) for count in self.counts[side]]
        rows = torch.cat(comm.all_gather(x.mT.contiguous(), shapes, self.group))
        return reordered(rows, self.order[side], 0).mT.contiguous()
