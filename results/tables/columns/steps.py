"""The columns of steps: one row for each step of each rank."""

from __future__ import annotations

from results.tables.columns.column import BOOL, FLOAT, INT, TEXT, Column

STEP_COLUMNS: tuple[Column, ...] = (
    Column("attempt_id", TEXT, "Id of the attempt to which the step belongs", nullable=False),
    Column("experiment_id", TEXT, "Id of the experiment to which the step belongs", nullable=False),
    Column("measurement_version", INT, "Version of the meaning of the columns", nullable=False),
    Column("rank", INT, "Global rank", nullable=False),
    Column("dp_rank", INT, "Coordinate of the rank on the data-parallel axes"),
    Column("tp_rank", INT, "Coordinate of the rank on the tensor-parallel axis"),
    Column("pp_rank", INT, "Coordinate of the rank on the pipeline axis"),
    Column("step", INT, "Number of the step from 0, including warm-up", nullable=False),
    Column("is_warmup", BOOL, "True: a warm-up step, which is not timed", nullable=False),
    Column(
        "step_time_s",
        FLOAT,
        "Time from the start of the step to the end of the optimizer on this rank. In this project's engine it is "
        "the sum of the next four columns",
        "s",
    ),
    Column("forward_backward_s", FLOAT, "Time in forward and backward without pipeline idle time", "s"),
    Column("reduce_exposed_s", FLOAT, "Exposed time of gradient reduction, after the last backward", "s"),
    Column("optimizer_s", FLOAT, "Time of gradient clipping and optimizer", "s"),
    Column("pipeline_idle_s", FLOAT, "Time spent waiting for other pipeline stages", "s"),
    Column("tokens_per_s_per_gpu", FLOAT, "tokens_per_step / step_time_s / world_size", "tokens/s"),
    Column("loss", FLOAT, "Mean loss over the global batch", "nats/token"),
    Column(
        "mtp_loss",
        FLOAT,
        "Mean loss of modules of multi-token prediction, which is not part of loss; null without any",
        "nats/token",
    ),
    Column("grad_norm", FLOAT, "Norm of all gradients before clipping; null if they overflowed"),
    Column("loss_scale", FLOAT, "Factor by which the gradients were scaled; fp16 only"),
    Column("skipped", BOOL, "True: gradients overflowed and nothing was updated; fp16 only"),
    Column("peak_allocated_bytes", INT, "Peak allocated memory in this step", "B"),
    Column("peak_reserved_bytes", INT, "Peak reserved memory in this step", "B"),
    Column("allocator_retries", INT, "Number of times the allocator had to free its cache and retry in this step"),
    Column("sm_clock_mhz", FLOAT, "Mean SM clock during a timed step", "MHz"),
)
