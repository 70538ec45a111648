"""One number, said by many: tables, figures' tables, comparisons, notebooks, claims and the terminal agree.

Of every model and size: the winner, its throughput, how far the second is behind and the tie.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from analysis.claims import study as claims
from analysis.compare import matching
from analysis.figures import best_configurations, cost
from analysis.figures.registry import FIGURES
from analysis.index_page import headlines
from analysis.options import Options
from analysis.report import build
from analysis.rows import answer, choice_costs, metrics, pairs, winners
from analysis.rows.canonical import with_canonical_models
from analysis.rows.cohorts import Cohort, split
from analysis.rows.labels import ROUTING
from analysis.rows.load import load
from launchers.state.sweep_dir import SweepDir
from launchers.status.run_summary import RunSummary
from results.statistics import ranking
from results.tables.store import read_attempts
from results.text.numbers import format_percent, name_routing
from sweep.inspecting.findings import best_layouts
from sweep.running import run_end
from tests.analysis import compared
from tests.analysis.compared import RECORDED, STUDY
from tests.analysis.conftest import frame_of, recorded_cohorts
from tests.analysis.run_notebooks import read, texts
from tests.sampling import sampled

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=3)]

SWEEPS = sorted(path.parent.name for path in RECORDED.glob("*/sweep.json"))
WITH_WINNERS = ("all_runs", "best_configurations", "efficiency", "pareto", "training_cost")
"""Figures whose tables name a throughput of the fastest layout of every model and size."""


SOURCES = ["some recorded", pytest.param("recorded", marks=pytest.mark.exhaustive(seconds=15)), "study"]


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "some recorded":
        return compared.copy_drawn_sweeps(tmp_path_factory.mktemp("drawn"))
    path = RECORDED if request.param == "recorded" else STUDY
    if not path.exists():
        pytest.skip(f"the study's raw table is not at {path}")
    return path


@pytest.fixture(scope="module")
def cohorts(source: Path) -> list[Cohort]:
    return split(load(source).attempts)


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Cohort], Path]:
    """The cohorts of a folder and the tables of its report."""
    out = tmp_path_factory.mktemp("report")
    figures = ("best_configurations", "effects", "training_cost", "pareto")
    build(source, out, Options(figures=figures, formats=("svg",)))
    return split(load(source).attempts), out / "tables"


def close(one: Any, two: Any) -> bool:
    if pd.isna(one) or pd.isna(two):
        return bool(pd.isna(one) and pd.isna(two))
    return math.isclose(float(one), float(two), rel_tol=1e-9)


def of_cohort(table: pd.DataFrame, cohort: Cohort) -> pd.DataFrame:
    """The rows of a table of the report that are the cohort's."""
    for name in ("method", "cluster", "engine", "measurement_version"):
        value = cohort.frame[name].iloc[0]
        table = table[table[name].isna() if pd.isna(value) else table[name] == value]
    return table


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_tables_of_the_report_name_the_winners(written: tuple[list[Cohort], Path]) -> None:
    cohorts, folder = written
    ranked, winning = (pd.read_csv(folder / f"{name}.csv") for name in ("ranked", "best_configurations"))
    costs = pd.read_csv(folder / "training_cost.csv")
    for cohort in cohorts:
        first = of_cohort(ranked, cohort)
        first = first[first["rank"].notna()].sort_values("rank")
        first = ranking.of_usual_batch(first, metrics.GROUP).drop_duplicates(metrics.GROUP).set_index(metrics.GROUP)
        cells = of_cohort(winning, cohort)
        by_id = cells[cells["rank_by"] == "tokens_per_s"].set_index("attempt_id")
        priced = of_cohort(costs, cohort).set_index(metrics.GROUP)
        own = metrics.best_configurations(cohort.frame)
        assert len(first) == len(own) == len(priced)
        for row in own.to_dict("records"):
            key = (row["workload"], row["world_size"])
            assert first.loc[key, "layout"] == priced.loc[key, "layout"] == row["layout"]
            for table in (first, priced):
                assert close(table.loc[key, metrics.RANK_BY], row[metrics.RANK_BY])
            if row["attempt_id"] in by_id.index:  # the study's labels put several shapes into one cell
                cell = by_id.loc[row["attempt_id"]]
                assert close(cell[metrics.RANK_BY], row[metrics.RANK_BY])
                if cell["candidates"] == row["candidates"]:
                    for name in ("slower_by", "tied", "tied_slower_by"):
                        assert close(cell[name], row[name]), (key, name)
        if "study_label" not in cohort.frame:
            assert set(own["attempt_id"]) == set(by_id.index)


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_tables_of_figures_have_the_same_fastest(cohorts: list[Cohort]) -> None:
    for cohort in cohorts:
        own = metrics.best_configurations(cohort.frame).set_index(metrics.GROUP)
        points = cohort.frame.set_index("attempt_id")["experiment_id"]  # which of its attempts is shown is the last one
        for spec in FIGURES:
            if spec.name not in WITH_WINNERS or spec.name == "best_configurations":
                continue
            assert spec.data is not None
            table = spec.data(cohort.frame)
            table = table[table["outcome"] == "ok"] if "outcome" in table else table
            rates = table.groupby("attempt_id")[metrics.RANK_BY].max()
            for row in own.to_dict("records"):
                if spec.name == "all_runs" and row["repeats"] % 2 == 0:  # each run by itself: none is the median
                    shown = rates[[points[one] == points[row["attempt_id"]] for one in rates.index]].max()
                    assert abs(shown / row[metrics.RANK_BY] - 1) <= row["repeat_spread"]
                elif row["attempt_id"] in rates.index:
                    assert close(rates[row["attempt_id"]], row[metrics.RANK_BY]), (spec.name, row["layout"])
                else:  # it has one line a model, at the batch that most sizes share
                    assert spec.name == "efficiency"
        told = cost.training(cohort.frame).set_index(metrics.GROUP)
        assert all(told.loc[key, "tie"] is own.loc[key, "tie"] or told.loc[key, "tie"] == own.loc[key, "tie"]
                   for key in own.index)  # fmt: skip


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_the_page_answers_with_these_winners(cohorts: list[Cohort]) -> None:
    """At the batch of most layouts: the winner, how far the second is behind, and the tie."""
    for cohort in cohorts:
        rows = metrics.ranked(cohort.frame)
        for row in metrics.best_configurations(cohort.frame).to_dict("records"):
            query = answer.Query(row["workload"], row["world_size"])
            found = answer.answer(cohort.frame, query)
            assert found.best is not None
            assert found.best["attempt_id"] == row["attempt_id"]
            assert close(found.best[metrics.RANK_BY], row[metrics.RANK_BY])
            assert len(found.layouts) == row["candidates"]
            if len(found.layouts) > 1:
                assert close(found.layouts[1]["behind"], row["slower_by"])
                assert pd.isna(row["tied"]) if found.untimed else len(found.ties) == row["tied"] + 1
        for found in answer.of_every_cell(cohort.frame):
            cell = rows[(rows["workload"] == found.query.workload) & (rows["world_size"] == found.query.world_size)]
            cell = ranking.of_usual_batch(cell[cell["tokens_per_step"].notna() & cell["rank"].notna()], metrics.GROUP)
            assert found.tokens_per_step in {None, *cell["tokens_per_step"]}
            assert [layout["attempt_id"] for layout in found.layouts[:1]] == cell["attempt_id"].head(1).tolist()


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_a_comparison_has_the_winners_throughput(cohorts: list[Cohort]) -> None:
    for cohort in cohorts:
        points = matching.points(cohort.frame.drop(columns=["workload", "layout", "degrees", "batching"]))
        rates = points.set_index("experiment_id")["rate"]
        rows = with_canonical_models(metrics.ranked(cohort.frame))
        # Runs whose losses contradict the reference are a layout of their own in a ranking, and runs in a comparison.
        rows = rows[~rows["experiment_id"].duplicated(keep=False)]
        for row in rows.to_dict("records"):
            rate = rates[row["experiment_id"]]
            if row["repeats"] == 1:
                assert close(rate, row[metrics.RANK_BY]), row["experiment_id"]
            else:  # a layout pools the seeds that a comparison matches one by one
                assert close(rate, row[metrics.RANK_BY]) or cohort.frame["seed"].nunique() > 1


@pytest.mark.parametrize("name", sampled(SWEEPS, 6, seconds=1))
def test_the_end_of_a_run_says_what_the_report_says(name: str) -> None:
    cells = best_layouts(read_attempts(RECORDED / name).to_pylist())
    keys = [(c.key.model, c.key.routing, c.key.engine, c.key.seq_len, c.key.world_size) for c in cells]
    found = {(*key, c.key.method, c.key.tp, c.key.cp): c for key, c in zip(keys, cells, strict=True)}
    expected = [
        row for cohort in split(load(RECORDED / name).attempts)
        for row in metrics.best_configurations(cohort.frame).to_dict("records")
    ]  # fmt: skip
    assert len(expected) == len(found)
    for row in expected:
        tp, cp = (row["tp"], row["cp"]) if row["method"] == "rehearsed" else (None, None)
        documents = "" if pd.isna(row["documents"]) else f"documents {row['documents']}"
        routing = ", ".join(filter(None, (name_routing(*(row[name] for name in ROUTING)), documents)))
        cell = found[row["model"], routing, row["engine"], row["seq_len"], row["world_size"], row["method"], tp, cp]
        first = cell.layouts[0]
        chosen = ("dp", "tp", "cp", "pp", "zero_stage", "micro_batch_size", "recompute", "pp_schedule")
        assert [getattr(first.experiment, name) for name in chosen] == [row[name] for name in chosen]
        assert close(first.rate, row[metrics.RANK_BY])
        assert close(first.mfu, row[metrics.MFU])
        assert len(cell.layouts) == row["candidates"]
        if len(cell.layouts) > 1:
            assert close(1 - cell.layouts[1].rate / first.rate, row["slower_by"])
            assert close(cell.tied, row["tied"] + 1 if not pd.isna(row["tied"]) else None)


def test_the_terminal_prints_these_numbers() -> None:
    console = Console(record=True, width=160, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    summary = RunSummary(outcomes={"ok": 1}, attempts=1, left=0, too_wide=0, interrupted=False)
    run_end.print_end(SweepDir(RECORDED / "h200x4_llama_node"), summary, "", console)
    text = console.export_text()
    [cohort] = split(load(RECORDED / "h200x4_llama_node").attempts)
    for row in metrics.best_configurations(cohort.frame).to_dict("records"):
        assert f"{row[metrics.RANK_BY]:,.0f}" in text
        lead = f"tie of {row['tied'] + 1}" if metrics.is_tie(row["tie"]) else format_percent(row["slower_by"])
        assert lead in text


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_choices_and_claims_say_the_same_of_zero(cohorts: list[Cohort]) -> None:
    for cohort in cohorts:
        table = choice_costs.table(cohort.frame).set_index(["axis", "value"])
        rows = pairs.once(pairs.comparable(cohort.frame))
        rows = rows[rows["dp"] > 1]
        both = pairs.matched(rows[rows["zero_stage"] == 0], rows[rows["zero_stage"] == 1], ["zero_stage"])
        if ("zero_stage", 1) not in table.index:
            assert both.empty
            continue
        effect = table.loc["zero_stage", 1]
        assert effect["pairs"] == len(both)
        speed = pairs.ratio(both, metrics.RANK_BY)
        if effect["pairs"]:
            assert speed is not None
            assert close(effect["median"], speed.value.median)
            assert close(effect["interval_low"], speed.value.low)
        if cohort.frame["method"].iloc[0] == "measured":
            told = claims.table([cohort]).set_index("name").loc["zero_one_matched"]
            assert f"n = {len(both)}" in told["evidence"] or f"{len(both)} pair" in told["evidence"]
            assert told["holds_in"].endswith(f" of {len(both)}")


@pytest.mark.parametrize("source", SOURCES, indirect=True)
def test_both_rankings_agree_where_labels_and_models_are_one(cohorts: list[Cohort]) -> None:
    for cohort in cohorts:
        own = metrics.best_configurations(cohort.frame).set_index("attempt_id")
        cells = winners.best_by(cohort.frame, "tokens_per_s").set_index("attempt_id")
        drawn = best_configurations.data(cohort.frame)
        drawn = drawn[drawn["rank_by"] == "tokens_per_s"].set_index("attempt_id")
        assert set(cells.index) == set(drawn.index) <= set(own.index)
        for attempt in cells.index:
            assert close(cells.loc[attempt, metrics.RANK_BY], own.loc[attempt, metrics.RANK_BY])
            assert close(drawn.loc[attempt, metrics.RANK_BY], own.loc[attempt, metrics.RANK_BY])


def test_shipped_notebooks_say_the_same() -> None:
    [cohort] = [one for one in recorded_cohorts() if one.slug == "measured-h200"]
    said = "\n".join(texts(read("your_own_sweep")))
    best = metrics.best_configurations(cohort.frame)
    for row in best[best["candidates"] > 1].to_dict("records"):
        line = f"{row['layout']}"
        assert line in said
        for name in (metrics.RANK_BY, "slower_by"):
            assert pd.isna(row[name]) or f"{row[name]:.3f}" in said, (line, name)


@pytest.mark.parametrize("source", ["study"], indirect=True)
def test_the_shipped_notebook_of_the_study_says_the_same(cohorts: list[Cohort]) -> None:
    [cohort] = cohorts
    said = "\n".join(texts(read("study")))
    zero = choice_costs.table(cohort.frame).set_index(["axis", "value"]).loc["zero_stage", 1]
    for name in ("median", "interval_low", "memory_median"):
        assert f"{zero[name]:.3f}" in said
    changed = claims.table([cohort]).set_index("name").loc["winners_by_throughput", "holds_in"]
    assert f"{changed.split()[0]} of {changed.split()[2]} winners change" in said


def test_repeats_are_pooled_alike_in_the_report_a_comparison_and_at_a_runs_end() -> None:
    """Of two runs the throughput is their mean, and the MFU belongs to it; a rehearsal taken over is no second run."""
    twice = [compared.run(compared.POINTS[0].replace(seed=seed), rate, seed, mfu_palm=rate / 200)
             for seed, rate in enumerate((100.0, 104.0))]  # fmt: skip
    again = [compared.run(compared.POINTS[1], 98.0, index + 2, sweep=f"s{index}", mfu_palm=0.4) for index in range(2)]
    again = [row | {"method": "rehearsed"} for row in again]
    for rows, rate, mfu, runs in ((twice, 102.0, 0.51, 2), (again, 98.0, 0.4, 1)):
        frame = frame_of(rows)
        [own] = metrics.ranked(split(frame)[0].frame).to_dict("records")
        [cell] = best_layouts(frame.astype(object).where(frame.notna(), None).to_dict("records"))
        [layout] = cell.layouts
        assert own[metrics.RANK_BY] == layout.rate == pytest.approx(rate)
        assert own[metrics.MFU] == layout.mfu == pytest.approx(mfu)
        assert own["repeats"] == layout.runs == runs
        points = matching.points(frame)
        assert points["runs"].tolist() == [1] * len(points)
        assert points["rate"].median() == pytest.approx(rate)


def test_one_device_leaves_no_choice_between_kinds_of_parallelism() -> None:
    measured = next(part for part in recorded_cohorts() if set(part.frame["method"]) == {"measured"})
    best = metrics.best_configurations(measured.frame)
    several = int((best["world_size"] > 1).sum())
    assert 0 < several < len(best)
    assert f" of {several} fastest layouts on several " in headlines.of_part(measured)[0].concluded
