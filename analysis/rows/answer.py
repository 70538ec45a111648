"""The answer for one model on one number of devices: what fits, at which batch, what is fastest, what a rule costs.

The page computes the same in the browser for whatever limits its reader sets (``templates/page/answer.js``); tests hold
the two together. The order of the steps is the Ultra-Scale Playbook's: fit, then the batch, then the throughput.

Batches are not compared: unless another one is asked for, the answer is of the tokens a step that most finished layouts
of the cell have. A winner is a set (`results.statistics.noise`). Where noise is not known, since there is no repeat and
nothing says how far the steps of a run lie apart (it had one, or its row holds the median alone), layouts within
`UNTIMED` of the best are taken for as fast: the answer then says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.load import decided
from results.statistics import noise, ranking

UNTIMED = 0.05
"""What may decide nothing where noise is not known, as in `analysis.compare`; a fraction of the best throughput."""
FILTERS = ("network_regime", "engine_version")
"""Columns whose values a reader may ask for: runs that differ in them are no fair comparison."""
ANY = "any"
"""Every number of tokens a step."""
Layout = Mapping[str, Any]
"""A row of `metrics.ranked` by column name, with ``tied`` (whether it may be as fast as the best), ``behind`` (1 - its
throughput over the best's) and ``unknown`` (whether its noise is not known)."""
_TOLD = (
    *("experiment_id", "attempt_id", "layout", "dp", "dp_replicate", "dp_shard", "zero_stage", "tp", "cp", "pp", "ep"),
    *("micro_batch_size", "num_microbatches", "recompute", "compile", "pp_schedule", "tokens_per_step", *FILTERS),
    *("peak_allocated_bytes", "peak_reserved_bytes", "mfu_palm", "step_time_s", metrics.RANK_BY, *noise.COLUMNS),
)
"""Columns of a layout."""


@dataclass(frozen=True, slots=True)
class Query:
    """What is asked for. Limits that are None exclude nothing."""

    workload: str
    world_size: int
    memory_bytes: float | None = None
    """Layouts whose peak is known to be above this are left out."""
    tokens_per_step: float | str | None = None
    """None is the batch of most finished layouts, `ANY` all of them."""
    only: dict[str, str] = field(default_factory=dict)
    """Values of columns of `FILTERS`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the rows say to a query. Counts are of points, the deciding attempt of each; layouts are repeats pooled."""

    query: Query
    points: int
    out_of_memory: int
    failed: int
    """Points that ended otherwise."""
    finished: int
    """Layouts with a throughput, whatever their losses, batch and memory."""
    fits: int
    """Of these, layouts within the memory limit."""
    tokens_per_step: float | None
    """The batch of the answer; None for `ANY` and where nothing finished."""
    layouts: list[Layout]
    """The layouts that the query leaves, best first."""
    faster_at: float | None
    """Throughput of a faster layout that fits at another batch; None where there is none."""

    @property
    def best(self) -> Layout | None:
        return self.layouts[0] if self.layouts else None

    @property
    def ties(self) -> list[Layout]:
        """The winner and every layout that may be as fast."""
        return [layout for layout in self.layouts if layout["tied"]]

    @property
    def untimed(self) -> bool:
        """Whether it rests on `UNTIMED` alone if the second layout is called a tie, or not."""
        return len(self.layouts) > 1 and bool(self.layouts[1]["unknown"])


@dataclass(frozen=True, slots=True)
class _Cell:
    outcomes: pd.Series
    """Of the points that have ended."""
    rows: pd.DataFrame
    """Trusted ranked rows."""
    usual: float | None
    """The tokens a step that most of them have."""
    told: pd.DataFrame
    """Those of the usual batch, best first, see `_told_apart`."""
    layouts: tuple[Layout, ...]
    """The same as dicts: made for all cells at once, since most of the time goes into each table, not into its rows."""


@cache_per_frame
def _cells(frame: pd.DataFrame) -> dict[tuple[str, int], _Cell]:
    """Every model and size, in the order of the page. All are told apart at once: cell by cell it takes ten times as
    long."""
    outcomes = dict(list(decided(frame).groupby(metrics.GROUP, sort=False)["outcome"]))
    ranked = metrics.ranked(frame)
    ranked = ranked.loc[ranked["rank"].notna(), [*metrics.GROUP, *(name for name in _TOLD if name in ranked)]]
    rows = dict(list(ranked.groupby(metrics.GROUP, sort=False)))
    told = _told_apart(ranking.of_usual_batch(ranked[ranked["tokens_per_step"].notna()], metrics.GROUP))
    usual = dict(list(told.groupby(metrics.GROUP, sort=False)))
    layouts: dict[tuple[Any, ...], list[Layout]] = {}
    for layout in labels.records(told):
        layouts.setdefault(tuple(layout[name] for name in metrics.GROUP), []).append(layout)
    order = {name: place for place, name in enumerate(labels.workload_order(frame))}
    found: dict[tuple[str, int], _Cell] = {}
    for key, ended in outcomes.items():
        of_batch = usual.get(key, told.iloc[:0])
        batch = float(of_batch["tokens_per_step"].iloc[0]) if len(of_batch) else None
        workload, size = key
        own = rows.get(key, ranked.iloc[:0])
        found[str(workload), int(float(str(size)))] = _Cell(ended, own, batch, of_batch, tuple(layouts.get(key, ())))
    return {key: found[key] for key in sorted(found, key=lambda key: (order[key[0]], key[1]))}


_NO_ROWS = pd.DataFrame({name: [] for name in (*metrics.GROUP, *_TOLD, "tied", "behind", "unknown")})
_NOTHING = _Cell(pd.Series(dtype=object), _NO_ROWS, None, _NO_ROWS, ())


def cells(frame: pd.DataFrame) -> list[tuple[str, int]]:
    """Every (workload, number of devices) of a cohort, smallest model first."""
    return list(_cells(frame))


def answer(frame: pd.DataFrame, query: Query) -> Answer:
    """The answer of a cohort's rows. A cell without rows gives counts of 0."""
    cell = _cells(frame).get((query.workload, query.world_size), _NOTHING)
    outcomes, rows = cell.outcomes, cell.rows
    memory = rows[metrics.memory_column(frame)]
    fit = rows if query.memory_bytes is None else rows[~(memory > query.memory_bytes)]
    for name, value in query.only.items():
        fit = fit[fit[name].astype("string").eq(value).fillna(False)]
    wanted = cell.usual if query.tokens_per_step is None else query.tokens_per_step
    left = fit if wanted == ANY else fit[fit["tokens_per_step"] == wanted]
    as_usual = len(left) == len(cell.told) and left.index.isin(cell.told.index).all()
    best = left[metrics.RANK_BY].max() if len(left) else None
    elsewhere = fit.loc[~fit.index.isin(left.index), metrics.RANK_BY]
    faster = elsewhere[elsewhere > best].max() if best is not None and len(elsewhere) else None
    return Answer(
        query=query,
        points=len(outcomes),
        out_of_memory=int(outcomes.eq("oom").sum()),
        failed=int((~outcomes.isin(["ok", "oom"])).sum()),
        finished=len(rows),
        fits=len(fit),
        tokens_per_step=None if wanted == ANY or wanted is None else float(wanted),
        layouts=list(cell.layouts if as_usual else labels.records(_told_apart(left))),
        faster_at=None if faster is None or pd.isna(faster) else float(faster),
    )


@cache_per_frame
def of_every_cell(frame: pd.DataFrame) -> list[Answer]:
    """The answer of every cell of a cohort with which the page opens: its usual batch, and no limits."""
    return [answer(frame, Query(workload, size)) for workload, size in cells(frame)]


def _told_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """Ranked rows of some cells, best first in each, with ``tied``, ``behind`` and ``unknown`` (see `Layout`)."""
    rows = rows.sort_values(metrics.RANK_BY, ascending=False, kind="stable")
    if rows.empty:
        return rows.assign(tied=pd.Series(dtype=bool), behind=pd.Series(dtype=float), unknown=pd.Series(dtype=bool))
    within = noise.within(rows, metrics.RANK_BY, metrics.GROUP)
    behind = 1 - rows[metrics.RANK_BY] / rows.groupby(metrics.GROUP)[metrics.RANK_BY].transform("first")
    unknown = within.isna()
    tied = within.fillna(False).astype(bool) | (unknown & (behind <= UNTIMED))
    return rows.assign(tied=tied, behind=behind, unknown=unknown)


# What a rule costs: the best layout that keeps it against the best of all


def _is(column: str, value: str | int) -> Callable[[Layout], bool]:
    return lambda layout: bool(layout[column] == value)


def _unknown(value: Any) -> bool:
    return bool(pd.isna(value))


def _alone(layout: Layout) -> bool:
    return all(_unknown(layout[axis]) or layout[axis] == 1 for axis in ("tp", "cp", "pp", "ep"))


RULES: dict[str, Callable[[Layout], bool]] = {
    "data parallelism alone": _alone,
    "no tensor parallelism": _is("tp", 1),
    "no pipeline": _is("pp", 1),
    "no context parallelism": _is("cp", 1),
    "ZeRO 0": _is("zero_stage", 0),
    "ZeRO 3": _is("zero_stage", 3),
    "micro-batch 1": _is("micro_batch_size", 1),
    "no recomputation": _is("recompute", "none"),
    "not compiled": _is("compile", "none"),
}
HALF_MEMORY = "half the memory"


def rule_costs(found: Answer, memory: str, capacity: float | None) -> Iterator[tuple[str, int, Layout]]:
    """(rule, layouts that keep it, the best of them) for every rule that some but not all layouts of an answer keep.

    ``memory`` names the column of peaks, ``capacity`` is the device's memory in bytes.
    """
    rules = dict(RULES)
    if capacity is not None and any(not _unknown(layout[memory]) for layout in found.layouts):
        half = capacity / 2
        rules[HALF_MEMORY] = lambda layout: bool(layout[memory] <= half)
    for name, keeps in rules.items():
        kept = [layout for layout in found.layouts if keeps(layout)]
        if 0 < len(kept) < len(found.layouts):
            yield name, len(kept), kept[0]


AXES = ("tp", "pp", "cp", "ep", "dp", "micro_batch_size", "num_microbatches", "zero_stage", "recompute", "pp_schedule")
"""Axes whose values are shown each with its best run."""


def best_at_each_value(found: Answer) -> dict[str, list[tuple[Any, int, Layout]]]:
    """(value, layouts, the best of them) by axis, for the axes that vary among an answer's layouts."""
    table: dict[str, list[tuple[Any, int, Layout]]] = {}
    for axis in AXES:
        groups: dict[Any, list[Layout]] = {}
        for layout in found.layouts:
            if not _unknown(layout[axis]):
                groups.setdefault(layout[axis], []).append(layout)
        if len(groups) > 1:
            table[axis] = [(value, len(groups[value]), groups[value][0]) for value in sorted(groups)]
    return table
