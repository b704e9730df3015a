"""The look-up: its tiers, their order, and what it says of near misses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from samples import (
    A100,
    BUCKET,
    H100,
    H200,
    KEY,
    MEASURED,
    PREDICTED,
    accept_all,
    at,
    config,
    faster,
    find,
    under,
)

from attngen import records, resolve
from attngen.config import BwdConfig, KernelConfig
from attngen.identity import record_key
from attngen.lookup import lookup
from attngen.records import Record, shipped
from attngen.spec import AttentionSpec
from attngen.store import Store
from attngen.workload import DIRECTIONS, Bucket, Workload, spec_bucket


def test_lookup_exact_user_before_shipped(store: Store) -> None:
    store.record_winner(MEASURED)
    found = find(store, faster(9.0))
    assert (found.record, found.tier) == (MEASURED, "user")


def test_lookup_exact_measured_shipped_before_predicted_user(store: Store) -> None:
    store.record_winner(PREDICTED)
    assert find(store, MEASURED).tier == "shipped"
    assert find(store).tier == "user"


@pytest.mark.parametrize(
    ("record", "tier"),
    [
        pytest.param(MEASURED, "shipped", id="exact"),
        pytest.param(under(triton="3.5"), "stale", id="triton"),
        pytest.param(under(template_hash="old"), "stale", id="templates"),
        pytest.param(under(triton="3.5", template_hash="old"), "stale", id="both"),
        pytest.param(at(seqlen_q=2048), "neighbour bucket", id="half-q"),
        pytest.param(at(seqlen_k=8192), "neighbour bucket", id="double-k"),
        pytest.param(at(batch_heads=32), "neighbour bucket", id="half-heads"),
        pytest.param(under(at(seqlen_q=2048), triton="3.5"), "neighbour bucket", id="old-half-q"),
        pytest.param(under(device_key=H100.device_key), "other sku", id="h100"),
        pytest.param(under(device_key=A100.device_key), "default", id="other-arch"),
        pytest.param(at(seqlen_q=1024), "default", id="two-steps"),
        pytest.param(at(seqlen_q=2048, seqlen_k=2048), "neighbour bucket", id="half-both"),
        pytest.param(at(seqlen_q=8192, seqlen_k=8192), "neighbour bucket", id="double-both"),
        pytest.param(at(seqlen_q=2048, seqlen_k=8192), "default", id="opposite-steps"),
        pytest.param(at(seqlen_q=1024, seqlen_k=1024), "default", id="two-steps-both"),
        pytest.param(at(batch_heads=4), "neighbour bucket", id="few-heads"),
        pytest.param(
            at(seqlen_q=2048, seqlen_k=2048, batch_heads=512),
            "neighbour bucket",
            id="step-and-heads",
        ),
        pytest.param(at(seqlen_q=2048, group_size=4), "default", id="step-and-group"),
        pytest.param(at(group_size=4), "default", id="group-size"),
        pytest.param(at(window=1024), "default", id="window"),
        pytest.param(at(page_size=16), "default", id="page-size"),
        pytest.param(under(policy="eager"), "default", id="policy"),
        pytest.param(under(text_key="head_dim=64,dtype=bfloat16"), "default", id="spec"),
        pytest.param(
            under(at(seqlen_q=2048), device_key=H100.device_key), "default", id="step-and-sku"
        ),
    ],
)
@pytest.mark.parametrize("source", ["user", "shipped"])
def test_lookup_tier(store: Store, record: Record, tier: str, source: str) -> None:
    if source == "user":
        store.record_winner(record)
        found = find(store)
        tier = "user" if tier == "shipped" else tier
    else:
        found = find(store, record)
    assert found.tier == tier
    assert found.record == (None if tier == "default" else record)


def test_lookup_follows_the_tiers_in_order() -> None:
    ladder = [
        (MEASURED, "shipped"),
        (under(template_hash="old"), "stale"),
        (under(triton="3.5"), "stale"),
        (at(batch_heads=128), "neighbour bucket"),
        (at(batch_heads=1024), "neighbour bucket"),
        (at(seqlen_k=8192), "neighbour bucket"),
        (at(seqlen_k=8192, batch_heads=128), "neighbour bucket"),
        (at(seqlen_q=8192), "neighbour bucket"),
        (at(seqlen_q=8192, seqlen_k=8192), "neighbour bucket"),
        (under(at(batch_heads=128), triton="3.5"), "neighbour bucket"),
        (under(device_key=H100.device_key), "other sku"),
    ]
    for start in range(len(ladder)):
        pool = [record for record, _ in ladder[start:]]
        found = find(None, *reversed(pool))
        assert (found.record, found.tier) == ladder[start]


@pytest.mark.parametrize(
    ("had", "wanted", "tier"),
    [
        pytest.param((2048, 2048), (1024, 1024), "neighbour bucket", id="cut-in-both"),
        pytest.param((8192, 4096), (4096, 4096), "neighbour bucket", id="covers-one"),
        pytest.param((4096, 1024), (4096, 512), "default", id="another-window"),
        pytest.param((2048, 1024), (1024, 512), "default", id="another-window-and-step"),
    ],
)
def test_lookup_lets_a_window_step_with_the_keys_that_cut_it(
    had: tuple[int, int], wanted: tuple[int, int], tier: str
) -> None:
    found, bucket = (
        replace(BUCKET, seqlen_q=keys, seqlen_k=keys, window=width) for keys, width in (had, wanted)
    )
    assert find(None, under(bucket=found.key), bucket=bucket).tier == tier


def test_lookup_redoes_the_static_check_and_says_so() -> None:
    big = replace(under(triton="3.5"), config=config(256).as_dict())
    other = under(device_key=H100.device_key)

    def accept(config: KernelConfig) -> list[str]:
        return ["needs 300000 bytes of shared memory"] if config.block_n == 256 else []

    found = find(None, big, other, accept=accept)
    assert (found.record, found.tier) == (other, "other sku")
    why = "\n".join(found.why)
    assert "triton 3.5, wanted 3.6" in why and "needs 300000 bytes" in why
    assert find(None, big, accept=accept).tier == "default"


def test_lookup_says_field_by_field_what_nearly_matched() -> None:
    near = under(at(seqlen_q=1024, group_size=4), policy="eager")
    far = [at(seqlen_q=1 << n, seqlen_k=1 << n, group_size=2, batch_heads=1) for n in range(4, 10)]
    why = find(None, *far, near).why
    assert why[0].startswith(f"looked for {BUCKET.key} of {KEY.text_key} on nvidia_h200")
    text = "\n".join(why)
    for piece in ("seqlen_q 1024, wanted 4096", "group_size 4, wanted 8", "policy eager, wanted"):
        assert piece in text
    assert "3 more records of this spec are further off" in text
    assert why[-1] == "the default config is used"


def test_lookup_without_any_record_says_so() -> None:
    found = find(None, under(text_key="head_dim=64,dtype=bfloat16"))
    assert "no record of this spec and direction is stored or shipped" in found.why
    assert "there is no user database" in found.why


def test_lookup_of_the_batch_invariant_bucket_has_no_neighbours() -> None:
    anything = Bucket("fwd", 0, 0, 0, 0, 0)
    record = under(bucket=anything.key)
    assert find(None, record, bucket=anything).tier == "shipped"
    assert find(None, at(seqlen_q=1), bucket=anything).tier == "default"


def test_lookup_uses_the_shipped_files_by_default(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "nvidia_h200.jsonl").write_text(MEASURED.to_line() + "\n")
    monkeypatch.setattr(records, "tuned_dirs", lambda: [tmp_path])
    shipped.cache_clear()
    try:
        assert lookup(None, KEY, BUCKET, H200, accept_all).record == MEASURED
    finally:
        shipped.cache_clear()


def test_trouble_after_opening_is_survived_by_a_lookup(path: Path) -> None:
    with Store.open(path) as store:
        store.record_winner(MEASURED)
        store._db.execute("alter table winners rename column text_key to gone")
        with pytest.warns(RuntimeWarning, match="no such column"):
            found = find(store, MEASURED)
    assert found.tier == "shipped" and "no such column" in "\n".join(found.why)


def test_a_deterministic_spec_is_served_by_what_won_among_all_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNGEN_DB", str(tmp_path / "tuning.db"))
    spec, gpu = AttentionSpec(head_dim=96, deterministic=True), H200  # none of these is shipped
    bucket = spec_bucket("bwd", spec, Workload(2, 8, 8, 777, 777))
    key = record_key(replace(spec, deterministic=False), bucket, gpu)
    tile = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 1}
    for dq, served in (("kernel", "user"), ("atomic", "default")):
        config = BwdConfig(dq=dq, **tile)
        record = replace(MEASURED, key=key, direction="bwd", config=config.as_dict())
        with Store.open() as store:
            store.record_winner(record)
        found_config, found, _ = resolve.find(spec, bucket, gpu)
        assert found.tier == served, found.why
        assert (found_config == config) == (served == "user")


def test_a_forward_has_one_key_whether_deterministic_or_not() -> None:
    free, fixed = (AttentionSpec(head_dim=128, deterministic=each) for each in (False, True))
    gpu, sizes = H200, Workload(2, 8, 8, 777, 777)
    for direction in DIRECTIONS:
        keys = {
            record_key(spec, spec_bucket(direction, spec, sizes), gpu) for spec in (free, fixed)
        }
        assert len(keys) == (1 if direction == "fwd" else 2)
