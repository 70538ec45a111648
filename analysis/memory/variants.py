"""Layouts that no row has: a finished run with one choice changed, or its axes added one after another.

Only layouts that satisfy the planner's rules (`workloads.rules.layout_rules`) are made; this engine may be unable to
run them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from workloads.rules.layout_rules import layout_violations
from workloads.spec.experiment import Experiment

STANDARD_DP = 8
"""Number of data-parallel ranks over which ZeRO stages are compared if the run has only one rank."""
STANDARD_DEGREE = 2
"""Degree of an axis that the run does not use, where all axes are shown together."""
STANDARD_STAGE = 3


def variant(base: Experiment, axis: str, value: Any, *, sequence_parallel: bool | None = None) -> Experiment | None:
    """``base`` with one choice changed and everything else kept, including its micro-batches; None for an impossible
    layout.

    ``axis`` is a name of `analysis.memory.families.AXES`. The global batch follows the data-parallel degree. Along
    ``dp`` all ranks form one shard group; other axes keep the replicas of HSDP.
    """
    if axis == "zero":
        return _possible(base, dp=base.dp if base.dp > 1 else STANDARD_DP, zero_stage=value)
    if axis == "dp":
        return _possible(base, dp=value, zero_stage=base.zero_stage, dp_replicate=1)
    changes = {axis: value}
    if sequence_parallel is not None:
        changes["sequence_parallel"] = sequence_parallel
    return _possible(base, **changes)


def steps_to_all(target: Experiment, *, same_batch: bool) -> list[tuple[str, Experiment]]:
    """Steps (added axis, layout) from one device to every axis at once; each step keeps the axes before it.

    Degrees are the target's if it uses an axis, otherwise `STANDARD_DEGREE` (ZeRO: `STANDARD_STAGE`). Experts come
    last, if the model has them. With ``same_batch`` the global batch is kept, otherwise the number of micro-batches.
    Impossible steps are left out.
    """
    dp = target.dp if target.dp > 1 else STANDARD_DEGREE
    stage = target.zero_stage or STANDARD_STAGE
    degree = {
        axis: used if (used := getattr(target, axis)) > 1 else STANDARD_DEGREE for axis in ("tp", "pp", "cp", "ep")
    }
    alone = {"dp": 1, "zero_stage": 0, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "virtual_stages": 1}
    added: list[tuple[str, dict[str, Any]]] = [
        ("one\ndevice", {}),
        (f"+ dp\n{dp}", {"dp": dp}),
        (f"+ ZeRO\n{stage}", {"zero_stage": stage}),
        (f"+ tp\n{degree['tp']}", {"tp": degree["tp"]}),
        (f"+ pp\n{degree['pp']}", {"pp": degree["pp"], "virtual_stages": target.virtual_stages}),
        (f"+ cp\n{degree['cp']}", {"cp": degree["cp"]}),
    ]
    if target.model.moe is not None:
        added.append((f"+ ep\n{degree['ep']}", {"ep": degree["ep"]}))
    result, layout = [], alone
    for name, change in added:
        if (experiment := _possible(target, same_batch, **(layout | change))) is not None:
            layout = layout | change
            result.append((name, experiment))
    return result


def _possible(base: Experiment, same_batch: bool = False, **changes: Any) -> Experiment | None:
    fields = {field.name: getattr(base, field.name) for field in dataclasses.fields(base)} | changes
    dp = fields.pop("dp", base.dp)
    if "dp" in changes:
        replicas = fields["dp_replicate"] if dp == base.dp and base.dp_shard > 1 else 1
        fields["dp_replicate"], fields["dp_shard"] = (replicas, dp // replicas) if fields["zero_stage"] else (dp, 1)
    if not same_batch:
        fields["global_batch_size"] = dp * fields["micro_batch_size"] * base.num_microbatches
    if base.gradient_accumulation_fusion:
        fields["gradient_accumulation_fusion"] = None  # where the variant can have it
    e = Experiment.canonical(**fields)
    return None if layout_violations(e) else e
