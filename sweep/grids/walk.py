"""Walks over the axes of one grid: depth first, with every derived value and condition evaluated as early as possible.

The walk is generated as the source of one function with nested loops and compiled, because it may run a hundred million
times. Only checked expressions become source (`workloads.spec.expressions`); values are passed in by name. A branch
that ends counts for all combinations below it, so that every combination of the axes is accounted for.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from results.text.numbers import plural
from sweep.grids.axes import AXES, FRACTIONAL
from sweep.grids.columns import SHAPE_NAMES
from sweep.grids.grid import CHECKED_FIELDS, COUNTED, POINT_FIELDS, GridAxis, GridSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.expressions import Expression, namespace, source_of

MAX_POINTS = 5_000_000
"""A grid with more combinations than this after its filters is refused: its experiments would not fit in memory."""
PROGRESS_EVERY = 2_000
"""Number of combinations, or points, between two progress reports."""
MISTAKES = (TypeError, ZeroDivisionError, OverflowError)
"""Exceptions that evaluating a wrong expression may raise."""
_PROGRESS_EVERY_S = 0.2
_HINT_LIMIT_S = 1.0
"""Longest search for a world size that works, for the message about one that does not."""

Values = tuple[Any, ...]
Progress = Callable[[str, int, int], None]
"""Progress callback: ``(task, done, total)``."""
_FILE = "<the loops of a grid>"
_MOST_LOOPS = 15
"""Most loops in one function; Python allows 20 nested blocks."""


def silent(what: str, done: int, total: int) -> None:
    """A `Progress` that reports nothing."""


class _Found(Exception):
    pass


@dataclass(slots=True)
class Walk:
    """The walk as one generated function: a loop for each axis, and every expression at the first place that can
    evaluate it."""

    grid: GridSpec
    shapes: Mapping[str, Mapping[str, Any]]
    progress: Progress = silent
    kept: tuple[str, ...] = ()
    """Names whose values make up a combination, in order."""
    sizes_seen: set[Any] = field(default_factory=set)
    not_whole: dict[str, defaultdict[Any, int]] = field(default_factory=dict)
    """Number of combinations that ended because a derived value was no whole number, or a count below 1: by the value's
    name, then by world size."""
    filtered: dict[str, list[int]] = field(default_factory=dict)
    """Number of combinations that each condition ended, in a list of one number."""
    combinations: list[Values] = field(default_factory=list)
    next_report: float = 0.0
    """Time of the next progress report, on the monotonic clock."""
    sought_size: int | None = None
    """If given, the walk only checks whether this world size has a point, and raises `_Found` at the first one."""

    @property
    def total(self) -> int:
        """Number of combinations of the axes."""
        return prod(len(axis.rows) for axis in self.grid.axes)

    def run(self) -> list[Values]:
        grid = self.grid
        names = (*grid.axis_names, *grid.derive)
        self.kept = tuple(name for name in names if name in POINT_FIELDS or name in CHECKED_FIELDS)
        written = _Source(self, tuple(self._steps()))
        space = {**namespace(), **written.values}
        exec(compile("\n".join(written.lines), _FILE, "exec"), space)
        try:
            space["walk"]()
        except MISTAKES as error:
            place = written.place_of(error)
            if place is None:
                raise
            raise InvalidSweep(f"grid {grid.name}: {place}: {error}") from None
        return self.combinations

    def dropped(self) -> Counter[str]:
        """Number of combinations that each derived value and each condition has ended."""
        return Counter(
            {f"derive.{name}": sum(by_size.values()) for name, by_size in self.not_whole.items()}
            | {place: count for place, (count,) in self.filtered.items()}
        )

    def tell(self) -> None:
        """Report how many combinations are done, if a report is due."""
        if time.monotonic() >= self.next_report:
            self.next_report = time.monotonic() + _PROGRESS_EVERY_S
            self.progress("combinations", len(self.combinations) + sum(self.dropped().values()), self.total)

    def refuse_too_many(self) -> None:
        raise InvalidSweep(f"grid {self.grid.name}: more than {MAX_POINTS:,} points; narrow its axes")

    def found_sought(self) -> None:
        raise _Found

    def columns_of(self, axis: GridAxis) -> tuple[tuple[str, ...], list[Values]]:
        """The names of an axis, and the tuples of values that they take. A model axis also gets the shape values that
        expressions use."""
        if "model" not in axis.names:
            return axis.names, list(axis.rows)
        expressions = (*self.grid.derive.values(), *self.grid.where.values())
        used = sorted({name for expression in expressions for name in expression.names}.intersection(SHAPE_NAMES))
        column = axis.names.index("model")
        rows = [(*row, *(self.shapes[str(row[column])][name] for name in used)) for row in axis.rows]
        return (*axis.names, *used), rows

    def _steps(self) -> Iterator[tuple[str, str, Any]]:
        """``(kind, name, axis or expression)`` in evaluation order: each axis, then all expressions that need no later
        axis."""
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
            raise InvalidSweep(f"grid {self.grid.name}: {ring} cannot be derived, because each depends on another one")

    def refuse_sizes_without_layout(self) -> None:
        """Raise `InvalidSweep` if a world size that the user asked for has no combination."""
        if "world_size" not in self.kept:
            return
        column = self.kept.index("world_size")
        alive = {values[column] for values in self.combinations}
        for size in sorted(self.sizes_seen - alive):
            cut = {name: by_size[size] for name, by_size in self.not_whole.items() if by_size.get(size)}
            # A size that only the filters rule out was excluded by the user on purpose.
            if cut and not _has_layout(dataclasses.replace(self.grid, where={}), self.shapes, size):
                raise InvalidSweep(self._no_layout(size, cut))

    def _no_layout(self, size: Any, cut: Mapping[str, int]) -> str:
        works = _working_sizes(self.grid, self.shapes, size)
        hint = f"; world_size={' or '.join(map(str, works))} works" if works else ""
        formulas = {name: f"{name} = {self.grid.derive[name].text}" for name in cut}
        if len(cut) > 1:
            failing_formulas = ", ".join(
                f"{formulas[name]} is no whole number in {plural(count, 'combination')}"
                for name, count in Counter(cut).most_common()
            )
            return f"grid {self.grid.name}: no point has world_size={size}: {failing_formulas}{hint}"
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


class _Source:
    """The source of a walk's function ``walk``, and the values that its names refer to."""

    def __init__(self, walk: Walk, steps: Sequence[tuple[str, str, Any]]) -> None:
        self.lines = ["def walk():"]
        self.values: dict[str, Any] = {
            "combinations": walk.combinations,
            "sizes_seen": walk.sizes_seen,
            "tell": walk.tell,
            "refuse_too_many": walk.refuse_too_many,
            "found_sought": walk.found_sought,
            "int": int,
            "float": float,
            "len": len,
        }
        self._places: dict[int, str] = {}
        """The derived value or condition evaluated on each line, by line number."""
        self._walk = walk
        self._indent, self._loops, self._leave, self._size = 1, 0, "return", "None"
        calls: list[str] = []
        for number, (kind, name, what) in enumerate(steps):
            weight = prod(len(axis.rows) for later, _, axis in steps[number + 1 :] if later == "axis")
            if kind == "axis":
                calls += self._axis(number, what, weight)
            elif kind == "derive":
                self._derive(number, name, what, weight)
            else:
                self._where(number, name, what, weight)
        self._keep()
        self.lines += reversed(calls)

    def place_of(self, error: BaseException) -> str | None:
        """The derived value or condition whose evaluation raised ``error``."""
        trace = error.__traceback__
        place = None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == _FILE:
                place = self._places.get(trace.tb_lineno)
            trace = trace.tb_next
        return place

    def _add(self, line: str, deeper: int = 0) -> None:
        self.lines.append("    " * (self._indent + deeper) + line)

    def _axis(self, number: int, axis: GridAxis, weight: int) -> list[str]:
        """Adds a loop over the axis, or plain assignments if it has one row.

        If the loops continue in a nested function, returns the call to append after the whole source.
        """
        names, rows = self._walk.columns_of(axis)
        target = f"{', '.join(map(_variable, names))},"
        calls = []
        if len(rows) == 1:
            self.values[f"row{number}"] = rows[0]
            self._add(f"{target} = row{number}")
        else:
            if self._loops == _MOST_LOOPS:
                self._add(f"def part{number}():")
                calls, self._loops = ["    " * self._indent + f"part{number}()"], 0
                self._indent += 1
            self.values[f"rows{number}"] = rows
            self._add(f"for {target} in rows{number}:")
            self._indent, self._loops, self._leave = self._indent + 1, self._loops + 1, "continue"
            if weight >= PROGRESS_EVERY and self._walk.sought_size is None:
                self._add("tell()")
        if "world_size" in names:
            self._see_size()
        return calls

    def _see_size(self) -> None:
        self._size = _variable("world_size")
        self._add(f"sizes_seen.add({self._size})")

    def _derive(self, number: int, name: str, derived: Expression, weight: int) -> None:
        variable, counted = _variable(name), name in COUNTED
        self.values[f"ended{number}"] = self._walk.not_whole.setdefault(name, defaultdict(int))
        self._add(f"{variable} = {source_of(derived, _variable)}")
        self._places[len(self.lines)] = f"derive.{name}"
        if name not in FRACTIONAL:
            self._add(f"if {variable}.__class__ is float:")
            self._add(f"{variable} = int({variable}) if {variable}.is_integer() else None", 1)
        too_small = f" or {variable}.__class__ is int and {variable} < 1" if counted else ""
        self._add(f"if {variable} is None{too_small}:")
        self._add(f"ended{number}[{self._size}] += {weight}", 1)
        self._add(self._leave, 1)
        if not counted and name in AXES:
            self.values[f"check{number}"] = partial(AXES[name].check, f"grid {self._walk.grid.name}: derive.{name}")
            self._add(f"check{number}({variable})")
        if name == "world_size":
            self._see_size()

    def _where(self, number: int, place: str, condition: Expression, weight: int) -> None:
        self.values[f"ended{number}"] = self._walk.filtered.setdefault(place, [0])
        self._add(f"if not {source_of(condition, _variable)}:")
        self._places[len(self.lines)] = place
        self._add(f"ended{number}[0] += {weight}", 1)
        self._add(self._leave, 1)

    def _keep(self) -> None:
        kept = self._walk.kept
        if (sought := self._walk.sought_size) is not None and "world_size" in kept:
            self._add(f"if {_variable('world_size')} == {sought!r}:")
            self._add("found_sought()", 1)
        self._add(f"combinations.append(({', '.join(map(_variable, kept))},))")
        self._add(f"if len(combinations) > {MAX_POINTS}:")
        self._add("refuse_too_many()", 1)


def _variable(name: str) -> str:
    return f"v_{name}"


def _working_sizes(grid: GridSpec, shapes: Mapping[str, Mapping[str, Any]], size: int) -> list[int]:
    """The nearest world sizes below and above that have a layout; empty if world_size is not an axis by itself."""
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
    """Whether the grid, with its filters, has a point of this world size."""
    axes = tuple(
        dataclasses.replace(axis, rows=((size,),)) if axis.names == ("world_size",) else axis for axis in grid.axes
    )
    try:
        Walk(dataclasses.replace(grid, axes=axes), shapes, sought_size=size).run()
    except _Found:
        return True
    return False
