"""The report's page as a reader uses it, from disk in headless Chromium: by click, by key, by link, on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from analysis import report
from analysis.rows import choice_costs
from tests.analysis import synthetic
from tests.analysis.browser import Browser, Keys
from tests.analysis.pages import POINTS, QUICK
from tests.analysis.report_page import RECORDED, STUDY, built, cell, choose, opened, parts_of

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("the study's page"), pytest.mark.drawn(one_in=3)]

WIDTHS = (375, 768, 1400)


@pytest.fixture(scope="module")
def study(study_page: Path) -> Path:
    return study_page


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A half-finished measured sweep and a rehearsed one beside it."""
    folder = tmp_path_factory.mktemp("small")
    rows = synthetic.attempts(POINTS[:24])
    synthetic.make_sweep(folder / "eight", rows, waiting=POINTS[24:30])
    rehearsed = [row | {"attempt_id": f"r{row['attempt_id']}", "method": "rehearsed"} for row in rows[:8]]
    synthetic.make_sweep(folder / "one", rehearsed)
    return report.build(folder, folder / "report", QUICK)


def quiet(browser: Browser, page: Path) -> None:
    assert browser.console() == []
    assert browser.requests() == [page.resolve().as_uri()] or all(
        address.startswith(page.resolve().as_uri()) for address in browser.requests()
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_the_answer_is_on_the_first_screen_and_nothing_scrolls_sideways(
    width: int, study: Path, browser: Browser
) -> None:
    opened(browser, study, "#m=8.86B&g=64", size=(width, 900))
    assert browser.js("document.documentElement.scrollWidth") == width
    bottom = browser.js("document.querySelector('#winner .stats').getBoundingClientRect().bottom")
    assert bottom < 900
    if width > 1000:
        assert browser.js("document.getElementById('map').getBoundingClientRect().bottom") < 900
    if width != 768:  # where sections stand below each other, and none is folded
        assert browser.js("document.documentElement.scrollHeight") < 5000
    assert "dp 32 · pp 2 · ZeRO 1 · micro-batch 1 × 8" in browser.text("#winner .layout")
    assert "Tie of 5" in browser.text("#winner")
    quiet(browser, study)


def test_a_phone_folds_what_is_below_the_runs(study: Path, browser: Browser) -> None:
    shown = "[...document.querySelectorAll('#why, #cost, #failed, #trust, #files')].map((e) => e.clientHeight > 100)"
    opened(browser, study, "#m=8.86B&g=64", size=(375, 900))
    assert browser.js(shown) == [False] * 5
    browser.js("document.querySelector('#cost > h2 > button').click()")
    assert browser.js(shown) == [False, True, False, False, False]
    browser.js("document.querySelector('nav a[href=\"#trust\"]').click()")
    assert browser.js(shown) == [False, True, False, True, False]
    assert browser.js("document.querySelector('#trust > h2 > button').getAttribute('aria-expanded')") == "true"
    browser.js("document.querySelector('#cost > h2 > button').click()")
    assert browser.js(shown) == [False, False, False, True, False]
    opened(browser, study, "#files", size=(375, 900))
    assert browser.js(shown) == [False, False, False, False, True]
    opened(browser, study, "#m=8.86B&g=64", size=(1400, 900))
    assert browser.js(shown) == [True] * 5
    assert browser.js("document.querySelectorAll('.folds > h2 > button:enabled').length") == 0
    quiet(browser, study)


def test_a_click_on_the_map_moves_everything_and_the_hash_keeps_it(study: Path, browser: Browser) -> None:
    opened(browser, study)
    browser.click(cell("8.86B", 64))
    assert "8.86B on 64 × H100" in browser.text("#h-answer")
    assert browser.js("document.getElementById('f-model').value") == "8.86B"
    assert browser.js("document.getElementById('f-gpus').value") == "64"
    assert "145 of 4,104" in browser.text("#runs-count")
    choose(browser, "f-mem", "40")
    choose(browser, "f-net", "slow")
    told = browser.text("#winner")
    fragment = str(browser.js("location.hash"))
    assert "m=8.86B" in fragment
    assert "net=slow" in fragment
    opened(browser, study, fragment)
    assert browser.text("#winner") == told
    assert browser.js("document.getElementById('f-mem').value") == "40"
    assert browser.js("document.querySelector('#map [aria-pressed=true]').dataset.g") == "64"
    quiet(browser, study)


def test_hover_and_focus_show_the_first_five_of_a_cell(study: Path, browser: Browser) -> None:
    opened(browser, study)
    browser.js(
        "document.querySelector(arguments[0]).dispatchEvent(new PointerEvent('pointerenter', {pointerType: 'mouse'}))",
        cell("3.57B", 8),
    )
    assert len(browser.all("#pop tr")) == 5
    ranked = pd.read_csv(study.parent / "tables" / "ranked.csv")
    rows = ranked[(ranked["workload"] == "3.57B") & (ranked["world_size"] == 8)].sort_values("rank")
    assert rows["layout"].iloc[1] in browser.all("#pop tr")[1].text
    browser.js("document.querySelector(arguments[0]).dispatchEvent(new PointerEvent('pointerleave'))", cell("3.57B", 8))
    assert browser.js("document.getElementById('pop').hidden")


def test_the_map_is_one_tab_stop_and_arrows_move(study: Path, browser: Browser) -> None:
    opened(browser, study, "#m=8.86B&g=64")
    assert len(browser.all("#map button[tabindex='0']")) == 1
    browser.js("document.querySelector('#map [aria-pressed=true]').focus()")
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_UP)
    assert browser.js("[document.activeElement.dataset.m, document.activeElement.dataset.g].join(' ')") == "3.57B 128"
    assert not browser.js("document.getElementById('pop').hidden")
    browser.press(Keys.ESCAPE)
    assert browser.js("document.getElementById('pop').hidden")
    browser.press(Keys.ENTER)
    assert "3.57B on 128" in browser.text("#h-answer")
    assert browser.js("document.activeElement.dataset.g") == "128"  # the focus is not lost


def test_colours_of_the_map_follow_their_measure(study: Path, browser: Browser) -> None:
    opened(browser, study)
    by_mfu = browser.text(cell("8.86B", 64))
    browser.click("[data-by=finished]")
    assert browser.text(cell("8.86B", 64)).startswith("50 %")  # 72 of 145 points
    browser.click("[data-by=mfu]")
    assert browser.text(cell("8.86B", 64)) == by_mfu
    assert (
        len(
            {
                browser.js("getComputedStyle(document.querySelector(arguments[0])).background", cell("8.86B", size))
                for size in (8, 512)
            }
        )
        == 2
    )


def test_why_cost_and_failures_follow_the_cell(study: Path, browser: Browser) -> None:
    opened(browser, study, "#m=8.86B&g=64&price=2.5")
    changes = browser.text("#changes")
    assert "tpagainst 12 × 0.91n = 1best run with it × 1.00" in changes  # 5,952 and 6,539 of 6,555 in the raw table
    assert "4 × 0.99n = 1, a tie" in changes
    assert "pp" in changes and "1no run differs in that alonebest run with it × 1.00" in changes
    assert "No run differs in that alone (in brackets the best run with it): micro-batch 2 (× 1.00)" in changes
    pairs = browser.text("#pairs").split("\n")
    told = choice_costs.table(parts_of(STUDY)[0].frame)
    first = told[(told["axis"] == "tp") & (told["value"] == 2)].iloc[0]
    assert f"2 × {first['median']:.2f}" in " ".join(pairs)
    assert f"{first['low']:.2f} – {first['high']:.2f}, n = {first['pairs']:.0f}" in " ".join(pairs)
    assert "cheapest on 8 GPUs" in browser.text("#costbody")
    assert len(browser.all("#costbody tbody tr")) == 7
    assert "1,917 out of memory" in browser.text("#failed")
    browser.click('#outcomes button[aria-label^="80B on 256"]')
    assert "80B on 256" in browser.text("#h-answer")
    assert "82 of 4,104" in browser.text("#runs-count")  # 112 points, of which 30 finished
    assert browser.js("[...document.querySelectorAll('[data-part]')].every((e) => !e.hidden)")


def test_a_layout_opens_into_its_row(study: Path, browser: Browser) -> None:
    opened(browser, study, "#m=8.86B&g=64")
    browser.click("#ten tbody tr:nth-child(2) button")
    browser.wait("!document.getElementById('runs-drawer').hidden")
    layout = browser.all("#ten tbody tr")[1].find_element("css selector", "button").text
    assert layout in browser.text("#runs-drawer")
    assert "r.row=" in str(browser.js("location.hash"))
    quiet(browser, study)


def test_bars_of_a_row_are_filled(small: Path, browser: Browser) -> None:
    """The header's own rules must not reach the stacked bars of a row, which are of one class with it."""
    opened(browser, small)
    browser.click("#ten tbody tr:nth-child(1) button")
    browser.wait("document.querySelectorAll('#runs-drawer .bars .bar').length > 1")
    parts = "[...document.querySelectorAll('#runs-drawer .bars .bar > span')].map((e) => e.getBoundingClientRect())"
    assert browser.js(f"Math.min(...{parts}.map((box) => box.height))") > 10
    bars = "[...document.querySelectorAll('#runs-drawer .bars .bar')].map((e) => e.getBoundingClientRect().height)"
    assert browser.js(f"Math.max(...{bars})") < 20


def test_parts_are_never_pooled(small: Path, browser: Browser) -> None:
    opened(browser, small)
    slugs = browser.js("[...document.querySelectorAll('#part option')].map((o) => o.value)")
    assert slugs == ["measured-h200", "rehearsed-h200"]
    measured = browser.text("#says")
    choose(browser, "part", "rehearsed-h200")
    visible = browser.js("[...document.querySelectorAll('[data-part]:not([hidden])')].map((e) => e.dataset.part)")
    assert set(visible) == {"rehearsed-h200"}
    assert "rehearsed, not measured" in browser.text("#h-answer")
    assert "communication is modelled" in browser.text("#winner")
    assert "data parallelism alone" not in browser.js(
        "document.querySelector('#says [data-part=rehearsed-h200]').textContent"
    )
    assert measured
    quiet(browser, small)


def test_what_to_run_next_is_said(study: Path, small: Path, browser: Browser) -> None:
    opened(browser, study, "#m=8.86B&g=64")
    assert "To settle it, run them again: Copy the 5 commands" in browser.text("#winner")
    opened(browser, small)
    waits = "[...Report.state.part.cells.values()].filter((c) => c.next)"
    cells = browser.js(f"{waits}.map((c) => [c.workload, c.size, c.waiting])")
    assert sum(count for *_, count in cells) == 6
    for workload, size, count in cells:
        browser.click(cell(workload, size))
        assert f"To run next: {count} point" in browser.text("#winner")


def test_what_has_not_run_is_pale_and_counted(small: Path, browser: Browser) -> None:
    opened(browser, small)
    waiting = browser.js("Report.state.part.waiting.reduce((sum, one) => sum + one.points, 0)")
    assert waiting == 6
    bare = browser.js("[...Report.state.part.cells.values()].filter((c) => !c.points.length && c.waiting).length")
    assert len(browser.all("#map button.cell.pale")) == bare
    assert "Unfinished: 6 of 38 planned points" in browser.text("#says")


@pytest.mark.parametrize("outcomes", [("ok",), ("oom", "oom", "crash"), ()])
def test_pages_of_one_row_of_failures_and_of_nothing(
    outcomes: tuple[str, ...], tmp_path: Path, browser: Browser
) -> None:
    rows = [synthetic.attempt(POINTS[i], i, outcome=outcome) for i, outcome in enumerate(outcomes)]
    index = report.build(synthetic.make_sweep(tmp_path / "s", rows), tmp_path / "out", QUICK)
    opened(browser, index)
    told = browser.text("#winner")
    assert {1: "alone: nothing to compare", 3: "Nothing finished here", 0: "Nothing fits here"}[len(outcomes)] in told
    quiet(browser, index)


def test_a_sweep_without_rows_and_without_a_plan_says_so(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "sweep.json").write_text("{}")
    index = report.build(tmp_path / "s", tmp_path / "out", QUICK)
    browser.open(index)
    assert "Nothing to rank yet" in browser.text("#h-answer")
    quiet(browser, index)


def test_light_dark_and_print(study: Path, browser: Browser) -> None:
    opened(browser, study, dark=True)
    ground = "getComputedStyle(document.body).backgroundColor"
    assert browser.js(ground) == "rgb(16, 18, 20)"
    browser.click("#theme")
    assert browser.js(ground) == "rgb(255, 255, 255)"
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    hidden = [
        browser.js(f"getComputedStyle(document.querySelector('{what}')).display") for what in ("header", "#finder")
    ]
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert hidden == ["none", "none"]


def test_without_the_newest_browser_the_tables_stay(study: Path, tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "old.html"
    page.write_text(study.read_text().replace("new DecompressionStream", "new NoSuchStream"))
    browser.open(page)
    browser.wait("!document.getElementById('old-browser').hidden")
    assert "dp32 z1 pp2 · mbs 1×8" in browser.text(".static")


def test_the_studys_page_is_small_and_another_cell_draws_little_anew(study: Path, browser: Browser) -> None:
    """Elements that a click makes are counted; ``python -m tests.speeds`` holds the milliseconds to their budget."""
    opened(browser, study)
    browser.js(
        "window.made = 0; for (const name of ['createElement', 'createElementNS']) { const make = document[name];"
        " document[name] = function (...words) { window.made++; return make.apply(this, words); }; }"
    )
    for size in (8, 64, 512):
        browser.click(cell("8.86B", size))
    assert browser.js("window.made") < 3 * 5000


@pytest.mark.parametrize("width", [1280, 1400])
def test_the_finder_is_one_line_on_a_wide_screen(width: int, study: Path, browser: Browser) -> None:
    """With every control, more than any rows show."""
    opened(browser, study, "#m=8.86B&g=64", size=(width, 900))
    controls = "[...document.querySelectorAll('#finder label')]"
    browser.js(f"{controls}.forEach((label) => (label.hidden = false))")
    boxes = f"{controls}.map((label) => label.getBoundingClientRect())"
    assert browser.js(f"new Set({boxes}.map(({{ top }}) => top)).size") == 1
    assert browser.js(f"Math.max(...{boxes}.map(({{ right }}) => right))") < width - 24
    assert browser.js("document.getElementById('finder').offsetHeight") < 80


AXE = "node_modules/axe-core/axe.min.js"


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(dark: bool, study: Path, browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "axe"
    if not (folder / AXE).exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed: no axe-core")
        folder.mkdir(exist_ok=True)
        install = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "axe-core@4.10.3"]
        if subprocess.run(install, cwd=folder, capture_output=True, timeout=120, check=False).returncode:
            pytest.skip("axe-core could not be installed: no registry")
    opened(browser, study, "#m=8.86B&g=64", dark=dark)
    browser.driver.execute_script((folder / AXE).read_text())
    found = browser.driver.execute_async_script(
        "const done = arguments[0]; axe.run().then((r) => done(r.violations.map((v) =>"
        " `${v.id}: ${v.nodes.slice(0, 3).map((n) => n.target.join(' ')).join(' | ')}`)))"
    )
    assert found == []


def test_the_recorded_rows_say_where_a_step_and_the_memory_go(browser: Browser, tmp_path: Path) -> None:
    for name in ("h200x2_schedules", "h200x2_recompute", "h200x2_validation_probed"):
        shutil.copytree(RECORDED / name, tmp_path / "recorded" / name)
    page = built(tmp_path / "recorded", tmp_path / "out")
    opened(browser, page, "#m=llama8b%2C%20seq%204096&g=2&batch=32768")  # the batch of the profiled runs
    assert "matmul" in browser.text("#steps")
    assert "bubble" in browser.text("#steps")
    assert "optimizer" in browser.text("#memstack")
    assert "each precision against its best" in browser.text("#maplegend")
    assert "scheduleagainst dualpipe v1f1b × 0.91n = 1" in browser.text("#changes")
    assert "MWh" in browser.text("#costbody thead") and "≤" not in browser.text("#costbody")
    assert re.match(
        r"Time against energy on 2 GPUs, nothing is better in both: dp1 pp2 \S+.* days, [\d.]+ MWh\)",
        browser.text("#frontier"),
    )
    quiet(browser, page)
