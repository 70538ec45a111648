"""What a sweep has found so far, from its rows and its ledger: the fastest layouts, and what is worth trying next.

Layouts are ranked within a cell: one model and sequence length on one number of devices. Rehearsed times are too short
by an amount that depends on tp, so rehearsed cells also have one tp each.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workloads import experiment as ex
from workloads.experiment import Experiment

Row = Mapping[str, Any]
ROW_COLUMNS = [
    *("attempt_id", "experiment_id", "outcome", "method", "measurement_version", "repeat_of", "loss_agrees"),
    *("model", "seq_len", "world_size", "tp", "backend", "config_json", "timed_steps"),
    *("tokens_per_s_per_gpu", "mfu_palm", "peak_allocated_bytes", "step_time_min_s", "step_time_max_s"),
]
LEDGER_COLUMNS = [
    *("experiment_id", "verdict", "model", "seq_len", "world_size", "tp", "config_json", "cached_attempt"),
    *("cached_sweep", "predicted_tokens_per_s_per_gpu", "expected_gpu_hours"),
]
"""What is read of the tables: a study has ten thousand rows of 150 columns."""
WITHIN = 0.97
"""An untried point is worth trying if it should reach this share of the best of its cell."""
_CONFIDENCE = 0.95
_LEAST_FREEDOM = 4
"""A standard deviation of fewer degrees of freedom says too little."""


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    model: str
    seq_len: int
    world_size: int
    method: str
    tp: int | None
    """None where layouts of every tp are ranked together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The finished runs of one layout, which may differ in their seeds."""

    experiment: Experiment
    rate: float
    """Median tokens/s per device."""
    peak_bytes: int | None
    mfu: float | None
    backend: str | None
    log_rates: tuple[float, ...]
    """Of each run."""
    step_spread: float | None
    """Relative standard deviation of one timed step, and ``step_freedom``, its degrees of freedom."""
    step_freedom: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    key: CellKey
    layouts: tuple[Layout, ...]
    """Fastest first."""
    tied: int | None
    """How many layouts, with the fastest, cannot be told from it by the noise that the runs show; 1: it leads clearly.
    None: the noise is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Untried:
    """A planned point without an attempt."""

    experiment: Experiment
    verdict: str
    rate: float
    """Predicted tokens/s per device, times what runs of the same cell (or model) reached of their predictions."""
    gain: float | None
    """``rate`` over the best of its cell, minus 1; None for a cell in which nothing has been measured."""
    expected_hours: float | None


def best_layouts(rows: Iterable[Row]) -> list[Cell]:
    """The cells of the rows that finished, were not run twice, and whose losses do not contradict the reference."""
    good = [
        row
        for row in rows
        if row["outcome"] == "ok"
        and row["tokens_per_s_per_gpu"]
        and row["repeat_of"] is None
        and row["loss_agrees"] is not False
        and row["config_json"]
    ]
    newest = max((row["measurement_version"] for row in good), default=0)
    runs: dict[CellKey, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in good:
        if row["measurement_version"] == newest:
            runs[_cell_of(row, row["method"])][_without_seed(row["config_json"])].append(row)
    return [_cell(key, [_layout(group) for group in runs[key].values()]) for key in sorted(runs)]


def untried_points(ledger: Iterable[Row], rows: Iterable[Row], cells: Sequence[Cell], method: str) -> list[Untried]:
    """Points of the ledger that may run, have a prediction and no attempt, most promising first: those of cells without
    a measured layout, then by `Untried.gain`, down to `WITHIN` of the best."""
    ledger = list(ledger)
    tried = {row["experiment_id"] for row in rows}
    predicted = {row["experiment_id"]: row["predicted_tokens_per_s_per_gpu"] for row in ledger}
    best = {cell.key: cell.layouts[0].rate for cell in cells}
    reached: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for cell in cells:
        for layout in cell.layouts:
            if guess := predicted.get(layout.experiment.id):
                for scope in ((cell.key,), (cell.key.model,), ()):
                    reached[scope].append(layout.rate / guess)
    found = []
    for row in ledger:
        guess = row["predicted_tokens_per_s_per_gpu"]
        if row["verdict"] not in ("run", "over_budget") or not guess or row["experiment_id"] in tried:
            continue
        key = _cell_of(row, method)
        ratios = next((reached[scope] for scope in ((key,), (key.model,), ()) if reached[scope]), [1.0])
        rate = guess * statistics.median(ratios)
        gain = rate / best[key] - 1 if key in best else None
        if gain is None or gain >= WITHIN - 1:
            found.append(
                Untried(
                    experiment=ex.from_json(row["config_json"]),
                    verdict=row["verdict"],
                    rate=rate,
                    gain=gain,
                    expected_hours=row["expected_gpu_hours"],
                )
            )
    return sorted(found, key=lambda point: (point.gain is not None, -(point.gain or 0.0), -point.rate))


def _cell_of(row: Row, method: str) -> CellKey:
    tp = None if method == "measured" else row["tp"]
    return CellKey(row["model"] or "", row["seq_len"] or 0, row["world_size"] or 0, method, tp)


def _without_seed(config_json: str) -> str:
    return json.dumps({**json.loads(config_json), "seed": None}, sort_keys=True)


def _layout(runs: Sequence[Row]) -> Layout:
    middle = sorted(runs, key=lambda row: row["tokens_per_s_per_gpu"])[(len(runs) - 1) // 2]
    spreads = [(spread, row["timed_steps"] - 1) for row in runs if (spread := _step_spread(row)) is not None]
    freedom = sum(own for _, own in spreads)
    pooled = math.sqrt(sum(spread**2 * own for spread, own in spreads) / freedom) if freedom else None
    return Layout(
        experiment=ex.from_json(middle["config_json"]),
        rate=statistics.median(row["tokens_per_s_per_gpu"] for row in runs),
        peak_bytes=middle["peak_allocated_bytes"],
        mfu=middle["mfu_palm"],
        backend=middle["backend"],
        log_rates=tuple(math.log(row["tokens_per_s_per_gpu"]) for row in runs),
        step_spread=pooled,
        step_freedom=freedom,
    )


def _step_spread(row: Row) -> float | None:
    """Relative standard deviation of one timed step, from the fastest and the slowest of n: the expected range of n
    normal values is 2 z((n - 0.375) / (n + 0.25)) standard deviations (Blom 1958)."""
    low, high, count = row["step_time_min_s"], row["step_time_max_s"], row["timed_steps"]
    if not low or not high or not count or count < 2:
        return None
    return math.log(high / low) / (2 * statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25)))


def _cell(key: CellKey, layouts: list[Layout]) -> Cell:
    layouts.sort(key=lambda layout: -layout.rate)
    noise = _noise(layouts)
    if noise is None:
        return Cell(key=key, layouts=tuple(layouts), tied=None)
    best, others = layouts[0], layouts[1:]
    # A set that holds the truly fastest with the given confidence: each is compared at its share of what is left
    # (subset selection, Gupta 1965; shares by Bonferroni).
    level = 1 - (1 - _CONFIDENCE) / max(1, len(others))
    reach = statistics.NormalDist().inv_cdf(level) * noise
    tied = 1
    for layout in others:
        spread = math.sqrt(1 / len(best.log_rates) + 1 / len(layout.log_rates))
        if math.log(best.rate / layout.rate) > reach * spread:
            break
        tied += 1
    return Cell(key=key, layouts=tuple(layouts), tied=tied)


def _noise(layouts: Sequence[Layout]) -> float | None:
    """Relative standard deviation of one run's rate: from repeated runs, or else from timed steps, of which the median
    over the layouts is taken. It is not averaged over the steps of a run: they share what changes between runs."""
    repeated = [layout.log_rates for layout in layouts if len(layout.log_rates) > 1]
    freedom = sum(len(rates) - 1 for rates in repeated)
    if freedom >= _LEAST_FREEDOM:
        squares = sum((len(rates) - 1) * statistics.variance(rates) for rates in repeated)
        return math.sqrt(squares / freedom)
    spreads = [layout.step_spread for layout in layouts if layout.step_spread is not None]
    known = sum(layout.step_freedom for layout in layouts)
    return statistics.median(spreads) if spreads and known >= _LEAST_FREEDOM else None
