"""The report of rows that are few, broken, odd or many, and folders that cannot be written."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
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
from analysis.page import staging as output
from analysis.rows import answer, cohorts
from analysis.rows.load import load
from results.tables.files import nullable
from results.tables.rows import table_from_rows
from results.tables.schema import ATTEMPTS, MEASUREMENT_VERSION, SCHEMA_VERSION
from tests.analysis import synthetic
from tests.analysis.pages import POINTS, QUICK, text_of

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=3)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.make_sweep(tmp_path_factory.mktemp("results") / "s", synthetic.attempts(POINTS[:3]))


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


def test_somebody_elses_page_is_not_overwritten(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text("<h1>mine</h1>")
    assert report.main([str(sweep), "--out", str(tmp_path)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert (tmp_path / "index.html").read_text() == "<h1>mine</h1>"


@pytest.mark.parametrize("words", [[""], [".", "--out", " "]])
def test_an_empty_path_is_not_this_folder(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(words) == 2
    assert "an empty path" in capsys.readouterr().err


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


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_earlier_report_is_replaced_whole(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report.build(sweep, out, replace(QUICK, tables=("csv", "md")))
    stale = list((out / "tables").glob("*.md"))
    assert stale
    report.build(sweep, out, QUICK)
    assert not any(path.exists() for path in stale)
    assert not list(out.glob(".*"))


def test_a_report_that_fails_leaves_the_earlier_one_and_nothing_else(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "out"

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("analysis.page.export.write", full)
        with pytest.raises(output.UnwritableReport, match=r"out: No space left on device"):
            report.build(sweep, out, QUICK)
        assert not (tmp_path / "deep").exists()
    report.build(sweep, out, QUICK)
    before = files_of(out)
    monkeypatch.setattr("analysis.page.export.write", full)
    with pytest.raises(output.UnwritableReport):
        report.build(sweep, out, QUICK)
    assert files_of(out) == before


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "analysis.report", *map(str, arguments)]


def test_a_file_that_cannot_grow_is_one_line(sweep: Path, tmp_path: Path) -> None:
    """As on a full disk, from within the processes that draw."""
    done = subprocess.run(
        command(sweep, "--out", tmp_path / "out"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: cannot write a report into {tmp_path / 'out'}: File too large"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_line(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(output.UnwritableReport, match="Permission denied"):
        report.build(sweep, tmp_path / "out")


def test_out_that_is_a_file_is_one_line(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    done = subprocess.run(
        command(sweep, "--out", tmp_path / "out"), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: cannot write a report into {tmp_path / 'out'}")
    assert "Traceback" not in done.stderr


WAITING = """
import signal, sys, time
from pathlib import Path
from analysis import report
from analysis.page import draw_figures

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whatever the tests inherit

def drawn_and_waiting(*figure, drawn=draw_figures._drawn):
    found = drawn(*figure)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    return found

draw_figures._drawn = drawn_and_waiting
sys.exit(report.main(sys.argv[2:]))
"""
"""A report whose processes each draw a figure and then wait for a file."""


def test_ctrl_c_is_one_line_and_leaves_the_earlier_report(sweep: Path, tmp_path: Path) -> None:
    out, go_on = tmp_path / "out", tmp_path / "go on"
    report.build(sweep, out, QUICK)
    before = files_of(out)
    words = [sys.executable, "-c", WAITING, str(go_on), str(sweep), "--out", str(out)]
    running = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(out.glob(".unfinished-*/figures/*")):
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal sends it: to every process
    go_on.touch()
    _, told = running.communicate(timeout=150)
    assert running.returncode == 130
    assert told.splitlines()[-1] == "error: interrupted; an earlier report is unchanged"
    assert "Traceback" not in told
    assert files_of(out) == before


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


def test_a_killed_report_leaves_no_process_behind(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:24]))
    command = [sys.executable, "-m", "analysis.report", str(sweep), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    drawing: list[str] = []
    limit = time.monotonic() + 60
    while not drawing and time.monotonic() < limit:
        drawing = children.read_text().split()
        time.sleep(0.01)
    assert drawing
    process.kill()
    process.wait()
    limit = time.monotonic() + 10
    while (left := [pid for pid in drawing if _runs(pid)]) and time.monotonic() < limit:
        time.sleep(0.05)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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


def test_an_error_of_a_figure_costs_that_figure(sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("of 0\nby 0")

    monkeypatch.setattr(draw_figures, "STRICT", False)
    monkeypatch.setattr(draw_figures, "_drawn", fail)
    said: list[str] = []
    text = text_of(report.build(sweep, tmp_path / "out", QUICK, say=said.append))
    assert "cannot be drawn from these rows (ZeroDivisionError: of 0 by 0)" in text
    assert [line for line in said if line.startswith("warning: figure outcomes of ")]
