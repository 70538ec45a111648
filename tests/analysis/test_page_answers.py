"""The page's answers in the browser against those of Python, cell by cell, and by hand in one cell."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.rows import answer, choice_costs, metrics, pairs
from analysis.rows.cohorts import Cohort
from analysis.rows.frame_cache import cache_per_frame
from results.statistics import ranking
from results.text.numbers import format_setting
from sweep.__main__ import main as sweep_main
from tests.analysis.browser import Browser
from tests.analysis.compared import copy_drawn_sweeps
from tests.analysis.report_page import RECORDED, STUDY, answers, built, cell, choose, opened, parts_of
from tests.analysis.test_choice_costs import differ_only_in

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("the study's page"), pytest.mark.drawn(one_in=2)]

SOURCES = ["study", "some recorded", pytest.param("recorded", marks=pytest.mark.exhaustive(seconds=25))]
Pages = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    drawn = copy_drawn_sweeps(tmp_path_factory.mktemp("drawn"))
    return {"study": STUDY, "recorded": RECORDED, "some recorded": drawn}


@pytest.fixture(scope="module")
def pages(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """Draws the page of a folder when it is first asked for."""
    out = tmp_path_factory.mktemp("pages")

    def page(name: str) -> Path:
        return Path(request.getfixturevalue("study_page")) if name == "study" else built(folders[name], out / name)

    return cache(page)


def asked(query: answer.Query) -> dict[str, Any]:
    """The query as the page's scripts take it."""
    batch = query.tokens_per_step
    return {
        "workload": query.workload,
        "size": query.world_size,
        "memory": query.memory_bytes,
        "batch": batch,
        "only": query.only,
    }


def compare(part: Cohort, query: answer.Query, found: dict[str, Any]) -> None:
    ours = answer.answer(part.frame, query)
    assert (found["points"], found["outOfMemory"], found["failed"]) == (ours.points, ours.out_of_memory, ours.failed)
    assert (found["finished"], found["fits"], found["batch"]) == (ours.finished, ours.fits, ours.tokens_per_step)
    same(found["fasterAt"], ours.faster_at)
    assert [one["tied"] for one in found["list"]] == [bool(one["tied"]) for one in ours.layouts]
    assert [one["unknown"] for one in found["list"]] == [bool(one["unknown"]) for one in ours.layouts]
    for there, here in zip(found["list"], ours.layouts, strict=True):
        same(there["rate"], here[metrics.RANK_BY])
        same(there["behind"], here["behind"])
    assert set(names(found["list"])) == {one["attempt_id"] for one in ours.layouts}
    compare_changes(part, ours, found["changes"])


@cache_per_frame
def rows_of_cells(frame: pd.DataFrame) -> dict[tuple[str, int], dict[str, dict[str, Any]]]:
    """Every comparable row by model and size, and by its attempt."""
    rows: dict[tuple[str, int], dict[str, dict[str, Any]]] = {}
    for row in pairs.comparable(frame).to_dict("records"):
        rows.setdefault((row["workload"], row["world_size"]), {})[row["attempt_id"]] = row
    return rows


def compare_changes(part: Cohort, ours: answer.Answer, told: list[dict[str, Any]]) -> None:
    """What another value costs beside the answer, against its pairs found one by one among all rows of the cell."""
    if ours.best is None:
        assert told == []
        return
    rows = rows_of_cells(part.frame)[ours.query.workload, ours.query.world_size]
    best = rows[ours.best["attempt_id"]]
    ties = {layout["attempt_id"] for layout in ours.ties}
    alone: dict[tuple[str, object], list[str]] = {}
    for axis, attempt in itertools.product(choice_costs.AXES, rows):
        row = rows[attempt]
        if row[axis] != best[axis] and not pd.isna(row[axis]) and differ_only_in(axis, best, row):
            alone.setdefault((axis, format_setting(row[axis])), []).append(attempt)
    for one in told:
        axis, needs = one["axis"], choice_costs.AXES[one["axis"]].needs
        assert needs is None or best[needs] > 1
        attempts = alone.pop((axis, one["value"]), [])
        ratios = [rows[attempt][metrics.RANK_BY] / best[metrics.RANK_BY] for attempt in attempts]
        assert (one["pairs"], one["first"]) == (len(ratios), format_setting(best[axis]))
        for name, pool in (("low", min), ("median", statistics.median), ("high", max)):
            same(one.get(name), pool(ratios) if ratios else None)
        assert one["tied"] == (bool(attempts) and ties.issuperset(attempts))
        like = [name for name in ranking.LIKE if name != axis]
        free = [layout["attempt_id"] for layout in ours.layouts if all(layout[n] == ours.best[n] for n in like)]
        free = [attempt for attempt in free if format_setting(rows[attempt][axis]) == one["value"]]
        assert one["run"] == (free[0] if free else None)
    assert not alone, "a pair is not on the page"


def names(layouts: list[dict[str, Any]]) -> list[str]:
    return [one["attempt"] for one in layouts]


def same(there: float | None, here: float | None) -> None:
    """Equal to the seven digits that the page keeps."""
    assert (there is None) == (here is None)
    if there is not None and here is not None:
        assert math.isclose(there, here, rel_tol=2e-6, abs_tol=2e-6), (there, here)


@pytest.mark.parametrize("name", SOURCES)
def test_every_cell_under_random_limits(name: str, folders: dict[str, Path], pages: Pages, browser: Browser) -> None:
    draw = random.Random(7)
    opened(browser, pages(name))
    for part in parts_of(folders[name]):
        choose(browser, "part", part.slug)
        queries = []
        for workload, size in answer.cells(part.frame):
            queries.append(answer.Query(workload, size))
            for _ in range(3):
                regimes = part.frame["network_regime"].dropna().unique() if "network_regime" in part.frame else []
                batches = part.frame["tokens_per_step"].dropna().unique()
                only = (
                    {"network_regime": str(draw.choice(list(regimes)))} if len(regimes) and draw.random() < 0.4 else {}
                )
                limit = draw.choice([None, 2**30 * draw.uniform(1, 140)])
                batch = draw.choice([None, answer.ANY, float(draw.choice(list(batches)))])
                queries.append(answer.Query(workload, size, limit, batch, only))
        for query, found in zip(queries, answers(browser, [asked(query) for query in queries]), strict=True):
            compare(part, query, found)
    assert browser.console() == []


CELLS_OF_STUDY = (51, 33)
"""Cells on the map, and those in which something finished."""


@pytest.mark.parametrize("name", SOURCES)
def test_the_answer_of_every_cell_is_the_first_row_of_its_batch(
    name: str, folders: dict[str, Path], pages: Pages, browser: Browser
) -> None:
    """As `tables/ranked.csv` has it, of dense models and of mixtures alike."""
    ranked = pd.read_csv(pages(name).parent / "tables" / "ranked.csv", low_memory=False)
    ranked = ranked[ranked["rank"].notna()].sort_values("rank")
    opened(browser, pages(name))
    seen, won = 0, set()
    for part in parts_of(folders[name]):
        choose(browser, "part", part.slug)
        if browser.all("#minor"):
            browser.click("#minor")
        cells = browser.js(
            "[...document.querySelectorAll('#map button.cell')].map((b) => [b.dataset.m, Number(b.dataset.g)])"
        )
        seen += len(cells)
        ours = ranked[ranked["attempt_id"].isin(part.frame["attempt_id"])]
        for workload, size in cells:
            browser.click(cell(workload, size))
            rows = ours[(ours["workload"] == workload) & (ours["world_size"] == size)]
            if rows.empty:
                assert re.search("Nothing (finished here|has run here yet)", browser.text("#winner"))
                continue
            won.add((part.slug, workload, size))
            first = ranking.of_usual_batch(rows, metrics.GROUP).iloc[0]
            shown = browser.text("#winner .stats dd").replace(",", "")
            assert math.isclose(float(shown), first["tokens_per_s_per_gpu"], rel_tol=0.006), (workload, size)
            layout = browser.js("Report.state.part.layoutName(Report.found(Report.state.cell).best.place)")
            assert layout == first["layout"]
            if pd.notna(first["mfu_palm"]):
                assert f"{100 * first['mfu_palm']:.1f} %" in browser.text(cell(workload, size))
    assert seen >= len(won) > 0
    if name == "study":
        assert (seen, len(won)) == CELLS_OF_STUDY
    elif name == "recorded":
        assert {"measured-h200", "rehearsed-h200"} <= {slug for slug, *_ in won}
        assert any("mixtral" in workload and "learned routing" in workload for _, workload, _ in won)


def test_the_page_writes_settings_as_python_does(pages: Pages, browser: Browser) -> None:
    opened(browser, pages("study"))
    values = [0.0, 1.0, 0.25, 1 / 3, 2 / 3, 0.1 + 0.2, 1.25, 4096, 16777216, "1f1b"]
    assert browser.js(f"{json.dumps(values)}.map(Words.setting)") == [format_setting(value) for value in values]


def test_regret_and_money_by_hand(pages: Pages, browser: Browser) -> None:
    opened(browser, pages("study"), "#m=8.86B&g=64&price=2.5&tok=1")
    raw = pd.read_csv(STUDY)
    raw = raw[raw["name"].str.startswith("8.86G_") & (raw["nodes"] == 8) & (raw["gbs"] == 256)]
    best, second = raw["tok/s/gpu"].dropna().sort_values().iloc[[-1, -2]]
    hours = 1e12 / best / 3600
    cells = [line.text for line in browser.all("#winner .stats dd")]
    assert cells[0] == "6,555"
    assert cells[3] == f"{hours / 64 / 24:.1f} days"
    assert cells[4] == f"${hours * 2.5 / 1e3:,.0f} k"
    row = browser.all("#ten tbody tr")[1].text.split()
    extra = (1e12 / second / 3600 - hours) * 2.5
    assert row[-2] == f"+${extra:,.0f}"
    assert f"{100 * (1 - second / best):.1f}" in row


def test_nothing_fits_is_said_with_a_way_out(pages: Pages, browser: Browser) -> None:
    opened(browser, pages("study"), "#m=469B&g=256")
    assert "Nothing finished here" in browser.text("#winner")
    assert "This model finished on 512 GPUs" in browser.text("#winner")
    browser.click("#winner .callout button")
    assert browser.js("document.getElementById('f-gpus').value") == "512"
    choose(browser, "f-mem", "10")
    assert "Nothing fits here" in browser.text("#winner")
    browser.click("#winner .callout button")
    assert "Fastest for 469B on 512 × H100" in browser.text("#h-answer")


@pytest.mark.parametrize(("name", "fragment"), [("study", "#m=8.86B&g=64"), ("some recorded", "")])
def test_the_command_that_is_shown_plans(
    name: str,
    fragment: str,
    pages: Pages,
    browser: Browser,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened(browser, pages(name), fragment)
    best = "Report.found(Report.state.cell).best.row"
    words = browser.js(f"Report.command({best}).words")
    assert browser.text("#command").split()[:4] == words[:4] == ["python", "-m", "sweep", "run"]
    wanted = browser.js(
        f"['tp', 'pp', 'micro_batch_size', 'zero_stage'].map((n) => Report.state.part.value(n, {best}))"
    )
    out = tmp_path / "plan.parquet"
    options = [word for word in words[4:] if not word.startswith(("launcher", "measure."))]
    assert sweep_main(["plan", *options, f"results_dir={tmp_path}", "--out", str(out)]) == 0, capsys.readouterr().err
    ledger = pd.read_parquet(out)
    assert len(ledger) == 1
    assert ledger["verdict"].iloc[0] in ("run", "predicted_oom")
    assert [ledger[axis].iloc[0] for axis in ("tp", "pp", "micro_batch_size", "zero_stage")] == wanted


def test_report_json_has_the_numbers_of_the_page(pages: Pages, browser: Browser) -> None:
    told = json.loads((pages("study").parent / "report.json").read_text())
    [part] = told["parts"]
    opened(browser, pages("study"))
    queries = [
        {"workload": one["workload"], "size": one["world_size"], "memory": None, "batch": None, "only": {}}
        for one in part["cells"]
    ]
    for one, found in zip(part["cells"], answers(browser, queries), strict=True):
        assert (one["points"], one["finished_layouts"], one["compared_layouts"]) == (
            *(found["points"], found["finished"]),
            len(found["list"]),
        )
        assert one["tied"] == sum(layout["tied"] for layout in found["list"])
        for here, there in zip(one["layouts"], found["list"], strict=False):
            same(there["rate"], here["tokens_per_s_per_gpu"])
            assert here["tied"] == there["tied"]
            assert math.isclose(here["days"] * 24 * one["world_size"] * 3600, 1e12 / here["tokens_per_s_per_gpu"])
            assert math.isclose(here["cost"], 2.5 * here["device_hours"])
    shown = browser.js("[...document.querySelectorAll('.sentences li')].map((e) => e.textContent)")
    assert part["sentences"] == shown
