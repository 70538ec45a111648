"""The table of docs/accuracy.md on hosts: slowdown of each host against the usual one, and the slowdown by its launch
time."""

from __future__ import annotations

import numpy as np
import pandas as pd
from pyarrow.parquet import read_table

from docs.tools.accuracy_of_plans import planned, points_of
from docs.tools.accuracy_scores import percent, table
from docs.tools.hosts_of_rows import host_of, launch_s
from docs.tools.other_hosts import ON_OTHER_HOSTS
from results.tables.load import load
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
"""Least number of layouts of a host; at least `LEAST_DEPENDING` of them must depend on the host."""
LEAST_DEPENDING = 4
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
    cluster = str(points["cluster"].iloc[0])
    times = points.set_index("experiment_id")["step_time_s"]

    def errors(pace: float) -> np.ndarray:
        found = planned(points, {cluster: Known(probe={"pace": pace})}).set_index("experiment_id")["step_time_s"]
        ratio = found.reindex(times.index).to_numpy(dtype=float) / times.to_numpy(dtype=float)
        return np.asarray(np.log(ratio))

    tried = np.array([errors(pace) for pace in PACES])
    depends = int((tried[-1] - tried[0] > np.log(DEPENDS)).sum())
    if len(points) < LEAST or depends < LEAST_DEPENDING:
        return None
    launch = launch_s(rows)
    assert launch is not None
    nearest = float(PACES[np.abs(tried).mean(axis=1).argmin()])
    said = {"usual": 1.0, "launches": pace_of(launch / LAUNCH_S), "nearest": nearest}
    return {
        "device": device,
        "later": bool(rows["later"].all()),
        "rows": len(points),
        "depend": depends,
        "launch_s": launch,
        "pace": pace_of(launch / LAUNCH_S),
        "nearest": nearest,
        **{f"error_{name}": float(np.abs(np.expm1(errors(pace))).mean()) for name, pace in said.items()},
    }


def section() -> str:
    found = hosts()
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
