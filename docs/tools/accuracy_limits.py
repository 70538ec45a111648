"""Limits of the accuracy of predictions: differences between machines, and the error of host-bound rows."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from docs.tools.accuracy_scores import percent, spearman, table
from docs.tools.other_hosts import ON_OTHER_HOSTS
from results.tables.load import load
from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from sweep.predicting.measured_tables import RECORDED, columns_of_attempts, has_experts, has_more_than_columns
from sweep.predicting.predict_table import predict_frame
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


def rows_of_machines(*folders: Path) -> pd.DataFrame:
    """Rows of dense models that ran, in the columns of ``predict`` and of:

    ``layout``; ``machine``: its set of devices, by their identifiers; ``plain``: whether columns say all of it;
    ``waits``: whether the layout is host-bound on a usual host. Runs whose allocator had to free its cache are left
    out.
    """
    parts = []
    for folder in folders:
        rows = load(folder).table.to_pandas()
        ran = (rows["engine"] == ENGINE) & (rows["method"] == "measured") & (rows["outcome"] == "ok")
        rows = rows[ran & ~(rows["allocator_retries"] > 0) & rows["device_ids"].notna()]
        rows = rows[~has_experts(rows)].reset_index(drop=True)
        layouts = [layout_id(from_dict(json.loads(text))) for text in rows["config_json"]]
        machines = rows["device_ids"].map(lambda ids: ",".join(sorted(ids)))
        plain = ~has_more_than_columns(rows)
        parts.append(columns_of_attempts(rows).assign(layout=layouts, machine=machines, plain=plain))
    every = pd.concat(parts, ignore_index=True)
    # With the launch time of each host a layout could be host-bound on one machine and device-bound on another.
    every["waits"] = host_sets_pace(every.drop(columns="host_launch_s"))
    return every


def machines_apart(every: pd.DataFrame) -> pd.DataFrame:
    """Layouts of `rows_of_machines` that ran on two machines or more.

    ``ratio``: longest step over shortest, each the median of one machine's runs.
    """
    times = every.groupby(["gpu", "layout", "waits", "machine"])["step_time_s"].median()
    extremes = times.groupby(["gpu", "layout", "waits"]).agg(["size", "max", "min"]).reset_index()
    extremes = extremes[extremes["size"] > 1]
    return extremes.assign(ratio=extremes["max"] / extremes["min"])[["gpu", "layout", "waits", "ratio"]].reset_index(
        drop=True
    )


def least_errors(every: pd.DataFrame) -> pd.DataFrame:
    """What a predictor would still miss that knows every layout's mean over machines, from runs of one layout and
    version of the engine on two machines or more: one row for each layout.

    ``off``: mean error of a single run, that is the mean difference of two runs' log(time) over the root of two;
    ``with_launches``: the same of the times over those that the form predicts, before any fit, for a host with the
    row's launch time.
    """
    rows = every[every["plain"]].reset_index(drop=True)
    said = rows.drop(columns=["status", "step_time_s", "reserved_gib", "layout", "machine", "plain", "waits"])
    predicted = predict_frame(said, None).predictions["step_time_s"].astype(float)
    rows = rows.assign(time=np.log(rows["step_time_s"]), left=np.log(rows["step_time_s"] / predicted))
    found = []
    for (gpu, layout, _), runs in rows.groupby(["gpu", "layout", "code_version"]):
        pairs = [(a, b) for a, b in combinations(runs.index, 2) if runs["machine"][a] != runs["machine"][b]]
        if pairs:
            one, other = (list(side) for side in zip(*pairs, strict=True))
            off, with_launches = (
                float(np.abs(runs[name][one].to_numpy() - runs[name][other].to_numpy()).mean() / np.sqrt(2))
                for name in ("time", "left")
            )
            found.append((gpu, layout, bool(runs["waits"].iloc[0]), off, with_launches))
    return pd.DataFrame(found, columns=["gpu", "layout", "waits", "off", "with_launches"])


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
    here = rows_of_machines(RECORDED)
    everywhere = pd.concat([here, rows_of_machines(ON_OTHER_HOSTS)], ignore_index=True)
    apart = machines_apart(everywhere)
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
    share = float(np.mean(waits))
    (gpu,) = set(left["gpu"])
    floors = [
        _least_of(least_errors(rows[rows["gpu"] == gpu]), name, share)
        for name, rows in (("`results/recorded`", here), ("these and the rows of other hosts", everywhere))
    ]
    return f"""Layouts that ran on two machines or more, in `results/recorded` and `docs/tools/rows_of_other_hosts`:

{table(lines, "what sets the pace")}

What a predictor of {gpu} would still miss that knew the mean time of every layout over all hosts, from the same layouts
on two hosts or more; *with launches*: that also knew how fast each host launches, as far as it is recorded. *All*
weights host-bound rows with their share here, {percent(share)}:

{table(floors, "runs of")}

What the scores of these rows, one model left out, would be if those whose pace the host sets had random errors (each
row by itself), and all others the errors that they have:

{table(limits, "standard deviation")}"""


def _least_of(least: pd.DataFrame, name: str, share: float) -> tuple[str, dict[str, str]]:
    """A line of the table of `least_errors`. ``share``: that of host-bound rows, with which "all" is weighted."""
    by_pace = [least[least["waits"] == waits] for waits in (False, True)]
    device, host = by_pace
    cells = {"layouts, device-bound": str(len(device)), "host-bound": str(len(host))}
    for column, words in (("off", ""), ("with_launches", ", with launches")):
        of_device, of_host = (float(part[column].mean()) for part in by_pace)
        whole = (1 - share) * of_device + share * of_host
        cells |= {
            f"error{words}: device-bound": percent(of_device),
            f"host{words}": percent(of_host),
            f"all{words}": percent(whole),
        }
    return name, cells
