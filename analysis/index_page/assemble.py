"""Assembly of the page: the sentences and tables on each part of the results, the rows, and the scripts that show
them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.claims.verdicts import FAIL, PASS, STUDY
from analysis.explorer import parts as runs
from analysis.explorer import plan_rows, row_data
from analysis.index_page import headlines, page_data
from analysis.page import sentences, tables
from analysis.page.embed import deflated
from analysis.page.render import Page, PageTable, Parts, Section, SideBySide, compact_script, compact_style
from analysis.rows import cohorts
from analysis.rows.cohorts import Cohort
from analysis.rows.load import LoadedResults
from results.text.numbers import plural

_OWN = (
    *("words", "noise", "part", "answer", "planned", "state", "finder", "map", "ten"),
    *("why", "cost", "failed", "folds", "main"),
)
"""Scripts of the page in dependency order; the last one starts it."""
_BOOT = ("page/data.js", "explorer/late_scripts.js", "page/boot.js")
"""The only scripts stored uncompressed in the page: they unpack the others."""


def with_plan(results: LoadedResults, parts: Sequence[Cohort]) -> list[Cohort]:
    """The parts of the page: ``parts``; for a plan without attempts, its points."""
    if parts or results.ledger.empty:
        return list(parts)
    return [plan_rows.cohort(results.ledger)]


def section(part: Cohort) -> Section:
    """Sentences and tables on one part of the page; its figures are drawn in parallel."""
    frame = part.frame
    if part.slug == plan_rows.SLUG:
        nothing = PageTable([], [], 0)
        return Section(
            *(part.slug, part.title, part.meaning, [], [], [], [], [], [], []), winners=nothing, failures=nothing
        )
    return Section(
        slug=part.slug,
        title=part.title,
        meaning=part.meaning,
        cautions=cohorts.cautions(frame),
        headlines=headlines.of_part(part),
        best=sentences.what_is_best(frame),
        failed=sentences.what_failed(frame),
        facts=headlines.trust(part),
        trust=sentences.how_far_to_trust(frame),
        figures=[],
        winners=PageTable(*tables.best_rows(frame)),
        failures=PageTable(*tables.failure_rows(frame)),
    )


def data(results: LoadedResults, parts: Sequence[Cohort], folder: Path, price: float | None) -> dict[str, Any]:
    """Data for the scripts: the rows of all parts, and `page_data` of each part. ``folder`` is the page's."""
    rows = runs.page_data(results, row_data.table(parts), parts, folder)
    return rows | {"page": page_data.of_parts(results, parts, price)}


def scripts(embedded: dict[str, Any]) -> Parts:
    """Styles, scripts and data of the page."""
    whole = [name for name in runs.SCRIPTS if name not in _BOOT] + [f"page/{name}.js" for name in _OWN]
    return Parts(
        styles=[compact_style(name) for name in ("page/colours.css", "page/page.css", *runs.STYLES)],
        scripts=[compact_script(name) for name in _BOOT],
        late={"page-scripts": deflated("\n".join(map(compact_script, whole))), "data": deflated(embedded)},
        runs=runs.late(),
    )


def page(
    results: LoadedResults,
    source_path: Path,
    sections: list[Section],
    claims: pd.DataFrame,
    files: list[str],
    engines: SideBySide | None = None,
) -> Page:
    """The words of the page. ``claims`` is the table of the study's claims on these rows, ``files`` are names under
    ``tables/``, ``engines`` compares several training engines on the same layouts."""
    empty = [] if len(results.attempts) else ["Nothing has been run yet: there is no attempt to report on."]
    if empty and sections:
        empty[0] += " The page shows what the plan predicts."
    unfinished = None if results.path.is_file() else sentences.unfinished(results)
    name = results.path.resolve().name
    return Page(
        title=f"Sweep report: {name}",
        name=name,
        source=str(source_path),
        made_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=version(),
        run=[*sentences.what_was_run(results), *results.notes],
        warnings=[*empty, *([unfinished] if unfinished else []), *results.problems],
        sections=sections,
        rehearsal=sentences.rehearsal_check(results.attempts),
        claims=claims_in_words(claims),
        tables=files,
        engines=engines,
    )


def about(words: Page) -> dict[str, Any]:
    """Facts on the whole report for ``report.json``."""
    return {
        "title": words.title,
        "source": words.source,
        "made_at": words.made_at,
        "version": words.version,
        "run": words.run,
        "warnings": words.warnings,
        "rehearsals_beside_runs": words.rehearsal,
        "tables": words.tables,
    }


def claims_in_words(claims: pd.DataFrame) -> str | None:
    """How many of the study's claims hold, and the number of our audits; None if no claim was checked on these rows."""
    if claims.empty:
        return None
    of_study = claims["source"] == STUDY
    counts = claims.loc[of_study, "verdict"].value_counts()
    holds, fails = int(counts.get(PASS, 0)), int(counts.get(FAIL, 0))
    asked, audits = plural(int(of_study.sum()), "claim"), plural(int((~of_study).sum()), "audit")
    open_ones = int(of_study.sum()) - holds - fails
    return (
        f"Of {asked} of the study {holds:,} hold on these rows, {fails:,} do not and {open_ones:,} cannot be decided; "
        f"{audits} of our own {'is' if audits.startswith('1 ') else 'are'} listed separately."
    )


def version() -> str:
    try:
        return metadata.version("ultrasweep")
    except metadata.PackageNotFoundError:
        return "(not installed)"
