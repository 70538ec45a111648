"""What a user waits for, and the memory of it, against its budget: ``python -m tests.speeds`` on an idle machine.

Apart from the tests, which count the work instead: a clock says little on a machine that does something else, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from analysis.compare import matching
from tests.analysis import explorer_page
from tests.analysis.browser import chromium
from tests.analysis.compared import POINTS, run
from tests.analysis.conftest import frame_of
from tests.analysis.report_page import STUDY, built, cell
from tests.analysis.report_page import opened as report_opened


class Measured(NamedTuple):
    what: str
    amount: float
    budget: float
    unit: str = "s"


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def many_points() -> Iterator[Measured]:
    base = frame_of([run(POINTS[0], 100.0)])
    many = base.loc[base.index.repeat(30_000)].reset_index(drop=True)
    many["seed"] = range(len(many))
    many["experiment_id"] = many["experiment_id"] + many["seed"].astype(str)

    def match() -> None:
        points = matching.points(many)
        matching.match(points, points.assign(experiment_id=points["experiment_id"] + "x"))

    yield Measured("30,000 points are matched", seconds(match), 15.0)


def advice() -> Iterator[Measured]:
    """Processor time and memory of ``advise`` for two of the largest questions."""
    for model in ("deepseek_v3", "llama405b"):
        words = ["advise", f"model={model}", "cluster=h100_ib400", "gpus=1024", "--json"]
        advising = subprocess.Popen([sys.executable, "-m", "sweep", *words], stdout=subprocess.DEVNULL)
        _, status, used = os.wait4(advising.pid, 0)
        assert status == 0, f"advise for {model} failed"
        yield Measured(f"advice for {model} on 1,024 GPUs", used.ru_utime + used.ru_stime, 20.0)
        yield Measured("its memory", used.ru_maxrss / 1024, 400.0, "MiB")


def explorers() -> Iterator[Measured]:
    """Pages of so many rows, the best of four filters."""
    with chromium() as browser:
        for rows, table_s, open_s, filter_s in ((4104, 0.5, 1.0, 0.1), (50_000, 1.0, 2.0, 0.4)):
            with tempfile.TemporaryDirectory() as folder:
                where = Path(folder)
                page = explorer_page.written(explorer_page.results_of(explorer_page.many(rows), where), where)
                explorer_page.opened(browser, page)
            yield Measured(f"{rows:,} rows: the table", browser.js("Explorer.timing.table") / 1e3, table_s)
            yield Measured(f"{rows:,} rows: the plot", browser.js("Explorer.timing.open") / 1e3, open_s)
            filtered = []
            for value in ("ok", "oom", "ok", "oom"):
                browser.click(explorer_page.chip("outcome", value))
                filtered.append(browser.js("Explorer.timing.filter") / 1e3)
                browser.wait("Explorer.timing.plotted")
            yield Measured(f"{rows:,} rows: a filter", min(filtered), filter_s)


def page_of_the_study() -> Iterator[Measured]:
    """The best of three openings and of nine clicks; nothing without the study's table, which is not shipped."""
    if not STUDY.exists():
        return
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        page = built(STUDY, Path(folder))
        times = [report_opened(browser, page).js("[Report.timing.answer, Report.timing.all]") for _ in range(3)]
        yield Measured("the study's page: its answer", min(first for first, _ in times) / 1e3, 0.5)
        yield Measured("the study's page: all of it", min(last for _, last in times) / 1e3, 1.0)
        took = []
        for size in 3 * (8, 64, 512):
            browser.js("void (window.began = performance.now())")
            browser.click(cell("8.86B", size))
            took.append(browser.js("performance.now() - window.began") / 1e3)
        yield Measured("the study's page: another cell", min(took), 0.1)


def main() -> int:
    too_much = 0
    for measure in (many_points, advice, explorers, page_of_the_study):
        for what, amount, budget, unit in measure():
            over = amount > budget
            print(f"{what:<40}{amount:8.3f} {unit} of {budget:.3f} {unit}{'  TOO MUCH' if over else ''}")
            too_much += over
    return 1 if too_much else 0


if __name__ == "__main__":
    sys.exit(main())
