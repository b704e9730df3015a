"""Which heads each rank of Ulysses computes, and in how many calls."""

from __future__ import annotations

import functools
from typing import NamedTuple

from attngen.errors import UnsupportedSpecError


class Run(NamedTuple):
    """Heads of one call: as many query heads to each kv head."""

    q: tuple[int, int]
    kv: tuple[int, int]


class Share(NamedTuple):
    """Heads of a rank, from and to (exclusive)."""

    q: tuple[int, int]
    kv: tuple[int, int]

    @property
    def num_q(self) -> int:
        return self.q[1] - self.q[0]

    @property
    def num_kv(self) -> int:
        return self.kv[1] - self.kv[0]


@functools.lru_cache(maxsize=256)
def shares(heads: int, heads_kv: int, world: int) -> tuple[Share, ...]:
    """Query heads shared out evenly, the first ranks with one more, and the kv heads they read: one
    that several ranks read is sent to each of them.

    Raises:
        UnsupportedSpecError: a rank would have no head.
    """
    if heads < world:
        raise UnsupportedSpecError(
            [
                f"method ulysses shares out query heads, of which there are {heads}, over {world} "
                'ranks; use method="ring", or "usp" with a mesh whose second dim is at most '
                f"{heads}"
            ]
        )
    group = heads // heads_kv
    size, more = divmod(heads, world)
    found, at = [], 0
    for rank in range(world):
        end = at + size + (rank < more)
        found.append(Share((at, end), (at // group, (end - 1) // group + 1)))
        at = end
    return tuple(found)


@functools.lru_cache(maxsize=256)
def runs(share: Share, group: int) -> tuple[Run, ...]:
    """The calls of a rank, in its own numbers of heads: kv heads in the middle, all of whose query
    heads it has, are one call, and at either end there may be one with fewer."""
    (first, last), (kv, kv_end) = share
    found: list[Run] = []
    for n in range(kv, kv_end):
        q = max(first, n * group) - first, min(last, (n + 1) * group) - first
        size = q[1] - q[0]
        before = found[-1] if found else None
        if before and (before.q[1] - before.q[0]) == size * (before.kv[1] - before.kv[0]):
            found[-1] = Run((before.q[0], q[1]), (before.kv[0], n + 1 - kv))
        else:
            found.append(Run(q, (n - kv, n + 1 - kv)))
    return tuple(found)


def is_shared(each: tuple[Share, ...]) -> bool:
    """Does any kv head go to several ranks?"""
    return any(a.kv[1] > b.kv[0] for a, b in zip(each, each[1:], strict=False))
