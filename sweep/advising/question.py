"""The question that ``advise`` answers, read from the command line: ``model=llama70b cluster=h100_efa gpus=512``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from sweep.advising.conditions import conditions_of
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import SweepConfig, compose_sweep
from sweep.composing.overrides import parse_overrides
from sweep.grids.axes import AUTO, AXES, BUDGET
from sweep.planning.auto_recompute import budget_limit, refuse_no_room
from workloads.costs.time.known_rates import absent_rates
from workloads.rules.layout_rules import violations
from workloads.spec.checks import number, suggest, whole_number
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import ENGINE, ENGINES, Experiment
from workloads.spec.experiment_values import OptimizerName, Precision, Recurrence, StoredIn
from workloads.spec.expressions import Expression
from workloads.spec.mistakes import Mistakes
from workloads.spec.model_spec import ModelSpec
from workloads.spec.other_names import same_here
from workloads.spec.recurrent_kernels import has_recurrences
from workloads.spec.updates.words import UPDATE_FIELDS

LAYOUT_AXES = (
    *("tp", "cp", "pp", "ep", "etp", "zero_stage", "dp_replicate", "micro_batch_size", "recompute"),
    *("recompute_every", "pp_schedule", "virtual_stages", "cp_kind"),
)
"""Axes that are searched; each may be restricted: ``tp=[1,2,4,8]``."""
OBJECTIVES = ("time", "energy", "cost")
"""What ``optimise`` may rank layouts by: days, joules of a token, device-hours of a token."""
MOST_DEVICES = 65_536
MOST_SIZES = 2_048
DEFAULT_MOST = 2_048
"""Most devices for an inverse question if neither ``gpus`` nor the cluster's nodes limit it."""
_WORK = {"seq_len": 4096, "global_batch_size": 1024}
"""Sizes of a step with their defaults: four million tokens."""
_GOAL = ("tokens", "days", "price")
_OTHERS = (
    *("model", "cluster", "gpus", "precision", "routing", "routing_imbalance", "engine", "compile", "cuda_graph"),
    *UPDATE_FIELDS,
    *("activation_offload", "recurrence", *_WORK, BUDGET, *_GOAL, "results_dir"),
)
_FOLLOW = ("dp", "dp_shard", "num_microbatches")
KNOWN = (*_OTHERS, *LAYOUT_AXES)
MOST_OFFLOADS = 6
"""Most combinations of ``optimizer_offload`` and ``activation_offload``: each is searched by itself."""
_SHARE, _WORDS = "optimizer_offload", "activation_offload"
_SPAN = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of an inverse question: a number of tokens in a number of days."""

    tokens: float
    days: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    config: SweepConfig
    """The shipped options with the chosen cluster, model and results folder."""
    model: ModelSpec
    model_given: str
    """The word that chooses the model on a command line: its name, or the path of its config.json."""
    cluster: ClusterSpec
    cluster_name: str
    """Name of the cluster's file; together with `cluster_changes` it selects the cluster on a command line."""
    cluster_changes: tuple[str, ...]
    conf: tuple[Path, ...]
    """The user's folders, which a command needs that names a file of theirs."""
    sizes: tuple[int, ...]
    """Numbers of devices, smallest first."""
    seq_len: int
    global_batch_size: int
    precision: Precision
    routing: str
    routing_imbalance: float
    engine: str
    engine_version: str
    compile: str
    cuda_graph: str
    recurrence: Recurrence
    grad_reduce: StoredIn
    optimizer: OptimizerName
    optimizer_states: StoredIn
    master_weights: StoredIn
    optimizer_offload: float
    activation_offload: str
    offloads: tuple[tuple[float, str], ...]
    """All pairs of `optimizer_offload` and `activation_offload` that are asked for; the question's own is the first."""
    memory_budget: float | None
    """GiB of a device, with everything on it; None: its memory."""
    axes: Mapping[str, tuple[Any, ...]]
    """Axes of `LAYOUT_AXES` that the user restricted, with their values."""
    where: tuple[Expression, ...]
    """Conditions that every layout must meet."""
    goal: Goal | None
    price: float | None
    """Price of a device-hour; None: unknown."""
    price_source: str

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that training may take, with the workspace of matrix products."""
        limits = (self.cluster.usable_bytes, budget_limit(self.cluster, self.memory_budget))
        return min(limit for limit in limits if limit is not None)

    @property
    def each_offload(self) -> tuple[Question, ...]:
        """The question for each of `offloads` alone."""
        return tuple(
            dataclasses.replace(self, optimizer_offload=share, activation_offload=words, offloads=((share, words),))
            for share, words in self.offloads
        )

    @property
    def chooses_by_stage(self) -> bool:
        """Whether each layout gets its recomputation by stage (``recompute=auto``)."""
        return AUTO in self.axes.get("recompute", ())


def read_question(overrides: Sequence[str], folders: ConfFolders | None = None, where: Sequence[str] = ()) -> Question:
    """Reads the command line. ``where``: conditions on layouts. Raises `InvalidSweep` (or another `UltrasweepError`)
    with one line for a mistake of the user."""
    folders = folders or ConfFolders()
    values: dict[str, Any] = {}
    changes: list[str] = []
    mistakes = Mistakes()
    for text, override in zip(overrides, parse_overrides(overrides), strict=True):
        with mistakes.collected():
            _read_word(text, override, values, changes)
    for name in ("model", "cluster"):
        with mistakes.collected():
            if name not in values:
                known = ", ".join(folders.names(name))
                raise InvalidSweep(f"advise: {name} is missing: give {name}=NAME, one of {known}")
            if not isinstance(values[name], str):
                raise InvalidSweep(f"advise: {name}={values[name]!r}: give one {name}")
    mistakes.refuse()
    begin = ["+grid=one_point", f"model={values['model']}", f"cluster={values['cluster']}", *changes]
    begin += [f"results_dir={values['results_dir']}"] if "results_dir" in values else []
    config = compose_sweep(begin, folders)
    cluster = config.cluster
    offloads, budget = _offloads(values), _memory_budget(values, cluster)
    precision: Precision = _choice("precision", values.get("precision", "bf16"))
    _refuse_unknown_rates(cluster, precision, offloads, budget)
    goal = _goal(values)
    engine = _choice("engine", values.get("engine", ENGINE))
    _refuse_unknown_memory(engine, precision, config.models[values["model"]])
    price = number("advise: price", values["price"], above=0) if "price" in values else cluster.price_per_device_hour
    work: dict[str, Any] = {
        name: whole_number(f"advise: {name}", values.get(name, default), 1) for name, default in _WORK.items()
    }
    return Question(
        config=config,
        model=config.models[values["model"]],
        model_given=values["model"],
        cluster=cluster,
        cluster_name=values["cluster"],
        cluster_changes=tuple(changes),
        conf=folders.own,
        sizes=_sizes(values.get("gpus"), cluster, goal is not None),
        precision=precision,
        routing=_choice("routing", values.get("routing", "balanced")),
        routing_imbalance=_choice("routing_imbalance", values.get("routing_imbalance", 1.0)),
        engine=engine,
        engine_version=ENGINES[engine],
        compile=_choice("compile", values.get("compile", "none")),
        cuda_graph=_choice("cuda_graph", values.get("cuda_graph", "auto")),
        recurrence=_recurrence(values, config.models[values["model"]], cluster, precision, engine),
        axes={name: _narrowed(name, values[name]) for name in LAYOUT_AXES if name in values},
        where=conditions_of(where),
        goal=goal,
        price=price,
        price_source="price=" if "price" in values else f"cluster file {cluster.name}",
        offloads=offloads,
        optimizer_offload=offloads[0][0],
        activation_offload=offloads[0][1],
        memory_budget=budget,
        **{name: _choice(name, values.get(name, usual)) for name, usual in UPDATE_FIELDS.items() if name != _SHARE},
        **work,
    )


def _read_word(text: str, override: Any, values: dict[str, Any], changes: list[str]) -> None:
    """Adds an override to the ``values`` of the question or to the ``changes`` of the cluster."""
    name = override.key_or_group
    if name.startswith("cluster.") or name == "plan.learn_from":
        changes.append(text)
    elif name not in KNOWN or text.startswith(("+", "~")):
        hint = "; did you mean 'gpus'?" if same_here(name, AXES) == "world_size" else suggest(name, KNOWN)
        if name in _FOLLOW:
            hint = "; it follows from gpus and the other degrees, and --where 'dp <= 64' restricts it"
        raise InvalidSweep(f"advise: no option {name!r}{hint}")
    elif name in values:
        raise InvalidSweep(f"advise: {name} is given twice; give it once")
    else:
        values[name] = override.value()


def _refuse_unknown_rates(
    cluster: ClusterSpec, precision: str, offloads: Sequence[tuple[float, str]], budget: float | None
) -> None:
    uses_host = any(share > 0 or words != "none" for share, words in offloads)
    absent = absent_rates(cluster, precision, uses_host=uses_host)
    absent += ["device.memory_bytes"] if cluster.usable_bytes is None and budget is None else []
    if absent:
        raise InvalidSweep(
            f"advise: the file of cluster {cluster.name} ({cluster.device.name}) lacks {', '.join(absent)}, so "
            f"nothing can be predicted; give cluster.{absent[0]}=..., or another cluster"
        )


def _refuse_unknown_memory(engine: str, precision: Precision, model: ModelSpec) -> None:
    """The memory of other engines is known for dense layers in 16 bits and less."""
    if engine != ENGINE and (model.moe is not None or model.mla is not None or precision in ("fp16", "fp32", "fp64")):
        raise InvalidSweep(
            f"advise: engine={engine} is predicted for dense models in bf16 or fp8; use engine={ENGINE}, or another "
            "model or precision"
        )


def _recurrence(
    values: Mapping[str, Any], model: ModelSpec, cluster: ClusterSpec, precision: Precision, engine: str
) -> Recurrence:
    """What computes recurrent layers unless the question says it: kernels, if the rule ``recurrence`` lets them."""
    if "recurrence" in values:
        given: Recurrence = _choice("recurrence", values["recurrence"])
        return given
    if not has_recurrences(model):
        return "torch"
    e = Experiment.canonical(
        model=model,
        global_batch_size=1,
        precision=precision,
        recurrence="fla",
        engine=engine,
        engine_version=ENGINES[engine],
    )
    return "torch" if any(one.rule == "recurrence" for one in violations(e, cluster)) else "fla"


def _goal(values: Mapping[str, Any]) -> Goal | None:
    given = [name for name in ("tokens", "days") if name in values]
    if len(given) == 1:
        raise InvalidSweep(f"advise: {given[0]} needs {'days' if given == ['tokens'] else 'tokens'} too")
    if not given:
        return None
    tokens, days = (number(f"advise: {name}", values[name], above=0) for name in ("tokens", "days"))
    if math.inf in (tokens, days):
        raise InvalidSweep(f"advise: tokens={tokens:g} in days={days:g}: both must be finite")
    return Goal(tokens=float(tokens), days=float(days))


def _offloads(values: Mapping[str, Any]) -> tuple[tuple[float, str], ...]:
    """The pairs of shares of the optimizer and words of activations on the host that are asked for."""
    given = values.get(_WORDS, "none")
    if AUTO in (given if isinstance(given, list) else [given]):
        raise InvalidSweep(
            f"advise: {_WORDS}=auto: name what to compare, such as {_WORDS}=[none,input,all]; a plan takes auto"
        )
    shares, words = (_narrowed(name, values.get(name, usual)) for name, usual in ((_SHARE, 0.0), (_WORDS, "none")))
    if len(shares) * len(words) > MOST_OFFLOADS:
        raise InvalidSweep(
            f"advise: {_SHARE} and {_WORDS} have {len(shares)} x {len(words)} combinations, each of which is searched "
            f"by itself; at most {MOST_OFFLOADS}: name fewer values"
        )
    return tuple(product(shares, words))


def _memory_budget(values: Mapping[str, Any], cluster: ClusterSpec) -> float | None:
    budget = values.get(BUDGET)
    if isinstance(budget, list):
        raise InvalidSweep(f"advise: {BUDGET}: give one number of GiB, and the command again for another")
    budget = _choice(BUDGET, budget)
    refuse_no_room(cluster, budget)
    return float(budget) if budget is not None else None


def _choice(name: str, value: Any) -> Any:
    return AXES[name].check(f"advise: {name}", value)


def _narrowed(name: str, value: Any) -> tuple[Any, ...]:
    values = value if isinstance(value, list) else [value]
    if not values:
        raise InvalidSweep(f"advise: {name}=[] is empty")
    return tuple(dict.fromkeys(_choice(name, one) for one in values))


def _sizes(given: Any, cluster: ClusterSpec, inverse: bool) -> tuple[int, ...]:
    """Numbers of devices from one number, several, or a range. A range stands for whole nodes and, below one node, for
    the divisors of its number of devices."""
    node = cluster.devices_per_node
    there = node * cluster.nodes if cluster.nodes is not None else None
    known = [count for count in (there, cluster.joined_devices) if count is not None]
    most = min(known, default=None)
    if given is None:
        if not inverse:
            raise InvalidSweep(
                "advise: gpus is missing: give gpus=512, gpus=[64,128] or gpus=16-1024 (all whole nodes)"
            )
        given = f"1-{most if most is not None else DEFAULT_MOST}"
    span = _SPAN.fullmatch(given) if isinstance(given, str) else None
    if span:
        low, high = int(span[1]), int(span[2])
        if low > high or high > MOST_DEVICES:
            raise InvalidSweep(
                f"advise: gpus={given} must go from a smaller to a larger number, {MOST_DEVICES} at most"
            )
        parts = [size for size in range(low, min(high, node - 1) + 1) if size and node % size == 0]
        sizes = [*parts, *range(max(node, -(-low // node) * node), high + 1, node)]
    else:
        sizes = given if isinstance(given, list) else [given]
    if given == []:
        raise InvalidSweep("advise: gpus=[] is empty")
    for size in sizes:
        whole_number("advise: gpus", size, 1)
    if not sizes:
        raise InvalidSweep(f"advise: gpus={given} contains no whole number of nodes ({node} devices each)")
    if len(sizes) > MOST_SIZES:
        raise InvalidSweep(f"advise: gpus={given} are {len(sizes):,} sizes; at most {MOST_SIZES:,}")
    if most is not None and max(sizes) > most:
        raise InvalidSweep(f"advise: gpus={max(sizes)}, but cluster {cluster.name} has {most:,} devices")
    return tuple(sorted(set(sizes)))
