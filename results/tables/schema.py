"""The columns of every table, with their types, units and meaning. This is the only place where columns are defined.

Units and descriptions are stored in the Parquet field metadata. Unknown values are null: never 0, -1 or inf.
``schema_version`` rises when columns of ``attempts`` change. ``measurement_version`` rises when the meaning of a column
changes; readers refuse to pool rows of different versions.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 12
"""Version of the columns of ``attempts``. 2: grad_norm_max_difference. 3: nodes, scheduler_job, pilot_id, repeat_of. 4:
backend. 5: the spread of step times, timed_wall_s, slowest_rank, energy_per_token_mj, power_limit_w,
sm_clock_median_step_mhz, nccl_environment; timed_steps is the number of steps that were timed. 6: pp_split, cp_kind,
traffic, traffic_source, breakdown_*, trace_file. 7: recompute_every, which is 1 in older rows. 8: etp, routing and
routing_imbalance (1, balanced and 1.0 in older rows), capacity_factor, expert_imbalance, rank_imbalance, load_entropy,
dropped_share, loss_scale, skipped_steps. 9: host_waits, check_*, *_by_stage_s, peak_allocated_by_step_bytes,
peak_reserved_by_step_bytes. 10: predicted_step_time_low_s, predicted_step_time_high_s. 11: host_launch_s. 12:
host_lead_s. Rows of older versions have null in all other newer columns."""
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
PHASES = ("spawn", "rendezvous", "build", "warmup", "step", "teardown", "done")


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: pa.DataType
    description: str
    unit: str = ""
    nullable: bool = True

    def field(self) -> pa.Field:
        metadata = {"description": self.description}
        if self.unit:
            metadata["unit"] = self.unit
        return pa.field(self.name, self.type, nullable=self.nullable, metadata=metadata)


_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()
_T = pa.timestamp("us", tz="UTC")
_L = pa.list_(_F)
_TRAFFIC = pa.list_(
    pa.struct([("stage", _I), ("axis", _S), ("op", _S), ("link", _S), ("calls", _I), ("bytes", _I)]),
)
_AXIS_TIMES = pa.list_(pa.struct([("axis", _S), ("exposed_s", _F), ("hidden_s", _F)]))

CONFIG_COLUMNS: tuple[Column, ...] = (
    Column(
        "experiment_id", _S, "Readable name and hash of everything that can change a measured number", nullable=False
    ),
    Column("model", _S, "Name of the model shape"),
    Column("num_layers", _I, "Transformer layers"),
    Column("hidden_size", _I, "Width of the residual stream"),
    Column("num_heads", _I, "Query heads"),
    Column("num_kv_heads", _I, "Key and value heads"),
    Column("head_dim", _I, "Width of one head; with latent attention, of a query"),
    Column(
        "ffn_hidden_size",
        _I,
        "Width of the SwiGLU feed-forward layer; without dense layers, of a token's routed experts",
    ),
    Column("vocab_size", _I, "Rows of the embedding"),
    Column("tie_embeddings", _B, "True: input and output embedding share one matrix"),
    Column("world_size", _I, "Number of ranks of the layout", "ranks"),
    Column("dp", _I, "Data-parallel degree: dp_replicate times dp_shard"),
    Column("dp_replicate", _I, "Number of replicas (outer degree of HSDP)"),
    Column("dp_shard", _I, "Number of data-parallel ranks over which ZeRO shards one replica"),
    Column("tp", _I, "Tensor-parallel degree"),
    Column("cp", _I, "Context-parallel degree"),
    Column("pp", _I, "Pipeline-parallel degree"),
    Column("ep", _I, "Expert-parallel degree; these ranks are taken from dp and cp, and from tp if etp is 1"),
    Column("etp", _I, "Tensor-parallel degree inside routed experts: 1 or tp"),
    Column(
        "routing",
        _S,
        "How experts are chosen for tokens: balanced and skewed force the choice, learned uses the router",
    ),
    Column(
        "routing_imbalance",
        _F,
        "Load of the most loaded expert divided by the mean load: set for skewed routing, assumed for learned routing",
    ),
    Column(
        "capacity_factor",
        _F,
        "Limit of token copies that an expert takes, divided by their mean per expert; null: no limit",
    ),
    Column("micro_batch_size", _I, "Sequences in one forward pass of one data-parallel rank", "sequences"),
    Column("global_batch_size", _I, "Sequences in one optimizer step, over all ranks", "sequences"),
    Column(
        "num_microbatches", _I, "Micro-batches of one data-parallel rank in one optimizer step (gradient accumulation)"
    ),
    Column("seq_len", _I, "Tokens in one sequence", "tokens"),
    Column("tokens_per_step", _I, "Tokens in one optimizer step, over all ranks", "tokens"),
    Column("zero_stage", _I, "ZeRO stage 0 to 3"),
    Column(
        "recompute", _S, "Activation recomputation: none, selective, full, or a list of operations such as norm+swiglu"
    ),
    Column(
        "recompute_every", _I, "Only layers whose index is a multiple of this number are recomputed; 1: every layer"
    ),
    Column("pp_schedule", _S, "Pipeline schedule; none if pp is 1"),
    Column("virtual_stages", _I, "Model chunks held by one pipeline rank"),
    Column(
        "pp_split",
        _S,
        "How layers are assigned to pipeline stages: balanced takes the head into account, even does not",
    ),
    Column("cp_kind", _S, "How context-parallel ranks exchange keys and values: ring, allgather or ulysses"),
    Column("sequence_parallel", _B, "True: activations are sharded over tokens between tensor-parallel regions"),
    Column("precision", _S, "Compute precision"),
    Column("attention", _S, "Requested attention backend"),
    Column("compile", _S, "Part of the model to which torch.compile is applied: none or block"),
    Column("seed", _I, "Seed of weights and data"),
    Column("engine", _S, "Training engine"),
    Column("engine_version", _S, "Version of the engine's numerics and memory behaviour"),
    Column("config_json", _S, "All fields of the experiment, as JSON"),
)

PREDICTED_TIME_COLUMNS: tuple[Column, ...] = (
    Column("predicted_step_time_s", _F, "Step time predicted when the sweep was planned", "s"),
    Column("predicted_step_time_low_s", _F, "Lower end of the 90 % prediction interval of the step time", "s"),
    Column("predicted_step_time_high_s", _F, "Upper end of the 90 % prediction interval of the step time", "s"),
)

ATTEMPT_COLUMNS: tuple[Column, ...] = (
    Column("attempt_id", _S, "Unique id of one attempt to run one experiment", nullable=False),
    Column("schema_version", _I, "Version of this table's columns", nullable=False),
    Column(
        "measurement_version",
        _I,
        "Version of the meaning of the columns; rows of different versions are not pooled",
        nullable=False,
    ),
    Column("sweep", _S, "Name of the sweep"),
    Column("grid", _S, "Grid from which the point comes"),
    Column(
        "method",
        _S,
        "How the row was obtained: measured (all ranks ran), rehearsed (single ranks ran on one device) or "
        "rehearsed_fake (single ranks were traced without a device)",
        nullable=False,
    ),
    Column("attempt_number", _I, "Number of the attempt for this experiment in this sweep, from 1"),
    Column("started_at", _T, "Time at which the ranks were started"),
    Column("ended_at", _T, "Time at which the last process had ended"),
    Column("duration_s", _F, "Time from started_at to ended_at", "s"),
    *CONFIG_COLUMNS,
    Column("warmup_steps", _I, "Number of steps before the timed ones"),
    Column("timed_steps", _I, "Number of timed steps; if none was measured, the requested number"),
    # outcome
    Column(
        "outcome",
        _S,
        "How the attempt ended: ok, oom, hang, timeout, crash, nccl_error, node_failure, preempted, diverged or "
        "cancelled",
        nullable=False,
    ),
    Column(
        "phase", _S, "Phase in which the attempt ended; after a failure that of the rank that failed or stopped first"
    ),
    Column(
        "phase_step", _I, "Number of the last step, from 0 with the first warm-up step; for the phases warmup and step"
    ),
    Column("failed_rank", _I, "First rank that failed, or that stopped in a hang"),
    Column("evidence", _S, "Evidence for the outcome: exception, last lines of a log, signal, or ages of heartbeats"),
    Column("will_retry", _B, "True: another attempt follows"),
    Column("teardown_hung", _B, "True: the run was measured completely, but processes had to be killed afterwards"),
    Column(
        "repeat_of",
        _S,
        "Set if the point was run twice: id of the attempt that finished it first, while this one ran. Only the "
        "first row counts",
    ),
    # throughput: statistics over the timed steps, of the slowest rank's time for each step
    Column(
        "step_time_s",
        _F,
        "Step time: median over the timed steps of the slowest rank's time for the step. The parts "
        "forward_backward_s, reduce_exposed_s, optimizer_s and pipeline_idle_s are computed differently (the mean "
        "over ranks of each rank's median over the timed steps), so they need not add up to step_time_s",
        "s",
    ),
    Column("step_time_min_s", _F, "Time of the fastest timed step, by its slowest rank", "s"),
    Column("step_time_max_s", _F, "Time of the slowest timed step, by its slowest rank", "s"),
    Column(
        "step_time_mean_s",
        _F,
        "Mean over the timed steps of the slowest rank's time; multiplied by timed_steps it is comparable with "
        "timed_wall_s",
        "s",
    ),
    Column(
        "step_time_std_s",
        _F,
        "Standard deviation (n - 1) over the timed steps of the slowest rank's time; null for a single step",
        "s",
    ),
    Column(
        "timed_wall_s",
        _F,
        "Host time from the launch of the first timed step to the end of the last one, on the slowest rank",
        "s",
    ),
    Column(
        "slowest_rank",
        _I,
        "Rank with the highest median of forward_backward_s over its timed steps; the other ranks wait for it",
    ),
    Column("slowest_forward_backward_s", _F, "Median of forward_backward_s of slowest_rank", "s"),
    Column("tokens_per_s", _F, "Throughput of all ranks: tokens_per_step / step_time_s", "tokens/s"),
    Column("tokens_per_s_per_gpu", _F, "Throughput per device: tokens_per_s / world_size", "tokens/s"),
    Column(
        "forward_backward_s",
        _F,
        "Time in forward and backward without pipeline idle time: mean over ranks of the median over timed steps",
        "s",
    ),
    Column(
        "reduce_exposed_s",
        _F,
        "Exposed time of gradient reduction, after the last backward: mean over ranks of the median over timed steps",
        "s",
    ),
    Column(
        "optimizer_s",
        _F,
        "Time of gradient clipping and optimizer: mean over ranks of the median over timed steps",
        "s",
    ),
    Column(
        "pipeline_idle_s",
        _F,
        "Time spent waiting for other pipeline stages: mean over ranks of the median over timed steps",
        "s",
    ),
    Column(
        "compute_time_s",
        _F,
        "Compute time of a step without communication, computed from measured stages; only in rows with method "
        "rehearsed",
        "s",
    ),
    Column(
        "communication_time_s",
        _F,
        "Time that modelled communication adds to a step, including time that ranks wait for each other; only in "
        "rows with method rehearsed or rehearsed_fake",
        "s",
    ),
    Column(
        "time_source",
        _S,
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
    Column("traffic_source", _S, "How traffic was obtained: counted (in a warm-up step) or closed_form (rehearsed)"),
    Column(
        "breakdown_step_time_s",
        _F,
        "Time of the profiled step on the device: the sum of breakdown_matmul_s, attention, memory_bound, optimizer, "
        "comm_exposed, "
        "bubble and launch_gaps. All breakdown_* columns are means over the first ranks of the pipeline stages",
        "s",
    ),
    Column("breakdown_matmul_s", _F, "Time of matrix products in the profiled step", "s"),
    Column(
        "breakdown_attention_s", _F, "Time of attention kernels in the profiled step while no matrix product runs", "s"
    ),
    Column(
        "breakdown_memory_bound_s",
        _F,
        "Time of all other kernels and copies in the profiled step while no matrix product, attention or optimizer "
        "kernel runs",
        "s",
    ),
    Column(
        "breakdown_optimizer_s",
        _F,
        "Time of gradient norm, clipping and update in the profiled step while no matrix product or attention kernel "
        "runs",
        "s",
    ),
    Column(
        "breakdown_comm_exposed_s",
        _F,
        "Exposed communication in the profiled step: time in which no compute runs, without the bubble",
        "s",
    ),
    Column(
        "breakdown_comm_hidden_s",
        _F,
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
        _F,
        "Pipeline bubble in the profiled step: time spent waiting for other pipeline stages, including the transfer "
        "of their messages, while nothing else runs",
        "s",
    ),
    Column("breakdown_launch_gaps_s", _F, "Time in the profiled step in which the device was idle", "s"),
    Column(
        "trace_file",
        _S,
        "Path of the trace of the profiled step on rank 0, for Perfetto, relative to the sweep's folder",
    ),
    # utilization
    Column("num_params", _I, "Number of parameters; tied embeddings count once"),
    Column(
        "num_matmul_params", _I, "Number of parameters in matrix products: all except the input embedding and norms"
    ),
    Column(
        "flops_per_token_palm",
        _F,
        "Model FLOPs per token: 6 N_matmul + 12 L H Q T (PaLM, arXiv:2204.02311, appendix B)",
        "FLOP",
    ),
    Column(
        "flops_per_token_causal",
        _F,
        "Model FLOPs per token, with causal attention counted as half: 6 N_matmul + 6 L H Q T",
        "FLOP",
    ),
    Column(
        "flops_per_token_playbook",
        _F,
        "Model FLOPs per token: 6 N_all + 12 L h s, with N_all as the Ultra-Scale Playbook counts it",
        "FLOP",
    ),
    Column(
        "flops_per_token_hardware",
        _F,
        "FLOPs per token that the device computes: causal attention counts as half, recomputation counts",
        "FLOP",
    ),
    Column("peak_flops", _F, "Dense peak of one device in the compute precision", "FLOP/s"),
    Column("peak_flops_source", _S, "Source of peak_flops, or the reason why it is null"),
    Column(
        "mfu_palm",
        _F,
        "Model FLOPs utilization as a fraction of 1: flops_per_token_palm * tokens_per_s_per_gpu / peak_flops",
    ),
    Column("mfu_causal", _F, "Model FLOPs utilization as a fraction of 1, by flops_per_token_causal"),
    Column("mfu_playbook", _F, "Model FLOPs utilization as a fraction of 1, by flops_per_token_playbook"),
    Column("hfu", _F, "Hardware FLOPs utilization as a fraction of 1, by flops_per_token_hardware"),
    # correctness
    Column("losses", pa.list_(_F), "Loss of each step from the first one, including warm-up", "nats/token"),
    Column("grad_norms", pa.list_(_F), "Gradient norm before clipping of each step from the first one"),
    Column(
        "loss_reference_id",
        _S,
        "Id of the attempt of the same model, seed and data with which the losses were compared",
    ),
    Column(
        "loss_max_difference",
        _F,
        "Largest relative difference of the losses of the first steps from those of loss_reference_id",
    ),
    Column(
        "grad_norm_max_difference",
        _F,
        "Largest relative difference of the gradient norms of the first steps from those of loss_reference_id",
    ),
    Column("loss_agrees", _B, "True: both differences are within the tolerances of the precision"),
    # routed experts; means over the layers that have them
    Column(
        "expert_imbalance",
        _F,
        "Token copies of the most loaded expert divided by the mean over all experts, over all steps; mean over layers",
    ),
    Column(
        "rank_imbalance",
        _F,
        "Token copies of the most loaded expert-parallel rank divided by the mean over these ranks, over all steps; "
        "mean over layers",
    ),
    Column(
        "load_entropy",
        _F,
        "Entropy of the distribution of the load over the experts, divided by that of an even distribution; mean "
        "over layers",
    ),
    Column("dropped_share", _F, "Share of all token copies that were dropped for want of capacity; mean over layers"),
    Column(
        "host_waits",
        _F,
        "Number of times one rank's host waited for the device in a step, for the sizes of exchanged messages",
    ),
    Column("loss_scale", _F, "Factor by which the gradients of the last step were scaled; fp16 only"),
    Column(
        "skipped_steps",
        _I,
        "Number of steps without an update because gradients overflowed, including warm-up; fp16 only",
    ),
    # memory of the rank with the highest peak
    Column(
        "peak_allocated_bytes",
        _I,
        "Highest allocated device memory of any rank over the timed steps; if steps do not report it, the sum of the "
        "memory_* columns",
        "B",
    ),
    Column("peak_reserved_bytes", _I, "Highest reserved device memory of any rank over the timed steps", "B"),
    Column("peak_rank", _I, "Rank with the highest peak_allocated_bytes"),
    Column(
        "peak_allocated_by_stage_bytes",
        pa.list_(_I),
        "Highest allocated device memory of the ranks of each pipeline stage; null for a stage that was not run",
        "B",
    ),
    Column(
        "memory_parameters_bytes",
        _I,
        "Memory of peak_rank at its peak: parameters, master weights and gathered copies",
        "B",
    ),
    Column(
        "memory_gradients_bytes", _I, "Memory of peak_rank at its peak: gradients and their accumulation buffers", "B"
    ),
    Column("memory_optimizer_bytes", _I, "Memory of peak_rank at its peak: optimizer state", "B"),
    Column(
        "memory_activations_bytes",
        _I,
        "Memory of peak_rank at its peak: everything else, mostly saved activations",
        "B",
    ),
    Column("device_memory_bytes", _I, "Total memory of the device as the driver reports it", "B"),
    Column(
        "allocator_retries",
        _I,
        "Number of times the allocator had to free its cache and retry, summed over all ranks and steps",
    ),
    # prediction made before the run
    Column(
        "predicted_peak_bytes", _I, "Peak memory predicted from closed forms, of the stage with the highest peak", "B"
    ),
    *PREDICTED_TIME_COLUMNS,
    # where the point's wall time went
    Column(
        "spawn_s",
        _F,
        "Time from the start to the first line of the worker, on the slowest rank of the pilot's machine",
        "s",
    ),
    Column("rendezvous_s", _F, "Time of making the device context and process groups, on the slowest rank", "s"),
    Column("build_s", _F, "Time of building model, sharding, weights and optimizer, on the slowest rank", "s"),
    Column("warmup_s", _F, "Time of the warm-up steps including compilation, on the slowest rank", "s"),
    Column("timed_s", _F, "Time of the timed steps, on the slowest rank", "s"),
    Column(
        "teardown_s",
        _F,
        "Time from the last step's end on the pilot's machine until the last process has ended and its memory is free",
        "s",
    ),
    Column(
        "gap_s",
        _F,
        "Time from the end of the previous point's last timed step to this point's first step, on the node that waited "
        "longest",
        "s",
    ),
    # device state over the timed steps
    Column("power_w", _F, "Mean power of one device over the timed steps, averaged over the devices", "W"),
    Column("power_limit_w", _F, "Lowest power limit that the driver enforced on any device", "W"),
    Column(
        "energy_per_token_mj",
        _F,
        "Energy of all devices per token: power_w / tokens_per_s_per_gpu; measured runs only",
        "mJ",
    ),
    Column("sm_clock_mhz", _F, "Mean SM clock over the timed steps and the devices", "MHz"),
    Column(
        "sm_clock_median_step_mhz",
        _F,
        "Mean SM clock over ranks in the timed step whose time is nearest to step_time_s",
        "MHz",
    ),
    Column("temperature_c", _F, "Highest temperature of any device over the timed steps", "degC"),
    Column(
        "host_launch_s",
        _F,
        "Host time to launch one small operation, forward and backward: mean of one measurement before and one after "
        "the steps; "
        "slowest rank. Null on CPUs and in rehearsals",
        "s",
    ),
    Column(
        "host_lead_s",
        _F,
        "How much later than the host the device finishes a step's last backward: median over timed steps; "
        "lowest value of any rank. Near 0: the device waited for the host, so the step is host-bound. Only for this "
        "project's engine",
        "s",
    ),
    Column("throttle_reasons", _S, "NVML clock event reasons that were seen, separated by commas; empty: none"),
    # provenance
    Column("launcher", _S, "Launcher of the attempt: local, slurm or rehearse"),
    Column("cluster", _S, "Name of the cluster description used for predictions"),
    Column("backend", _S, "Kind of device in the cluster description: cuda or cpu"),
    Column("hosts", pa.list_(_S), "Names of the hosts on which the ranks ran"),
    Column("nodes", pa.list_(_S), "Nodes on which the ranks ran, by the scheduler's names, in the order of the ranks"),
    Column("scheduler_job", _S, "Id of the allocation, as the scheduler's queue shows it"),
    Column("pilot_id", _S, "Id of the pilot that ran the attempt, or that recorded it after that pilot had died"),
    Column("device_name", _S, "Name of the device as the driver reports it"),
    Column("device_ids", pa.list_(_S), "UUIDs of the devices"),
    Column("git_commit", _S, "Git commit of the code that ran"),
    Column("git_dirty", _B, "True: the checkout had uncommitted changes"),
    Column("ultrasweep_version", _S, "Version of this package"),
    Column("python_version", _S, "Version of Python"),
    Column("torch_version", _S, "Version of PyTorch"),
    Column("cuda_version", _S, "Version of PyTorch's CUDA runtime"),
    Column("nccl_version", _S, "Version of NCCL"),
    Column("triton_version", _S, "Version of Triton"),
    Column("driver_version", _S, "Version of the NVIDIA driver"),
    Column(
        "nccl_environment",
        _S,
        "Environment variables NCCL_* and TORCH_NCCL_* in effect, as JSON by name; a value that differs between "
        "ranks is a list",
    ),
    Column("command", _S, "Command line that started the sweep"),
    Column("log_dir", _S, "Folder of the attempt's logs, relative to the sweep's folder; it may be packed: NAME.zip"),
    # rates of the attempt's nodes when their pilot started: the lowest of their devices
    Column(
        "check_matmul_flops",
        _F,
        "Rate of a large bf16 matrix product, measured before the pilot's first point; lowest of the attempt's devices",
        "FLOP/s",
    ),
    Column(
        "check_copy_bytes_per_s",
        _F,
        "Bytes read and written per second by copies on the device, measured before the pilot's first point; lowest "
        "of the attempt's devices",
        "B/s",
    ),
    Column(
        "check_all_reduce_inside_node_bytes_per_s",
        _F,
        "Bus bandwidth of an all-reduce over all devices of a node, measured before the pilot's first point; lowest "
        "of the attempt's nodes",
        "B/s",
    ),
    Column(
        "check_all_reduce_between_nodes_bytes_per_s",
        _F,
        "Bus bandwidth of an all-reduce over one device of each of the pilot's nodes, with all devices active at "
        "once, measured before the pilot's first point; the lowest value",
        "B/s",
    ),
    # one value per pipeline stage (times: only in measured runs) or per step
    Column(
        "forward_by_stage_s",
        _L,
        "Forward time of one micro-batch through all chunks of a pipeline rank, without waiting, for each pipeline "
        "rank: mean "
        "over its ranks of the median over timed steps",
        "s",
    ),
    Column("backward_by_stage_s", _L, "Backward time of one micro-batch, computed as forward_by_stage_s", "s"),
    Column("forward_backward_by_stage_s", _L, "forward_backward_s of each pipeline stage: mean over its ranks", "s"),
    Column("pipeline_idle_by_stage_s", _L, "pipeline_idle_s of each pipeline stage: mean over its ranks", "s"),
    Column(
        "peak_allocated_by_step_bytes",
        pa.list_(_I),
        "Highest allocated device memory of any rank in each step from the first one, including warm-up",
        "B",
    ),
    Column(
        "peak_reserved_by_step_bytes",
        pa.list_(_I),
        "Highest reserved device memory of any rank in each step from the first one, including warm-up",
        "B",
    ),
)

STEP_COLUMNS: tuple[Column, ...] = (
    Column("attempt_id", _S, "Id of the attempt to which the step belongs", nullable=False),
    Column("experiment_id", _S, "Id of the experiment to which the step belongs", nullable=False),
    Column("measurement_version", _I, "Version of the meaning of the columns", nullable=False),
    Column("rank", _I, "Global rank", nullable=False),
    Column("dp_rank", _I, "Coordinate of the rank on the data-parallel axes"),
    Column("tp_rank", _I, "Coordinate of the rank on the tensor-parallel axis"),
    Column("pp_rank", _I, "Coordinate of the rank on the pipeline axis"),
    Column("step", _I, "Number of the step from 0, including warm-up", nullable=False),
    Column("is_warmup", _B, "True: a warm-up step, which is not timed", nullable=False),
    Column(
        "step_time_s",
        _F,
        "Time from the start of the step to the end of the optimizer on this rank. In this project's engine it is "
        "the sum of the next four columns",
        "s",
    ),
    Column("forward_backward_s", _F, "Time in forward and backward without pipeline idle time", "s"),
    Column("reduce_exposed_s", _F, "Exposed time of gradient reduction, after the last backward", "s"),
    Column("optimizer_s", _F, "Time of gradient clipping and optimizer", "s"),
    Column("pipeline_idle_s", _F, "Time spent waiting for other pipeline stages", "s"),
    Column("tokens_per_s_per_gpu", _F, "tokens_per_step / step_time_s / world_size", "tokens/s"),
    Column("loss", _F, "Mean loss over the global batch", "nats/token"),
    Column("grad_norm", _F, "Norm of all gradients before clipping; null if they overflowed"),
    Column("loss_scale", _F, "Factor by which the gradients were scaled; fp16 only"),
    Column("skipped", _B, "True: gradients overflowed and nothing was updated; fp16 only"),
    Column("peak_allocated_bytes", _I, "Peak allocated memory in this step", "B"),
    Column("peak_reserved_bytes", _I, "Peak reserved memory in this step", "B"),
    Column("allocator_retries", _I, "Number of times the allocator had to free its cache and retry in this step"),
    Column("sm_clock_mhz", _F, "Mean SM clock during a timed step", "MHz"),
)

LEDGER_COLUMNS: tuple[Column, ...] = (
    Column("sweep", _S, "Name of the sweep"),
    Column("grid", _S, "Grid from which the point comes"),
    Column("point", _I, "Number of the point in the expanded sweep", nullable=False),
    Column(
        "verdict", _S, "Decision about the point: run, invalid, predicted_oom, cached or over_budget", nullable=False
    ),
    Column(
        "rule",
        _S,
        "Rule that an invalid point breaks; audit: the point is predicted to run out of memory and is run on purpose",
    ),
    Column("detail", _S, "Reason for the verdict, with its numbers"),
    Column(
        "predicted_peak_bytes", _I, "Peak memory predicted from closed forms, of the stage with the highest peak", "B"
    ),
    Column("limit_bytes", _I, "Device memory that training can use", "B"),
    *PREDICTED_TIME_COLUMNS,
    Column(
        "predicted_with",
        _S,
        "Probe and measured rows on which the predicted step time is based; null: only the built-in profile of the "
        "engine",
    ),
    Column("predicted_tokens_per_s_per_gpu", _F, "tokens_per_step / predicted_step_time_s / world_size", "tokens/s"),
    Column("expected_gpu_hours", _F, "Expected cost: predicted run time times number of devices", "h"),
    Column("worst_gpu_hours", _F, "Highest cost: deadline times number of devices", "h"),
    Column("cached_attempt", _S, "Id of the finished attempt whose row is used instead of a new run"),
    Column("cached_sweep", _S, "Sweep of cached_attempt: this one, or with plan.reuse=true another one"),
    *CONFIG_COLUMNS,
)


def _schema(table: str, columns: tuple[Column, ...]) -> pa.Schema:
    metadata = {"table": table, "schema_version": str(SCHEMA_VERSION), "measurement_version": str(MEASUREMENT_VERSION)}
    return pa.schema([column.field() for column in columns], metadata=metadata)


ATTEMPTS = _schema("attempts", ATTEMPT_COLUMNS)
STEPS = _schema("steps", STEP_COLUMNS)
LEDGER = _schema("ledger", LEDGER_COLUMNS)
