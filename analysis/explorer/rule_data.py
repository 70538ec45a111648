"""The planner's rules as JSON, which the page's memory view evaluates, so that no rule is written twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from results.errors import UltrasweepError
from workloads.rules import layout_rules as rules
from workloads.rules.derived_values import DERIVED
from workloads.spec import experiment_values, model_spec
from workloads.spec.checks import whole_number
from workloads.spec.expressions import Template, as_data
from workloads.spec.model_relations import RELATIONS


def rules_json() -> dict[str, Any]:
    """Plain data for the page (``data.widget.rules``). Expressions have the form of
    `workloads.spec.expressions.as_data`.

    ``derived``: pairs of a name and its expression, each of which may use the earlier ones. ``lacking`` and ``rules``:
    entries with ``rule``, ``scope``, ``broken`` (an expression) and ``message`` (a list in which texts and expressions
    alternate). ``refusals``: checks of a user's model and of the constructor of an experiment, which come first.
    """
    return {
        "derived": [[name, as_data(expression)] for name, expression in DERIVED.items()],
        "lacking": _described(rules.LACKING),
        "rules": _described(rules.RULES),
        "refusals": {
            "model_sizes": list(model_spec.MODEL_SIZES),
            "counts": list(experiment_values.COUNTS),
            "not_a_count": _not_a_count_message(),
            "heads_do_not_divide": model_spec.HEADS_DO_NOT_DIVIDE,
            "relations": [
                {"broken": as_data(relation.broken), "message": _message(relation.message)} for relation in RELATIONS
            ],
        },
    }


class _Placeholder:
    def __repr__(self) -> str:
        return "{value}"


def _not_a_count_message() -> str:
    """Error message of a constructor for a value that is not a count, with ``label``, ``field`` and ``value`` in
    braces."""
    try:
        whole_number("{label}: {field}", _Placeholder(), 1)
    except UltrasweepError as error:
        return str(error)
    raise AssertionError("a placeholder is no number")


def _described(stated: Sequence[rules.Rule]) -> list[dict[str, Any]]:
    return [
        {
            "rule": rule.name,
            "scope": rule.scope,
            "broken": as_data(rule.broken),
            "message": _message(rule.message),
        }
        for rule in stated
    ]


def _message(template: Template) -> list[Any]:
    return [part if isinstance(part, str) else as_data(part) for part in template.parts]
