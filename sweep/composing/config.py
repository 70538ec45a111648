"""One sweep's configuration as frozen data, checked section by section."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweep.composing.composition import compose, unknown_section
from sweep.composing.conffiles import BuiltFile, ConfFolders
from sweep.composing.overrides import CHOSEN_GROUPS, Overrides, cluster_changes, parse_overrides, sort_overrides
from sweep.composing.search_settings import Settings, settings_from
from sweep.grids.grid import GridSpec, grid_from_dict
from workloads.contract.measure_spec import MeasureSpec
from workloads.spec import checks
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.hardware.cluster_fields import read_cluster
from workloads.spec.mistakes import Mistakes
from workloads.spec.model_spec import ModelSpec
from workloads.spec.units import seconds

_MAX_NAME_BYTES = 255
_SECTIONS = ("budget", "cluster", "grids", "launcher", "measure", "name", "plan", "results_dir", "search")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Longest time of a point in seconds: ``base_s + overhead + factor * predicted time of its steps``."""

    base_s: float
    factor: float
    without_estimate_s: float
    """Seconds allowed for the steps of a point whose step time cannot be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of the section ``plan``; ``conf/config.yaml`` explains each."""

    oom_margin: float
    run_predicted_oom: bool
    audit: float
    audit_seed: int
    reuse: bool
    overhead_s: float
    compile_s: float
    rehearsed_rank_s: float
    deadline: Deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    name: str
    results_dir: Path
    grids: tuple[GridSpec, ...]
    models: Mapping[str, ModelSpec]
    """All models that the grids name."""
    cluster: ClusterSpec
    cluster_given: bool
    """Whether the user named the cluster on the command line; otherwise the grid did."""
    launcher: Mapping[str, Any]
    """Contents of the launcher's file; the entry ``launcher`` is local, rehearse or slurm."""
    launcher_given: bool
    """Whether the user named the launcher on the command line; otherwise it depends on this machine."""
    measure: MeasureSpec
    plan: PlanOptions
    budget_gpu_hours: float | None
    """None: no limit."""
    search: Settings = field(default_factory=Settings)
    learn_from: tuple[ClusterSpec, ...] = ()
    """Other clusters whose measured rows are used for predicting step times."""

    @property
    def sweep_dir(self) -> Path:
        return self.results_dir / self.name

    @property
    def launcher_kind(self) -> str:
        return str(self.launcher["launcher"])


def compose_sweep(
    overrides: Sequence[str],
    folders: ConfFolders | None = None,
    *,
    extra_where: Sequence[str] = (),
    cluster: str | None = None,
    launcher: str = "local",
) -> SweepConfig:
    """The sweep that the ``overrides`` of the command line describe.

    ``extra_where``: more filters for every grid. ``cluster``: replaces that of the grids, unless the overrides name
    one. ``launcher``: used if the overrides name none. Raises `InvalidSweep` (or another `UltrasweepError`) with one
    line for a mistake of the user.
    """
    folders = folders or ConfFolders()
    given = sort_overrides(overrides, folders)
    given_cluster = given.groups.get("cluster")
    chosen = given_cluster or cluster or _cluster_of_grids(given.grids, folders)
    groups = {"launcher": launcher, **given.groups, **({"cluster": chosen} if chosen else {})}
    folders.refuse_mistakes([*(("grid", grid) for grid in given.grids), *groups.items()])
    data = compose(given, groups, folders)
    mistakes = Mistakes()
    for section in data:
        if section not in _SECTIONS:
            known = {name: data[name] for name in _SECTIONS if name in data}
            with mistakes.collected():
                raise InvalidSweep(unknown_section(section, known, folders))
    grids, models = [], {}
    for name in given.grids:
        with mistakes.collected():
            fields = _with_models(data["grids"][name], given.models)
            for model in _models_of(fields):
                with mistakes.collected():
                    models[model] = folders.model(model)
            with folders.named("grid", name):
                grids.append(grid_from_dict(name, fields, extra_where, _constants(data)))
    parts: dict[str, Any] = {}
    with mistakes.collected():
        parts["cluster"] = _cluster(chosen, data, folders)
    for part, read in _READERS.items():
        with mistakes.collected():
            parts[part] = read(data)
    with mistakes.collected():
        learn_from = data["plan"].get("learn_from", []) if isinstance(data["plan"], Mapping) else []
        parts["learn_from"] = _clusters("plan.learn_from", learn_from, folders)
    with mistakes.collected():
        kind = checks.choice("launcher.launcher", parts["launcher"].get("launcher"), ("local", "rehearse", "slurm"))
        default_name = "+".join(given.grids) + ("-rehearsed" if kind == "rehearse" else "")
        parts["name"] = _sweep_name(data["name"], default_name)
    mistakes.refuse()
    return SweepConfig(
        grids=tuple(grids),
        models={name: models[name] for name in sorted(models)},
        cluster_given=given_cluster is not None,
        launcher_given="launcher" in given.groups,
        **parts,
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "launcher": lambda data: _mapping(data, "launcher"),
    "measure": lambda data: _measure(_mapping(data, "measure")),
    "plan": lambda data: _plan_options(_mapping(data, "plan")),
    "budget_gpu_hours": lambda data: _budget(data["budget"]),
    "search": lambda data: settings_from(_mapping(data, "search")),
    "results_dir": lambda data: _results_dir(data["results_dir"]),
}
"""How each part of a `SweepConfig` is read from the composed configuration."""


def _models_of(grid: Mapping[str, Any]) -> list[str]:
    """The models that a grid's data names, each once, also if the grid has mistakes."""
    groups = grid.get("zip")
    places = [grid.get("axes"), *(groups.values() if isinstance(groups, Mapping) else ())]
    given = [place["model"] for place in places if isinstance(place, Mapping) and "model" in place]
    names = [name for value in given for name in (value if isinstance(value, list) else [value])]
    return list(dict.fromkeys(str(name) for name in names if isinstance(name, (str, int))))


def cluster_for(
    grid: str, name: str | None = None, folders: ConfFolders | None = None, changes: Sequence[str] = ()
) -> ClusterSpec | None:
    """The cluster called ``name``, or the cluster of the grid, as its file describes it now; None if the grid has none.

    ``changes``: overrides such as ``cluster.nodes=4``. Raises `InvalidSweep` (or another `UltrasweepError`) for names
    that do not exist in these folders.
    """
    folders = folders or ConfFolders()
    chosen = name or _cluster_of_grids((grid,), folders)
    return cluster_named(chosen, folders, changes) if chosen is not None else None


def cluster_named(name: str, folders: ConfFolders, changes: Sequence[str] = ()) -> ClusterSpec:
    """The cluster called ``name``, with the ``changes`` of a command line. Raises `InvalidSweep` if no file describes
    it, or for mistakes in the file or the changes."""
    folders.refuse_mistakes([("cluster", name)])
    given = Overrides(grids=(), models=None, groups={}, hydra=cluster_changes(changes))
    data = compose(given, {"cluster": name}, folders)
    return _cluster(name, data, folders)


def _cluster(name: str | None, data: Mapping[str, Any], folders: ConfFolders) -> ClusterSpec:
    """The cluster of a composed configuration, which is the option ``name``; None: that of every configuration."""
    fields = _mapping(data, "cluster")
    if name is None:
        return read_cluster(fields)
    with folders.named("cluster", name):
        return read_cluster(fields, name)


def _clusters(place: str, names: Any, folders: ConfFolders) -> tuple[ClusterSpec, ...]:
    """The clusters of a list of names, each once. Raises `InvalidSweep` for anything else."""
    unique_names = dict.fromkeys(checks.text(place, name) for name in checks.sequence(place, names))
    for name in unique_names:
        folders.find("cluster", name)
    return tuple(cluster_named(name, folders) for name in unique_names)


def compose_search(overrides: Sequence[str]) -> Settings:
    """The section ``search`` alone, without a grid. Raises `InvalidSweep` for a mistake of the user."""
    parse_overrides(overrides)
    given = Overrides(grids=(), models=None, groups={}, hydra=tuple(overrides))
    return settings_from(_mapping(compose(given, {}, ConfFolders()), "search"))


def _cluster_of_grids(grids: Sequence[str], folders: ConfFolders) -> str | None:
    """The cluster that the grids name, if any. Raises `InvalidSweep` if they name different ones."""
    named = {grid: _cluster_of(folders.lineage("grid", grid)) for grid in grids}
    clusters = {str(cluster) for cluster in named.values() if cluster is not None}
    if len(clusters) > 1:
        listed = ", ".join(f"{grid} for {cluster}" for grid, cluster in named.items())
        raise InvalidSweep(f"these grids are meant for different clusters ({listed}); choose one with cluster=NAME")
    for cluster in clusters:
        folders.find("cluster", cluster)
    return next(iter(clusters), None)


def _cluster_of(files: Sequence[BuiltFile]) -> Any:
    """The cluster of a grid, or of the grids that it is built on: the last one named counts."""
    named = [
        file.fields["cluster"] for file in files if file.group == "grid" and file.fields.get("cluster") is not None
    ]
    return named[-1] if named else None


def _with_models(grid: Any, models: tuple[str, ...] | None) -> Mapping[str, Any]:
    """The grid's data with its models replaced by ``models``, if given."""
    if not isinstance(grid, Mapping):
        return {}
    fields = {str(key): value for key, value in grid.items()}
    if models is not None:
        groups, axes = fields.get("zip") or {}, fields.get("axes") or {}
        if not isinstance(groups, Mapping) or not isinstance(axes, Mapping):
            return fields  # refused later, when the grid is read
        for name, members in groups.items():
            if isinstance(members, Mapping) and "model" in members:
                raise InvalidSweep(f"model= cannot replace a model that zip.{name} pairs with other values")
        fields["axes"] = {**axes, "model": list(models)}
    return fields


def _mapping(data: Mapping[str, Any], section: str) -> dict[str, Any]:
    value = data.get(section)
    if not isinstance(value, Mapping):
        hint = f"; use {section}=NAME" if section in CHOSEN_GROUPS else ""
        raise InvalidSweep(f"{section}={value!r} is not a group of options{hint}")
    return {str(key): entry for key, entry in value.items()}


def _constants(data: Mapping[str, Any]) -> dict[str, int]:
    """Values of the cluster that expressions of a grid may use."""
    cluster = data.get("cluster")
    devices = cluster.get("devices_per_node") if isinstance(cluster, Mapping) else None
    return {"devices_per_node": devices} if type(devices) is int and devices >= 1 else {}


def _measure(fields: Mapping[str, Any]) -> MeasureSpec:
    measure, mistakes = checks.build(MeasureSpec, "measure", fields), Mistakes()
    with mistakes.collected():
        checks.whole_number("measure.warmup_steps", measure.warmup_steps, 0)
    with mistakes.collected():
        if measure.timed_steps is not None:
            checks.whole_number("measure.timed_steps", measure.timed_steps, 1)
    with mistakes.collected():
        if measure.slow_step_s is not None:
            checks.number("measure.slow_step_s", measure.slow_step_s, above=0, unit="seconds")
    for name in ("memory_probe", "profile"):
        with mistakes.collected():
            checks.flag(f"measure.{name}", getattr(measure, name))
    mistakes.refuse()
    return measure


def _plan_options(section: Mapping[str, Any]) -> PlanOptions:
    fields = {name: value for name, value in section.items() if name != "learn_from"}
    deadline = checks.build(Deadline, "plan.deadline", _in_seconds("plan.deadline", _mapping(fields, "deadline")))
    options = checks.build(PlanOptions, "plan", {**_in_seconds("plan", fields), "deadline": deadline})
    mistakes = Mistakes()
    for place, owner in (("plan", options), ("plan.deadline", deadline)):
        for option in dataclasses.fields(owner):
            with mistakes.collected():
                value = getattr(owner, option.name)
                if option.type == "bool":
                    checks.flag(f"{place}.{option.name}", value)
                elif option.type == "float":
                    checks.number(f"{place}.{option.name}", value, least=0)
    with mistakes.collected():
        checks.whole_number("plan.audit_seed", options.audit_seed, 0)
    mistakes.refuse()
    if options.audit > 1:
        raise InvalidSweep(
            f"plan.audit={options.audit:g} must be a share of the points refused for memory, from 0 to 1"
        )
    return options


def _in_seconds(place: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Options with times (names ending in ``_s``) converted from text with a unit to seconds."""
    return {name: seconds(f"{place}.{name}", value) if name.endswith("_s") else value for name, value in fields.items()}


def _budget(fields: Any) -> float | None:
    if not isinstance(fields, Mapping) or set(fields) != {"gpu_hours"}:
        raise InvalidSweep(f"budget={fields!r}; write budget.gpu_hours=NUMBER")
    value = fields["gpu_hours"]
    if value is None:
        return None
    return float(checks.number("budget.gpu_hours", value, above=0))


def _sweep_name(given: Any, default: str) -> str:
    name = default if given is None else given
    if not isinstance(name, (str, int)) or isinstance(name, bool):  # 1.10 is 1.1 by now
        raise InvalidSweep(f"name={name!r} must be one word; put a number in quotes: name=\"'1.10'\"")
    text = str(name)
    if not text or text != text.strip() or text.startswith((".", "-")) or "/" in text or not text.isprintable():
        raise InvalidSweep(
            f"name={text!r} must be usable as the name of one folder: printable, without / and not starting with . or -"
        )
    if (length := len(text.encode())) > _MAX_NAME_BYTES:
        hint = "" if given is not None else "; give a shorter one with name=NAME"
        raise InvalidSweep(
            f"name={text[:40]}... has {length} bytes; a folder's name has at most {_MAX_NAME_BYTES}{hint}"
        )
    return text


def _results_dir(given: Any) -> Path:
    if not isinstance(given, str) or not given or not given.isprintable():
        raise InvalidSweep(f"results_dir={given!r} must name the folder that holds the sweeps")
    return Path(given).expanduser()
