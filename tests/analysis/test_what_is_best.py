"""What the report says first, and what it does not rank: order of the sentences, rehearsed times, cells left out."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import pytest

from analysis.claims import study as claims
from analysis.drawing import style
from analysis.figures import best_configurations, memory_by_axis, scaling
from analysis.index_page import headlines
from analysis.page import sentences, tables
from analysis.rows import by_degree, choice_costs, metrics
from analysis.rows.cohorts import Cohort, split
from results.tables import reference
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of, recorded_cohorts
from tests.analysis.figure_texts import words
from tests.analysis.test_noise import labelled, point, run
from tests.analysis.test_study import TABLE, study  # noqa: F401
from workloads.spec.experiment import Experiment

pytestmark = pytest.mark.drawn(one_in=2)

RECORDED = Path(__file__).resolve().parents[2] / "results" / "recorded"
ONE_B, THREE_B, EIGHT_B = synthetic.MODELS


def cell(model: Any, dp: int, *rates: float, start: int = 0, **columns: Any) -> list[dict[str, Any]]:
    """Finished runs of one model on ``dp`` devices, one for each rate."""
    sizes = (1, 2, 4, 8, 16, 32)
    return [
        run(point(mbs, model, dp=dp, global_batch_size=256), start + mbs, rate, 1e-3, **columns)
        for mbs, rate in zip(sizes, rates, strict=False)
    ]


# How far behind


def test_how_far_the_next_layout_is_behind_is_a_share_of_the_winner() -> None:
    frame = labelled(*cell(ONE_B, 2, 239.0, 100.0))
    best = metrics.best_configurations(frame)
    assert best["slower_by"].iloc[0] == pytest.approx(1 - 100 / 239)
    header, [cells], _ = tables.best_rows(frame)
    assert dict(zip(header, cells, strict=True))["Slower by"] == "58.2 %"
    assert "is 58.2 % slower" in sentences.what_is_best(frame)[0]


@pytest.mark.slow
def test_several_timed_steps_without_their_spread_are_not_called_one() -> None:
    """A rehearsal's row has the median of its steps alone."""
    unknown: dict[str, Any] = {"method": "rehearsed", "timed_steps": 3}
    unknown |= {"step_time_min_s": None, "step_time_max_s": None}
    rows = [row | unknown for row in (*cell(ONE_B, 2, 100.0, 99.0), *cell(THREE_B, 2, 50.0, 49.5, start=20))]
    [part] = split(frame_of(rows))
    page = " ".join("".join(said[:2]) for said in headlines.of_part(part))
    assert "and the spread of steps within a run is not known" in page
    words_of = [*sentences.what_is_best(part.frame), page, *words(best_configurations.draw(part.frame))]
    assert not any("one timed step" in text for text in words_of)


@pytest.mark.slow
def test_predicted_times_are_judged_by_the_size_of_their_errors() -> None:
    """Errors of 20 % to either side have no bias, and are no good prediction."""
    rows = cell(ONE_B, 2, 100.0, 99.0, 98.0, 97.0)
    for row, ratio in zip(rows, (0.8, 1.2, 0.82, 1.19), strict=True):
        row["predicted_step_time_s"] = ratio * row["step_time_s"]
    told = next(said for said in headlines.trust(split(frame_of(rows))[0]) if "step times" in said.concluded)
    assert told.concluded == "Predicted step times were off by 19.5 % in the median"
    assert "their bias is 0.5 % too long" in told.rest
    assert told.mark == "doubt"
    for row in rows:
        row["predicted_step_time_s"] = 1.01 * row["step_time_s"]
    for method, mark in (("measured", "good"), ("rehearsed", "doubt")):
        [part] = split(frame_of([row | {"method": method} for row in rows]))
        told = next(said for said in headlines.trust(part) if "step times" in said.concluded)
        assert (told.mark, "compared with a rehearsal" in told.rest) == (mark, method == "rehearsed")


@pytest.mark.slow
def test_nothing_of_the_study_is_more_than_all_behind(study: pd.DataFrame) -> None:  # noqa: F811
    header, cells, _ = tables.best_rows(study)
    behind = [
        float(row[header.index("Slower by")].rstrip(" %")) for row in cells if row[header.index("Runner-up")] != "–"
    ]
    assert max(behind) < 100
    assert max(behind) > 58  # said as 139 % before


# The order of the sentences


@pytest.mark.slow
def test_the_largest_model_whose_winner_can_be_trusted_leads() -> None:
    trusted = cell(THREE_B, 4, 100.0, 98.0, 97.0, 96.0, 95.0)
    few = cell(EIGHT_B, 8, 30.0, 29.0, start=100)
    alone = cell(THREE_B, 8, 90.0, 40.0, 39.0, 38.0, 37.0, start=200)
    small = cell(ONE_B, 8, 200.0, 199.0, 198.0, 197.0, 196.0, start=300)
    first, second, third, fourth, why = sentences.what_is_best(labelled(*small, *few, *alone, *trusted))[:5]
    assert first.startswith("llama3b on 4 GPUs:")
    assert second.startswith("llama1b on 8 GPUs:")
    assert third.startswith("llama8b on 8 GPUs:")
    assert fourth.startswith("llama3b on 8 GPUs:")
    assert why.startswith("2 of 4 winners are less certain: ")
    assert "1 because fewer than 5 layouts finished" in why
    assert "1 because the next layout is more than 10 % slower, so no similar layout confirms the winner" in why


@pytest.mark.slow
def test_the_study_is_not_led_by_its_worst_cells(study: pd.DataFrame) -> None:  # noqa: F811
    said = sentences.what_is_best(study)
    assert not re.match(r".* on 512 GPUs", said[0])
    # The largest sizes whose layouts ran in one network regime: for 80B 256 GPUs, for smaller models 32.
    sizes = [int(match.group(1)) for text in said if (match := re.match(r"\S+(?: \([^)]*\))? on (\d+) GPUs:", text))]
    assert sizes == [256, 32, 32, 32]
    assert any("different network regimes" in text for text in said)


# Cells that a claim leaves out


@pytest.mark.slow
def test_a_claim_shows_the_cells_before_and_after_its_filter(study: pd.DataFrame) -> None:  # noqa: F811
    [row] = [
        row
        for row in claims.table([Cohort("study", "the study", "", study)]).to_dict("records")
        if row["name"] == "pipeline_rewrite"
    ]
    assert (row["holds_in"], row["holds_in_kept"]) == ("23 of 24", "13 of 13")
    assert row["left_out"] == "fewer than 5 pipelines on a side"
    assert "better in 23 of 24 (not " in row["evidence"]


@pytest.mark.slow
def test_every_claim_with_a_filter_has_both_counts(study: pd.DataFrame) -> None:  # noqa: F811
    table = claims.table([Cohort("study", "the study", "", study)]).set_index("name")
    assert table["holds_in_kept"].notna().equals(table["left_out"].notna())
    kept = table[table["holds_in_kept"].notna()]
    assert {"pipeline_rewrite", "no_pipeline_wins_in_one_regime", "data_parallel_falls"} <= set(kept.index)
    for before, after in zip(kept["holds_in"], kept["holds_in_kept"], strict=True):
        assert int(before.split(" of ")[1]) >= int(after.split(" of ")[1])


# Rehearsed times


def rehearsed() -> Cohort:
    """Rehearsed rows of three tp, of which the times of the higher ones are far too short."""
    points = [
        Experiment.canonical(model=ONE_B, dp=8 // tp, tp=tp, global_batch_size=64, micro_batch_size=mbs)
        for tp in (1, 2, 4)
        for mbs in (1, 2, 4)
    ]
    rows = [run(e, i, 100.0 * e.tp + e.micro_batch_size, method="rehearsed") for i, e in enumerate(points)]
    [found] = split(frame_of(rows))
    return found


@pytest.mark.slow
def test_rehearsed_times_are_ranked_within_one_tp_only() -> None:
    cohort = rehearsed()
    best = metrics.best_configurations(cohort.frame)
    assert best["workload"].tolist() == ["llama1b, tp 1", "llama1b, tp 2", "llama1b, tp 4"]
    assert best["tp"].tolist() == [1, 2, 4]
    assert best["candidates"].tolist() == [3, 3, 3]
    measured = cohort.frame.drop(columns="workload").assign(method="measured")
    [other] = split(measured)
    assert metrics.best_configurations(other.frame)["tp"].tolist() == [4]


@pytest.mark.slow
def test_figures_across_tp_are_not_made_of_rehearsed_times() -> None:
    frame = rehearsed().frame
    with pytest.raises(style.NothingToDraw, match="rehearsed times are not comparable across tp"):
        scaling.draw_tensor_parallel(frame)
    assert by_degree.tensor_parallel(frame)["lost_share"].isna().all()
    assert not choice_costs.table(frame)["axis"].eq("tp").any()
    shown = words(best_configurations.draw(frame))
    assert {"llama1b, tp 1", "llama1b, tp 2", "llama1b, tp 4"} <= shown
    assert any("cells of one model with different tp are not comparable" in text for text in shown)


@pytest.mark.slow
def test_the_recorded_rehearsals_say_nothing_across_tp() -> None:
    for cohort in recorded_cohorts():
        if cohort.frame["method"].iloc[0] == "rehearsed":
            ranked = metrics.ranked(cohort.frame)
            assert (ranked.groupby(metrics.GROUP)["tp"].nunique() == 1).all()


# tp 4 → 8 by what is held


@pytest.mark.slow
def test_the_claim_on_tp_shows_both_numbers(study: pd.DataFrame) -> None:  # noqa: F811
    [claim] = [claim for claim in claims.CLAIMS if claim.name == "tensor_beyond_node"]
    evidence = claim.check(study).evidence
    assert "all other choices free" in evidence
    assert "With all other choices fixed" in evidence
    assert evidence.count("tp 4 → 8:") == 2


CELL = ("num_layers", "hidden_size", "num_kv_heads", "vocab_size", "nodes", "batch", "regime")
"""Of the raw table: the model, the size, the sequences per step and the network regime."""
HELD = (*CELL, "pp", "mbs", "zero_stage", "after_pp_fix")
"""All choices but tp and what makes room for it: dp and the number of micro-batches."""


def raw_runs() -> list[dict[str, Any]]:
    """Runs of the raw table that finished, without any code of this project."""
    with TABLE.open(newline="") as file:
        runs: list[dict[str, Any]] = [row for row in csv.DictReader(file) if row["status"] == "Success"]
    for row in runs:
        row["batch"] = int(row["dp"]) * int(row["mbs"]) * float(row["batch_accum"])
        many = float(row["nodes"]) >= 8  # on fewer the two network regimes cannot be told apart
        row["regime"] = float(row["AllReduce (GB/s)"]) >= 120 if many else None
    return runs


def doubled(
    runs: list[dict[str, Any]], tp: int, same: Sequence[str], take: Callable[[list[float]], float], times: int = 2
) -> tuple[float, int]:
    """Median ratio of throughput, and its pairs: with ``times * tp`` over with ``tp``, where the columns ``same``
    agree. ``take`` makes one number of the runs on a side."""
    sides: tuple[dict[Any, list[float]], ...] = (defaultdict(list), defaultdict(list))
    for row in runs:
        if int(row["tp"]) in (tp, times * tp):
            sides[int(row["tp"]) != tp][tuple(row[name] for name in same)].append(float(row["tok/s/gpu"]))
    before, after = sides
    ratios = [take(rates) / take(before[key]) for key, rates in after.items() if key in before]
    return median(ratios), len(ratios)


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "ratios"), [(4, (0.66, 0.83)), (8, (0.32, 0.51))], ids=["4 to 8", "8 to 16"])
def test_both_numbers_on_tp_are_those_of_the_raw_table(
    study: pd.DataFrame,  # noqa: F811
    tp: int,
    ratios: tuple[float, ...],
) -> None:
    """With all else held and fastest against fastest, without a pipeline."""
    plain = [row for row in raw_runs() if row["pp"] == "1" and row["batch"] == 256]
    expected = [doubled(plain, tp, *how) for how in ((HELD, median), (CELL, max))]
    assert [round(ratio, 2) for ratio, _ in expected] == [*ratios]
    [claim] = [claim for claim in claims.CLAIMS if claim.name == "tensor_beyond_node"]
    best, held = claim.check(study).evidence.split("With all other choices fixed")
    for text, (ratio, count) in zip((held, best), expected, strict=True):
        found = re.search(rf"tp {tp} → {2 * tp}: (\S+) \([^)]*\), n = (\d+)", text)
        assert found is not None
        assert found.groups() == (f"{ratio:.2f}", str(count))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_costs_of_tp_are_those_of_the_raw_table(study: pd.DataFrame, tp: int) -> None:  # noqa: F811
    row = choice_costs.table(study).set_index(["axis", "value"]).loc["tp", tp]
    ratio, count = doubled(raw_runs(), 1, HELD, median, times=tp)
    assert (round(row["median"], 6), row["pairs"]) == (round(ratio, 6), count)


# Pipelines on one size and network


@pytest.mark.slow
def test_pipelines_of_different_sizes_and_regimes_are_not_one_line() -> None:
    rows = []
    for size, regime, rates in ((8, "fast", (90.0, 80.0, 70.0)), (16, "slow", (50.0, 40.0, 30.0))):
        for pp, rate in zip((2, 4, 8), rates, strict=True):
            e = Experiment.canonical(
                model=ONE_B, dp=size // pp, pp=pp, micro_batch_size=1, global_batch_size=32 * size // pp
            )
            rows.append((run(e, len(rows), rate), regime))
    frame = labelled(*(row for row, _ in rows)).assign(
        network_regime=[regime for _, regime in rows], tokens_per_step=1_000_000
    )
    table = by_degree.pipeline_parallel(frame)
    lost = table.set_index(["world_size", "degree"])["lost_share"]
    assert pd.isna(lost.loc[(8, 2)])
    assert pd.isna(lost.loc[(16, 2)])
    assert lost.loc[(16, 4)] == pytest.approx(0.2)
    figure = scaling.draw_pipeline_parallel(frame)
    [told] = [text for text in words(figure) if text.startswith("All on ")]
    assert told in (
        f"All on {place} network regime; in per cent: against the depth before"
        for place in ("8 GPUs, fast", "16 GPUs, slow")
    )


@pytest.mark.slow
def test_each_pipeline_panel_of_the_study_is_of_one_size_and_network(study: pd.DataFrame) -> None:  # noqa: F811
    shown = words(scaling.draw_pipeline_parallel(study))
    assert {"1.34B", "3.57B", "8.86B"} <= shown
    assert "All on 256 GPUs, slow network regime; in per cent: against the depth before" in shown
    assert scaling.FIGURES[2].conclude(study) == (
        "pp 4 → 8 on 256 GPUs, slow network regime: the fastest run is 12 % faster on each device "
        "(median, n = 2 models, +11 % to +13 %)."
    )


# Whose memory


@pytest.mark.slow
def test_memory_of_the_study_is_its_engines_own_and_has_the_devices_line(
    study: pd.DataFrame,  # noqa: F811
) -> None:
    figure = memory_by_axis.draw(study, "zero")
    shown = words(figure)
    assert "peak, measured by nanotron" in shown
    assert not any("closed form" in text for text in shown)
    assert "memory of the device (NVIDIA H100 80GB HBM3)" in shown
    limit = reference.DEVICE_MEMORY_BYTES / 2**30
    for ax in figure.axes:
        assert any(line.get_ydata()[0] == pytest.approx(limit) for line in ax.lines)
    table = memory_by_axis.data(study, "zero")
    assert set(table["stack_engine"]) == set(table["engine"]) == {"nanotron"}
    of_closed_form = words(memory_by_axis.draw(study, "seq_len"))  # no rows differ in it alone
    assert "pale: closed form of ultrasweep's engine, not nanotron's" in of_closed_form
