"""``plan --json``: the plan as one JSON document; docs/json.md has its fields."""

from __future__ import annotations

from collections.abc import Sequence

from results.text.json_document import json_document
from sweep.planning.best_layouts import Order, listed
from sweep.planning.facts import plan_facts, point_facts
from sweep.planning.plan import Plan
from sweep.planning.summary import cannot_run_here
from workloads.spec.experiment import to_dict

VERSION = 1
"""Version of the document. It rises when a field changes its meaning or goes; new fields may come."""


def plan_json(
    plan: Plan, devices_here: int, *, top: int | None = None, order: Order | None = None, verdicts: Sequence[str] = ()
) -> str:
    """The plan as JSON text, with the points that `sweep.planning.best_layouts.print_best` would list; what is unknown
    is null.

    ``devices_here``: GPUs of this machine.
    """
    families = listed(plan, top=top, order=order, verdicts=verdicts)
    facts = plan_facts(plan)
    here = cannot_run_here(plan, devices_here)
    points = [
        {
            **point_facts(first, plan),
            "variants": [other.experiment.id for other in others],
            "experiment": to_dict(first.experiment),
        }
        for first, *others in families
    ]
    fields = {**facts, "notes": [*facts["notes"], *([here] if here is not None else [])], "listed": points}
    return json_document("plan", VERSION, fields)
