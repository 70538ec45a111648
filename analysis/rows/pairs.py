"""Runs matched in everything but one choice, and the ratio between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.rows import metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.stats import MedianInterval, median_interval
from results.statistics import noise
from workloads.spec.updates.words import UPDATE_FIELDS

SETTINGS = (
    *(
        "workload",
        "world_size",
        "dp",
        "tp",
        "cp",
        "pp",
        "ep",
        "etp",
        "micro_batch_size",
        "num_microbatches",
        "zero_stage",
    ),
    *(
        "recompute",
        "recompute_every",
        "activation_offload",
        "pp_schedule",
        "virtual_stages",
        "pp_split",
        "pp_stages",
        "cp_kind",
    ),
    *("precision", "attention", "compile", "cuda_graph", "engine_version", "accumulation", "pad_vocab_to"),
    *UPDATE_FIELDS,
    "document_balance",
    "recurrence",
    *("sequence_parallel", "tokens_per_step", "replicas", "network_regime"),
    *("device_name", "driver_version", "torch_version", "cuda_version", "nccl_version"),
)
"""Columns in which both runs of a pair must agree, except for the choice compared. ``replicas`` is the outer degree of
HSDP, 1 without it. A column that is unknown in every row (mostly the network regime) separates no runs."""
USUAL = {"pp_schedule": ("pp", "1f1b"), "pp_split": ("pp", "balanced"), "cp_kind": ("cp", "ring")}
"""Settings that mean nothing at degree 1, with that degree. A run at degree 1, or one that does not name its kind,
agrees with runs of the kind given here: from one pipeline stage the other run has 1F1B."""
MAKE_ROOM = ("dp", "num_microbatches")
"""Columns that must also change if a degree or the micro-batch changes on the same devices at the same tokens per
step."""

NOISE = ("noise", "noise_freedom", "repeats")
"""Columns of a run that `within_noise` reads, besides its throughput."""
_CELL = ["workload", "world_size", "tokens_per_step", "network_regime"]
"""Columns within which the fastest run before a choice is compared with the fastest after it."""
_MOST_CODES = 2**62
"""Largest number of different codes, which are 64-bit integers."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of a ratio over pairs of runs, with its interval."""

    value: MedianInterval
    slower: float
    """Share of pairs with a ratio below 1."""

    @property
    def text(self) -> str:
        return self.value.text()


@cache_per_frame
def candidates(frame: pd.DataFrame) -> pd.DataFrame:
    """Ranked rows at the tokens per step that most rows of their workload have, so that batches agree."""
    rows = comparable(frame)
    if rows.empty:
        return rows
    usual = rows.groupby("workload")["tokens_per_step"].agg(lambda tokens: tokens.mode().iloc[0])
    return rows[rows["tokens_per_step"] == rows["workload"].map(usual)]


def comparable(frame: pd.DataFrame) -> pd.DataFrame:
    """Ranked rows at any number of tokens per step, with all of `SETTINGS` as columns."""
    rows = metrics.with_rank(metrics.ranked(frame))
    hybrid = (rows["dp_replicate"] > 1) & (rows["dp_shard"] > 1)
    rows = rows.assign(replicas=rows["dp_replicate"].where(hybrid, 1))
    return rows.assign(**{name: None for name in SETTINGS if name not in rows})


def of_usual_precision(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of each workload in the precision that most of its rows have; unknown counts as a precision."""
    precision = rows["precision"].astype(object).where(rows["precision"].notna(), "")
    counts = precision.groupby([rows["workload"], precision]).transform("size")
    usual = counts.groupby(rows["workload"]).transform("max")
    first = precision.where(counts == usual).groupby(rows["workload"]).transform("min")
    return rows[precision == first]


def once(rows: pd.DataFrame) -> pd.DataFrame:
    """One row for each setting: of runs that agree in everything but the seed, the middle one by throughput.

    Otherwise two runs before and two after a choice would count as four pairs.
    """
    rows = rows.sort_values([metrics.RANK_BY, "attempt_id"], kind="stable")
    groups = rows.groupby(Matching(rows).codes([]))[metrics.RANK_BY]
    return rows[groups.cumcount() == (groups.transform("size") - 1) // 2]


def matched(one: pd.DataFrame, two: pd.DataFrame, but_for: Sequence[str]) -> pd.DataFrame:
    """Join rows of ``one`` (``_one``) with rows of ``two`` (``_two``) that agree in all of `SETTINGS` except
    ``but_for``.

    Both come from `comparable` or `candidates`. Columns in which a pair agrees appear once.
    """
    same = [name for name in SETTINGS if name not in but_for]
    codes = Matching(pd.concat([one[[*SETTINGS]], two[[*SETTINGS]]])).codes(but_for)
    left, right = one.assign(_pair=codes[: len(one)]), two.drop(columns=same).assign(_pair=codes[len(one) :])
    return left.merge(right, on="_pair", suffixes=("_one", "_two")).drop(columns="_pair")


def best_against_best(rows: pd.DataFrame, column: str, before: object, after: object) -> pd.DataFrame:
    """Throughput of the fastest row with ``before`` in ``column`` (``_one``) and of the fastest with ``after``
    (``_two``), for each workload, number of devices, tokens per step and network regime.

    All other choices are free, so the two differ by more than the column: not what the choice costs, see `matched`.
    """
    fastest = rows.sort_values(metrics.RANK_BY, ascending=False, kind="stable")[[*_CELL, column, metrics.RANK_BY]]
    one, two = (fastest[fastest[column] == value].drop_duplicates(_CELL) for value in (before, after))
    return one.merge(two, on=_CELL, suffixes=("_one", "_two"))


def within_noise(pairs: pd.DataFrame) -> pd.Series:
    """Which pairs (of `matched`) differ in throughput by no more than noise explains in 95 % of
    pairs without a true difference; NA if the noise is unknown."""
    names = [metrics.RANK_BY, *NOISE]
    one, two = (pairs[[f"{name}{end}" for name in names]].set_axis(names, axis=1) for end in ("_one", "_two"))
    level = np.full(len(one), (1 + noise.CONFIDENCE) / 2)
    reach = noise.pair_spread(one, two) * noise.quantiles(level, noise.fewest_freedom(one, two))
    apart = noise.log(two[metrics.RANK_BY] / one[metrics.RANK_BY]).abs()
    return (apart <= reach).astype("boolean").mask(reach.isna())


class Matching:
    """Finds rows that agree in their settings, the columns ``names``. Settings are coded as numbers once, for queries
    about many choices."""

    def __init__(self, rows: pd.DataFrame, names: Sequence[str] = SETTINGS) -> None:
        columns = {name: pd.factorize(_kind(rows, name), use_na_sentinel=False)[0] for name in names}
        self.varying = {name: codes for name, codes in columns.items() if codes.size and codes.max() > 0}
        """A number for each row by setting, equal for rows that agree in it; only settings in which some differ."""
        self._rows = len(rows)

    def codes(self, but_for: Sequence[str]) -> NDArray[np.int64]:
        """A number for each row, equal for rows that agree in all settings except ``but_for``; unknown counts as a
        value."""
        joint_codes, size = np.zeros(self._rows, dtype=np.int64), 1
        for name, codes in self.varying.items():
            if name not in but_for:
                values = int(codes.max()) + 1
                if size * values > _MOST_CODES:  # renumber densely
                    joint_codes = np.unique(joint_codes, return_inverse=True)[1].astype(np.int64)
                    size = self._rows
                joint_codes, size = joint_codes * values + codes, size * values
        return joint_codes

    def pairs(
        self, before: pd.Series, after: pd.Series, but_for: Sequence[str]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row indices of every pair of a row marked in ``before`` and a row marked in ``after`` that agree.

        A row that agrees with several is in several pairs.
        """
        codes = self.codes(but_for)
        one, two = np.flatnonzero(before), np.flatnonzero(after)
        two = two[np.argsort(codes[two], kind="stable")]
        first = np.searchsorted(codes[two], codes[one], side="left")
        count = np.searchsorted(codes[two], codes[one], side="right") - first
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        return np.repeat(one, count), two[np.repeat(first, count) + within]


def _kind(rows: pd.DataFrame, name: str) -> pd.Series:
    """The column by whose values rows agree in a setting, see `USUAL`."""
    degree, usual = USUAL.get(name, (None, None))
    return rows[name] if degree not in rows else rows[name].where((rows[degree] > 1) & rows[name].notna(), usual)


def ratio(pairs: pd.DataFrame, column: str) -> Ratio | None:
    """Ratio of ``column``, second over first of each pair; None if no pair has both values."""
    values = (pairs[f"{column}_two"] / pairs[f"{column}_one"]).dropna()
    interval = median_interval(values)
    return None if interval is None else Ratio(interval, float((values < 1).mean()))
