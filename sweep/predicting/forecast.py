"""Predicted step times of a plan's points, with an interval: from this engine's profile, the newest probe of the
cluster, and rows measured on it.

The model is that of ``python -m sweep predict``. Measured rows come from every sweep of the results folder, but never
from the plan's own layouts, so that every prediction is out-of-sample. Rows of other clusters count if the user names
these (``plan.learn_from``), each with the rates and the probe of its cluster and the launch time of its host.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from results.text.numbers import plural
from sweep.grids.step_time import StepTime
from sweep.predicting.codebases import key_of_engine, profiles_with
from sweep.predicting.engine_memory import EngineMemory
from sweep.predicting.known import Known, MeasuredLayout
from workloads.costs.time.host_update import HostUpdate, host_update
from workloads.costs.time.offload_times import added_by_offload
from workloads.predict import crossing, layouts, near_full
from workloads.predict.crossing import Crossing
from workloads.predict.parameters import NO_HOST
from workloads.predict.points import Points
from workloads.predict.predictor import NORMAL_90, Measured, Prediction, Predictor
from workloads.predict.probed import USUAL_LAUNCH
from workloads.spec.cluster import ClusterSpec, HostSpec
from workloads.spec.engine_versions import ENGINE, ENGINE_VERSIONS
from workloads.spec.experiment import Experiment

MOST_ROWS = 200
"""Most measured experiments per engine and version (the newest) used in a fit: beyond this, fitting time grows more
than accuracy."""

STREAMED_SPREAD = 0.1
"""Relative standard deviation of the time of moments that stream from the host: 15 predicted on one H200 were 0.016 too
long in the mean, with a deviation of 0.024 (results/recorded/h200x1_streamed, h200x1_streamed_again); links of other
hosts are known less well."""
COPIES_SPREAD = 0.5
"""The same of what copies of activations add, most of which is a small part of a step."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicts experiments on one cluster."""

    cluster: ClusterSpec
    predictor: Predictor
    rates: Mapping[str, float] = field(default_factory=dict)
    """Link rates, and factors on the device peak and host speed, from a probe (`workloads.predict.probed.probed`).
    Without a probe the host factors are those of the median measured row, without rows those of a usual host."""
    used: str = ""
    """Measurements used in addition to the profile, in words; empty: none."""
    fitted: Mapping[str, int] = field(default_factory=dict)
    """Number of measured experiments in the fit by engine and version, as `key_of_engine` writes them."""
    crossing: Crossing | None = None
    """Seconds due to a network that a probe has timed; None: not timed."""
    memory: EngineMemory = field(default_factory=EngineMemory)
    """Peak memory of other engines."""
    host: HostSpec | None = None
    """Rates of the host with those of a probe; None: those of the cluster file."""
    structures: layouts.Structures = field(init=False, repr=False, compare=False)
    _of_one_node: layouts.Structures | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "structures", layouts.Structures(self.cluster))
        one_node = layouts.Structures(self.crossing.one_node) if self.crossing is not None else None
        object.__setattr__(self, "_of_one_node", one_node)

    @classmethod
    def of(cls, cluster: ClusterSpec, known: Known | None = None, leave_out: Iterable[str] = ()) -> Forecast:
        """Fits a forecast for one cluster. ``leave_out``: `layout_id` of layouts whose measurements (any seed) are not
        used."""
        known, measured, sources, without = known or Known(), [], [], set(leave_out)
        fitted = Counter[str]()
        rates = known.probe
        for place, known_there in ((cluster, known), *known.elsewhere):
            rows = _rows(place, known_there, without if place is cluster else set(), fitted)
            if place is cluster and not set(_OF_HOSTS) & set(rates):
                rates = {**rates, **_usual_host(rows.get(ENGINE, []))}
            points, counts, silent = _measured(rows, place, known_there)
            measured += points
            # a probe of another cluster is used only together with its rows
            counts_here = place is cluster or bool(counts)
            words = [f"the probe of {known_there.probe_day}"] if known_there.probe and counts_here else []
            for engine, count in counts.items():
                fitted[engine] += count
                words.append(plural(count, "measured experiment") + ("" if engine == ENGINE else f" of {engine}"))
            ignored = f"{plural(silent, 'host-bound experiment')} without a recorded launch time" if silent else ""
            if words or ignored:
                not_used = f" (ignored: {ignored})" if ignored else ""
                sources.append(f"{' and '.join(words) or 'no measured experiment'} on {place.name}{not_used}")
        used = f"predicted with {'; '.join(sources)}" if sources else ""
        learned = Predictor.learn(_together(measured), profiles_with(_engines(known)))
        memory = _memory(cluster, known, without)
        return cls(cluster, learned, rates, used, dict(fitted), _crossing(cluster, known), memory, known.host)

    def has_rows_of(self, experiment: Experiment) -> bool:
        """Whether predictions of the experiment's engine may refuse it: this project's engine is known, another one
        only from measured rows."""
        key = key_of_engine(experiment.engine, experiment.engine_version)
        return experiment.engine == ENGINE or key in self.fitted

    def used_for(self, engines: Iterable[tuple[str, str]]) -> str:
        """`used`, and which other engines (with their versions) have no measured row: these are predicted from their
        structure alone."""
        asked = {key_of_engine(*one) for one in engines if one[0] != ENGINE}
        silent = sorted(asked - self.fitted.keys())
        lines = [f"no measured experiment of {one} on {self.cluster.name}: its structure alone" for one in silent]
        return "; ".join([*([self.used] if self.used else []), *lines])

    def times(self, experiments: Sequence[Experiment]) -> list[StepTime | None]:
        """Step times of experiments whose layouts break no rule; None: unknown."""
        times: list[StepTime | None] = [None] * len(experiments)
        known = [at for at, one in enumerate(experiments) if self._knows(one)]
        across = [at for at in known if self.crossing is not None and self.crossing.covers(experiments[at])]
        inside = sorted(set(known) - set(across))
        for places, structures in ((inside, self.structures), (across, self._of_one_node)):
            if places and structures is not None:
                times_of_places = self._times([experiments[at] for at in places], structures)
                for at, time in zip(places, times_of_places, strict=True):
                    times[at] = time
        if across and self.crossing is not None and self._of_one_node is not None:
            layouts_across = [experiments[at] for at in across]
            seconds = _seconds([times[at] for at in across])
            device = self._device_s(layouts_across, self._of_one_node)
            longer = self.crossing.added(layouts_across).step_s(seconds, device) - seconds
            for at, more in zip(across, longer.tolist(), strict=True):
                time = times[at]
                times[at] = _later(time, more) if time is not None and math.isfinite(more) else None
        return [self._with_host(time, one) for time, one in zip(times, experiments, strict=True)]

    def host_update(self, experiment: Experiment) -> HostUpdate | None:
        """The part of the optimizer on the host; None if there is none, or if its rates are not known."""
        return host_update(experiment, self.with_rates()) if experiment.optimizer_offload else None

    def with_rates(self) -> ClusterSpec:
        """The cluster with the newest rates of its hosts."""
        return self.cluster if self.host is None else dataclasses.replace(self.cluster, host=self.host)

    def _with_host(self, time: StepTime | None, experiment: Experiment) -> StepTime | None:
        """``time`` with what the part of the optimizer on the host and copies of activations add; None if that is not
        known."""
        if time is not None and experiment.activation_offload != "none":
            waits = added_by_offload(experiment, self.with_rates())
            time = _later(time, waits, COPIES_SPREAD) if waits is not None else None
        if time is None or not experiment.optimizer_offload:
            return time
        update = self.host_update(experiment)
        if update is None:
            return None
        later = _later(time, update.added_s, STREAMED_SPREAD)
        return dataclasses.replace(later, optimizer_s=time.optimizer_s + update.added_s)

    def points(self, experiments: Sequence[Experiment], of_layers: np.ndarray | None = None) -> Points:
        """Prediction inputs of experiments, see `workloads.predict.layouts.points_of`."""
        return _points(experiments, self.cluster, self.rates, of_layers)

    def _times(self, experiments: Sequence[Experiment], structures: layouts.Structures) -> list[StepTime | None]:
        """Step times by the closed form on the cluster of ``structures``."""
        factors = structures.factors(experiments)
        of_layers = structures.of_layers(experiments, factors)
        points = _points(experiments, structures.cluster, self.rates, of_layers)
        prediction, parts = self.predictor.predict(points), self.predictor.seconds(points)
        factors = factors.with_hosts(of_layers, parts)
        middle, low, high = _scaled(prediction, factors.of_step(parts), factors.without_schedule(of_layers, parts))
        columns = np.stack((middle, low, high, factors.work * parts.busy, factors.after_s(parts)), axis=1).tolist()
        return [StepTime(*row) if math.isfinite(row[0]) else None for row in columns]

    def _device_s(self, experiments: Sequence[Experiment], structures: layouts.Structures) -> np.ndarray:
        """Device time of steps on the cluster of ``structures``: seconds without launch overhead."""
        factors = structures.factors(experiments)
        points = _points(experiments, structures.cluster, self.rates, structures.of_layers(experiments, factors))
        parts = self.predictor.seconds(points, NO_HOST)
        return factors.step_s(parts)

    def near_full(self, time: StepTime, tensor_bytes: int | None, start: float = near_full.FROM) -> StepTime:
        """Adds the time in which the allocator frees cached memory on a nearly full device.

        ``tensor_bytes``: peak of the closed form on the fullest device, without the workspace of matrix products, which
        is added here; None: not known. ``start``: share of the device's memory from which the allocator frees.
        """
        device = self.cluster.device
        if tensor_bytes is None or device.memory_bytes is None or self.cluster.backend == "cpu":
            return time
        lost = near_full.freeing_s(tensor_bytes + device.workspace_bytes, device.memory_bytes, start)
        return dataclasses.replace(
            time, step_time_s=time.step_time_s + lost, high_s=time.high_s + near_full.WIDER * lost
        )

    def _knows(self, experiment: Experiment) -> bool:
        known = key_of_engine(experiment.engine, experiment.engine_version) in self.predictor.profiles
        return known and layouts.is_predicted(experiment, self.cluster)


def _crossing(cluster: ClusterSpec, known: Known) -> Crossing | None:
    return Crossing(cluster, known.network) if known.network is not None else None


def _seconds(times: Sequence[StepTime | None]) -> np.ndarray:
    """Step seconds; NaN if unknown."""
    return np.array([math.nan if time is None else time.step_time_s for time in times])


def _later(time: StepTime, seconds: float, spread: float = crossing.SPREAD) -> StepTime:
    """A step that takes ``seconds`` longer, as uncertain as both parts are. ``spread``: relative standard deviation of
    ``seconds``."""
    wide = NORMAL_90 * spread * seconds
    return dataclasses.replace(
        time,
        step_time_s=time.step_time_s + seconds,
        low_s=time.step_time_s + seconds - math.hypot(time.step_time_s - time.low_s, wide),
        high_s=time.step_time_s + seconds + math.hypot(time.high_s - time.step_time_s, wide),
    )


def _memory(cluster: ClusterSpec, known: Known, without: set[str]) -> EngineMemory:
    """Memory does not depend on the cluster, so rows of every known one count."""
    measured = [
        (ran.experiment, ran.peak_bytes)
        for place in (known, *(one for _, one in known.elsewhere))
        for name, ran in place.steps.items()
        if ran.peak_bytes is not None and ran.experiment.engine != ENGINE and name not in without
    ]
    return EngineMemory.of(measured, cluster.device.workspace_bytes)


def _engines(known: Known) -> set[tuple[str, str]]:
    """Engines that a user can choose, and those of measured rows, each with its version."""
    places = (known, *(one for _, one in known.elsewhere))
    runnable = ((engine, version) for engine, versions in ENGINE_VERSIONS.items() for version in versions)
    return {*runnable, *_engines_of(ran for place in places for ran in place.steps.values())}


def _engines_of(runs: Iterable[MeasuredLayout]) -> set[tuple[str, str]]:
    return {(one.experiment.engine, one.experiment.engine_version) for one in runs}


def _points(
    experiments: Sequence[Experiment],
    cluster: ClusterSpec,
    rates: Mapping[str, float],
    of_layers: np.ndarray | None,
    launch: np.ndarray | None = None,
) -> Points:
    """Prediction inputs of experiments. Host factors are 1 for other engines, whose rows do not record host speed."""
    points = layouts.points_of(experiments, cluster, rates, of_layers, launch)
    names = np.array([key_of_engine(one.engine, one.engine_version) for one in experiments], dtype=np.str_)
    of_hosts = {name: np.where(names == layouts.CODEBASE, getattr(points, name), 1.0) for name in _OF_HOSTS}
    return dataclasses.replace(points, codebase=names, **of_hosts)


def _scaled(
    prediction: Prediction, factors: np.ndarray, of_layers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Step time, low and high multiplied by the structure factors, each as uncertain as it is large."""
    structure_spread = NORMAL_90 * layouts.spread_of(factors, of_layers, layouts.PLANNED_SPREAD)
    wide = np.hypot(np.log(prediction.high_s / prediction.step_time_s), structure_spread)
    middle = prediction.step_time_s * factors
    return middle, middle * np.exp(-wide), middle * np.exp(wide)


def _rows(
    cluster: ClusterSpec, known: Known, without: set[str], fitted: Counter[str]
) -> dict[str, list[MeasuredLayout]]:
    """The newest rows to fit on by engine and version, at most `MOST_ROWS` of each together with those already
    ``fitted``."""
    rows_by_engine: dict[str, list[MeasuredLayout]] = {}
    for name, ran in known.steps.items():
        # no parameter of the fit stands for a host's update, or for copies to it
        on_device = not ran.experiment.optimizer_offload and ran.experiment.activation_offload == "none"
        if name not in without and on_device and layouts.is_predicted(ran.experiment, cluster):
            engine = key_of_engine(ran.experiment.engine, ran.experiment.engine_version)
            rows = rows_by_engine.setdefault(engine, [])
            if len(rows) < MOST_ROWS - fitted[engine]:
                rows.append(ran)
    return {engine: rows for engine, rows in sorted(rows_by_engine.items(), key=lambda pair: pair[0] != ENGINE) if rows}


_OF_HOSTS = ("launch", "pace")


def _usual_host(rows: Sequence[MeasuredLayout]) -> dict[str, float]:
    return {"launch": statistics.median(map(_launch, rows)) if rows else USUAL_LAUNCH}


def _launch(ran: MeasuredLayout) -> float:
    """Relative launch time of a row; 1, a usual host, if the row does not record it."""
    return 1.0 if ran.launch is None else ran.launch


def _measured(
    rows: Mapping[str, list[MeasuredLayout]], cluster: ClusterSpec, known: Known
) -> tuple[list[Measured], dict[str, int], int]:
    """Training rows of one cluster, divided by their structure factors.

    Returns (rows, number of rows by engine, number of rows left out). Host-bound rows without a recorded launch time
    are left out, because the fit would attribute their host's speed to the cluster.
    """
    if (across := _crossing(cluster, known)) is not None:
        inside = {engine: [one for one in runs if not across.covers(one.experiment)] for engine, runs in rows.items()}
        taught = {engine: _without_network(runs, across, known.probe) for engine, runs in rows.items()}
        alone = dataclasses.replace(known, network=None)
        parts = [_measured(inside, cluster, alone), _measured(taught, across.one_node, alone)]
        both = Counter(parts[0][1]) + Counter(parts[1][1])
        return parts[0][0] + parts[1][0], dict(both), parts[0][2] + parts[1][2]
    rates = known.probe
    profiles = profiles_with(_engines_of(one for runs in rows.values() for one in runs))
    training_rows, counts, left_out, unfitted = [], {}, 0, Predictor.learn(None, profiles)
    of_devices = {name: factor for name, factor in rates.items() if name not in _OF_HOSTS}  # rows record their own host
    for engine, runs in rows.items():
        structures = layouts.Structures(cluster)
        factors = structures.factors([one.experiment for one in runs])
        known_rows = factors.work > 0
        kept = [one for one, is_known in zip(runs, known_rows, strict=True) if is_known]
        if not kept:
            continue
        factors = factors.take(known_rows)
        launch = np.array([_launch(one) for one in kept])
        experiments = [one.experiment for one in kept]
        of_layers = structures.of_layers(experiments, factors)
        points = _points(experiments, cluster, of_devices, of_layers, launch)
        terms = unfitted.seconds(points)
        factors = factors.with_hosts(of_layers, terms)
        ratios, of_layers = factors.of_step(terms), factors.without_schedule(of_layers, terms)
        if engine == ENGINE and cluster.backend == "cuda":
            silent = np.array([one.launch is None for one in kept])
            teach = np.flatnonzero(~(silent & (unfitted.host_share(points) > 0.5)))
            left_out += len(kept) - len(teach)
            if not len(teach):
                continue
            points, ratios, of_layers = points.take(teach), ratios[teach], of_layers[teach]
            kept = [kept[at] for at in teach]
        points = dataclasses.replace(points, doubt=layouts.spread_of(ratios, of_layers))
        counts[engine] = len(kept)
        unknown = np.full(len(kept), np.nan)
        training_rows.append(Measured(points, np.array([one.step_time_s for one in kept]) / ratios, unknown, unknown))
    return training_rows, counts, left_out


def _without_network(
    runs: Sequence[MeasuredLayout], across: Crossing, rates: Mapping[str, float]
) -> list[MeasuredLayout]:
    """The runs that span the probe's nodes, with the network's seconds subtracted from their step times.

    Runs whose step is mostly network are left out, and so are runs in which the host's part cannot be separated from
    the network's: the rest of their step is not known well enough for the fit.
    """
    spanning = [one for one in runs if across.covers(one.experiment)]
    experiments = [one.experiment for one in spanning]
    unfitted = Predictor.learn(None, profiles_with(_engines_of(spanning)))
    before = Forecast(across.one_node, unfitted, rates)
    one_node, device = _seconds(before.times(experiments)), before._device_s(experiments, before.structures)
    measured = np.array([one.step_time_s for one in spanning])
    left = across.added(experiments).one_node_s(measured, one_node, device)
    return [
        one._replace(step_time_s=seconds)
        for one, seconds in zip(spanning, left.tolist(), strict=True)
        if math.isfinite(seconds)
    ]


def _together(parts: Sequence[Measured]) -> Measured | None:
    """Concatenates rows of several clusters and engines; None: there are none."""
    if not parts:
        return None
    points = Points.joined([part.points for part in parts])
    columns = ("step_time_s", "reserved_bytes", "out_of_memory")
    return Measured(points, *(np.concatenate([getattr(part, name) for part in parts]) for name in columns))
