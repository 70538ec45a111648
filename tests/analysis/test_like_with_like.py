"""Batches and precisions compete only if a reader asks for it; a page opens where its rows say."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from analysis.index_page import page_data
from analysis.rows import answer, metrics
from results.errors import InvalidResults
from results.statistics import ranking
from tests.analysis.conftest import recorded_cohorts


def rows(*values: tuple[float | None, str | None]) -> pd.DataFrame:
    frame = pd.DataFrame(values, columns=[*ranking.LIKE])
    return frame.assign(cell=1)


def kept(frame: pd.DataFrame, **words: list[str]) -> list[int]:
    return list(ranking.of_usual_batch(frame, ["cell"], **words).index)


def test_the_largest_group_is_kept() -> None:
    frame = rows((8, "bf16"), (8, "fp8"), (8, "fp8"), (16, "bf16"))
    assert kept(frame) == [1, 2]
    assert kept(frame, like=["tokens_per_step"]) == [0, 1, 2]
    assert kept(frame, like=[]) == [0, 1, 2, 3]
    assert kept(frame.drop(columns=["precision"])) == [0, 1, 2]


def test_of_equal_groups_the_smallest_batch_then_the_first_precision_by_name() -> None:
    assert kept(rows((16, "bf16"), (8, "fp8"))) == [1]
    assert kept(rows((8, "fp8"), (8, "bf16"))) == [1]
    assert kept(rows((None, None), (None, None), (8, "bf16"))) == [0, 1]


@pytest.mark.slow(seconds=5)
def test_the_fastest_of_any_precision_is_not_the_answer_until_it_is_asked_for() -> None:
    part = next(part for part in recorded_cohorts() if part.slug == "measured-h200")
    mixed = 0
    for workload, size in answer.cells(part.frame):
        plain = answer.answer(part.frame, answer.Query(workload, size))
        every = answer.answer(part.frame, answer.Query(workload, size, None, answer.ANY, {"precision": answer.ANY}))
        for name in ranking.LIKE:
            assert len({layout[name] for layout in plain.layouts}) <= 1
        assert len(every.layouts) == every.finished == plain.finished
        mixed += len({layout["precision"] for layout in every.layouts}) > 1
        for precision in {layout["precision"] for layout in every.layouts}:
            asked = answer.answer(part.frame, answer.Query(workload, size, only={"precision": precision}))
            assert {layout["precision"] for layout in asked.layouts} == {precision}
            assert len({layout["tokens_per_step"] for layout in asked.layouts}) == 1
    assert mixed > 10


@pytest.mark.slow
def test_recorded_rows_open_at_the_first_row_of_readmes_table() -> None:
    root = Path(__file__).resolve().parents[2]
    opens = page_data.opens_at(root / "results" / "recorded")
    assert opens is not None
    part = next(part for part in recorded_cohorts() if part.slug == "measured-h200")
    query = answer.Query(opens["workload"], opens["world_size"], tokens_per_step=opens["tokens_per_step"])
    best = answer.answer(part.frame, query).best
    assert best is not None
    assert f"| {best[metrics.RANK_BY]:,.0f} |" in (root / "README.md").read_text()


def test_a_file_that_says_where_to_open_is_checked(tmp_path: Path) -> None:
    assert page_data.opens_at(tmp_path) is None
    path = tmp_path / page_data.OPENS_AT
    good = {"workload": "llama1b", "world_size": 2, "tokens_per_step": 8192}
    path.write_text(json.dumps(good))
    assert page_data.opens_at(tmp_path) == good
    for text in ("[]", "{", json.dumps(good | {"world_size": "2"}), json.dumps({"workload": "llama1b"})):
        path.write_text(text)
        with pytest.raises(InvalidResults, match="opens_at"):
            page_data.opens_at(tmp_path)
