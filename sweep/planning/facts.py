"""A plan as plain values with units in their names, for JSON and for the Python interface."""

from __future__ import annotations

from typing import Any

from results.tables.schema import VERDICTS
from sweep.grids.columns import PREDICTED
from sweep.planning.mfu import mfu_note, predicted_mfu
from sweep.planning.plan import Plan
from sweep.planning.point_verdict import PlannedPoint, may_not_fit
from sweep.planning.summary import (
    by_shape,
    eager_points,
    expected_hours,
    fallbacks,
    formats_not_run,
    layout,
    on_hosts,
    rehearsals_of,
    reused_from,
    worst_hours,
)
from sweep.predicting.narrowed import Narrowed
from sweep.predicting.power import Amount, Power
from workloads.rules.engine_kinds import lacking_kinds


def plan_facts(plan: Plan) -> dict[str, Any]:
    """What holds for the whole plan: its points by verdict and rule, its jobs and its price. None: unknown."""
    config = plan.config
    hours = expected_hours(plan.to_run)
    energy = plan.power.mwh(hours) if hours is not None else Amount(None, None)
    formats = [f"{precision} matrix products" for precision in formats_not_run(plan)]
    lacking = {model.name: [*lacking_kinds(model), *formats] for model in config.models.values()}
    notes = [reused_from(plan), *eager_points(plan), *fallbacks(plan), *on_hosts(plan), rehearsals_of(plan)]
    notes.append(mfu_note((p.experiment.precision for p in plan.points if p.time is not None), config.cluster))
    return {
        "name": config.name,
        "grids": [grid.name for grid in config.grids],
        "cluster": config.cluster.name,
        "device": config.cluster.device.name,
        "limit_bytes": config.cluster.usable_bytes,
        "launcher": config.launcher_kind,
        "method": plan.method,
        "combinations": plan.combinations,
        "left_out": {place: count for place, count in plan.dropped.items() if count},
        "left_out_without_prediction": plan.unpredicted,
        "duplicates": plan.duplicates,
        "not_sampled": plan.not_sampled,
        "points": len(plan.points),
        "verdicts": {verdict: plan.counts[verdict] for verdict in VERDICTS},
        "rules": dict(plan.broken_rules.most_common()),
        "may_not_fit": sum(map(may_not_fit, plan.to_run)),
        "engine_lacks": {model: kinds for model, kinds in lacking.items() if kinds},
        "predicted_with": plan.predicted_with or None,
        **narrowed_facts(plan.narrowed),
        "budget_gpu_hours": config.budget_gpu_hours,
        "expected_gpu_hours": hours,
        "worst_gpu_hours": worst_hours(plan.to_run),
        **power_facts(plan.power),
        "expected_energy_mwh": energy.measured,
        "expected_energy_at_most_mwh": energy.most,
        "jobs": [
            {
                "nodes": key.nodes,
                "gpus": key.devices,
                "points": len(points),
                "expected_gpu_hours": expected_hours(points),
                "worst_gpu_hours": worst_hours(points),
            }
            for key, points in by_shape(plan).items()
        ],
        "notes": [note for note in notes if note],
    }


def narrowed_facts(narrowed: Narrowed | None) -> dict[str, Any]:
    """Half-widths of the intervals of step times, with the measurements and without. None: nothing was measured."""
    return {
        "half_interval": narrowed.with_measurements if narrowed is not None else None,
        "half_interval_unmeasured": narrowed.without if narrowed is not None else None,
    }


def power_facts(power: Power) -> dict[str, Any]:
    """The power of one device by which energy is counted: measured, and its limit. None: not known."""
    measured = power.measured
    return {
        "power_w": measured.mean_w if measured is not None else None,
        "power_rows": measured.rows if measured is not None else 0,
        "power_limit_w": power.limit_w,
    }


def point_facts(point: PlannedPoint, plan: Plan) -> dict[str, Any]:
    """One point with its verdict and its predictions, by the names of the ledger's columns. None: not predicted."""
    e, energy = point.experiment, plan.power.joules_per_token(point.tokens_per_s_per_gpu)
    return {
        "experiment_id": e.id,
        "model": e.model.name,
        "world_size": e.world_size,
        "layout": layout(e),
        "grid": point.grid,
        "verdict": point.verdict,
        "rule": point.rule,
        "detail": point.detail,
        "broken": [{"rule": one.rule, "message": one.message} for one in point.broken],
        "may_not_fit": may_not_fit(point) if point.peak_bytes is not None and point.limit_bytes else None,
        **{name: value(point) for name, value in PREDICTED.items()},
        "predicted_mfu": predicted_mfu(
            e.model, e.attended_length, e.precision, point.tokens_per_s_per_gpu, plan.config.cluster
        ),
        "attention_imbalance": e.attention_imbalance,
        "predicted_energy_per_token_j": energy.measured,
        "predicted_energy_per_token_at_most_j": energy.most,
    }
