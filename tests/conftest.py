"""Fixtures of the tests of the tuning database."""

from __future__ import annotations

from pathlib import Path

import pytest

from attngen.store import Store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.db"


@pytest.fixture
def store(path: Path):
    with Store.open(path) as opened:
        yield opened
