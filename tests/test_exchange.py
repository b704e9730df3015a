"""Export and import of records."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import H100, KEY, MEASURED, PREDICTED, at, config, faster, under

from attngen.exchange import contents, import_lines, lines_of, merge
from attngen.records import Record
from attngen.store import Store


def test_export_is_sorted_and_filtered_by_gpu(store: Store) -> None:
    everywhere = [MEASURED, at(seqlen_q=64), under(device_key=H100.device_key)]
    for record in everywhere:
        store.record_winner(record)
    assert lines_of(store.winners()) == sorted(record.to_line() for record in everywhere)
    assert lines_of(store.winners(), H100) == [everywhere[2].to_line()]


def test_import_of_an_export_is_the_same_store(store: Store, tmp_path: Path) -> None:
    store.record_winner(MEASURED)
    store.record_winner(at(seqlen_q=64))
    with Store.open(tmp_path / "second.db") as second:
        report = import_lines(second, lines_of(store.winners()))
        assert (report.added, report.replaced, report.kept, report.rejected) == (2, 0, 0, ())
        assert lines_of(second.winners()) == lines_of(store.winners())
        assert import_lines(second, lines_of(store.winners())).kept == 2


ANOTHER_TRITON = replace(MEASURED.provenance, triton="3.5.1")


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(MEASURED, PREDICTED, id="measured"),
        pytest.param(
            MEASURED, replace(faster(9.0), provenance=ANOTHER_TRITON), id="same-triton-before-gain"
        ),
        pytest.param(
            replace(faster(1.5), date="2026-01-01T00:00:00Z"), faster(1.2), id="gain-before-date"
        ),
        pytest.param(MEASURED, replace(MEASURED, date="2026-01-01T00:00:00Z"), id="newer"),
    ],
)
def test_import_keeps_the_better(store: Store, better: Record, worse: Record) -> None:
    assert import_lines(store, [worse.to_line()]).added == 1
    assert import_lines(store, [better.to_line()]).replaced == 1
    assert import_lines(store, [worse.to_line()]).kept == 1
    assert store.winners() == [better]


def test_import_does_not_depend_on_order(tmp_path: Path) -> None:
    rivals = [MEASURED, PREDICTED, faster(1.5), replace(MEASURED, error=None), at(seqlen_q=64)]
    lines = [record.to_line() for record in rivals] + ["{"]
    results = set()
    for number, order in enumerate(itertools.islice(itertools.permutations(lines), 0, 720, 90)):
        with Store.open(tmp_path / f"{number}.db") as whole:
            report = import_lines(whole, order)
            counts = (report.added, report.replaced, report.kept, len(report.rejected))
            results.add((*lines_of(whole.winners()), counts))
        with Store.open(tmp_path / f"{number}-by-line.db") as split:
            for line in order:
                import_lines(split, [line])
            results.add((*lines_of(split.winners()), counts))
    assert results == {(*sorted([faster(1.5).to_line(), lines[4]]), (2, 0, 3, 1))}


def test_import_rejects_bad_lines_with_number_and_reason(store: Store) -> None:
    nan = MEASURED.to_line().replace("100.0", "NaN")
    huge = MEASURED.to_line().replace('"rounds": 9', '"rounds": ' + "9" * 5000)
    report = import_lines(store, ["", "nonsense", MEASURED.to_line(), nan, huge, "[" * 100_000])
    assert report.added == 1 and store.winners() == [MEASURED]
    assert [number for number, _ in report.rejected] == [2, 4, 5, 6]
    assert report.rejected[0][1].startswith("line 2: not JSON")
    assert report.rejected[1][1].startswith("line 4: median_us must be")


def test_import_refuses_a_name_given_twice_and_a_date_to_come(store: Store) -> None:
    twice = MEASURED.to_line()[:-1] + ', "rounds": 3}'
    inside = MEASURED.to_line().replace('"block_m": 128', '"block_m": 128, "block_m": 64')
    report = import_lines(store, [twice, inside, replace(MEASURED, date=LATE).to_line()])
    reasons = [reason for _, reason in report.rejected]
    assert "'rounds' is given twice" in reasons[0] and "'block_m' is given twice" in reasons[1]
    assert f"must not be in the future, got {LATE}" in reasons[2]
    assert not store.winners()


LATE = "2999-01-01T00:00:00Z"
ENDED: list[dict[str, Any]] = [
    {"status": "ok", "median_us": 10.0, "date": "2026-01-01T00:00:00Z"},
    {"status": "ok", "median_us": 20.0, "date": "2026-01-02T00:00:00Z"},
    {"status": "ok", "median_us": 20.0, "date": "2026-01-02T00:00:00Z", "reason": "x"},
    {"status": "failed", "date": "2026-01-03T00:00:00Z"},
    {"status": "skipped", "date": "2026-01-04T00:00:00Z"},
    {"status": "ok", "origin": "predicted", "date": "2026-01-05T00:00:00Z"},
]


def databases(folder: Path, trials: list[dict[str, Any]]) -> list[Path]:
    """One database for each outcome of the same trial, with one trial of its own."""
    paths = []
    for number, named in enumerate(trials):
        paths.append(folder / f"{number}.db")
        with Store.open(paths[-1]) as store, store._writing():
            store._put_trial(KEY, config(32), **{"crashes": 0, "reason": None} | named)
            store._put_trial(KEY, config(64 + number), "failed", reason="x", crashes=0)
    return paths


@pytest.mark.parametrize(
    ("count", "wins"),
    [
        pytest.param(2, ("ok", "predicted", None), id="newest-of-the-rest"),
        pytest.param(3, ("failed", "measured", None), id="failed"),
        pytest.param(4, ("ok", "measured", 20.0), id="timed"),
        pytest.param(6, ("ok", "measured", 20.0), id="newest-timed"),
    ],
)
def test_merged_trials_do_not_depend_on_the_order(
    tmp_path: Path, count: int, wins: tuple[str, str, float | None]
) -> None:
    sources = databases(tmp_path, ENDED[-count:])
    found = set()
    for number, order in enumerate((sources, sources[::-1], sources[1:] + sources)):
        with Store.open(tmp_path / f"into-{number}.db") as into:
            for source in order:
                with Store.open(source, readonly=True) as store:
                    merge(into, contents(store))
            rows, damaged = into.trial_rows()
            assert not damaged and len(rows) == 1 + count
            found.add(json.dumps(sorted(rows, key=lambda row: row["config_key"])))
            best = next(t for t in into.trials(KEY) if t.config == config(32).as_dict())
    assert len(found) == 1
    assert (best.status, best.origin, best.median_us) == wins


def test_merge_leaves_what_has_not_ended(tmp_path: Path, store: Store) -> None:
    with Store.open(tmp_path / "a.db") as source:
        source.begin_trial(KEY, config(32))
        _, trials = merge(store, contents(source))
    assert (trials.added, store.trials(KEY)) == (0, [])


def test_merge_replaces_a_damaged_trial(tmp_path: Path, store: Store) -> None:
    (path,) = databases(tmp_path, ENDED[:1])
    store.finish_trial(KEY, config(32), "ok", median_us=1.0)
    with store._writing():
        store._db.execute("update trials set date = 7")
    with Store.open(path) as source:
        _, trials = merge(store, contents(source))
    assert (trials.added, trials.replaced) == (1, 1)
    assert store.top(KEY)[0].median_us == 10.0
