"""``python -m analysis.report RESULTS [--out DIR]``: a folder with a page, its figures and its tables.

RESULTS is a sweep, a folder of sweeps, a Parquet file of attempts, or the published table of the Ultra-Scale
Playbook's study (CSV).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from results.errors import InvalidResults, UltrasweepError

_WHAT = (
    "a sweep, a folder that holds sweeps, a Parquet file of attempts, or bench_final2_mfu2.csv of the Hugging Face "
    "dataset nanotron/ultrascale-playbook-data"
)
_MOST_ROWS = 300
"""Rows of the ranked table that the page shows."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m analysis.report",
        description="Draw a report of a sweep, of every sweep below a folder, or of the Ultra-Scale Playbook's "
        "published table: index.html, figures/ and tables/.",
    )
    parser.add_argument("results", type=Path, help=_WHAT)
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
    if (peak := _peak_memory()) is not None:
        print(f"peak memory {peak / 2**20:,.0f} MiB", file=sys.stderr)
    print(index)
    return 0


def build(results_path: Path, out: Path, *, say: Callable[[str], None] = lambda text: None) -> Path:
    """Write the report of ``results_path`` into ``out``; the path of its ``index.html``.

    ``say`` gets one line for each thing done. Raises `InvalidResults` when there is nothing to read or ``out`` cannot
    be written.
    """
    from analysis import claims, cohorts, drawing, page, prose, tables
    from analysis.labels import plural
    from analysis.load import load

    results = load(results_path)
    say(f"{plural(len(results.attempts), 'attempt')} of {plural(len(results.sweeps), 'sweep')} read")
    figures_dir, tables_dir = _prepare(out, page.GENERATOR)
    parts = cohorts.split(results.attempts)
    drawn = drawing.draw_all(parts, figures_dir, say)
    sections = []
    for cohort, figures in zip(parts, drawn, strict=True):
        frame = cohort.frame
        sections.append(
            page.Section(
                slug=cohort.slug,
                title=cohort.title,
                meaning=cohort.meaning,
                best=prose.what_is_best(frame),
                failed=prose.what_failed(frame),
                trust=prose.how_far_to_trust(frame),
                figures=figures,
                winners=page.PageTable(*tables.best_rows(frame)),
                ranked=page.PageTable(*tables.ranked_rows(frame, _MOST_ROWS)),
                failures=page.PageTable(*tables.failure_rows(frame)),
            )
        )
    checked = claims.table(parts)
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
            claims=page.PageTable(*tables.claim_rows(checked)),
            tables=[path.name for path in tables.write_csv(parts, checked, tables_dir)],
        )
    )
    for problem in results.problems:
        say(f"warning: {problem}")
    index = out / "index.html"
    index.write_text(html)
    return index


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


def _peak_memory() -> int | None:
    """Highest resident memory in bytes of this process and of the largest it started; None where it is not told."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _version() -> str:
    try:
        return metadata.version("ultrasweep")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
