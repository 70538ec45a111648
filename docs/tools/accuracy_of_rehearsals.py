"""The table of docs/accuracy_details.md on rehearsals: steps put together from ranks that ran alone, beside real steps.

Rows of `results/recorded` and `docs/tools/rows_of_other_hosts` that were rehearsed, without a pipeline, on the machine
of the real run or on one like it. They keep the compute that was measured (`compute_time_s`), so that today's way of
putting a step together is graded on all of them, however old; what they do not keep, the optimizer's part and the
forward's, is
modelled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from docs.tools.accuracy_scores import percent, table
from docs.tools.other_hosts import ON_OTHER_HOSTS
from results.tables.load import load
from sweep.predicting.codebases import read_clusters
from sweep.predicting.measured_tables import RECORDED
from workloads.contract.protocol import HOST_WAIT
from workloads.contract.stages import real_step_s
from workloads.costs.time.timeline import estimate_time
from workloads.spec.experiment import from_dict, layout_id

PAIRS = (
    ("rehearsed_experts", "h200x2_experts"),
    ("rehearsed_h200x2", "h200x2_long_context"),
    ("rehearsed_h200x2", "h200x2_long_context_1b"),
    ("rehearsed_h200x2", "h200x2_long_context_32k"),
    ("rehearsed_h100x2", "h100x2_validation"),
    ("rehearsed_h200x2_search", "h200x2_search"),
    ("rehearsed_h200x2_tensor_parallel", "h200x2_tensor_parallel"),
    ("rehearsed_h100x2_tensor_parallel", "h100x2_tensor_parallel"),
    ("rehearsed_h100x2_validation", "h100x2_validation_gradients"),
    ("rehearsed_h200x4_half_node", "h200x4_half_node"),
)
"""Pairs of sweeps: rehearsed, and real. Earlier rehearsals filled message buffers with zeros, which makes products
faster."""
LATER = ("h100x2_tensor_parallel", "h100x2_validation_gradients", "h200x4_half_node")
"""Real sweeps that ran after the factors of `workloads.contract.stages` were set: an out-of-sample test of them."""
SLOW_HOST = "h200x2_tensor_parallel"
"""The real runs of a host that took 1.4 times as long as usual (docs/tools/rows_of_other_hosts/h200x2_host_bound)."""
FULL_CLOCK_MHZ = 1800.0
"""Clock in MHz, of 1,980, above which no power limit holds the device down, so it had time to wait.

Used for rows without ``host_lead_s``: of 474 rows with it, on H100 and H200, it sorts five in six alike, and misses
three of 179 that waited.
"""
FORWARD = {"none": 1 / 3, "selective": 0.3, "full": 0.25}
"""Share of the forward in a micro-batch's compute, by recomputation: a backward takes twice a forward, and recomputes
nothing, about a third, or all of it. Other recomputation uses the share of ``selective``."""


def pairs() -> pd.DataFrame:
    """One row for each rehearsal and its real run.

    Columns are the seconds of both, of the rehearsed compute and of the step as it is put together today, and whether
    the rehearsal was host-bound.
    """
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
            e, cluster = from_dict(json.loads(row["config_json"])), clusters[row["cluster"]]
            estimate = estimate_time(e, cluster)
            assert estimate is not None
            waited = _waited(row)
            micro = (row["compute_time_s"] - estimate.optimizer_s) / e.num_microbatches
            forward = FORWARD.get(e.recompute, FORWARD["selective"]) * micro
            _, step = real_step_s(e, cluster, [forward], [micro - forward], estimate.optimizer_s, waited)
            yield {
                "real": real,
                "tp": e.tp > 1,
                "layers_meet": max(e.tp, e.cp, e.ep) > 1,
                "waited": waited,
                "compute_s": row["compute_time_s"],
                "real_s": ran[row["layout"]],
                "recorded_s": row["step_time_s"],
                "now_s": step,
            }


def _waited(row: pd.Series[Any]) -> bool | None:
    """Whether a row was host-bound, as in `workloads.contract.stages`; None: unknown, because the allocator freed its
    cache."""
    if row["allocator_retries"] > 0:
        return None
    if pd.isna(row["host_lead_s"]):
        return bool(row["sm_clock_mhz"] > FULL_CLOCK_MHZ)
    return bool(row["host_lead_s"] < HOST_WAIT * row["step_time_s"])


def section() -> str:
    found = pairs()
    tensor, meet, slow = found["tp"], found["layers_meet"], found["real"] == SLOW_HOST
    later = found["real"].isin(LATER)
    device, host = (found["waited"].map(lambda waited, of=kind: waited is of) for kind in (False, True))
    groups = {
        "the device sets the pace, tp": device & tensor,
        "of these, after the factor was set": device & tensor & later,
        "the device, cp or ep": device & meet & ~tensor,
        "of these, after it was set": device & meet & ~tensor & later,
        "the device, data parallelism alone": device & ~meet,
        "the host sets the pace, tp, usual hosts": host & tensor & ~slow,
        "the host, tp, a slow host": host & tensor & slow,
        "the host, no tp": host & ~tensor,
        "the allocator stopped to free memory": ~device & ~host,
    }
    lines = [("all", found), *((name, found[rows]) for name, rows in groups.items())]
    return table([(name, _line(group_rows)) for name, group_rows in lines], "pairs")


def _line(own: pd.DataFrame) -> dict[str, str]:
    before, error = (own[column] / own["real_s"] - 1 for column in ("recorded_s", "now_s"))
    return {
        "count": str(len(own)),
        "real over compute": f"{np.exp(np.log(own['real_s'] / own['compute_s']).mean()):.2f}",
        "as recorded": percent(before.abs().mean()),
        "now: mean error": percent(error.abs().mean()),
        "median": percent(error.abs().median()),
        "bias": f"{error.mean():+.1%}".replace("%", " %"),
        "standard deviation": f"{np.log(own['now_s'] / own['real_s']).std():.2f}",
    }
