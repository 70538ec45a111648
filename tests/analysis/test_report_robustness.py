"""The report of rows that are few, broken, odd or many."""

from __future__ import annotations

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import report
from analysis.figures import all_runs, failures_by_phase, outcomes
from analysis.index_page import headlines, page_data
from analysis.options import Options
from analysis.page import draw_figures
from analysis.rows import answer, cohorts
from analysis.rows.load import load
from results.tables.files import nullable
from results.tables.rows import table_from_rows
from results.tables.schema import ATTEMPTS, MEASUREMENT_VERSION, SCHEMA_VERSION
from tests.analysis import synthetic
from tests.analysis.pages import POINTS, QUICK, text_of
from tests.analysis.test_interrupted_reports import ROOT, command

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=3)]


def test_empty_sweep_gives_a_report_that_says_so(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "empty", [], waiting=POINTS[:5])
    text = text_of(report.build(sweep, tmp_path / "out"))
    assert "Nothing has been run yet" in text
    assert "Unfinished: 5 of 5 planned points" in text


def test_all_failed(tmp_path: Path) -> None:
    rows = [synthetic.attempt(p, i, outcome="crash", evidence="boom <b>") for i, p in enumerate(POINTS[:4])]
    index = report.build(synthetic.make_sweep(tmp_path / "s", rows), tmp_path / "out")
    text = text_of(index)
    assert "No run has finished with a throughput" in text
    assert "4 of 4 points did not finish (100.0 %): 4 crash" in text
    assert "Memory by category: no finished run has its memory by category" in text
    assert "boom &lt;b&gt;" in index.read_text()


def test_damaged_part_unknown_columns_and_other_versions(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:4]))
    folder = sweep / "parts" / "attempts"
    row = table_from_rows([synthetic.attempt(POINTS[5], 77, measurement_version=MEASUREMENT_VERSION + 1)], ATTEMPTS)
    pq.write_table(row.append_column("noise_db", pa.array([3.0])), folder / "new.parquet")
    (folder / "bad.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"attempt_id": ["x"], "outcome": ["ok"]}), folder / "old.parquet")
    said: list[str] = []
    text = text_of(report.build(sweep, tmp_path / "out", QUICK, say=said.append))
    assert "bad.parquet cannot be read and is left out" in text
    assert "1 rows without experiment_id, method, outcome, model or world_size are left out" in text
    assert f"Measured: h200, measurement version {MEASUREMENT_VERSION}" in text
    assert f"Measured: h200, measurement version {MEASUREMENT_VERSION + 1}" in text
    assert sum("bad.parquet" in line for line in said) == 1


def test_parquet_file_alone(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:3]))
    text = text_of(report.build(sweep / "attempts.parquet", tmp_path / "out", QUICK))
    assert "3 points attempted in 1 sweep (s)" in text


def test_a_table_of_something_else_leaves_the_report_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:3])) / "steps.parquet"
    pq.write_table(pa.table({"attempt_id": ["a"], "step": [0]}), steps)
    assert report.main([str(steps), "--out", str(tmp_path / "out")]) == 2
    assert "is not a table of attempts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_point_that_was_stopped_has_not_failed(tmp_path: Path) -> None:
    rows = [*synthetic.attempts(POINTS[:2]), synthetic.attempt(POINTS[3], 9, outcome="cancelled", will_retry=True)]
    text = text_of(report.build(synthetic.make_sweep(tmp_path / "s", rows), tmp_path / "out", QUICK))
    assert "1 point had to stop and has not run yet." in text
    assert "did not finish (" not in text


def test_a_cancelled_point_has_not_run_yet_wherever_points_are_counted(tmp_path: Path) -> None:
    rows = [*synthetic.attempts(POINTS[:4]), synthetic.attempt(POINTS[4], 9, outcome="cancelled", phase="step")]
    sweep = synthetic.make_sweep(tmp_path / "s", rows)
    [part] = cohorts.split(load(sweep).attempts)
    assert outcomes.cells(part.frame).to_numpy().sum() == 4
    assert "cancelled" not in set(outcomes.data(part.frame)["outcome"])
    assert "cancelled" not in set(failures_by_phase.data(part.frame)["outcome"])
    assert "cancelled" not in set(all_runs.data(part.frame)["outcome"])
    assert sum(one.points for one in answer.of_every_cell(part.frame)) == 4
    assert "Of 4 points" in " ".join("".join(said[:2]) for said in headlines.of_part(part))
    text = text_of(report.build(sweep, tmp_path / "out", QUICK))
    assert "4 points attempted in 1 sweep" in text
    assert text.count("1 point had to stop and has not run yet.") == 1
    numbers = page_data.of_parts(load(sweep), [part], None)["parts"][0]["points"]
    assert sum(not again for again in numbers["again"]) == 4


def test_one_row(tmp_path: Path) -> None:
    row = synthetic.attempt(POINTS[0], outcome="ok")
    text = text_of(report.build(synthetic.make_sweep(tmp_path / "s", [row]), tmp_path / "out"))
    assert "1 point attempted in 1 sweep" in text
    assert "there is nothing to compare it with" in text
    assert "No layout finished more than once" in text


def test_rows_of_almost_nothing(tmp_path: Path) -> None:
    """Every column that may be empty is."""
    kept = ("attempt_id", "schema_version", "method", "attempt_number", "experiment_id", "model", "world_size")
    for outcome in ("ok", "oom"):
        rows = [
            dict.fromkeys(ATTEMPTS.names)
            | {name: value for name, value in synthetic.attempt(p, i, outcome=outcome).items() if name in kept}
            | {"outcome": outcome}
            for i, p in enumerate(POINTS[:3])
        ]
        folder = synthetic.make_sweep(tmp_path / outcome, [])
        table = pa.Table.from_pylist(rows, schema=pa.schema([field.with_nullable(True) for field in ATTEMPTS]))
        pq.write_table(table, folder / "attempts.parquet")
        text = text_of(report.build(folder, tmp_path / f"{outcome}-out"))
        assert "No run has finished with a throughput" in text


def test_mixed_schema_versions_are_said(tmp_path: Path) -> None:
    rows = [synthetic.attempt(p, i, outcome="ok", schema_version=SCHEMA_VERSION - i) for i, p in enumerate(POINTS[:2])]
    text = text_of(report.build(synthetic.make_sweep(tmp_path / "s", rows), tmp_path / "out", QUICK))
    assert f"The rows mix 2 schema versions: {SCHEMA_VERSION} (1 rows) and {SCHEMA_VERSION - 1} (1 rows)" in text


def test_a_truncated_part_is_left_out_and_said(tmp_path: Path) -> None:
    folder = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:3]))
    part = folder / "parts" / "attempts" / "half.parquet"
    pq.write_table(table_from_rows([synthetic.attempt(POINTS[5], 9)], ATTEMPTS), part)
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    text = text_of(report.build(folder, tmp_path / "out", QUICK))
    assert "half.parquet cannot be read and is left out" in text
    assert "3 points attempted" in text


@pytest.mark.exhaustive(seconds=20)
def test_five_thousand_rows_are_drawn_quickly(tmp_path: Path) -> None:
    points = list(synthetic.experiments(world_sizes=(1, 2, 4, 8, 16, 32), micro_batch_sizes=(1, 2, 4, 8)))
    rows = [row for seed in range(4) for row in synthetic.attempts(points, seed=seed)][:5000]
    for i, row in enumerate(rows):
        row["attempt_id"] = f"a{i}"
    assert len(rows) == 5000
    sweep = synthetic.make_sweep(tmp_path / "s", [])
    pq.write_table(table_from_rows(rows, ATTEMPTS), sweep / "attempts.parquet")
    start = sum(os.times()[:4])
    index = report.build(sweep, tmp_path / "out")
    # Of this process and those that draw: about 12 s on idle cores; a busy machine gets twice and more.
    assert sum(os.times()[:4]) - start < 60
    assert index.stat().st_size < 8e6


@pytest.mark.skipif(not os.environ.get("ULTRASWEEP_SLOW_TESTS"), reason="a minute; set ULTRASWEEP_SLOW_TESTS=1")
def test_a_hundred_thousand_rows_take_bounded_time_and_memory(tmp_path: Path) -> None:
    points = list(synthetic.experiments(world_sizes=(1, 2, 4, 8, 16, 32), micro_batch_sizes=(1, 2, 4, 8)))
    rows = synthetic.attempts(points)
    table = table_from_rows(rows, ATTEMPTS)
    copies = -(-100_000 // len(rows))
    folder = synthetic.make_sweep(tmp_path / "s", [])
    parts = []
    for k in range(copies):
        own = {
            name: pa.array([f"{k}-{value}" for value in table[name].to_pylist()])
            for name in ("attempt_id", "experiment_id")
        }
        part = table
        for name, column in own.items():
            part = part.set_column(part.schema.names.index(name), part.schema.field(name), column)
        parts.append(part)
    pq.write_table(pa.concat_tables(parts).slice(0, 100_000), folder / "attempts.parquet")
    done = subprocess.run(
        command(folder, "--out", tmp_path / "out"), cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    [told] = [line for line in done.stderr.splitlines() if line.startswith("peak memory")]
    assert int(told.split()[2].replace(",", "")) < 2048


def test_a_damaged_table_says_how_its_rows_come_back(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:3]))
    (sweep / "attempts.parquet").write_bytes(b"PAR1")
    (sweep / "attempts").mkdir()
    text = text_of(report.build(sweep, tmp_path / "out", QUICK))
    assert f"the rows of {sweep} can be rebuilt from {sweep / 'attempts'}: python -m sweep status {sweep}" in text


ODD = [
    {"step_time_s": -1.0},
    {"step_time_s": float("inf")},
    {"world_size": 0},
    {"outcome": "exploded"},
    {"num_kv_heads": 7},
    {"config_json": "[" * 5000},
    {"started_at": datetime(9999, 12, 31, tzinfo=UTC)},
    {"step_time_min_s": 0.0},
    {"breakdown_comm_by_axis": [None]},
    {"model": r"$\x$ a$b_{"},
    {"sweep": r"$\frac{"},
    {"pp_schedule": r"$\bad$"},
]


def test_odd_rows_cost_a_warning_each_and_not_the_report(tmp_path: Path) -> None:
    """Values that a writer of another program stored, and names that matplotlib could take for mathematics."""
    rows = [{**synthetic.attempt(point, i), "sweep": "s"} for i, point in enumerate(POINTS[: len(ODD) + 8])]
    rows = [{**row, **odd} for row, odd in zip(rows, ODD, strict=False)] + rows[len(ODD) :]
    folder = synthetic.make_sweep(tmp_path / "s", [])
    pq.write_table(pa.Table.from_pylist(rows, nullable(ATTEMPTS)), folder / "attempts.parquet")
    said: list[str] = []
    quick = Options(figures=("outcomes", "all_runs", "breakdown_by_axis"))
    text = text_of(report.build(folder, tmp_path / "out", quick, say=said.append))
    warnings = [line for line in said if line.startswith("warning: ")]
    assert [line.split(":")[1].strip().partition(" left out")[0] for line in warnings] == [
        *["1 row", "1 row", "2 rows", "1 row"],  # by outcome, world size, step time and configuration
        *["1 value", "1 value", "1 value", "1 row"],  # times, a list, and heads
    ]
    assert "world_size=0 (attempt 000002-" in text
    assert r"$\x$ a$b_{" in text


def test_an_error_of_a_figure_costs_that_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:3]))

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("of 0\nby 0")

    monkeypatch.setattr(draw_figures, "STRICT", False)
    monkeypatch.setattr(draw_figures, "_drawn", fail)
    said: list[str] = []
    text = text_of(report.build(sweep, tmp_path / "out", QUICK, say=said.append))
    assert "cannot be drawn from these rows (ZeroDivisionError: of 0 by 0)" in text
    assert [line for line in said if line.startswith("warning: figure outcomes of ")]
