"""Draws every figure of every cohort into files, in parallel processes, while the caller does other work."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import pandas as pd

from analysis.drawing import style
from analysis.figures.spec import FigureSpec
from analysis.page import figure_page
from analysis.page.render import DrawnFigure
from analysis.rows.cohorts import Cohort

_WORTH_ROWS = 1000
"""Smallest number of rows for which processes are started; fewer rows need `_WORTH_FIGURES` figures to save time."""
_WORTH_FIGURES = 20
_MOST_PROCESSES = 8
_LONGEST_REASON = 200
_Task = tuple[int, int]
"""(index of the cohort, index of the figure) in a request."""


STRICT = False
"""Whether an error of a figure ends the report, as in tests; otherwise it costs that figure and a warning."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure of one cohort and the table of its values."""

    figure: DrawnFigure
    data: pd.DataFrame
    problem: str | None = None
    """A line for the user if the figure could not be drawn because of an error."""


@dataclass(frozen=True, slots=True)
class _Request:
    cohorts: Sequence[Cohort]
    specs: Sequence[FigureSpec]
    folder: Path
    formats: Sequence[str]


_request: _Request | None = None
"""Request of a forked process, which inherits the frames instead of receiving them."""


class Drawing:
    """Context in which other processes draw figures into ``folder``; `collect` waits for them.

    Leaving the context early (an error, Ctrl-C) cancels the figures that have not been started. ``formats`` are from
    `options.FORMATS`.
    """

    def __init__(
        self, cohorts: Sequence[Cohort], specs: Sequence[FigureSpec], folder: Path, formats: Sequence[str]
    ) -> None:
        self._request = _Request(cohorts, specs, folder, formats)
        self._tasks = [(i, k) for i in range(len(cohorts)) for k in range(len(specs))]
        self._pool: ProcessPoolExecutor | None = None
        self._life: tuple[int, int] | None = None
        self._futures: dict[Future[Drawn], _Task] = {}

    def __enter__(self) -> Drawing:
        rows = sum(len(cohort.frame) for cohort in self._request.cohorts)
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
        if self._life is not None:
            for end in self._life:
                os.close(end)

    def collect(self, step: Callable[[int, int, str], None]) -> list[list[Drawn]]:
        """Result of each figure, by cohort, in the order of the request.

        ``step`` is called with the number of figures done, the total, and the name of the last one. Raises `OSError` if
        a file cannot be written.
        """
        done: dict[_Task, Drawn] = {}
        for task, drawn in self._results():
            done[task] = drawn
            step(len(done), len(self._tasks), f"{drawn.figure.name}, {self._request.cohorts[task[0]].title}")
        return [[done[i, k] for k in range(len(self._request.specs))] for i in range(len(self._request.cohorts))]

    def _start(self, processes: int) -> None:
        global _request
        _request = self._request
        gc.freeze()  # children neither scan existing objects in garbage collection nor copy their pages
        self._life = os.pipe()
        self._pool = ProcessPoolExecutor(
            processes,
            mp_context=multiprocessing.get_context("fork"),
            initializer=_serve,
            initargs=self._life,
        )
        with warnings.catch_warnings():
            # Python 3.12 warns about any thread at a fork; Arrow's, the only ones here, support forking.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._futures = {self._pool.submit(_draw_inherited, *task): task for task in self._tasks}
        _request = None

    def _results(self) -> Iterator[tuple[_Task, Drawn]]:
        left = list(self._tasks)
        try:
            for future in as_completed(self._futures):
                drawn = future.result()
                left.remove(self._futures[future])
                yield self._futures[future], drawn
        except BrokenProcessPool:
            pass  # A process was killed, perhaps for lack of memory; this process draws the rest.
        for task in left:
            yield task, _draw(self._request, *task)


def _serve(life: int, held: int) -> None:
    """Initialize a drawing process: ignore Ctrl-C, which the parent handles, and exit once the parent is gone for any
    reason.

    ``life`` and ``held`` are the ends of a pipe that nobody writes to. When the parent, the last process with ``held``
    open, is gone, reading from ``life`` returns.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.close(held)

    def wait() -> None:
        os.read(life, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _draw_inherited(cohort: int, spec: int) -> Drawn:
    assert _request is not None
    return _draw(_request, cohort, spec)


def _draw(request: _Request, cohort_place: int, spec_place: int) -> Drawn:
    cohort, spec = request.cohorts[cohort_place], request.specs[spec_place]
    try:
        with style.in_style():
            return _drawn(request, cohort, spec)
    except (OSError, MemoryError):
        raise
    except Exception as error:
        if STRICT:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"[:_LONGEST_REASON]
        figure = DrawnFigure(name=spec.name, section=spec.section, title=spec.title, caption=spec.caption)
        missing = f"it cannot be drawn from these rows ({reason})"
        problem = f"figure {spec.name} of {cohort.title} cannot be drawn from these rows: {reason}"
        return Drawn(replace(figure, missing=missing), pd.DataFrame(), problem)


def _drawn(request: _Request, cohort: Cohort, spec: FigureSpec) -> Drawn:
    drawn = DrawnFigure(name=spec.name, section=spec.section, title=spec.title, caption=spec.caption)
    data = spec.data(cohort.frame)
    try:
        figure = spec.draw(cohort.frame)
    except style.NothingToDraw as reason:
        return Drawn(replace(drawn, missing=str(reason)), data)
    if conclusion := spec.conclude(cohort.frame):
        drawn = replace(drawn, caption=f"{conclusion} {spec.caption}")
    if cohort.stamp:  # a picture may be seen without its page
        figure.suptitle(cohort.stamp, fontsize="small", color="#666666")
    style.lay_out(figure)
    files = style.pictures(figure, {"svg" if kind == "html" else kind for kind in request.formats})
    if "html" in request.formats:
        files["html"] = figure_page.render(drawn, cohort.title, files["svg"].decode(), data).encode()
    paths = [request.folder / f"{spec.name}-{cohort.slug}.{kind}" for kind in request.formats]
    for path, kind in zip(paths, request.formats, strict=True):
        path.write_bytes(files[kind])
    return Drawn(replace(drawn, files=tuple(path.name for path in paths)), data)


def _cores() -> int:
    """Number of cores that this process may use; 1 if processes cannot be forked."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
