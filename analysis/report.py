"""``python -m analysis.report RESULTS [--out DIR]``: a folder with a page, its figures and its tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from results.errors import InvalidResults, UltrasweepError

if TYPE_CHECKING:
    from analysis.cohorts import Cohort
    from analysis.page import DrawnFigure

_MOST_ROWS = 300
"""Rows of the ranked table that the page shows."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.report",
        description="Draw a report of a sweep, or of every sweep below a folder: index.html, figures/ and tables/.",
    )
    parser.add_argument("results", type=Path, help="a sweep, a folder that holds sweeps, or a Parquet file of attempts")
    parser.add_argument("--out", type=Path, default=Path("report"), help="where the report goes (default: report/)")
    arguments = parser.parse_args(argv)
    try:
        index = build(arguments.results, arguments.out, say=lambda text: print(text, file=sys.stderr, flush=True))
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: cannot write a report into {arguments.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    print(index)
    return 0


def build(results_path: Path, out: Path, *, say: Callable[[str], None] = lambda text: None) -> Path:
    """Write the report of ``results_path`` into ``out``; the path of its ``index.html``.

    ``say`` gets one line for each thing done. Raises `InvalidResults` when there is nothing to read or ``out`` cannot
    be written.
    """
    from analysis import cohorts, page, prose, tables
    from analysis.labels import plural
    from analysis.load import load

    results = load(results_path)
    say(f"{plural(len(results.attempts), 'attempt')} of {plural(len(results.sweeps), 'sweep')} read")
    figures_dir, tables_dir = _prepare(out, page.GENERATOR)
    parts = cohorts.split(results.attempts)
    sections = []
    for cohort in parts:
        frame = cohort.frame
        sections.append(
            page.Section(
                slug=cohort.slug,
                title=cohort.title,
                meaning=cohort.meaning,
                best=prose.what_is_best(frame),
                failed=prose.what_failed(frame),
                trust=prose.how_far_to_trust(frame),
                figures=_draw(cohort, figures_dir, say),
                winners=page.PageTable(*tables.best_rows(frame)),
                ranked=page.PageTable(*tables.ranked_rows(frame, _MOST_ROWS)),
                failures=page.PageTable(*tables.failure_rows(frame)),
            )
        )
    unfinished = prose.unfinished(results)
    empty = [] if len(results.attempts) else ["Nothing has been run yet: there is no attempt to report on."]
    html = page.render(
        page.Page(
            title=f"Sweep report: {results.path.resolve().name}",
            source=str(results_path),
            made_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            version=_version(),
            run=prose.what_was_run(results),
            warnings=[*empty, *([unfinished] if unfinished else []), *results.problems],
            sections=sections,
            rehearsal=prose.rehearsal_check(results.attempts),
            tables=[path.name for path in tables.write_csv(parts, tables_dir)],
        )
    )
    for problem in results.problems:
        say(f"warning: {problem}")
    index = out / "index.html"
    index.write_text(html)
    return index


def _draw(cohort: Cohort, figures_dir: Path, say: Callable[[str], None]) -> list[DrawnFigure]:
    from analysis.figures import registry, style
    from analysis.page import DrawnFigure

    drawn = []
    for number, spec in enumerate(registry.FIGURES, start=1):
        say(f"{cohort.title}: figure {number} of {len(registry.FIGURES)}, {spec.name}")
        drawing = DrawnFigure(name=spec.name, section=spec.section, title=spec.title, caption=spec.caption)
        try:
            figure = spec.draw(cohort.frame)
        except style.NothingToDraw as reason:
            drawn.append(replace(drawing, missing=str(reason)))
            continue
        if cohort.stamp:  # a picture travels without its page
            figure.suptitle(cohort.stamp, fontsize="small", color="#666666")
        png, svg = (figures_dir / f"{spec.name}-{cohort.slug}.{kind}" for kind in ("png", "svg"))
        style.save(figure, png, svg)
        drawn.append(replace(drawing, png=png, svg=svg))
    return drawn


def _prepare(out: Path, generator: str) -> tuple[Path, Path]:
    """The folders for figures and tables. Those of an earlier report are emptied, so that none outlives its data."""
    figures_dir, tables_dir = out / "figures", out / "tables"
    try:
        index = out / "index.html"
        ours = index.is_file() and generator in index.read_text(errors="replace")[:4096]
        for folder, kinds in ((figures_dir, (".png", ".svg")), (tables_dir, (".csv",))):
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.iterdir() if ours else ():
                if old.suffix in kinds:
                    old.unlink()
    except OSError as error:
        raise InvalidResults(f"cannot write a report into {out}: {error.strerror or error}") from None
    return figures_dir, tables_dir


def _version() -> str:
    try:
        return metadata.version("ultrasweep")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
