"""Limits of the accuracy of predictions: differences between machines, and the error of host-bound rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from docs.tools.accuracy_scores import percent, spearman, table
from docs.tools.other_hosts import ON_OTHER_HOSTS
from results.tables.load import load
from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from sweep.predicting.measured_tables import RECORDED, columns_of_attempts, has_experts
from workloads.predict.predictor import Predictor
from workloads.predict.table import read_points
from workloads.spec.experiment import ENGINE, from_dict, layout_id

SPREADS = (0.0, 0.05, 0.1, 0.15, 0.2)
"""Standard deviations of the logarithm of a row's time."""
DRAWS = 200
"""Draws of random errors for each of `SPREADS`."""


def host_sets_pace(rows: pd.DataFrame) -> Any:
    """Whether each row is host-bound by the form before any fit: a layer waits more for the host than for the device.
    False for rows that no table can state, such as those with ``recompute: full:17``."""
    profiles = read_profiles()
    read = read_points(rows.reset_index(drop=True), read_clusters(), profiles, profiles[GENERAL])
    found = np.zeros(len(rows), dtype=bool)
    found[read.rows] = Predictor.learn(None, profiles).host_share(read.points) > 0.5
    return found


def machines_apart(*folders: Path) -> pd.DataFrame:
    """Layouts of dense models that ran on two machines or more.

    ``ratio``: longest step over shortest, each the median of one machine's runs. ``waits``: whether the layout is
    host-bound on a usual host. A machine is a set of devices, by their identifiers. Runs whose allocator had to free
    its cache are left out.
    """
    parts = []
    for folder in folders:
        rows = load(folder).table.to_pandas()
        ran = (rows["engine"] == ENGINE) & (rows["method"] == "measured") & (rows["outcome"] == "ok")
        rows = rows[ran & ~(rows["allocator_retries"] > 0) & rows["device_ids"].notna()]
        rows = rows[~has_experts(rows)].reset_index(drop=True)
        layouts = [layout_id(from_dict(json.loads(text))) for text in rows["config_json"]]
        machines = rows["device_ids"].map(lambda ids: ",".join(sorted(ids)))
        parts.append(columns_of_attempts(rows).assign(layout=layouts, machine=machines))
    every = pd.concat(parts, ignore_index=True)
    # With the launch time of each host a layout could be host-bound on one machine and device-bound on another.
    every["waits"] = host_sets_pace(every.drop(columns="host_launch_s"))
    times = every.groupby(["gpu", "layout", "waits", "machine"])["step_time_s"].median()
    extremes = times.groupby(["gpu", "layout", "waits"]).agg(["size", "max", "min"]).reset_index()
    extremes = extremes[extremes["size"] > 1]
    return extremes.assign(ratio=extremes["max"] / extremes["min"])[["gpu", "layout", "waits", "ratio"]].reset_index(
        drop=True
    )


def with_random_hosts(found: pd.DataFrame, waits: Any, spread: float) -> tuple[float, float, float]:
    """Scores if host-bound rows had independent random errors and all other rows kept their errors.

    ``found``: rows as `accuracy_scores.scores` takes them; ``waits``: whether each row is host-bound; ``spread``:
    standard deviation of the error's logarithm. Returns the mean error of host-bound rows, the 90th percentile of all
    errors and the mean Spearman correlation within a cell, each the mean of `DRAWS` draws.
    """
    draw = np.random.default_rng(14)
    waiting, p90, ranks = [], [], []
    for _ in range(DRAWS):
        random = found["step_time_s"] * np.exp(draw.normal(0.0, spread, len(found)))
        drawn = found.assign(of_step_time_s=found["of_step_time_s"].where(~waits, random))
        error = (drawn["of_step_time_s"] / drawn["step_time_s"] - 1).abs()
        waiting.append(error[waits].mean())
        p90.append(error.quantile(0.9))
        ranks.append(spearman(drawn))
    return float(np.mean(waiting)), float(np.mean(p90)), float(np.mean(ranks))


def section(left: pd.DataFrame, waits: Any) -> str:
    """``left``: rows of this engine with predictions, one model left out; ``waits``: whether each row is host-bound."""
    apart = machines_apart(RECORDED, ON_OTHER_HOSTS)
    lines = []
    for gpu in sorted(set(apart["gpu"])):
        for name, waits_here in (("device", False), ("host", True)):
            ratios = apart[(apart["gpu"] == gpu) & (apart["waits"] == waits_here)]["ratio"]
            root = np.sqrt(ratios)
            cells = {
                "layouts": str(len(ratios)),
                "longest over shortest, geometric mean": f"{np.exp(np.log(ratios).mean()):.2f}",
                "largest": f"{ratios.max():.2f}",
                "mean error of the time between": percent((root - 1 / root).mean() / 2),
            }
            lines.append((f"{gpu}, the {name}", cells))
    limits = []
    for spread in SPREADS:
        waiting, p90, ranks = with_random_hosts(left, waits, spread)
        cells = {"error of rows whose pace the host sets": percent(waiting), "p90 of all": percent(p90)}
        limits.append((f"{spread:.2f}", cells | {"Spearman": f"{ranks:.3f}"}))
    return f"""Layouts that ran on two machines or more, in `results/recorded` and `docs/tools/rows_of_other_hosts`:

{table(lines, "what sets the pace")}

What the scores of these rows, one model left out, would be if those whose pace the host sets had random errors (each
row by itself), and all others the errors that they have:

{table(limits, "standard deviation")}"""
