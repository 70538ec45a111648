"""The columns of the ledger: the plan's points, their verdicts and predictions."""

from __future__ import annotations

from results.tables.columns.column import FLOAT, INT, TEXT, Column
from results.tables.columns.shared import CONFIG_COLUMNS, PREDICTED_TIME_COLUMNS

LEDGER_COLUMNS: tuple[Column, ...] = (
    Column("sweep", TEXT, "Name of the sweep"),
    Column("grid", TEXT, "Grid from which the point comes"),
    Column("point", INT, "Number of the point in the expanded sweep", nullable=False),
    Column(
        "verdict", TEXT, "Decision about the point: run, invalid, predicted_oom, cached or over_budget", nullable=False
    ),
    Column(
        "rule",
        TEXT,
        "First rule that an invalid point breaks; audit: the point is predicted to run out of memory and is run on "
        "purpose",
    ),
    Column(
        "detail",
        TEXT,
        "Reasons for the verdict, with their numbers; of several broken rules the sentence of the first, then `; name: "
        "sentence` of each other",
    ),
    Column(
        "predicted_peak_bytes", INT, "Peak memory predicted from closed forms, of the stage with the highest peak", "B"
    ),
    Column("limit_bytes", INT, "Device memory that training can use", "B"),
    Column(
        "predicted_host_memory_bytes",
        INT,
        "Memory of one node's host that optimizers and activations of its ranks need, predicted; 0: none "
        "(optimizer_offload, activation_offload)",
        "B",
    ),
    *PREDICTED_TIME_COLUMNS,
    Column(
        "predicted_with",
        TEXT,
        "Probe and measured rows on which the predicted step time is based; null: only the built-in profile of the "
        "engine",
    ),
    Column("predicted_tokens_per_s_per_gpu", FLOAT, "tokens_per_step / predicted_step_time_s / world_size", "tokens/s"),
    Column("expected_gpu_hours", FLOAT, "Expected cost: predicted run time times number of devices", "h"),
    Column("worst_gpu_hours", FLOAT, "Highest cost: deadline times number of devices", "h"),
    Column("cached_attempt", TEXT, "Id of the finished attempt whose row is used instead of a new run"),
    Column("cached_sweep", TEXT, "Sweep of cached_attempt: this one, or with plan.reuse=true another one"),
    *CONFIG_COLUMNS,
)
