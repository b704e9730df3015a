"""Which calls of a kernel one hop is: some of the queries against some of the keys.

Where causal masks alone decide, a block of queries and keys is wholly seen, wholly hidden, or its
diagonal is its own: kernels of plain full and plain causal attention serve it, with no positions.
Everything else goes by positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from attngen.distributed.layouts import Piece, Pieces
from attngen.spec import AttentionSpec

Kind = Literal["full", "causal", "placed"]
Rows = tuple[int, int]
"""From, to (exclusive): rows of a shard."""


class Block(NamedTuple):
    """A call: rows of this rank's queries, and of a shard of keys."""

    rows: Rows
    keys: Rows
    kind: Kind
    """"full": all is seen; "causal": aligned at the bottom right; "placed": by positions."""
    q: Piece | None = None
    k: Piece | None = None
    """Where the rows stand, if placed."""


@dataclass(frozen=True)
class Rules:
    """What of a spec and its numbers says which keys a query sees, in positions."""

    left: int | None
    right: int | None
    chunk: int | None
    align: int
    """Position of query row 0."""
    is_plain: bool
    """A causal mask is all that positions decide."""
    by_place: bool
    """Each call needs positions, also where all is seen."""

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        left: int | None,
        right: int | None,
        chunk: int | None,
        totals: tuple[int, int],
        bottom_right: bool,
    ) -> Rules:
        """Of a text's spec, its numbers, and the whole lengths of q and k."""
        right = 0 if spec.is_causal else right
        by_place = (
            spec.alibi
            or spec.has_dropout
            or spec.has_functions
            or spec.has_score_entries
            or spec.moves_limits
        )
        align = totals[1] - totals[0] if bottom_right else 0
        is_plain = spec.is_causal and left is None and chunk is None and not by_place
        return cls(left, None if spec.moves_limits else right, chunk, align, is_plain, by_place)

    def sight(self, q: Piece, k: Piece) -> Literal["none", "full", "some"]:
        """How much of k's rows those of q see."""
        first, last = q.start + self.align, q.last + self.align
        is_full = not self.by_place
        if self.right is not None:
            if k.start - last > self.right:
                return "none"
            is_full &= k.last - first <= self.right
        if self.left is not None:
            if k.last - first < -self.left:
                return "none"
            is_full &= k.start - last >= -self.left
        if self.chunk is not None:
            chunks = [n // self.chunk for n in (first, last, k.start, k.last)]
            if chunks[2] > chunks[1] or chunks[3] < chunks[0]:
                return "none"
            is_full &= min(chunks) == max(chunks)
        return "full" if is_full else "some"


@functools.lru_cache(maxsize=4096)
def blocks(mine: Pieces, theirs: Pieces, rules: Rules) -> tuple[Block, ...]:
    """The calls of one hop; none if nothing is seen."""
    if rules.is_plain and mine == theirs and rules.align == 0 and _ascend(mine) and mine:
        everything = (0, sum(piece.size for piece in mine))
        return (Block(everything, everything, "causal"),)  # in local rows as in whole ones
    found: list[Block] = []
    for rows, q in _placed(mine):
        spans: list[Rows] = []
        for keys, k in _placed(theirs):
            sight = rules.sight(q, k)
            if sight == "full" and spans and spans[-1][1] == keys[0]:
                spans[-1] = (spans[-1][0], keys[1])
            elif sight == "full":
                spans.append(keys)
            elif sight == "some":
                found.append(_diagonal(rows, q, keys, k, rules))
        for keys in spans:
            at = next((n for n, b in enumerate(found) if _goes_on(b, rows, keys)), None)
            if at is None:
                found.append(Block(rows, keys, "full"))
            else:
                found[at] = Block((found[at].rows[0], rows[1]), keys, "full")
    return tuple(found)


def _ascend(held: Pieces) -> bool:
    return all(a.last < b.start for a, b in zip(held, held[1:], strict=False))


def _goes_on(block: Block, rows: Rows, keys: Rows) -> bool:
    return block.kind == "full" and block.rows[1] == rows[0] and block.keys == keys


def _placed(held: Pieces) -> Iterator[tuple[Rows, Piece]]:
    at = 0
    for piece in held:
        yield (at, at + piece.size), piece
        at += piece.size


def _diagonal(rows: Rows, q: Piece, keys: Rows, k: Piece, rules: Rules) -> Block:
    """A block that is seen in part."""
    end = q.last + rules.align + 1
    begins = k.start <= q.start + rules.align
    if rules.is_plain and q.step == k.step == 1 and begins and end <= k.last + 1:
        return Block(rows, (keys[0], keys[0] + end - k.start), "causal")
    return Block(rows, keys, "placed", q, k)
