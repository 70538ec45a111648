"""The schemas of the tables, their versions, and the words of their columns, which are in `results.tables.columns`.

Units and descriptions are stored in the Parquet field metadata. Unknown values are null: never 0, -1 or inf.
``schema_version`` rises when columns of ``attempts`` change. ``measurement_version`` rises when the meaning of a column
changes; readers refuse to pool rows of different versions.
"""

from __future__ import annotations

import pyarrow as pa

from results.tables.columns.attempts import ATTEMPT_COLUMNS
from results.tables.columns.column import Column
from results.tables.columns.ledger import LEDGER_COLUMNS
from results.tables.columns.shared import CONFIG_COLUMNS, PREDICTED_TIME_COLUMNS
from results.tables.columns.steps import STEP_COLUMNS

__all__ = [
    "ATTEMPTS",
    "ATTEMPT_COLUMNS",
    "CONFIG_COLUMNS",
    "LEDGER",
    "LEDGER_COLUMNS",
    "MEASUREMENT_VERSION",
    "METHODS",
    "OUTCOMES",
    "PHASES",
    "PREDICTED_TIME_COLUMNS",
    "SCHEMA_VERSION",
    "STEPS",
    "STEP_COLUMNS",
    "UNKNOWN_OUTCOME",
    "VERDICTS",
    "Column",
]

SCHEMA_VERSION = 18
"""Version of the columns of ``attempts``. 2: grad_norm_max_difference. 3: nodes, scheduler_job, pilot_id, repeat_of. 4:
backend. 5: the spread of step times, timed_wall_s, slowest_rank, energy_per_token_mj, power_limit_w,
sm_clock_median_step_mhz, nccl_environment; timed_steps is the number of steps that were timed. 6: pp_split, cp_kind,
traffic, traffic_source, breakdown_*, trace_file. 7: recompute_every, which is 1 in older rows. 8: etp, routing and
routing_imbalance (1, balanced and 1.0 in older rows), capacity_factor, expert_imbalance, rank_imbalance, load_entropy,
dropped_share, loss_scale, skipped_steps. 9: host_waits, check_*, *_by_stage_s, peak_allocated_by_step_bytes,
peak_reserved_by_step_bytes. 10: predicted_step_time_low_s, predicted_step_time_high_s. 11: host_launch_s. 12:
host_lead_s. 13: nccl_transports. 14: pp_stages, pad_vocab_to. 15: cuda_graph, which is none in older rows,
cuda_graph_run, cuda_graph_reason, and gradient_accumulation_fusion, which is false in older rows. 16:
shares_memory. 17: grad_reduce, optimizer, optimizer_states, master_weights and optimizer_offload (fp32, adamw, fp32,
fp32 and 0 in older rows), host_memory_bytes, documents, document_balance, which is none in older rows, and
attention_imbalance. 18: activation_offload, which is none in older rows, and
recurrence, which is torch there. Rows of older versions have null in all other newer columns."""
MEASUREMENT_VERSION = 2
"""Version of the meaning of the columns. 2: time that a stage waits for slower stages after its last backward counts as
pipeline idle time, no longer as reduction or optimizer; HFU of full recomputation leaves out the down projection;
losses agree only if gradient norms agree too."""

OUTCOMES = (
    "ok",
    "oom",
    "hang",
    "timeout",
    "crash",
    "nccl_error",
    "node_failure",
    "preempted",
    "diverged",
    "cancelled",
)
UNKNOWN_OUTCOME = "unknown"
"""Outcome of a run of other programs that failed in a way they do not state. Rows of this program never have it."""
METHODS = ("measured", "rehearsed", "rehearsed_fake")
"""measured: all ranks ran. rehearsed: single ranks ran on one device under a fake process group, communication is
modelled. rehearsed_fake: single ranks were traced on FakeTensor without a device; memory is traced, time is estimated.
"""
VERDICTS = ("run", "invalid", "predicted_oom", "cached", "over_budget")
PHASES = ("spawn", "rendezvous", "build", "warmup", "replay", "step", "teardown", "done")


def _schema(table: str, columns: tuple[Column, ...]) -> pa.Schema:
    metadata = {"table": table, "schema_version": str(SCHEMA_VERSION), "measurement_version": str(MEASUREMENT_VERSION)}
    return pa.schema([column.field() for column in columns], metadata=metadata)


ATTEMPTS = _schema("attempts", ATTEMPT_COLUMNS)
STEPS = _schema("steps", STEP_COLUMNS)
LEDGER = _schema("ledger", LEDGER_COLUMNS)
