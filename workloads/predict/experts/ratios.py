"""What routed experts change in the time and memory of a table's rows: ratios to the dense rows that the form knows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from workloads.costs.memory.estimate import peak_stage
from workloads.costs.time.step_times import StepTimes
from workloads.predict import layouts
from workloads.predict.experts.columns import Experts, experiment_of
from workloads.predict.experts.dispatched import added_seconds
from workloads.predict.experts.overheads import expert_factor, host_waits_of_experts, host_work_of_experts
from workloads.predict.factors import Factors
from workloads.predict.network_terms import without_outer_tiers
from workloads.predict.parameters import time_parameters
from workloads.predict.points import Floats, Points
from workloads.predict.predictor import NORMAL_90, Measured, Prediction, Predictor
from workloads.predict.profiles import Profile
from workloads.predict.table import Table
from workloads.rules.layout_rules import layout_violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import ENGINE, Experiment, from_json

_FORMATS = ("grad_reduce", "optimizer_states", "master_weights")
"""Fields of an experiment that `Profile.states` sets."""


@dataclass(frozen=True, slots=True)
class RoutedRows:
    """Ratios of a table's rows to their dense neighbours, as arrays over its points; 1 for dense rows."""

    points: Points
    """The table's points, with the host work of experts, and what is off alike in factors of rows that are alike."""
    factors: Factors
    """`layouts.Structures.factors`; of rows of other engines such that the ratio of whole steps is that of the work."""
    of_layers: Floats
    memory: Floats
    """Ratio of the peaks; of rows of other engines as many bytes more as this engine's closed form has, over the peak
    that the form has of the dense neighbour before any fit."""
    refused: Mapping[int, str]
    """Reason why a point with experts cannot be predicted, by its place."""

    def predict(self, predictor: Predictor) -> Prediction:
        """Predictions of the points, experts included."""
        dense = predictor.predict(self.points)
        factors, of_layers = _of_steps(self.factors, self.of_layers, predictor, self.points)
        spread = NORMAL_90 * _by_itself(factors, of_layers, layouts.PLANNED_SPREAD)
        wide = np.hypot(np.log(dense.high_s / dense.step_time_s), spread)
        middle = factors * dense.step_time_s
        return dataclasses.replace(
            dense,
            step_time_s=middle,
            low_s=middle * np.exp(-wide),
            high_s=middle * np.exp(wide),
            allocated_bytes=self.memory * dense.allocated_bytes,
            reserved_bytes=self.memory * dense.reserved_bytes,
        )

    def without_experts(self, measured: Measured, predictor: Predictor) -> Measured:
        """Measurements divided by what the experts of their rows change. Rows that are refused are left out."""
        factors, of_layers = _of_steps(self.factors, self.of_layers, predictor, self.points)
        points = dataclasses.replace(self.points, doubt=_by_itself(factors, of_layers, layouts.STRUCTURE_SPREAD))
        kept = [place for place in range(len(points)) if place not in self.refused]
        return Measured(
            points.take(kept),
            (measured.step_time_s / factors)[kept],
            (measured.reserved_bytes / self.memory)[kept],
            measured.out_of_memory[kept],
        )


def routed_rows(table: Table, profiles: Mapping[str, Profile], stored: Sequence[str] | None = None) -> RoutedRows:
    """The ratios of every row of a table. ``profiles``: those of its code bases. ``stored``: the row's experiments as
    JSON, which say more than columns do."""
    count = len(table.points)
    factors, of_layers, memory = Factors.nothing(count), np.ones(count), np.ones(count)
    routed, waits, latents, added = (np.zeros(count) for _ in range(4))
    refused: dict[int, str] = {}
    by_cluster: dict[str, tuple[ClusterSpec, dict[int, Experiment]]] = {}
    neighbours: dict[int, Experiment] = {}
    for place, experts in enumerate(table.experts):
        if experts is None:
            continue
        cluster = table.clusters[place]
        own = stored is not None or table.points.codebase[place] == ENGINE
        try:
            states = profiles[str(table.points.codebase[place])].states if not own else ""
            experiment = (
                _experiment(table, place, own, states) if stored is None else from_json(stored[table.rows[place]])
            )
            if not layouts.is_predicted(experiment, cluster):
                raise ValueError(f"rates of {cluster.name} for {experiment.precision} are not known")
        except (ValueError, InvalidExperiment) as error:
            refused[place] = f"the experts cannot be predicted: {error}"
            continue
        by_cluster.setdefault(cluster.name, (cluster, {}))[1][place] = experiment
        near = layouts.plain(experiment) if own else neighbours.setdefault(place, _neighbour(experiment, table, place))
        peak, of_near = (peak_stage(one).peak_bytes for one in (experiment, near))
        memory[place] = peak / of_near
        added[place] = peak - of_near
        routed[place] = host_work_of_experts(experiment)
        waits[place] = host_waits_of_experts(experiment)
        latents[place] = experiment.model.mla is not None and not own
    points = dataclasses.replace(
        without_outer_tiers(table.points, [experts is not None for experts in table.experts]),
        routed=routed,
        waits=waits,
        latents=latents,
    )
    foreign, unfitted = list(neighbours), Predictor.learn(None, profiles)
    if neighbours:
        dense = unfitted.predict(points.take(foreign))
        memory[foreign] = 1 + added[foreign] / dense.allocated_bytes
    points = dataclasses.replace(points, capacity=table.points.capacity / memory)
    for cluster, experiments in by_cluster.values():
        structures = layouts.Structures(cluster)
        places = [place for place in experiments if place not in neighbours]
        own_factors = structures.factors([experiments[place] for place in places])
        factors.put(places, own_factors)
        of_layers[places] = structures.of_layers([experiments[place] for place in places], own_factors)
        others = {at: (one, neighbours[at]) for at, one in experiments.items() if at in neighbours}
        sent = [at for at in others if _is_dispatched(table.experts[at])]
        copied = [at for at in others if at not in sent]
        factors.work[copied] = of_layers[copied] = _against(cluster, [others[at] for at in copied])
        factors.work[sent] = _with_dispatch(table, points, profiles, cluster, {at: others[at] for at in sent})
    if neighbours:
        factors.exposed[foreign] = factors.updates[foreign] = factors.work[foreign]
    points = dataclasses.replace(points, scaled=of_layers)
    alike = math.sqrt(layouts.IN_COMMON) * layouts.spread_of(*_of_steps(factors, of_layers, unfitted, points))
    points = dataclasses.replace(points, structure_doubt=alike)
    return RoutedRows(points, factors, of_layers, memory, refused)


def _of_steps(factors: Factors, of_layers: Floats, predictor: Predictor, points: Points) -> tuple[Floats, Floats]:
    """Ratios of whole steps: all, and without the effect of another schedule."""
    if not len(points):
        return factors.work, of_layers
    parts = predictor.seconds(points)
    factors = factors.with_hosts(of_layers, parts)
    return factors.of_step(parts), factors.without_schedule(of_layers, parts)


def _by_itself(factors: Floats, of_layers: Floats, share: float) -> Floats:
    """Standard deviation of the part of log(structure factor) that is off in each row by itself; the other part is
    `Points.structure_doubt`."""
    spread: Floats = math.sqrt(1 - layouts.IN_COMMON) * layouts.spread_of(factors, of_layers, share)
    return spread


def _is_dispatched(experts: Experts | None) -> bool:
    return experts is not None and experts.dispatched


def _with_dispatch(
    table: Table,
    points: Points,
    profiles: Mapping[str, Profile],
    cluster: ClusterSpec,
    pairs: Mapping[int, tuple[Experiment, Experiment]],
) -> Floats:
    """Ratios of rows whose code base sends a token once to each rank (`workloads.predict.experts.dispatched`) to their
    dense neighbours as the form predicts these before any fit. ``pairs``: experiments and neighbours by place."""
    if not pairs:
        return np.ones(0)
    places = list(pairs)
    rows = points.take(places)
    dense_s = Predictor.learn(None, profiles).predict(rows).step_time_s
    added_s = np.array(_latents_s(cluster, list(pairs.values())))
    for row, place in enumerate(places):
        profile, experts = profiles[str(points.codebase[place])], table.experts[place]
        assert experts is not None
        values = {name: one.value for name, one in time_parameters(profile).items()}
        added_s[row] += added_seconds(rows.take([row]), values, experts, cluster)
    ratios: Floats = 1 + added_s / dense_s
    return ratios


def _latents_s(cluster: ClusterSpec, pairs: Sequence[tuple[Experiment, Experiment]]) -> Floats:
    """Seconds of a step that latent attention takes more than the attention of each row's neighbour, in 16 bits."""
    added_s, odd = np.zeros(len(pairs)), [at for at, (one, _) in enumerate(pairs) if one.model.mla is not None]
    if not odd:
        return added_s
    times = StepTimes(cluster.with_nearest_network())
    near = [pairs[at][1].replace(precision="bf16") for at in odd]
    latent = [
        dataclasses.replace(
            of_near,
            model=dataclasses.replace(
                of_near.model,
                name=f"{of_near.model.name}, latent",
                head_dim=pairs[at][0].model.head_dim,
                mla=pairs[at][0].model.mla,
            ),
        )
        for at, of_near in zip(odd, near, strict=True)
    ]
    added_s[odd] = times.seconds(latent) - times.seconds(near)
    return added_s


def _experiment(table: Table, place: int, own: bool, states: str = "") -> Experiment:
    """The row's experiment, without its chunks if they cannot be built here. ``own``: whether it is a row of this
    project's engine, whose stages are balanced; others divide their layers evenly. ``states``: `Profile.states`.
    Raises `ValueError` with a reason."""
    fields: dict[str, object] = dict.fromkeys(_FORMATS, states) if states else {}
    experts = table.experts[place]
    if experts is not None and experts.imbalance > 1 and not experts.dispatched:
        fields |= {"routing": "learned", "routing_imbalance": experts.imbalance}
    experiment = experiment_of(table.points, place, experts, **fields)
    if not own and experiment.pp > 1:
        experiment = experiment.replace(pp_split="ends_count" if table.points.ends[place] else "even")
    broken = layout_violations(experiment)
    if broken and experiment.pp > 1:
        experiment = experiment.replace(pp_schedule="1f1b", virtual_stages=1)
        broken = layout_violations(experiment)
    if broken:
        raise ValueError(broken[0].message)
    return experiment


def _against(cluster: ClusterSpec, pairs: Sequence[tuple[Experiment, Experiment]]) -> Floats:
    """Ratios of step times of rows of other engines to those of their neighbours, by pair.

    Experts add as many seconds in 8 bits or less as in 16: moving rows does not depend on it, and kernels of
    Transformer Engine cast beside other work and compute weight gradients in the low format, as this project's do not.
    """
    if not pairs:
        return np.ones(0)
    times = of_near = StepTimes(cluster)
    if (nearest := cluster.with_nearest_network()) is not cluster:
        of_near = StepTimes(nearest)
    dense_s = of_near.seconds([near for _, near in pairs])
    own, near = ([one.replace(precision="bf16") for one in column] for column in zip(*pairs, strict=True))
    added_s = times.seconds(own) - of_near.seconds(near)
    ratios = 1 + added_s / dense_s
    models = [one.model for one, _ in pairs]
    dense = np.array([model.moe.num_dense_layers / model.num_layers if model.moe else 1.0 for model in models])
    of_experts = np.array([expert_factor(one) for one, _ in pairs])
    scaled: Floats = ratios * (of_experts + (1 - of_experts) * dense)
    return scaled


def _neighbour(experiment: Experiment, table: Table, place: int) -> Experiment:
    """The dense layout as which the form predicts a row of another engine: its stages, heads of the row's columns."""
    near = layouts.plain(experiment)
    head_dim = round(float(table.points.queries[place] / table.points.heads[place]))
    model = near.model
    if model.head_dim != head_dim:
        model = dataclasses.replace(model, name=f"{model.name}, heads of {head_dim}", head_dim=head_dim)
    formats = {name: getattr(experiment, name) for name in _FORMATS}
    return dataclasses.replace(near, model=model, pp_split=experiment.pp_split, **formats)
