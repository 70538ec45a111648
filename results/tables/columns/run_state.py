"""Columns of attempts: correctness, experts, memory, prediction, the point's wall time and the devices' state."""

from __future__ import annotations

import pyarrow as pa

from results.tables.columns.column import BOOL, FLOAT, INT, TEXT, Column
from results.tables.columns.shared import PREDICTED_TIME_COLUMNS

RUN_STATE_COLUMNS: tuple[Column, ...] = (
    # correctness
    Column("losses", pa.list_(FLOAT), "Loss of each step from the first one, including warm-up", "nats/token"),
    Column("grad_norms", pa.list_(FLOAT), "Gradient norm before clipping of each step from the first one"),
    Column(
        "loss_reference_id",
        TEXT,
        "Id of the attempt of the same model, seed and data with which the losses were compared",
    ),
    Column(
        "loss_max_difference",
        FLOAT,
        "Largest relative difference of the losses of the first steps from those of loss_reference_id",
    ),
    Column(
        "grad_norm_max_difference",
        FLOAT,
        "Largest relative difference of the gradient norms of the first steps from those of loss_reference_id",
    ),
    Column("loss_agrees", BOOL, "True: both differences are within the tolerances of the precision"),
    # routed experts; means over the layers that have them
    Column(
        "expert_imbalance",
        FLOAT,
        "Token copies of the most loaded expert divided by the mean over all experts, over all steps; mean over layers",
    ),
    Column(
        "rank_imbalance",
        FLOAT,
        "Token copies of the most loaded expert-parallel rank divided by the mean over these ranks, over all steps; "
        "mean over layers",
    ),
    Column(
        "load_entropy",
        FLOAT,
        "Entropy of the distribution of the load over the experts, divided by that of an even distribution; mean "
        "over layers",
    ),
    Column(
        "dropped_share", FLOAT, "Share of all token copies that were dropped for want of capacity; mean over layers"
    ),
    Column(
        "host_waits",
        FLOAT,
        "Number of times one rank's host waited for the device in a step, for the sizes of exchanged messages",
    ),
    Column("loss_scale", FLOAT, "Factor by which the gradients of the last step were scaled; fp16 only"),
    Column(
        "skipped_steps",
        INT,
        "Number of steps without an update because gradients overflowed, including warm-up; fp16 only",
    ),
    # memory of the rank with the highest peak
    Column(
        "peak_allocated_bytes",
        INT,
        "Highest allocated device memory of any rank over the timed steps; if steps do not report it, the sum of the "
        "memory_* columns",
        "B",
    ),
    Column("peak_reserved_bytes", INT, "Highest reserved device memory of any rank over the timed steps", "B"),
    Column("peak_rank", INT, "Rank with the highest peak_allocated_bytes"),
    Column(
        "peak_allocated_by_stage_bytes",
        pa.list_(INT),
        "Highest allocated device memory of the ranks of each pipeline stage; null for a stage that was not run",
        "B",
    ),
    Column(
        "memory_parameters_bytes",
        INT,
        "Memory of peak_rank at its peak: parameters, master weights and gathered copies",
        "B",
    ),
    Column(
        "memory_gradients_bytes", INT, "Memory of peak_rank at its peak: gradients and their accumulation buffers", "B"
    ),
    Column("memory_optimizer_bytes", INT, "Memory of peak_rank at its peak: optimizer state", "B"),
    Column(
        "memory_activations_bytes",
        INT,
        "Memory of peak_rank at its peak: everything else, mostly saved activations",
        "B",
    ),
    Column("device_memory_bytes", INT, "Total memory of the device as the driver reports it", "B"),
    Column(
        "allocator_retries",
        INT,
        "Number of times the allocator had to free its cache and retry, summed over all ranks and steps",
    ),
    # prediction made before the run
    Column(
        "predicted_peak_bytes", INT, "Peak memory predicted from closed forms, of the stage with the highest peak", "B"
    ),
    *PREDICTED_TIME_COLUMNS,
    # where the point's wall time went
    Column(
        "spawn_s",
        FLOAT,
        "Time from the start to the first line of the worker, on the slowest rank of the pilot's machine",
        "s",
    ),
    Column("rendezvous_s", FLOAT, "Time of making the device context and process groups, on the slowest rank", "s"),
    Column("build_s", FLOAT, "Time of building model, sharding, weights and optimizer, on the slowest rank", "s"),
    Column("warmup_s", FLOAT, "Time of the warm-up steps including compilation, on the slowest rank", "s"),
    Column("timed_s", FLOAT, "Time of the timed steps, on the slowest rank", "s"),
    Column(
        "teardown_s",
        FLOAT,
        "Time from the last step's end on the pilot's machine until the last process has ended and its memory is free",
        "s",
    ),
    Column(
        "gap_s",
        FLOAT,
        "Time from the end of the previous point's last timed step to this point's first step, on the node that waited "
        "longest",
        "s",
    ),
    # device state over the timed steps
    Column("power_w", FLOAT, "Mean power of one device over the timed steps, averaged over the devices", "W"),
    Column("power_limit_w", FLOAT, "Lowest power limit that the driver enforced on any device", "W"),
    Column(
        "energy_per_token_mj",
        FLOAT,
        "Energy of all devices per token: power_w / tokens_per_s_per_gpu; measured runs only",
        "mJ",
    ),
    Column("sm_clock_mhz", FLOAT, "Mean SM clock over the timed steps and the devices", "MHz"),
    Column(
        "sm_clock_median_step_mhz",
        FLOAT,
        "Mean SM clock over ranks in the timed step whose time is nearest to step_time_s",
        "MHz",
    ),
    Column("temperature_c", FLOAT, "Highest temperature of any device over the timed steps", "degC"),
    Column(
        "host_launch_s",
        FLOAT,
        "Host time to launch one small operation, forward and backward: mean of one measurement before and one after "
        "the steps; "
        "slowest rank. Null on CPUs and in rehearsals",
        "s",
    ),
    Column(
        "host_lead_s",
        FLOAT,
        "How much later than the host the device finishes a step's last backward: median over timed steps; "
        "lowest value of any rank. Near 0: the device waited for the host, so the step is host-bound. Only for this "
        "project's engine",
        "s",
    ),
    Column(
        "cuda_graph_run",
        TEXT,
        "What was run: step (timed steps are replays of a captured one; times of a step's parts are those of the last "
        "timed step, peak memory is that of the capture) or none; only for this project's engine, null in older rows "
        "and rehearsals",
    ),
    Column("cuda_graph_reason", TEXT, "Why steps were not captured, although cuda_graph is auto; null if they were"),
    Column(
        "shares_memory",
        BOOL,
        "Whether tensor-parallel products exchanged tokens through memory that devices share: true on GPUs of one host "
        "that reach each other, false where collectives did it; null: no such products, other engines and versions",
    ),
    Column(
        "host_memory_bytes",
        INT,
        "Memory that optimizers and activations of one host's ranks held there, of the fullest host "
        "(optimizer_offload, activation_offload); null: none",
        "B",
    ),
    Column("throttle_reasons", TEXT, "NVML clock event reasons that were seen, separated by commas; empty: none"),
)
