"""Attention over ranks against attention of the whole, on gloo."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import pool

CASES: list[dict[str, Any]] = [
    {"options": {}},
    {"options": {"causal": True}},
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_equals_whole(world: int, method: str, layout: str, number: int) -> None:
    case = {"seqlen": 38, "method": method, "layout": layout, **CASES[number]}
    pool().run(world, "rank_cases:compare", case=case)
