"""Ranks layouts: which is the fastest, by how much, and which cannot be distinguished from it. The project has no other
ranking.

Reports, notebooks, comparisons and the last lines of a run show the numbers of these functions.
`results.statistics.noise` computes how much a throughput varies by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from results.statistics import noise

LIKE = ("tokens_per_step", "precision")
"""Columns in which layouts must agree so that their throughputs are comparable."""
USED = ("attempt_id", "loss_agrees", "method", "repeat_of", *noise.USED)
"""Columns of runs that `of_layouts` reads in addition to the groups and the throughput; also ``network_regime`` if it
exists."""


def of_layouts(runs: pd.DataFrame, group: list[str], value: str) -> pd.DataFrame:
    """One row for each layout of finished ``runs``, best first within each group; the index is that of its median run.

    Repeats of a layout (other seeds, several sweeps, points that were run again) become one row with the ``median`` of
    their ``value``, their number, the ``repeat_spread`` (highest / lowest - 1; null for a single run) and
    `results.statistics.noise.COLUMNS`. ``rank`` counts within the group over layouts whose losses do not contradict the
    reference. A layout whose losses do has no rank, because a wrong layout can be fast.
    """
    runs = runs[[*dict.fromkeys((*USED, *group, value)), *(name for name in ("network_regime",) if name in runs)]]
    trusted = ~losses_differ(runs)
    runs = runs.assign(
        _layout=noise.layout_key(runs) + trusted.map({True: "", False: " losses differ"}), _trusted=trusted
    )
    runs = runs[noise.independent(runs, value)].sort_values([value, "attempt_id"], kind="stable")
    by_layout = runs.groupby("_layout", sort=False)
    values = by_layout[value]
    runs = runs.assign(
        repeat_spread=values.transform("max") / values.transform("min") - 1,
        median=values.transform("median"),
        _middle=(values.transform("size") - 1) // 2,
        _position=by_layout.cumcount(),
    )
    rows = runs[runs["_position"] == runs["_middle"]]
    known = noise.of_layouts(runs, group, value).reindex(rows["_layout"].to_numpy())
    rows = rows.assign(**{name: known[name].array for name in noise.COLUMNS})
    rows = rows.assign(repeat_spread=rows["repeat_spread"].where(rows["repeats"] > 1))
    places = rows[rows["_trusted"]].groupby(group)["median"].rank(method="first", ascending=False)
    rows = rows.assign(rank=places)
    ascending = [*(True for _ in group), False]
    rows = rows.sort_values([*group, "median"], ascending=ascending, kind="stable")
    return rows[[*group, "median", "repeat_spread", "rank", *noise.COLUMNS]]


def of_usual_batch(rows: pd.DataFrame, group: list[str], like: Sequence[str] = LIKE) -> pd.DataFrame:
    """Keeps the layouts that agree in ``like``, with the values that most layouts of their group share: throughputs at
    different batch sizes, in different precisions and of different engine versions are not comparable.

    Columns that ``rows`` lack separate no layouts. Of equally frequent values the smallest batch is kept, then the
    first precision by name, then the last engine version; unknown values count as one value.
    """
    like = [name for name in like if name in rows]
    if rows.empty or not like:
        return rows
    keys = rows[group].assign(**{f"_{name}": _comparable_key(rows[name]) for name in like})
    counts = keys.groupby(list(keys.columns)).size().rename("_layouts").reset_index()
    order = [f"_{name}" for name in like]
    ascending = [False, *(name != "engine_version" for name in like)]
    usual = counts.sort_values(["_layouts", *order], ascending=ascending, kind="stable").drop_duplicates(group)
    kept = keys.merge(usual, on=list(keys.columns), how="left")["_layouts"].notna().to_numpy()
    usual_rows: pd.DataFrame = rows[kept]
    return usual_rows


def _comparable_key(values: pd.Series) -> pd.Series:
    """Values that can be sorted and joined, unknown ones included."""
    if values.name == "tokens_per_step":
        return values.astype(float).fillna(float("inf"))
    return values.astype("string").fillna("").astype(object)


def losses_differ(runs: pd.DataFrame) -> pd.Series:
    """True if the losses were compared with those of the reference layout and differ."""
    return runs["loss_agrees"].map(lambda agrees: agrees is False or agrees == 0).astype(bool)


def lead(
    rows: pd.DataFrame, value: str, group: list[str], name: str, candidates: pd.Series | None = None
) -> pd.DataFrame:
    """Returns the first row of each group of ``rows``, which are sorted by ``value``, best first, with columns that
    compare it with the other layouts.

    ``runner_up`` is the ``name`` of the second layout and ``slower_by`` is 1 - its value / the winner's. ``tie`` says
    whether other layouts are within the noise of the winner (`results.statistics.noise.within`), so that the winner is
    a set: ``tied`` is their number, ``tied_layouts`` lists their names, best first, and ``tied_slower_by`` is how far
    the last of them is behind. All four are null if the noise is not known, ``tie`` also if there is no other layout.
    ``candidates`` is the number of layouts.
    """
    rows = rows.assign(_within=noise.within(rows, value, group))
    place = rows.groupby(group).cumcount()
    winners = rows[place == 0].sort_values(group, kind="stable").set_index(group, drop=False)
    second = rows[place == 1].set_index(group).reindex(winners.index)
    others = rows[(place > 0) & rows["_within"].fillna(False).astype(bool)].groupby(group)
    known = second["_within"].notna()
    last = others[value].last().reindex(winners.index)
    winners = winners.assign(
        runner_up=second[name],
        slower_by=1 - second[value] / winners[value],
        tie=(others.size().reindex(winners.index, fill_value=0) > 0).astype("boolean").where(known, pd.NA),
        tied=others.size().reindex(winners.index, fill_value=0).astype("Int64").where(known, pd.NA),
        tied_layouts=others[name].agg("; ".join).reindex(winners.index),
        tied_slower_by=1 - last / winners[value],
        candidates=(rows.groupby(group).size() if candidates is None else candidates).reindex(winners.index),
    )
    return winners.drop(columns="_within").reset_index(drop=True)
