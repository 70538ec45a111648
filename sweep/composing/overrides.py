"""Sorts the overrides of the command line (``+grid=playbook model=llama8b grid.axes.tp=[1,2] budget.gpu_hours=10``).

Hydra's grammar reads them. Overrides of grids are translated before Hydra composes: ``+grid=[a,b]`` puts the grids at
``grids.a`` and ``grids.b``, ``grid.*`` changes each of them, and ``model=`` becomes an axis of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sweep.composing.ambiguous_scalars import refuse_ambiguous_override
from sweep.composing.conffiles import GROUPS, ConfFolders
from workloads.spec.checks import suggest
from workloads.spec.errors import InvalidSweep
from workloads.spec.mistakes import Mistakes
from workloads.spec.other_names import OF_SUBMITIT

GRID_SECTIONS = ("axes", "zip", "derive", "where", "subsample")
_OPEN = (
    *("cluster.", "launcher.environment.", "launcher.phase_limits_s.", "launcher.sbatch."),
    *(f"launcher.{name}" for name in OF_SUBMITIT),
)
"""Options to which an override adds names without a ``+``."""
CHOSEN_GROUPS = ("cluster", "launcher", "measure")
"""Groups from which a sweep uses exactly one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    grids: tuple[str, ...]
    models: tuple[str, ...] | None
    """Models given with ``model=``, used instead of the grids' models. None: not given."""
    groups: dict[str, str]
    """The chosen option for each group of `CHOSEN_GROUPS` that is given."""
    hydra: tuple[str, ...]
    """All other overrides, passed to Hydra unchanged."""


def sort_overrides(overrides: Sequence[str], folders: ConfFolders) -> Overrides:
    """Sort and check the overrides of one sweep. Raises `InvalidSweep` with the closest existing name."""
    parsed = parse_overrides(overrides)
    grids = _names(parsed, "grid", folders)
    if not grids:
        raise InvalidSweep(f"no grid given: add +grid=NAME, one of {', '.join(folders.names('grid'))}")
    models = _names(parsed, "model", folders)
    groups: dict[str, str] = {}
    hydra: list[str] = []
    mistakes = Mistakes()
    for override in parsed:
        with mistakes.collected():
            _sort(override, grids, folders, groups, hydra)
    mistakes.refuse()
    return Overrides(grids=grids, models=models or None, groups=groups, hydra=tuple(hydra))


def _sort(override: Any, grids: Sequence[str], folders: ConfFolders, groups: dict[str, str], hydra: list[str]) -> None:
    """Adds the override to ``groups`` or to ``hydra``."""
    key = override.key_or_group
    if key in ("grid", "model"):
        return
    if key in CHOSEN_GROUPS:
        groups[key] = _one_name(override, folders)
    elif key.partition(".")[0] == "grid":
        hydra += _for_each_grid(override, grids)
    elif key in GROUPS:
        raise InvalidSweep(f"{override.input_line}: a {key} is part of a cluster file; choose it with cluster=NAME")
    elif key.startswith(("hydra/launcher", "hydra.launcher")):
        raise InvalidSweep(f"{override.input_line}: write launcher=slurm and launcher.OPTION=..., without hydra")
    elif key.partition(".")[0] in ("grids", "hydra"):
        raise InvalidSweep(f"{override.input_line}: write grid.axes.NAME=... (it changes every grid given)")
    else:
        hydra.append(_for_hydra(override))


def cluster_changes(words: Sequence[str]) -> tuple[str, ...]:
    """Overrides of a cluster's fields as Hydra reads them. Raises `InvalidSweep` as `parse_overrides` does."""
    return tuple(map(_for_hydra, parse_overrides(words)))


def _for_hydra(override: Any) -> str:
    """An override that may also set names that the file leaves out; a field that no cluster has is refused when the
    cluster is read."""
    text: str = override.input_line
    return f"++{text.lstrip('+')}" if override.key_or_group.startswith(_OPEN) and not override.is_delete() else text


def parse_overrides(texts: Sequence[str]) -> list[Any]:
    """Parses overrides as Hydra does. Raises `InvalidSweep` for an override that cannot be read or changes nothing, and
    for two overrides of the same option, because Hydra would silently use the last one."""
    parsed, mistakes = [], Mistakes()
    for text in texts:
        with mistakes.collected():
            parsed.append(parse_override(text))
    earlier: list[tuple[str, Any]] = []
    for override in parsed:
        leaves = list(_leaves(override.key_or_group, None if override.is_delete() else override.value()))
        for place, value in leaves:
            with mistakes.collected():
                _refuse_lost(place, value, override, earlier)
        earlier += [(place, override) for place, _ in leaves]
    mistakes.refuse()
    return parsed


def _refuse_lost(place: str, value: Any, override: Any, earlier: Sequence[tuple[str, Any]]) -> None:
    """Refuse an override that changes nothing, or that sets an option which one of the ``earlier`` overrides has
    set."""
    if isinstance(value, Mapping):
        raise InvalidSweep(f"{override.input_line}: an empty mapping changes nothing; write ~{place} to remove it")
    for other_place, other in earlier:
        removed = override.is_delete() and other_place.startswith(f"{place}.")
        if (place == other_place or removed) and not _may_repeat(other, override):
            raise InvalidSweep(_given_twice(place, other, override))


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The options that an override sets, by their dotted names. Choosing a file of a group is not an option of it."""
    if key == "model":
        yield "grid.axes.model", value
    elif key in GROUPS:
        yield f"{key}=", value
    elif isinstance(value, Mapping) and value:
        for name, part in value.items():
            yield from _leaves(f"{key}.{name}", part)
    else:
        yield key, value


def _may_repeat(first: Any, second: Any) -> bool:
    """Whether two overrides of one option both count: grids and models add up, and a removal makes room for a value."""
    both_add = first.key_or_group == second.key_or_group and first.key_or_group in ("grid", "model")
    return both_add or (first.is_delete() and not second.is_delete())


def _given_twice(place: str, first: Any, second: Any) -> str:
    hint = f"; for several values write {place}=[A,B]" if place.startswith("grid.axes.") else ""
    return f"{place.rstrip('=')} is given twice, {first.input_line} and {second.input_line}; give it once{hint}"


def parse_override(text: str) -> Any:
    """Parses one override as Hydra does. Raises `InvalidSweep` if the grammar refuses it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    refuse_ambiguous_override(text)
    try:
        override = OverridesParser.create().parse_override(text)
        if override.is_sweep_override():
            raise InvalidSweep(f"{text}: for several values write a list, e.g. grid.axes.tp=[1,2]")
        return override
    except InvalidSweep:
        raise
    except (HydraException, ValueError, RecursionError) as error:  # also for thousands of digits or brackets
        reason = (str(error).splitlines() or ["it is too long"])[0]
        raise InvalidSweep(f"cannot read {text!r}: {reason}; expected NAME=VALUE (quote texts with spaces)") from None


def _names(parsed: Sequence[Any], group: str, folders: ConfFolders) -> tuple[str, ...]:
    """The options given for a group that may have several, each once, in the order given."""
    names: dict[str, None] = {}
    for override in parsed:
        if override.key_or_group == group:
            value = override.value()
            for name in value if isinstance(value, list) else [value]:
                folders.find(group, str(name))
                names[str(name)] = None
    return tuple(names)


def _one_name(override: Any, folders: ConfFolders) -> str:
    value = override.value()
    if not isinstance(value, str):
        raise InvalidSweep(f"{override.input_line}: a sweep has one {override.key_or_group}")
    folders.find(override.key_or_group, value)
    return value


def _for_each_grid(override: Any, grids: Sequence[str]) -> list[str]:
    key = override.key_or_group
    parts = key.split(".")
    if len(parts) < 2 or parts[1] not in GRID_SECTIONS:
        section = parts[1] if len(parts) > 1 else ""
        raise InvalidSweep(
            f"{override.input_line}: a grid has no {section!r} to change{suggest(section, GRID_SECTIONS)}"
        )
    tail = ".".join(parts[1:])
    if override.is_delete():
        return [f"~grids.{name}.{tail}" for name in grids]
    value = override.input_line.partition("=")[2]
    return [f"++grids.{name}.{tail}={value}" for name in grids]
