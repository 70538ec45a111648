"""The explorer: every row of a report in one page that filters, plots, selects and explains them, offline.

The page is ``templates/explorer/``: one HTML file with its styles and scripts, plotly and the rows inlined.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from analysis.explorer import failed_logs, row_data
from analysis.explorer.model_data import models_json
from analysis.page.render import environment, source
from analysis.rows.cohorts import Cohort
from analysis.rows.load import Results

_SCRIPTS = (
    *("model_costs.js", "memory_rules.js", "memory_model.js", "memory_form.js", "memory.js"),
    *("pipeline_model.js", "schedule.js"),
    *("columns.js", "filters.js", "plot.js", "table.js", "rerun.js", "panel.js", "address.js", "main.js"),
)
"""In the order in which they need each other; the last one starts the page, the others only define."""
_STYLES = ("explorer.css", "widgets.css")


def write(results: Results, cohorts: Sequence[Cohort], path: Path) -> Path:
    """Write the explorer of ``results``, split into ``cohorts``, to ``path``; returns ``path``.

    Raises `OSError` when it cannot be written.
    """
    frame = row_data.table(cohorts)
    data = row_data.encode(frame, cohorts) | {
        "source": str(results.path),
        "logs": failed_logs.tails(results.path, frame),
        "widget": models_json(results.attempts if len(results.attempts) else results.ledger),
    }
    path.write_text(render(results.path.resolve().name, data), encoding="utf-8", errors="replace")
    return path


def render(name: str, data: dict[str, Any]) -> str:
    """The page for ``data`` (see `row_data.encode`)."""
    return (
        environment()
        .get_template("explorer/explorer.html")
        .render(
            name=name,
            styles=[source(f"explorer/{name}") for name in _STYLES],
            plotly=get_plotlyjs(),
            scripts=[source(f"explorer/{name}") for name in _SCRIPTS],
            data=embeddable(data),
        )
    )


def embeddable(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever texts it holds."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
