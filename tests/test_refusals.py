"""docs/features.md lists the refused pairs of features, as the code refuses them."""

from __future__ import annotations

import pytest
from support import REPO

from attngen import refusals
from attngen.spec import FIELDS

PAGE = REPO / "docs" / "features.md"


def test_page_is_up_to_date(request: pytest.FixtureRequest) -> None:
    """`make golden` rewrites it."""
    text = refusals.document()
    if request.config.getoption("--update-golden"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, f"{PAGE} is out of date: make golden, and read the diff"


def test_every_field_gives_a_feature() -> None:
    """A new field that is no bool needs a value in `refusals.EXAMPLES`."""
    unnamed = {name for name, field in FIELDS.items() if field.type != "bool"}
    assert unnamed == set(refusals.EXAMPLES)
    assert {feature.name for feature in refusals.features()} == set(FIELDS)


def test_pairs_that_are_refused_name_a_reason() -> None:
    page = refusals.document()
    assert "| `causal=top_left` | `tree_mask=true` | `SpecError` | tree_mask=True needs" in page
    assert "| `bias=true` | `fp8_scale=tensor`, `fp8_scale=block` | `Unsupported" in page
    assert "| `tree_mask=true` | lowering=hopper has no tree_mask |" in page
