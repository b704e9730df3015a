"""Where the rows of a call stand in their whole sequences."""

from __future__ import annotations

import functools
from typing import Any

import torch

from attngen.errors import SpecError
from attngen.values import MAX_POSITION, whole

Shard = tuple[int, int, int, int, "int | None", "int | None"]
"""(q_start, q_step, k_start, k_step, seqlen_q_total, seqlen_k_total)."""
WHOLE: Shard = (0, 1, 0, 1, None, None)
"""That of a call that holds whole sequences."""


def check_shard(*call: Any) -> Shard:
    """Where the rows of q and k stand: (q_start, q_step, k_start, k_step, and both totals).

    Args:
        call: the six as given, then seqlen_q, seqlen_k, and whether the call aligns last rows.
    """
    if torch.compiler.is_compiling():
        return _check_shard(*call)
    try:
        return _known_shard(*call)
    except TypeError:  # something that cannot be hashed
        return _check_shard(*call)


def _check_shard(
    q_start: Any,
    q_step: Any,
    k_start: Any,
    k_step: Any,
    total_q: Any,
    total_k: Any,
    seqlen_q: int,
    seqlen_k: int,
    bottom_right: bool,
) -> Shard:
    q_start, q_step, total_q = _check_rows("q", q_start, q_step, total_q, seqlen_q, bottom_right)
    k_start, k_step, total_k = _check_rows("k", k_start, k_step, total_k, seqlen_k, bottom_right)
    return q_start, q_step, k_start, k_step, total_q, total_k


_TOTAL_STEP = "it is the length of the whole sequence"
_known_shard = functools.lru_cache(maxsize=4096, typed=True)(_check_shard)


def _check_rows(
    side: str, start: int, step: int, total: int | None, seqlen: int, bottom_right: bool
) -> tuple[int, int, int | None]:
    start = whole(f"{side}_start", start, step="0 is the first row")
    step = whole(f"{side}_step", step, 1, step="1 takes every row")
    if total is not None:
        total = whole(f"seqlen_{side}_total", total, step=_TOTAL_STEP)
    if start == 0 and step == 1 and total is None:
        return start, step, total
    end = start + (seqlen - 1) * step + 1
    if end > (MAX_POSITION if total is None else total):
        most = f"{MAX_POSITION}, the most" if total is None else f"seqlen_{side}_total={total}"
        raise SpecError(
            f"{side}_start={start}, {side}_step={step} and {seqlen} rows end at row {end}, beyond "
            f"{most}; seqlen_{side}_total is the length of the whole sequence"
        )
    if bottom_right and total is None:
        raise SpecError(
            f"{side}_start={start} with {side}_step={step} needs seqlen_{side}_total, the length "
            "of the whole sequence, for the bottom-right alignment of causal=True, windows and "
            "ALiBi"
        )
    return start, step, total
