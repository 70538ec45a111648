"""What a report of many rows does only once, and what it does not read."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from analysis import report
from analysis.explorer import row_data, row_series
from analysis.figures import drift
from analysis.page import csv_file, embed
from analysis.rows import answer, pairs
from analysis.rows.cohorts import split
from analysis.rows.load import decided, load, waiting
from results.statistics import noise, ranking
from results.tables.schema import ATTEMPTS
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of

POINTS = list(synthetic.experiments())[:40]


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return frame_of(synthetic.attempts(POINTS))


@pytest.mark.slow
def test_a_report_leaves_out_only_lists_that_its_page_does_not_show(tmp_path: Path) -> None:
    shown = {*row_data._LISTS, *row_series.BY_STAGE.values(), *row_series.BY_STEP.values()}
    assert all(pa.types.is_list(ATTEMPTS.field(name).type) for name in report._UNREAD)
    assert not report._UNREAD & shown
    apart = ("compare", "notebooks")  # these load all columns
    for path in (Path(report.__file__).parent).rglob("*.py"):
        if path.parent.name not in apart and path.name != "report.py":
            text = path.read_text()
            assert not [name for name in report._UNREAD if f'"{name}"' in text], path
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:3]))
    whole, part = load(sweep).attempts, load(sweep, leave_out=report._UNREAD).attempts
    pd.testing.assert_frame_equal(whole.drop(columns=list(report._UNREAD)), part)


@pytest.mark.slow
def test_rows_of_our_own_are_ranked_once_for_all_figures(rows: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    of_layouts = ranking.of_layouts

    def counted(runs: pd.DataFrame, *args: object) -> pd.DataFrame:
        calls.append(len(runs))
        return of_layouts(runs, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ranking, "of_layouts", counted)
    report._compute_shared(split(rows))
    assert len(calls) == 1


def test_matching_renumbers_only_before_codes_overflow(rows: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    matching = pairs.Matching(pairs.comparable(split(rows)[0].frame))
    but_for = ["zero_stage", "recompute", "micro_batch_size", "num_microbatches"]
    unique = mock.Mock(wraps=np.unique)
    monkeypatch.setattr(np, "unique", unique)
    plain = matching.codes(but_for)
    assert unique.call_count == 0
    monkeypatch.setattr(pairs, "_MOST_CODES", 1)
    renumbered = matching.codes(but_for)
    assert unique.call_count > 0 and 1 < len(set(plain)) < len(plain)
    assert ((plain[:, None] == plain) == (renumbered[:, None] == renumbered)).all()


def test_small_entries_of_the_page_are_encoded_in_batches() -> None:
    for many in ({str(name): {"a": [name, None]} for name in range(5000)}, [{"a": place} for place in range(5000)]):
        parts = list(embed._parts(many))
        assert json.loads("".join(parts)) == many
        assert len(parts) <= embed._MOST_PARTS + 1


def test_a_layout_is_the_same_text_for_all_its_repeats() -> None:
    configs = ['{"seed": 1, "tp": 2}', '{"seed": 22, "tp": 2}', None, '{"seed": 1, "tp": 2}']
    runs = pd.DataFrame(
        {"config_json": pd.array(configs, dtype="str"), "experiment_id": list("abcd")}, index=[5, 3, 9, 1]
    )
    keys = noise.layout_key(runs)
    assert keys.to_dict() == {5: '{, "tp": 2}', 3: '{, "tp": 2}', 9: "c", 1: '{, "tp": 2}'}


def test_a_row_from_before_a_field_existed_is_a_repeat_of_later_rows_of_its_layout() -> None:
    now, then = '{"captured": false, "seed": %d}', '{"seed": %d}'
    runs = pd.DataFrame(
        {
            "config_json": [now % 1, then % 1, then % 2, now % 3, '{"captured": true, "seed": 1}'],
            "experiment_id": ["first", "first", "second", "third", "other"],
        }
    )
    keys = noise.layout_key(runs)
    assert keys.nunique() == 2 and keys[4] not in set(keys[:4])


def test_deciding_attempts_can_be_asked_for_few_columns(rows: pd.DataFrame) -> None:
    waiting = rows.assign(will_retry=[place % 3 == 0 for place in range(len(rows))])
    whole, few = decided(waiting), decided(waiting, ["outcome", "model"])
    assert 0 < len(whole) < len(rows)
    pd.testing.assert_frame_equal(whole[["outcome", "model"]], few)


def test_answers_as_the_page_opens_are_those_of_the_same_limits(rows: pd.DataFrame) -> None:
    [cohort] = split(rows)
    for cell in answer.cells(cohort.frame):
        plain = answer.Query(*cell)
        opened, limited = (answer.answer(cohort.frame, query) for query in (plain, answer.Query(*cell, 1e18)))
        for name in ("points", "out_of_memory", "failed", "finished", "fits", "tokens_per_step", "faster_at"):
            assert getattr(opened, name) == getattr(limited, name), name
        assert [one["attempt_id"] for one in opened.layouts] == [one["attempt_id"] for one in limited.layouts]


def test_lists_of_all_rows_are_rounded_together(rows: pd.DataFrame, monkeypatch: pytest.MonkeyPatch) -> None:
    lists = pd.Series([np.array([index * 2**19, np.nan, 3 * 2**20]) for index in range(len(rows))])
    frame = rows.drop(columns=[*row_series.BY_STAGE.values(), *row_series.BY_STEP.values()], errors="ignore").assign(
        peak_allocated_by_step_bytes=lists
    )
    short = mock.Mock(wraps=row_series._short)
    monkeypatch.setattr(row_series, "_short", short)
    found = row_series.series(Path("no_folder"), frame)
    assert short.call_count == 1
    assert found == {index: {"allocated": [round(index / 2), None, 3]} for index in range(len(rows))}


def test_neighbours_with_one_text_are_one_column_of_a_csv_file(rows: pd.DataFrame, tmp_path: Path) -> None:
    columns = csv_file._joined([csv_file._coded(column) for _, column in rows.items()])
    varying = sum(rows[name].astype(str).nunique() > 1 for name in rows)
    assert varying <= len(columns) <= 2 * varying + 1
    assert len(columns) < rows.shape[1] - 40
    csv_file.write(rows, tmp_path / "rows.csv")
    assert (tmp_path / "rows.csv").read_text() == rows.to_csv(index=False)


def test_names_of_nodes_are_made_once_for_rows_that_share_a_list(rows: pd.DataFrame) -> None:
    shared = ["b", "a"]
    nodes = pd.Series([shared] * (len(rows) - 1) + [None], dtype=object)
    assert list(drift._node(pd.DataFrame({"nodes": nodes, "hosts": [["h"]] * len(rows)}))) == [
        *["a+b"] * (len(rows) - 1),
        "h",
    ]


def test_ended_points_are_found_once_for_page_and_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = load(synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:3])))
    calls = mock.Mock(wraps=decided)
    monkeypatch.setattr("analysis.rows.load.decided", calls)
    assert len(waiting(results)) == len(waiting(results))
    assert calls.call_count == 1
