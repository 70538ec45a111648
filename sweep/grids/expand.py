"""Expands a grid to its points, in plain Python: depth first over the axes.

A derived value or a filter is evaluated right after the last axis it needs, and a branch ends as soon as one of them
rules it out. So a grid whose full product has millions of combinations costs only what its layouts cost. Points that
are the same run (see `Experiment.canonical`) appear once. Every combination of the axes is accounted for: it is a
point, a duplicate, not sampled, or dropped by a named condition or derived value.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from results.text.numbers import plural
from sweep.grids.axes import AUTO, BUDGET, CHOSEN
from sweep.grids.columns import field_of, shape_of
from sweep.grids.grid import CHECKED_FIELDS, GridAxis, GridSpec
from sweep.grids.walk import MISTAKES, PROGRESS_EVERY, Progress, Values, Walk, silent
from workloads.rules.installed_engines import version_here
from workloads.spec.errors import InvalidExperiment, InvalidSweep
from workloads.spec.experiment import ENGINE, Experiment
from workloads.spec.model_spec import ModelSpec
from workloads.spec.pipeline_stages import canonical_stages

_log = logging.getLogger(__name__)
_REPLACEABLE = {
    field.name: field.default
    for field in dataclasses.fields(Experiment)
    if field.name in ("zero_stage", "pp_schedule", "virtual_stages", "pp_split", "sequence_parallel", "cp_kind", "etp")
    or field.name in ("pp_stages", "pad_vocab_to", "cuda_graph", "gradient_accumulation_fusion")
    or field.name in ("document_balance", "routing", "routing_imbalance", "capacity_factor", "recompute_every")
    or field.name == "recurrence"
}
"""Fields that `Experiment.canonical` replaces where they have no effect, with their defaults."""


@dataclass(frozen=True, slots=True)
class GridPoint:
    grid: str
    experiment: Experiment
    budget_gib: float | None = None
    """Memory of a device that it may take, with what is reserved on it, in GiB; None: all of it."""
    autos: tuple[str, ...] = ()
    """Axes of `CHOSEN` that the planner is to choose; until then the experiment has ``none``
    (`sweep.planning.auto_recompute`)."""
    chosen: str | None = None
    """What was chosen and why; None: nothing was."""
    fits: bool = True
    """False if no choice fits the budget; ``chosen`` says it in numbers."""
    fallbacks: tuple[str, ...] = ()
    """Why something was to be chosen and is none, or fits with no choice; without numbers of this point."""


class _Wanted(NamedTuple):
    """A point of one grid; two that are equal are the same run."""

    experiment: Experiment
    budget_gib: float | None
    autos: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    points: tuple[GridPoint, ...]
    duplicates: int
    """Combinations left out because an earlier one is the same run."""
    not_sampled: int
    """Combinations left out by subsampling."""
    combinations: int = 0
    """Number of combinations of the axes' values."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Combinations left out by each derived value that was no whole number (``derive.dp``) and by each condition
    (``where.small``, ``--where 'tp <= 4'``)."""


def expand_all(grids: Sequence[GridSpec], models: Callable[[str], ModelSpec], progress: Progress = silent) -> Expansion:
    """The points of several grids, one grid after the other. A run that two grids share belongs to the first."""
    seen: dict[_Wanted, GridPoint] = {}
    duplicates = not_sampled = combinations = 0
    dropped: Counter[str] = Counter()
    for grid in grids:
        expansion = expand(grid, models, progress)
        duplicates += expansion.duplicates
        not_sampled += expansion.not_sampled
        combinations += expansion.combinations
        dropped.update(expansion.dropped)
        for point in expansion.points:
            wanted = _Wanted(point.experiment, point.budget_gib, point.autos)
            duplicates += wanted in seen
            seen.setdefault(wanted, point)
    return Expansion(
        points=tuple(seen.values()),
        duplicates=duplicates,
        not_sampled=not_sampled,
        combinations=combinations,
        dropped=dict(dropped),
    )


def expand(grid: GridSpec, models: Callable[[str], ModelSpec], progress: Progress = silent) -> Expansion:
    """All points of one grid, in the order of its axes. ``models`` returns the model of a name.

    Raises `InvalidSweep` when no point is left, when one of the world sizes has no layout at all, or when a variable of
    the grid contradicts its points.
    """
    shapes = {name: models(str(name)) for axis in grid.axes for name in _model_names(axis)}
    walk = Walk(grid, {name: shape_of(model) for name, model in shapes.items()}, progress=progress)
    combinations = walk.run()
    walk.refuse_sizes_without_layout()
    dropped = walk.dropped()
    points = _experiments(grid, walk.kept, shapes, _in_sampling_order(grid, combinations))
    sample_size = grid.subsample.count if grid.subsample else None
    chosen: dict[_Wanted, int] = {}
    duplicates = failed = 0
    for done, (position, wanted) in enumerate(points):
        if not done % PROGRESS_EVERY:
            progress("points checked", done, len(combinations))
        if (place := _failed_condition(grid, wanted.experiment)) is not None:
            dropped[place] += 1
            failed += 1
        elif wanted in chosen:
            duplicates += 1
        else:
            chosen[wanted] = position
            if len(chosen) == sample_size:
                break
    if not chosen:
        of = plural(walk.total, "combination")
        raise InvalidSweep(f"grid {grid.name}: no point is left of {of}; {ruled_out(dropped)}")
    ordered = sorted(chosen, key=chosen.__getitem__)
    for line in _without_effect(grid, [wanted.experiment for wanted in ordered]):
        _log.warning("%s", line)
    return Expansion(
        points=tuple(GridPoint(grid.name, *wanted) for wanted in ordered),
        duplicates=duplicates,
        not_sampled=len(combinations) - len(chosen) - duplicates - failed,
        combinations=walk.total,
        dropped=dict(dropped),
    )


def ruled_out(dropped: Mapping[str, int]) -> str:
    """Lists how many combinations each condition dropped, most first: ``ruled out by derive.dp (no whole number): 12,
    ...``."""
    named = [
        f"{place}{' (no whole number of at least 1)' if place.startswith('derive.') else ''}: {count:,}"
        for place, count in Counter(dropped).most_common()
        if count
    ]
    return f"ruled out by {', '.join(named)}"


def _without_effect(grid: GridSpec, points: Sequence[Experiment]) -> Iterator[str]:
    """A line for each axis none of whose values is in any point, because the points replace them (a schedule without a
    pipeline)."""
    for axis in grid.axes:
        for column, name in enumerate(axis.names):
            values = {row[column] for row in axis.rows}
            if name == "pp_stages":
                values = {canonical_stages(text) if isinstance(text, str) else text for text in values}
            if name not in _REPLACEABLE or not values.isdisjoint((None, _REPLACEABLE[name])):  # null: as usual
                continue
            if not any(getattr(point, name) in values for point in points):
                listed = ", ".join(map(str, sorted(values, key=str)))
                has = getattr(points[0], name)
                yield f"grid {grid.name}: {name}={listed} has no effect in any point; the points have {name}={has}"


def _contradiction(name: str, value: Any, experiment: Experiment) -> str:
    """The message about a computed value that the fields of its point do not have."""
    has = getattr(experiment, name)
    if name != "dp":
        return f"{name}={value}, but {experiment.id} has {has}; derive the other degrees from {name}"
    return (
        f"dp={value}, but dp_replicate={experiment.dp_replicate} and dp_shard={experiment.dp_shard} make {has}; give "
        f"dp_replicate={value} (ZeRO 0) or dp_shard={value} (ZeRO 1 to 3) instead of dp, or derive them from dp"
    )


def _failed_condition(grid: GridSpec, experiment: Experiment) -> str | None:
    """The first condition on a whole point that the experiment does not meet."""
    for place, condition in grid.where_point.items():
        try:
            met = condition.evaluate({name: field_of(experiment, name) for name in condition.names})
        except MISTAKES as error:
            raise InvalidSweep(f"grid {grid.name}: {place}: {error}") from None
        if not met:
            return place
    return None


def _model_names(axis: GridAxis) -> Iterator[str]:
    if "model" in axis.names:
        column = axis.names.index("model")
        yield from (str(row[column]) for row in axis.rows)


def _in_sampling_order(grid: GridSpec, combinations: list[Values]) -> Iterable[tuple[int, Values]]:
    """Combinations with their positions: in grid order, or shuffled by the seed of the grid's subsample."""
    if grid.subsample is None:
        return enumerate(combinations)
    positions = list(range(len(combinations)))
    random.Random(grid.subsample.seed).shuffle(positions)
    return ((position, combinations[position]) for position in positions)


def _experiments(
    grid: GridSpec, names: tuple[str, ...], models: Mapping[str, ModelSpec], combinations: Iterable[tuple[int, Values]]
) -> Iterator[tuple[int, _Wanted]]:
    checked = CHECKED_FIELDS.intersection(names)
    if {"dp_replicate", "dp_shard"} & set(names):
        checked |= {"dp"} & set(names)  # dp is then a variable of the grid, not a field of the experiment
    if "global_batch_size" not in names:
        raise InvalidSweep(f"grid {grid.name}: global_batch_size is missing; add it as an axis or derive it")
    for position, values in combinations:
        fields = dict(zip(names, values, strict=True))
        given = {name: fields[name] for name in checked}
        fields["model"] = models[fields["model"]]
        budget, autos = fields.pop(BUDGET, None), tuple(name for name in CHOSEN if fields.get(name) == AUTO)
        fields |= dict.fromkeys(autos, "none")
        if "engine_version" not in fields and (version := version_here(fields.get("engine", ENGINE))) is not None:
            fields["engine_version"] = version
        try:
            experiment = Experiment.canonical(**{k: v for k, v in fields.items() if k not in checked})
        except InvalidExperiment as error:
            raise InvalidSweep(f"grid {grid.name}: {error}") from None
        for name, value in given.items():
            if value != getattr(experiment, name):
                raise InvalidSweep(f"grid {grid.name}: {_contradiction(name, value, experiment)}")
        yield position, _Wanted(experiment, budget if budget is None else float(budget), autos)
