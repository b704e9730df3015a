"""Masks, biases, ALiBi and sinks on a GPU: the covering array of features at longer lengths."""

from __future__ import annotations

from typing import Any

import pytest
from test_pairs import ROWS, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_pair(row: dict[str, Any]) -> None:
    check(row, "cuda", 15)
