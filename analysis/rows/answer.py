"""The answer for one model on one number of devices: what fits, at which batch, what is fastest, what a rule costs.

The page computes the same in the browser for whatever limits its reader sets (``templates/page/answer.js``); tests hold
the two together. The order of the steps is the Ultra-Scale Playbook's: fit, then the batch, then the throughput.

Batches are not compared: unless another one is asked for, the answer is of the tokens a step that most finished layouts
of the cell have. A winner is a set (`results.noise`). Where noise is not known, since there is one timed step and no
repeat, layouts within `UNTIMED` of the best are taken for as fast: the answer then says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.load import last_attempts
from results import noise

UNTIMED = 0.05
"""What may decide nothing where noise is not known, as in `analysis.compare`; a fraction of the best throughput."""
FILTERS = ("network_regime", "engine_version")
"""Columns whose values a reader may ask for: runs that differ in them are no fair comparison."""
ANY = "any"
"""Every number of tokens a step."""


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
    ranked: pd.DataFrame
    """The layouts that the query leaves, best first: rows of `metrics.ranked` with ``tied`` (whether it may be as fast
    as the first one) and ``behind`` (1 - throughput over the first's)."""
    faster_at: float | None
    """Throughput of a faster layout that fits at another batch; None where there is none."""

    @property
    def best(self) -> pd.Series | None:
        return None if self.ranked.empty else self.ranked.iloc[0]

    @property
    def ties(self) -> pd.DataFrame:
        """The winner and every layout that may be as fast."""
        return self.ranked[self.ranked["tied"]]

    @property
    def untimed(self) -> bool:
        """Whether some of what is called a tie, or not, rests on `UNTIMED` alone."""
        near = self.ranked.iloc[1:2]
        return bool(len(near)) and bool(near["unknown"].iloc[0])


@cache_per_frame
def _cells(frame: pd.DataFrame) -> dict[tuple[str, int], tuple[pd.DataFrame, pd.DataFrame]]:
    """(deciding attempts, trusted ranked rows) of every model and size, in the order of the page."""
    final = last_attempts(frame)
    ranked = metrics.ranked(frame)
    ranked = ranked[ranked["rank"].notna()]
    rows = dict(list(ranked.groupby(metrics.GROUP, sort=False)))
    empty = ranked.iloc[:0]
    found = {key: (group, rows.get(key, empty)) for key, group in final.groupby(metrics.GROUP, sort=False)}
    order = {name: place for place, name in enumerate(labels.workload_order(frame))}
    sized = {(str(workload), int(str(size))): found[workload, size] for workload, size in found}
    return {key: sized[key] for key in sorted(sized, key=lambda key: (order[key[0]], key[1]))}


def cells(frame: pd.DataFrame) -> list[tuple[str, int]]:
    """Every (workload, number of devices) of a cohort, smallest model first."""
    return list(_cells(frame))


def answer(frame: pd.DataFrame, query: Query) -> Answer:
    """The answer of a cohort's rows. A cell without rows gives counts of 0."""
    nothing = (frame.iloc[:0], metrics.ranked(frame).iloc[:0])
    final, rows = _cells(frame).get((query.workload, query.world_size), nothing)
    outcomes = final.loc[~final["will_retry"].eq(True), "outcome"]
    memory = rows[metrics.memory_column(frame)]
    fit = rows if query.memory_bytes is None else rows[~(memory > query.memory_bytes)]
    for name, value in query.only.items():
        fit = fit[fit[name].astype("string").eq(value).fillna(False)]
    usual = usual_batch(rows)
    wanted = usual if query.tokens_per_step is None else query.tokens_per_step
    left = fit if wanted == ANY else fit[fit["tokens_per_step"] == wanted]
    left = told_apart(left)
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
        ranked=left,
        faster_at=None if faster is None or pd.isna(faster) else float(faster),
    )


def usual_batch(rows: pd.DataFrame) -> float | None:
    """The tokens a step that most of ``rows`` have, the smallest of several; None where none is known."""
    known = rows["tokens_per_step"].dropna()
    return float(known.mode().iloc[0]) if len(known) else None


def told_apart(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of one cell best first, with ``tied``, ``behind`` and ``unknown`` (whether noise is not known)."""
    rows = rows.sort_values(metrics.RANK_BY, ascending=False, kind="stable")
    if rows.empty:
        return rows.assign(tied=pd.Series(dtype=bool), behind=pd.Series(dtype=float), unknown=pd.Series(dtype=bool))
    within = noise.within(rows.assign(_cell=0), metrics.RANK_BY, ["_cell"])
    behind = 1 - rows[metrics.RANK_BY] / rows[metrics.RANK_BY].iloc[0]
    unknown = within.isna()
    return rows.assign(
        tied=within.fillna(False).astype(bool) | (unknown & (behind <= UNTIMED)), behind=behind, unknown=unknown
    )


# What a rule costs: the best layout that keeps it against the best of all


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    keeps: Callable[[pd.DataFrame], pd.Series]
    """Which rows keep the rule."""


def _is(column: str, value: str | int) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda rows: rows[column].eq(value)


def _alone(rows: pd.DataFrame) -> pd.Series:
    return (rows[["tp", "cp", "pp", "ep"]].fillna(1) == 1).all(axis=1)


RULES = (
    Rule("data parallelism alone", _alone),
    Rule("no tensor parallelism", _is("tp", 1)),
    Rule("no pipeline", _is("pp", 1)),
    Rule("no context parallelism", _is("cp", 1)),
    Rule("ZeRO 0", _is("zero_stage", 0)),
    Rule("ZeRO 3", _is("zero_stage", 3)),
    Rule("micro-batch 1", _is("micro_batch_size", 1)),
    Rule("no recomputation", _is("recompute", "none")),
    Rule("not compiled", _is("compile", "none")),
)
HALF_MEMORY = "half the memory"


def rule_costs(found: Answer, memory: str, capacity: float | None) -> Iterator[tuple[str, int, pd.Series | None]]:
    """(rule, layouts that keep it, the best of them) for every rule that some but not all layouts of an answer keep,
    and for every rule that none keeps though its axis varies. ``memory`` names the column of peaks, ``capacity`` is the
    device's memory in bytes."""
    rows = found.ranked
    for rule in RULES:
        keeps = rule.keeps(rows).fillna(False).astype(bool)
        if 0 < keeps.sum() < len(rows):
            yield rule.name, int(keeps.sum()), rows[keeps].iloc[0]
    if capacity is not None and rows[memory].notna().any():
        keeps = rows[memory] <= capacity / 2
        if 0 < keeps.sum() < len(rows):
            yield HALF_MEMORY, int(keeps.sum()), rows[keeps].iloc[0]


AXES = ("tp", "pp", "cp", "ep", "dp", "micro_batch_size", "num_microbatches", "zero_stage", "recompute", "pp_schedule")
"""Axes whose values are shown each with its best run."""


def best_at_each_value(found: Answer) -> dict[str, list[tuple[object, int, pd.Series]]]:
    """(value, layouts, the best of them) by axis, for the axes that vary among an answer's layouts."""
    rows = found.ranked
    table: dict[str, list[tuple[object, int, pd.Series]]] = {}
    for axis in AXES:
        known = rows[rows[axis].notna()]
        if known[axis].nunique() > 1:
            table[axis] = [(value, len(group), group.iloc[0]) for value, group in known.groupby(axis, sort=True)]
    return table
