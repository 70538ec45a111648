"""Matching of two results point by point: which point of A corresponds to which of B, and why some have no partner.

A *point* is one configuration on one cluster, by one engine and measurement version: all attempts at it, repeats
included, become one row (`points`). Points are matched (`match`) by equal ``experiment_id``, the one that a new run
would get; the rest by the whole configuration without the engine version, which the id contains.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd

from analysis.compare.facts import DEVICE_STATE, FACTS
from analysis.rows import winners
from analysis.rows.canonical import with_canonical_models
from analysis.rows.labels import add_labels, with_usual_ways
from analysis.rows.stats import MIN_FOR_INTERVAL, median_interval
from results.errors import InvalidResults
from results.statistics import noise, ranking
from results.tables.schema import CONFIG_COLUMNS, METHODS
from results.text.numbers import format_setting, listed
from workloads.spec.experiment import ENGINE

_RATE = "tokens_per_s_per_gpu"
COHORT = ("cluster", "engine", "measurement_version")
"""Columns across which rows are never pooled; two results that differ in one are compared across it."""
_DERIVED = ("world_size", "dp", "num_microbatches", "tokens_per_step")
_NAMES = ("experiment_id", "model", "config_json", "engine", "engine_version")
REST = "rest of the configuration"
"""Column for what ``config_json`` holds beyond the table's columns: model details (RoPE, routing ...) and newer
fields."""
SETTINGS = (*(c.name for c in CONFIG_COLUMNS if c.name not in (*_DERIVED, *_NAMES)), REST)
"""The whole configuration: everything that can change a number, except the engine and its version."""
IDENTITY = ["experiment_id", *COHORT]
_UNKNOWN = "–"
_Runs = dict[str, np.ndarray[Any, Any]]
"""Columns of all rows, as arrays."""
_SHAPE = (*SETTINGS[: SETTINGS.index("tie_embeddings") + 1], REST)
"""Settings of the model only."""
_WHY = (*COHORT, "engine_version", *(name for name in SETTINGS if name not in _SHAPE))
MOST_EXAMINED = 500
"""Number of unmatched points of each side, the first ones, for which the nearest partner is searched."""


@dataclass(frozen=True, slots=True)
class PointMatching:
    """Result of `match`. ``pairs`` has every column of `points` twice, ending in ``_a`` and ``_b``, and ``matched_by``:
    ``experiment_id`` or ``configuration``."""

    pairs: pd.DataFrame
    only_a: pd.DataFrame
    only_b: pd.DataFrame
    unrecorded: tuple[str, ...]
    """Settings that one whole side does not record; matching by configuration ignores them."""
    crossed: tuple[str, ...]
    """Columns of `COHORT` in which the sides share no value, so that points are matched across them."""
    older: int
    """Number of points replaced by a newer engine version of the same configuration."""


def choose_methods(a: pd.DataFrame, b: pd.DataFrame, asked: tuple[str, str] | None) -> tuple[str, str]:
    """Methods of A's and B's rows to compare: as asked, otherwise one that both have, measured before rehearsed.

    Raises `InvalidResults` if a side has no such row, or if they share no method and none was asked for.
    """
    held = [[method for method in METHODS if (side["method"] == method).any()] for side in (a, b)]
    for name, methods in zip("AB", held, strict=True):
        if not methods:
            raise InvalidResults(f"{name} holds no attempt: there is nothing to compare")
    if asked is not None:
        for name, methods, method in zip("AB", held, asked, strict=True):
            if method not in methods:
                raise InvalidResults(f"{name} has no {method} rows, only {listed(methods)}")
        return asked
    shared = [method for method in held[0] if method in held[1]]
    if not shared:
        raise InvalidResults(
            f"A has {listed(held[0])} rows and B {listed(held[1])} rows, which are not compared by default; "
            f"use --methods {held[0][0]},{held[1][0]}"
        )
    return shared[0], shared[0]


def of_engine(attempts: pd.DataFrame, side: str, engine: str) -> pd.DataFrame:
    """Rows of one engine. Raises `InvalidResults` if side A or B has none."""
    engines = attempts["engine"].fillna(ENGINE)
    if not (engines == engine).any():
        raise InvalidResults(f"{side} has no rows of {engine}, only {listed(sorted(engines.unique()))}")
    return attempts[engines == engine]


def points(attempts: pd.DataFrame, step_times: Mapping[str, Sequence[float]] | None = None) -> pd.DataFrame:
    """One row for each point of ``attempts`` (of one method) that summarizes its finished runs.

    Runs whose losses contradict the reference layout are no repeats of those whose losses do not, as in
    `results.statistics.ranking`: a point has the others where there are any, and ``contradicting`` counts the finished
    runs that are left out. ``outcome`` is ok if any run finished, otherwise that of the last attempt. ``rate`` is the
    median over the runs of ``tokens_per_s_per_gpu``. ``rate_low`` and ``rate_high`` are a bootstrap interval over at
    least five repeats; with fewer, the range over the runs, each with the interval of its timed steps (bootstrap from
    five on, otherwise their range); NaN with one timed step and no repeat. ``step_spread`` is slowest over fastest
    timed step minus 1, ``rates`` the rates of the runs, ``peak_*`` bytes. ``step_times``: seconds of each timed step
    (slowest rank) by attempt.
    """
    rows = with_canonical_models(attempts[attempts["repeat_of"].isna()])
    differ = ranking.losses_differ(rows)
    layout = rows["experiment_id"] + differ.map({True: " losses differ", False: ""})
    timed = rows[(rows["outcome"] == "ok") & rows[_RATE].notna()].assign(_layout=layout)
    rows = rows.drop(index=timed.index[~noise.independent(timed, _RATE)])
    rows = rows.sort_values(["started_at", "attempt_number"], na_position="first", kind="stable")
    rows = with_usual_ways(add_labels(rows.reset_index(drop=True)))
    rows[REST] = [_rest_of(text) for text in rows["config_json"]]
    rows["node_count"] = winners.node_count(rows).astype(float)
    runs = _run_intervals(rows, step_times or {})
    finished = (rows["outcome"] == "ok").to_numpy()
    trusted = ~ranking.losses_differ(rows).to_numpy()
    cancelled = (rows["outcome"] == "cancelled").to_numpy()
    places: list[int] = []
    summaries = []
    several: dict[int, np.ndarray[Any, Any]] = {}
    grouped = cast("dict[Any, np.ndarray[Any, Any]]", rows.groupby(IDENTITY, dropna=False, sort=False).indices)
    for members in grouped.values():
        ended = members[finished[members]]
        agreeing = ended[trusted[ended]]
        ok = agreeing if len(agreeing) else ended
        deciding = ok if len(ok) else members[~cancelled[members]]
        if len(ok) > 1:
            several[len(places)] = ok
        places.append((deciding if len(deciding) else members)[-1])
        summaries.append(_together(runs, ok) | {"contradicting": len(ended) - len(ok)})
    summary = pd.DataFrame(summaries, columns=list(_TOGETHER))
    facts = rows.reindex(columns=list(FACTS))
    kept = [*_DESCRIBING, *(name for name in (*SETTINGS, *FACTS) if name not in _DESCRIBING)]
    result = rows.reindex(columns=kept).iloc[places].reset_index(drop=True)
    if several:
        of_several = [_facts_of(facts.iloc[ok]) for ok in several.values()]
        for name in FACTS:
            values = result[name].astype(object)
            values.iloc[list(several)] = [deciding[name] for deciding in of_several]
            result[name] = values
    return pd.concat([result, summary], axis=1)


def match(a: pd.DataFrame, b: pd.DataFrame, across: Sequence[str] = ()) -> PointMatching:
    """Match two frames of `points`. ``across`` names settings in which partners may differ.

    Raises `InvalidResults` for an unknown setting, if a side has several configurations that differ only in ``across``,
    and if the sides share no cluster, engine or measurement version and one has several.
    """
    if unknown := [name for name in across if name not in SETTINGS]:
        raise InvalidResults(f"{unknown[0]!r} is not an axis of a configuration; axes are {', '.join(SETTINGS[:-1])}")
    crossed = tuple(name for name in COHORT if _is_crossed(a, b, name))
    kept = [name for name in COHORT if name not in crossed]
    by_id = _merged(a, b, ["experiment_id", *kept], "experiment_id")
    left_a, left_b = (
        side[~side["place"].isin(by_id[f"place_{end}"])]
        for side, end in ((a.assign(place=range(len(a))), "a"), (b.assign(place=range(len(b))), "b"))
    )
    unrecorded = tuple(name for name in SETTINGS if a[name].isna().all() != b[name].isna().all() and len(a) and len(b))
    key = [*kept, *(name for name in SETTINGS if name not in unrecorded and name not in across)]
    newest_a, newest_b = (_newest(side, key, across, name) for side, name in ((left_a, "A"), (left_b, "B")))
    by_configuration = _merged(newest_a, newest_b, key, "configuration")
    pairs = pd.concat([part for part in (by_id, by_configuration) if len(part)] or [by_id], ignore_index=True)
    return PointMatching(
        pairs=pairs.drop(columns=["place_a", "place_b"]),
        only_a=newest_a[~newest_a["place"].isin(by_configuration["place_a"])].drop(columns="place"),
        only_b=newest_b[~newest_b["place"].isin(by_configuration["place_b"])].drop(columns="place"),
        unrecorded=tuple(name for name in unrecorded if name not in across) if len(left_a) and len(left_b) else (),
        crossed=crossed,
        older=len(left_a) - len(newest_a) + len(left_b) - len(newest_b),
    )


def why_unmatched(only: pd.DataFrame, other: pd.DataFrame, ignored: Sequence[str] = ()) -> Counter[str]:
    """For each axis, the number of points of ``only`` whose nearest point of ``other`` differs in it.

    The nearest point differs in the fewest axes; the model's shape counts as one axis. `MOST_EXAMINED` points are
    examined. If the sides share no engine version, it is not counted: points are matched across it.
    """
    if only.empty or other.empty:
        return Counter()
    looked = only.head(MOST_EXAMINED)
    both = pd.concat([_known(frame, [*_WHY, *_SHAPE]) for frame in (looked, other)], ignore_index=True)
    both["model shape"] = both.groupby([name for name in _SHAPE if name not in ignored], sort=False).ngroup()
    names = ["model shape", *(name for name in _WHY if name not in ignored)]
    if not set(looked["engine_version"].dropna()) & set(other["engine_version"].dropna()):
        names.remove("engine_version")
    codes = np.column_stack([pd.factorize(both[name])[0] for name in names]).astype(np.int32)
    mine, theirs = codes[: len(looked)], codes[len(looked) :]
    counts: Counter[str] = Counter()
    for point in mine:
        differs = theirs != point
        counts.update(name for name, there in zip(names, differs[differs.sum(axis=1).argmin()], strict=True) if there)
    return counts


_DESCRIBING = (
    *(
        "experiment_id",
        "attempt_id",
        *COHORT,
        "backend",
        "engine_version",
        "model",
        "workload",
        "layout",
        "world_size",
        "dp",
    ),
    *("num_microbatches", "tokens_per_step", "precision", "outcome", "losses", "grad_norms", "loss_agrees"),
)
_TOGETHER = (
    *("runs", "contradicting", "rate", "rate_low", "rate_high", "rates", "step_time_s", "step_spread"),
    *(f"peak_{kind}{end}" for kind in ("allocated", "reserved") for end in ("", "_low", "_high")),
)


def _run_intervals(rows: pd.DataFrame, step_times: Mapping[str, Sequence[float]]) -> _Runs:
    """Rate, peaks and spread of each row, with ``low`` and ``high`` of its rate by its timed steps; NaN if their spread
    is unknown."""
    fastest, slowest, middle = (rows[f"step_time_{part}s"].to_numpy(float) for part in ("min_", "max_", ""))
    spread_known = np.isfinite(fastest) & np.isfinite(slowest) & (rows["timed_steps"].fillna(2).to_numpy(float) >= 2)
    low_s, high_s = np.where(spread_known, fastest, np.nan), np.where(spread_known, slowest, np.nan)
    for place, attempt in enumerate(rows["attempt_id"]):
        times = step_times.get(attempt, ())
        if spread_known[place] and len(times) >= MIN_FOR_INTERVAL and (interval := median_interval(times)) is not None:
            low_s[place], high_s[place] = interval.low, interval.high
    rate = rows[_RATE].to_numpy(float)
    return {
        "rate": rate,
        "low": rate * middle / high_s,
        "high": rate * middle / low_s,
        "spread": np.where(spread_known, slowest / fastest - 1, np.nan),
        "step_time_s": middle,
        "allocated": rows["peak_allocated_bytes"].to_numpy(float),
        "reserved": rows["peak_reserved_bytes"].to_numpy(float),
    }


def _together(runs: _Runs, ok: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Summary of the finished runs at the positions ``ok``."""
    known = ok[np.isfinite(runs["rate"][ok])]
    rates = runs["rate"][known]
    result: dict[str, Any] = dict.fromkeys(_TOGETHER, np.nan) | {"runs": len(ok), "rates": rates.tolist()}
    for kind in ("allocated", "reserved"):
        peaks = runs[kind][ok]
        peaks = peaks[np.isfinite(peaks)]
        if len(peaks):
            result[f"peak_{kind}"] = np.median(peaks) if len(peaks) > 1 else peaks[0]
            result |= {f"peak_{kind}_low": peaks.min(), f"peak_{kind}_high": peaks.max()}
    if not len(rates):
        return result
    lows, highs, spread = runs["low"][known], runs["high"][known], runs["spread"][known]
    if len(rates) == 1:
        result |= {"rate": rates[0], "rate_low": lows[0], "rate_high": highs[0], "step_spread": spread[0]}
        return result | {"step_time_s": runs["step_time_s"][known[0]]}
    result |= {"rate": np.median(rates), "step_time_s": np.median(runs["step_time_s"][known])}
    if np.isfinite(spread).any():
        result["step_spread"] = np.nanmedian(spread)
    interval = median_interval(rates)
    if interval is not None and interval.low is not None:
        return result | {"rate_low": interval.low, "rate_high": interval.high}
    # Few runs: the union of the runs' intervals; a run without one counts with its median.
    return result | {"rate_low": np.fmin(lows, rates).min(), "rate_high": np.fmax(highs, rates).max()}


def _facts_of(rows: pd.DataFrame) -> dict[str, Any]:
    """Facts on how and where the runs of one point ran: the shared value, or all values in one text; for the state of a
    device the median."""
    facts: dict[str, Any] = {}
    for name in FACTS:
        known = rows[name].dropna()
        values = known.unique()
        if name in DEVICE_STATE:
            facts[name] = float(known.median()) if len(known) else None
        else:
            facts[name] = values[0] if len(values) == 1 else ", ".join(sorted(map(str, values))) or None
    return facts


def _rest_of(config_json: Any) -> str | None:
    """Settings of a stored experiment that have no column, as canonical JSON; None if it is not stored."""
    if not isinstance(config_json, str):
        return None
    try:
        fields = json.loads(config_json)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    model = fields.pop("model", {})
    rest = {name: value for name, value in fields.items() if name not in SETTINGS and name not in _NAMES}
    if isinstance(model, dict):
        rest |= {f"model.{n}": value for n, value in model.items() if n not in SETTINGS and n != "name"}
    return json.dumps(rest, sort_keys=True)


def _is_crossed(a: pd.DataFrame, b: pd.DataFrame, name: str) -> bool:
    """Whether the sides share no value of ``name``. Raises `InvalidResults` if a side then has several."""
    of_a, of_b = (side[name].dropna().unique().tolist() for side in (a, b))
    if set(of_a) & set(of_b) or not (of_a and of_b):
        return False
    if len(of_a) > 1 or len(of_b) > 1:
        values = [", ".join(map(format_setting, of)) for of in (of_a, of_b)]
        word = name.replace("_", " ")
        raise InvalidResults(
            f"A and B share no {word} and one has several (A: {values[0]}; B: {values[1]}); choose sweeps of one "
            f"{word} each"
        )
    return True


def _known(frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """The columns with unknown values replaced by a placeholder that equals itself."""
    return pd.DataFrame({name: frame[name].astype(object).where(frame[name].notna(), _UNKNOWN) for name in names})


def _merged(a: pd.DataFrame, b: pd.DataFrame, key: list[str], matched_by: str) -> pd.DataFrame:
    """Rows of both sides with equal ``key``, joined in A's order."""
    sides = []
    for frame, end in ((a, "a"), (b, "b")):
        place = frame["place"] if "place" in frame else pd.Series(range(len(frame)), index=frame.index)
        side = frame.assign(place=place).add_suffix(f"_{end}")
        sides.append(side.assign(_key=pd.MultiIndex.from_frame(_known(frame, key)).to_flat_index()))
    return sides[0].merge(sides[1], on="_key", how="inner").drop(columns="_key").assign(matched_by=matched_by)


def _newest(side: pd.DataFrame, key: list[str], across: Sequence[str], name: str) -> pd.DataFrame:
    """One point for each configuration: of several engine versions the last one attempted."""
    known = _known(side, key)
    for axis in across:
        several = _known(side, [axis])[axis].groupby([known[column] for column in key]).nunique()
        if (several > 1).any():
            raise InvalidResults(
                f"{name} has {int((several > 1).sum())} configurations with several values of {axis}, so "
                "partners are ambiguous; choose a sweep with one value"
            )
    return side[~known.duplicated(keep="last")]
