"""The report of what has not run here: a plan alone, and points that another sweep has answered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis import report
from analysis.index_page import next_runs
from analysis.rows import cohorts
from analysis.rows.load import load
from results.tables import store
from results.tables.schema import LEDGER
from results.text.numbers import plural
from sweep.__main__ import main as sweep_main
from tests.analysis import synthetic
from tests.analysis.browser import Browser
from tests.analysis.pages import POINTS, QUICK, text_of
from workloads.spec.experiment import from_dict

pytestmark = pytest.mark.slow
RATE = "predicted_tokens_per_s_per_gpu"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ledger of a shipped grid."""
    path = tmp_path_factory.mktemp("plan") / "plan.parquet"
    assert sweep_main(["plan", "+grid=llama_node_limits", "cluster=h200", "--out", str(path)]) == 0
    return path


def test_a_plan_alone_opens_as_predictions(plan: Path, tmp_path: Path, browser: Browser) -> None:
    index = report.build(plan, tmp_path / "out")
    text = text_of(index)
    assert "Nothing has been run yet: there is no attempt to report on. The page shows what the plan predicts." in text
    assert "Every winner as a table" not in text
    browser.open(index, size=(1400, 900))
    browser.wait("window.Report?.ready")
    ledger = store.read_ledger(plan).to_pandas()
    cells = ledger.groupby(["model", "world_size"])
    usable = ledger[(ledger["verdict"] == "run") & (ledger["predicted_peak_bytes"] <= ledger["limit_bytes"].min())]
    best = usable.groupby(["model", "world_size"])[RATE].max()  # the map answers: what is predicted of every cell
    told = browser.js(
        "[...document.querySelectorAll('#map button.cell')].map((e) => [e.dataset.m, e.dataset.g, e.textContent])"
    )
    assert len(told) == len(cells)
    for model, size, words in told:
        rate = best.get((model, int(size)))
        assert words.startswith("0 of " if rate is None else f"{rate:,.0f}"), (model, size, words, rate)
    chosen = ledger[
        (ledger["model"] == browser.js("document.getElementById('f-model').value"))
        & (ledger["world_size"] == int(browser.js("document.getElementById('f-gpus').value")))
    ]
    fits = chosen[(chosen["verdict"] == "run") & (chosen["predicted_peak_bytes"] <= ledger["limit_bytes"].min())]
    assert f"{len(fits)} of {len(chosen)}" in browser.text("#winner .funnel")
    assert "None of these points has run." in browser.text("#winner")
    assert "python -m sweep run +grid=llama_node_limits cluster=h200" in browser.text("#command")
    assert "a prediction, not a ranking" in browser.text("#h-ten")
    first = fits.sort_values("predicted_tokens_per_s_per_gpu").iloc[-1]
    assert f"{first['predicted_tokens_per_s_per_gpu']:,.0f}" in browser.text("#ten tbody tr")
    low, high = browser.text("#ten tbody tr td:nth-child(4)").split(" to ")
    tokens = first["tokens_per_step"] / first["world_size"]
    assert float(low.replace(",", "")) == pytest.approx(tokens / first["predicted_step_time_high_s"], rel=0.01)
    assert float(high.replace(",", "")) == pytest.approx(tokens / first["predicted_step_time_low_s"], rel=0.01)
    assert len(browser.all("#ten .trk .span")) == min(10, len(fits))
    shown = browser.js("Report.runs.order().map((row) => Report.state.part.value('fit', row))")
    assert shown == ["fits"] * len(fits)  # what may not fit is one click away
    assert browser.js("document.getElementById('why').hidden && document.getElementById('cost').hidden")
    assert "predicted tokens/s/GPU" in browser.text("#runs-table")
    names = set(browser.js("[...window.Report.state.part.columns.keys()]"))
    assert not {"tokens_per_s_per_gpu", "outcome", "step_time_s"} & names
    assert browser.console() == []


def test_a_phone_has_room_for_the_ten_of_a_plan(plan: Path, tmp_path: Path, browser: Browser) -> None:
    browser.open(report.build(plan, tmp_path / "out", QUICK), size=(375, 900))
    browser.wait("window.Report?.ready && document.querySelector('#ten tbody tr')")
    assert browser.js("document.getElementById('ten').scrollWidth <= document.getElementById('ten').clientWidth")
    shown = browser.js(
        "[...document.querySelectorAll('#ten th')].filter((e) => e.offsetWidth).map((e) => e.textContent)"
    )
    assert shown == ["Layout", "Predicted tokens/s/GPU", "Predicted GiB"]


def test_a_point_of_a_plan_opens_with_its_verdict(plan: Path, tmp_path: Path, browser: Browser) -> None:
    report.build(plan, tmp_path / "out", QUICK)
    refused = next(row for row in store.read_ledger(plan).to_pylist() if row["verdict"] == "predicted_oom")
    name = f"{refused['sweep']} point {refused['point']}"
    browser.open(tmp_path / "out" / "index.html", "#r.row=" + name.replace(" ", "%20"))
    browser.wait("window.Report?.ready && !document.getElementById('runs-drawer').hidden")
    told = browser.text("#runs-drawer")
    assert "What the plan says" in told
    assert refused["detail"] in told
    assert "Nothing of this point has run" in told
    assert "No log of it" not in told
    assert browser.console() == []


def test_a_sweep_of_which_nothing_has_run_has_the_same_page(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "empty", [], waiting=POINTS[:5])
    index = report.build(sweep, tmp_path / "out", QUICK)
    assert "The page shows what the plan predicts." in text_of(index)
    assert 'id="finder"' in index.read_text()


def test_measured_points_leave_the_list_of_what_to_run(plan: Path, tmp_path: Path, browser: Browser) -> None:
    ledger = [row for row in store.read_ledger(plan).to_pylist() if row["verdict"] == "run"]
    ledger = sorted((row for row in ledger if row["model"] == "llama1b"), key=lambda row: -row[RATE])
    points = [from_dict(json.loads(row["config_json"])) for row in ledger]
    assert len(points) >= 3
    for measured in ([points[-1]], [points[-1], points[0]]):
        sweep = synthetic.make_sweep(tmp_path / str(len(measured)), synthetic.attempts(measured, outcome="ok"))
        store.write_ledger(sweep, [row | {"sweep": sweep.name} for row in ledger])
        words = {"settings": {"command": ["run", "+grid=llama_node_limits"]}}
        (sweep / "sweep.json").write_text(json.dumps(words))
        results = load(sweep)
        assert next_runs.command(results) == "python -m sweep run +grid=llama_node_limits"
        [cell] = next_runs.of_cells(results, cohorts.split(results.attempts)[0].frame)
        rest = [row for row, point in zip(ledger, points, strict=True) if point not in measured]
        assert cell["points"] == len(rest)
        assert cell["hours"] == pytest.approx(sum(row["expected_gpu_hours"] for row in rest), rel=1e-3)
        ok = results.attempts
        factor = (ok["predicted_step_time_s"] / ok["step_time_s"]).median()  # what the measured ones reached
        assert factor != 1 and f"multiplied by {factor:.2f}, the median of what the" in cell["corrected"]
        assert plural(len(measured), "finished run") in cell["corrected"]
        rates = [factor * row[RATE] for row in rest][:10]
        assert [one["rate"] for one in cell["first"]] == pytest.approx(rates, rel=1e-3)
        assert all(one["low"] < one["rate"] < one["high"] for one in cell["first"])
    browser.open(report.build(sweep, tmp_path / "out", QUICK))
    browser.wait("window.Report?.ready")
    assert f"{len(rest)} of {len(rest)} points without a result" in browser.text("#h-next")
    assert len(browser.all("#next .span")) == len(rest)
    assert "Copy the command that goes on" in browser.text("#winner")
    assert browser.console() == []


def second_sweep(folder: Path) -> Path:
    """A sweep whose points a sweep called ``first`` has answered."""
    rows = synthetic.attempts(POINTS[:3], outcome="ok")
    synthetic.make_sweep(folder / "first", rows)
    second = folder / "second"
    second.mkdir()
    (second / "sweep.json").write_text("{}")
    cached = [
        {name: row[name] for name in LEDGER.names if name in row}
        | {"point": i, "sweep": "second", "verdict": "cached"}
        | {"cached_attempt": row["attempt_id"], "cached_sweep": "first"}
        for i, row in enumerate(rows)
    ]
    store.write_ledger(second, cached)
    return second


def test_points_answered_by_another_sweep_are_in_the_report(tmp_path: Path) -> None:
    said: list[str] = []
    second = second_sweep(tmp_path)
    text = text_of(report.build(second, tmp_path / "out", QUICK, say=said.append))
    assert "Nothing has been run yet" not in text
    note = f"3 points of this plan have run in the sweep first ({tmp_path / 'first'}): its rows are shown here."
    assert note in text
    assert note in said
    assert "3 attempts of 2 sweeps read" in said
    assert load(tmp_path).notes == ()  # the folder above holds both: no row is there twice
    assert len(load(tmp_path).attempts) == 3


def test_answers_that_are_gone_are_said(tmp_path: Path) -> None:
    second = second_sweep(tmp_path)
    (tmp_path / "first").rename(tmp_path / "moved")
    found = load(second)
    assert found.attempts.empty
    [line] = found.problems
    assert line == (
        f"3 points of this plan have run in the sweep first, whose rows are not below {tmp_path}: they are missing here"
    )
