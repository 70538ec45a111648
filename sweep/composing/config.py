"""One sweep's configuration as frozen data, checked section by section."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sweep.composing.composition import compose, unknown_section
from sweep.composing.conffiles import BuiltFile, ConfFolders
from sweep.composing.overrides import CHOSEN_GROUPS, Overrides, parse_overrides, sort_overrides
from sweep.composing.search_settings import Settings, settings_from
from sweep.grids.grid import GridSpec, grid_from_dict
from workloads.contract.protocol import MeasureSpec
from workloads.spec import checks
from workloads.spec.cluster import ClusterSpec, check_cluster, cluster_from_dict
from workloads.spec.errors import InvalidSweep
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
    for section in data:
        if section not in _SECTIONS:
            known = {name: data[name] for name in _SECTIONS if name in data}
            raise InvalidSweep(unknown_section(section, known, folders))
    grids = tuple(
        grid_from_dict(name, _with_models(data["grids"][name], given.models), extra_where) for name in given.grids
    )
    names = {
        str(row[axis.names.index("model")])
        for grid in grids
        for axis in grid.axes
        if "model" in axis.names
        for row in axis.rows
    }
    options = _mapping(data, "launcher")
    plan = _mapping(data, "plan")
    learn_from = _clusters("plan.learn_from", plan.pop("learn_from", []), folders)
    kind = checks.choice("launcher.launcher", options.get("launcher"), ("local", "rehearse", "slurm"))
    default_name = "+".join(given.grids) + ("-rehearsed" if kind == "rehearse" else "")
    return SweepConfig(
        name=_sweep_name(data["name"], default_name),
        results_dir=_results_dir(data["results_dir"]),
        grids=grids,
        models={name: folders.model(name) for name in sorted(names)},
        cluster=check_cluster(cluster_from_dict(_mapping(data, "cluster"))),
        cluster_given=given_cluster is not None,
        launcher=options,
        launcher_given="launcher" in given.groups,
        measure=_measure(_mapping(data, "measure")),
        plan=_plan_options(plan),
        budget_gpu_hours=_budget(data["budget"]),
        search=settings_from(_mapping(data, "search")),
        learn_from=learn_from,
    )


def cluster_for(grid: str, name: str | None = None, folders: ConfFolders | None = None) -> ClusterSpec | None:
    """The cluster called ``name``, or the cluster of the grid, as its file describes it now; None if the grid has none.

    Raises `InvalidSweep` (or another `UltrasweepError`) for names that do not exist in these folders.
    """
    folders = folders or ConfFolders()
    chosen = name or _cluster_of_grids((grid,), folders)
    return _cluster(chosen, folders) if chosen is not None else None


def _cluster(name: str, folders: ConfFolders) -> ClusterSpec:
    folders.refuse_mistakes([("cluster", name)])
    data = compose(Overrides(grids=(), models=None, groups={}, hydra=()), {"cluster": name}, folders)
    return check_cluster(cluster_from_dict(_mapping(data, "cluster")))


def _clusters(place: str, names: Any, folders: ConfFolders) -> tuple[ClusterSpec, ...]:
    """The clusters of a list of names, each once. Raises `InvalidSweep` for anything else."""
    unique_names = dict.fromkeys(checks.text(place, name) for name in checks.sequence(place, names))
    for name in unique_names:
        folders.find("cluster", name)
    return tuple(_cluster(name, folders) for name in unique_names)


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


def _measure(fields: Mapping[str, Any]) -> MeasureSpec:
    measure = checks.build(MeasureSpec, "measure", fields)
    checks.whole_number("measure.warmup_steps", measure.warmup_steps, 0)
    if measure.timed_steps is not None:
        checks.whole_number("measure.timed_steps", measure.timed_steps, 1)
    if measure.slow_step_s is not None:
        checks.number("measure.slow_step_s", measure.slow_step_s, above=0, unit="seconds")
    for name in ("memory_probe", "profile"):
        checks.flag(f"measure.{name}", getattr(measure, name))
    return measure


def _plan_options(fields: Mapping[str, Any]) -> PlanOptions:
    deadline = checks.build(Deadline, "plan.deadline", _in_seconds("plan.deadline", _mapping(fields, "deadline")))
    options = checks.build(PlanOptions, "plan", {**_in_seconds("plan", fields), "deadline": deadline})
    for place, owner in (("plan", options), ("plan.deadline", deadline)):
        for option in dataclasses.fields(owner):
            value = getattr(owner, option.name)
            if option.type == "bool":
                checks.flag(f"{place}.{option.name}", value)
            elif option.type == "float":
                checks.number(f"{place}.{option.name}", value, least=0)
    if options.audit > 1:
        raise InvalidSweep(
            f"plan.audit={options.audit:g} is a must be a share of the points refused for memory, from 0 to 1"
        )
    checks.whole_number("plan.audit_seed", options.audit_seed, 0)
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
