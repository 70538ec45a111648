"""The columns of attempts: identity and outcome, and those of the files that are named here, in this order."""

from __future__ import annotations

import pyarrow as pa

from results.tables.columns.column import BOOL, FLOAT, FLOATS, INT, TEXT, TIME, Column
from results.tables.columns.provenance import PROVENANCE_COLUMNS
from results.tables.columns.run_state import RUN_STATE_COLUMNS
from results.tables.columns.shared import CONFIG_COLUMNS
from results.tables.columns.step_times import STEP_TIME_COLUMNS

ATTEMPT_COLUMNS: tuple[Column, ...] = (
    Column("attempt_id", TEXT, "Unique id of one attempt to run one experiment", nullable=False),
    Column("schema_version", INT, "Version of this table's columns", nullable=False),
    Column(
        "measurement_version",
        INT,
        "Version of the meaning of the columns; rows of different versions are not pooled",
        nullable=False,
    ),
    Column("sweep", TEXT, "Name of the sweep"),
    Column("grid", TEXT, "Grid from which the point comes"),
    Column(
        "method",
        TEXT,
        "How the row was obtained: measured (all ranks ran), rehearsed (single ranks ran on one device) or "
        "rehearsed_fake (single ranks were traced without a device)",
        nullable=False,
    ),
    Column("attempt_number", INT, "Number of the attempt for this experiment in this sweep, from 1"),
    Column("started_at", TIME, "Time at which the ranks were started"),
    Column("ended_at", TIME, "Time at which the last process had ended"),
    Column("duration_s", FLOAT, "Time from started_at to ended_at", "s"),
    *CONFIG_COLUMNS,
    Column("warmup_steps", INT, "Number of steps before the timed ones"),
    Column("timed_steps", INT, "Number of timed steps; if none was measured, the requested number"),
    # outcome
    Column(
        "outcome",
        TEXT,
        "How the attempt ended: ok, oom, hang, timeout, crash, nccl_error, node_failure, preempted, diverged or "
        "cancelled",
        nullable=False,
    ),
    Column(
        "phase", TEXT, "Phase in which the attempt ended; after a failure that of the rank that failed or stopped first"
    ),
    Column(
        "phase_step", INT, "Number of the last step, from 0 with the first warm-up step; for the phases warmup and step"
    ),
    Column("failed_rank", INT, "First rank that failed, or that stopped in a hang"),
    Column("evidence", TEXT, "Evidence for the outcome: exception, last lines of a log, signal, or ages of heartbeats"),
    Column("will_retry", BOOL, "True: another attempt follows"),
    Column("teardown_hung", BOOL, "True: the run was measured completely, but processes had to be killed afterwards"),
    Column(
        "repeat_of",
        TEXT,
        "Set if the point was run twice: id of the attempt that finished it first, while this one ran. Only the "
        "first row counts",
    ),
    *STEP_TIME_COLUMNS,
    *RUN_STATE_COLUMNS,
    *PROVENANCE_COLUMNS,
    # one value per pipeline stage (times: only in measured runs) or per step
    Column(
        "forward_by_stage_s",
        FLOATS,
        "Forward time of one micro-batch through all chunks of a pipeline rank, without waiting, for each pipeline "
        "rank: mean "
        "over its ranks of the median over timed steps",
        "s",
    ),
    Column("backward_by_stage_s", FLOATS, "Backward time of one micro-batch, computed as forward_by_stage_s", "s"),
    Column(
        "forward_backward_by_stage_s", FLOATS, "forward_backward_s of each pipeline stage: mean over its ranks", "s"
    ),
    Column("pipeline_idle_by_stage_s", FLOATS, "pipeline_idle_s of each pipeline stage: mean over its ranks", "s"),
    Column(
        "peak_allocated_by_step_bytes",
        pa.list_(INT),
        "Highest allocated device memory of any rank in each step from the first one, including warm-up",
        "B",
    ),
    Column(
        "peak_reserved_by_step_bytes",
        pa.list_(INT),
        "Highest reserved device memory of any rank in each step from the first one, including warm-up",
        "B",
    ),
)
