"""The explorer as a page of its own: every row of a report, filtered, plotted, selected and explained, offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.explorer import parts, row_data
from analysis.page.embed import deflated
from analysis.page.render import environment, source
from analysis.rows.cohorts import Cohort
from analysis.rows.load import Results

_STYLES = ("page/colours.css", "explorer/explorer_page.css", *parts.STYLES)


def write(results: Results, cohorts: Sequence[Cohort], path: Path) -> Path:
    """Write the explorer of ``results``, split into ``cohorts``, to ``path``; returns ``path``.

    Raises `OSError` when it cannot be written.
    """
    data = parts.page_data(results, row_data.table(cohorts), cohorts, path.parent)
    path.write_text(render(results.path.resolve().name, data), encoding="utf-8", errors="replace")
    return path


def render(name: str, data: dict[str, Any]) -> str:
    """The page for ``data`` (see `parts.page_data`)."""
    return (
        environment()
        .get_template("explorer/explorer.html")
        .render(
            name=name,
            styles=[source(style) for style in _STYLES],
            runs=parts.late(),
            scripts=[source(script) for script in (*parts.SCRIPTS, "explorer/explorer_page.js")],
            data=deflated(data),
        )
    )
