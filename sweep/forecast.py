"""Predicted step times of a plan's points, with an interval: from this engine's profile, the newest probe of the
cluster, and rows that were measured on it.

The form is that of ``python -m sweep predict``. Measured rows count from every sweep of the results folder, but never
those of the plan's own layouts: so no prediction has seen what it is compared with later.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from results.text import plural
from sweep.codebases import GENERAL, read_profiles
from workloads.cluster import ClusterSpec
from workloads.errors import InvalidExperiment
from workloads.experiment import ENGINE, Experiment, from_dict, layout_id
from workloads.predict import layouts
from workloads.predict.points import Points
from workloads.predict.predictor import NORMAL_90, Measured, Prediction, Predictor
from workloads.predict.probed import Probed, probed
from workloads.predict.profiles import find_profile
from workloads.rules import layout_violations

MOST_ROWS = 200
"""The newest measured experiments of an engine that a fit takes: more take longer to learn from than they teach."""
LEAST_OF_ANOTHER = 5
"""Measured experiments of another engine from which on its own are predicted: the form was made of this project's."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step, in seconds."""

    step_time_s: float
    low_s: float
    high_s: float
    """The middle 90 % of where it may be."""
    compute_s: float
    """What the busiest pipeline rank works in it, with what its tensor-parallel peers make it wait."""
    optimizer_s: float
    """After the last backward."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was measured on a cluster before a plan is made."""

    steps: Mapping[str, tuple[Experiment, float]] = field(default_factory=dict)
    """By `layout_id`, layouts that ran there with their step time in seconds, the newest first."""
    probe: Probed | None = None
    probe_day: str = ""
    """When the probe ended, as year-month-day."""


def read_known(cluster: ClusterSpec, results_dir: Path) -> Known:
    """Rows and the probe of a cluster in a results folder; files that cannot be read are passed over."""
    if cluster.matmul_efficiency is None or not results_dir.is_dir():
        return Known()
    from results.probes import load_probe

    rows = sorted(_measured_rows(results_dir, cluster), key=lambda row: str(row[0]), reverse=True)
    steps: dict[str, tuple[Experiment, list[float]]] = {}
    for _, text, seconds in rows:
        try:
            experiment = from_dict(json.loads(text))
        except (InvalidExperiment, ValueError, TypeError, KeyError):  # of a version that this one cannot read
            continue
        if not layout_violations(experiment):
            steps.setdefault(layout_id(experiment), (experiment, []))[1].append(seconds)
    known = {name: (experiment, statistics.median(times)) for name, (experiment, times) in steps.items()}
    probe = load_probe(cluster.name, results_dir)
    if probe is None:
        return Known(known)
    found = probed(probe.rows, cluster)
    told = found if found.time or found.rates else None
    return Known(known, told, f"{probe.measured_at:%Y-%m-%d}")


def _measured_rows(folder: Path, cluster: ClusterSpec) -> Iterable[tuple[object, str, float]]:
    """(when it began, experiment as JSON, seconds) of finished measurements on the cluster, real steps of
    its probes among them."""
    from results import store
    from results.errors import InvalidResults
    from results.schema import MEASUREMENT_VERSION

    columns = ["started_at", "config_json", "step_time_s", "outcome", "method", "cluster", "measurement_version"]
    for sweep in store.own_sweep_dirs(folder):
        try:
            table = store.scan(sweep, "attempts").table
        except (InvalidResults, OSError):
            continue
        for row in table.select(columns).to_pylist():
            if (
                row["outcome"] == "ok"
                and row["method"] == "measured"
                and row["cluster"] == cluster.name
                and row["measurement_version"] == MEASUREMENT_VERSION
                and row["config_json"]
                and (row["step_time_s"] or 0) > 0
            ):
                yield row["started_at"], row["config_json"], row["step_time_s"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicts experiments on one cluster."""

    cluster: ClusterSpec
    predictor: Predictor
    rates: Mapping[str, float] = field(default_factory=dict)
    used: str = ""
    """What it leans on beside the profile, in words; empty: nothing."""
    engines: frozenset[str] = frozenset({ENGINE})
    """Whose experiments are predicted: this project's, and those of which enough was measured."""
    structures: layouts.Structures = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "structures", layouts.Structures(self.cluster))

    @classmethod
    def of(cls, cluster: ClusterSpec, known: Known | None = None, leave_out: Iterable[str] = ()) -> Forecast:
        """``leave_out``: `layout_id` of those whose own measurements, with any seed, shall not be used."""
        known, profiles = known or Known(), dict(read_profiles())
        without, said = set(leave_out), []
        rates: Mapping[str, float] = {}
        if known.probe is not None:
            own = profiles[layouts.CODEBASE]
            profiles[layouts.CODEBASE] = dataclasses.replace(own, time={**own.time, **known.probe.time})
            rates = known.probe.rates
            said.append(f"the probe of {known.probe_day}")
        rows = _rows(cluster, known, without)
        measured, counts = _measured(rows, cluster, rates)
        for engine, count in counts.items():
            of = "" if engine == ENGINE else f" of {engine}"
            said.append(plural(count, "measured experiment") + of)
        used = f"predicted with {' and '.join(said)} on {cluster.name}" if said else ""
        return cls(cluster, Predictor.learn(measured, profiles), rates, used, frozenset({ENGINE, *counts}))

    def times(self, experiments: Sequence[Experiment]) -> list[StepTime | None]:
        """One for each experiment, which breaks no rule of its layout; None: not known."""
        found: list[StepTime | None] = [None] * len(experiments)
        places = [at for at, one in enumerate(experiments) if self._knows(one)]
        if not places:
            return found
        those = [experiments[at] for at in places]
        factors = self.structures.factors(those)
        points = _points(those, self.cluster, self.rates, factors)
        prediction, (busy, after) = self.predictor.predict(points), self.predictor.parts(points)
        middle, low, high = _scaled(prediction, factors)
        for place, at in enumerate(places):
            step = float(middle[place])
            if math.isfinite(step):
                found[at] = StepTime(
                    step, float(low[place]), float(high[place]), step * float(busy[place]), step * float(after[place])
                )
        return found

    def _knows(self, experiment: Experiment) -> bool:
        return experiment.engine in self.engines and layouts.is_predicted(experiment, self.cluster)


def _profile_of(engine: str) -> str:
    """The name of the profile of an engine's code base; `GENERAL` where there is none."""
    profiles = read_profiles()
    return layouts.CODEBASE if engine == ENGINE else find_profile(engine, profiles.values(), profiles[GENERAL]).name


def _points(
    experiments: Sequence[Experiment], cluster: ClusterSpec, rates: Mapping[str, float], factors: np.ndarray
) -> Points:
    points = layouts.points_of(experiments, cluster, rates, factors)
    names = np.array([_profile_of(one.engine) for one in experiments], dtype=np.str_)
    return dataclasses.replace(points, codebase=names)


def _scaled(prediction: Prediction, factors: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step time, low and high with the factors of structures, each as uncertain as it is large."""
    size = np.abs(np.log(factors))
    own = np.where(size > 0, np.maximum(layouts.LEAST_STRUCTURE_SPREAD, layouts.STRUCTURE_SPREAD * size), 0.0)
    wide = np.hypot(np.log(prediction.high_s / prediction.step_time_s), NORMAL_90 * own)
    middle = prediction.step_time_s * factors
    return middle, middle * np.exp(-wide), middle * np.exp(wide)


def _rows(cluster: ClusterSpec, known: Known, without: set[str]) -> dict[str, list[tuple[Experiment, float]]]:
    """By engine, the newest rows to fit on; of another engine none where they are too few."""
    found: dict[str, list[tuple[Experiment, float]]] = {}
    for name, (experiment, seconds) in known.steps.items():
        if name not in without and layouts.is_predicted(experiment, cluster):
            rows = found.setdefault(experiment.engine, [])
            if len(rows) < MOST_ROWS:
                rows.append((experiment, seconds))
    return {
        engine: rows
        for engine, rows in sorted(found.items(), key=lambda pair: pair[0] != ENGINE)
        if engine == ENGINE or (len(rows) >= LEAST_OF_ANOTHER and _profile_of(engine) != GENERAL)
    }


def _measured(
    rows: Mapping[str, list[tuple[Experiment, float]]], cluster: ClusterSpec, rates: Mapping[str, float]
) -> tuple[Measured | None, dict[str, int]]:
    """The rows with the factors of their structures taken off; and how many of each engine."""
    plain: list[tuple[Experiment, float, float]] = []
    counts = {}
    for engine, those in rows.items():
        factors = layouts.structure_factors([experiment for experiment, _ in those], cluster)
        kept = [(*row, factor) for row, factor in zip(those, factors, strict=True) if factor > 0]
        plain += kept
        if kept:
            counts[engine] = len(kept)
    if not plain:
        return None, {}
    factors = np.array([factor for _, _, factor in plain])
    points = _points([experiment for experiment, _, _ in plain], cluster, rates, factors)
    unknown = np.full(len(plain), np.nan)
    return Measured(points, np.array([seconds for _, seconds, _ in plain]) / factors, unknown, unknown), counts
