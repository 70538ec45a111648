"""The explorer in a real browser: opened from disk, filtered, plotted, selected, used by keyboard alone, reloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from selenium.webdriver.common.action_chains import ActionChains

from analysis.rows.load import Results, load
from tests.analysis import synthetic
from tests.analysis.browser import Browser, Keys, until
from tests.analysis.conftest import frame_of
from tests.analysis.explorer_page import (
    HOSTILE,
    POINTS,
    RECORDED,
    STUDY,
    chip,
    many,
    of_recorded,
    opened,
    results_of,
    set_value,
    shown,
    written,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("explorer")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame]:
    return of_recorded(tmp_path_factory.mktemp("recorded"))


def sources(kind: str, folder: Path) -> Results:
    if kind == "study":
        if not STUDY.exists():
            pytest.skip(f"the study's table is not at {STUDY}")
        return load(STUDY)
    if kind == "recorded":
        return load(RECORDED)
    rows = {
        "empty": [],
        "one row": synthetic.attempts(POINTS[:1], outcome="ok"),
        "all failed": synthetic.attempts(POINTS[:12], outcome="crash"),
        "hostile": [
            row | {"model": HOSTILE, "sweep": HOSTILE, "evidence": HOSTILE, "cluster": HOSTILE, "command": HOSTILE}
            for row in synthetic.attempts(POINTS[:6])
        ],
    }[kind]
    return results_of(frame_of(rows), folder / HOSTILE.replace("/", "") if kind == "hostile" else folder)


@pytest.mark.parametrize("kind", ["study", "recorded", "empty", "one row", "all failed", "hostile"])
def test_opens_from_disk_without_a_request_or_an_error(browser: Browser, tmp_path: Path, kind: str) -> None:
    results = sources(kind, tmp_path)
    page = written(results, tmp_path)
    browser.open(page)
    browser.wait("window.Explorer?.timing.plotly")
    if len(results.attempts):
        browser.wait("Explorer.timing.plotted")
        browser.js("Explorer.show('memory'), Explorer.show('pipeline'), Explorer.show('runs')")
        browser.click("#table [data-row]")
        assert browser.js("document.querySelector('#panel').hidden") is False
    else:
        assert "Nothing has been run yet" in browser.text("#cohort-note")
    assert browser.requests() == [page.resolve().as_uri()]
    assert browser.console() == []
    assert browser.js("window.pwned ?? null") is None
    assert browser.js("[...document.querySelectorAll('img, link[href^=http], script[src]')].length") == 0
    if kind == "hostile":
        assert HOSTILE in browser.text("#panel")
        assert HOSTILE in browser.text("#facets") + browser.text("#table")


def test_no_button_sends_the_chart_anywhere(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    opened(browser, recorded[0])
    names = browser.js("[...document.querySelectorAll('.modebar-btn')].map(e => e.dataset.title || e.ariaLabel)")
    assert "Box Select" in names
    assert not [name for name in names if "share" in name.lower() or "cloud" in name.lower()]


def test_four_thousand_rows_open_and_filter_fast(browser: Browser, tmp_path: Path) -> None:
    results = load(STUDY) if STUDY.exists() else results_of(many(4104), tmp_path)
    page = written(results, tmp_path)
    table, plot = [], []
    for _ in range(3):  # the machine may be busy with other things
        opened(browser, page)
        table.append(browser.js("Explorer.timing.table"))
        plot.append(browser.js("Explorer.timing.open"))
    assert min(table) < 1000
    assert min(plot) < 2000
    filtered, drawn = [], []
    for value in ("ok", "oom", "ok", "oom"):
        browser.click(chip("outcome", value))
        filtered.append(browser.js("Explorer.timing.filter"))
        browser.wait("Explorer.timing.plotted")
        drawn.append(browser.js("Explorer.timing.plot"))
    assert max(filtered) < 250 and min(filtered) < 100
    assert min(drawn) < 500


def test_a_hundred_thousand_rows_open(browser: Browser, tmp_path: Path) -> None:
    opened(browser, written(results_of(many(100_000), tmp_path), tmp_path))
    assert shown(browser) == 100_000
    browser.click(chip("model", "llama8b"))
    assert 20_000 < shown(browser) < 60_000
    assert browser.js("document.querySelectorAll('#table [data-row]').length") < 100
    assert [line for line in browser.console() if "WebGL" not in line] == []  # a processor drew in place of a GPU


def test_filters_agree_with_pandas(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    first = frame["cohort"] == frame["cohort"].iloc[0]
    assert first.sum() < len(frame)
    assert shown(browser) == first.sum()
    browser.click(chip("model", "llama3b"))
    browser.click(chip("model", "llama8b"))
    models = frame["model"].isin(["llama3b", "llama8b"])
    assert shown(browser) == (first & models).sum()
    browser.click(chip("zero_stage", 3))
    narrowed = first & models & (frame["zero_stage"] == 3)
    assert shown(browser) == narrowed.sum()
    # Beside each value: the rows that all filters but its own let through.
    counts = {
        e.get_attribute("value"): int(
            str(browser.js("arguments[0].parentNode.querySelector('.count').textContent", e)).replace(",", "")
        )
        for e in browser.all('[data-column="zero_stage"] input')
    }
    expected = frame[first & models]["zero_stage"].value_counts()
    assert {int(k): v for k, v in counts.items() if k and v} == {int(str(k)): v for k, v in expected.items()}
    set_value(browser, '[data-column="peak_allocated_bytes"] input', "60")
    assert shown(browser) == (narrowed & (frame["peak_allocated_bytes"] >= 60 * 2**30)).sum()
    set_value(browser, '[data-column="peak_allocated_bytes"] input', "")
    assert shown(browser) == narrowed.sum()
    set_value(browser, "#more", "layout")
    set_value(browser, '[data-column="layout"] input', "rc full")
    assert shown(browser) == (narrowed & frame["layout"].str.contains("rc full")).sum()
    browser.click("#reset")
    assert shown(browser) == first.sum()


def test_cohorts_are_apart_and_told_apart(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    titles = list(frame["cohort"].unique())
    assert browser.text("#cohort-note").startswith(f"{titles[0]}. ")
    assert {t["symbol"] for t in traces(browser)} == {"circle"}
    browser.click(chip("cohort", titles[0]))  # none chosen: all of them
    browser.wait("Explorer.timing.plotted")
    symbol_of: dict[str, set[str]] = {}
    for trace in traces(browser):
        for row in trace["rows"]:
            symbol_of.setdefault(frame["cohort"].iloc[row], set()).add(trace["symbol"])
    assert set(symbol_of) == set(titles)
    assert all(len(symbols) == 1 for symbols in symbol_of.values())
    assert len({next(iter(symbols)) for symbols in symbol_of.values()}) == len(titles)
    assert all(title in browser.text("#legend") and title in browser.text("#cohort-note") for title in titles)
    assert "not comparable" in browser.text("#cohort-note")


def traces(browser: Browser) -> list[dict[str, Any]]:
    """Symbol, rows and selected rows of each drawn trace that has rows."""
    found: list[dict[str, Any]] = browser.js(
        "document.querySelector('#plot').data.filter(t => t.customdata).map(t => ({symbol: t.marker.symbol,"
        " rows: [...t.customdata], selected: t.selectedpoints ? t.selectedpoints.map(i => t.customdata[i]) : null}))"
    )
    return found


def pixel(browser: Browser, row: int) -> tuple[int, int]:
    """Where a row's point is in the viewport."""
    x, y = browser.js(
        "((row) => { const p = document.querySelector('#plot'), l = p._fullLayout, box = p.getBoundingClientRect();"
        " const t = p.data.find(t => t.customdata && t.customdata.includes(row)), i = t.customdata.indexOf(row);"
        " return [box.left + l.xaxis._offset + l.xaxis.d2p(t.x[i]), box.top + l.yaxis._offset + l.yaxis.d2p(t.y[i])];"
        " })(arguments[0])",
        row,
    )
    return round(x), round(y)


def mouse(browser: Browser, *path: tuple[int, int]) -> None:
    """Press at the first place, go along the others, release at the last."""
    actions = ActionChains(browser.driver, duration=50)
    actions.w3c_actions.pointer_action.move_to_location(*path[0])
    actions.w3c_actions.pointer_action.pointer_down()
    for place in path[1:]:
        actions.w3c_actions.pointer_action.move_to_location(*place)
    actions.w3c_actions.pointer_action.pointer_up()
    actions.perform()


def test_a_box_in_the_plot_selects_rows_of_the_table(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    box = browser.js(
        "(b => [b.left, b.top, b.right, b.bottom])(document.querySelector('#plot .nsewdrag').getBoundingClientRect())"
    )
    left, top, right, bottom = (round(side) for side in box)
    middle = (left + right) // 2
    mouse(browser, (left + 2, top + 2), (middle - 40, bottom - 40), (middle, bottom - 2))
    until(lambda: browser.js("Explorer.state.selected.size") > 0, "something is selected")
    limit = browser.js(
        "(l => l.xaxis.p2d(arguments[0] - document.querySelector('#plot').getBoundingClientRect().left"
        " - l.xaxis._offset))(document.querySelector('#plot')._fullLayout)",
        middle,
    )
    first = frame["cohort"] == frame["cohort"].iloc[0]
    inside = first & frame["tokens_per_s_per_gpu"].notna() & (frame["peak_allocated_bytes"] <= limit * 2**30)
    assert set(browser.js("[...Explorer.state.selected]")) == set(frame.index[inside])
    assert set(browser.js("Explorer.order()")) == set(frame.index[inside])  # the table has these only
    assert browser.text("#count").endswith(f", {inside.sum()} selected")
    browser.wait("Explorer.timing.plotted")
    assert {row for trace in traces(browser) for row in trace["selected"]} == set(frame.index[inside])
    browser.click("#only-selected")
    assert shown(browser) == first.sum()
    browser.click("#clear")
    assert browser.js("Explorer.state.selected.size") == 0
    browser.wait("Explorer.timing.plotted")
    assert all(trace["selected"] is None for trace in traces(browser))


def test_a_click_on_a_point_opens_its_row(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    alone = int(frame[frame["cohort"] == frame["cohort"].iloc[0]]["peak_allocated_bytes"].idxmax())
    place = pixel(browser, alone)
    mouse(browser, (place[0] - 30, place[1] - 30))
    mouse(browser, place)
    browser.wait("Explorer.state.open")
    assert browser.js("Explorer.state.current") == alone
    assert browser.js("document.querySelector('#table .row.current').dataset.row") == str(alone)


def test_a_click_on_a_row_marks_its_point(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    browser.click("#table [data-row]:nth-child(3)")
    browser.wait("Explorer.timing.plotted")
    row = browser.js("Explorer.state.current")
    ring = browser.js("(t => [t.x[0], t.y[0], t.marker.symbol])(document.querySelector('#plot').data.at(-1))")
    assert ring[0] == pytest.approx(frame["peak_allocated_bytes"].iloc[row] / 2**30)
    assert ring[1] == pytest.approx(frame["tokens_per_s_per_gpu"].iloc[row])
    assert ring[2] == "circle-open"


def test_keyboard_alone(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    opened(browser, recorded[0])
    seen = []
    browser.js("document.body.focus()")
    for _ in range(400):
        browser.press(Keys.TAB)
        seen.append(browser.focused())
        if browser.js("document.activeElement.classList.contains('grid')"):
            break
    assert seen[0] == "tab-runs"
    assert seen.index("tab-runs") < seen.index("theme") < seen.index("reset")
    assert any(name.startswith("INPUT") for name in seen)
    assert any(name.startswith("SELECT") for name in seen)
    outline = browser.js(
        "getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth"
    )
    assert outline == "solid3px"
    browser.press(Keys.TAB)
    assert browser.focused() == "model"  # its headings come next, each a button that sorts
    browser.js("document.querySelector('#table .grid').focus()")
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP)
    order = browser.js("Explorer.order()")
    assert browser.js("Explorer.state.current") == order[1]
    assert browser.js("document.activeElement.getAttribute('aria-activedescendant')") == f"row-{order[1]}"
    browser.press(Keys.END)
    assert browser.js("Explorer.state.current") == order[-1]
    in_sight = (
        "((a, b) => a.top >= b.top && a.bottom <= b.bottom)(...['.current', '.grid']"
        ".map(s => document.querySelector(`#table ${s}`).getBoundingClientRect()))"
    )
    assert browser.js(in_sight)
    browser.press(Keys.HOME, Keys.PAGE_DOWN, Keys.SPACE)
    current = browser.js("Explorer.state.current")
    assert browser.js("[...Explorer.state.selected]") == [current]
    browser.press(Keys.ENTER)
    assert browser.focused() == "panel"
    browser.press(Keys.TAB)
    assert browser.js("document.activeElement.ariaLabel") == "Close"
    browser.press(Keys.ESCAPE)
    assert browser.js("document.querySelector('#panel').hidden")
    assert browser.js("document.activeElement.classList.contains('grid')")
    assert browser.js("Explorer.state.current") == current
    browser.js("document.querySelector('#tab-runs').focus()")
    browser.press(Keys.ARROW_RIGHT)
    assert browser.focused() == "tab-memory"
    assert browser.js("document.querySelector('#view-runs').hidden")


def test_the_table_sorts_with_unknown_values_last(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    rows = frame[frame["cohort"] == frame["cohort"].iloc[0]]
    for name, ascending in (("step_time_s", False), ("step_time_s", True)):
        browser.click(f'[data-sort="{name}"]')
        order = browser.js("Explorer.order()")
        expected = rows.sort_values(name, ascending=ascending, na_position="last", kind="stable").index
        assert [rows[name][row] for row in order if pd.notna(rows[name][row])] == list(rows[name][expected].dropna())
        assert rows[name][order[-1:]].isna().all()
        assert browser.js("arguments[0]", browser.find(f'[data-sort="{name}"]')).find_element(
            "xpath", ".."
        ).get_attribute("aria-sort") == ("ascending" if ascending else "descending")


def test_the_address_keeps_the_view(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    browser.click(chip("model", "llama8b"))
    set_value(browser, "select[data-axis=x]", "predicted_peak_bytes")
    set_value(browser, "select[data-axis=colour]", "tp")
    browser.click("input[data-axis=logX]")
    set_value(browser, '[data-column="peak_allocated_bytes"] input', "40")
    browser.click('[data-sort="step_time_s"]')
    for place in (2, 3, 5):
        browser.click(f"#table [data-row]:nth-child({place}) .tick")
    browser.click("#table [data-row]:nth-child(4)")
    keep = (
        "(s => JSON.stringify([Explorer.order(), [...s.selected].sort(), s.current, s.x, s.y, s.colour, s.logX, s.logY,"
        " s.sort, s.open]))(Explorer.state)"
    )
    before, address = browser.js(keep), browser.js("location.hash")
    assert json.loads(before)[1] and len(json.loads(before)[0]) < len(frame)
    opened(browser, page, address)
    assert browser.js(keep) == before
    assert browser.js("document.querySelector('select[data-axis=x]').value") == "predicted_peak_bytes"
    assert browser.js('document.querySelector(\'[data-column="model"] input[value="llama8b"]\').checked')
    opened(browser, page, "#f=1&f.nonsense=is:1&sel=00000000:1-5&row=gone&x=nothing")
    notice = browser.text("#notice")
    assert "nonsense" in notice and "other rows" in notice and "gone" in notice and "nothing" in notice
    assert browser.js("Explorer.state.selected.size") == 0
    assert browser.console() == []


def test_any_column_against_any_other(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    for x, y, colour, size in (
        ("layout", "started_at", "step_time_s", "power_w"),
        ("tp", "model", "pp", ""),
        ("mfu_palm", "world_size", "attempt_id", "tp"),
    ):
        for axis, value in (("x", x), ("y", y), ("colour", colour), ("size", size)):
            set_value(browser, f"select[data-axis={axis}]", value)
        browser.wait("Explorer.timing.plotted")
        titles = browser.js("(l => [l.xaxis.title.text, l.yaxis.title.text])(document.querySelector('#plot').layout)")
        assert not [title for title in titles if title in ("layout (log)", "model (log)")]
        first = frame[frame["cohort"] == frame["cohort"].iloc[0]]
        assert sum(len(trace["rows"]) for trace in traces(browser)) == first[[x, y]].notna().all(axis=1).sum()
    assert browser.console() == []
    place = traces(browser)[0]["rows"][0]
    drawn = browser.js("document.querySelector('#plot').data[0].x[0]")
    assert drawn == pytest.approx(100 * frame["mfu_palm"][place], rel=1e-5)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(375, 812), (1400, 900)], ids=["phone", "desktop"])
def test_fits_the_screen(
    browser: Browser, recorded: tuple[Path, pd.DataFrame], tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    opened(browser, recorded[0], "#f=1", size=size, dark=dark)
    browser.screenshot(tmp_path / "runs.png")
    assert browser.js("document.documentElement.scrollWidth") <= size[0]
    assert browser.js("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    overlapping = (
        "(() => { const boxes = [...document.querySelectorAll("
        "'.top h1, .top button, .controls label, #count, summary, #cohort-note, #plot-note')]"
        ".map(e => [e.textContent, e.getBoundingClientRect()]).filter(([, b]) => b.width && b.height);"
        " return boxes.flatMap(([s, a], i) => boxes.slice(i + 1).filter("
        "([, b]) => a.left < b.right - 1 && b.left < a.right - 1"
        " && a.top < b.bottom - 1 && b.top < a.bottom - 1).map(([t]) => [s, t])); })()"
    )
    assert browser.js(overlapping) == []
    browser.click("#table [data-row]")
    browser.wait("Explorer.timing.plotted")
    browser.screenshot(tmp_path / "panel.png")
    assert browser.js("document.documentElement.scrollWidth") <= size[0]
    assert browser.js("document.querySelector('#panel').scrollWidth <= document.querySelector('#panel').clientWidth")
    if size[0] > 1200:  # the panel stands beside the plot, not on it
        until(
            lambda: browser.js(
                "((a, b) => a.right <= b.left)(...['#plot .main-svg', '#panel']"
                ".map(s => document.querySelector(s).getBoundingClientRect()))"
            ),
            "the plot makes room",
        )
    browser.click("#theme")
    assert browser.js("document.documentElement.dataset.theme") == ("light" if dark else "dark")
    browser.js("localStorage.clear()")
