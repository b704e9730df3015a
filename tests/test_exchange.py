"""Export and import of records."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from samples import H100, MEASURED, PREDICTED, at, faster, under

from attngen.exchange import export_lines, import_lines
from attngen.records import Record
from attngen.store import Store


def test_export_is_sorted_and_filtered_by_gpu(store: Store) -> None:
    everywhere = [MEASURED, at(seqlen_q=64), under(device_key=H100.device_key)]
    for record in everywhere:
        store.record_winner(record)
    assert export_lines(store) == sorted(record.to_line() for record in everywhere)
    assert export_lines(store, H100) == [everywhere[2].to_line()]


def test_import_of_an_export_is_the_same_store(store: Store, tmp_path: Path) -> None:
    store.record_winner(MEASURED)
    store.record_winner(at(seqlen_q=64))
    with Store.open(tmp_path / "second.db") as second:
        report = import_lines(second, export_lines(store))
        assert (report.added, report.replaced, report.kept, report.rejected) == (2, 0, 0, ())
        assert export_lines(second) == export_lines(store)
        assert import_lines(second, export_lines(store)).kept == 2


ANOTHER_TRITON = replace(MEASURED.provenance, triton="3.5.1")


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        pytest.param(MEASURED, PREDICTED, id="measured"),
        pytest.param(
            MEASURED, replace(faster(9.0), provenance=ANOTHER_TRITON), id="same-triton-before-gain"
        ),
        pytest.param(
            faster(1.5), replace(faster(1.2), date="2027-01-01T00:00:00Z"), id="gain-before-date"
        ),
        pytest.param(replace(MEASURED, date="2027-01-01T00:00:00Z"), MEASURED, id="newer"),
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
            results.add((*export_lines(whole), counts))
        with Store.open(tmp_path / f"{number}-by-line.db") as split:
            for line in order:
                import_lines(split, [line])
            results.add((*export_lines(split), counts))
    assert results == {(*sorted([faster(1.5).to_line(), lines[4]]), (2, 0, 3, 1))}


def test_import_rejects_bad_lines_with_number_and_reason(store: Store) -> None:
    nan = MEASURED.to_line().replace("100.0", "NaN")
    huge = MEASURED.to_line().replace('"rounds": 9', '"rounds": ' + "9" * 5000)
    report = import_lines(store, ["", "nonsense", MEASURED.to_line(), nan, huge, "[" * 100_000])
    assert report.added == 1 and store.winners() == [MEASURED]
    assert [number for number, _ in report.rejected] == [2, 4, 5, 6]
    assert report.rejected[0][1].startswith("line 2: not JSON")
    assert report.rejected[1][1].startswith("line 4: median_us must be")
