"""Columns of attempts: step times, their parts, messages, the breakdown of one step, and utilization."""

from __future__ import annotations

import pyarrow as pa

from results.tables.columns.column import FLOAT, INT, TEXT, Column

_TRAFFIC = pa.list_(
    pa.struct([("stage", INT), ("axis", TEXT), ("op", TEXT), ("link", TEXT), ("calls", INT), ("bytes", INT)]),
)
_AXIS_TIMES = pa.list_(pa.struct([("axis", TEXT), ("exposed_s", FLOAT), ("hidden_s", FLOAT)]))

STEP_TIME_COLUMNS: tuple[Column, ...] = (
    # throughput: statistics over the timed steps, of the slowest rank's time for each step
    Column(
        "step_time_s",
        FLOAT,
        "Step time: median over the timed steps of the slowest rank's time for the step. The parts "
        "forward_backward_s, reduce_exposed_s, optimizer_s and pipeline_idle_s are computed differently (the mean "
        "over ranks of each rank's median over the timed steps), so they need not add up to step_time_s",
        "s",
    ),
    Column("step_time_min_s", FLOAT, "Time of the fastest timed step, by its slowest rank", "s"),
    Column("step_time_max_s", FLOAT, "Time of the slowest timed step, by its slowest rank", "s"),
    Column(
        "step_time_mean_s",
        FLOAT,
        "Mean over the timed steps of the slowest rank's time; multiplied by timed_steps it is comparable with "
        "timed_wall_s",
        "s",
    ),
    Column(
        "step_time_std_s",
        FLOAT,
        "Standard deviation (n - 1) over the timed steps of the slowest rank's time; null for a single step",
        "s",
    ),
    Column(
        "timed_wall_s",
        FLOAT,
        "Host time from the launch of the first timed step to the end of the last one, on the slowest rank",
        "s",
    ),
    Column(
        "slowest_rank",
        INT,
        "Rank with the highest median of forward_backward_s over its timed steps; the other ranks wait for it",
    ),
    Column("slowest_forward_backward_s", FLOAT, "Median of forward_backward_s of slowest_rank", "s"),
    Column("tokens_per_s", FLOAT, "Throughput of all ranks: tokens_per_step / step_time_s", "tokens/s"),
    Column("tokens_per_s_per_gpu", FLOAT, "Throughput per device: tokens_per_s / world_size", "tokens/s"),
    Column(
        "forward_backward_s",
        FLOAT,
        "Time in forward and backward without pipeline idle time: mean over ranks of the median over timed steps",
        "s",
    ),
    Column(
        "reduce_exposed_s",
        FLOAT,
        "Exposed time of gradient reduction, after the last backward: mean over ranks of the median over timed steps",
        "s",
    ),
    Column(
        "optimizer_s",
        FLOAT,
        "Time of gradient clipping and optimizer: mean over ranks of the median over timed steps",
        "s",
    ),
    Column(
        "pipeline_idle_s",
        FLOAT,
        "Time spent waiting for other pipeline stages: mean over ranks of the median over timed steps",
        "s",
    ),
    Column(
        "compute_time_s",
        FLOAT,
        "Compute time of a step without communication, computed from measured stages; only in rows with method "
        "rehearsed",
        "s",
    ),
    Column(
        "communication_time_s",
        FLOAT,
        "Time that modelled communication adds to a step, including time that ranks wait for each other; only in "
        "rows with method rehearsed or rehearsed_fake",
        "s",
    ),
    Column(
        "time_source",
        TEXT,
        "How step_time_s was obtained: measured, compute_measured (communication is modelled) or estimated (both are "
        "modelled)",
    ),
    # messages of one step, and the breakdown of one profiled step
    Column(
        "traffic",
        _TRAFFIC,
        "Messages that the first rank of each pipeline stage sends in one step, by axis (pp, dp_replicate, dp_shard, "
        "cp, tp, "
        "ep; tied: gradients of a tied embedding; world: all ranks, if no axis contains all of them), operation and "
        "link "
        "(inside_node, between_nodes; null: not known). Bytes are the whole gathered, or not yet scattered, buffer "
        "of one "
        "rank; a message between two ranks counts at its sender",
    ),
    Column("traffic_source", TEXT, "How traffic was obtained: counted (in a warm-up step) or closed_form (rehearsed)"),
    Column(
        "breakdown_step_time_s",
        FLOAT,
        "Time of the profiled step on the device: the sum of breakdown_matmul_s, attention, memory_bound, optimizer, "
        "comm_exposed, "
        "bubble and launch_gaps. All breakdown_* columns are means over the first ranks of the pipeline stages",
        "s",
    ),
    Column("breakdown_matmul_s", FLOAT, "Time of matrix products in the profiled step", "s"),
    Column(
        "breakdown_attention_s",
        FLOAT,
        "Time of attention kernels in the profiled step while no matrix product runs",
        "s",
    ),
    Column(
        "breakdown_memory_bound_s",
        FLOAT,
        "Time of all other kernels and copies in the profiled step while no matrix product, attention or optimizer "
        "kernel runs",
        "s",
    ),
    Column(
        "breakdown_optimizer_s",
        FLOAT,
        "Time of gradient norm, clipping and update in the profiled step while no matrix product or attention kernel "
        "runs",
        "s",
    ),
    Column(
        "breakdown_comm_exposed_s",
        FLOAT,
        "Exposed communication in the profiled step: time in which no compute runs, without the bubble",
        "s",
    ),
    Column(
        "breakdown_comm_hidden_s",
        FLOAT,
        "Hidden communication in the profiled step: time that overlaps with the other parts, summed over the axes",
        "s",
    ),
    Column(
        "breakdown_comm_by_axis",
        _AXIS_TIMES,
        "Communication of the profiled step by axis, with names as in traffic (null: group not known); exposed_s is "
        "null "
        "where that time is waiting for other stages, which is in breakdown_bubble_s",
        "s",
    ),
    Column(
        "breakdown_bubble_s",
        FLOAT,
        "Pipeline bubble in the profiled step: time spent waiting for other pipeline stages, including the transfer "
        "of their messages, while nothing else runs",
        "s",
    ),
    Column("breakdown_launch_gaps_s", FLOAT, "Time in the profiled step in which the device was idle", "s"),
    Column(
        "trace_file",
        TEXT,
        "Path of the trace of the profiled step on rank 0, for Perfetto, relative to the sweep's folder",
    ),
    # utilization
    Column("num_params", INT, "Number of parameters; tied embeddings count once"),
    Column(
        "num_matmul_params", INT, "Number of parameters in matrix products: all except the input embedding and norms"
    ),
    Column(
        "flops_per_token_palm",
        FLOAT,
        "Model FLOPs per token: 6 N_matmul + 12 L H Q T (PaLM, arXiv:2204.02311, appendix B)",
        "FLOP",
    ),
    Column(
        "flops_per_token_causal",
        FLOAT,
        "Model FLOPs per token, with causal attention counted as half: 6 N_matmul + 6 L H Q T",
        "FLOP",
    ),
    Column(
        "flops_per_token_playbook",
        FLOAT,
        "Model FLOPs per token: 6 N_all + 12 L h s, with N_all as the Ultra-Scale Playbook counts it",
        "FLOP",
    ),
    Column(
        "flops_per_token_hardware",
        FLOAT,
        "FLOPs per token that the device computes: causal attention counts as half, recomputation counts",
        "FLOP",
    ),
    Column("peak_flops", FLOAT, "Dense peak of one device in the compute precision", "FLOP/s"),
    Column("peak_flops_source", TEXT, "Source of peak_flops, or the reason why it is null"),
    Column(
        "mfu_palm",
        FLOAT,
        "Model FLOPs utilization as a fraction of 1: flops_per_token_palm * tokens_per_s_per_gpu / peak_flops",
    ),
    Column("mfu_causal", FLOAT, "Model FLOPs utilization as a fraction of 1, by flops_per_token_causal"),
    Column("mfu_playbook", FLOAT, "Model FLOPs utilization as a fraction of 1, by flops_per_token_playbook"),
    Column("hfu", FLOAT, "Hardware FLOPs utilization as a fraction of 1, by flops_per_token_hardware"),
)
