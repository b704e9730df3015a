"""A record's key changes if and only if the source it stands for can."""

from __future__ import annotations

from dataclasses import replace

import pytest
from samples import MEASURED

from attngen import hopper, render
from attngen.config import KernelConfig, infeasible
from attngen.gpu import GpuInfo, by_name
from attngen.identity import record_key, stale_in
from attngen.spec import AttentionSpec
from attngen.workload import DIRECTIONS, Direction, Workload, spec_bucket

H200 = by_name("nvidia_h200")
SIZES = Workload(4, 16, 16, 4096, 4096)
BASE = AttentionSpec(head_dim=128, deterministic=False)
LOCAL = replace(BASE, window=(1000, 900), dropout_p=0.1, softcap=30.0)
FULL = replace(BASE, dtype="float32")

# Pairs of specs that differ in one field.
MUTATIONS = {
    "head_dim": (BASE, replace(BASE, head_dim=96)),
    "head_dim_v": (BASE, replace(BASE, head_dim_v=64)),
    "dtype": (BASE, replace(BASE, dtype="float16")),
    "causal": (BASE, replace(BASE, causal=True)),
    "causal-alignment": (replace(BASE, causal=True), replace(BASE, causal="top_left")),
    "window": (BASE, replace(BASE, window=(1000, 900))),
    "window-sides": (LOCAL, replace(LOCAL, window=(1000, None))),
    "window-value": (LOCAL, replace(LOCAL, window=(1010, 920))),
    "window-bucket": (LOCAL, replace(LOCAL, window=(100, 90))),
    "dropout": (BASE, replace(BASE, dropout_p=0.1)),
    "dropout-value": (LOCAL, replace(LOCAL, dropout_p=0.2)),
    "scale": (BASE, replace(BASE, softmax_scale=0.5)),
    "softcap": (BASE, replace(BASE, softcap=30.0)),
    "softcap-value": (LOCAL, replace(LOCAL, softcap=50.0)),
    "layout": (BASE, replace(BASE, layout="bshd")),
    "precision": (FULL, replace(FULL, precision="tf32")),
    "precision-of-bfloat16": (BASE, replace(BASE, precision="tf32")),
    "deterministic": (BASE, replace(BASE, deterministic=True)),
    "batch_invariant": (BASE, replace(BASE, batch_invariant=True)),
}


def sources(spec: AttentionSpec, direction: Direction) -> set[tuple[str, str]]:
    """Every kernel text that may serve a spec, with the tile sizes held fixed, and the dtype for
    which Triton compiles it."""
    return {
        (
            spec.dtype,
            render.render(spec.text, config).partition("\ndef reference(")[0].split('"""', 2)[2],
        )
        for config in _variants(spec, direction)
    }


def _variants(spec: AttentionSpec, direction: Direction) -> list[KernelConfig]:
    portable = render.structural_variants(direction)
    found = [config for config in portable if not infeasible(spec, config, H200)]
    served = not hopper.unserved(spec, H200)
    return found + (render.hopper_variants(spec, direction) if served else [])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("one", "other"), MUTATIONS.values(), ids=MUTATIONS)
def test_key_changes_iff_the_source_can(
    one: AttentionSpec, other: AttentionSpec, direction: Direction
) -> None:
    buckets = [spec_bucket(direction, spec, SIZES) for spec in (one, other)]
    keys = [record_key(spec, at, H200) for spec, at in zip((one, other), buckets, strict=True)]
    same_source = sources(one, direction) == sources(other, direction)
    assert (keys[0] == keys[1]) == (same_source and buckets[0] == buckets[1])


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (replace(H200, name="nvidia_h200_nvl"), True),
        (replace(H200, shared_memory=H200.shared_memory - 1024), False),
        (replace(H200, sm_count=114), False),
        (replace(H200, l2_bytes=50 << 20), False),
        (replace(H200, arch="sm_100"), False),
    ],
    ids=["name", "shared-memory", "sm-count", "l2", "arch"],
)
def test_the_key_knows_the_device_by_its_properties(other: GpuInfo, same: bool) -> None:
    at = spec_bucket("fwd", BASE, SIZES)
    assert (record_key(BASE, at, H200) == record_key(BASE, at, other)) == same


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("tl.exp2(", "tl.exp(", False),
        ("num_warps", "num_ctas", False),
        ("relative error", "deviation", True),
        ("Stands alone", "Is alone", True),
    ],
    ids=["kernel", "config", "check", "header"],
)
def test_template_hash_changes_iff_a_kernel_does(
    old: str, new: str, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = render.render
    before = render.template_hash(BASE, "fwd", "sm_90")

    def mutated(spec: AttentionSpec, config: object) -> str:
        text = write(spec, config)
        assert old in text
        return text.replace(old, new)

    monkeypatch.setattr(render, "render", mutated)
    render.template_hash.cache_clear()
    try:
        assert (render.template_hash(BASE, "fwd", "sm_90") == before) == same
    finally:
        monkeypatch.undo()
        render.template_hash.cache_clear()


def test_stale_in_names_what_differs() -> None:
    at = spec_bucket("fwd", BASE, SIZES)
    now = replace(MEASURED, key=record_key(BASE, at, H200))
    assert stale_in(now) == []
    (triton,) = stale_in(replace(now, key=replace(now.key, triton="3.99")))
    assert triton.startswith("triton 3.99, here 3.")
    assert stale_in(replace(now, key=replace(now.key, template_hash="other"))) == ["templates"]
    (spec,) = stale_in(replace(now, key=replace(now.key, text_key="head_dim=0")))
    assert spec.startswith("spec: ")
