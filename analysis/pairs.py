"""Runs matched in everything but one choice, and the ratio between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from analysis import metrics
from analysis.stats import MedianInterval, median_interval

SETTINGS = (
    *("workload", "world_size", "dp", "tp", "cp", "pp", "ep", "micro_batch_size", "num_microbatches", "zero_stage"),
    *("recompute", "pp_schedule", "virtual_stages", "precision", "attention", "compile", "engine_version"),
    "network_regime",
)
"""What must agree but for the one choice. Where the network's regime is not known, it does not separate runs."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of a ratio over pairs with its interval."""

    value: MedianInterval
    slower: float
    """Share of pairs below 1."""

    @property
    def text(self) -> str:
        v = self.value
        between = "" if v.low is None else f" (95 % interval {v.low:.2f} to {v.high:.2f})"
        return f"{v.median:.2f}{between}, n = {v.n:,}"


def candidates(frame: pd.DataFrame) -> pd.DataFrame:
    """Ranked rows of the tokens a step that most rows of their workload have, so that batches agree."""
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna()]
    if "network_regime" not in rows:
        rows = rows.assign(network_regime=None)
    if rows.empty:
        return rows
    usual = rows.groupby("workload")["tokens_per_step"].agg(lambda tokens: tokens.mode().iloc[0])
    return rows[rows["tokens_per_step"] == rows["workload"].map(usual)]


def matched(one: pd.DataFrame, two: pd.DataFrame, but_for: Sequence[str]) -> pd.DataFrame:
    """Rows of ``one`` (``_one``) beside those of ``two`` (``_two``) that agree in all of `SETTINGS` but ``but_for``."""
    keys = [name for name in SETTINGS if name not in but_for]
    known = [
        part.assign(**{name: part[name].astype(object).where(part[name].notna(), "–") for name in keys})
        for part in (one, two)
    ]
    return known[0].merge(known[1], on=keys, suffixes=("_one", "_two"))


def ratio(pairs: pd.DataFrame, column: str) -> Ratio | None:
    """``column`` of the second over the first of each pair; None without a pair that has both."""
    values = (pairs[f"{column}_two"] / pairs[f"{column}_one"]).dropna()
    interval = median_interval(values)
    return None if interval is None else Ratio(interval, float((values < 1).mean()))
