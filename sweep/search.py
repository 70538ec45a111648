"""The walk over the axes of one grid: depth first, with every derived value and condition as early as it is known.

A branch that ends counts for all combinations below it, so that every combination of the axes is accounted for.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from typing import Any

from results.text import plural
from sweep.columns import SHAPE_NAMES
from sweep.grid import CHECKED_FIELDS, COUNTED, POINT_FIELDS, Axis, GridSpec
from workloads.errors import InvalidSweep
from workloads.experiment import AXES
from workloads.expressions import Expression

MAX_POINTS = 5_000_000
"""A grid with more combinations than this after its filters is refused: its experiments would not fit in memory."""
TOLD_EVERY = 2_000
"""Progress is told after about so many combinations, or points."""
MISTAKES = (TypeError, ZeroDivisionError, OverflowError)
"""What a wrong expression raises when it is evaluated."""
_TOLD_EVERY_S = 0.2
_HINT_LIMIT_S = 1.0
"""How long to search for a world size that works, for the message about one that does not."""

Values = tuple[Any, ...]
Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and how much there is."""
Visitor = Callable[[dict[str, Any]], None]


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that tells nobody."""


class _Found(Exception):
    pass


@dataclass(slots=True)
class Search:
    """Depth-first walk over the axes of one grid. A branch that ends counts for all combinations below it."""

    grid: GridSpec
    shapes: Mapping[str, Mapping[str, Any]]
    progress: Progress = silent
    kept: tuple[str, ...] = ()
    """Names whose values make up a combination."""
    sizes_seen: set[Any] = field(default_factory=set)
    not_whole: dict[str, defaultdict[Any, int]] = field(default_factory=dict)
    """How many combinations ended because a derived value was no whole number, or a count below 1: by its name, then
    by world size."""
    filtered: dict[str, list[int]] = field(default_factory=dict)
    """How many combinations each condition ended, in a list of one number."""
    found: list[Values] = field(default_factory=list)
    next_told: float = 0.0
    """When progress is told again, on the monotonic clock."""
    sought_size: int | None = None
    """If given, the search only asks whether this world size has a point, and raises `_Found` at the first one."""

    @property
    def total(self) -> int:
        """All combinations of the axes."""
        return prod(len(axis.rows) for axis in self.grid.axes)

    def run(self) -> list[Values]:
        grid = self.grid
        names = (*grid.axis_names, *grid.derive)
        self.kept = tuple(name for name in names if name in POINT_FIELDS or name in CHECKED_FIELDS)
        self._visit(tuple(self._steps()))({})
        return self.found

    def dropped(self) -> Counter[str]:
        """Combinations that each derived value and each condition has ended."""
        return Counter(
            {f"derive.{name}": sum(by_size.values()) for name, by_size in self.not_whole.items()}
            | {place: count for place, (count,) in self.filtered.items()}
        )

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

    def _visit(self, steps: tuple[tuple[str, str, Any], ...]) -> Visitor:
        if not steps:
            return self._emitter()
        (kind, name, what), rest = steps[0], self._visit(steps[1:])
        weight = prod(len(axis.rows) for later, _, axis in steps[1:] if later == "axis")
        if kind == "axis":
            return self._over(what, weight, rest)
        return self._filter(name, what, weight, rest) if kind == "where" else self._bind(name, what, weight, rest)

    def _emitter(self) -> Visitor:
        take, found = itemgetter(*self.kept), self.found
        if self.sought_size is not None or len(self.kept) < 2:
            return self._emit

        def visit(env: dict[str, Any]) -> None:
            found.append(take(env))
            if len(found) > MAX_POINTS:
                self._too_many()

        return visit

    def _emit(self, env: dict[str, Any]) -> None:
        if self.sought_size is not None and env.get("world_size") == self.sought_size:
            raise _Found
        self.found.append(tuple([env[name] for name in self.kept]))
        if len(self.found) > MAX_POINTS:
            self._too_many()

    def _too_many(self) -> None:
        raise InvalidSweep(f"grid {self.grid.name}: more than {MAX_POINTS:,} points; narrow its axes")

    def _over(self, axis: Axis, weight: int, rest: Visitor) -> Visitor:
        conditions = (*self.grid.derive.values(), *self.grid.where.values())
        used = {name for expression in conditions for name in expression.names}
        rows = [dict(zip(axis.names, row, strict=True)) for row in axis.rows]
        if "model" in axis.names:
            shapes = [self.shapes[str(row["model"])] for row in rows]
            rows = [
                {**{name: shape[name] for name in used & set(shape)}, **row}
                for shape, row in zip(shapes, rows, strict=True)
            ]
        sees_size = "world_size" in axis.names
        tells = weight >= TOLD_EVERY and self.sought_size is None
        total = self.total

        def visit(env: dict[str, Any]) -> None:
            for values in rows:
                env.update(values)
                if sees_size:
                    self.sizes_seen.add(env["world_size"])
                rest(env)
                if tells and time.monotonic() >= self.next_told:
                    self.next_told = time.monotonic() + _TOLD_EVERY_S
                    self.progress("combinations", len(self.found) + sum(self.dropped().values()), total)
            if sees_size:  # branches that end further out must not be counted under the last size
                del env["world_size"]

        return visit

    def _bind(self, name: str, derived: Expression, weight: int, rest: Visitor) -> Visitor:
        evaluate = derived.evaluate
        is_size, counted = name == "world_size", name in COUNTED
        allowed = AXES.get(name) if not counted else None
        ended = self.not_whole.setdefault(name, defaultdict(int))

        def visit(env: dict[str, Any]) -> None:
            try:
                value = evaluate(env)
            except MISTAKES as error:
                raise self._mistake(f"derive.{name}", error) from None
            if isinstance(value, float):
                value = int(value) if value.is_integer() else None
            if value is None or (counted and type(value) is int and value < 1):
                ended[env.get("world_size")] += weight
                return
            if allowed is not None and not allowed.accepts(value):
                raise InvalidSweep(allowed.refusal(f"grid {self.grid.name}: derive.{name}", value))
            env[name] = value
            if is_size:
                self.sizes_seen.add(value)
            rest(env)
            if is_size:
                del env[name]

        return visit

    def _filter(self, place: str, condition: Expression, weight: int, rest: Visitor) -> Visitor:
        evaluate = condition.evaluate
        ended = self.filtered.setdefault(place, [0])

        def visit(env: dict[str, Any]) -> None:
            try:
                met = evaluate(env)
            except MISTAKES as error:
                raise self._mistake(place, error) from None
            if met:
                rest(env)
            else:
                ended[0] += weight

        return visit

    def _mistake(self, place: str, error: Exception) -> InvalidSweep:
        return InvalidSweep(f"grid {self.grid.name}: {place}: {error}")

    def refuse_sizes_without_layout(self) -> None:
        """Raise `InvalidSweep` when there is no combination of a world size that the user asked for."""
        if "world_size" not in self.kept:
            return
        column = self.kept.index("world_size")
        alive = {values[column] for values in self.found}
        for size in sorted(self.sizes_seen - alive):
            cut = {name: by_size[size] for name, by_size in self.not_whole.items() if by_size.get(size)}
            # A size that only the filters rule out is what the user asked for.
            if cut and not _has_layout(dataclasses.replace(self.grid, where={}), self.shapes, size):
                raise InvalidSweep(self._no_layout(size, cut))

    def _no_layout(self, size: Any, cut: Mapping[str, int]) -> str:
        works = _working_sizes(self.grid, self.shapes, size)
        hint = f"; world_size={' or '.join(map(str, works))} works" if works else ""
        formulas = {name: f"{name} = {self.grid.derive[name].text}" for name in cut}
        if len(cut) > 1:
            told = ", ".join(
                f"{formulas[name]} is no whole number in {plural(count, 'combination')}"
                for name, count in Counter(cut).most_common()
            )
            return f"grid {self.grid.name}: no point has world_size={size}: {told}{hint}"
        (name,) = cut
        values = {axis.names[0]: axis.rows for axis in self.grid.axes if len(axis.names) == 1}
        needed = sorted(self.grid.derive[name].names - {"world_size"})
        where = ", ".join(
            f"{key} in [{', '.join(str(row[0]) for row in values[key])}]" for key in needed if key in values
        )
        begin = "no layout divides" if "world_size" in self.grid.derive[name].names else "no point has"
        return (
            f"grid {self.grid.name}: {begin} world_size={size}: {formulas[name]} is never a whole number of at least 1 "
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
        Search(dataclasses.replace(grid, axes=axes), shapes, sought_size=size).run()
    except _Found:
        return True
    return False
