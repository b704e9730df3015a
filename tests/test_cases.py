"""Every numeric case of tests/cases/hand.jsonl, judged as tests/cases/run.py judges it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from support import REPO

import attngen

import run  # isort: skip  (beside the cases; support put its folder on the path)

BIG = ("big", "ring", "varlen_uniform", "varlen_cycle")
"""Needs a large GPU (tests/gpu) or several ranks (a later issue)."""
SLOW_IDS = {"SHQ-1", "TAI-1", "DIM-1", "DIM-5", "DVD-1", "VAR-1", "VAR-3"}
"""Over five seconds in the interpreter."""
LONG_IDS = ("DIM-2", "WIN-2", "ROW-1", "SNK-3", "DIM-6", "STR-10", "WIN-4", "GQA-1", "BIA-2")
"""Two seconds and more: `make test` runs three of these cases a day."""


def _variants() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    lines = (REPO / "tests/cases/hand.jsonl").read_text().splitlines()
    cases = [case for case in map(json.loads, lines) if "n" in case]
    return [
        (f"{case['id']}-{number}", case, over or {})
        for case in cases
        for number, over in enumerate(case["n"].get("vary", [None]))
        if not any(key in {**case["n"], **(over or {})} for key in BIG)
        and case["n"].get("opts", {}).get("softcap_order") != "after_bias"  # not offered
    ]


def _is_due(name: str, case: dict[str, Any], day: int) -> bool:
    """Does `make test` run this variant on a day of the year?"""
    number, others = int(name.rpartition("-")[2]), len(case["n"].get("vary", [None])) - 1
    if case["id"] in SLOW_IDS:
        return False
    if case["id"] in LONG_IDS:
        if LONG_IDS.index(case["id"]) % 3 != day % 3:
            return False
        day //= 3  # counts the days of this case
    return number == 0 or number == 1 + day % others


def _params() -> list[Any]:
    """The variants: each day `make test` runs the first of a case, and of its others the next one
    in turn. A case of LONG_IDS has every third day, one of SLOW_IDS none; `make accept` runs all.
    """
    day = int(os.environ["ATTNGEN_TEST_DAY"])
    return [
        pytest.param(
            case, over, id=name, marks=[] if _is_due(name, case, day) else [pytest.mark.slow]
        )
        for name, case, over in _variants()
    ]


def test_every_variant_has_a_day() -> None:
    never = [
        name
        for name, case, _ in _variants()
        if case["id"] not in SLOW_IDS and not any(_is_due(name, case, day) for day in range(1, 366))
    ]
    assert not never


def _judge(case: dict[str, Any], over: dict[str, Any]) -> tuple[str, str]:
    verdict: tuple[str, str] = run.judge(case, over, attngen.attention, attngen.dropout_keep, "cpu")
    return verdict


@pytest.mark.parametrize(("case", "over"), _params())
def test_case_equals_oracle(case: dict[str, Any], over: dict[str, Any]) -> None:
    verdict, why = _judge(case, over)
    assert verdict == "passed", why


@pytest.mark.slow
@pytest.mark.parametrize(("case", "over"), _params())
def test_case_equals_oracle_in_float32(case: dict[str, Any], over: dict[str, Any]) -> None:
    verdict, why = _judge(case, {**over, "dtype": "float32"})
    assert verdict == "passed", why
