"""The figure and the table of training curves."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools import draw_training_curves as training_curves
from docs.tools.curves.curve_bands import collapsed, distances
from docs.tools.curves.curve_table import by_run, read_curves, write_curves
from docs.tools.curves.runs import all_runs
from tests.docs.test_curves import curve

DOCS = Path(__file__).parents[2] / "docs"


def texts(figure: object) -> str:
    axes = figure.axes  # type: ignore[attr-defined]
    return "\n".join([*(ax.get_title(loc="left") for ax in axes), *(t.get_text() for ax in axes for t in ax.texts)])


def test_every_run_has_its_name_in_the_figure() -> None:
    rows = [*curve("fp32"), *curve("bf16"), *curve("bf16", "tp 2", off={5: 0.01}), *curve("bf16", "ZeRO 3")]
    drawn = training_curves.draw(rows)
    assert len(drawn.axes) == 3
    told = texts(drawn)
    for text in ("Model m: 4 runs on one another", "loss minus that of fp32", "Layouts in bf16", "tp 2", "ZeRO 3"):
        assert text in told


def test_panels_without_rows_are_left_out() -> None:
    assert len(training_curves.draw(curve("fp32")).axes) == 1
    assert len(training_curves.draw([*curve("fp32"), *curve("bf16")]).axes) == 2


def test_the_table_says_how_far_runs_are_apart() -> None:
    lines = training_curves.table([*curve("fp32"), *curve("bf16", off={3: 0.001}, held_out=2.005)]).splitlines()
    assert lines[2].startswith("| m fp32 one rank | 2.3608 | 2.0000 |  |")
    told = (
        "| m bf16 one rank | 2.3608 | 2.0050 | m fp32 one rank | 0.00100 (0.003) | 0.000 (0.12) | 0.000, 0.005 (0.08) |"
    )
    assert lines[3] == told


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "curves.parquet"
    write_curves(rows, [*curve("fp32"), *curve("bf16")])
    assert training_curves.main([str(rows), "--out", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert capsys.readouterr().out.startswith("| run |")
    for words, message in (
        ([str(tmp_path / "none.parquet")], "none.parquet: no such file"),
        ([str(rows), "--out", "curves.jpg"], "'curves.jpg' must end in .png or .svg"),
    ):
        assert training_curves.main(words) == 2
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1


def test_the_page_shows_the_recorded_rows() -> None:
    rows = read_curves(DOCS / "figures" / "training_curves.parquet")
    page = (DOCS / "training_curves.md").read_text()
    assert training_curves.table(rows) in page, "stale; python -m docs.tools.draw_training_curves prints the table"
    assert [found for found in distances(rows) if not found.is_inside] == []
    assert collapsed(rows) == {}
    recorded = by_run(rows)
    assert list(recorded) == [run.name for run in all_runs()]
    for run in all_runs():
        own, then = recorded[run.name], {"engine_version": "3", "gradient_accumulation_fusion": False}
        assert [row["step"] for row in own] == list(range(300))
        assert own[0]["experiment_id"] == run.experiment.replace(**then).id, "the curves are of this engine version"
        assert own[-1]["held_out_loss"] is not None


def test_rows_are_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "curves.parquet"
    write_curves(path, curve("fp32"))
    assert training_curves.table(read_curves(path)) == training_curves.table(curve("fp32"))
