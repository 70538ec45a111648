"""What a sweep has found so far, from its rows and its ledger: the fastest layouts, and what is worth trying next.

Layouts are ranked within a cell: one model, routing and sequence length on one number of devices. Rehearsed times are
too short by an amount that depends on tp, so rehearsed cells also have one tp each.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results.text.numbers import name_routing
from workloads.contract.protocol import HOST_WAIT
from workloads.spec import experiment as ex
from workloads.spec.experiment import Experiment

Row = Mapping[str, Any]
ROW_COLUMNS = [
    *("attempt_id", "experiment_id", "outcome", "method", "measurement_version", "repeat_of", "loss_agrees"),
    *("engine", "engine_version"),
    *("model", "seq_len", "world_size", "tp", "cp", "tokens_per_step", "backend", "config_json", "timed_steps"),
    *("routing", "routing_imbalance", "capacity_factor"),
    *("tokens_per_s_per_gpu", "mfu_palm", "peak_allocated_bytes", "step_time_min_s", "step_time_max_s"),
    *(
        "device_name",
        "driver_version",
        "torch_version",
        "nccl_version",
        "step_time_s",
        "host_lead_s",
        "allocator_retries",
    ),
]
LEDGER_COLUMNS = [
    *(
        "experiment_id",
        "verdict",
        "engine",
        "model",
        "seq_len",
        "world_size",
        "tp",
        "cp",
        "config_json",
        "cached_attempt",
    ),
    *("routing", "routing_imbalance", "capacity_factor"),
    *("cached_sweep", "predicted_tokens_per_s_per_gpu", "expected_gpu_hours"),
]
"""What is read of the tables: a study has ten thousand rows of 150 columns."""
WITHIN = 0.97
"""An untried point is worth trying if it should reach this share of the best of its cell."""
_RATE = "tokens_per_s_per_gpu"


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    model: str
    routing: str
    """As `results.text.numbers.name_routing` says it; empty: balanced, or no experts."""
    seq_len: int
    world_size: int
    method: str
    tp: int | None
    """None where layouts of every tp are ranked together."""
    cp: int | None
    """Likewise."""
    engine: str = ex.ENGINE

    @property
    def workload(self) -> str:
        """Model and routing, and the engine where it is not this project's."""
        other = self.engine if self.engine != ex.ENGINE else ""
        return ", ".join(part for part in (self.model, self.routing, other) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The finished runs of one layout, which may differ in their seeds."""

    experiment: Experiment
    rate: float
    """Median tokens/s per device."""
    peak_bytes: int | None
    mfu: float | None
    backend: str | None
    runs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    key: CellKey
    layouts: tuple[Layout, ...]
    """Fastest first."""
    tied: int | None
    """How many layouts, with the fastest, are behind it by no more than noise explains; 1: it leads clearly. None: the
    noise is not known."""
    at_other_batches: int
    """Layouts with another number of tokens a step than most of the cell have: they are not ranked beside them."""


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
    """The cells of the rows that finished, ranked as the report ranks them (`results.statistics.ranking`).

    Left out are rows without their configuration and those of older versions (`older`), and layouts whose losses
    contradict the reference. Of a cell the batch of most of its layouts is ranked.
    """
    good = _finished(rows)
    newest = _newest(good)
    good = [row for row in good if _version(row) == newest[_engine(row)]]
    if not good:
        return []
    import pandas as pd  # takes half a second, which only the end of a run pays

    from results.statistics import noise, ranking

    runs = pd.DataFrame([{name: row.get(name) for name in (*ranking.USED, "tokens_per_step", _RATE)} for row in good])
    keys = [_cell_of(row, row["method"]) for row in good]
    runs["cell"] = pd.Series(keys, dtype=object).map({key: place for place, key in enumerate(sorted(set(keys)))})
    cells = []
    runs["engine"] = [_engine(row) for row in good]
    for _, alike in runs.groupby(["method", "engine"], sort=False):  # noise of one says nothing of another
        ranked = ranking.of_layouts(alike, ["cell"], _RATE)
        ranked = ranked[ranked["rank"].notna()].join(alike["tokens_per_step"])
        layouts_of = ranked.groupby("cell").size()
        ranked = ranking.of_usual_batch(ranked, ["cell"])
        ranked["within"] = noise.within(ranked.rename(columns={_RATE: "_run", "median": _RATE}), _RATE, ["cell"])
        for _, cell in ranked.groupby("cell"):
            places, medians = cell.index.tolist(), list(zip(cell["median"], cell["repeats"], strict=True))
            layouts = tuple(_layout(good[at], *pooled) for at, pooled in zip(places, medians, strict=True))
            known = len(cell) == 1 or not pd.isna(cell["within"].iloc[1])
            tied = int(cell["within"].fillna(False).sum()) if known else None
            others = int(layouts_of[cell["cell"].iloc[0]]) - len(cell)
            cells.append(Cell(key=keys[places[0]], layouts=layouts, tied=tied, at_other_batches=others))
    return sorted(cells, key=lambda cell: cell.key)


def older(rows: Iterable[Row]) -> int:
    """Finished rows of older versions of the measurement or the engine than the newest: `best_layouts` has them not."""
    finished = _finished(rows)
    newest = _newest(finished)
    return sum(_version(row) < newest[_engine(row)] for row in finished)


def waiting_for_host(rows: Iterable[Row]) -> tuple[int, int]:
    """Finished rows whose devices waited for a host, and all that tell: what such a step takes says as much of the host
    as of the layout. Runs whose allocator stopped to free its cache do not tell: that waits for the device."""
    told = [row for row in _finished(rows) if row["host_lead_s"] is not None and not row["allocator_retries"]]
    waited = [row for row in told if row["host_lead_s"] < HOST_WAIT * (row["step_time_s"] or 0.0)]
    return len(waited), len(told)


def freeing_cache(rows: Iterable[Row]) -> tuple[int, int]:
    """Finished rows whose allocator stopped to free its cache, since memory was nearly full, and all that tell."""
    told = [row["allocator_retries"] for row in _finished(rows) if row["allocator_retries"] is not None]
    return sum(retries > 0 for retries in told), len(told)


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


def _engine(row: Row) -> str:
    return row["engine"] or ex.ENGINE


def _newest(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """The newest version among the rows of each engine."""
    newest: dict[str, tuple[int, int]] = {}
    for row in rows:
        newest[_engine(row)] = max(_version(row), newest.get(_engine(row), (0, 0)))
    return newest


def _cell_of(row: Row, method: str) -> CellKey:
    tp, cp = (row["tp"], row["cp"]) if method == "rehearsed" else (None, None)
    routing = name_routing(row["routing"], row["routing_imbalance"], row["capacity_factor"])
    sizes = (row["seq_len"] or 0, row["world_size"] or 0)
    return CellKey(row["model"] or "", routing, *sizes, method, tp, cp, _engine(row))


def _finished(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["outcome"] == "ok" and row[_RATE] and row["config_json"]]


def _layout(middle: Row, rate: float, runs: int) -> Layout:
    """A layout from its middle run and the median throughput of its runs."""
    mfu = middle["mfu_palm"]
    return Layout(
        experiment=ex.from_json(middle["config_json"]),
        rate=float(rate),
        peak_bytes=middle["peak_allocated_bytes"],
        mfu=None if mfu is None else mfu * rate / middle[_RATE],
        backend=middle["backend"],
        runs=int(runs),
    )
