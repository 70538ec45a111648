"""A plan as a search space: its points that can run, with their closed-form predictions.

The plan's predictions were fitted on rows of other layouts on the cluster. Rows of the plan's own layouts, measured in
other sweeps, are added to the candidates as cells that are not searched: their prediction errors inform the search.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from results.text.numbers import name_routing
from sweep.grids.step_time import StepTime
from sweep.planning.plan import Plan
from sweep.planning.point_verdict import PlannedPoint
from sweep.predicting.codebases import key_of_engine
from sweep.searching.features import FAMILY_AXES, LENGTHS, ZERO
from sweep.searching.recorded import WITHOUT_ROWS
from sweep.searching.space import Flags, Floats, Ints, SearchSpace
from workloads.predict.predictor import NORMAL_90
from workloads.spec.cluster import ClusterSpec
from workloads.spec.documents.lengths import without_path
from workloads.spec.experiment import ENGINE, Experiment, from_dict, layout_id

CAN_RUN = ("run", "cached", "over_budget")
"""Verdicts of candidates. The search may also choose points outside the plan's budget."""
LEAST_TIME_SPREAD = 0.03
"""Least standard deviation of log step time, however narrow the predicted interval: about that of repeated runs."""
BLIND_SPREAD = 0.5
"""Standard deviation of log step time without a prediction."""
LOAD_SPREAD = 0.06
"""Standard deviation of the log of predicted memory."""
_NO_LIMIT = -5.0
"""Log of memory over the limit, used if no limit is known: far below any device's limit."""
CHOICES = 0.7
"""Distance between two different values of a categorical choice (schedule, precision), in length scales."""
_NOT_LAYOUT = {
    "model", "seed", "engine", "engine_version", "global_batch_size", "seq_len", "zero_stage", "micro_batch_size",
    "dp_replicate", "dp_shard", "routing", "routing_imbalance", "capacity_factor", *FAMILY_AXES,
}  # fmt: skip
_FREES_MEMORY = ("micro_batch_size", "zero_stage", "recompute", "recompute_every")


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A row of another sweep on this cluster, for a layout of the plan."""

    experiment: Experiment
    step_time_s: float
    predicted: StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpace:
    cluster: ClusterSpec
    space: SearchSpace
    """Candidates, followed by the rows of other sweeps."""
    points: tuple[PlannedPoint, ...]
    """Planned points of the candidates."""
    place_of: Mapping[str, int]
    """Index of a candidate by its `layout_id`."""
    ids: tuple[str, ...]
    """Experiment ids of the candidates."""
    names: Mapping[int, str]
    """Names of the cells that are searched."""
    known: tuple[KnownRow, ...]
    blind: Flags
    """Candidates whose time was not predicted."""

    def anchor(self, place: int, step_time_s: float) -> None:
        """Give all candidates without a prediction the step time of the first of them that ran."""
        if self.blind[place]:
            self.space.log_time[self.blind] = np.log(step_time_s)


def cell_of(experiment: Experiment) -> tuple[Any, ...]:
    """Key of an experiment's cell: layouts of one cell do the same work with the same engine on the same number of
    devices."""
    e = experiment
    routing = name_routing(e.routing, e.routing_imbalance, e.capacity_factor)
    work = e.model.name, routing, without_path(e.documents), e.world_size, e.seq_len, e.global_batch_size
    return e.engine, e.engine_version, *work


def planned_space(plan: Plan, known: Sequence[KnownRow] = ()) -> PlannedSpace:
    """All layouts of the plan that can run, each once.

    Layouts without a predicted time are assumed equally fast, with a wide spread; the first run sets their time
    (`PlannedSpace.anchor`).
    """
    points: list[PlannedPoint] = []
    place_of: dict[str, int] = {}
    ids: list[str] = []
    # Sort by id, because the order of a plan changes with what has run.
    for one, point in sorted(((point.experiment.id, point) for point in plan.points), key=lambda pair: pair[0]):
        if point.verdict in CAN_RUN and point.price is not None:
            place_of.setdefault(layout_id(point.experiment), len(points))
            if len(place_of) > len(points):
                points.append(point)
                ids.append(one)
    experiments = [point.experiment for point in points] + [one.experiment for one in known]
    numbers: dict[tuple[Any, ...], int] = {}
    cells = [
        numbers.setdefault((place < len(points), *cell_of(e)), len(numbers)) for place, e in enumerate(experiments)
    ]
    models = {name: number for number, name in enumerate(dict.fromkeys(e.model.name for e in experiments))}
    predicted = [point.time.step_time_s if point.time is not None else 1.0 for point in points]
    blind = np.array([point.time is None for point in points] + [False] * len(known))
    times = (*(point.time for point in points), *(one.predicted for one in known))
    fitted = [key_of_engine(e.engine, e.engine_version) in plan.fitted for e in experiments]
    spreads = [_time_spread(*both) for both in zip(times, fitted, strict=True)]
    space = SearchSpace(
        cell=np.array(cells, dtype=np.int64),
        model=np.array([models[e.model.name] for e in experiments], dtype=np.int64),
        gpus=np.array([e.world_size for e in experiments], dtype=float),
        layout=_features(experiments),
        family=np.array(["+".join(n for n in FAMILY_AXES if getattr(e, n) > 1) or "dp" for e in experiments]),
        log_time=np.log([*predicted, *(one.predicted.step_time_s for one in known)]),
        time_spread=np.array(spreads),
        log_load=np.array([*map(_log_load, points), *(_NO_LIMIT for _ in known)]),
        load_spread=np.full(len(experiments), LOAD_SPREAD),
        same_but_memory=np.array([_but_memory(e) for e in experiments]),
        engine=_engines(experiments),
    )
    names = {
        cells[place]: f"{_model_of(e)} on {e.world_size}, {e.seq_len:,} tokens, batch {e.global_batch_size:,}"
        for place, e in enumerate(experiments[: len(points)])
    }
    return PlannedSpace(
        cluster=plan.config.cluster,
        space=space,
        points=tuple(points),
        place_of=place_of,
        ids=tuple(ids),
        names=names,
        known=tuple(known),
        blind=blind,
    )


def _engines(experiments: Sequence[Experiment]) -> Ints | None:
    """`SearchSpace.engine` of experiments."""
    numbers: dict[tuple[str, str], int] = {}
    of_engine = [numbers.setdefault((e.engine, e.engine_version), len(numbers)) for e in experiments]
    return np.array(of_engine, dtype=np.int64) if len(numbers) > 1 else None


def _model_of(e: Experiment) -> str:
    return e.model.name if e.engine == ENGINE else f"{e.model.name} with {e.engine}"


def _time_spread(time: StepTime | None, fitted: bool) -> float:
    """Standard deviation of log step time, from the predicted 90 % interval; ``fitted``: to rows of its engine."""
    if time is None:
        return BLIND_SPREAD
    return max(LEAST_TIME_SPREAD, (1.0 if fitted else WITHOUT_ROWS) * log(time.high_s / time.low_s) / (2 * NORMAL_90))


def _log_load(point: PlannedPoint) -> float:
    if point.peak_bytes is None or point.limit_bytes is None:
        return _NO_LIMIT
    return float(np.log(point.peak_bytes / point.limit_bytes))


def _but_memory(experiment: Experiment) -> str:
    fields = {field.name: getattr(experiment, field.name) for field in dataclasses.fields(experiment)}
    return repr([value for name, value in fields.items() if name not in (*_FREES_MEMORY, "model", "seed")])


def _features(experiments: Sequence[Experiment]) -> Floats:
    """Features of experiments in the form of `SearchSpace.layout`: degrees, and every other choice that differs between
    them."""
    if not experiments:
        return np.empty((0, 0))
    degrees = {"dp": "dp", "vpp": "virtual_stages", "mbs": "micro_batch_size"}
    columns = [
        np.log2([getattr(e, degrees.get(name, name)) for e in experiments]) / length for name, length in LENGTHS.items()
    ]
    columns.append(np.array([e.zero_stage for e in experiments]) / ZERO)
    for field in dataclasses.fields(experiments[0]):
        values = [str(getattr(e, field.name)) for e in experiments] if field.name not in _NOT_LAYOUT else []
        columns += [np.array([one == value for one in values]) * CHOICES for value in sorted(set(values))[1:]]
    return np.stack(columns, axis=1).astype(float)


def known_rows(plan: Plan, most: int = 400) -> list[KnownRow]:
    """The newest rows of the plan's layouts from other sweeps of the results folder, on this cluster with the plan's
    engine.

    Rows of other layouts are not needed: the plan's predictions were already fitted on them.
    """
    from results.tables.schema import MEASUREMENT_VERSION
    from results.tables.store import own_sweep_dirs, read_runs

    config, matching_rows = plan.config, []
    times = {layout_id(point.experiment): point.time for point in plan.points if point.time is not None}
    versions = {point.experiment.engine_version for point in plan.points}
    columns = ["outcome", "method", "cluster", "measurement_version", "engine_version", "step_time_s", "config_json"]
    for folder in own_sweep_dirs(config.results_dir) if config.results_dir.is_dir() else []:
        if folder.resolve() == config.sweep_dir.resolve():
            continue
        for row in read_runs(folder).select([*columns, "started_at"]).to_pylist():
            same = row["cluster"] == config.cluster.name and row["method"] == plan.method
            new = row["measurement_version"] == MEASUREMENT_VERSION and row["engine_version"] in versions
            if same and new and row["outcome"] == "ok" and row["step_time_s"] and row["config_json"]:
                matching_rows.append(row)
    rows = []
    for row in sorted(matching_rows, key=lambda one: str(one["started_at"])):
        experiment = _experiment(row["config_json"])
        time = times.get(layout_id(experiment)) if experiment is not None else None
        if experiment is not None and time is not None:
            rows.append(KnownRow(experiment, float(row["step_time_s"]), time))
    return rows[-most:]


def _experiment(text: str) -> Experiment | None:
    import json

    from workloads.spec.errors import InvalidExperiment

    try:
        return from_dict(json.loads(text))
    except (ValueError, TypeError, KeyError, InvalidExperiment):
        return None  # a row of another version cannot be used
