"""Makes a card from an experiment's rows: the newest row defines the run, all comparable rows define the bands."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from results.errors import InvalidResults
from results.statistics.noise import FEWEST_FREEDOM, quantiles
from results.text.numbers import plural
from sweep.cards.card import WIDEST, Band, Card
from sweep.inspecting.lookup import Record, Results
from workloads.spec import experiment as ex
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import FIELDS
from workloads.spec.recurrent_kernels import has_recurrences

CODE = ("git_commit", "git_dirty", "ultrasweep_version", "engine_version", "measurement_version")
ENVIRONMENT = ("python_version", "torch_version", "cuda_version", "nccl_version", "triton_version", "driver_version")
CHECKS = (
    "check_matmul_flops",
    "check_copy_bytes_per_s",
    "check_all_reduce_inside_node_bytes_per_s",
    "check_all_reduce_between_nodes_bytes_per_s",
)
MACHINE = (
    *("device_name", "backend", "world_size", "device_memory_bytes", "power_limit_w"),
    *("sm_clock_mhz", "sm_clock_median_step_mhz", "throttle_reasons", *CHECKS),
)
MEMORY = ("peak_allocated_bytes", "peak_reserved_bytes")
CONFIDENCE = 0.99
"""Share of equivalent runs that pass."""
LEAST_OF_REPEATS, LEAST_OF_STEPS, LEAST_OF_MEMORY = 0.01, 0.03, 0.01
"""Narrowest relative bands. The band from the steps of one run is wider, because such steps share run-to-run
effects."""
_NOT_ON_THE_COMMAND_LINE = ("engine", "engine_version")


def make_cards(results: Results) -> list[Card]:
    """Cards of all finished points of our engine, by id. Raises `InvalidResults` when there is none."""
    cards = []
    for experiment_id in results.ids():
        with contextlib.suppress(InvalidResults):
            cards.append(make_card(results.find(experiment_id)))
    if not cards:
        raise InvalidResults(f"{results.path} has no finished point of {ex.ENGINE}: there is nothing to make a card of")
    return cards


def make_card(record: Record) -> Card:
    """Makes the card. Raises `InvalidResults` if no attempt has finished, and for rows of another engine."""
    if record.experiment.engine != ex.ENGINE:
        raise InvalidResults(
            f"{record.id} was recorded by {record.experiment.engine}, which this program cannot run again"
        )
    finished = [row for row in record.attempts if row["outcome"] == "ok" and _is_time(row["step_time_s"])]
    if not finished:
        known = ", ".join(sorted({str(row["outcome"]) for row in record.attempts})) or "no attempt"
        raise InvalidResults(f"{record.id} has no finished attempt to make a card of ({known})")
    finished.sort(key=lambda row: (row["method"] == "measured", str(row["started_at"])))
    newest = finished[-1]
    kind = ("method", "device_name", "engine_version", "measurement_version")
    comparable = [row for row in finished if all(row[name] == newest[name] for name in kind) and not row["repeat_of"]]
    comparable = comparable or [newest]
    width, bands_from = _width(comparable)
    step = statistics.median(row["step_time_s"] for row in comparable)
    rate = record.experiment.tokens_per_step / record.experiment.world_size
    expected = {
        "step_time_s": _band(step, width),
        "tokens_per_s_per_gpu": Band(
            value=rate / step,
            low=rate / (step * (1 + width)) if width is not None else None,
            high=rate / (step * (1 - width)) if width is not None else None,
        ),
    }
    for column in MEMORY:
        peaks = [row[column] for row in comparable if row[column]]
        if peaks:
            middle = statistics.median(peaks)
            spread = max(LEAST_OF_MEMORY, *(abs(peak / middle - 1) for peak in peaks))
            expected[column] = _band(middle, spread if spread <= WIDEST else None)
    hosts = newest["nodes"] or newest["hosts"]
    device = newest["device_name"] or newest["backend"] or "not known"
    return Card(
        id=record.id,
        method=newest["method"],
        cluster=newest["cluster"],
        command=shlex.join(["python", "-m", "sweep", "run", *overrides_of(record.experiment, newest)]),
        recorded_command=newest["command"],
        warmup_steps=newest["warmup_steps"],
        timed_steps=newest["timed_steps"],
        attempts=tuple(row["attempt_id"] for row in comparable),
        code=_columns(newest, CODE),
        environment=_columns(newest, ENVIRONMENT),
        machine={**_columns(newest, MACHINE), "num_nodes": len(set(hosts)) if hosts else None},
        bands_from=bands_from,
        expected=expected,
        verified={str(device): None},
        configuration=ex.to_dict(record.experiment),
    )


def overrides_of(experiment: Experiment, row: Mapping[str, Any]) -> list[str]:
    """Overrides that plan only this experiment: the grid `one_point` with every field that differs from it."""
    words = ["+grid=one_point", f"model={_hydra(experiment.model.name)}"]
    if row["cluster"] is not None:
        words.append(f"cluster={_hydra(row['cluster'])}")
    if row["method"] != "measured":
        words.append("launcher=rehearse")
    experiment, usual = canonical(experiment), Experiment(model=experiment.model, global_batch_size=1)
    for name in FIELDS:
        value = getattr(experiment, name)
        differs = value != getattr(usual, name) or (name == "gradient_accumulation_fusion" and not value)
        differs |= name == "recurrence" and has_recurrences(
            experiment.model
        )  # else as the packages installed there are
        if name not in _NOT_ON_THE_COMMAND_LINE and differs:
            words.append(f"grid.axes.{name}={_hydra(value)}")
    steps = [f"measure.{name}={row[name]}" for name in ("warmup_steps", "timed_steps")]
    return [*words, *steps, "plan.run_predicted_oom=true"]


def canonical(experiment: Experiment) -> Experiment:
    """The same run with canonical values in fields without effect: rows of old versions may hold other values."""
    return Experiment.canonical(**{f.name: getattr(experiment, f.name) for f in dataclasses.fields(experiment)})


def _width(rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    """`_spread`, but (None, reason) if it is wider than `WIDEST`: such a band would hold nearly any run."""
    width, source = _spread(rows)
    if width is None or width <= WIDEST:
        return width, source
    return None, (
        f"no band: {source} give ± {width:.0%}, and beyond ± {WIDEST:.0%} nearly any run would pass; more timed steps "
        "(measure.timed_steps=10) or five repeats narrow it"
    )


def _spread(rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, str]:
    """Relative half-width of the band, and its source: repeats, or the steps of one run; (None, reason) without either.

    A further run differs from the median of n runs by sqrt(1 + 1/n) standard deviations, times the quantile of
    Student's t distribution with the corresponding degrees of freedom.
    """
    times = [float(row["step_time_s"]) for row in rows]
    if len(times) > FEWEST_FREEDOM:
        deviation, freedom = statistics.stdev(times) / statistics.median(times), len(times) - 1
        words, least, runs = plural(len(times), "repeat"), LEAST_OF_REPEATS, len(times)
    else:
        of_steps = [(share, row["timed_steps"] - 1) for row in rows if (share := _of_steps(row)) is not None]
        if not of_steps:
            return None, "no band: one timed step and no repeats, so no spread is known"
        freedom = sum(steps for _, steps in of_steps)
        deviation = math.sqrt(sum(share**2 * steps for share, steps in of_steps) / freedom)
        if len(times) > 1:
            deviation = max(deviation, statistics.stdev(times) / statistics.median(times))
        words, least, runs = f"timed steps of {plural(len(of_steps), 'run')}", LEAST_OF_STEPS, len(times)
    student = float(quantiles(np.array([(1 + CONFIDENCE) / 2]), np.array([float(freedom)]))[0])
    width = student * deviation * math.sqrt(1 + 1 / runs)
    if width < least:
        return least, f"{words}, at least {least:.0%}"
    return width, words


def _of_steps(row: Mapping[str, Any]) -> float | None:
    """Relative standard deviation of a run's timed steps; None for a single one.

    Rows of old versions hold only the fastest and the slowest step: the expected range of n normal values is 2 z((n -
    0.375) / (n + 0.25)) standard deviations (Blom 1958).
    """
    count = row["timed_steps"]
    if count < 2:
        return None
    if row["step_time_std_s"] is not None:
        return float(row["step_time_std_s"] / row["step_time_s"])
    if not (_is_time(row["step_time_min_s"]) and _is_time(row["step_time_max_s"])):
        return None
    width = 2 * statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
    return math.log(row["step_time_max_s"] / row["step_time_min_s"]) / width


def _is_time(value: float | None) -> bool:
    return value is not None and 0 < value < math.inf


def _band(value: float, width: float | None) -> Band:
    if width is None:
        return Band(value=value, low=None, high=None)
    return Band(value=value, low=value * (1 - width), high=value * (1 + width))


def _columns(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The row's values of these columns; unknown values are None."""
    return {name: row.get(name) for name in names}


def _hydra(value: Any) -> str:
    """The value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = str(value)
    plain = all(char.isalnum() or char in "_.-" for char in text)
    return text if plain else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
