"""``python -m analysis.report RESULTS [--out DIR]`` writes a folder with a page, its figures and its tables.

RESULTS is a sweep, a folder of sweeps, a Parquet file of attempts, a plan (``plan --out``), or the published table of
the Ultra-Scale Playbook's study (CSV). `analysis.options` has the other options.
"""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from results.errors import UltrasweepError
from results.text.numbers import plural

if TYPE_CHECKING:
    from analysis.figures.spec import FigureSpec
    from analysis.options import Options
    from analysis.rows.cohorts import Cohort

_UNREAD = frozenset({"grad_norms", "device_ids", "peak_allocated_by_stage_bytes", "traffic", "nccl_transports"})
"""Columns of lists that no part of a report reads."""

# Slow imports happen where they are used, so that --help and usage errors answer at once.


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 with the page's path on stdout; 2 with one line for a mistake; 130 after Ctrl-C."""
    # Drawing creates hundreds of thousands of objects, most of them short-lived. Python's default frequency of garbage
    # collection costs a tenth of the time and frees next to nothing.
    gc.set_threshold(100_000, 50, 50)
    try:
        status = _main(argv)
        sys.stdout.flush()
        return status
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; an earlier report is unchanged", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output (head, less) has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _main(argv: Sequence[str] | None) -> int:
    from analysis import options

    asked = options.parse(argv)
    if asked.list_figures:
        print(figure_list())
        return 0
    assert asked.results is not None
    import pyarrow as pa
    from rich.console import Console

    from analysis.page.report_progress import ReportProgress

    pa.set_memory_pool(
        pa.system_memory_pool()
    )  # Arrow's own pools keep what they have freed from the rest of the report
    progress = ReportProgress(Console(stderr=True))
    try:
        with _remembered() as received:

            def step(done: int, total: int, what: str) -> None:
                if received:
                    raise KeyboardInterrupt
                progress.step(done, total, what)

            index = build(asked.results, asked.out, asked.options, say=progress.say, step=step)
    finally:
        progress.clear()
    if (peak := _peak_memory()) is not None:
        print(f"peak memory {peak / 2**20:,.0f} MiB", file=sys.stderr)
    print(index)
    return 0


@contextmanager
def _remembered() -> Iterator[list[int]]:
    """Collect each Ctrl-C beside raising `KeyboardInterrupt`, which Python drops while it frees an object."""
    received: list[int] = []
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield received
        return

    def note(number: int, _frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def build(
    results_path: Path,
    out: Path,
    options: Options | None = None,
    *,
    say: Callable[[str], None] = lambda text: None,
    step: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Path:
    """Write the report of ``results_path`` into ``out``; returns the path of its ``index.html``.

    ``say`` is called with a line for each finished part, ``step`` for each figure. Raises `InvalidResults` if there is
    nothing to read, `InvalidOption` for an unknown figure, and `UnwritableReport` if ``out`` cannot be written; an
    earlier report in ``out`` is then unchanged.
    """
    import pandas as pd

    # Python strings instead of Arrow's: figures take thousands of small selections of rows, which take twice as long
    # with Arrow.
    with pd.option_context("mode.string_storage", "python"):
        return _build(results_path, out, options, say, step)


def _build(
    results_path: Path,
    out: Path,
    options: Options | None,
    say: Callable[[str], None],
    step: Callable[[int, int, str], None],
) -> Path:
    import pyarrow as pa

    from analysis.claims import study as claims
    from analysis.index_page import assemble, report_json
    from analysis.options import Options
    from analysis.page import claims_page, engines_page, export, render, staging, tables
    from analysis.page.draw_figures import Drawing
    from analysis.rows import cohorts
    from analysis.rows.load import load
    from results.tables import store

    options = options or Options()
    specs = _chosen(options)
    results = load(results_path, leave_out=_UNREAD)
    pa.default_memory_pool().release_unused()  # what reading took, which frames do not need
    attempts = plural(len(results.attempts), "attempt")
    say(f"{attempts} of {plural(len(results.sweeps), 'sweep')} read")
    if store.only_shipped(results_path):
        say(f"{results_path} holds no sweep of your own yet: this report shows the sweeps that came with the program")
    for note in results.notes:
        say(note)
    for problem in results.problems:
        say(f"warning: {problem}")
    parts = cohorts.split(results.attempts)
    shown = assemble.with_plan(results, parts)
    earlier = staging.earlier_report(out)
    _compute_shared(parts)
    pa.default_memory_pool().release_unused()  # before processes are forked, which would count it as theirs
    with staging.Staged(out, "a report") as staged:
        with Drawing(parts, specs, staged.figures, options.formats) as drawing:
            scripts = assemble.scripts(assemble.data(results, shown, out, options.price_per_gpu_hour))
            sections = [assemble.section(part) for part in shown]
            checked = claims.table(parts)
            drawn = drawing.collect(step)
            for problem in [one.problem for of in drawn for one in of if one.problem]:
                say(f"warning: {problem}")
        engines = engines_page.tables(results.attempts)
        written = itertools.chain(tables.all_tables(parts, drawn, checked), engines)
        files = export.write(written, staged.tables, options.tables)
        claims_page.write(checked, staged.folder / "claims.html")
        pictures = [[one.figure for one in of] for of in drawn] or [[] for _ in shown]
        words = assemble.page(
            results,
            results_path,
            [replace(section, figures=of) for section, of in zip(sections, pictures, strict=True)],
            checked,
            [path.name for path in files],
            engines_page.side_by_side(results.attempts, staged.figures, options.formats),
        )
        html = render.render(words, scripts)
        (staged.folder / "index.html").write_text(html, encoding="utf-8", errors="replace")
        about = assemble.about(words) | engines_page.records(results.attempts)
        numbers = report_json.write(parts, about, options.price_per_gpu_hour)
        (staged.folder / "report.json").write_text(numbers, encoding="utf-8", errors="replace")
        staged.publish(earlier)
    drawn_figures = sum(one.figure.missing is None for of in drawn for one in of)
    asked = len(parts) * len(specs)
    if asked:
        others = "" if drawn_figures == asked else "; the page says why the others are not"
        say(f"{drawn_figures} of {plural(asked, 'figure')} drawn{others}")
    return out / "index.html"


def _compute_shared(parts: Sequence[Cohort]) -> None:
    """Fill the caches that figures, claims and sentences share, before processes are forked: they inherit the
    results."""
    from analysis.rows import answer, choice_costs, metrics, pairs, winners

    for part in parts:
        answer.of_every_cell(part.frame)
        metrics.best_configurations(part.frame)
        pairs.candidates(part.frame)
        for rule in winners.RULES:
            winners.best_by(part.frame, rule)
        choice_costs.table(part.frame)


def figure_list() -> str:
    """Lines with the name, section and title of every figure."""
    from analysis.figures.registry import FIGURES

    widths = [max(len(part) for part in column) for column in zip(*((s.name, s.section) for s in FIGURES), strict=True)]
    return "\n".join(f"{s.name:{widths[0]}}  {s.section:{widths[1]}}  {s.title}" for s in FIGURES)


def _chosen(options: Options) -> list[FigureSpec]:
    from analysis.figures.registry import priced
    from analysis.options import choose

    specs = priced(options.price_per_gpu_hour)
    if options.figures is None:
        return list(specs)
    choose(options.figures, [spec.name for spec in specs])
    return [spec for spec in specs if spec.name in options.figures]


def _peak_memory() -> int | None:
    """Highest resident memory in bytes of this process and of its largest child; None if the system does not report
    it."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


if __name__ == "__main__":
    sys.exit(main())
