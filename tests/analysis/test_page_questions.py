"""Five questions of somebody who opens a report for the first time, with the clicks that the answers take."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from analysis import report
from analysis.rows.load import load
from tests.analysis import synthetic
from tests.analysis.browser import Browser
from tests.analysis.pages import POINTS, QUICK
from tests.analysis.report_page import STUDY, cell, choose, opened

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("the study's page")]


@pytest.fixture(scope="module")
def study(study_page: Path) -> Path:
    return study_page


@pytest.fixture(scope="module")
def runs() -> pd.DataFrame:
    """The study's rows of Llama 8.86B that finished with 1,048,576 tokens per step, fastest first."""
    rows = load(STUDY).attempts
    ok = rows[(rows["model"] == "8.86B") & (rows["outcome"] == "ok") & (rows["tokens_per_step"] == 2**20)]
    return ok.sort_values("tokens_per_s_per_gpu", ascending=False)


def test_which_layout_is_fastest_for_a_model_on_64_gpus(study: Path, runs: pd.DataFrame, browser: Browser) -> None:
    opened(browser, study)
    browser.click(cell("8.86B", 64))  # one click
    best = runs[runs["world_size"] == 64].iloc[0]
    assert f"dp {best['dp']} · pp {best['pp']} · ZeRO {best['zero_stage']}" in browser.text("#winner .layout")
    assert f"{best['tokens_per_s_per_gpu']:,.0f}" in browser.text("#winner .stats")


def test_what_is_the_cheapest_way_to_train_a_trillion_tokens(study: Path, runs: pd.DataFrame, browser: Browser) -> None:
    opened(browser, study)
    browser.click(cell("8.86B", 64))  # one click, and a price typed
    choose(browser, "f-price", "2")
    hours = 1e12 / runs["tokens_per_s_per_gpu"] / 3600
    size = runs.loc[hours.idxmin(), "world_size"]
    lead = browser.text("#cost .lead")
    assert f"cheapest on {size} GPUs" in lead
    money = browser.js("Words.money(arguments[0])", 2 * hours.min())
    assert money in lead
    said = browser.text("#costbody")
    assert "MWh with ≤ are at most, by the power limit of NVIDIA H100 80GB HBM3, 700 W: no power was measured" in said
    assert f"≤ {browser.js('Words.short(arguments[0])', 700e-6 * hours.min())}" in said


def test_what_does_forbidding_tensor_parallelism_cost(study: Path, runs: pd.DataFrame, browser: Browser) -> None:
    opened(browser, study)
    browser.click(cell("8.86B", 512))  # one click
    there = runs[runs["world_size"] == 512]
    without = there[there["tp"] == 1].iloc[0]["tokens_per_s_per_gpu"]
    best = there.iloc[0]
    same = ["pp", "zero_stage", "micro_batch_size", "network_regime", "engine_version"]
    alone = there[(there["tp"] == 1) & (there[same] == best[same]).all(axis=1)]
    assert alone.empty
    told = f"1no run differs in that alonebest run with it × {without / best['tokens_per_s_per_gpu']:.2f}"
    assert f"tpagainst {best['tp']}{told}" in browser.text("#changes")
    choose(browser, "f-net", "slow")  # and a choice: a node beyond
    slow = there[there["network_regime"] == "slow"]
    best = slow.iloc[0]
    [beyond] = slow[(slow["tp"] == 16) & (slow[same] == best[same]).all(axis=1)]["tokens_per_s_per_gpu"]
    assert f"16 × {beyond / best['tokens_per_s_per_gpu']:.2f}n = 1" in browser.text("#changes")


def test_which_runs_failed_and_how(study: Path, browser: Browser) -> None:
    opened(browser, study)
    failed = "[...document.querySelectorAll('#outcomes button')].find((e) => e.title.startsWith('80B on 256'))"
    assert browser.js(f"{failed}.title") == "80B on 256: 30 finished, 82 out of memory, 0 failed otherwise"
    browser.js(f"{failed}.click()")  # one click
    assert "82 of 4,104" in browser.text("#runs-count")


def test_what_to_run_next(tmp_path: Path, browser: Browser) -> None:
    synthetic.make_sweep(tmp_path / "half", synthetic.attempts(POINTS[::2]), waiting=POINTS[1::2])
    opened(browser, report.build(tmp_path / "half", tmp_path / "out", QUICK))  # no click
    assert "To run next:" in browser.text("#answer")
