"""Scripts, styles and data of the section "Every run", for the page that embeds it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.explorer import closed_forms, failed_logs, row_data, row_series, traces
from analysis.explorer.model_data import models_json
from analysis.page.embed import deflated
from analysis.page.render import compact_script, source
from analysis.rows.cohorts import Cohort
from analysis.rows.load import LoadedResults

SCRIPTS = (
    *("page/data.js", "explorer/late_scripts.js", "explorer/update_fields.js", "explorer/columns.js"),
    *("explorer/address.js", "explorer/filters.js"),
    *("explorer/plot_points.js", "explorer/plot_colours.js", "explorer/plot.js", "explorer/table.js"),
    *("explorer/csv.js", "explorer/axes.js", "explorer/rerun.js", "explorer/row_experiment.js", "explorer/bars.js"),
    *("explorer/panel.js", "explorer/drawer.js", "explorer/view_state.js", "explorer/runs.js"),
)
"""Scripts below ``templates/`` in dependency order; they only define functions and classes."""
STYLES = ("explorer/runs.css", "explorer/drawer.css", "explorer/widgets.css")
CHART = "vendor/echarts.min.js"
PYTHON = "explorer/python.js"
"""What the translated closed forms need of Python."""
MODELS = (
    *("explorer/memory_rules.js", "explorer/memory_model.js"),
    *("explorer/memory_form.js", "explorer/memory.js", "explorer/memory_steps.js", "explorer/pipeline_measured.js"),
    "explorer/schedule.js",
)
"""Scripts of the memory and pipeline views, which run, after the closed forms, when one of these is first opened."""


@cache
def late() -> dict[str, str]:
    """Variable ``runs`` of ``explorer/runs.html``: the deflated scripts ``echarts`` and ``models``."""
    models = [compact_script(PYTHON), closed_forms.page_script(), *map(compact_script, MODELS)]
    return {"echarts": deflated(source(CHART)), "models": deflated("\n".join(models))}


def page_data(results: LoadedResults, frame: pd.DataFrame, cohorts: Sequence[Cohort], folder: Path) -> dict[str, Any]:
    """``data`` of the page in ``folder``: the rows of ``frame`` (see `row_data.table`), logs, traces, lists, shapes."""
    return row_data.encode(frame, cohorts) | {
        "source": str(results.path),
        "logs": failed_logs.tails(results.path, frame),
        "traces": traces.links(results.path, frame, folder),
        "series": row_series.series(results.path, frame),
        "widget": models_json(results.attempts if len(results.attempts) else results.ledger),
    }
