"""Drawing every figure of every cohort into files, on the cores that there are."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from analysis.cohorts import Cohort
from analysis.figures import registry, style
from analysis.figures.spec import FigureSpec
from analysis.page import DrawnFigure

_WORTH_ROWS = 1000
"""With fewer rows than this, starting processes takes longer than they save."""
_MOST_PROCESSES = 8
_Task = tuple[int, int]
"""Places of a cohort and of a figure in `registry.FIGURES`."""
_cohorts: Sequence[Cohort] = ()
"""What a forked process draws: it inherits the frames instead of having them sent."""


def draw_all(cohorts: Sequence[Cohort], folder: Path, say: Callable[[str], None]) -> list[list[DrawnFigure]]:
    """PNG and SVG of every figure into ``folder``; what became of each, by cohort, in the registry's order.

    ``say`` gets a line for each figure that is done.
    """
    tasks = [(i, k) for i in range(len(cohorts)) for k in range(len(registry.FIGURES))]
    drawn: dict[_Task, DrawnFigure] = {}
    for count, (task, figure) in enumerate(_results(cohorts, tasks, folder), start=1):
        drawn[task] = figure
        say(f"figure {count} of {len(tasks)}: {figure.name}, {cohorts[task[0]].title}")
    return [[drawn[i, k] for k in range(len(registry.FIGURES))] for i in range(len(cohorts))]


def _results(cohorts: Sequence[Cohort], tasks: list[_Task], folder: Path) -> Iterator[tuple[_Task, DrawnFigure]]:
    left = list(tasks)
    processes = min(_cores(), _MOST_PROCESSES, len(tasks))
    if sum(len(cohort.frame) for cohort in cohorts) >= _WORTH_ROWS and processes > 1:
        try:
            for task, figure in _by_processes(cohorts, tasks, folder, processes):
                left.remove(task)
                yield task, figure
        except BrokenProcessPool:
            pass  # one was killed, for lack of memory perhaps: this process draws the rest
    for i, k in left:
        yield (i, k), _draw(cohorts[i], registry.FIGURES[k], folder)


def _by_processes(
    cohorts: Sequence[Cohort], tasks: list[_Task], folder: Path, processes: int
) -> Iterator[tuple[_Task, DrawnFigure]]:
    global _cohorts
    _cohorts = cohorts
    try:
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
            with warnings.catch_warnings():
                # Python 3.12 warns of any thread at a fork; Arrow's, the only ones here, are made for it.
                warnings.simplefilter("ignore", DeprecationWarning)
                futures = {pool.submit(_draw_inherited, i, k, folder): (i, k) for i, k in tasks}
            for future in as_completed(futures):
                yield futures[future], future.result()
    finally:
        _cohorts = ()


def _draw_inherited(cohort: int, spec: int, folder: Path) -> DrawnFigure:
    return _draw(_cohorts[cohort], registry.FIGURES[spec], folder)


def _draw(cohort: Cohort, spec: FigureSpec, folder: Path) -> DrawnFigure:
    drawing = DrawnFigure(name=spec.name, section=spec.section, title=spec.title, caption=spec.caption)
    try:
        figure = spec.draw(cohort.frame)
    except style.NothingToDraw as reason:
        return replace(drawing, missing=str(reason))
    if cohort.stamp:  # a picture travels without its page
        figure.suptitle(cohort.stamp, fontsize="small", color="#666666")
    png, svg = (folder / f"{spec.name}-{cohort.slug}.{kind}" for kind in ("png", "svg"))
    style.save(figure, png, svg)
    return replace(drawing, png=png, svg=svg)


def _cores() -> int:
    """Cores that this process may use; 1 where processes cannot be forked."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
