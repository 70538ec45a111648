"""Predicted step times of a plan's points, with an interval: from this engine's profile, the newest probe of the
cluster, and rows that were measured on it.

The form is that of ``python -m sweep predict``. Measured rows count from every sweep of the results folder, but never
those of the plan's own layouts: so no prediction has seen what it is compared with later. Rows of other clusters count
where the user names these (``plan.learn_from``): each at its own cluster's rates and probe, and its own host.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from results.text.numbers import plural
from sweep.composing.config import SweepConfig
from sweep.grids.step_time import StepTime
from sweep.predicting.codebases import GENERAL, read_profiles
from workloads.predict import layouts, near_full
from workloads.predict.points import Points
from workloads.predict.predictor import NORMAL_90, Measured, Prediction, Predictor
from workloads.predict.probed import LAUNCH_S, probed
from workloads.predict.profiles import find_profile
from workloads.rules.layout_rules import layout_violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import ENGINE, ENGINES, Experiment, from_dict, layout_id

MOST_ROWS = 200
"""The newest measured experiments of an engine that a fit takes: more take longer to learn from than they teach."""
LEAST_OF_ANOTHER = 5
"""Measured experiments of another engine from which on its own are predicted: the form was made of this project's."""


class Ran(NamedTuple):
    """A layout that ran."""

    experiment: Experiment
    step_time_s: float
    launch: float | None = None
    """How many times as long as usual (`LAUNCH_S`) its host took to launch one operation; None: not known."""


@dataclass(frozen=True, slots=True)
class Known:
    """What was measured on a cluster before a plan is made."""

    steps: Mapping[str, Ran] = field(default_factory=dict)
    """By `layout_id`, layouts that ran there, the newest first."""
    probe: Mapping[str, float] = field(default_factory=dict)
    """As `workloads.predict.probed.probed`; empty: none, or one that says nothing."""
    probe_day: str = ""
    """When the probe ended, as year-month-day."""
    elsewhere: tuple[tuple[ClusterSpec, Known], ...] = ()
    """The same of other clusters whose rows count, too."""


def known_of(config: SweepConfig) -> Known:
    """Measurements that predictions of a sweep start from: of its cluster and of those in ``plan.learn_from``."""
    return read_known(config.cluster, config.results_dir, config.learn_from)


def read_known(cluster: ClusterSpec, results_dir: Path, elsewhere: Sequence[ClusterSpec] = ()) -> Known:
    """Rows and the probe of a cluster in a results folder, and of those ``elsewhere``; files that cannot be read are
    passed over."""
    if cluster.matmul_efficiency is None or not results_dir.is_dir():
        return Known()
    from results.tables.probes import load_probe

    others = tuple((other, read_known(other, results_dir)) for other in elsewhere if other.name != cluster.name)
    found = Known(ran_layouts(_measured_rows(results_dir, cluster)), elsewhere=others)
    if (probe := load_probe(cluster.name, results_dir)) is None:
        return found
    rates = probed(probe.rows, cluster)
    return dataclasses.replace(found, probe=rates, probe_day=f"{probe.measured_at:%Y-%m-%d}" if rates else "")


def ran_layouts(measured: Iterable[Mapping[str, Any]]) -> dict[str, Ran]:
    """By `layout_id`, what ran on one cluster, the newest first. ``measured``: columns `READ` of finished attempts.

    Runs whose allocator stopped to free its cache, warm-up included, are left out: how long that takes is not the
    layout's.
    """
    runs: list[tuple[Experiment, float, float | None]] = []
    smooth = (row for row in measured if not row["allocator_retries"])
    for row in sorted(smooth, key=lambda row: str(row["started_at"]), reverse=True):
        try:
            experiment = from_dict(json.loads(row["config_json"]))
        except (InvalidExperiment, ValueError, TypeError, KeyError):  # of a version that this one cannot read
            continue
        if not layout_violations(experiment):
            told = row["host_launch_s"] or 0
            runs.append((experiment, row["step_time_s"], told if 0 < told < math.inf else None))
    found: dict[str, list[Ran]] = {}
    for experiment, seconds, launch in runs:
        ran = Ran(experiment, seconds, None if launch is None else launch / LAUNCH_S)
        found.setdefault(layout_id(experiment), []).append(ran)
    return {
        name: every[0]._replace(
            step_time_s=statistics.median(one.step_time_s for one in every),
            launch=_middle(one.launch for one in every),
        )
        for name, every in found.items()
    }


def _middle(launches: Iterable[float | None]) -> float | None:
    known = [launch for launch in launches if launch is not None]
    return statistics.median(known) if known else None


def _measured_rows(folder: Path, cluster: ClusterSpec) -> Iterable[dict[str, Any]]:
    """Columns `READ` of finished measurements on the cluster, real steps of its probes among them."""
    from results.errors import InvalidResults
    from results.tables import store
    from results.tables.schema import MEASUREMENT_VERSION

    for sweep in store.own_sweep_dirs(folder):
        try:
            table = store.scan(sweep, "attempts").table
        except (InvalidResults, OSError):
            continue
        for row in table.select(READ).to_pylist():
            if (
                row["outcome"] == "ok"
                and row["method"] == "measured"
                and row["cluster"] == cluster.name
                and row["measurement_version"] == MEASUREMENT_VERSION
                and row["config_json"]
                and (row["step_time_s"] or 0) > 0
            ):
                yield row


READ = [
    "started_at", "config_json", "step_time_s", "host_launch_s", "outcome", "method", "cluster", "measurement_version",
    "allocator_retries",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicts experiments on one cluster."""

    cluster: ClusterSpec
    predictor: Predictor
    rates: Mapping[str, float] = field(default_factory=dict)
    """What a probe has told (`workloads.predict.probed.probed`): rates of links, and factors on peak and host. Without
    a probe the host is that of the middle row."""
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
        known, measured, said = known or Known(), [], []
        engines, room = {ENGINE}, dict.fromkeys(ENGINES, MOST_ROWS)
        rates = known.probe
        for place, own in ((cluster, known), *known.elsewhere):
            rows = _rows(place, own, set(leave_out) if place is cluster else set(), room)
            if place is cluster and not set(_OF_HOSTS) & set(rates):
                rates = {**rates, **_usual_host(rows.get(ENGINE, []))}
            points, counts, silent = _measured(rows, place, own.probe)
            measured += points
            engines |= counts.keys()
            counts_here = place is cluster or bool(counts)  # a probe of another cluster says nothing without its rows
            words = [f"the probe of {own.probe_day}"] if own.probe and counts_here else []
            for engine, count in counts.items():
                room[engine] -= count
                words.append(plural(count, "measured experiment") + ("" if engine == ENGINE else f" of {engine}"))
            if silent:
                words.append(f"none of {plural(silent, 'experiment')} whose host set the pace and is not told")
            if words:
                said.append(f"{' and '.join(words)} on {place.name}")
        used = f"predicted with {'; '.join(said)}" if said else ""
        learned = Predictor.learn(_together(measured), read_profiles())
        return cls(cluster, learned, rates, used, frozenset(engines))

    def times(self, experiments: Sequence[Experiment]) -> list[StepTime | None]:
        """One for each experiment, which breaks no rule of its layout; None: not known."""
        found: list[StepTime | None] = [None] * len(experiments)
        places = [at for at, one in enumerate(experiments) if self._knows(one)]
        if not places:
            return found
        those = [experiments[at] for at in places]
        factors = self.structures.factors(those)
        of_layers = self.structures.of_layers(those, factors)
        points = _points(those, self.cluster, self.rates, of_layers)
        prediction, (busy, after, least) = self.predictor.predict(points), self.predictor.parts(points)
        middle, low, high = _scaled(prediction, layouts.with_hosts(factors, of_layers, least), of_layers)
        for place, at in enumerate(places):
            step = float(middle[place])
            if math.isfinite(step):
                found[at] = StepTime(
                    step, float(low[place]), float(high[place]), step * float(busy[place]), step * float(after[place])
                )
        return found

    def near_full(self, time: StepTime, tensor_bytes: int | None, start: float = near_full.FROM) -> StepTime:
        """Adds the time in which the allocator frees cached memory on a nearly full device.

        ``tensor_bytes``: peak of the closed form on the fullest device, without the workspace of matrix products, which
        is added here; None: not known. ``start``: share of the device's memory from which the allocator frees.
        """
        device = self.cluster.device
        if tensor_bytes is None or device.memory_bytes is None or self.cluster.backend != "cuda":
            return time
        lost = near_full.freeing_s(tensor_bytes + device.workspace_bytes, device.memory_bytes, start)
        return dataclasses.replace(
            time, step_time_s=time.step_time_s + lost, high_s=time.high_s + near_full.WIDER * lost
        )

    def _knows(self, experiment: Experiment) -> bool:
        return experiment.engine in self.engines and layouts.is_predicted(experiment, self.cluster)


def _profile_of(engine: str) -> str:
    """The name of the profile of an engine's code base; `GENERAL` where there is none."""
    profiles = read_profiles()
    return layouts.CODEBASE if engine == ENGINE else find_profile(engine, profiles.values(), profiles[GENERAL]).name


def _points(
    experiments: Sequence[Experiment],
    cluster: ClusterSpec,
    rates: Mapping[str, float],
    of_layers: np.ndarray,
    launch: np.ndarray | None = None,
) -> Points:
    """Rows of other engines do not tell of their hosts, so that predictions of these do not know theirs either."""
    points = layouts.points_of(experiments, cluster, rates, of_layers, launch)
    names = np.array([_profile_of(one.engine) for one in experiments], dtype=np.str_)
    of_hosts = {name: np.where(names == layouts.CODEBASE, getattr(points, name), 1.0) for name in _OF_HOSTS}
    return dataclasses.replace(points, codebase=names, **of_hosts)


def _scaled(
    prediction: Prediction, factors: np.ndarray, of_layers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step time, low and high with the factors of structures, each as uncertain as it is large."""
    own = NORMAL_90 * layouts.spread_of(factors, of_layers)
    wide = np.hypot(np.log(prediction.high_s / prediction.step_time_s), own)
    middle = prediction.step_time_s * factors
    return middle, middle * np.exp(-wide), middle * np.exp(wide)


def _rows(cluster: ClusterSpec, known: Known, without: set[str], room: Mapping[str, int]) -> dict[str, list[Ran]]:
    """By engine, the newest rows to fit on, at most ``room`` of each; of another engine none where they are too few."""
    found: dict[str, list[Ran]] = {}
    for name, ran in known.steps.items():
        if name not in without and layouts.is_predicted(ran.experiment, cluster):
            rows = found.setdefault(ran.experiment.engine, [])
            if len(rows) < room.get(ran.experiment.engine, 0):
                rows.append(ran)
    return {
        engine: rows
        for engine, rows in sorted(found.items(), key=lambda pair: pair[0] != ENGINE)
        if engine == ENGINE or (len(rows) >= LEAST_OF_ANOTHER and _profile_of(engine) != GENERAL)
    }


_OF_HOSTS = ("launch", "pace")


def _usual_host(rows: Sequence[Ran]) -> dict[str, float]:
    return {"launch": statistics.median(map(_launch, rows))} if rows else {}


def _launch(ran: Ran) -> float:
    """A row that does not tell of its host is taken for one of a usual host."""
    return 1.0 if ran.launch is None else ran.launch


def _measured(
    rows: Mapping[str, list[Ran]], cluster: ClusterSpec, rates: Mapping[str, float]
) -> tuple[list[Measured], dict[str, int], int]:
    """The rows of one cluster with the factors of their structures taken off; how many of each engine; and how many
    were left out.

    Rows that do not tell of their host, though it sets their pace, are left out: what they would teach is that host's.
    """
    found, counts, left_out, unfitted = [], {}, 0, Predictor.learn(None, read_profiles())
    of_devices = {name: factor for name, factor in rates.items() if name not in _OF_HOSTS}  # rows tell of their own
    for engine, those in rows.items():
        structures = layouts.Structures(cluster)
        factors = structures.factors([one.experiment for one in those])
        kept = [one for one, factor in zip(those, factors, strict=True) if factor > 0]
        if not kept:
            continue
        factors = factors[factors > 0]
        launch = np.array([_launch(one) for one in kept])
        experiments = [one.experiment for one in kept]
        of_layers = structures.of_layers(experiments, factors)
        points = _points(experiments, cluster, of_devices, of_layers, launch)
        factors = layouts.with_hosts(factors, of_layers, unfitted.parts(points)[2])
        if engine == ENGINE and cluster.backend == "cuda":
            silent = np.array([one.launch is None for one in kept])
            teach = np.flatnonzero(~(silent & (unfitted.host_share(points) > 0.5)))
            left_out += len(kept) - len(teach)
            if not len(teach):
                continue
            points, factors, of_layers = points.take(teach), factors[teach], of_layers[teach]
            kept = [kept[at] for at in teach]
        points = dataclasses.replace(points, doubt=layouts.spread_of(factors, of_layers))
        counts[engine] = len(kept)
        unknown = np.full(len(kept), np.nan)
        found.append(Measured(points, np.array([one.step_time_s for one in kept]) / factors, unknown, unknown))
    return found, counts, left_out


def _together(parts: Sequence[Measured]) -> Measured | None:
    """Rows of several clusters and engines as one; None: there are none."""
    if not parts:
        return None
    points = Points(
        **{
            own.name: np.concatenate([getattr(one.points, own.name) for one in parts])
            for own in dataclasses.fields(Points)
        }
    )
    columns = ("step_time_s", "reserved_bytes", "out_of_memory")
    return Measured(points, *(np.concatenate([getattr(one, name) for one in parts]) for name in columns))
