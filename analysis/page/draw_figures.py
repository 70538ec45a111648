"""Drawing every figure of every cohort into files, on the cores that there are, while the caller does other work."""

from __future__ import annotations

import base64
import gc
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import pandas as pd

from analysis.figures import style
from analysis.figures.spec import FigureSpec
from analysis.page import figure_page
from analysis.page.render import DrawnFigure
from analysis.rows.cohorts import Cohort

_WORTH_ROWS = 1000
"""With fewer rows than this and few figures, starting processes takes longer than they save."""
_WORTH_FIGURES = 20
_MOST_PROCESSES = 8
_Task = tuple[int, int]
"""Places of a cohort and of a figure among those asked for."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure of one cohort and the table of its values."""

    figure: DrawnFigure
    data: pd.DataFrame


@dataclass(frozen=True, slots=True)
class _Order:
    cohorts: Sequence[Cohort]
    specs: Sequence[FigureSpec]
    folder: Path
    formats: Sequence[str]


_order: _Order | None = None
"""What a forked process draws: it inherits the frames instead of having them sent."""


class Drawing:
    """Figures that other processes draw into ``folder`` from here on; `collect` waits for them.

    A context: leaving it early (an error, Ctrl-C) drops what has not been begun. ``formats`` are of `options.FORMATS`.
    """

    def __init__(
        self, cohorts: Sequence[Cohort], specs: Sequence[FigureSpec], folder: Path, formats: Sequence[str]
    ) -> None:
        self._order = _Order(cohorts, specs, folder, formats)
        self._tasks = [(i, k) for i in range(len(cohorts)) for k in range(len(specs))]
        self._pool: ProcessPoolExecutor | None = None
        self._futures: dict[Future[Drawn], _Task] = {}

    def __enter__(self) -> Drawing:
        rows = sum(len(cohort.frame) for cohort in self._order.cohorts)
        processes = min(_cores(), _MOST_PROCESSES, len(self._tasks))
        if processes > 1 and (rows >= _WORTH_ROWS or len(self._tasks) >= _WORTH_FIGURES):
            self._start(processes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            gc.unfreeze()

    def collect(self, step: Callable[[int, int, str], None]) -> list[list[Drawn]]:
        """What became of each figure, by cohort, in the order asked for.

        ``step`` gets the number of figures done, of all, and the name of the last one. Raises `OSError` when a file
        cannot be written.
        """
        done: dict[_Task, Drawn] = {}
        for task, drawn in self._results():
            done[task] = drawn
            step(len(done), len(self._tasks), f"{drawn.figure.name}, {self._order.cohorts[task[0]].title}")
        return [[done[i, k] for k in range(len(self._order.specs))] for i in range(len(self._order.cohorts))]

    def _start(self, processes: int) -> None:
        global _order
        _order = self._order
        gc.freeze()  # what is here already is not looked through again in every process, nor copied for it
        self._pool = ProcessPoolExecutor(
            processes, mp_context=multiprocessing.get_context("fork"), initializer=_leave_interrupts
        )
        with warnings.catch_warnings():
            # Python 3.12 warns of any thread at a fork; Arrow's, the only ones here, are made for it.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._futures = {self._pool.submit(_draw_inherited, *task): task for task in self._tasks}
        _order = None

    def _results(self) -> Iterator[tuple[_Task, Drawn]]:
        left = list(self._tasks)
        try:
            for future in as_completed(self._futures):
                drawn = future.result()
                left.remove(self._futures[future])
                yield self._futures[future], drawn
        except BrokenProcessPool:
            pass  # one was killed, for lack of memory perhaps: this process draws the rest
        for task in left:
            yield task, _draw(self._order, *task)


def _leave_interrupts() -> None:
    """Ctrl-C reaches every process of the terminal; the one that waits for the others is to answer it, once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _draw_inherited(cohort: int, spec: int) -> Drawn:
    assert _order is not None
    return _draw(_order, cohort, spec)


def _draw(order: _Order, cohort_place: int, spec_place: int) -> Drawn:
    cohort, spec = order.cohorts[cohort_place], order.specs[spec_place]
    drawn = DrawnFigure(name=spec.name, section=spec.section, title=spec.title, caption=spec.caption)
    data = spec.data(cohort.frame)
    try:
        figure = spec.draw(cohort.frame)
    except style.NothingToDraw as reason:
        return Drawn(replace(drawn, missing=str(reason)), data)
    if cohort.stamp:  # a picture travels without its page
        figure.suptitle(cohort.stamp, fontsize="small", color="#666666")
    style.settle(figure)
    files: dict[str, bytes] = {}
    if "png" in order.formats:
        files["png"] = style.png(figure)
    if "svg" in order.formats or "html" in order.formats:
        files["svg"] = style.svg(figure)
    if "png" in files:
        embedded = "data:image/png;base64," + base64.b64encode(files["png"]).decode()
    else:
        embedded = "data:image/svg+xml;base64," + base64.b64encode(files["svg"]).decode()
    if "html" in order.formats:
        files["html"] = figure_page.render(drawn, cohort.title, files["svg"].decode(), data).encode()
    paths = [order.folder / f"{spec.name}-{cohort.slug}.{kind}" for kind in order.formats]
    for path, kind in zip(paths, order.formats, strict=True):
        path.write_bytes(files[kind])
    return Drawn(replace(drawn, files=tuple(path.name for path in paths), embedded=embedded), data)


def _cores() -> int:
    """Cores that this process may use; 1 where processes cannot be forked."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
