"""Head dims are tiled by powers of two, not padded to the next one."""

from __future__ import annotations

import functools
from typing import NamedTuple

MAX_HEAD_DIM = 576
"""Of q and k: 512 + 64 columns, DeepSeek's MLA in its absorbed form."""
MAX_HEAD_DIM_V = 512
MIN_PART = 16
MAX_PARTS = 3


class Part(NamedTuple):
    """One tile of a head dim: `width` columns (a power of two) from column `start`."""

    number: int
    start: int
    width: int
    padded: bool
    """True if the part reaches past the head dim, so that its loads need a mask."""
    suffix: str
    """What variable names of this part end in: nothing if the dim is one part, else its number."""


@functools.cache
def split_head_dim(dim: int) -> tuple[Part, ...]:
    """Cut a head dim into at most three power-of-two parts of at least 16 columns.

    The least total width wins, then the fewest parts: 128 -> 128, 96 -> 64 + 32, 72 -> 64 + 16
    (with 8 masked columns), 192 -> 128 + 64.
    """
    powers = [1 << e for e in range(MIN_PART.bit_length() - 1, MAX_HEAD_DIM.bit_length())]
    best: tuple[int, ...] = ()

    def extend(parts: tuple[int, ...]) -> None:
        nonlocal best
        total = sum(parts)
        if total >= dim:
            if not best or (total, len(parts)) < (sum(best), len(best)):
                best = parts
        elif len(parts) < MAX_PARTS:
            for width in powers:
                if not parts or width <= parts[-1]:
                    extend((*parts, width))

    extend(())
    starts = [sum(best[:i]) for i in range(len(best))]
    return tuple(
        Part(i, start, width, start + width > dim, str(i) if len(best) > 1 else "")
        for i, (start, width) in enumerate(zip(starts, best, strict=True))
    )


def split_behind(first: tuple[Part, ...], dim: int) -> tuple[Part, ...]:
    """Cut a head dim into these whole parts of its first columns, and parts of the rest."""
    begin = sum(part.width for part in first)
    rest = [(begin + x.start, x.width, x.padded) for x in split_head_dim(dim - begin)]
    parts = [(x.start, x.width, x.padded) for x in first] + rest
    return tuple(Part(n, *part, str(n)) for n, part in enumerate(parts))
