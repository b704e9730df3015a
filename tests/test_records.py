"""Records: their lines, what is legal in them, their keys, and the shipped files."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from samples import BUCKET, CONFIG, KEY, MEASURED, PREDICTED, at

from attngen.config import BwdConfig
from attngen.errors import StoreError
from attngen.records import Record, RecordKey, shipped


@pytest.mark.parametrize("record", [MEASURED, PREDICTED], ids=["measured", "predicted"])
def test_record_line_round_trip(record: Record) -> None:
    line = record.to_line()
    assert "\n" not in line and list(json.loads(line)) == sorted(json.loads(line))
    assert Record.from_line(line) == record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"rounds": -1}, "rounds must be", id="negative"),
        pytest.param({"rounds": True}, "rounds must be", id="bool-is-no-int"),
        pytest.param({"median_us": float("nan")}, "median_us must be", id="nan"),
        pytest.param({"median_us": 10**400}, "median_us must be", id="beyond-float"),
        pytest.param({"median_us": None}, "median_us must be a time", id="measured-needs-time"),
        pytest.param({"origin": ["measured"]}, "origin must be", id="unhashable"),
        pytest.param({"direction": "bwd"}, "contradicts bucket", id="direction"),
        pytest.param({"bucket": "fwd-q4096"}, "bucket must be", id="bucket"),
        pytest.param({"bucket": "fwd-q8-k8-bh8-g0-w0-p0"}, "bucket must be", id="bucket-no-group"),
        pytest.param({"bucket": "fwd-q9-k8-bh8-g1-w0-p0"}, "bucket must be", id="bucket-off-grid"),
        pytest.param({"median_us": 1e-300}, "median_us must be", id="no-time-at-all"),
        pytest.param({"triton": "3.6.0"}, "triton must be major.minor", id="triton"),
        pytest.param({"date": "2026-11-29"}, "date must be UTC", id="date"),
        pytest.param({"policy": "\ud800"}, "policy must be", id="lone-surrogate"),
        pytest.param({"hostname": "me"}, "unknown field 'hostname'", id="unknown"),
        pytest.param({"config": {"block_m": 64}}, "config: fwd config", id="config-incomplete"),
        pytest.param(
            {"config": CONFIG.as_dict() | {"num_warps": "8"}}, "config.num_warps", id="config-type"
        ),
        pytest.param(
            {"config": CONFIG.as_dict() | {"tiles": "cloud"}}, "config.tiles", id="config-choice"
        ),
        pytest.param({"provenance": {"gpu": "x"}}, "provenance field 'driver'", id="provenance"),
    ],
)
def test_record_line_names_line_and_field(changes: dict, message: str) -> None:
    line = json.dumps(MEASURED.as_dict() | changes)
    with pytest.raises(StoreError, match="^line 7: ") as caught:
        Record.from_line(line, "line 7")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        pytest.param("rouns", "'rouns' (did you mean 'rounds'?); known: text_key, ", id="near"),
        pytest.param("zzzz", "'zzzz'; known: text_key, ", id="far"),
    ],
)
def test_record_line_suggests_a_field_and_lists_them(name: str, hint: str) -> None:
    with pytest.raises(StoreError) as caught:
        Record.from_dict(MEASURED.as_dict() | {name: 9})
    assert f"unknown field {hint}" in str(caught.value)


@pytest.mark.parametrize(
    "line", ["{", "[]", "null", "[" * 100_000], ids=["{", "[]", "null", "deep"]
)
def test_record_line_that_is_no_object(line: str) -> None:
    with pytest.raises(StoreError, match="^line 1: "):
        Record.from_line(line, "line 1")


def test_record_line_lacking_a_field() -> None:
    named = MEASURED.as_dict()
    del named["median_us"]
    with pytest.raises(StoreError, match="field 'median_us' is missing"):
        Record.from_dict(named)


def test_record_made_in_code_is_checked_too() -> None:
    with pytest.raises(StoreError, match="rounds must be"):
        replace(MEASURED, rounds=-3)


def test_key_digest_differs_in_every_field() -> None:
    digests = {KEY.digest} | {
        replace(KEY, **{name: "other"}).digest for name in RecordKey.__dataclass_fields__
    }
    assert len(digests) == 1 + len(RecordKey.__dataclass_fields__)


def test_shipped_skips_a_bad_line_and_names_it(tmp_path: Path) -> None:
    file = tmp_path / "nvidia_h200.jsonl"
    bad = json.dumps(MEASURED.as_dict() | {"rounds": "nine"})
    file.write_text(f"{MEASURED.to_line()}\n\n{bad}\n{at(seqlen_q=64).to_line()}\n")
    with pytest.warns(RuntimeWarning, match=rf"{file}:3: rounds must be .*skipped"):
        found = shipped(tmp_path)
    assert found == (MEASURED, at(seqlen_q=64))
    file.unlink()
    assert shipped(tmp_path) is found  # read once


def test_shipped_records_of_this_checkout_are_valid() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shipped.cache_clear()
        assert len({record.key for record in shipped()}) == len(shipped())


def test_record_of_an_atomic_backward_round_trips() -> None:
    config = BwdConfig(dq="atomic", block_m=64, block_n=64, num_warps=4, num_stages=3)
    bucket = replace(BUCKET, direction="bwd")
    key = replace(KEY, bucket=bucket.key)
    record = replace(MEASURED, key=key, direction="bwd", config=config.as_dict())
    assert "dq_block_m" not in record.config
    assert Record.from_line(record.to_line()).kernel_config == config


def test_records_of_named_folders_lie_beside_the_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.jsonl").write_text(at(seqlen_q=64).to_line() + "\n")
    monkeypatch.setenv("ATTNGEN_TUNED_DIR", f"{tmp_path}:{tmp_path / 'missing'}")
    count = len(shipped())
    shipped.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="missing cannot be read"):
            assert at(seqlen_q=64) in shipped() and len(shipped()) == count + 1
    finally:
        shipped.cache_clear()
