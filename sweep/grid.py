"""What a grid is (axes, zipped axes, derived values, filters, subsampling), read from plain data and checked.

    axes:    {tp: [1, 2], seq_len: 4096}            every combination; a single value is an axis of one
    zip:     {speed: {precision: [...], compile: [...]}}   axes that move together
    derive:  {dp: world_size / (tp * pp)}           no point where a value is no whole number of at least 1
    where:   {small: tp <= 8}                       filters; a point must pass all of them
    subsample: {count: 1000, seed: 0}               a random sample of the points that are left

A name is a field of `Experiment` (or ``dp``), or a variable of the grid (``nodes``) that an expression uses. ``model``
is the name of a model file; expressions may use the model's shape (``num_heads``, ``num_layers`` ...).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workloads.checks import suggest
from workloads.errors import InvalidSweep
from workloads.experiment import Experiment, ModelSpec
from workloads.expressions import Expression, parse

POINT_FIELDS = frozenset(f.name for f in dataclasses.fields(Experiment)) | {"dp"}
CHECKED_FIELDS = frozenset({"world_size", "num_microbatches", "tokens_per_step"})
"""Not fields of an experiment but computed from them: a grid's variable of such a name must have the same value."""
SHAPE_NAMES = (
    "num_layers",
    "hidden_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "vocab_size",
    "num_experts",
)
_COUNTS = frozenset(
    {
        *("world_size", "num_microbatches", "micro_batch_size", "global_batch_size", "seq_len", "virtual_stages"),
        *("dp", "dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"),
    }
)
_MOST_SHOWN = 100
"""A message repeats at most this many characters of what a user wrote."""
_SECTIONS = ("description", "cluster", "axes", "zip", "derive", "where", "subsample")
Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subsample:
    count: int
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Names that take their values together; an ordinary axis has one name."""

    names: tuple[str, ...]
    rows: tuple[tuple[Scalar, ...], ...]
    """One tuple of values, in the order of ``names``, for each position on the axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec:
    name: str
    axes: tuple[Axis, ...]
    derive: Mapping[str, Expression]
    where: Mapping[str, Expression]
    subsample: Subsample | None = None
    description: str = ""

    @property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(name for axis in self.axes for name in axis.names)


def grid_from_dict(name: str, fields: Mapping[str, Any], extra_where: Iterable[str] = ()) -> GridSpec:
    """A grid from plain data. ``extra_where``: more filters. Raises `InvalidSweep` for a mistake in either."""
    label = f"grid {name}"
    for section in fields:
        if section not in _SECTIONS:
            raise InvalidSweep(f"{label}: no section {section!r}{suggest(section, _SECTIONS)}")
    axes = [Axis(names=(axis,), rows=_values(label, axis, value)) for axis, value in _mapping(label, fields, "axes")]
    axes += [_zipped(label, zip_name, members) for zip_name, members in _mapping(label, fields, "zip")]
    if not axes:
        raise InvalidSweep(f"{label}: it has no axes")
    derive = {key: parse(text, f"{label}: derive.{key}") for key, text in _mapping(label, fields, "derive")}
    where = {key: parse(text, f"{label}: where.{key}") for key, text in _mapping(label, fields, "where")}
    where |= {f"--where {text}": parse(text, f"{label}: --where") for text in extra_where}
    grid = GridSpec(
        name=name,
        axes=tuple(axes),
        derive=derive,
        where=where,
        subsample=_subsample(label, fields.get("subsample")),
        description=str(fields.get("description") or ""),
    )
    _check_names(grid)
    return grid


def shape_of(model: ModelSpec) -> dict[str, Scalar]:
    """The values of a model that expressions may use, by name. ``num_experts`` is 1 for a dense model."""
    shape: dict[str, Scalar] = {name: getattr(model, name) for name in SHAPE_NAMES if name != "num_experts"}
    shape["num_experts"] = model.moe.num_experts if model.moe is not None else 1
    return shape


def _check_names(grid: GridSpec) -> None:
    label = f"grid {grid.name}"
    axis_names = grid.axis_names
    if twice := sorted({name for name in axis_names if axis_names.count(name) > 1}):
        raise InvalidSweep(f"{label}: {', '.join(twice)} is on more than one axis")
    if both := sorted(set(axis_names) & set(grid.derive)):
        raise InvalidSweep(
            f"{label}: {both[0]} is an axis and also derived (= {grid.derive[both[0]].text}); "
            f"to give it yourself, add ~grid.derive.{both[0]}"
        )
    if "model" not in axis_names:
        raise InvalidSweep(f"{label}: it has no model; give one with model=NAME")
    own = {*axis_names, *grid.derive}
    if hidden := sorted(own & set(SHAPE_NAMES)):
        raise InvalidSweep(f"{label}: {hidden[0]} is part of the model's shape; give the variable another name")
    expressions = {
        **{f"derive.{k}": v for k, v in grid.derive.items()},
        **{f"where.{k}": v for k, v in grid.where.items()},
    }
    used: set[str] = set()
    for place, expression in expressions.items():
        used |= expression.names
        for name in sorted(expression.names - own - set(SHAPE_NAMES)):
            raise InvalidSweep(
                f"{label}: {place} uses {name!r}, which is no axis{suggest(name, own | set(SHAPE_NAMES))}"
            )
    known = POINT_FIELDS | CHECKED_FIELDS | used
    for name in axis_names:
        if name not in known:
            raise InvalidSweep(
                f"{label}: no axis is called {name!r}{suggest(name, set(axis_names) - {name} | POINT_FIELDS)}"
            )
    for name in grid.derive:
        if name not in known:
            raise InvalidSweep(f"{label}: derive.{name} is used by nothing{suggest(name, POINT_FIELDS)}")


def _mapping(label: str, fields: Mapping[str, Any], section: str) -> list[tuple[str, Any]]:
    value = fields.get(section) or {}
    if not isinstance(value, Mapping):
        raise InvalidSweep(f"{label}: {section} must be a mapping from names, not {_shown(value)}")
    return [(str(key), entry) for key, entry in value.items()]


def _values(label: str, axis: str, value: Any) -> tuple[tuple[Scalar, ...], ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise InvalidSweep(f"{label}: axis {axis} is empty")
    for entry in values:
        if not isinstance(entry, Scalar):
            raise InvalidSweep(
                f"{label}: axis {axis} holds {_shown(entry)}; values are numbers, words or true and false"
            )
        if axis in _COUNTS and (isinstance(entry, bool) or not isinstance(entry, int) or entry < 1):
            raise InvalidSweep(
                f"{label}: axis {axis} holds {_shown(entry)}; its values are whole numbers of at least 1"
            )
    return tuple((entry,) for entry in values)


def _zipped(label: str, zip_name: str, members: Any) -> Axis:
    if not isinstance(members, Mapping) or not members:
        raise InvalidSweep(f"{label}: zip.{zip_name} must map names to lists of one length, not {_shown(members)}")
    columns = {str(name): _values(label, str(name), value) for name, value in members.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise InvalidSweep(f"{label}: zip.{zip_name} pairs lists of different lengths: {counts}")
    rows = tuple(tuple(cell[0] for cell in row) for row in zip(*columns.values(), strict=True))
    return Axis(names=tuple(columns), rows=rows)


def _subsample(label: str, value: Any) -> Subsample | None:
    if value is None:
        return None
    if isinstance(value, Mapping) and "count" in value and set(value) <= {"count", "seed"}:
        count, seed = value["count"], value.get("seed", 0)
        if isinstance(count, int) and isinstance(seed, int) and not isinstance(count, bool) and count >= 1:
            return Subsample(count=count, seed=seed)
    raise InvalidSweep(f"{label}: subsample={_shown(value)}; it may be {{count: N, seed: S}} with N of at least 1")


def _shown(value: Any) -> str:
    """``value`` as a message shows it, shortened where it is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"
