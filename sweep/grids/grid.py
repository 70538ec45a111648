"""A grid (axes, zipped axes, derived values, filters, subsampling), read from plain data and checked.

    axes:    {tp: [1, 2], seq_len: 4096}            every combination; a single value is an axis of one
    zip:     {speed: {precision: [...], compile: [...]}}   axes that move together
    derive:  {dp: world_size / (tp * pp)}           no point unless every count is a whole number of at least 1
    where:   {small: tp <= 8}                       filters; a point must pass all of them
    subsample: {count: 1000, seed: 0}               a random sample of the points that are left

A name is a field of `Experiment` (or ``dp``), or a variable of the grid (``nodes``) that an expression uses. ``model``
is the name of a model file; expressions may use the model's shape (``num_heads``, ``num_layers`` ...).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sweep.grids.axes import AXES, BUDGET
from sweep.grids.columns import COMPUTED, KINDS, POINT_NAMES, PREDICTED, PREDICTED_NAMES, SHAPE_NAMES, check_comparisons
from sweep.grids.comparisons import Kind, kind_of, kind_of_value
from workloads.spec.checks import did_you_mean, hints, meant_by, shown, suggest
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import COUNTS
from workloads.spec.expressions import Expression, parse
from workloads.spec.mistakes import Mistakes

POINT_FIELDS = frozenset(f.name for f in dataclasses.fields(Experiment)) | {"dp", BUDGET}
CHECKED_FIELDS = frozenset(COMPUTED) - {"dp"}
"""Names computed from an experiment's fields: a grid variable of such a name must have the same value."""
COUNTED = frozenset({*COUNTS, *COMPUTED})
"""Names that count something. A derived value below 1 drops its combination; other derived values may be 0."""
_DERIVE = "derive."
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECTIONS = ("description", "cluster", "axes", "zip", "derive", "where", "subsample")
Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subsample:
    count: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GridAxis:
    """Names that change together; an ordinary axis has one name."""

    names: tuple[str, ...]
    rows: tuple[tuple[Scalar, ...], ...]
    """One tuple of values, in the order of ``names``, for each position on the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec:
    name: str
    axes: tuple[GridAxis, ...]
    derive: Mapping[str, Expression]
    where: Mapping[str, Expression]
    """Conditions on axes, derived values and the model, by their labels in messages."""
    where_point: Mapping[str, Expression] = field(default_factory=dict)
    """Conditions on fields of a point that are neither axes nor derived."""
    where_predicted: Mapping[str, Expression] = field(default_factory=dict)
    """Conditions on predicted values of a point."""
    subsample: Subsample | None = None
    description: str = ""

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for axis in self.axes for name in axis.names)


def grid_from_dict(
    name: str, fields: Mapping[str, Any], extra_where: Iterable[str] = (), constants: Mapping[str, Scalar] | None = None
) -> GridSpec:
    """A grid from plain data. ``extra_where``: more filters. ``constants``: further values that expressions may use,
    unless the grid has an axis of their name. Raises `InvalidSweep` for all mistakes."""
    label, mistakes = f"grid {name}", Mistakes()
    for section in fields:
        if section not in _SECTIONS:
            with mistakes.collected():
                raise InvalidSweep(f"{label}: no section {section!r}{_section_hint(str(section), fields[section])}")
    axes = []
    for axis, value in _mapping(label, fields, "axes", mistakes):
        axes.append(GridAxis(names=(axis,), rows=()))
        with mistakes.collected():
            axes[-1] = GridAxis(names=(axis,), rows=_values(label, axis, value))
    for zip_name, members in _mapping(label, fields, "zip", mistakes):
        names = tuple(map(str, members)) if isinstance(members, Mapping) else ()
        axes.append(GridAxis(names=names, rows=()))
        with mistakes.collected():
            axes[-1] = _zipped(label, zip_name, members)
    if not axes and not mistakes:
        with mistakes.collected():
            raise InvalidSweep(
                f"{label} has no axes; write for example axes: {{model: llama8b, global_batch_size: 512}}"
            )
    expressions: dict[str, Expression] = {}
    written = [(f"derive.{key}", text) for key, text in _mapping(label, fields, "derive", mistakes)]
    written += [(f"where.{key}", text) for key, text in _mapping(label, fields, "where", mistakes)]
    written += [(f"--where '{text}'", text) for text in extra_where]
    for place, text in written:
        with mistakes.collected():
            expressions[place] = parse(text, f"{label}: {'--where' if place.startswith('--where') else place}")
    subsample = None
    with mistakes.collected():
        subsample = _subsample(label, fields.get("subsample"))
    derive = {place[len(_DERIVE) :]: one for place, one in expressions.items() if place.startswith(_DERIVE)}
    grid = GridSpec(
        name=name,
        axes=(*_used(constants or {}, expressions.values(), derive, axes), *axes),
        derive=derive,
        where={},
        subsample=subsample,
        description=str(fields.get("description") or ""),
    )
    conditions = {place: one for place, one in expressions.items() if not place.startswith(_DERIVE)}
    unread = {place.partition(".")[2]: str(text) for place, text in written if place not in expressions}
    if axes and all(axis.names for axis in axes):  # otherwise the names on an axis are not known
        words = {word for text in unread.values() for word in _WORD.findall(text)}
        misplaced = {name for section in fields if section not in _SECTIONS for name in meant_by(section, AXES)}
        _check_names(grid, conditions, {*unread, *words, *misplaced}, mistakes)
    kinds = _kinds(grid)
    for place, one in expressions.items():
        with mistakes.collected():
            check_comparisons(f"{label}: {place}", one, kinds)
    mistakes.refuse()
    return _with_conditions(grid, conditions)


def _used(
    constants: Mapping[str, Scalar], expressions: Iterable[Expression], derive: Iterable[str], axes: Sequence[GridAxis]
) -> list[GridAxis]:
    """The constants that expressions use and the grid does not define, as axes of one value."""
    used = {name for expression in expressions for name in expression.names}
    given = {*derive, *(name for axis in axes for name in axis.names)}
    return [
        GridAxis(names=(name,), rows=((value,),))
        for name, value in constants.items()
        if name in used and name not in given
    ]


def _kinds(grid: GridSpec) -> dict[str, Kind]:
    """What the values of the names in the grid's expressions are, as far as it can be told."""
    kinds: dict[str, Kind] = {}
    for axis in grid.axes:
        for column, name in enumerate(axis.names):
            found = {kind for row in axis.rows if (kind := kind_of_value(row[column]))}
            if len(found) == 1:
                kinds[name] = found.pop()
    kinds |= KINDS
    left = dict(grid.derive)
    while known := {name: kind for name, one in left.items() if (kind := kind_of(one, kinds))}:
        kinds |= {name: kind for name, kind in known.items() if name not in KINDS}
        left = {name: one for name, one in left.items() if name not in known}
    return kinds


def _section_hint(section: str, value: Any) -> str:
    """The end of the message about an unknown section; a field of a point belongs into ``axes``."""
    meant = meant_by(section, AXES)
    if meant and not meant_by(section, _SECTIONS) and isinstance(value, (Scalar, list)):
        return f"; it is an axis: write axes: {{{meant[0]}: {str(value).replace(chr(39), '')}}}"
    return suggest(section, _SECTIONS)


def _with_conditions(grid: GridSpec, conditions: Mapping[str, Expression]) -> GridSpec:
    """The grid with each condition at the earliest stage that can evaluate it: axes, fields of a point, or
    predictions."""
    names_on_axes = {*grid.axis_names, *grid.derive, *SHAPE_NAMES}
    kinds: dict[str, dict[str, Expression]] = {"where": {}, "where_point": {}, "where_predicted": {}}
    for place, condition in conditions.items():
        later = condition.names - names_on_axes
        if not later:
            kinds["where"][place] = condition
            continue
        if variables := sorted(condition.names - POINT_NAMES - set(PREDICTED_NAMES)):
            raise InvalidSweep(
                f"grid {grid.name}: {place} mixes the grid variable {variables[0]} with the point field {min(later)}; "
                "split it into two conditions"
            )
        kinds["where_predicted" if condition.names & set(PREDICTED_NAMES) else "where_point"][place] = condition
    return dataclasses.replace(
        grid, where=kinds["where"], where_point=kinds["where_point"], where_predicted=kinds["where_predicted"]
    )


def _check_names(
    grid: GridSpec, conditions: Mapping[str, Expression], unread: Collection[str], mistakes: Mistakes
) -> None:
    """Check that every name is known and used. ``unread``: names in expressions that cannot be read, or of such."""
    label = f"grid {grid.name}"
    axis_names = grid.axis_names

    def refuse(message: str) -> None:
        with mistakes.collected():
            raise InvalidSweep(f"{label}{message}")

    if twice := sorted({name for name in axis_names if axis_names.count(name) > 1}):
        refuse(f": {', '.join(twice)} is on more than one axis")
    for name in sorted(set(axis_names) & set(grid.derive)):
        refuse(
            f": {name} is an axis and also derived (= {grid.derive[name].text}); "
            f"to give it yourself, add ~grid.derive.{name}"
        )
    grid_names = {*axis_names, *grid.derive}
    if "model" not in axis_names:
        refuse(" has no model; give one with model=NAME, or write axes: {model: NAME}")
    for name in sorted(grid_names & set(SHAPE_NAMES)):
        refuse(f": {name} is part of the model's shape; give the variable another name")
    for name in sorted({"engine", "engine_version", "model"} & set(grid.derive)):
        refuse(f": {name} cannot be derived; give it as an axis")
    expressions = {**{f"derive.{name}": derived for name, derived in grid.derive.items()}, **conditions}
    known = POINT_FIELDS | CHECKED_FIELDS | {name for expression in expressions.values() for name in expression.names}
    known |= set(unread)
    # An axis that no expression uses is misspelt, or has another program's name.
    unknown = [name for name in axis_names if name not in known]
    meant = {other for name in unknown for other in meant_by(name, POINT_FIELDS | CHECKED_FIELDS)}
    for name, hint in hints(dict.fromkeys(unknown), POINT_FIELDS | CHECKED_FIELDS).items():
        refuse(f": no axis is called {name!r}{hint or '; no expression uses it'}")
    for name in grid.derive:
        if name not in known:
            refuse(f": derive.{name} is not used{suggest(name, POINT_FIELDS)}")
    if "global_batch_size" not in {*grid_names, *meant, *unread}:
        refuse(": global_batch_size is missing; add it as an axis or derive it: write axes: {global_batch_size: 512}")
    for place, expression in expressions.items():
        usable = grid_names | set(SHAPE_NAMES) | meant | set(unread)
        if place in conditions:
            usable |= POINT_NAMES | set(PREDICTED_NAMES)
        for name in sorted(expression.names - usable):
            refuse(f": {place} uses {name!r}, which {_missing(name, usable, grid_names)}")


def _missing(name: str, usable: set[str], grid_names: set[str]) -> str:
    """The end of the message about a name that an expression cannot use."""
    # in a derived value, such a name is known only when the point is complete
    if name in POINT_FIELDS | CHECKED_FIELDS:
        return f"is no axis; add it to axes, or derive it; known: {', '.join(sorted(grid_names))}"
    close = did_you_mean(name, usable)
    return f"is no axis{close or ';'} known: {', '.join(sorted(grid_names | set(PREDICTED) & usable))}"


def _mapping(label: str, fields: Mapping[str, Any], section: str, mistakes: Mistakes) -> list[tuple[str, Any]]:
    value = fields.get(section) or {}
    if not isinstance(value, Mapping):
        with mistakes.collected():
            raise InvalidSweep(f"{label}: {section} must be a mapping from names, not {shown(value)}")
        return []
    return [(str(key), entry) for key, entry in value.items()]


def _values(label: str, axis: str, value: Any) -> tuple[tuple[Scalar, ...], ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise InvalidSweep(f"{label}: axis {axis} is empty")
    place = f"{label}: axis {axis}"
    if axis in AXES:
        return tuple((AXES[axis].check(place, entry),) for entry in values)
    for entry in values:
        if not isinstance(entry, Scalar):
            raise InvalidSweep(f"{place} holds {shown(entry)}; values are numbers, words or true and false")
    return tuple((entry,) for entry in values)


def _zipped(label: str, zip_name: str, members: Any) -> GridAxis:
    if not isinstance(members, Mapping) or not members:
        raise InvalidSweep(f"{label}: zip.{zip_name} must map names to lists of one length, not {shown(members)}")
    columns = {str(name): _values(label, str(name), value) for name, value in members.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise InvalidSweep(f"{label}: zip.{zip_name} pairs lists of different lengths: {counts}")
    rows = tuple(tuple(cell[0] for cell in row) for row in zip(*columns.values(), strict=True))
    return GridAxis(names=tuple(columns), rows=rows)


def _subsample(label: str, value: Any) -> Subsample | None:
    if value is None:
        return None
    if isinstance(value, Mapping) and "count" in value and set(value) <= {"count", "seed"}:
        count, seed = value["count"], value.get("seed", 0)
        if isinstance(count, int) and isinstance(seed, int) and not isinstance(count, bool) and count >= 1:
            return Subsample(count=count, seed=seed)
    raise InvalidSweep(f"{label}: subsample={shown(value)}; it may be {{count: N, seed: S}} with N of at least 1")
