"""Families: runs that differ in one axis only, from which memory along that axis is drawn.

All other columns of the configuration agree, except those that follow from the axis: the number of devices, and along
data parallelism either the global batch or the number of micro-batches. Where an axis is off, choices that only have a
meaning with it are ignored: a run with one data-parallel rank belongs to the families of every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import pandas as pd

from analysis.memory.peak_split import READ, can_be_counted
from analysis.rows.derived import SHAPE
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.labels import ROUTING, records
from analysis.rows.load import last_attempts
from analysis.rows.pairs import Matching
from workloads.spec.recomputation import Recompute

_POINT = ("sweep", "repeat_of", "started_at", "attempt_number")
_REPLICAS = "_replicas"
"""Column of the outer degree of HSDP; 1 if nothing is sharded."""
_CONFIG = (
    *("model", *SHAPE, "seq_len", "dp", _REPLICAS, "zero_stage", "tp", "sequence_parallel", "cp", "pp", "pp_schedule"),
    *(
        "virtual_stages",
        "ep",
        "etp",
        *ROUTING,
        "micro_batch_size",
        "recompute",
        "recompute_every",
        "precision",
        "attention",
        "compile",
    ),
    *("seed", "engine", "engine_version"),
)
_OUTCOME_ORDER = {"ok": 0, "oom": 1}
_BATCHES = ("num_microbatches", "global_batch_size")


@dataclass(frozen=True, slots=True)
class FamilyAxis:
    """A column of the configuration along which memory is drawn."""

    name: str
    """Name in file names: ``memory_by_<name>``."""
    column: str
    label: str
    """Label of the x axis."""
    values: tuple[Any, ...]
    """Values in order; the closed form is drawn for these if no rows differ in the axis only."""
    off: Any = None
    """Value at which the columns of ``with_it`` have no meaning."""
    with_it: tuple[str, ...] = ()


_EVERY = ("recompute_every",)
_POWERS = (1, 2, 4, 8, 16, 32, 64)
AXES = {
    axis.name: axis
    for axis in (
        FamilyAxis("seq_len", "seq_len", "Sequence length, tokens", tuple(1024 * power for power in _POWERS[:6])),
        FamilyAxis(
            "recompute", "recompute", "Recomputation of activations", ("none", "selective", "full"), "none", _EVERY
        ),
        FamilyAxis("dp", "dp", "Data-parallel degree", _POWERS, 1, ("zero_stage", _REPLICAS)),
        FamilyAxis("zero", "zero_stage", "ZeRO stage", (0, 1, 2, 3), 0, (_REPLICAS,)),
        FamilyAxis("tp", "tp", "Tensor-parallel degree", _POWERS[:5], 1, ("sequence_parallel",)),
        FamilyAxis("cp", "cp", "Context-parallel degree", _POWERS[:5]),
        FamilyAxis("pp", "pp", "Pipeline-parallel degree (stages)", _POWERS[:5], 1, ("pp_schedule", "virtual_stages")),
    )
}


@dataclass(frozen=True, slots=True)
class Family:
    """Rows that differ in one axis only, one for each of its values, in the order of the axis."""

    rows: tuple[dict[str, Any], ...]
    """Rows with ``repeats``, the number of finished runs of that configuration."""
    fixed: str
    """Batch column that all rows share: ``num_microbatches`` or ``global_batch_size``."""
    num_params: int

    @property
    def model(self) -> str:
        return str(self.rows[0]["model"])


@cache_per_frame
def countable(frame: pd.DataFrame) -> pd.DataFrame:
    """The deciding attempts whose memory is known or computable, with the columns that define families."""
    if "study_label" in frame:  # a few of the study's runs have a shape other than their label's
        frame = frame[frame["study_label"].isna() | (frame["study_label"] == frame["model"])]
    rows = last_attempts(frame[[*READ, *_POINT]])
    rows = rows[can_be_counted(rows)]
    return rows.assign(**{_REPLICAS: rows["dp_replicate"].where(rows["zero_stage"] > 0, 1)})


@cache_per_frame
def matching_of(frame: pd.DataFrame) -> Matching:
    """Which rows of `countable` agree in their configuration."""
    return _matching(countable(frame))


def _matching(rows: pd.DataFrame) -> Matching:
    return Matching(rows, (*_CONFIG, *_BATCHES))


def families(rows: pd.DataFrame, axis: FamilyAxis, matching: Matching | None = None) -> list[Family]:
    """The best family of each model along an axis, from the smallest model to the largest.

    The best family has the most values of the axis, then the most finished runs, then the highest peak. A family has at
    least two values and one finished run. ``rows`` come from `countable`, ``matching`` from `matching_of`.
    """
    matching = matching or _matching(rows)
    batches = _BATCHES if axis.column == "dp" else _BATCHES[:1]
    best_by_model: dict[str, tuple[tuple[float, ...], Family]] = {}
    for batch in batches:
        for score, family in _best_by_model(_with_off_rows(rows, matching, axis, batch), axis, batch):
            if family.model not in best_by_model or score > best_by_model[family.model][0]:
                best_by_model[family.model] = score, family
    return sorted(
        (family for _, family in best_by_model.values()), key=lambda family: (family.num_params, family.model)
    )


def twin(rows: pd.DataFrame, family: Family, axis: FamilyAxis, **changes: Any) -> dict[Any, dict[str, Any]]:
    """Rows that agree with a family except for ``changes`` (columns and their values), by value of the axis."""
    example = family.rows[-1]
    fixed = [name for name in (*_CONFIG, family.fixed) if name != axis.column]
    wanted = {name: example[name] for name in fixed} | changes
    twins = _one_each(rows[_agree(rows, wanted)], [axis.column])
    return {row[axis.column]: row for row in records(twins)}


def like(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    """Row of a configuration, preferably a finished one; None if there is none. Unknown values of ``wanted`` are not
    compared."""
    matching = rows[_agree(rows, {name: value for name, value in wanted.items() if pd.notna(value)})]
    return records(_one_each(matching, ["model"]))[0] if len(matching) else None


def _agree(rows: pd.DataFrame, wanted: Mapping[str, Any]) -> pd.Series:
    same = pd.Series(True, index=rows.index)
    for name, value in wanted.items():
        same &= rows[name].isna() if pd.isna(value) else rows[name].eq(value)
    return same


def _with_off_rows(rows: pd.DataFrame, matching: Matching, axis: FamilyAxis, batch: str) -> pd.DataFrame:
    """Rows with their family in ``_family``; a row whose axis is off is repeated for each family that it belongs to."""
    others = [name for name in _BATCHES if name != batch]
    rows = rows.assign(_alike=matching.codes([axis.column, *axis.with_it, *others]))
    known = rows[axis.column].notna()
    rows = rows if known.all() else rows[known]
    if not axis.with_it:
        return rows.rename(columns={"_alike": "_family"})
    off = rows[axis.column] == axis.off
    of_kind = {f"_{name}": rows[name] for name in axis.with_it}
    on = rows.assign(**of_kind)[~off]
    both = rows[off].merge(on[["_alike", *of_kind]].drop_duplicates(), on="_alike")
    rows = pd.concat([on, both], ignore_index=True) if len(both) else on
    return rows.assign(_family=rows.groupby(["_alike", *of_kind], dropna=False, sort=False).ngroup())


def _best_by_model(rows: pd.DataFrame, axis: FamilyAxis, batch: str) -> list[tuple[tuple[float, ...], Family]]:
    if rows.empty:
        return []
    ok = rows["outcome"] == "ok"
    peaks = rows[["peak_allocated_bytes", "peak_reserved_bytes"]].max(axis=1).where(ok)
    marks = rows.assign(_peak=peaks, _finished=rows[axis.column].where(ok)).groupby("_family", sort=False)
    scores = pd.DataFrame(
        {
            "model": marks["model"].first(),
            "values": marks[axis.column].nunique(),
            "finished": marks["_finished"].nunique(),
            "peak": marks["_peak"].max(),
        }
    )
    scores = scores[(scores["values"] >= 2) & (scores["finished"] >= 1)].fillna({"peak": 0.0})
    order = ["values", "finished", "peak"]
    best = scores.sort_values(order, ascending=False, kind="stable").drop_duplicates("model")
    family_rows = _one_each(rows[rows["_family"].isin(best.index)], ["_family", axis.column])
    if axis.column == "recompute":  # the values of other axes are numbers
        place = {value: i for i, value in enumerate(get_args(Recompute))}
        family_rows = family_rows.iloc[family_rows["recompute"].map(place).fillna(len(place)).argsort(kind="stable")]
    picked: dict[int, list[dict[str, Any]]] = {}
    for row in records(family_rows):
        picked.setdefault(row["_family"], []).append(row)
    return [
        (tuple(map(float, score)), Family(tuple(picked[number]), batch, _size(picked[number][0])))
        for number, score in zip(best.index, best[order].itertuples(index=False), strict=True)
    ]


def _one_each(rows: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """One row for each value of ``keys``, sorted by them: the finished run with the median peak, otherwise one that ran
    out of memory, otherwise any. ``repeats`` counts the finished runs."""
    ok = rows["outcome"] == "ok"
    rows = rows.assign(
        _order=rows["outcome"].map(_OUTCOME_ORDER).fillna(2),
        repeats=ok.groupby([rows[key] for key in keys]).transform("sum"),
    )
    rows = rows.sort_values([*keys, "_order", "peak_allocated_bytes", "peak_reserved_bytes", "attempt_id"])
    place = rows.groupby(list(keys)).cumcount()
    middle = (rows["repeats"] - 1).clip(lower=0) // 2
    return rows[place == middle].drop(columns="_order")


def _size(row: Mapping[str, Any]) -> int:
    return int(row["num_params"]) if pd.notna(row["num_params"]) else 0
