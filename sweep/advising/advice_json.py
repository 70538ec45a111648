"""``advise --json``: the answer as one JSON document; docs/json.md has its fields."""

from __future__ import annotations

from results.text.json_document import json_document
from sweep.advising.answer import Advice
from sweep.advising.facts import advice_facts, goal_of, layouts_of, published_of, sizes_of
from workloads.spec.experiment import to_dict

VERSION = 1
"""Version of the document. It rises when a field changes its meaning or goes; new fields may come."""


def advice_json(advice: Advice) -> str:
    """The answer as JSON text; what is unknown is null."""
    layouts, goal = (
        [
            {**numbers, "experiment_id": ranked.experiment.id, "experiment": to_dict(ranked.experiment)}
            for ranked, numbers in rows
        ]
        for rows in (layouts_of(advice), goal_of(advice))
    )
    published = [
        {**numbers, "experiment_id": one.experiment.id, "experiment": to_dict(one.experiment)}
        for one, numbers in published_of(advice)
    ]
    asked = advice.question.goal
    fields = {
        **advice_facts(advice),
        "sizes": sizes_of(advice),
        "layouts": layouts,
        "published": published,
        "tokens": asked.tokens if asked is not None else None,
        "days": asked.days if asked is not None else None,
        "goal": goal if asked is not None else None,
    }
    return json_document("advise", VERSION, fields)
