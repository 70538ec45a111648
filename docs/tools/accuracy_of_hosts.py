"""The table of docs/accuracy_details.md on hosts: slowdown of each host against the usual one, and the slowdown by its
launch time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
from pyarrow.parquet import read_table

from docs.tools.accuracy_of_plans import planned, points_of
from docs.tools.accuracy_scores import percent, table
from docs.tools.hosts_of_rows import host_of, launch_s
from docs.tools.other_hosts import ON_OTHER_HOSTS
from results.tables.load import load
from sweep.predicting.codebases import read_clusters
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import Known
from sweep.predicting.measured_tables import RECORDED
from workloads.predict.parameters import TIME
from workloads.predict.probed import LAUNCH_S, pace_of
from workloads.spec.experiment import ENGINE

LATER = ("h100x2_gradient_memory/apart.parquet", "h100x2_gradient_memory/shared.parquet")
"""Rows of hosts that were not used to fit the law."""
LATER_SWEEPS = ("h200x4_expert_schedules", "h200x2_engines_best", "h200x2_engines_search")
"""Sweeps of `results/recorded` that were not used to fit the law."""
OWN_CHECKPOINT = "2026-11-26T12:38:48Z"
"""Date since which full recomputation of eager blocks uses this engine's own checkpoint. Older rows show the cost of
torch's checkpoint, not of their host."""
LEAST = 8
"""Least number of layouts of a host; at least `LEAST_DEPENDING` of them, and that share, must depend on the host:
otherwise hardly anything tells its nearest pace."""
LEAST_DEPENDING, LEAST_SHARE = 4, 0.25
DEPENDS = 1.5
"""A layout depends on the host if its step is this many times longer with the longest of `PACES` than with the
shortest."""
PACES = np.exp(np.linspace(np.log(0.5), np.log(3.0), 49))
"""Paces tried for each host."""


def hosts() -> pd.DataFrame:
    """One row for each host (identified by its devices) whose rows record launch times.

    Columns are the median launch time in seconds, the pace with which the unfitted form is closest to the host's rows,
    and the mean error with the pace of a usual host (1), with that of its launches (`pace_of`) and with the closest
    pace.
    """
    tables = [load(folder).table for folder in (RECORDED, ON_OTHER_HOSTS)]
    later = [read_table(ON_OTHER_HOSTS / name) for name in LATER]
    parts = [
        *(table.to_pandas().assign(later=lambda rows: rows["sweep"].isin(LATER_SWEEPS)) for table in tables),
        *(table.to_pandas().assign(later=True) for table in later),
    ]
    rows = pd.concat(parts, ignore_index=True)
    ran = (rows["engine"] == ENGINE) & (rows["method"] == "measured") & (rows["outcome"] == "ok")
    rows = rows[ran & ~(rows["allocator_retries"] > 0) & rows["host_launch_s"].notna()]
    older = pd.to_datetime(rows["started_at"], utc=True) < pd.Timestamp(OWN_CHECKPOINT)
    rows = rows[~(older & (rows["recompute"] == "full") & (rows["compile"] == "none"))]
    found = [_host(str(own["device_name"].iloc[0]), own) for _, own in rows.groupby(host_of(rows), sort=True)]
    kept = [one for one in found if one is not None]
    return pd.DataFrame(kept).sort_values(["device", "launch_s"], ignore_index=True)


def _host(device: str, rows: pd.DataFrame) -> dict[str, object] | None:
    points = points_of(rows)
    if len(points) < LEAST:
        return None
    launch = launch_s(rows)
    assert launch is not None
    told = {"usual": 1.0, "launches": pace_of(launch / LAUNCH_S)}
    tried = [*PACES, *told.values()]
    off = at_paces(points, tried) / points["step_time_s"].to_numpy(dtype=float)
    depends = int((np.log(off[len(PACES) - 1] / off[0]) > np.log(DEPENDS)).sum())
    if depends < max(LEAST_DEPENDING, LEAST_SHARE * len(points)):
        return None
    nearest = int(np.abs(np.log(off[: len(PACES)])).mean(axis=1).argmin())
    places = {**{name: len(PACES) + at for at, name in enumerate(told)}, "nearest": nearest}
    return {
        "device": device,
        "later": bool(rows["later"].all()),
        "rows": len(points),
        "depend": depends,
        "launch_s": launch,
        "pace": told["launches"],
        "nearest": float(PACES[nearest]),
        **{f"error_{name}": float(np.abs(off[place] - 1).mean()) for name, place in places.items()},
    }


def at_paces(points: pd.DataFrame, paces: Sequence[float] | np.ndarray) -> np.ndarray:
    """Step seconds of the points of one cluster as `planned` predicts them with a probe of each pace, shape (paces,
    points). Only what depends on the pace is computed for each."""
    cluster = str(points["cluster"].iloc[0])
    at_profile = Known(probe={"pace": 1.0})
    forecast = Forecast.of(read_clusters()[cluster], at_profile)
    experiments = points["experiment"].tolist()
    factors = forecast.structures.factors(experiments)
    of_layers = forecast.structures.of_layers(experiments, factors)
    usual = forecast.points(experiments, of_layers)

    def at(pace: float) -> np.ndarray:
        terms = forecast.predictor.seconds(dataclasses.replace(usual, pace=usual.pace * pace))
        return factors.with_hosts(of_layers, terms).step_s(terms)

    freeing = planned(points, {cluster: at_profile})["step_time_s"].to_numpy(dtype=float) - at(1.0)
    return np.stack([at(float(pace)) + freeing for pace in paces])


def section(found: pd.DataFrame | None = None) -> str:
    """``found``: the `hosts`, if they are at hand."""
    found = hosts() if found is None else found
    lines = [
        (
            f"{row['device']}{', later' * row['later']}",
            {
                "layouts": str(row["rows"]),
                "whose time depends on the host": str(row["depend"]),
                "launch": f"{row['launch_s'] * 1e6:.1f} us",
                "pace by launches": f"{row['pace']:.2f}",
                "nearest pace": f"{row['nearest']:.2f}",
                "error, usual host": percent(row["error_usual"]),
                "by launches": percent(row["error_launches"]),
                "nearest": percent(row["error_nearest"]),
            },
        )
        for _, row in found.iterrows()
    ]
    earlier = found[~found["later"]]
    power, usual_s = _law(earlier)
    without_one = [_law(earlier.drop(index=index))[0] for index in earlier.index]
    return (
        f"{table(lines, 'host of')}\n\nThe line through these points without the later ones has a slope of {power:.2f} "
        f"(logarithms of pace and launch; {min(without_one):.2f} to {max(without_one):.2f} with one host left out) and "
        f"is 1 at {usual_s * 1e6:.1f} us; with the later ones the slope is {_law(found)[0]:.2f}. What counts is "
        f"{TIME['host_launch'].value:.1f} and {LAUNCH_S * 1e6:.0f} us."
    )


def _law(found: pd.DataFrame) -> tuple[float, float]:
    """Fits the law. Returns the exponent of the launch time, and the launch time in seconds with pace 1."""
    power, intercept = np.polyfit(np.log(found["launch_s"]), np.log(found["nearest"]), 1)
    return float(power), float(np.exp(-intercept / power))
