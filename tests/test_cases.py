"""Every numeric case of tests/cases/hand.jsonl, judged as tests/cases/run.py judges it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support import REPO

import attngen

import run  # isort: skip  (beside the cases; support put its folder on the path)

BIG = ("big", "ring", "varlen_uniform", "varlen_cycle")
"""Needs a large GPU (tests/gpu) or several ranks (a later issue)."""
NOT_BUILT = ("paged",)
SLOW_IDS = {"SHQ-1", "TAI-1", "DIM-1", "DIM-5", "DVD-1", "VAR-1", "VAR-3"}
"""Over five seconds in the interpreter."""
FIRST = 3
"""So many variants of a case are run by `make test`, the others by `make accept`."""


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


def _params(*, built: bool) -> list[Any]:
    """The variants our kernels serve (or any ValueError refuses), or those of later issues."""

    def served(n: dict[str, Any]) -> bool:
        return bool(n.get("refuse")) or not any(key in n for key in NOT_BUILT)

    def marks(name: str, case: dict[str, Any]) -> list[Any]:
        is_slow = case["id"] in SLOW_IDS or int(name.rpartition("-")[2]) >= FIRST
        return [pytest.mark.slow] if is_slow else []

    return [
        pytest.param(case, over, id=name, marks=marks(name, case))
        for name, case, over in _variants()
        if served({**case["n"], **over}) is built
    ]


def _judge(case: dict[str, Any], over: dict[str, Any]) -> tuple[str, str]:
    verdict: tuple[str, str] = run.judge(case, over, attngen.attention, attngen.dropout_keep, "cpu")
    return verdict


@pytest.mark.parametrize(("case", "over"), _params(built=True))
def test_case_equals_oracle(case: dict[str, Any], over: dict[str, Any]) -> None:
    verdict, why = _judge(case, over)
    assert verdict == "passed", why


@pytest.mark.slow
@pytest.mark.parametrize(("case", "over"), _params(built=True))
def test_case_equals_oracle_in_float32(case: dict[str, Any], over: dict[str, Any]) -> None:
    verdict, why = _judge(case, {**over, "dtype": "float32"})
    assert verdict == "passed", why


@pytest.mark.parametrize(("case", "over"), _params(built=False))
def test_case_of_a_feature_that_is_not_built_is_refused(
    case: dict[str, Any], over: dict[str, Any]
) -> None:
    with pytest.raises(attngen.UnsupportedSpecError, match="not built yet"):
        _judge(case, over)
