"""Conditions on layouts (``advise --where``), in the language of grids over a point's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sweep.grids.columns import POINT_NAMES, PREDICTED_NAMES, check_comparisons, field_of
from sweep.grids.walk import MISTAKES
from workloads.spec.checks import suggest
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment
from workloads.spec.expressions import Expression, parse

OF_GROUPS = frozenset({"recompute", "recompute_every", "pp_schedule", "virtual_stages", "cp_kind"})
"""Names whose values the layouts of a family do not share, and those of a group do."""
OF_LAYOUTS = OF_GROUPS | {"dp_replicate", "dp_shard", "gradient_accumulation_fusion", "seed"}
"""Names whose values the layouts of a family do not share."""


def conditions_of(texts: Sequence[str]) -> tuple[Expression, ...]:
    """Parses conditions. Raises `InvalidSweep` for a mistake, an unknown name, or the name of a prediction."""
    conditions = tuple(parse(text, "advise: --where") for text in texts)
    for name in sorted({name for one in conditions for name in one.names} - POINT_NAMES):
        if name in PREDICTED_NAMES:
            raise InvalidSweep(f"advise: --where: {name} is a prediction; conditions here are on a layout's fields")
        raise InvalidSweep(f"advise: --where: no name {name!r}{suggest(name, sorted(POINT_NAMES))}")
    for one in conditions:
        check_comparisons(f"advise: --where '{one.text}'", one)
    return conditions


def meets(experiment: Experiment, conditions: Sequence[Expression]) -> bool:
    """Whether a layout meets all conditions."""
    return all(holds(one, {name: field_of(experiment, name) for name in one.names}) for one in conditions)


def holds(condition: Expression, values: Mapping[str, Any]) -> bool:
    """Whether a condition holds for these values. Raises `InvalidSweep` if it cannot be evaluated."""
    try:
        return bool(condition.evaluate(values))
    except MISTAKES as error:
        raise InvalidSweep(f"advise: --where '{condition.text}': {error}") from None
