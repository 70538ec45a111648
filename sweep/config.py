"""One sweep's configuration: Hydra composes it once, and what comes out is frozen data that knows no Hydra."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweep.conffiles import ConfFolders
from sweep.grid import GridSpec, grid_from_dict
from sweep.overrides import CHOSEN_GROUPS, Overrides, sort_overrides
from workloads.checks import suggest
from workloads.cluster import ClusterSpec, check_cluster, cluster_from_dict
from workloads.errors import InvalidSweep
from workloads.experiment import ModelSpec
from workloads.protocol import MeasureSpec

_MAX_NAME_BYTES = 255
_SECTIONS = ("budget", "cluster", "grids", "launcher", "measure", "name", "plan", "results_dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """Longest time that a point may take: ``base_s + factor * predicted time of its steps``."""

    base_s: float
    factor: float
    without_estimate_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """See the comments in ``conf/config.yaml``."""

    oom_margin: float
    run_predicted_oom: bool
    run_cached: bool
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
    """Every model that a grid names."""
    cluster: ClusterSpec
    cluster_given: bool
    """Chosen on the command line, not by the grid."""
    launcher: Mapping[str, Any]
    """Contents of the launcher's file; ``launcher`` is its kind."""
    launcher_given: bool
    """Chosen on the command line, not by what this machine has."""
    measure: MeasureSpec
    plan: PlanOptions
    budget_gpu_hours: float | None

    @property
    def sweep_dir(self) -> Path:
        return self.results_dir / self.name

    @property
    def launcher_kind(self) -> str:
        return str(self.launcher["launcher"])


def compose_sweep(
    words: Sequence[str],
    folders: ConfFolders | None = None,
    *,
    extra_where: Sequence[str] = (),
    cluster: str | None = None,
    launcher: str = "local",
) -> SweepConfig:
    """The sweep that the command line's ``words`` describe.

    ``extra_where``: filters for every grid. ``cluster``: goes before the grids' own, not before one given in ``words``.
    ``launcher``: for words that give none.
    Raises `InvalidSweep` (or another `UltrasweepError`) with one line for everything that a user can get wrong.
    """
    folders = folders or ConfFolders()
    sorted_overrides = sort_overrides(words, folders)
    given = sorted_overrides.groups.get("cluster")
    chosen = given or cluster or _cluster_of_grids(sorted_overrides.grids, folders)
    groups = {"launcher": launcher, **sorted_overrides.groups, **({"cluster": chosen} if chosen else {})}
    data = _compose(sorted_overrides, groups, folders)
    for section in data:
        if section not in _SECTIONS:
            known = {*_SECTIONS, "grid", "model"} - {"grids"}
            raise InvalidSweep(f"no option {section!r} at the top level{suggest(section, known)}")
    grids = tuple(
        grid_from_dict(name, _with_models(data["grids"][name], sorted_overrides.models), extra_where)
        for name in sorted_overrides.grids
    )
    names = {
        str(row[axis.names.index("model")])
        for grid in grids
        for axis in grid.axes
        if "model" in axis.names
        for row in axis.rows
    }
    options = _mapping(data, "launcher")
    kind = options.get("launcher")
    if kind not in ("local", "rehearse", "slurm"):
        raise InvalidSweep(f"launcher.launcher={kind!r}; it may be local, rehearse or slurm")
    default_name = "+".join(sorted_overrides.grids) + ("-rehearsed" if kind == "rehearse" else "")
    return SweepConfig(
        name=_sweep_name(data["name"], default_name),
        results_dir=_results_dir(data["results_dir"]),
        grids=grids,
        models={name: folders.model(name) for name in sorted(names)},
        cluster=check_cluster(cluster_from_dict(_mapping(data, "cluster"))),
        cluster_given=given is not None,
        launcher=options,
        launcher_given="launcher" in sorted_overrides.groups,
        measure=_measure(_mapping(data, "measure")),
        plan=_plan_options(_mapping(data, "plan")),
        budget_gpu_hours=_budget(data["budget"]),
    )


def _cluster_of_grids(grids: Sequence[str], folders: ConfFolders) -> str | None:
    """The cluster that the grids are meant for; grids for different ones leave the choice to the user."""
    wanted = {grid: folders.read("grid", grid).get("cluster") for grid in grids}
    clusters = {str(cluster) for cluster in wanted.values() if cluster is not None}
    if len(clusters) > 1:
        told = ", ".join(f"{grid} for {cluster}" for grid, cluster in wanted.items())
        raise InvalidSweep(f"these grids are meant for different clusters ({told}); choose one with cluster=NAME")
    for cluster in clusters:
        folders.find("cluster", cluster)
    return next(iter(clusters), None)


def _compose(words: Overrides, groups: Mapping[str, str], folders: ConfFolders) -> dict[str, Any]:
    """Compose once and return plain data; Hydra's errors become one line."""
    from hydra import compose, initialize_config_module
    from hydra.errors import ConfigCompositionException
    from omegaconf import OmegaConf

    base = [f"+grid@grids.{name}={name}" for name in words.grids] + [
        f"{group}={name}" for group, name in groups.items()
    ]
    if folders.own:
        base.append(f"hydra.searchpath=[{','.join(_quoted(f'file://{folder.resolve()}') for folder in folders.own)}]")
    with _one_line_errors(), initialize_config_module("sweep.conf", version_base="1.3"):
        try:
            composed = compose("config", overrides=[*base, *words.hydra])
        except ConfigCompositionException as error:
            known = OmegaConf.to_container(compose("config", overrides=base), resolve=False)
            raise _unknown_key(words.hydra, known) or error from None
        data = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(data, dict)
    return {str(key): value for key, value in data.items()}


def _quoted(text: str) -> str:
    """A text in Hydra's grammar, whatever it holds: backslashes count only before a quote."""
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


@contextmanager
def _one_line_errors() -> Iterator[None]:
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        yield
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InvalidSweep(f"the configuration cannot be composed: {first.strip()}") from None


def _unknown_key(overrides: Sequence[str], known: Any) -> InvalidSweep | None:
    """What to say about the first override that changes something that is not there."""
    for override in overrides:
        if override.startswith("+"):
            continue
        key = override.removeprefix("~").partition("=")[0]
        node, walked = known, ""
        for part in key.split("."):
            if not isinstance(node, Mapping):
                return InvalidSweep(f"{override}: {walked} is a single value, it has no {part!r}")
            if part not in node:
                place = f"in {walked}" if walked else "at the top level"
                return InvalidSweep(f"{override}: no option {part!r} {place}{suggest(part, _options(node, walked))}")
            node, walked = node[part], f"{walked}.{part}".lstrip(".")
    return None


def _options(node: Mapping[str, Any], walked: str) -> list[str]:
    names = [str(key) for key in node if key != "grids"]
    return names if walked else [*names, "grid", "model"]


def _with_models(grid: Any, models: tuple[str, ...] | None) -> Mapping[str, Any]:
    """The grid's data, with the models of the command line in place of its own."""
    if not isinstance(grid, Mapping):
        return {}
    fields = {str(key): value for key, value in grid.items()}
    if models is not None:
        for name, members in (fields.get("zip") or {}).items():
            if isinstance(members, Mapping) and "model" in members:
                raise InvalidSweep(f"model= cannot replace a model that zip.{name} pairs with other values")
        fields["axes"] = {**(fields.get("axes") or {}), "model": list(models)}
    return fields


def _mapping(data: Mapping[str, Any], section: str) -> dict[str, Any]:
    value = data.get(section)
    if not isinstance(value, Mapping):
        hint = f"; use {section}=NAME" if section in CHOSEN_GROUPS else ""
        raise InvalidSweep(f"{section}={value!r} is not a group of options{hint}")
    return {str(key): entry for key, entry in value.items()}


def _measure(fields: Mapping[str, Any]) -> MeasureSpec:
    measure: MeasureSpec = _build(MeasureSpec, "measure", fields)
    for name, least in (("warmup_steps", 0), ("timed_steps", 1)):
        value = getattr(measure, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InvalidSweep(f"measure.{name}={value!r} must be a whole number of at least {least}")
    return measure


def _plan_options(fields: Mapping[str, Any]) -> PlanOptions:
    deadline: Deadline = _build(Deadline, "plan.deadline", _mapping(fields, "deadline"))
    options: PlanOptions = _build(PlanOptions, "plan", {**fields, "deadline": deadline})
    for place, owner in (("plan", options), ("plan.deadline", deadline)):
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name)
            if isinstance(value, Deadline):
                continue
            if field.type == "bool":
                if not isinstance(value, bool):
                    raise InvalidSweep(f"{place}.{field.name}={value!r} must be true or false")
            elif not _is_number(value) or value < 0:
                raise InvalidSweep(f"{place}.{field.name}={value!r} must be a number of at least 0")
    return options


def _build(kind: type[Any], place: str, fields: Mapping[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    for name in fields:
        if name not in names:
            raise InvalidSweep(f"no option {name!r} in {place}{suggest(name, names)}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise InvalidSweep(f"{place}: {error}") from None


def _budget(fields: Any) -> float | None:
    if not isinstance(fields, Mapping) or set(fields) != {"gpu_hours"}:
        raise InvalidSweep(f"budget={fields!r}; write budget.gpu_hours=NUMBER")
    value = fields["gpu_hours"]
    if value is None:
        return None
    if not _is_number(value) or value <= 0:
        raise InvalidSweep(f"budget.gpu_hours={value!r} must be a number above 0")
    return float(value)


def _sweep_name(given: Any, default: str) -> str:
    name = default if given is None else given
    if not isinstance(name, (str, int, float)) or isinstance(name, bool):
        raise InvalidSweep(f"name={name!r} must be one word")
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
