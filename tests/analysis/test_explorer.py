"""The explorer in a real browser: opened from disk, filtered, plotted, selected, used by keyboard alone, reloaded."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pandas as pd
import pytest

from analysis.rows.load import LoadedResults, load
from tests.analysis import synthetic
from tests.analysis.browser import Browser, Keys
from tests.analysis.conftest import frame_of
from tests.analysis.explorer_page import (
    HOSTILE,
    POINTS,
    STUDY,
    chip,
    many,
    opened,
    results_of,
    set_value,
    shown,
    written,
)

pytestmark = [pytest.mark.xdist_group("the page of recorded rows"), pytest.mark.drawn(one_in=3)]

STUDY_ROWS = 4104


@pytest.fixture(scope="module")
def recorded(recorded_page: tuple[Path, pd.DataFrame]) -> tuple[Path, pd.DataFrame]:
    return recorded_page


@pytest.fixture(scope="module")
def of_the_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the study's rows; of as many rows of a synthetic sweep where its table is not here."""
    folder = tmp_path_factory.mktemp("study")
    return written(load(STUDY) if STUDY.exists() else results_of(many(STUDY_ROWS), folder), folder)


def made_up(kind: str, folder: Path) -> LoadedResults:
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
def test_opens_from_disk_without_a_request_or_an_error(
    request: pytest.FixtureRequest, browser: Browser, tmp_path: Path, kind: str
) -> None:
    if kind == "study":
        page: Path = request.getfixturevalue("of_the_study")
    elif kind == "recorded":
        page, _ = request.getfixturevalue("recorded")
    else:
        page = written(made_up(kind, tmp_path), tmp_path)
    browser.open(page)
    browser.wait("window.Explorer?.timing.table")
    if kind != "empty":
        browser.wait("Explorer.timing.plotted")
        browser.click("#runs-table [data-row]")
        assert browser.js("document.querySelector('#runs-drawer').hidden") is False
    else:
        assert "Nothing has been run yet" in browser.text("#runs-note")
    for view in ("memory", "pipeline"):
        browser.click(f"#runs-open-{view}")
        browser.wait(f"document.querySelector('#runs-view-{view} .widget') !== null")
    assert browser.requests() == [page.resolve().as_uri()]
    assert browser.console() == []
    assert browser.js("window.pwned ?? null") is None
    assert browser.js("[...document.querySelectorAll('img, link[href^=http], script[src]')].length") == 0
    if kind == "hostile":
        assert HOSTILE in browser.text("#runs-drawer")
        assert HOSTILE in browser.text("#runs-facets") + browser.text("#runs-table")


COUNT_WORK = """(filters => {
  window.work = { rows: 0, counts: 0, elements: 0 };
  const { passes, counts } = Object.getPrototypeOf(filters), make = document.createElement;
  filters.passes = function (row) { work.rows++; return passes.call(this, row); };
  filters.counts = function (column) { work.counts++; return counts.call(this, column); };
  document.createElement = function (...words) { work.elements++; return make.apply(this, words); };
})(Explorer.state.filters)"""


@pytest.mark.parametrize("rows", [STUDY_ROWS, 50_000])
def test_a_filter_looks_at_each_row_once_and_draws_only_what_is_in_sight(
    browser: Browser, of_the_study: Path, tmp_path: Path, rows: int
) -> None:
    """What makes filters fast, counted: one look at each row, one pass for each facet, as many elements for 50,000 rows
    as for 4,104. ``python -m tests.speeds`` holds the milliseconds to their budget."""
    few = rows == STUDY_ROWS
    page = of_the_study if few else written(results_of(many(rows), tmp_path), tmp_path)
    assert page.stat().st_size < (1_000_000 if few else 2_500_000)
    opened(browser, page)
    assert shown(browser) == rows
    assert browser.js("document.querySelectorAll('*').length") < 5000
    browser.js(COUNT_WORK)
    for value in ("ok", "oom"):
        browser.click(chip("outcome", value))
        browser.wait("Explorer.timing.plotted")
    work = browser.js("window.work")
    assert work["rows"] == 2 * rows
    assert 0 < work["counts"] <= 2 * len(browser.all("#runs-facets [data-column]"))
    assert 0 < work["elements"] < 5000
    assert browser.js("document.querySelectorAll('#runs-table [data-row]').length") < 100
    assert browser.console() == []


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
    set_value(browser, "#runs-more", "layout")
    set_value(browser, '[data-column="layout"] input', "rc full")
    assert shown(browser) == (narrowed & frame["layout"].str.contains("rc full")).sum()
    browser.click("#runs-reset")
    assert shown(browser) == first.sum()


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


def test_other_parts_of_the_page_choose_the_filters(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    browser.click(chip("zero_stage", 1))
    title, workload = frame.loc[(frame["world_size"] == 4) & (frame["zero_stage"] == 1), ["cohort", "workload"]].iloc[0]
    browser.js("Explorer.focus(arguments[0])", {"cohort": title, "workload": workload, "world_size": 4})
    expected = (
        (frame["cohort"] == title)
        & (frame["workload"] == workload)
        & (frame["world_size"] == 4)
        & (frame["zero_stage"] == 1)
    )
    assert 0 < shown(browser) == expected.sum()
    assert "r.f.workload" in browser.js("location.hash")
    browser.js("Explorer.focus({})")
    assert shown(browser) == (frame["zero_stage"] == 1).sum()
    browser.click("#runs-active .tag")
    assert shown(browser) == len(frame)
    assert browser.js("Explorer.open(arguments[0])", frame["attempt_id"].iloc[3]) is True
    assert browser.js("Explorer.state.current") == 3
    assert browser.js("Explorer.open('nobody')") is False
    browser.js("Explorer.clear()")
    assert shown(browser) == (frame["cohort"] == title).sum()
    assert browser.js("document.querySelector('#runs-drawer').hidden")
    assert browser.js("location.hash") == ""


def test_the_csv_reads_back(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    browser.click(chip("model", "llama3b"))
    order = browser.js("Explorer.order()")
    text = browser.js("Csv.text(Explorer.columns, Explorer.order())")
    read = pd.read_csv(io.StringIO(text), keep_default_na=False, na_values=[""])
    assert list(read.columns) == browser.js("[...Explorer.columns.keys()]")
    assert len(read) == len(order) > 10
    for name in read.columns:
        source = frame[name].iloc[order].reset_index(drop=True)
        known = source.notna().to_numpy()
        assert (read[name].notna().to_numpy() >= (known & (source.astype(str) != "").to_numpy())).all(), name
        if isinstance(source.dtype, pd.DatetimeTZDtype):
            gap = (pd.to_datetime(read[name]) - source).abs().max()
            assert gap < pd.Timedelta(milliseconds=2), name
        elif pd.api.types.is_bool_dtype(source):
            assert (read[name][known] == source[known].map({True: "yes", False: "no"})).all(), name
        elif pd.api.types.is_numeric_dtype(source):
            assert read[name][known].astype(float).to_numpy() == pytest.approx(
                source[known].astype(float).to_numpy(), rel=1e-6
            ), name
        elif isinstance(source.dtype, pd.StringDtype):
            assert (read[name][known].fillna("").astype(str) == source[known]).all(), name


def test_texts_that_csv_must_quote(browser: Browser, tmp_path: Path) -> None:
    rows = synthetic.attempts(POINTS[:2], outcome="crash")
    odd = 'a "quoted", word\r\nand a second line'
    rows[0] |= {"evidence": odd, "command": "", "step_time_s": None}
    opened(browser, written(results_of(frame_of(rows), tmp_path), tmp_path))
    text = browser.js("Csv.text(Explorer.columns, [0, 1])")
    [header, *body] = csv.reader(io.StringIO(text, newline=""))
    assert len(body) == 2
    assert body[0][header.index("evidence")] == odd
    assert "step_time_s" not in header or body[0][header.index("step_time_s")] == ""


def test_keyboard_alone(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    opened(browser, recorded[0])
    browser.js("document.body.focus()")
    seen = browser.focused_by_tab(until=".grid")
    assert seen.index("theme") < seen.index("runs-reset")
    assert any(name.startswith("INPUT") for name in seen)
    assert any(name.startswith("SELECT") for name in seen)
    assert "BUTTON Lasso" in seen
    outline = browser.js(
        "getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth"
    )
    assert outline == "solid2px"
    browser.press(Keys.TAB)
    assert browser.focused() == "model"  # its headings come next, each a button that sorts
    browser.js("document.querySelector('#runs-table .grid').focus()")
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP)
    order = browser.js("Explorer.order()")
    assert browser.js("Explorer.state.current") == order[1]
    assert browser.js("document.activeElement.getAttribute('aria-activedescendant')") == f"runs-row-{order[1]}"
    browser.press(Keys.END)
    assert browser.js("Explorer.state.current") == order[-1]
    in_sight = (
        "((a, b) => a.top >= b.top && a.bottom <= b.bottom)(...['.current', '.grid']"
        ".map(s => document.querySelector(`#runs-table ${s}`).getBoundingClientRect()))"
    )
    assert browser.js(in_sight)
    browser.press(Keys.HOME, Keys.PAGE_DOWN, Keys.SPACE)
    current = browser.js("Explorer.state.current")
    assert browser.js("[...Explorer.state.selected]") == [current]
    browser.press(Keys.ENTER)
    assert browser.focused() == "runs-drawer"
    browser.press(Keys.TAB)
    assert browser.js("document.activeElement.ariaLabel") == "Close"
    browser.press(Keys.TAB)
    assert browser.focused() == "runs-tab-run"
    browser.press(Keys.ARROW_RIGHT)
    assert browser.focused() == "runs-tab-memory"
    browser.wait("document.querySelector('#runs-view-memory .widget') !== null")
    browser.press(Keys.ESCAPE)
    assert browser.js("document.querySelector('#runs-drawer').hidden")
    assert browser.js("document.activeElement.classList.contains('grid')")
    assert browser.js("Explorer.state.current") == current


def test_the_address_keeps_the_view(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page)
    assert browser.js("location.hash") == ""  # nothing is said of the first view
    browser.click(chip("model", "llama8b"))
    set_value(browser, "select[data-axis=x]", "predicted_peak_bytes")
    set_value(browser, "select[data-axis=colour]", "model")
    browser.click("input[data-axis=logX]")
    set_value(browser, '[data-column="peak_allocated_bytes"] input', "40")
    browser.click('[data-sort="step_time_s"]')
    for place in (2, 3, 5):
        browser.click(f"#runs-table [data-row]:nth-child({place}) .tick")
    browser.click("#runs-table [data-row]:nth-child(4)")
    browser.click("#runs-tab-memory")
    keep = (
        "(s => JSON.stringify([Explorer.order(), [...s.selected].sort(), s.current, s.x, s.y, s.colour, s.logX, s.logY,"
        " s.sort, s.open, s.view]))(Explorer.state)"
    )
    before, address = browser.js(keep), browser.js("location.hash")
    assert json.loads(before)[1] and len(json.loads(before)[0]) < len(frame)
    opened(browser, page, address)
    assert browser.js(keep) == before
    assert browser.js("document.querySelector('select[data-axis=x]').value") == "predicted_peak_bytes"
    assert browser.js('document.querySelector(\'[data-column="model"] input[value="llama8b"]\').checked')
    opened(browser, page, "#r.f=1&r.f.nonsense=is:1&r.sel=00000000:1-5&r.row=gone&r.x=nothing")
    notice = browser.text("#runs-notice")
    assert "nonsense" in notice and "other rows" in notice and "gone" in notice and "nothing" in notice
    assert browser.js("Explorer.state.selected.size") == 0
    assert browser.console() == []


def test_the_address_is_shared(browser: Browser, recorded: tuple[Path, pd.DataFrame]) -> None:
    page, frame = recorded
    opened(browser, page, "#m=8.86B&unknown=a%20b&r.x=tp")
    assert browser.js("Explorer.state.x") == "tp"
    browser.click(chip("zero_stage", 1))
    kept = browser.js("location.hash")
    assert kept.startswith("#m=8.86B&unknown=a%20b&r.")
    mine = "window.mine ??= Address.claim('page', ['m', 'g'])"
    assert browser.js(f"[...({mine}).read()]") == [["m", "8.86B"]]
    browser.js("window.mine.write([['g', 'a&b=c~:']])")
    assert browser.js("[...window.mine.read()]") == [["g", "a&b=c~:"]]
    assert browser.js("location.hash").startswith("#unknown=a%20b&r.")
    assert browser.js("Explorer.state.x") == "tp"
    taken = "(() => { try { Address.claim('other', ['r.x']); } catch (error) { return error.message; } })()"
    assert "both claim" in browser.js(taken)
    browser.js("void (location.hash = '#r.x=world_size')")
    browser.wait("Explorer.state.x === 'world_size'")
    assert shown(browser) == (frame["cohort"] == frame["cohort"].iloc[0]).sum()
    odd = ["a~b", "back\\slash", "", "per%cent", "x:y,z/"]
    back = "[...Address.filterOf(Address.filterText({values: new Set(arguments[0])})).values]"
    assert browser.js(back, odd) == odd


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(375, 812), (768, 1024), (1400, 900)], ids=["phone", "tablet", "desktop"])
def test_fits_the_screen(
    browser: Browser, recorded: tuple[Path, pd.DataFrame], tmp_path: Path, size: tuple[int, int], dark: bool
) -> None:
    opened(browser, recorded[0], "#r.f=1", size=size, dark=dark)
    assert browser.js("document.documentElement.scrollWidth") == size[0]
    assert browser.js("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    overlapping = (
        "(() => { const boxes = [...document.querySelectorAll("
        "'.top h1, .top button, .runs .controls label, .runs .tools button, #runs-count, .runs summary, #runs-note')]"
        ".map(e => [e.textContent, e.getBoundingClientRect()]).filter(([, b]) => b.width && b.height);"
        " return boxes.flatMap(([s, a], i) => boxes.slice(i + 1).filter("
        "([, b]) => a.left < b.right - 1 && b.left < a.right - 1"
        " && a.top < b.bottom - 1 && b.top < a.bottom - 1).map(([t]) => [s, t])); })()"
    )
    assert browser.js(overlapping) == []
    if size[0] < 500:
        browser.js("void (document.querySelector('#runs-filters').open = true)")
        small = (
            "[...document.querySelectorAll('.runs button, .runs select, .runs .chip, .runs input:not(.chip input)')]"
            ".filter(e => e.type !== 'checkbox' && e.offsetParent && e.getBoundingClientRect().height < 35.5)"
            ".map(e => e.outerHTML.slice(0, 90))"
        )
        assert browser.js(small) == []
    browser.click("#runs-table [data-row]")
    for view in ("run", "memory", "pipeline"):
        browser.click(f"#runs-tab-{view}")
        browser.wait(f"document.querySelector('#runs-view-{view} :is(.widget, section)') !== null")
        assert browser.js("document.documentElement.scrollWidth") == size[0]
        assert browser.js("(d => d.scrollWidth <= d.clientWidth)(document.querySelector('#runs-drawer'))"), view
    browser.click("#theme")
    assert browser.js("document.documentElement.dataset.theme") == ("light" if dark else "dark")
    browser.wait("Explorer.timing.plotted")
    assert browser.console() == []
