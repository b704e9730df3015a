"""Configs that another Triton or GPU chose are asked of the compiler that runs here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import H100, H200, MEASURED
from support import python

from attngen import resolve
from attngen.config import FwdConfig, default_config
from attngen.identity import record_key
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.tuner import recheck
from attngen.workload import Workload, spec_bucket

SPEC = AttentionSpec(head_dim=112, causal=True)  # none is shipped
BUCKET = spec_bucket("fwd", SPEC, Workload(2, 8, 8, 777, 777))
CONFIG = FwdConfig(tiles="descriptor", block_m=32, block_n=32, num_warps=4, num_stages=2)

ASK = """
import triton
from attngen.config import parse
from attngen.gpu import by_name
from attngen.spec import AttentionSpec
from attngen.tuner.compile_worker import TargetDriver
from attngen.tuner.recheck import disagreements

triton.runtime.driver.set_active(TargetDriver(90))
spec = AttentionSpec(head_dim=128, causal=True)
for config in (
    "tiles=descriptor,block_m=64,block_n=64,num_warps=4,num_stages=3",
    "tiles=descriptor,block_m=128,block_n=128,num_warps=8,num_stages=8",
    "tiles=pointer,block_m=128,block_n=128,num_warps=1,num_stages=1",
):
    print(disagreements(spec, parse("fwd", config), by_name("nvidia_h200")))
"""


def test_the_compiler_is_asked() -> None:
    done = python(ASK)
    assert done.returncode == 0, done.stderr[-2000:]
    good, too_deep, too_wide = done.stdout.splitlines()
    assert good == "[]"
    assert "shared memory" in too_deep
    assert "spills" in too_wide


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stores CONFIG under a key, changed in the named fields; gives the checked look-up's words."""
    monkeypatch.setenv("ATTNGEN_DB", str(tmp_path / "tuning.db"))

    def store(gpu: Any = H200, **changed: str) -> None:
        key = replace(record_key(SPEC, BUCKET, gpu), **changed)
        with Store.open() as opened:
            opened.record_winner(replace(MEASURED, key=key, config=CONFIG.as_dict()))

    return store


@pytest.mark.parametrize(
    ("how", "tier"),
    [
        ({}, "user"),
        ({"triton": "3.99"}, "stale"),
        ({"template_hash": "other"}, "stale"),
        ({"gpu": H100}, "other sku"),
    ],
    ids=["exact", "triton", "templates", "other-sku"],
)
@pytest.mark.parametrize("agrees", [True, False])
def test_only_what_was_chosen_elsewhere_is_checked(
    how: dict[str, Any], tier: str, agrees: bool, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def disagreements(spec: AttentionSpec, config: FwdConfig, gpu: Any) -> list[str]:
        asked.append(config)
        return [] if agrees else ["it spills"]

    monkeypatch.setattr(recheck, "disagreements", disagreements)
    stored(**how)
    config, found, _ = resolve.find_checked(SPEC, BUCKET, H200)
    assert asked == ([] if tier == "user" else [CONFIG])
    if agrees or tier == "user":
        assert (config, found.tier) == (CONFIG, tier)
    else:
        assert config == default_config(SPEC, BUCKET, H200) and found.tier == "default"
        assert any("refused on nvidia_h200: it spills" in line for line in found.why)
