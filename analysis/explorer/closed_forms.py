"""The planner's closed forms as a script of the page, translated from their Python sources when a page is written.

``python -m analysis.explorer.closed_forms`` prints the script.
"""

from __future__ import annotations

import re
from functools import cache

from analysis.to_javascript.bundle import translated
from analysis.to_javascript.modules import NotPortable

VARIABLE = "ClosedForms"
"""Name of the script's only global; it holds the definitions below by their names in Python."""
_SCHEDULE, _MEMORY = "workloads.costs.shape.schedule", "workloads.costs.memory"
DEFINITIONS = (
    *(("workloads.spec.experiment", "Experiment"), ("workloads.spec.model_spec", "ModelSpec")),
    ("workloads.spec.pipeline_stages", "written_stages"),
    ("workloads.costs.shape.held_model", "as_held"),
    ("workloads.rules.rule_values", "recompute_values"),
    ("workloads.costs.shape.params", "num_params"),
    *(("workloads.costs.shape.partition", name) for name in ("MIXED", "experiment_stages", "part_of_experiment")),
    *((_SCHEDULE, name) for name in ("INTERLEAVED", "SPLIT_BACKWARD", "V_SHAPED", "_SCHEDULES", "held")),
    *((_SCHEDULE, name) for name in ("microbatches_in_flight", "schedule_actions", "stage_at")),
    *((f"{_MEMORY}.events", name) for name in ("TENSORS", "highest", "live_at")),
    *((f"{_MEMORY}.sizes", "Part"), (f"{_MEMORY}.sizes", "Shared"), (f"{_MEMORY}.estimate", "timelines_of")),
    (f"{_MEMORY}.saved_parts", "saved_by_part"),
    ("workloads.costs.time.pipeline", "simulate"),
)
"""Functions, classes and constants that scripts of the page use, each as (module, name); what these use comes along."""
KINDS = ("workloads.spec.layer_kinds.layer_list", "PARTS")
"""Classes of a layer's parts by their names in files and rows."""
MEMBERS = ("dp", "num_microbatches", "world_size", "num_layers", "multi_token_modules", "empty_stage")
"""Methods and properties that scripts of the page use."""


@cache
def page_script() -> str:
    """The script for a page, without the space that only a reader needs."""
    lines = "\n".join(filter(None, map(str.strip, script().split("\n"))))
    return re.sub(r"([{(\[,;])\n", r"\1", lines)


@cache
def script(*, comments: bool = False) -> str:
    """The script, which defines `VARIABLE`; it uses ``templates/explorer/python.js``. ``comments``: whether definitions
    begin with the first sentence of their docstring."""
    return translated(VARIABLE, DEFINITIONS, MEMBERS, tags=KINDS, comments=comments)


if __name__ == "__main__":
    try:
        print(script(comments=True))
    except NotPortable as refusal:
        raise SystemExit(str(refusal)) from None
