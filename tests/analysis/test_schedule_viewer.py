"""The pipeline view of the explorer: its simulation against the planner's, and what a user sees of it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains

from tests.analysis.browser import Browser, Keys
from tests.analysis.explorer_page import without_rows
from tests.analysis.javascript import evaluate
from workloads.costs.shape import schedule
from workloads.costs.time.pipeline import Simulation, simulate

pytestmark = pytest.mark.drawn(one_in=2)

SCHEDULES = sorted(schedule._SCHEDULES)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return without_rows(tmp_path_factory.mktemp("explorer"))


@pytest.fixture
def tab(browser: Browser, page: Path) -> Browser:
    browser.open(page)
    browser.wait("window.Explorer")
    browser.click("#runs-open-pipeline")
    browser.wait("document.querySelector('#runs-p-chart [data-rank]')")
    return browser


Lengths = dict[str, list[list[float]]]
"""Times by kind of action, rank and chunk."""


def lists(name: str, p: int, m: int, v: int = 1) -> list[list[schedule.Action]]:
    return [schedule.schedule_actions(name, rank, p, m, v) for rank in range(p)]


def run(name: str, p: int, m: int, v: int, lengths: Lengths, p2p: float) -> Simulation:
    return simulate(
        *(lists(name, p, m, v), lengths["F"], lengths["B"], p2p),
        name=name,
        input_s=lengths["I"],
        weight_s=lengths["W"],
    )


def equal(p: int, forward: float, backward: float, v: int = 1) -> Lengths:
    """As the tab has them: W half of a backward."""
    times = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    return {kind: [[time / v] * v] * p for kind, time in times.items()}


def spans_of(simulation: Simulation) -> list[list[Any]]:
    return [[s.rank, s.action.kind, s.action.microbatch, s.action.chunk, s.start_s, s.end_s] for s in simulation.spans]


def test_the_page_knows_the_engines_schedules(browser: Browser) -> None:
    assert evaluate(browser, (), "ClosedForms._SCHEDULES.keys().sort()", None) == SCHEDULES


def chunks_of(name: str, draw: random.Random) -> int:
    if name in schedule.V_SHAPED:
        return 2
    return draw.randint(1, 4) if name in schedule.INTERLEAVED else 1


def test_a_hundred_pipelines_are_simulated_alike(browser: Browser) -> None:
    draw = random.Random(29)
    cases = []
    for _ in range(100):
        name, p, m = draw.choice(SCHEDULES), draw.randint(1, 12), draw.randint(1, 24)
        v = chunks_of(name, draw)
        lengths = {
            kind: [[draw.choice([1.0, 0.1, draw.random() + 0.01]) for _ in range(v)] for _ in range(p)]
            for kind in "FBIW"
        }
        cases.append([name, p, m, v, lengths, draw.choice([0.0, 0.0, draw.random()])])
    code = """input.map(([name, p, m, v, lengths, p2p]) => {
      const { held, microbatches_in_flight, schedule_actions, simulate } = ClosedForms;
      const actions = lengths.F.map((_, rank) => schedule_actions(name, rank, p, m, v));
      const { total_s, idle_s, spans } = simulate(actions, lengths.F, lengths.B, p2p, name, lengths.I, lengths.W);
      const flat = spans.map(({ rank, action, start_s, end_s }) => [rank, ...action, start_s, end_s]);
      return {
        total: total_s, idle: idle_s, spans: flat, inFlight: actions.map(microbatches_in_flight),
        waiting: actions.map((own) => Math.max(...held(own).map((one) => py.sum(one.for_weights)))),
      };
    })"""
    for case, said in zip(cases, evaluate(browser, (), code, cases), strict=True):
        expected = run(*case)
        assert said["total"] == expected.total_s, case
        assert said["idle"] == list(expected.idle_s), case
        assert said["spans"] == spans_of(expected), case
        actions = lists(*case[:4])
        assert said["inFlight"] == [schedule.microbatches_in_flight(own) for own in actions]
        waiting = [max(sum(moment.for_weights) for moment in schedule.held(own)) for own in actions]
        assert said["waiting"] == waiting, case
    assert {case[0] for case in cases} == set(SCHEDULES)


def test_a_schedule_that_waits_for_itself_is_told(browser: Browser) -> None:
    code = """(() => {
      const F = { kind: "F", microbatch: 0, chunk: 0 }, B = { kind: "B", microbatch: 0, chunk: 0 };
      const each = [[1], [1]];
      try { return ClosedForms.simulate([[F, B], [B, F]], each, each, 0, "1f1b", each, each); }
      catch (error) { return error.message; }
    })()"""
    assert evaluate(browser, (), code, None).startswith("the schedule waits for itself")


def type_in(browser: Browser, **values: float | str) -> None:
    for name, value in values.items():
        browser.js(
            "((box, value) => { box.value = value; box.dispatchEvent(new Event('input', {bubbles: true})); })"
            "(document.querySelector(`#runs-p-${arguments[0]}`), arguments[1])",
            name,
            str(value),
        )


def point_at(browser: Browser, selector: str, place: int) -> None:
    """Move the mouse there. Scrolling to it may show a scroll bar, which changes the width: then all is drawn anew."""
    for attempt in range(5):
        try:
            ActionChains(browser.driver, duration=0).move_to_element(browser.all(selector)[place]).perform()
        except StaleElementReferenceException:
            if attempt == 4:
                raise
        else:
            return


def drawn(browser: Browser) -> list[list[float]]:
    """[rank, x, width] of every bar."""
    return list(
        browser.js(
            "[...document.querySelectorAll('#runs-p-chart [data-rank]')].map(bar => [Number(bar.dataset.rank), "
            "Number(bar.getAttribute('x')), Number(bar.getAttribute('width'))])"
        )
    )


def ranks_shown(browser: Browser) -> list[list[str]]:
    rows = (
        "[...document.querySelectorAll('#runs-p-table tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )
    return list(browser.js(rows))


def test_bubble_stands_beside_its_closed_form(tab: Browser) -> None:
    type_in(tab, schedule="1f1b", ranks=4, microbatches=6, forward=1, backward=2, p2p=0)
    assert tab.text("#runs-p-bubble") == "50.0 %"
    assert tab.text("#runs-p-fraction").split() == ["3", "/", "6"]
    assert tab.text("#runs-p-closed") == "50.0 %"
    assert tab.text("#runs-p-share") == "33.3 %"
    assert tab.text("#runs-p-total") == "27"  # (m + p - 1) (F + B)
    assert "agree" in tab.text("#runs-p-remark")
    assert [row[3] for row in ranks_shown(tab)] == ["4", "3", "2", "1"]
    type_in(tab, schedule="gpipe")
    assert [row[3] for row in ranks_shown(tab)] == ["6"] * 4
    type_in(tab, p2p=0.5)
    expected = run("gpipe", 4, 6, 1, equal(4, 1.0, 2.0), 0.5)
    assert tab.text("#runs-p-total") == f"{expected.total_s:g}"
    assert tab.text("#runs-p-bubble") == f"{100 * (expected.total_s - 18) / 18:.1f} %"
    assert "agree" not in tab.text("#runs-p-remark")


def test_bars_stand_where_the_simulation_puts_them(tab: Browser) -> None:
    type_in(tab, schedule="1f1b", ranks=3, microbatches=5, forward=1, backward=1.5, p2p=0.3)
    expected = run("1f1b", 3, 5, 1, equal(3, 1.0, 1.5), 0.3)
    bars = drawn(tab)
    assert [bar[0] for bar in bars] == [span.rank for span in expected.spans]
    zero, scale = bars[0][1], bars[0][2]  # the first bar: a forward from 0 to 1
    for (_, x, width), span in zip(bars, expected.spans, strict=True):
        assert x == pytest.approx(zero + scale * span.start_s)
        assert width == pytest.approx(scale * (span.end_s - span.start_s))


def test_chunks_follow_the_schedule(tab: Browser) -> None:
    """The number of chunks goes into the limits of the schedule, and cannot be chosen where there is one."""
    seen = {}
    for name in [option.get_attribute("value") for option in tab.all("#runs-p-schedule option")]:
        type_in(tab, schedule=name)
        box = tab.find("#runs-p-chunks")
        seen[name] = (box.get_attribute("value"), box.is_enabled(), tab.find("#runs-p-weights").is_enabled())
        assert not tab.find("#runs-p-wrong").is_displayed()
        assert (name in schedule.SPLIT_BACKWARD) == tab.find("[data-kind=W]").is_displayed()
    assert seen == {
        "gpipe": ("1", False, False),
        "1f1b": ("1", False, False),
        "interleaved_1f1b": ("2", True, False),
        "interleaved_zero_bubble": ("2", True, True),
        "zero_bubble_v": ("2", False, True),
        "dualpipe_v": ("2", False, True),
    }
    assert sorted(seen) == [name for name in SCHEDULES if name != "none"]
    type_in(tab, schedule="interleaved_1f1b", chunks=1)
    assert tab.text("#runs-p-wrong") == "Model chunks a rank v: a whole number from 2 to 8"
    type_in(tab, chunks=8, ranks=32, microbatches=128)
    assert tab.text("#runs-p-wrong") == "65,536 actions are too many to draw; at most 30,000"


def test_chunks_and_split_backwards_are_told(tab: Browser) -> None:
    type_in(tab, schedule="zero_bubble_v", ranks=4, microbatches=8, forward=1, backward=2, weights=50, p2p=0)
    expected = run("zero_bubble_v", 4, 8, 2, equal(4, 1.0, 2.0, 2), 0.0)
    assert tab.text("#runs-p-total") == f"{expected.total_s:g}"
    assert tab.text("#runs-p-share") == f"{100 * expected.idle_share:.1f} %"
    assert tab.text("#runs-p-formula") == "1F1B: (p − 1) / m"
    assert [row[3] for row in ranks_shown(tab)] == ["4"] * 4
    tab.js("document.querySelector('#runs-p-chart').focus()")
    tab.press(Keys.END)
    assert tab.text("#runs-p-now").startswith(
        "Rank 0: backward, weights' gradient of micro-batch 7 in chunk 0 (stage 0), "
    )
    type_in(tab, schedule="interleaved_1f1b", chunks=2)
    assert tab.text("#runs-p-formula") == "(p − 1) / (v m)"
    assert tab.text("#runs-p-bubble") == tab.text("#runs-p-closed") == "18.8 %"  # 3 / 16
    assert "agree" in tab.text("#runs-p-remark")


def test_arrow_keys_step_through_the_actions(tab: Browser) -> None:
    type_in(tab, schedule="1f1b", ranks=4, microbatches=8, forward=1, backward=2, p2p=0)
    tab.js("document.querySelector('#runs-p-chart').focus()")
    said = []
    for key in (Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.END, Keys.ARROW_UP, Keys.HOME, Keys.ARROW_LEFT):
        tab.press(key)
        said.append(tab.text("#runs-p-now"))
    assert said == [
        "Rank 0: forward of micro-batch 1, from 1 to 2.",
        "Rank 1: forward of micro-batch 0, from 1 to 2, after 1 idle.",
        "Rank 1: backward of micro-batch 7, from 29 to 31, after 1 idle.",
        "Rank 0: backward of micro-batch 6, from 28 to 30, after 1 idle.",
        "Rank 0: forward of micro-batch 0, from 0 to 1.",
        "Rank 0: forward of micro-batch 0, from 0 to 1.",
    ]
    for _ in range(3):
        tab.press(Keys.ARROW_RIGHT)
    # At 3 the fourth forward of stage 0 starts; stage 1 and 2 have started three and two of theirs, stage 3 one.
    assert [row[4] for row in ranks_shown(tab)] == ["4", "3", "2", "1"]


def test_pointing_at_a_bar_tells_its_times(tab: Browser) -> None:
    type_in(tab, schedule="gpipe", ranks=2, microbatches=2, forward=1, backward=2, p2p=0)
    point_at(tab, "#runs-p-chart [data-rank='1']", 2)
    assert tab.text("#runs-p-now") == "Rank 1: backward of micro-batch 0, from 3 to 5."


@pytest.mark.parametrize(("name", "value"), [("ranks", 0), ("ranks", 2.5), ("microbatches", ""), ("forward", -1)])
def test_a_senseless_number_is_one_sentence(tab: Browser, name: str, value: float | str) -> None:
    type_in(tab, **{name: value})
    assert "number from" in tab.text("#runs-p-wrong")
    assert not tab.find("#runs-p-answer").is_displayed()
    type_in(tab, **{name: 2})
    assert tab.find("#runs-p-answer").is_displayed()


@pytest.mark.parametrize("size", [(375, 812), (1400, 900)])
@pytest.mark.parametrize("dark", [False, True])
def test_pipeline_tab_fits_its_window_and_stays_quiet(
    browser: Browser, page: Path, size: tuple[int, int], dark: bool
) -> None:
    browser.open(page, size=size, dark=dark)
    browser.wait("window.Explorer")
    browser.click("#runs-open-pipeline")
    browser.wait("document.querySelector('#runs-p-chart [data-rank]')")
    type_in(browser, ranks=32, microbatches=128)
    assert len(drawn(browser)) == 2 * 32 * 128
    assert browser.js("document.documentElement.scrollWidth") == size[0]
    # Every bar is wide enough for its number: the chart scrolls sideways instead.
    assert len(browser.all("#runs-p-chart .g-number")) == 2 * 32 * 128
    browser.click("#runs-p-fit")
    assert browser.js("document.querySelector('#runs-p-chart').clientWidth") <= size[0]
    inputs = "[...document.querySelectorAll('.pipeline :is(input, select)')]"
    assert browser.js(f"{inputs}.filter(i => !i.labels.length && !i.ariaLabel).length") == 0
    assert browser.console() == []
    assert browser.requests() == [page.resolve().as_uri()]
