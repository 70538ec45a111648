"""Prints a plan: verdicts, rules broken, jobs by shape and price. Its best points are in
`sweep.planning.best_layouts`."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from results.tables.schema import VERDICTS
from results.text.numbers import (
    device_noun,
    format_bytes,
    format_hours,
    name_documents,
    name_routing,
    plural,
)
from results.text.terminal import plain_table
from sweep.composing.planned_only import planned_only
from sweep.grids.expand import ruled_out
from sweep.planning.plan import Plan
from sweep.planning.point_verdict import PlannedPoint, may_not_fit
from sweep.planning.price import JobShape, shape
from workloads.contract.stages import rehearsed_ranks
from workloads.costs.shape.schedule import INTERLEAVED
from workloads.rules.captured_steps import not_captured
from workloads.rules.engine_kinds import lacking_kinds
from workloads.spec.engine_versions import capture_word
from workloads.spec.experiment import ENGINE, ENGINE_VERSION, Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS

_USUAL_SEED = next(field.default for field in dataclasses.fields(Experiment) if field.name == "seed")
MEANING = {
    "run": "will be run",
    "invalid": "break a rule",
    "predicted_oom": "are predicted not to fit in memory",
    "cached": "have a finished attempt and are not run again",
    "over_budget": "are not covered by the budget",
}


def print_plan(plan: Plan, console: Console) -> None:
    """Print the summary: number of points and combinations, verdicts, jobs and price."""
    config = plan.config
    grids = ", ".join(grid.name for grid in config.grids)
    excluded = [plural(plan.duplicates, "duplicate")] if plan.duplicates else []
    excluded += [f"{plan.not_sampled:,} by subsampling"] if plan.not_sampled else []
    note = f"; excluded: {', '.join(excluded)}" if excluded else ""
    console.print(f"[bold]{config.name}[/]: {len(plan.points):,} points of {grids}{note}", highlight=False)
    if plan.dropped and any(plan.dropped.values()):
        unknown = f" ({plan.unpredicted:,} of them have no prediction)" if plan.unpredicted else ""
        combinations_line = f"{plan.combinations:,} combinations; {ruled_out(plan.dropped)}{unknown}"
        console.print(combinations_line, highlight=False, markup=False)
    console.print(
        f"cluster {config.cluster.name} ({config.cluster.device.name}), launcher {config.launcher_kind} "
        f"({plan.method}), {config.measure.in_words} steps a point",
        highlight=False,
    )
    if plan.predicted_with:
        narrowed = f"; step times {plan.narrowed.in_words}" if plan.narrowed is not None else ""
        console.print(f"{plan.predicted_with}{narrowed}", highlight=False, markup=False)
    for model in plan.config.models.values():
        if lacking := lacking_kinds(model):
            note = f"{model.name} cannot be run yet: the engine lacks {'; '.join(lacking)}"
            console.print(note, highlight=False, markup=False)
    for precision in formats_not_run(plan):
        note = f"precision={precision} cannot be run yet: the engine lacks {precision} matrix products"
        console.print(note, highlight=False, markup=False)
    console.print(_verdicts(plan))
    if reused := reused_from(plan):
        console.print(reused, highlight=False, markup=False)
    for line in eager_points(plan):
        console.print(line, highlight=False, markup=False)
    for line in [*fallbacks(plan), *on_hosts(plan)]:
        console.print(line, highlight=False, markup=False)
    if (rehearsals := rehearsals_of(plan)) is not None:
        console.print(rehearsals, highlight=False, markup=False)
    if plan.to_run:
        print_jobs(plan, console)


def print_jobs(plan: Plan, console: Console) -> None:
    """Print the points to run by the size of their allocations, with their price."""
    console.print(_shapes(plan))


def cannot_run_here(plan: Plan, devices: int) -> str | None:
    """One line if nothing can run all points of a plan: no engine on the plan's devices or, for the local launcher, a
    machine with this many GPUs; otherwise None."""
    config = plan.config
    if (why := planned_only(config.cluster)) is not None:
        return why
    if config.launcher_kind != "local" or plan.method != "measured" or config.cluster.backend != "cuda":
        return None
    sizes = [point.experiment.world_size for point in plan.to_run]
    able = sum(size <= devices for size in sizes)
    if able == len(sizes):
        return None
    has = plural(devices, "GPU") if devices else "no GPU"
    least, most = min(sizes), max(sizes)
    needed = plural(most, "GPU") if least == most else f"{least:,} to {most:,} GPUs"
    share = f"{able:,} of {plural(len(sizes), 'point')}" if able else "none of them"
    return f"this machine has {has} and can run {share} ({needed} each); launcher=slurm or launcher=rehearse can"


def rehearsals_of(plan: Plan) -> str | None:
    """One line on the number of ranks to rehearse; None if the points are measured."""
    needed = [point for point in plan.to_run if point.rehearsals is not None]
    if not needed:
        return None
    alone = sum(len(rehearsed_ranks(point.experiment)) for point in needed)
    count = sum(point.rehearsals or 0 for point in needed)
    saved = f" ({alone:,} if equal stages of several points were not shared)" if alone > count else ""
    tp = {point.experiment.tp > 1 for point in needed}
    ranked = "; times with tp > 1 depend on modelled communication and are not ranked against tp = 1"
    return f"{plural(count, 'rehearsal')} for {plural(len(needed), 'point')}{saved}{ranked if len(tp) > 1 else ''}"


def eager_points(plan: Plan) -> list[str]:
    """One line for each reason why steps of points are not captured, although ``cuda_graph=auto`` allows it and the
    devices have graphs."""
    if plan.method != "measured" or (backend := plan.config.cluster.backend) != "cuda":
        return []
    experiments = [point.experiment for point in plan.to_run if point.experiment.engine == ENGINE]
    few = plan.config.measure.too_few_to_capture
    reasons = Counter(not_captured(one, backend) or few for one in experiments if one.cuda_graph == "auto")
    return [f"{plural(count, 'point')} with eager steps: {why}" for why, count in reasons.most_common() if why]


def fallbacks(plan: Plan) -> list[str]:
    """One line for each reason why something that the planner was to choose is none, or fits with no choice, with the
    number of points."""
    reasons = Counter(reason for point in plan.points if not point.broken for reason in point.fallbacks)
    return [f"{plural(count, 'point')}: {reason}" for reason, count in reasons.most_common()]


def on_hosts(plan: Plan) -> list[str]:
    """Lines on optimizers and activations on the host: the memory of a node that they need and what it has, and rates
    without which their steps have no predicted time."""
    cluster = plan.config.cluster
    points = [point for point in plan.points if point.host_memory_bytes]
    if not points:
        return []
    fields = {
        "optimizer_offload": any(point.experiment.optimizer_offload for point in points),
        "activation_offload": any(point.experiment.activation_offload != "none" for point in points),
    }
    named = " or ".join(name for name, is_there in fields.items() if is_there)
    most = format_bytes(max(point.host_memory_bytes or 0 for point in points))
    has, many = cluster.host.memory_bytes, plural(len(points), "point")
    known = (
        f"a node of {cluster.name} has {format_bytes(has)}"
        if has is not None
        else (f"the memory of a node is not known, so it is not checked (host.memory_bytes of cluster {cluster.name})")
    )
    lines = [f"{many} with {named}: up to {most} of the host's memory on a node; {known}"]
    if cluster.host.link_bandwidth is None and any(point.time is None for point in points):
        lines.append(f"no step time with {named}: the file of cluster {cluster.name} lacks host.link_bandwidth")
    return lines


def reused_from(plan: Plan) -> str | None:
    """One line that names the other sweeps whose rows the plan uses (``plan.reuse=true``); None if it uses none."""
    sweeps = Counter(point.cached_sweep for point in plan.points if point.cached_sweep not in (None, plan.config.name))
    if not sweeps:
        return None
    named = ", ".join(f"{sweep} ({count:,})" for sweep, count in sweeps.most_common())
    return f"rows of other sweeps used instead of a run (plan.reuse=true): {named}"


def workload(experiment: Experiment) -> str:
    """Model, routing unless it is balanced, packed documents, and engine with its version unless it is this one."""
    routing = name_routing(experiment.routing, experiment.routing_imbalance, experiment.capacity_factor)
    engine = experiment.engine, experiment.engine_version
    other = "" if engine == (ENGINE, ENGINE_VERSION) else " ".join(engine)
    parts = experiment.model.name, routing, name_documents(experiment.documents), other
    return ", ".join(part for part in parts if part)


def layout(experiment: Experiment) -> str:
    """A layout in one cell of a table: its degrees, and its choices that differ from the defaults."""
    parts = [f"dp {experiment.dp}"]
    if experiment.dp_replicate > 1 and experiment.zero_stage:
        parts = [f"dp {experiment.dp_replicate}x{experiment.dp_shard}"]
    parts += [
        f"{axis} {getattr(experiment, axis)}"
        for axis in ("tp", "cp", "pp", "ep", "etp")
        if getattr(experiment, axis) > 1
    ]
    if experiment.cp > 1 and experiment.cp_kind != "ring":
        parts.append(experiment.cp_kind)
    if experiment.tp > 1 and not experiment.sequence_parallel:
        parts.append("no sequence parallelism")
    if experiment.pp > 1 and experiment.pp_split != "balanced":
        parts.append(f"{experiment.pp_split.replace('_', ' ')} split")
    if experiment.pp_stages is not None:
        parts.append(f"stages {experiment.pp_stages}")
    if experiment.pp > 1 and experiment.pp_schedule != "1f1b":
        parts.append(experiment.pp_schedule.replace("_", " "))
        if experiment.pp_schedule in INTERLEAVED:
            parts[-1] += f" v{experiment.virtual_stages}"
    parts.append(f"mbs {experiment.micro_batch_size} x {experiment.num_microbatches}")
    if experiment.zero_stage:
        parts.append(f"ZeRO {experiment.zero_stage}")
    if experiment.recompute != "none":
        every = f" every {experiment.recompute_every}" if experiment.recompute_every > 1 else ""
        parts.append(f"recompute {experiment.recompute}{every}")
    if experiment.activation_offload != "none":
        parts.append(f"activations offloaded {experiment.activation_offload}")
    if experiment.precision != "bf16":
        parts.append(experiment.precision)
    if experiment.attention != "auto":
        parts.append(f"{experiment.attention} attention")
    if experiment.recurrence != "torch":
        parts.append(f"{experiment.recurrence} recurrences")
    if experiment.compile != "none":
        parts.append("compiled")
    if word := capture_word(experiment.cuda_graph, experiment.engine, experiment.engine_version):
        parts.append(word)
    if word := experiment.fusion_word:
        parts.append(word)
    parts += experiment.update_words
    if experiment.pad_vocab_to is not None:
        parts.append(f"vocabulary padded to {experiment.pad_vocab_to}")
    if experiment.seq_len != 4096:
        parts.append(f"seq {experiment.seq_len}")
    if experiment.document_balance != "none":
        parts.append(f"{experiment.document_balance} documents")
    if experiment.seed != _USUAL_SEED:
        parts.append(f"seed {experiment.seed}")
    return ", ".join(parts)


def formats_not_run(plan: Plan) -> list[str]:
    """Precisions of points to run whose matrix products the engine lacks."""
    return sorted({point.experiment.precision for point in plan.to_run} & {*PLANNED_FORMATS})


def _verdicts(plan: Plan) -> Table:
    table = plain_table()
    for name, justify in (("verdict", "left"), ("points", "right"), ("", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    counts = plan.counts
    rules = plan.broken_rules
    lacking = [model.name for model in plan.config.models.values() if lacking_kinds(model)] + formats_not_run(plan)
    for verdict in VERDICTS:
        if counts[verdict]:
            refused = verdict == "run" and lacking
            meaning = f"keep the rules and fit, but run refuses {', '.join(lacking)}" if refused else MEANING[verdict]
            if verdict == "invalid" and rules.total() > counts[verdict]:
                meaning += "; one that breaks several counts for each"
            table.add_row(verdict, f"{counts[verdict]:,}", meaning)
            if verdict == "run" and (tight := sum(map(may_not_fit, plan.to_run))):
                margin = f"within plan.oom_margin={plan.config.plan.oom_margin:g}"
                table.add_row("", f"{counts[verdict] - tight:,}", "  should fit", style="dim")
                table.add_row("", f"{tight:,}", f"  may not fit: above the memory of a device, {margin}", style="dim")
            if verdict == "invalid":
                for rule, count in rules.most_common():
                    table.add_row("", f"{count:,}", f"  {rule}", style="dim")
    return table


def by_shape(plan: Plan) -> dict[JobShape, list[PlannedPoint]]:
    """The points to run by the size of their allocations, smallest first."""
    shapes: dict[JobShape, list[PlannedPoint]] = defaultdict(list)
    for point in plan.to_run:
        shapes[shape(point.experiment, plan.method, plan.config.cluster)].append(point)
    return {key: shapes[key] for key in sorted(shapes, key=lambda key: (key.nodes, key.devices))}


def _shapes(plan: Plan) -> Table:
    table = plain_table(title="", show_footer=True)
    unit = device_noun(plan.config.cluster.backend)
    table.add_column("jobs by shape", footer="total")
    table.add_column("points", justify="right", footer=f"{len(plan.to_run):,}")
    table.add_column(f"expected {unit}-h", justify="right", footer=format_hours(expected_hours(plan.to_run)))
    table.add_column(f"worst {unit}-h", justify="right", footer=format_hours(worst_hours(plan.to_run)))
    table.add_column("expected h", justify="right")
    for key, points in by_shape(plan).items():
        expected = expected_hours(points)
        wall = expected / key.devices if expected is not None else None
        name = f"{plural(key.nodes, 'node')}, {plural(key.devices, unit)}"
        table.add_row(
            name, f"{len(points):,}", format_hours(expected), format_hours(worst_hours(points)), format_hours(wall)
        )
    budget = plan.config.budget_gpu_hours
    if budget is not None:
        table.caption = f"budget.gpu_hours={budget:g}"
        table.caption_justify = "left"
    return table


def expected_hours(points: Iterable[PlannedPoint]) -> float | None:
    """Expected device-hours of all points; None if a step time of one is not predicted."""
    total = 0.0
    for point in points:
        if point.price is None or point.price.expected_h is None:
            return None
        total += point.price.expected_h
    return total


def worst_hours(points: Iterable[PlannedPoint]) -> float:
    """Device-hours if every point uses its whole deadline."""
    return sum(point.price.worst_h for point in points if point.price is not None)
