"""Lists of a row in its drawer: peaks of steps in *Memory*, times of stages in *Pipeline*."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.explorer import row_data, row_series
from analysis.rows import cohorts
from analysis.rows.load import load
from tests.analysis.browser import Browser
from tests.analysis.explorer_page import RECORDED, opened, without_rows, written
from tests.analysis.javascript import evaluate

SCRIPTS = ("columns.js", "memory_steps.js")
SWEEP = RECORDED / "h200x2_schedules"


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return row_data.table(cohorts.split(load(SWEEP).attempts))


def test_older_rows_are_told_by_their_table_of_steps(frame: pd.DataFrame) -> None:
    steps = pd.read_parquet(SWEEP / "steps.parquet")
    found = row_series.series(SWEEP, frame)
    assert len(found) == len(frame) > 3
    for place, lists in found.items():
        own = steps[steps["attempt_id"] == frame["attempt_id"].iloc[place]]
        peaks = own.groupby("step")["peak_allocated_bytes"].max() / 2**20
        assert lists["allocated"] == [round(peak) for peak in peaks]
        timed = own[~own["is_warmup"]]
        for stage in (0, 1):
            expected = timed.loc[timed["pp_rank"] == stage, "pipeline_idle_s"].median()
            assert lists["idle"][stage] == pytest.approx(expected, rel=1e-4)
        assert np.mean(lists["work"]) == pytest.approx(frame["forward_backward_s"].iloc[place], rel=1e-4)


def test_a_rows_own_columns_come_first_and_the_fastest_are_kept(
    frame: pd.DataFrame, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = frame.assign(
        forward_by_stage_s=[[0.1, 0.2]] * len(frame),
        peak_allocated_by_step_bytes=[[2**30, None]] * len(frame),
    )
    found = row_series.series(SWEEP, own)
    assert found[0]["forward"] == [0.1, 0.2] and found[0]["allocated"] == [1024, None]
    assert "work" not in found[0], "a row with lists of its own is not looked up"
    monkeypatch.setattr(row_series, "MOST_VALUES", 5)
    assert list(row_series.series(SWEEP, own)) == [int(own["tokens_per_s_per_gpu"].argmax())]
    assert row_series.series(SWEEP, frame.head(0)) == {}


def test_the_highest_of_many_steps_is_drawn_and_said(browser: Browser, tmp_path: Path) -> None:
    """More steps than bars: the peak stands late, a step is not known, and no step is left out."""
    browser.open(without_rows(tmp_path))
    steps: list[int | None] = [1024] * 200
    steps[3], steps[187] = None, 5120
    code = """(() => {
      const made = MemorySteps.of({ allocated: input, reserved: [] }, () => null);
      const heights = [...made.querySelectorAll(".m-allocated")].map((bar) => +bar.getAttribute("height"));
      return [heights.length, heights.indexOf(Math.max(...heights)), made.querySelector("p").textContent];
    })()"""
    bars, highest, said = evaluate(browser, SCRIPTS, code, steps)
    assert (bars, highest) == (50, 187 // 4)
    assert "Over 200 steps" in said and "at most 5.0 GiB in step 187" in said and "the highest of 4 steps" in said
    assert evaluate(browser, SCRIPTS, "MemorySteps.of({ allocated: input }, () => null)", [None, None]) is None


SAID = {
    "1f1b": ("", ("chunks", "gradients")),
    "interleaved_1f1b": ("A rank's chunks take equal times.", ("gradients",)),
    "zero_bubble_v": ("the gradients of inputs and those of weights take half of it each", ()),
    "interleaved_zero_bubble": ("the gradients of inputs and those of weights take half of it each", ()),
    "dualpipe_v": ("the gradients of inputs and those of weights take half of it each", ()),
}


@pytest.mark.slow(seconds=2)
def test_a_split_backward_is_said_to_be_halved(browser: Browser, tmp_path: Path, frame: pd.DataFrame) -> None:
    page = written(load(SWEEP), tmp_path)
    for schedule, (said, unsaid) in SAID.items():
        row = frame[frame["pp_schedule"] == schedule].iloc[0]
        opened(browser, page, f"#r.row={row['attempt_id']}&r.view=pipeline")
        browser.wait("document.querySelector('[data-part=stages]')")
        text = browser.text("#runs-p-measured")
        assert said in text, schedule
        assert not any(word in text for word in unsaid), schedule


def test_the_drawer_shows_them(browser: Browser, tmp_path: Path, frame: pd.DataFrame) -> None:
    page = written(load(SWEEP), tmp_path)
    place = int(frame["pp_schedule"].eq("1f1b").to_numpy().nonzero()[0][0])
    lists = row_series.series(SWEEP, frame)[place]
    opened(browser, page, f"#r.row={frame['attempt_id'].iloc[place]}&r.view=memory")
    browser.wait("document.querySelector('[data-part=steps] svg')")
    assert len(browser.all("[data-part=steps] .m-allocated")) == len(lists["allocated"])
    assert f"{max(lists['allocated']) / 1024:.1f} GiB" in browser.text("[data-part=steps] p")
    browser.click("#runs-tab-pipeline")
    browser.wait("document.querySelector('[data-part=stages]')")
    rows = browser.js(
        "[...document.querySelectorAll('[data-part=stages] tbody tr')].map(r => [...r.cells].map(c => +c.textContent))"
    )
    assert [row[0] for row in rows] == [0, 1]
    assert [row[1:3] for row in rows] == [
        [pytest.approx(lists[name][stage], rel=6e-3) for name in ("work", "idle")] for stage in (0, 1)
    ]
    assert "were not recorded apart" in browser.text("#runs-p-measured")
