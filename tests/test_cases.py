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


def _params() -> list[Any]:
    """The variants: of each case `make test` runs the first, and of the others another one each
    day; `make accept` runs all."""
    day = int(os.environ["ATTNGEN_TEST_DAY"])

    def marks(name: str, case: dict[str, Any]) -> list[Any]:
        number, others = int(name.rpartition("-")[2]), len(case["n"].get("vary", [None])) - 1
        is_due = number == 0 or number == 1 + day % others
        if case["id"] in LONG_IDS:
            is_due = is_due and LONG_IDS.index(case["id"]) % 3 == day % 3
        return [] if is_due and case["id"] not in SLOW_IDS else [pytest.mark.slow]

    return [
        pytest.param(case, over, id=name, marks=marks(name, case))
        for name, case, over in _variants()
    ]


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
