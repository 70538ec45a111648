"""What a sweep has found so far, from its rows and its ledger: the fastest layouts, and what is worth trying next.

Layouts are ranked within a cell: one model and sequence length on one number of devices. Rehearsed times are too short
by an amount that depends on tp, so rehearsed cells also have one tp each.
"""

from __future__ import annotations

import json
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
    "engine_version",
    *("model", "seq_len", "world_size", "tp", "backend", "config_json", "timed_steps"),
    *("tokens_per_s_per_gpu", "mfu_palm", "peak_allocated_bytes", "step_time_min_s", "step_time_max_s"),
    *("device_name", "driver_version", "torch_version", "nccl_version"),
]
LEDGER_COLUMNS = [
    *("experiment_id", "verdict", "model", "seq_len", "world_size", "tp", "config_json", "cached_attempt"),
    *("cached_sweep", "predicted_tokens_per_s_per_gpu", "expected_gpu_hours"),
]
"""What is read of the tables: a study has ten thousand rows of 150 columns."""
WITHIN = 0.97
"""An untried point is worth trying if it should reach this share of the best of its cell."""
_RATE = "tokens_per_s_per_gpu"


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
    runs: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    key: CellKey
    layouts: tuple[Layout, ...]
    """Fastest first."""
    tied: int | None
    """How many layouts, with the fastest, are behind it by no more than noise explains; 1: it leads clearly. None: the
    noise is not known."""


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
    newest = max(map(_version, good), default=(0, 0))
    runs: dict[CellKey, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in good:
        if _version(row) == newest:
            same = runs[_cell_of(row, row["method"])][_without_seed(row["config_json"])]
            # As in `results.noise.independent`: what a rehearsal has taken over is no run of its own.
            if row["method"] == "measured" or row[_RATE] not in {other[_RATE] for other in same}:
                same.append(row)
    keys = sorted(runs)
    cells = [sorted(map(_layout, runs[key].values()), key=lambda layout: -layout.rate) for key in keys]
    return [
        Cell(key=key, layouts=tuple(layouts), tied=tied)
        for key, layouts, tied in zip(keys, cells, _tied(cells), strict=True)
    ]


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


def _version(row: Row) -> tuple[int, int]:
    """Of measurement and engine: rows of different ones do not compare."""
    engine = str(row["engine_version"] or "")
    return row["measurement_version"] or 0, int(engine) if engine.isdigit() else 0


def _cell_of(row: Row, method: str) -> CellKey:
    tp = row["tp"] if method == "rehearsed" else None
    return CellKey(row["model"] or "", row["seq_len"] or 0, row["world_size"] or 0, method, tp)


def _without_seed(config_json: str) -> str:
    return json.dumps({**json.loads(config_json), "seed": None}, sort_keys=True)


def _layout(runs: Sequence[Row]) -> Layout:
    middle = sorted(runs, key=lambda row: row["tokens_per_s_per_gpu"])[(len(runs) - 1) // 2]
    return Layout(
        experiment=ex.from_json(middle["config_json"]),
        rate=statistics.median(row["tokens_per_s_per_gpu"] for row in runs),
        peak_bytes=middle["peak_allocated_bytes"],
        mfu=middle["mfu_palm"],
        backend=middle["backend"],
        runs=tuple(runs),
    )


def _tied(cells: Sequence[Sequence[Layout]]) -> list[int | None]:
    """How many layouts of each cell, fastest first, may be the fastest: by the rule of the report (`results.noise`)."""
    import pandas as pd  # takes half a second, which only the end of a run pays

    from results import noise

    places = [(cell, place, one) for cell, layouts in enumerate(cells) for place, one in enumerate(layouts)]
    if not places:
        return []
    runs = pd.DataFrame(
        [
            {name: row.get(name) for name in (*noise.USED, _RATE)} | {"_layout": f"{cell}.{place}", "_cell": cell}
            for cell, place, one in places
            for row in one.runs
        ]
    )
    known = noise.of_layouts(runs, ["_cell"], _RATE)
    rows = pd.DataFrame([{"_layout": f"{cell}.{place}", "_cell": cell, _RATE: one.rate} for cell, place, one in places])
    rows = rows.join(known, on="_layout")
    within = noise.within(rows, _RATE, ["_cell"])
    found: list[int | None] = []
    for cell, layouts in enumerate(cells):
        told = within[rows["_cell"] == cell]
        found.append(None if len(layouts) > 1 and pd.isna(told.iloc[1]) else int(told.fillna(False).sum()))
    return found
