"""Puts the page together: what Python writes on each part of the results, the rows, and the scripts that show them."""

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
from analysis.page.render import Page, PageTable, Parts, Section, SideBySide, source
from analysis.rows import cohorts
from analysis.rows.cohorts import Cohort
from analysis.rows.load import Results
from results.text.numbers import plural

_OWN = (
    *("words", "noise", "part", "answer", "planned", "state", "finder", "map", "ten"),
    *("why", "cost", "failed", "folds", "main"),
)
"""Scripts of the page in the order in which they need each other; the last one starts it."""
_BOOT = ("page/data.js", "explorer/late_scripts.js", "page/boot.js")
"""The only scripts that stand in the page as they are: they unpack the others."""


def with_plan(results: Results, parts: Sequence[Cohort]) -> list[Cohort]:
    """The parts of the page: ``parts``, or of a plan of which nothing has run its points."""
    if parts or results.ledger.empty:
        return list(parts)
    return [plan_rows.cohort(results.ledger)]


def section(part: Cohort) -> Section:
    """What the page says of a part; its figures are drawn meanwhile."""
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


def data(results: Results, parts: Sequence[Cohort], folder: Path, price: float | None) -> dict[str, Any]:
    """What the scripts get: the rows of all parts, and of each part what `page_data` has. ``folder`` is the page's."""
    rows = runs.page_data(results, row_data.table(parts), parts, folder)
    return rows | {"page": page_data.of_parts(results, parts, price)}


def scripts(embedded: dict[str, Any]) -> Parts:
    """Styles, scripts and data of the page."""
    whole = [name for name in runs.SCRIPTS if name not in _BOOT] + [f"page/{name}.js" for name in _OWN]
    return Parts(
        styles=[source(name) for name in ("page/colours.css", "page/page.css", *runs.STYLES)],
        scripts=[source(name) for name in _BOOT],
        late={"page-scripts": deflated("\n".join(source(name) for name in whole)), "data": deflated(embedded)},
        runs=runs.late(),
    )


def page(
    results: Results,
    source_path: Path,
    sections: list[Section],
    claims: pd.DataFrame,
    files: list[str],
    engines: SideBySide | None = None,
) -> Page:
    """The page's words. ``claims`` is the study's on these rows, ``files`` are names under ``tables/``,
    ``engines`` says what several of them made of the same layouts."""
    empty = [] if len(results.attempts) else ["Nothing has been run yet: there is no attempt to report on."]
    if empty and sections:
        empty[0] += " What follows is what the plan predicts."
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
    """The same for ``report.json``."""
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
    """How many of the study's claims hold, our audits of it apart; None when no claim was asked of these rows."""
    if claims.empty:
        return None
    own = claims["source"] == STUDY
    counts = claims.loc[own, "verdict"].value_counts()
    holds, fails = int(counts.get(PASS, 0)), int(counts.get(FAIL, 0))
    told = f"Of {plural(int(own.sum()), 'claim')} of the study {holds:,} hold on these rows, {fails:,} do not and "
    open_ones = int(own.sum()) - holds - fails
    return f"{told}{open_ones:,} cannot be decided; {plural(int((~own).sum()), 'audit')} of our own stand apart."


def version() -> str:
    try:
        return metadata.version("ultrasweep")
    except metadata.PackageNotFoundError:
        return "(not installed)"
