"""The whole report, from folders on disk to the page: contents, half-finished and broken input, speed, no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import metrics, report
from analysis.cohorts import split
from analysis.figures import registry
from results import store
from results.rows import table_from_rows
from results.schema import ATTEMPTS, MEASUREMENT_VERSION
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of

ROOT = Path(__file__).resolve().parents[2]
POINTS = list(synthetic.experiments(synthetic.MODELS[:2], (1, 2), (1, 4)))


class Links(HTMLParser):
    """Every address that a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def text_of(index: Path) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", index.read_text(), flags=re.DOTALL))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a half-finished measured sweep and a rehearsed one beside it."""
    folder = tmp_path_factory.mktemp("results")
    rows = synthetic.attempts(POINTS[:24])
    rows[3] |= {"loss_agrees": False}
    synthetic.make_sweep(folder / "eight", rows, waiting=POINTS[24:30])
    rehearsed = [row | {"attempt_id": f"r{row['attempt_id']}", "method": "rehearsed"} for row in rows[:8]]
    synthetic.make_sweep(folder / "one", rehearsed)
    return report.build(folder, folder / "report")


def test_page_says_what_was_run_and_what_is_missing(whole: Path) -> None:
    text = text_of(whole)
    assert "32 points attempted in 2 sweeps (eight and one): 24 measured and 8 rehearsed" in text
    assert "Unfinished: 6 of 38 planned points have no result yet" in text
    assert "42 grid points: 38 to run, 2 against a rule and 2 predicted not to fit" in text
    assert "they are not ranked, since a wrong layout can be fast" in text
    assert re.search(
        r"[678] experiments were both rehearsed and measured: the rehearsed peak memory is off by 0.00 %", text
    )
    assert "Rows of different kinds are never pooled" in text


def test_page_names_the_winner_with_its_numbers(whole: Path) -> None:
    frame = pd.read_csv(whole.parent / "tables" / "best_configurations.csv")
    for row in frame[frame["method"] == "measured"].to_dict("records"):
        assert row["layout"] in text_of(whole)
        assert f"{row['tokens_per_s_per_gpu']:,.0f}" in text_of(whole)


def test_measured_and_rehearsed_stand_apart(whole: Path) -> None:
    sections = re.findall(r'<section id="([^"]+)">', whole.read_text())
    assert sections == ["measured-h200", "rehearsed-h200"]
    ranked = pd.read_csv(whole.parent / "tables" / "ranked.csv")
    assert set(ranked["method"]) == {"measured", "rehearsed"}
    firsts = ranked[ranked["rank"] == 1]
    assert not firsts.duplicated(["method", "cluster", "model", "world_size"]).any()


def test_figures_of_what_was_not_measured_say_so_themselves(tmp_path: Path) -> None:
    rows = [synthetic.attempt(POINTS[0], 0), synthetic.attempt(POINTS[1], 1, method="rehearsed_fake")]
    figures = report.build(synthetic.make_sweep(tmp_path / "s", rows), tmp_path / "out").parent / "figures"
    stamped = {path.name: "times are estimates" in path.read_text() for path in figures.glob("*.svg")}
    assert any(stamped.values())
    assert all(told == ("rehearsed-fake" in name) for name, told in stamped.items()), stamped


def test_page_is_self_contained_and_every_link_leads_somewhere(whole: Path) -> None:
    parser = Links()
    parser.feed(whole.read_text())
    embedded = [link for link in parser.found if link.startswith("data:image/png;base64,")]
    assert len(embedded) == len(list((whole.parent / "figures").glob("*.png")))
    for link in parser.found:
        if link.startswith("data:"):
            continue
        assert "://" not in link
        target = link.removeprefix("#")
        assert f'id="{target}"' in whole.read_text() if link.startswith("#") else (whole.parent / link).is_file()
    assert "<script" not in whole.read_text()
    assert "@import" not in whole.read_text()


def test_every_figure_lands_as_png_and_svg(whole: Path) -> None:
    missing = ("bandwidth", "pp_scaling")  # nothing of these rows
    for spec in registry.FIGURES:
        if spec.name in missing:
            assert f"{spec.title}: not drawn, no " in text_of(whole)
            continue
        for kind in ("png", "svg"):
            path = whole.parent / "figures" / f"{spec.name}-measured-h200.{kind}"
            assert path.stat().st_size > 5000
    assert (whole.parent / "figures" / "outcomes-measured-h200.png").read_bytes().startswith(b"\x89PNG")


def test_ranked_table_holds_every_finished_run_in_full_precision(whole: Path) -> None:
    ranked = pd.read_csv(whole.parent / "tables" / "ranked.csv")
    [measured, _] = split(store.read_attempts(whole.parent.parent).to_pandas())
    expected = metrics.ranked(measured.frame)
    found = ranked[ranked["method"] == "measured"]
    assert found["experiment_id"].tolist() == expected["experiment_id"].tolist()
    assert found["tokens_per_s_per_gpu"].tolist() == pytest.approx(expected["tokens_per_s_per_gpu"].tolist(), rel=1e-12)
    outcomes = pd.read_csv(whole.parent / "tables" / "outcomes.csv")
    assert outcomes["points"].sum() == 32


def test_an_earlier_report_is_replaced_whole(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:2]))
    out = tmp_path / "out"
    report.build(sweep, out)
    stale = out / "figures" / "all_runs-measured-a100.png"
    stale.write_bytes(b"old")
    (out / "notes.txt").write_text("mine")
    report.build(sweep, out)
    assert not stale.exists()
    assert (out / "notes.txt").exists()


def test_files_in_a_folder_that_is_no_report_are_left_alone(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:1]))
    (tmp_path / "out" / "figures").mkdir(parents=True)
    mine = tmp_path / "out" / "figures" / "mine.png"
    mine.write_bytes(b"mine")
    report.build(sweep, tmp_path / "out")
    assert mine.exists()


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
    assert "not drawn, no finished run has its memory by category" in text
    assert "boom &lt;b&gt;" in index.read_text()


def test_damaged_part_unknown_columns_and_other_versions(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:4]))
    folder = sweep / "parts" / "attempts"
    row = table_from_rows([synthetic.attempt(POINTS[5], 77, measurement_version=MEASUREMENT_VERSION + 1)], ATTEMPTS)
    pq.write_table(row.append_column("noise_db", pa.array([3.0])), folder / "new.parquet")
    (folder / "bad.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"attempt_id": ["x"], "outcome": ["ok"]}), folder / "old.parquet")
    said: list[str] = []
    text = text_of(report.build(sweep, tmp_path / "out", say=said.append))
    assert "bad.parquet cannot be read and is left out" in text
    assert "1 rows without experiment_id, method, outcome, model or world_size are left out" in text
    assert f"Measured: h200, measurement version {MEASUREMENT_VERSION}" in text
    assert f"Measured: h200, measurement version {MEASUREMENT_VERSION + 1}" in text
    assert sum("bad.parquet" in line for line in said) == 1


def test_parquet_file_alone(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:3]))
    text = text_of(report.build(sweep / "attempts.parquet", tmp_path / "out"))
    assert "3 points attempted in 1 sweep (s)" in text


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "analysis.report", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("what", ["a folder without a sweep", "nothing", "a text file"])
def test_what_is_no_result_is_one_line_and_exit_2(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "a folder without a sweep":
        path.mkdir()
    elif what == "a text file":
        path.write_text("hello")
    done = run(str(path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(path) in line
    assert not (tmp_path / "out").exists()


def test_out_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:1]))
    (tmp_path / "out").write_text("")
    done = run(str(sweep), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: cannot write a report into {tmp_path / 'out'}")
    assert "Traceback" not in done.stderr


def test_no_torch_and_no_pyplot_are_imported(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:2]))
    code = (
        "import sys, json; from pathlib import Path; from analysis import report;"
        f"report.build(Path({str(sweep)!r}), Path({str(tmp_path / 'out')!r}));"
        "print(json.dumps([m for m in ('torch', 'matplotlib.pyplot', 'hydra', 'plotly') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == []


def test_five_thousand_rows_are_drawn_quickly(tmp_path: Path) -> None:
    points = list(synthetic.experiments(world_sizes=(1, 2, 4, 8, 16, 32), micro_batch_sizes=(1, 2, 4, 8)))
    rows = [row for seed in range(4) for row in synthetic.attempts(points, seed=seed)][:5000]
    for i, row in enumerate(rows):
        row["attempt_id"] = f"a{i}"
    assert len(rows) == 5000
    sweep = synthetic.make_sweep(tmp_path / "s", [])
    pq.write_table(table_from_rows(rows, ATTEMPTS), sweep / "attempts.parquet")
    start = time.process_time()
    index = report.build(sweep, tmp_path / "out")
    assert time.process_time() - start < 20  # about 6 s on an idle core; a busy machine gets twice and more
    assert index.stat().st_size < 8e6


def test_retried_points_count_once() -> None:
    frame = frame_of([synthetic.attempt(POINTS[0], i, outcome="hang", attempt_number=i + 1) for i in range(3)])
    [cohort] = split(frame)
    assert metrics.group_counts(cohort.frame)["hang"].sum() == 1
