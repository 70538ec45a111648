"""The report of a results folder that holds sweeps which came with the program, beside the user's own or alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from analysis import report
from tests.analysis import synthetic
from tests.analysis.pages import POINTS, QUICK, text_of

NOTE = "holds no sweep of your own yet: this report shows the sweeps that came with the program"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    rows = [row | {"attempt_id": f"shipped-{row['attempt_id']}"} for row in synthetic.attempts(POINTS[:3])]
    synthetic.make_sweep(folder / "recorded" / "shipped", rows)
    (folder / "recorded" / "SHIPPED").write_text("")
    return folder


def build(results: Path, out: Path) -> tuple[str, list[str]]:
    """The page's text, and the lines that the command prints."""
    lines: list[str] = []
    return text_of(report.build(results, out, QUICK, say=lines.append)), lines


@pytest.mark.slow
def test_shipped_sweeps_are_shown_while_there_are_no_others(results: Path, tmp_path: Path) -> None:
    text, lines = build(results, tmp_path / "out")
    assert "3 points attempted in 1 sweep (shipped)" in text
    assert f"{results} {NOTE}" in lines


@pytest.mark.slow
def test_shipped_sweeps_do_not_mix_into_a_users_report(results: Path, tmp_path: Path) -> None:
    synthetic.make_sweep(results / "mine", synthetic.attempts(POINTS[:4]))
    text, lines = build(results, tmp_path / "out")
    assert "4 points attempted in 1 sweep (mine)" in text
    assert not any(NOTE in line for line in lines)


@pytest.mark.slow
def test_a_report_of_the_named_folder_shows_the_shipped_sweeps(results: Path, tmp_path: Path) -> None:
    synthetic.make_sweep(results / "mine", synthetic.attempts(POINTS[:4]))
    text, lines = build(results / "recorded", tmp_path / "out")
    assert "3 points attempted in 1 sweep (shipped)" in text
    assert not any(NOTE in line for line in lines)
