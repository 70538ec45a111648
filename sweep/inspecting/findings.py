"""Findings of a sweep so far, from its rows and its ledger: the fastest layouts, and what is worth trying next.

Layouts are ranked within a cell: one model, routing and sequence length on one number of devices. Rehearsed times are
too short by an amount that depends on tp, so each rehearsed cell has a single tp.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results.text.numbers import name_documents, name_routing
from workloads.contract.protocol import HOST_WAIT
from workloads.spec import experiment as ex
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment

Row = Mapping[str, Any]
ROW_COLUMNS = [
    *("attempt_id", "experiment_id", "outcome", "method", "measurement_version", "repeat_of", "loss_agrees"),
    *("engine", "engine_version"),
    *("model", "seq_len", "world_size", "tp", "cp", "tokens_per_step", "backend", "config_json", "timed_steps"),
    *("routing", "routing_imbalance", "capacity_factor", "documents"),
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
    *("nodes", "nccl_transports"),
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
    *("routing", "routing_imbalance", "capacity_factor", "documents"),
    *("cached_sweep", "predicted_tokens_per_s_per_gpu", "expected_gpu_hours"),
]
"""Only these columns and `ROW_COLUMNS` are read, because a study has ten thousand rows of 150 columns."""
WITHIN = 0.97
"""An untried point is worth trying if it is expected to reach this share of the best of its cell."""
_RATE = "tokens_per_s_per_gpu"


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    model: str
    routing: str
    """Texts of `results.text.numbers.name_routing` and `name_documents`; empty: balanced, or no experts, and whole
    sequences."""
    seq_len: int
    world_size: int
    method: str
    tp: int | None
    """None: layouts of every tp are ranked together."""
    cp: int | None
    """None: layouts of every cp are ranked together."""
    engine: str = ex.ENGINE

    @property
    def workload(self) -> str:
        """Model, routing, and engine unless it is this project's."""
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
    """Number of layouts, including the fastest, that are slower by no more than noise; 1: a clear lead. None: unknown
    noise."""
    not_like_these: int
    """Number of layouts at another batch size or in another precision than most of the cell; they are not ranked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Untried:
    """A planned point without an attempt."""

    experiment: Experiment
    verdict: str
    rate: float
    """Predicted tokens/s per device, corrected by the ratio of measured to predicted rates in its cell (or model)."""
    gain: float | None
    """``rate`` over the best of its cell, minus 1; None if nothing was measured in the cell."""
    expected_hours: float | None


def best_layouts(rows: Iterable[Row]) -> list[Cell]:
    """Cells of the finished rows, ranked as in the report (`results.statistics.ranking`).

    Left out are rows without a configuration that can be read, rows of older versions (`older`), and layouts whose
    losses contradict the reference. In each cell only layouts with the batch size and the precision of most of them are
    ranked.
    """
    good = _finished(rows)
    newest = _newest(good)
    good = [row for row in good if _version(row) == newest[_engine(row)] and _experiment(row) is not None]
    if not good:
        return []
    import pandas as pd  # takes half a second, so it is imported only at the end of a run

    from results.statistics import noise, ranking

    runs = pd.DataFrame([{name: row.get(name) for name in (*ranking.USED, *ranking.LIKE, _RATE)} for row in good])
    keys = [_cell_of(row, row["method"]) for row in good]
    runs["cell"] = pd.Series(keys, dtype=object).map({key: place for place, key in enumerate(sorted(set(keys)))})
    cells = []
    runs["engine"] = [_engine(row) for row in good]
    for _, comparable in runs.groupby(["method", "engine"], sort=False):  # methods and engines differ in their noise
        ranked = ranking.of_layouts(comparable, ["cell"], _RATE)
        ranked = ranked[ranked["rank"].notna()].join(comparable[[*ranking.LIKE]])
        layouts_of = ranked.groupby("cell").size()
        ranked = ranking.of_usual_batch(ranked, ["cell"])
        ranked["within"] = noise.within(ranked.rename(columns={_RATE: "_run", "median": _RATE}), _RATE, ["cell"])
        for _, cell in ranked.groupby("cell"):
            places, medians = cell.index.tolist(), list(zip(cell["median"], cell["repeats"], strict=True))
            layouts = tuple(_layout(good[at], *pooled) for at, pooled in zip(places, medians, strict=True))
            known = len(cell) == 1 or not pd.isna(cell["within"].iloc[1])
            tied = int(cell["within"].fillna(False).sum()) if known else None
            others = int(layouts_of[cell["cell"].iloc[0]]) - len(cell)
            cells.append(Cell(key=keys[places[0]], layouts=layouts, tied=tied, not_like_these=others))
    return sorted(cells, key=lambda cell: cell.key)


def older(rows: Iterable[Row]) -> int:
    """Number of finished rows of older measurement or engine versions, which `best_layouts` leaves out."""
    finished = _finished(rows)
    newest = _newest(finished)
    return sum(_version(row) < newest[_engine(row)] for row in finished)


def waiting_for_host(rows: Iterable[Row]) -> tuple[int, int]:
    """Returns (number of finished host-bound rows, number of rows where this is known).

    The step time of a host-bound row depends on the host as much as on the layout. Rows whose allocator had to free its
    cache are not counted, because that waits for the device.
    """
    known_rows = [row for row in _finished(rows) if row["host_lead_s"] is not None and not row["allocator_retries"]]
    waited = [row for row in known_rows if row["host_lead_s"] < HOST_WAIT * (row["step_time_s"] or 0.0)]
    return len(waited), len(known_rows)


def freeing_cache(rows: Iterable[Row]) -> tuple[int, int]:
    """Returns (number of finished rows whose allocator had to free its cache, number of rows where this is known)."""
    retries_of_rows = [row["allocator_retries"] for row in _finished(rows) if row["allocator_retries"] is not None]
    return sum(retries > 0 for retries in retries_of_rows), len(retries_of_rows)


def sockets_between_nodes(rows: Iterable[Row]) -> tuple[int, int]:
    """Returns (number of finished rows of several nodes between which NCCL used sockets, number of rows of several
    nodes whose transports are known)."""
    known_rows = [row for row in _finished(rows) if len(row["nodes"] or ()) > 1 and row["nccl_transports"] is not None]
    return sum("NET/Socket" in row["nccl_transports"] for row in known_rows), len(known_rows)


def untried_points(ledger: Iterable[Row], rows: Iterable[Row], cells: Sequence[Cell], method: str) -> list[Untried]:
    """Points of the ledger that may run, have a prediction and no attempt, most promising first.

    Points of cells without a measured layout come first, then points by `Untried.gain`, down to `WITHIN` of the best.
    """
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
    untried = []
    for row in ledger:
        guess = row["predicted_tokens_per_s_per_gpu"]
        if row["verdict"] not in ("run", "over_budget") or not guess or row["experiment_id"] in tried:
            continue
        key = _cell_of(row, method)
        ratios = next((reached[scope] for scope in ((key,), (key.model,), ()) if reached[scope]), [1.0])
        rate = guess * statistics.median(ratios)
        gain = rate / best[key] - 1 if key in best else None
        if (gain is None or gain >= WITHIN - 1) and (experiment := _experiment(row)) is not None:
            untried.append(
                Untried(
                    experiment=experiment,
                    verdict=row["verdict"],
                    rate=rate,
                    gain=gain,
                    expected_hours=row["expected_gpu_hours"],
                )
            )
    return sorted(untried, key=lambda point: (point.gain is not None, -(point.gain or 0.0), -point.rate))


def _version(row: Row) -> tuple[int, int]:
    """Versions of measurement and engine; rows of different versions are not comparable."""
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
    chosen = name_routing(row["routing"], row["routing_imbalance"], row["capacity_factor"])
    routing = ", ".join(filter(None, (chosen, name_documents(row["documents"]))))
    sizes = (row["seq_len"] or 0, row["world_size"] or 0)
    return CellKey(row["model"] or "", routing, *sizes, method, tp, cp, _engine(row))


def _finished(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["outcome"] == "ok" and row[_RATE] and row["config_json"]]


def _experiment(row: Row) -> Experiment | None:
    """The stored experiment; None if it cannot be read, as that of a newer version."""
    try:
        return ex.from_json(row["config_json"])
    except (InvalidExperiment, TypeError):
        return None


def _layout(middle: Row, rate: float, runs: int) -> Layout:
    """A layout from its median run and the median throughput of its runs."""
    mfu = middle["mfu_palm"]
    experiment = _experiment(middle)
    assert experiment is not None
    return Layout(
        experiment=experiment,
        rate=float(rate),
        peak_bytes=middle["peak_allocated_bytes"],
        mfu=None if mfu is None else mfu * rate / middle[_RATE],
        backend=middle["backend"],
        runs=int(runs),
    )
