"""The answer for one model on one number of devices: what fits, at which batch, what is fastest.

The page computes the same answer in the browser for the limits that its reader sets (``templates/page/answer.js``);
tests compare the two. The order of the steps is the Ultra-Scale Playbook's: fit, then the batch, then the throughput.

Batches and precisions are not compared: where the query names none of them, the answer uses the group
of `results.statistics.ranking.LIKE` that most finished layouts of the cell have. A winner is a set of layouts
(`results.statistics.noise`). If the noise is unknown (the layout has no repeats and its row has no spread over steps:
one timed step, or only the median), layouts within `UNTIMED` of the best count as ties, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.load import decided
from results.statistics import noise, ranking

UNTIMED = 0.05
"""Largest difference in throughput that counts as a tie if noise is unknown, as a fraction of the best;
`analysis.compare` uses the same value."""
FILTERS = ("network_regime", "engine_version", "precision")
"""Columns whose values a reader may select: runs that differ in them are not comparable."""
ANY = "any"
"""Value of `Query.tokens_per_step` that admits every batch, and of a column of `Query.only`."""
Layout = Mapping[str, Any]
"""A row of `metrics.ranked` by column name, with ``tied`` (whether it may be as fast as the best), ``behind`` (1 - its
throughput over the best's) and ``unknown`` (whether its noise is not known)."""
_LAYOUT_COLUMNS = (
    *("experiment_id", "attempt_id", "layout", "dp", "dp_replicate", "dp_shard", "zero_stage", "tp", "cp", "pp", "ep"),
    *("micro_batch_size", "num_microbatches", "recompute", "compile", "pp_schedule", "tokens_per_step", *FILTERS),
    *("peak_allocated_bytes", "peak_reserved_bytes", "mfu_palm", "step_time_s", metrics.RANK_BY, *noise.COLUMNS),
)
"""Columns that each layout keeps."""


@dataclass(frozen=True, slots=True)
class Query:
    """Question of a reader. A limit of None excludes nothing."""

    workload: str
    world_size: int
    memory_bytes: float | None = None
    """Memory limit in bytes: layouts with a known peak above it are left out."""
    tokens_per_step: float | str | None = None
    """Tokens per step. None: the batch that most finished layouts have; `ANY`: all batches."""
    only: dict[str, str] = field(default_factory=dict)
    """Required values by column, or `ANY`; columns are from `FILTERS`. A column of `results.statistics.ranking.LIKE`
    that is not named has the value that most layouts have among those left."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a query. ``points``, ``out_of_memory`` and ``failed`` count points by their deciding attempt; a layout
    pools its repeats."""

    query: Query
    points: int
    out_of_memory: int
    failed: int
    """Points that ended neither ok nor out of memory."""
    finished: int
    """Number of ranked layouts, at any batch and memory."""
    fits: int
    """Number of ranked layouts within the memory limit and with the required values."""
    tokens_per_step: float | None
    """Batch of the answer in tokens per step; None for `ANY` and if nothing finished."""
    layouts: list[Layout]
    """Layouts that satisfy the query, best first."""
    faster_at: float | None
    """Throughput of the fastest layout that fits at another batch, if it is faster than the best of this one; else
    None."""

    @property
    def best(self) -> Layout | None:
        return self.layouts[0] if self.layouts else None

    @property
    def ties(self) -> list[Layout]:
        """The winner and every layout that may be as fast."""
        return [layout for layout in self.layouts if layout["tied"]]

    @property
    def untimed(self) -> bool:
        """Whether `UNTIMED`, not noise, decides if the second layout is a tie."""
        return len(self.layouts) > 1 and bool(self.layouts[1]["unknown"])


@dataclass(frozen=True, slots=True)
class _Cell:
    outcomes: pd.Series
    """Outcome of each point that has ended."""
    rows: pd.DataFrame
    """Trusted ranked rows."""
    usual: float | None
    """Tokens per step of `usual_rows`."""
    usual_rows: pd.DataFrame
    """Trusted rows of the largest group that agrees in `ranking.LIKE`, best first, with the columns of `_with_ties`."""
    layouts: tuple[Layout, ...]
    """`usual_rows` as dicts, made for all cells at once: the conversion costs time per table, not per row."""


@cache_per_frame
def _cells(frame: pd.DataFrame) -> dict[tuple[str, int], _Cell]:
    """Every model and size, in the order of the page. Ties are decided for all cells at once, ten times as fast as cell
    by cell."""
    outcomes = dict(list(decided(frame, [*metrics.GROUP, "outcome"]).groupby(metrics.GROUP, sort=False)["outcome"]))
    ranked = metrics.ranked(frame)
    ranked = ranked.loc[ranked["rank"].notna(), [*metrics.GROUP, *(name for name in _LAYOUT_COLUMNS if name in ranked)]]
    rows = dict(list(ranked.groupby(metrics.GROUP, sort=False)))
    usual_rows = _with_ties(ranking.of_usual_batch(ranked[ranked["tokens_per_step"].notna()], metrics.GROUP))
    usual = dict(list(usual_rows.groupby(metrics.GROUP, sort=False)))
    layouts: dict[tuple[Any, ...], list[Layout]] = {}
    for layout in labels.records(usual_rows):
        layouts.setdefault(tuple(layout[name] for name in metrics.GROUP), []).append(layout)
    order = {name: place for place, name in enumerate(labels.workload_order(frame))}
    cells_by_key: dict[tuple[str, int], _Cell] = {}
    for key, ended in outcomes.items():
        of_batch = usual.get(key, usual_rows.iloc[:0])
        batch = float(of_batch["tokens_per_step"].iloc[0]) if len(of_batch) else None
        workload, size = key
        rows_of_cell = rows.get(key, ranked.iloc[:0])
        cells_by_key[str(workload), int(float(str(size)))] = _Cell(
            ended, rows_of_cell, batch, of_batch, tuple(layouts.get(key, ()))
        )
    return {key: cells_by_key[key] for key in sorted(cells_by_key, key=lambda key: (order[key[0]], key[1]))}


_NO_ROWS = pd.DataFrame({name: [] for name in (*metrics.GROUP, *_LAYOUT_COLUMNS, "tied", "behind", "unknown")})
_NOTHING = _Cell(pd.Series(dtype=object), _NO_ROWS, None, _NO_ROWS, ())


def cells(frame: pd.DataFrame) -> list[tuple[str, int]]:
    """Every (workload, number of devices) of a cohort, smallest model first."""
    return list(_cells(frame))


def answer(frame: pd.DataFrame, query: Query) -> Answer:
    """Answer from a cohort's rows. A cell without rows has counts of 0."""
    cell = _cells(frame).get((query.workload, query.world_size), _NOTHING)
    if query == Query(query.workload, query.world_size) and cell.usual is not None:
        return _as_the_page_opens(query, cell)
    outcomes, rows = cell.outcomes, cell.rows
    memory = rows[metrics.memory_column(frame)]
    wanted = query.tokens_per_step
    asked = _having(rows, query.only)
    fit = asked if query.memory_bytes is None else asked[~(memory.loc[asked.index] > query.memory_bytes)]
    if wanted is None:
        asked = asked[asked["tokens_per_step"].notna()]
    elif wanted != ANY:
        asked = asked[asked["tokens_per_step"] == wanted]
    named = {*query.only, *([] if wanted is None else ["tokens_per_step"])}
    like = ranking.of_usual_batch(asked, metrics.GROUP, [name for name in ranking.LIKE if name not in named])
    if wanted is None:
        wanted = like["tokens_per_step"].iloc[0] if len(like) else None
    left = fit[fit.index.isin(like.index)]
    as_usual = len(left) == len(cell.usual_rows) and left.index.isin(cell.usual_rows.index).all()
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
        layouts=list(cell.layouts if as_usual else labels.records(_with_ties(left))),
        faster_at=None if faster is None or pd.isna(faster) else float(faster),
    )


def _having(rows: pd.DataFrame, only: Mapping[str, str]) -> pd.DataFrame:
    """The rows that have the required values."""
    for name, value in only.items():
        if value != ANY:
            rows = rows[rows[name].astype("string").eq(value).fillna(False)]
    return rows


def _as_the_page_opens(query: Query, cell: _Cell) -> Answer:
    """The answer without limits at the usual batch, from what `_cells` computed for all cells at once."""
    elsewhere = ~cell.rows.index.isin(cell.usual_rows.index)
    rates = cell.rows[metrics.RANK_BY].to_numpy(dtype=float)[elsewhere]
    outcomes, best = cell.outcomes.to_numpy(), cell.layouts[0][metrics.RANK_BY]
    out_of_memory, finished = int((outcomes == "oom").sum()), int((outcomes == "ok").sum())
    return Answer(
        query=query,
        points=len(outcomes),
        out_of_memory=out_of_memory,
        failed=len(outcomes) - out_of_memory - finished,
        finished=len(cell.rows),
        fits=len(cell.rows),
        tokens_per_step=cell.usual,
        layouts=list(cell.layouts),
        faster_at=float(rates.max()) if len(rates) and rates.max() > best else None,
    )


@cache_per_frame
def of_every_cell(frame: pd.DataFrame) -> list[Answer]:
    """Answer of every cell of a cohort as the page opens: usual batch, no limits."""
    return [answer(frame, Query(workload, size)) for workload, size in cells(frame)]


def _with_ties(rows: pd.DataFrame) -> pd.DataFrame:
    """Ranked rows of some cells, best first in each, with ``tied``, ``behind`` and ``unknown`` (see `Layout`)."""
    rows = rows.sort_values(metrics.RANK_BY, ascending=False, kind="stable")
    if rows.empty:
        return rows.assign(tied=pd.Series(dtype=bool), behind=pd.Series(dtype=float), unknown=pd.Series(dtype=bool))
    within = noise.within(rows, metrics.RANK_BY, metrics.GROUP)
    behind = 1 - rows[metrics.RANK_BY] / rows.groupby(metrics.GROUP)[metrics.RANK_BY].transform("first")
    unknown = within.isna()
    tied = within.fillna(False).astype(bool) | (unknown & (behind <= UNTIMED))
    return rows.assign(tied=tied, behind=behind, unknown=unknown)
