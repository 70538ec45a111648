"""The heatmaps of the fastest configurations: what a cell shows, and what their title concludes."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from analysis.figures import best_configurations
from analysis.index_page import headlines
from analysis.rows import metrics
from analysis.rows.cohorts import split
from analysis.rows.load import load
from results.text.numbers import format_bytes
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of
from tests.analysis.figure_texts import assert_texts_fit, words
from tests.analysis.report_page import RECORDED
from workloads.spec.experiment import Experiment

pytestmark = pytest.mark.drawn(one_in=2)


@pytest.mark.slow
def test_a_cell_has_room_for_a_long_layout() -> None:
    [cohort] = split(load(RECORDED / "h200x4_half_node").attempts)
    figure = best_configurations.draw(cohort.frame)
    assert any(text.count("\n") == 2 for text in words(figure)), "nothing long is shown"
    assert_texts_fit(figure)


@pytest.mark.slow
def test_best_heatmaps_show_the_winner_of_every_cell(frame: pd.DataFrame) -> None:
    figure = best_configurations.draw(frame)
    shown = words(figure)
    for row in metrics.best_configurations(frame).to_dict("records"):
        assert f"{100 * row['mfu_palm']:.1f} %" in shown
        assert format_bytes(row["peak_allocated_bytes"]) in shown
        assert row["degrees"] in shown
    assert any("none of" in text for text in shown)  # 8B does not fit on one GPU
    assert "MFU (PaLM), % of peak" in shown
    assert "Peak allocated memory, GiB" in shown


@pytest.mark.slow
def test_the_title_of_the_heatmaps_concludes_only_from_measured_cells(frame: pd.DataFrame) -> None:
    said = best_configurations.conclude(frame)
    assert said is not None and "Data parallelism alone is fastest in 8 of 9 cells" in said
    assert said.removesuffix(".") in words(best_configurations.draw(frame))
    assert best_configurations.conclude(frame.assign(method="rehearsed")) is None


@pytest.mark.slow
def test_the_title_names_the_model_up_to_which_data_parallelism_is_fastest() -> None:
    rows = []
    for model, degrees in ((synthetic.MODELS[0], {"dp": 2}), (synthetic.MODELS[2], {"tp": 2})):
        for other in ({"dp": 2}, {"tp": 2}):
            e = Experiment.canonical(model=model, micro_batch_size=1, global_batch_size=8, **other)
            rate = 200.0 if other == degrees else 100.0
            times = {"tokens_per_s_per_gpu": rate, "step_time_s": e.tokens_per_step / rate / 2}
            rows.append(synthetic.attempt(e, len(rows), outcome="ok", **times))
    [cohort] = split(frame_of(rows))
    said = best_configurations.conclude(cohort.frame)
    assert said is not None and said.startswith("Data parallelism alone is fastest up to llama1b (1 of 2 cells)")


@pytest.mark.slow
def test_the_title_counts_a_winner_for_each_axis_that_it_uses_as_the_page_does() -> None:
    best: tuple[dict[str, int], ...] = ({"tp": 4}, {"tp": 2, "cp": 2}, {"dp": 4}, {"tp": 2, "pp": 2})
    rows = []
    for layers, degrees in enumerate(best, start=8):
        shape = synthetic.llama(f"m{layers}", layers, 2048, 32, 8192)
        for other, rate in ((degrees, 200.0), ({"cp": 4}, 100.0)):
            e = Experiment.canonical(model=shape, micro_batch_size=1, global_batch_size=8, **other)
            times = {"tokens_per_s_per_gpu": rate, "step_time_s": e.tokens_per_step / rate / e.world_size}
            rows.append(synthetic.attempt(e, len(rows), outcome="ok", **times))
    [cohort] = split(frame_of(rows))
    several = len(metrics.best_configurations(cohort.frame))
    said = str(best_configurations.conclude(cohort.frame))
    page = headlines.of_part(cohort)[0]
    number = re.search(r"(\d+) use tensor", page.concluded + page.rest)
    assert number is not None
    assert said.startswith(f"{number[1]} of {several} fastest configurations use tensor parallelism")


@pytest.mark.slow
def test_heatmaps_rank_one_batch_and_say_which() -> None:
    small, large = (
        [
            Experiment.canonical(model=synthetic.MODELS[0], dp=2, micro_batch_size=mbs, global_batch_size=batch)
            for mbs in (1, 2)
        ]
        for batch in (8, 16)
    )
    rates = (100.0, 101.0, 500.0)
    rows = [
        synthetic.attempt(e, i, outcome="ok", tokens_per_s_per_gpu=rate, step_time_s=e.tokens_per_step / rate / 2)
        for i, (e, rate) in enumerate(zip((*small, large[0]), rates, strict=True))
    ]
    [cohort] = split(frame_of(rows))
    best = metrics.best_configurations(cohort.frame)
    assert best["tokens_per_s_per_gpu"].tolist() == [101.0]
    assert best["candidates"].tolist() == [2]
    assert metrics.ranked(cohort.frame)["tokens_per_s_per_gpu"].max() == 500.0
    tokens = small[0].tokens_per_step
    assert any(
        f"All cells at {tokens:,} tokens per step" in text for text in words(best_configurations.draw(cohort.frame))
    )
