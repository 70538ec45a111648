"""The table of docs/accuracy.md on rehearsals: steps put together from ranks that ran alone, beside real steps.

Rows of `results/recorded` and `results/another_device` that were rehearsed, without a pipeline, on the machine of the
real run or on one like it. They keep what a rehearsal measured (`compute_time_s`), so that today's way of putting a
step together is graded on all of them, however old.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pandas as pd

from results.load import load
from sweep.accuracy_scores import percent
from sweep.codebases import read_clusters
from sweep.measured_tables import ON_OTHER_HOSTS, RECORDED
from workloads.costs.timeline import estimate_time
from workloads.experiment import from_dict, layout_id
from workloads.protocol import HOST_WAIT
from workloads.stages import real_step_s

PAIRS = (
    ("rehearsed_experts", "h200x2_experts"),
    ("rehearsed_h200x2", "h200x2_long_context"),
    ("rehearsed_h200x2", "h200x2_long_context_1b"),
    ("rehearsed_h200x2", "h200x2_long_context_32k"),
    ("rehearsed_h100x2", "h100x2_validation"),
    ("rehearsed_h200x2_search", "h200x2_search"),
    ("rehearsed_h200x2_tensor_parallel", "h200x2_tensor_parallel"),
)
"""Sweeps: rehearsed, and real. Rehearsals before these filled buffers of messages with zeros, on which products are
faster."""
SLOW_HOST = "h200x2_tensor_parallel"
FULL_CLOCK_MHZ = 1900.0
"""Of 1,980: a device whose clock no power limit holds down had time to wait. For rows without ``host_lead_s``."""
FORWARD = {"none": 1 / 3, "selective": 0.3, "full": 0.25}
"""Share of a micro-batch's compute; other recomputation lies between the last two."""


def pairs() -> pd.DataFrame:
    """One row for each rehearsal and its real run: seconds of both, of the compute that was rehearsed and of the step
    as it is put together today, and whether devices waited for the host while it was rehearsed."""
    rows = pd.concat([load(folder).table.to_pandas() for folder in (RECORDED, ON_OTHER_HOSTS)], ignore_index=True)
    rows = rows[
        (rows["outcome"] == "ok") & (rows["pp"] == 1) & rows["sweep"].isin([name for both in PAIRS for name in both])
    ]
    rows = rows.assign(layout=[layout_id(from_dict(json.loads(text))) for text in rows["config_json"]])
    return pd.DataFrame(_pairs_of(rows))


def _pairs_of(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    clusters = read_clusters()
    for rehearsed, real in PAIRS:
        ran = rows[(rows["sweep"] == real) & (rows["method"] == "measured")].groupby("layout")["step_time_s"].median()
        for _, row in rows[(rows["sweep"] == rehearsed) & rows["layout"].isin(ran.index)].iterrows():
            experiment, cluster = from_dict(json.loads(row["config_json"])), clusters[row["cluster"]]
            estimate = estimate_time(experiment, cluster)
            assert estimate is not None
            waited = bool(
                row["sm_clock_mhz"] > FULL_CLOCK_MHZ
                if pd.isna(row["host_lead_s"])
                else row["host_lead_s"] < HOST_WAIT * row["step_time_s"]
            )
            micro = (row["compute_time_s"] - estimate.optimizer_s) / experiment.num_microbatches
            forward = FORWARD.get(experiment.recompute, FORWARD["selective"]) * micro
            _, step = real_step_s(experiment, cluster, [forward], [micro - forward], estimate.optimizer_s, waited)
            yield {
                "real": real,
                "tp": experiment.tp,
                "waited": waited,
                "compute_s": row["compute_time_s"],
                "real_s": ran[row["layout"]],
                "recorded_s": row["step_time_s"],
                "now_s": step,
            }


def section() -> str:
    found = pairs()
    slow, tensor, waited = found["real"] == SLOW_HOST, found["tp"] > 1, found["waited"]
    groups = {
        "all": ~waited | waited,
        "tp > 1, the device sets the pace": tensor & ~waited,
        "tp 1, the device sets the pace": ~tensor & ~waited,
        "tp > 1, the host does, usual hosts": tensor & waited & ~slow,
        "tp > 1, the host does, a slow host": tensor & waited & slow,
        "tp 1, the host does": ~tensor & waited,
    }
    lines = []
    for name, rows in groups.items():
        own = found[rows]
        before, error = (own[column] / own["real_s"] - 1 for column in ("recorded_s", "now_s"))
        over, spread = (
            np.exp(np.log(own["real_s"] / own["compute_s"]).mean()),
            np.log(own["now_s"] / own["real_s"]).std(),
        )
        cells = [
            f"{len(own)}",
            f"{over:.2f}",
            percent(before.abs().mean()),
            percent(error.abs().mean()),
            percent(error.abs().median()),
            f"{error.mean():+.1%}".replace("%", " %"),
            f"{spread:.2f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    head = "| pairs | count | real over compute | as recorded | now: mean error | median | bias | standard deviation |"
    return "\n".join([head, "|---|---:|---:|---:|---:|---:|---:|---:|", *lines])
