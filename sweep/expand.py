"""From a grid to its points, in plain Python: depth first over the axes.

A derived value or a filter is evaluated right after the last axis it needs, and a branch ends as soon as one of them
rules it out. So a grid whose full product has millions of combinations costs only what its layouts cost. Points that
are the same run (see `Experiment.canonical`) appear once.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sweep.grid import CHECKED_FIELDS, POINT_FIELDS, SHAPE_NAMES, Axis, GridSpec, shape_of
from workloads.errors import InvalidExperiment, InvalidSweep
from workloads.experiment import Experiment, ModelSpec
from workloads.expressions import Expression

MAX_POINTS = 5_000_000
"""A grid with more combinations than this after its filters is refused: its experiments would not fit in memory."""

_HINT_LIMIT_S = 1.0
"""How long to search for a world size that works, for the message about one that does not."""

Values = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class GridPoint:
    grid: str
    experiment: Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    points: tuple[GridPoint, ...]
    duplicates: int
    """Combinations left out because an earlier one is the same run."""
    not_sampled: int
    """Combinations left out by subsampling."""


def expand_all(grids: Sequence[GridSpec], models: Callable[[str], ModelSpec]) -> Expansion:
    """The points of several grids, one grid after the other. A run that two grids share belongs to the first."""
    seen: dict[Experiment, GridPoint] = {}
    duplicates = not_sampled = 0
    for grid in grids:
        expansion = expand(grid, models)
        duplicates += expansion.duplicates
        not_sampled += expansion.not_sampled
        for point in expansion.points:
            duplicates += point.experiment in seen
            seen.setdefault(point.experiment, point)
    return Expansion(points=tuple(seen.values()), duplicates=duplicates, not_sampled=not_sampled)


def expand(grid: GridSpec, models: Callable[[str], ModelSpec]) -> Expansion:
    """All points of one grid, in the order of its axes. ``models`` returns the model of a name.

    Raises `InvalidSweep` when no point is left, when one of the world sizes has no layout at all, or when a variable of
    the grid contradicts its points.
    """
    shapes = {name: models(str(name)) for axis in grid.axes for name in _model_names(axis)}
    search = _Search(grid, {name: shape_of(model) for name, model in shapes.items()})
    combinations = search.run()
    search.refuse_empty(combinations)
    points = _experiments(grid, search.kept, shapes, _in_sampling_order(grid, combinations))
    sample_size = grid.subsample.count if grid.subsample else None
    chosen: dict[Experiment, int] = {}
    duplicates = 0
    for position, experiment in points:
        if experiment in chosen:
            duplicates += 1
        else:
            chosen[experiment] = position
            if len(chosen) == sample_size:
                break
    ordered = sorted(chosen, key=chosen.__getitem__)
    return Expansion(
        points=tuple(GridPoint(grid.name, experiment) for experiment in ordered),
        duplicates=duplicates,
        not_sampled=len(combinations) - len(chosen) - duplicates,
    )


def _model_names(axis: Axis) -> Iterator[str]:
    if "model" in axis.names:
        column = axis.names.index("model")
        yield from (str(row[column]) for row in axis.rows)


def _in_sampling_order(grid: GridSpec, combinations: list[Values]) -> Iterable[tuple[int, Values]]:
    """Combinations with their positions: in the order of the grid, or shuffled by the seed of its subsample."""
    if grid.subsample is None:
        return enumerate(combinations)
    positions = list(range(len(combinations)))
    random.Random(grid.subsample.seed).shuffle(positions)
    return ((position, combinations[position]) for position in positions)


def _experiments(
    grid: GridSpec, names: tuple[str, ...], models: Mapping[str, ModelSpec], combinations: Iterable[tuple[int, Values]]
) -> Iterator[tuple[int, Experiment]]:
    checked = CHECKED_FIELDS.intersection(names)
    dropped = set(checked)
    if {"dp_replicate", "dp_shard"} & set(names):
        dropped.add("dp")  # it is then a variable of the grid and no field of the experiment
    for position, values in combinations:
        fields = dict(zip(names, values, strict=True))
        given = {name: fields[name] for name in checked}
        fields["model"] = models[fields["model"]]
        try:
            experiment = Experiment.canonical(**{k: v for k, v in fields.items() if k not in dropped})
        except InvalidExperiment as error:
            raise InvalidSweep(f"grid {grid.name}: {error}") from None
        except TypeError:
            raise InvalidSweep(
                f"grid {grid.name}: global_batch_size is missing; add it as an axis or derive it"
            ) from None
        for name, value in given.items():
            if value != getattr(experiment, name):
                raise InvalidSweep(
                    f"grid {grid.name}: {name}={value}, but {experiment.id} has {getattr(experiment, name)}; "
                    f"derive the other degrees from {name}"
                )
        yield position, experiment


class _Found(Exception):
    pass


@dataclass(slots=True)
class _Search:
    """Depth-first walk over the axes of one grid."""

    grid: GridSpec
    shapes: Mapping[str, Mapping[str, Any]]
    kept: tuple[str, ...] = ()
    """Names whose values make up a combination."""
    sizes_seen: set[Any] = field(default_factory=set)
    not_whole: Counter[tuple[Any, str]] = field(default_factory=Counter)
    """How many branches ended because a derived value was no whole number of at least 1, by (world size, its name)."""
    filtered: Counter[str] = field(default_factory=Counter)
    found: list[Values] = field(default_factory=list)
    sought_size: int | None = None
    """If given, the search only asks whether this world size has a point, and raises `_Found` at the first one."""

    def run(self) -> list[Values]:
        grid = self.grid
        names = (*grid.axis_names, *grid.derive)
        self.kept = tuple(name for name in names if name in POINT_FIELDS or name in CHECKED_FIELDS)
        self._visit(tuple(self._steps()))({})
        return self.found

    def _steps(self) -> Iterator[tuple[str, str, Any]]:
        """``(kind, name, what)`` in the order of evaluation: each axis, then all expressions that need no later one."""
        bound: set[str] = set()
        derive, where = dict(self.grid.derive), dict(self.grid.where)
        for axis in self.grid.axes:
            yield "axis", ", ".join(axis.names), axis
            bound.update(axis.names)
            if "model" in axis.names:
                bound.update(SHAPE_NAMES)
            progress = True
            while progress:
                progress = False
                for key in [key for key, expression in where.items() if expression.names <= bound]:
                    yield "where", key, where.pop(key)
                for key in [key for key, expression in derive.items() if expression.names <= bound]:
                    yield "derive", key, derive.pop(key)
                    bound.add(key)
                    progress = True
        if derive:
            ring = ", ".join(sorted(derive))
            raise InvalidSweep(f"grid {self.grid.name}: {ring} cannot be derived, because each needs another of them")

    def _visit(self, steps: tuple[tuple[str, str, Any], ...]) -> Callable[[dict[str, Any]], None]:
        if not steps:
            return self._emit
        (kind, name, what), rest = steps[0], self._visit(steps[1:])
        if kind == "axis":
            return self._over(what, rest)
        return self._filter(name, what, rest) if kind == "where" else self._bind(name, what, rest)

    def _emit(self, env: dict[str, Any]) -> None:
        if self.sought_size is not None and env.get("world_size") == self.sought_size:
            raise _Found
        self.found.append(tuple([env[name] for name in self.kept]))
        if len(self.found) > MAX_POINTS:
            raise InvalidSweep(f"grid {self.grid.name}: more than {MAX_POINTS:,} points; narrow its axes")

    def _over(self, axis: Axis, rest: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
        with_shape = [
            {**(self.shapes[str(values["model"])] if "model" in values else {}), **values}
            for values in (dict(zip(axis.names, row, strict=True)) for row in axis.rows)
        ]
        sees_size = "world_size" in axis.names

        def visit(env: dict[str, Any]) -> None:
            for values in with_shape:
                env.update(values)
                if sees_size:
                    self.sizes_seen.add(env["world_size"])
                rest(env)
            if sees_size:  # branches that end further out must not be counted under the last size
                del env["world_size"]

        return visit

    def _bind(
        self, name: str, derived: Expression, rest: Callable[[dict[str, Any]], None]
    ) -> Callable[[dict[str, Any]], None]:
        evaluate = derived.evaluate
        is_size = name == "world_size"

        def visit(env: dict[str, Any]) -> None:
            value = self._value(evaluate, env, f"derive.{name}")
            if isinstance(value, float):
                value = int(value) if value.is_integer() else None
            if value is None or (isinstance(value, int) and not isinstance(value, bool) and value < 1):
                self.not_whole[env.get("world_size"), name] += 1
                return
            env[name] = value
            if is_size:
                self.sizes_seen.add(value)
            rest(env)
            if is_size:
                del env[name]

        return visit

    def _filter(
        self, name: str, condition: Expression, rest: Callable[[dict[str, Any]], None]
    ) -> Callable[[dict[str, Any]], None]:
        evaluate = condition.evaluate

        def visit(env: dict[str, Any]) -> None:
            if self._value(evaluate, env, f"where.{name}"):
                rest(env)
            else:
                self.filtered[name] += 1

        return visit

    def _value(self, evaluate: Callable[[Mapping[str, Any]], Any], env: Mapping[str, Any], place: str) -> Any:
        try:
            return evaluate(env)
        except (TypeError, ZeroDivisionError, OverflowError) as error:
            raise InvalidSweep(f"grid {self.grid.name}: {place}: {error}") from None

    def refuse_empty(self, combinations: list[Values]) -> None:
        """Raise `InvalidSweep` when no combination is left, or none of a world size that the user asked for."""
        if "world_size" in self.kept:
            column = self.kept.index("world_size")
            alive = {values[column] for values in combinations}
            for size in sorted(self.sizes_seen - alive):
                cut = {name: count for (at, name), count in self.not_whole.items() if at == size}
                # A size that only the filters rule out is what the user asked for.
                if cut and not _has_layout(dataclasses.replace(self.grid, where={}), self.shapes, size):
                    raise InvalidSweep(self._no_layout(size, cut))
        if not combinations:
            cuts = self.filtered + Counter({f"derive.{name}": n for (_, name), n in self.not_whole.items()})
            most = ", ".join(f"{name} ({count:,})" for name, count in cuts.most_common(3))
            raise InvalidSweep(f"grid {self.grid.name}: no point is left; most combinations were ruled out by {most}")

    def _no_layout(self, size: Any, cut: Mapping[str, int]) -> str:
        name = max(cut, key=cut.__getitem__)
        values = {axis.names[0]: axis.rows for axis in self.grid.axes if len(axis.names) == 1}
        needed = sorted(self.grid.derive[name].names - {"world_size"})
        where = ", ".join(
            f"{key} in [{', '.join(str(row[0]) for row in values[key])}]" for key in needed if key in values
        )
        formula = f"{name} = {self.grid.derive[name].text}"
        works = _working_sizes(self.grid, self.shapes, size)
        hint = f"; world_size={' or '.join(map(str, works))} works" if works else ""
        return (
            f"grid {self.grid.name}: no layout divides world_size={size}: {formula} is never a whole number "
            f"for {where or 'any point'}{hint}"
        )


def _working_sizes(grid: GridSpec, shapes: Mapping[str, Mapping[str, Any]], size: int) -> list[int]:
    """The nearest world sizes below and above that have a layout; none when world_size is no axis of its own."""
    if not any(axis.names == ("world_size",) for axis in grid.axes):
        return []
    works = []
    until = time.monotonic() + _HINT_LIMIT_S
    for candidates in (range(size - 1, 0, -1), range(size + 1, 2 * size + 1)):
        for candidate in candidates:
            if _has_layout(grid, shapes, candidate):
                works.append(candidate)
                break
            if time.monotonic() > until:
                break
    return works


def _has_layout(grid: GridSpec, shapes: Mapping[str, Mapping[str, Any]], size: int) -> bool:
    """Whether the grid has a point of this world size (its filters included)."""
    axes = tuple(
        dataclasses.replace(axis, rows=((size,),)) if axis.names == ("world_size",) else axis for axis in grid.axes
    )
    try:
        _Search(dataclasses.replace(grid, axes=axes), shapes, sought_size=size).run()
    except _Found:
        return True
    return False
