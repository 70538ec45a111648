"""The rule for the values of each axis of a grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from workloads.spec.activations.offload import canonical_offload
from workloads.spec.checks import Values, one_of, texts, whole_numbers
from workloads.spec.engine_versions import ENGINE_VERSIONS, ENGINES
from workloads.spec.experiment_values import FIELDS, is_number
from workloads.spec.recomputation import MUST, canonical_recompute

AUTO = "auto"
"""Word of the axes in `CHOSEN`: the planner chooses the value."""
CHOSEN = ("recompute", "activation_offload")
"""Axes that the planner can choose: what every stage recomputes, and which activations wait on the host."""
BUDGET = "memory_budget"
"""Axis of the memory of a device, in GiB, that a point may take, with what is reserved on it."""

AXES: Mapping[str, Values] = {
    **FIELDS,
    "recompute": dataclasses.replace(
        FIELDS["recompute"],
        accepts=lambda value: value == AUTO or FIELDS["recompute"].accepts(canonical_recompute(value)),
        must=f"auto, {MUST}",
        choices=(AUTO, *FIELDS["recompute"].choices),
    ),
    "activation_offload": dataclasses.replace(
        FIELDS["activation_offload"],
        accepts=lambda value: value == AUTO or FIELDS["activation_offload"].accepts(canonical_offload(value, None)),
        must=f"auto, {FIELDS['activation_offload'].must}",
    ),
    BUDGET: Values(
        accepts=lambda value: value is None or is_number(value, 0.001),
        must="a number of GiB above 0, or null",
    ),
    "gradient_accumulation_fusion": Values(
        accepts=lambda value: value is None or isinstance(value, bool), must="true, false or null (as usual)"
    ),
    "model": texts(),
    **dict.fromkeys(("dp", "world_size", "num_microbatches", "tokens_per_step"), whole_numbers(1)),
    "engine": one_of(*ENGINES, is_text=True),
    "engine_version": one_of(*(version for versions in ENGINE_VERSIONS.values() for version in versions), is_text=True),
}
"""Rules by the names of axes. They are narrower than `FIELDS`: not everything that is stored can be run."""

FRACTIONAL = frozenset(name for name, rule in AXES.items() if rule.accepts(0.5) or rule.accepts(1.5))
"""Axes of shares and ratios. A derived value of any other name must be whole."""
