"""The plot of the explorer: where points and failures stand, what is chosen on it, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from selenium.webdriver.common.action_chains import ActionChains

from analysis.rows.load import load
from tests.analysis import synthetic
from tests.analysis.browser import Browser, until
from tests.analysis.conftest import frame_of
from tests.analysis.explorer_page import (
    POINTS,
    STUDY,
    chip,
    opened,
    results_of,
    set_value,
    shown,
    written,
)

pytestmark = [pytest.mark.xdist_group("the page of recorded rows"), pytest.mark.drawn(one_in=2)]

GIB = 2**30


@pytest.fixture(scope="module")
def recorded(recorded_page: tuple[Path, pd.DataFrame]) -> tuple[Path, pd.DataFrame]:
    return recorded_page


def groups(browser: Browser) -> list[dict[str, Any]]:
    """Colour, shape, name and rows of each drawn group."""
    browser.wait("Explorer.timing.plotted")
    found: list[dict[str, Any]] = browser.js(
        "Explorer.plot.groups.map(({rows, colour, shape, name, size}) => ({rows, colour, shape, name, size}))"
    )
    return found


def drawn(browser: Browser) -> dict[int, tuple[float, float]]:
    """Pixels in the viewport of every row that has a point or a mark."""
    browser.wait("Explorer.timing.plotted")
    left, top = browser.js(
        "(b => [b.left, b.top])(document.querySelector('#runs-plot canvas').getBoundingClientRect())"
    )
    return {row: (left + x, top + y) for x, y, row in browser.js("Explorer.plot.spots")}


def mouse(browser: Browser, *path: tuple[float, float]) -> None:
    """Press at the first place, go along the others, release at the last."""
    actions = ActionChains(browser.driver, duration=60)
    places = [(round(x), round(y)) for x, y in path]
    actions.w3c_actions.pointer_action.move_to_location(*places[0])
    actions.w3c_actions.pointer_action.pointer_down()
    for place in places[1:]:
        actions.w3c_actions.pointer_action.move_to_location(*place)
    actions.w3c_actions.pointer_action.pointer_up()
    actions.perform()


def box(browser: Browser) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of the canvas."""
    sides = (
        "(b => [b.left, b.top, b.right, b.bottom])(document.querySelector('#runs-plot canvas').getBoundingClientRect())"
    )
    return tuple(browser.js(sides))


def test_points_stand_where_their_values_are(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    first = frame[frame["cohort"] == frame["cohort"].iloc[0]]
    known = first[first[["peak_allocated_bytes", "tokens_per_s_per_gpu"]].notna().all(axis=1)]
    assert {row for group in groups(browser) for row in group["rows"]} == set(known.index)
    # The library's own conversion and the one that points are looked for by are the same.
    for row in known.index[:: len(known) // 7]:
        values = [known["peak_allocated_bytes"][row] / GIB, known["tokens_per_s_per_gpu"][row]]
        theirs = browser.js("Explorer.plot.chart.convertToPixel({gridIndex: 0}, arguments[0])", values)
        ours = browser.js("Explorer.plot.spots.find(([, , row]) => row === arguments[0])", int(row))
        assert ours[:2] == pytest.approx(theirs, abs=0.6)
    colours = {group["name"]: group["colour"] for group in groups(browser)}
    for group in groups(browser):
        assert {str(frame["tp"][row]) for row in group["rows"]} == {group["name"]}
    assert len(set(colours.values())) == len(colours)
    browser.click(chip("tp", 2))  # a value keeps its colour
    assert groups(browser)[0]["colour"] == colours["2"]


def test_parts_are_apart_and_told_apart(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    titles = list(frame["cohort"].unique())
    assert browser.text("#runs-note").startswith(f"{titles[0]}. ")
    assert {group["shape"] for group in groups(browser)} == {"circle"}
    browser.click(chip("cohort", titles[0]))  # none chosen: all of them
    shape_of: dict[str, set[str]] = {}
    for group in groups(browser):
        for row in group["rows"]:
            shape_of.setdefault(frame["cohort"].iloc[row], set()).add(group["shape"])
    assert set(shape_of) == set(titles)
    assert all(len(shapes) == 1 for shapes in shape_of.values())
    assert len({next(iter(shapes)) for shapes in shape_of.values()}) == len(titles)
    assert all(title in browser.text("#runs-legend") and title in browser.text("#runs-note") for title in titles)
    assert "not comparable" in browser.text("#runs-note")


def test_failures_stand_beyond_the_devices_memory(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    first = frame[frame["cohort"] == frame["cohort"].iloc[0]]
    failed = first[~first["outcome"].isin(["ok", "cancelled"]) & first["tokens_per_s_per_gpu"].isna()]
    assert len(failed) > 5
    marks = {row: (x, y) for x, y, row in browser.js("Explorer.plot.marks")}
    assert set(marks) == set(failed.index)
    right = browser.js("Explorer.plot.area.right")
    assert all(x > right for x, _ in marks.values())
    assert f"{(failed['outcome'] == 'oom').sum()} out of memory" in browser.text("#runs-plot .plot-words")
    assert "× out of memory".replace(" ", "") in browser.text("#runs-legend").replace(" ", "")
    memory = frame["device_memory_bytes"].dropna().iloc[0] / GIB
    assert browser.js("Explorer.plot.limits") == [pytest.approx(memory, rel=1e-3)]
    assert browser.js("Explorer.plot.toPixels(Explorer.plot.limits[0], 1e4)[0]") <= right
    row, place = next(iter(drawn(browser).items() & {(r, p) for r, p in drawn(browser).items() if r in marks}))
    mouse(browser, place)
    browser.wait("Explorer.state.open")
    assert browser.js("Explorer.state.current") == row
    browser.click("#runs-drawer .close")
    # Against an axis that failures have a value on, they stand under it.
    set_value(browser, "select[data-axis=x]", "tp")
    browser.wait("Explorer.timing.plotted")
    bottom = browser.js("Explorer.plot.area.bottom")
    marks = {row: (x, y) for x, y, row in browser.js("Explorer.plot.marks")}
    assert set(marks) == set(failed.index)
    levels = sorted(frame["tp"].dropna().unique())
    for row, (x, y) in marks.items():
        assert y > bottom
        distances = [
            abs(browser.js("Explorer.plot.toPixels(arguments[0], 1e4)[0]", place) - x) for place in range(len(levels))
        ]
        assert levels[distances.index(min(distances))] == frame["tp"][row]


def test_failures_alone_are_drawn_too(browser: Browser, tmp_path: Path) -> None:
    rows = synthetic.attempts(POINTS[:30], outcome="oom")
    opened(browser, written(results_of(frame_of(rows), tmp_path), tmp_path))
    browser.wait("Explorer.timing.plotted")
    assert len(drawn(browser)) == len(rows) == shown(browser)
    assert browser.console() == []


@pytest.mark.skipif(not STUDY.exists(), reason="the study's table is not here")
def test_the_front_is_the_best_for_its_memory(browser: Browser, tmp_path: Path) -> None:
    results = load(STUDY)
    opened(browser, written(results, tmp_path))
    assert browser.js("Explorer.plot.front") == []  # tokens a second of different models are not compared
    browser.js("Explorer.focus({workload: '8.86B', world_size: 64})")
    browser.wait("Explorer.timing.plotted")
    rows = browser.js("Explorer.order()")
    ids = browser.js("Explorer.order().map(row => Explorer.columns.get('attempt_id').value(row))")
    frame = results.attempts.set_index("attempt_id").loc[ids].assign(row=rows)
    frame = frame[frame["tokens_per_s_per_gpu"].notna()].sort_values("peak_reserved_bytes")
    best = frame["tokens_per_s_per_gpu"].cummax().shift(fill_value=0)
    assert browser.js("Explorer.plot.front") == list(frame["row"][frame["tokens_per_s_per_gpu"] > best])
    assert "best for its memory" in browser.text("#runs-legend")


def test_a_box_in_the_plot_selects_rows_of_the_table(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    left, top, right, bottom = box(browser)
    middle = (left + right) // 2
    spots = drawn(browser)
    inside = {row for row, (x, y) in spots.items() if left + 70 <= x <= middle and top + 40 <= y <= bottom - 60}
    mouse(browser, (left + 70, top + 40), (middle - 40, bottom - 90), (middle, bottom - 60))
    until(lambda: browser.js("Explorer.state.selected.size") > 0, "something is selected")
    assert 5 < len(inside) < len(spots)
    assert set(browser.js("[...Explorer.state.selected]")) == inside
    assert set(browser.js("Explorer.order()")) == inside  # the table has these only
    assert browser.text("#runs-count").endswith(f", {len(inside):,} selected")
    browser.click("#runs-only")
    assert shown(browser) == (frame["cohort"] == frame["cohort"].iloc[0]).sum()
    browser.click("#runs-unselect")
    assert browser.js("Explorer.state.selected.size") == 0


def test_a_lasso_selects_what_it_goes_around(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    opened(browser, recorded[0])
    browser.click("[data-mode=polygon]")
    left, top, _, bottom = box(browser)
    spots = drawn(browser)
    corners = [(left + 70, top + 35), (left + 500, top + 35), (left + 70, bottom - 60)]
    path = [corners[0], *((x, top + 35) for x in range(int(left) + 90, int(left) + 500, 40)), corners[1], corners[2]]
    mouse(browser, *path, (left + 70, top + 38))
    until(lambda: browser.js("Explorer.state.selected.size") > 0, "something is selected")
    slope = (corners[2][1] - corners[1][1]) / (corners[2][0] - corners[1][0])

    def depth(place: tuple[float, float]) -> float:
        """Pixels by which a place is above the long side."""
        return corners[1][1] + slope * (place[0] - corners[1][0]) - place[1]

    chosen = set(browser.js("[...Explorer.state.selected]"))
    within = {row for row, (x, y) in spots.items() if x > left + 75 and y > top + 40}
    assert {row for row in within if depth(spots[row]) > 12} <= chosen
    assert not {row for row in chosen if depth(spots[row]) < -12}
    browser.wait("Explorer.timing.plotted")
    browser.click("[data-mode=polygon]")
    assert browser.js("Explorer.plot.mode") == ""


def test_zooming_keeps_what_is_under_the_pointer(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    opened(browser, recorded[0])
    browser.click("[data-mode=zoom]")
    left, top, *_ = box(browser)
    before = drawn(browser)
    mouse(browser, (left + 100, top + 60), (left + 300, top + 200), (left + 400, top + 250))
    browser.wait("Explorer.plot.isZoomed")
    after = drawn(browser)
    inside = {row for row, (x, y) in before.items() if left + 102 < x < left + 398 and top + 62 < y < top + 248}
    assert inside and inside <= set(after)
    assert len(after) < len(before)
    row = next(iter(inside))
    at = browser.js(
        "((row) => Explorer.plot.chart.convertToPixel({gridIndex: 0}, [Explorer.plot.xs(row), Explorer.plot.ys(row)]))"
        "(arguments[0])",
        row,
    )
    canvas_left, canvas_top, *_ = box(browser)
    assert after[row] == pytest.approx((canvas_left + at[0], canvas_top + at[1]), abs=1)
    assert browser.js("Explorer.state.selected.size") == 0
    whole = "[...document.querySelectorAll('#runs-tools button')].find(b => b.textContent === 'Whole plot')"
    browser.js(f"void ({whole}).click()")
    assert not browser.js("Explorer.plot.isZoomed")
    assert drawn(browser) == pytest.approx(before)


def test_a_click_on_a_point_opens_its_row(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    alone = int(frame[frame["cohort"] == frame["cohort"].iloc[0]]["peak_allocated_bytes"].idxmax())
    place = drawn(browser)[alone]
    ActionChains(browser.driver, duration=50).w3c_actions.pointer_action.move_to_location(*map(round, place))
    mouse(browser, place)
    browser.wait("Explorer.state.open")
    assert browser.js("Explorer.state.current") == alone
    assert browser.js("document.querySelector('#runs-table .row.current').dataset.row") == str(alone)
    assert frame["layout"][alone] in browser.text("#runs-plot .tip")


def test_a_click_on_a_row_marks_its_point(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    browser.click("#runs-table [data-row]:nth-child(3)")
    browser.wait("Explorer.timing.plotted")
    row = browser.js("Explorer.state.current")
    [[x, y]] = browser.js("Explorer.plot.chart.getOption().series.find(({id}) => id === 'ring').data")
    assert x == pytest.approx(frame["peak_allocated_bytes"].iloc[row] / GIB)
    assert y == pytest.approx(frame["tokens_per_s_per_gpu"].iloc[row])


def test_any_column_against_any_other(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    first = frame[frame["cohort"] == frame["cohort"].iloc[0]]
    for x, y, colour, size in (
        ("layout", "started_at", "step_time_s", "power_w"),
        ("tp", "model", "pp", ""),
        ("mfu_palm", "world_size", "attempt_id", "tp"),
        ("started_at", "mfu_palm", "peak_allocated_bytes", ""),
    ):
        for axis, value in (("x", x), ("y", y), ("colour", colour), ("size", size)):
            set_value(browser, f"select[data-axis={axis}]", value)
        browser.wait("Explorer.timing.plotted")
        words = browser.text("#runs-plot .plot-words")
        assert browser.js("Explorer.columns.get(arguments[0]).title", x) in words
        assert not [text for text in ("layout (log)", "model (log)") if text in words]
        made = groups(browser)
        assert sum(len(group["rows"]) for group in made) == first[[x, y]].notna().all(axis=1).sum()
        assert (len({group["size"] for group in made}) > 1) == bool(size)
    assert browser.console() == []
