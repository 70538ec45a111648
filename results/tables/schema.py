"""The columns of every table, with their types, units and meaning. The one place where a column is defined.

Units and descriptions travel in the Parquet field metadata. A value that is not known is null: never 0, -1 or inf.
``schema_version`` rises when columns of ``attempts`` change; ``measurement_version`` when a column starts to mean
something else, and readers refuse to pool rows across it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 12
"""Of ``attempts``. 2: grad_norm_max_difference. 3: nodes, scheduler_job, pilot_id, repeat_of. 4: backend. 5: the spread
of step times, timed_wall_s, slowest_rank, energy_per_token_mj, power_limit_w, sm_clock_median_step_mhz,
nccl_environment; timed_steps is how many were timed. 6: pp_split, cp_kind, traffic, traffic_source, breakdown_*,
trace_file. 7: recompute_every, which is 1 in older rows. 8: etp, routing and routing_imbalance (1, balanced and 1.0 in
older rows), capacity_factor, expert_imbalance, rank_imbalance, load_entropy, dropped_share, loss_scale, skipped_steps.
9: host_waits, check_*, *_by_stage_s, peak_allocated_by_step_bytes, peak_reserved_by_step_bytes. 10:
predicted_step_time_low_s, predicted_step_time_high_s. 11: host_launch_s. 12: host_lead_s. Rows of older versions have
null in all other newer columns."""
MEASUREMENT_VERSION = 2
"""2: a stage's waiting for slower stages after its last backward is pipeline idle, no longer reduction or optimizer;
HFU of full recomputation leaves out the down projection; losses agree by gradient norms too."""

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
"""Outcome of a run recorded by others that failed in a way they do not name. No row of this program has it."""
METHODS = ("measured", "rehearsed", "rehearsed_fake")
"""measured: all ranks ran. rehearsed: single ranks ran on one device under a fake process group, communication is
modelled. rehearsed_fake: single ranks traced on FakeTensor without a device, memory traced, time estimated."""
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
    Column("experiment_id", _S, "Readable slug and hash of everything that can change the number", nullable=False),
    Column("model", _S, "Name of the model shape"),
    Column("num_layers", _I, "Transformer layers"),
    Column("hidden_size", _I, "Width of the residual stream"),
    Column("num_heads", _I, "Query heads"),
    Column("num_kv_heads", _I, "Key and value heads"),
    Column("head_dim", _I, "Width of one head"),
    Column("ffn_hidden_size", _I, "Width of the SwiGLU feed-forward layer"),
    Column("vocab_size", _I, "Rows of the embedding"),
    Column("tie_embeddings", _B, "Input and output embedding are one matrix"),
    Column("world_size", _I, "Ranks of the layout", "ranks"),
    Column("dp", _I, "Data-parallel degree: dp_replicate times dp_shard"),
    Column("dp_replicate", _I, "Replicas (HSDP outer degree)"),
    Column("dp_shard", _I, "Data-parallel ranks that share one replica's optimizer state"),
    Column("tp", _I, "Tensor-parallel degree"),
    Column("cp", _I, "Context-parallel degree"),
    Column("pp", _I, "Pipeline-parallel degree"),
    Column("ep", _I, "Expert-parallel degree (borrows data- and context-parallel ranks)"),
    Column("etp", _I, "Tensor-parallel degree inside routed experts: 1 or tp"),
    Column("routing", _S, "How tokens choose experts: balanced and skewed are forced, learned is the router's choice"),
    Column("routing_imbalance", _F, "Load of the fullest expert over the mean: stated (skewed) or assumed (learned)"),
    Column("capacity_factor", _F, "Most copies of tokens that an expert takes, over their mean; null: all"),
    Column("micro_batch_size", _I, "Sequences of one forward pass of one data-parallel rank", "sequences"),
    Column("global_batch_size", _I, "Sequences of one optimizer step", "sequences"),
    Column("num_microbatches", _I, "Micro-batches of one optimizer step (gradient accumulation)"),
    Column("seq_len", _I, "Tokens of one sequence", "tokens"),
    Column("tokens_per_step", _I, "Tokens of one optimizer step", "tokens"),
    Column("zero_stage", _I, "ZeRO stage 0 to 3"),
    Column("recompute", _S, "Activation recomputation: none, selective, full, or operations such as norm+swiglu"),
    Column("recompute_every", _I, "Only layers whose index is a multiple of it are recomputed; 1: every layer"),
    Column("pp_schedule", _S, "Pipeline schedule; none where pp is 1"),
    Column("virtual_stages", _I, "Model chunks of one pipeline rank"),
    Column("pp_split", _S, "How layers are given to pipeline stages: balanced counts the head, even does not"),
    Column("cp_kind", _S, "How context-parallel ranks exchange keys and values: ring, allgather or ulysses"),
    Column("sequence_parallel", _B, "Tensor parallelism shards activations over tokens between its regions"),
    Column("precision", _S, "Compute precision"),
    Column("attention", _S, "Requested attention back end"),
    Column("compile", _S, "What torch.compile was applied to"),
    Column("seed", _I, "Seed of weights and data"),
    Column("engine", _S, "Training engine"),
    Column("engine_version", _S, "Version of the engine's numerics and memory behaviour"),
    Column("config_json", _S, "The experiment in full"),
)

PREDICTED_TIME_COLUMNS: tuple[Column, ...] = (
    Column("predicted_step_time_s", _F, "Closed-form step time", "s"),
    Column("predicted_step_time_low_s", _F, "Lower end of the middle 90 % of where the step time may be", "s"),
    Column("predicted_step_time_high_s", _F, "Upper end of it", "s"),
)

ATTEMPT_COLUMNS: tuple[Column, ...] = (
    Column("attempt_id", _S, "Unique id of one try at one experiment", nullable=False),
    Column("schema_version", _I, "Version of this table's columns", nullable=False),
    Column(
        "measurement_version",
        _I,
        "Version of what the columns mean; rows of different versions are not pooled",
        nullable=False,
    ),
    Column("sweep", _S, "Name of the sweep"),
    Column("grid", _S, "Grid that the point came from"),
    Column("method", _S, "measured, rehearsed or rehearsed_fake", nullable=False),
    Column("attempt_number", _I, "1 for the first try at this experiment in this sweep"),
    Column("started_at", _T, "When the ranks were started"),
    Column("ended_at", _T, "When the last process was gone"),
    Column("duration_s", _F, "From start to the last process gone", "s"),
    *CONFIG_COLUMNS,
    Column("warmup_steps", _I, "Steps before timing"),
    Column("timed_steps", _I, "Steps timed; of a run that measured none, how many were asked for"),
    # outcome
    Column(
        "outcome",
        _S,
        "ok, oom, hang, timeout, crash, nccl_error, node_failure, preempted, diverged or cancelled",
        nullable=False,
    ),
    Column("phase", _S, "Phase the failing (or last) rank was in"),
    Column("phase_step", _I, "Step within the phase, for warmup and step"),
    Column("failed_rank", _I, "First rank that failed, or that stalled in a hang"),
    Column("evidence", _S, "What the outcome was concluded from: exception, last lines, signal, heartbeat ages"),
    Column("will_retry", _B, "Another attempt follows"),
    Column("teardown_hung", _B, "Measured in full, but processes had to be killed afterwards"),
    Column(
        "repeat_of",
        _S,
        "Attempt that finished this point while this one ran: the point was run twice, and the first row counts",
    ),
    # throughput: medians over the timed steps of the slowest rank's time per step
    Column("step_time_s", _F, "Median over timed steps of the slowest rank's step time", "s"),
    Column("step_time_min_s", _F, "Fastest timed step", "s"),
    Column("step_time_max_s", _F, "Slowest timed step", "s"),
    Column(
        "step_time_mean_s", _F, "Mean over timed steps; times timed_steps it can be compared with timed_wall_s", "s"
    ),
    Column("step_time_std_s", _F, "Standard deviation of the timed steps (n - 1); null for a single one", "s"),
    Column(
        "timed_wall_s",
        _F,
        "Host time from the launch of the first timed step to the end of the last one, slowest rank",
        "s",
    ),
    Column("slowest_rank", _I, "Rank with the highest median of forward_backward_s, for which others wait"),
    Column("slowest_forward_backward_s", _F, "That rank's median", "s"),
    Column("tokens_per_s", _F, "tokens_per_step / step_time_s", "tokens/s"),
    Column("tokens_per_s_per_gpu", _F, "tokens_per_s / world_size", "tokens/s"),
    Column(
        "forward_backward_s", _F, "Median time in forward and backward, pipeline idle excluded, mean over ranks", "s"
    ),
    Column(
        "reduce_exposed_s",
        _F,
        "Median time waiting for gradient reduction after the last backward, mean over ranks",
        "s",
    ),
    Column("optimizer_s", _F, "Median time for clipping and optimizer, mean over ranks", "s"),
    Column("pipeline_idle_s", _F, "Median time waiting for another pipeline stage, mean over ranks", "s"),
    Column("compute_time_s", _F, "Rehearsed: measured time of the slowest stage's compute", "s"),
    Column(
        "communication_time_s",
        _F,
        "Rehearsed or estimated: what modelled communication, and ranks that wait for each other, add to a step",
        "s",
    ),
    Column("time_source", _S, "How step_time_s was obtained: measured, compute_measured or estimated"),
    # what one step sends, and where the time of one profiled step went
    Column(
        "traffic",
        _TRAFFIC,
        "What the first rank of each pipeline stage sends in one step, by axis (pp, dp_replicate, dp_shard, cp, tp, "
        "ep; tied: copies of a tied embedding; world: all ranks, where no axis has all of them), operation and link "
        "(inside_node, between_nodes; null: not known). Bytes: the whole gathered, or not yet scattered, buffer of one "
        "rank; a message counts where it is sent",
    ),
    Column("traffic_source", _S, "How traffic was obtained: counted (in a warm-up step) or closed_form (rehearsed)"),
    Column(
        "breakdown_step_time_s",
        _F,
        "Time of the profiled step on the device, the sum of matmul, attention, memory_bound, optimizer, comm_exposed, "
        "bubble and launch_gaps. As all of breakdown_*: mean over the first ranks of the pipeline stages",
        "s",
    ),
    Column("breakdown_matmul_s", _F, "Of the profiled step: matrix products", "s"),
    Column("breakdown_attention_s", _F, "Of the profiled step: attention, while no matrix product runs", "s"),
    Column("breakdown_memory_bound_s", _F, "Of the profiled step: other kernels, while none of these runs", "s"),
    Column("breakdown_optimizer_s", _F, "Of the profiled step: gradient norm, clipping and update", "s"),
    Column("breakdown_comm_exposed_s", _F, "Of the profiled step: communication, while no compute runs", "s"),
    Column("breakdown_comm_hidden_s", _F, "Communication hidden behind these parts, summed over the axes", "s"),
    Column(
        "breakdown_comm_by_axis",
        _AXIS_TIMES,
        "Communication of the profiled step by axis, names as in traffic (null: group not known); exposed_s is null "
        "where it is waiting for other stages, which is the bubble",
        "s",
    ),
    Column(
        "breakdown_bubble_s",
        _F,
        "Of the profiled step: waiting for other pipeline stages while nothing else runs, their messages included",
        "s",
    ),
    Column("breakdown_launch_gaps_s", _F, "Of the profiled step: the device had nothing to run", "s"),
    Column("trace_file", _S, "Trace of the profiled step on rank 0, for Perfetto, relative to the sweep's folder"),
    # utilization
    Column("num_params", _I, "Parameters, tied embeddings counted once"),
    Column("num_matmul_params", _I, "Parameters in matrix products: all but the input embedding look-up and norms"),
    Column("flops_per_token_palm", _F, "6 N_matmul + 12 L H Q T (PaLM, arXiv:2204.02311)", "FLOP"),
    Column("flops_per_token_causal", _F, "6 N_matmul + 6 L H Q T (causal attention counted as half)", "FLOP"),
    Column("flops_per_token_playbook", _F, "6 N_all + 12 L h s, N_all as the Ultra-Scale Playbook counts it", "FLOP"),
    Column(
        "flops_per_token_hardware",
        _F,
        "What the device computes, causal attention halved, recomputation counted",
        "FLOP",
    ),
    Column("peak_flops", _F, "Dense peak of one device in the compute precision", "FLOP/s"),
    Column("peak_flops_source", _S, "Where peak_flops comes from"),
    Column("mfu_palm", _F, "Model FLOPs utilization by flops_per_token_palm"),
    Column("mfu_causal", _F, "Model FLOPs utilization by flops_per_token_causal"),
    Column("mfu_playbook", _F, "Model FLOPs utilization by flops_per_token_playbook"),
    Column("hfu", _F, "Hardware FLOPs utilization by flops_per_token_hardware"),
    # correctness
    Column("losses", pa.list_(_F), "Loss of each step from the first, warm-up included", "nats/token"),
    Column("grad_norms", pa.list_(_F), "Gradient norm before clipping of each step from the first"),
    Column("loss_reference_id", _S, "Attempt of the same model, seed and data whose losses these were compared with"),
    Column("loss_max_difference", _F, "Largest relative difference of the first steps' losses to that attempt's"),
    Column("grad_norm_max_difference", _F, "The same of the first steps' gradient norms"),
    Column("loss_agrees", _B, "Both differences are within the tolerances of the precision"),
    # routed experts; means over the layers that have them
    Column("expert_imbalance", _F, "Copies of tokens of the most loaded expert over the mean, over all steps"),
    Column("rank_imbalance", _F, "The same of expert-parallel ranks"),
    Column("load_entropy", _F, "Entropy of the load's distribution over experts, over that of an even one"),
    Column("dropped_share", _F, "Of all copies of tokens: those dropped for want of capacity"),
    Column(
        "host_waits", _F, "Of one rank and step: waits of the host for the device, for the sizes of exchanged messages"
    ),
    Column("loss_scale", _F, "By what the last step's gradients were scaled; fp16 only"),
    Column("skipped_steps", _I, "Steps without an update because gradients overflowed, warm-up included; fp16 only"),
    # memory, of the rank with the highest peak
    Column("peak_allocated_bytes", _I, "Highest allocated device memory of any rank over the timed steps", "B"),
    Column("peak_reserved_bytes", _I, "Highest reserved device memory of any rank over the timed steps", "B"),
    Column("peak_rank", _I, "Rank with the highest peak_allocated_bytes"),
    Column(
        "peak_allocated_by_stage_bytes",
        pa.list_(_I),
        "Highest allocated memory of each pipeline stage's ranks; null for a stage not run",
        "B",
    ),
    Column("memory_parameters_bytes", _I, "At the peak: parameters, master weights and gathered copies", "B"),
    Column("memory_gradients_bytes", _I, "At the peak: gradients and their accumulation buffers", "B"),
    Column("memory_optimizer_bytes", _I, "At the peak: optimizer state", "B"),
    Column("memory_activations_bytes", _I, "At the peak: everything else, mostly saved activations", "B"),
    Column("device_memory_bytes", _I, "Total memory of the device as the driver reports it", "B"),
    Column("allocator_retries", _I, "Times the allocator had to free its cache and try again, all ranks"),
    # prediction made before the run
    Column("predicted_peak_bytes", _I, "Closed-form peak of the highest stage", "B"),
    *PREDICTED_TIME_COLUMNS,
    # where the point's wall time went
    Column("spawn_s", _F, "Fork to the worker's first line, slowest rank", "s"),
    Column("rendezvous_s", _F, "Device context and process groups, slowest rank", "s"),
    Column("build_s", _F, "Model, sharding, weights and optimizer, slowest rank", "s"),
    Column("warmup_s", _F, "Warm-up steps, compilation included, slowest rank", "s"),
    Column("timed_s", _F, "Timed steps, slowest rank", "s"),
    Column("teardown_s", _F, "End of the last step to the last process gone and memory free", "s"),
    Column("gap_s", _F, "End of the previous point's last timed step to the start of this point's first step", "s"),
    # device state over the timed steps
    Column("power_w", _F, "Mean power of one device", "W"),
    Column("power_limit_w", _F, "Lowest power limit that the driver enforced on any device", "W"),
    Column(
        "energy_per_token_mj", _F, "Energy of all devices: power_w / tokens_per_s_per_gpu; measured runs only", "mJ"
    ),
    Column("sm_clock_mhz", _F, "Mean SM clock", "MHz"),
    Column("sm_clock_median_step_mhz", _F, "Mean SM clock over ranks in the step nearest to step_time_s", "MHz"),
    Column("temperature_c", _F, "Highest device temperature", "degC"),
    Column(
        "host_launch_s",
        _F,
        "Host's time to launch one small operation, forward and backward, the mean of before and after the steps; "
        "slowest rank, on GPUs; null of rehearsals",
        "s",
    ),
    Column(
        "host_lead_s",
        _F,
        "How much later than the host the device is through with a step's last backward, the median over timed steps; "
        "of the rank with the least. Near 0: devices waited for a host. This engine alone",
        "s",
    ),
    Column("throttle_reasons", _S, "NVML clock event reasons seen, comma separated; empty: none seen"),
    # provenance
    Column("launcher", _S, "local, slurm or rehearse"),
    Column("cluster", _S, "Cluster description used for prediction"),
    Column("backend", _S, "Kind of device that the cluster description names: cuda or cpu"),
    Column("hosts", pa.list_(_S), "Host names"),
    Column("nodes", pa.list_(_S), "Nodes on which the ranks ran, by the scheduler's names, those of the first first"),
    Column("scheduler_job", _S, "The scheduler's id of the allocation, as its queue shows it"),
    Column("pilot_id", _S, "Pilot that ran the attempt, or that recorded it after its pilot had died"),
    Column("device_name", _S, "Device as the driver names it"),
    Column("device_ids", pa.list_(_S), "Device UUIDs"),
    Column("git_commit", _S, "Commit of the code that ran"),
    Column("git_dirty", _B, "The checkout had uncommitted changes"),
    Column("ultrasweep_version", _S, "Version of this package"),
    Column("python_version", _S, "Python"),
    Column("torch_version", _S, "PyTorch"),
    Column("cuda_version", _S, "CUDA runtime of PyTorch"),
    Column("nccl_version", _S, "NCCL"),
    Column("triton_version", _S, "Triton"),
    Column("driver_version", _S, "NVIDIA driver"),
    Column(
        "nccl_environment",
        _S,
        "NCCL_* and TORCH_NCCL_* variables in force, as JSON by name; a value that differs between ranks is a list",
    ),
    Column("command", _S, "Command line of the sweep"),
    Column("log_dir", _S, "Folder of the attempt's logs, relative to the sweep's folder"),
    # what the attempt's nodes could do when their pilot started: the lowest of their devices
    Column("check_matmul_flops", _F, "Before the pilot's first point: rate of a large bf16 matrix product", "FLOP/s"),
    Column("check_copy_bytes_per_s", _F, "The same: bytes read and written by copies on the device", "B/s"),
    Column("check_all_reduce_inside_node_bytes_per_s", _F, "The same: bus bandwidth over all devices of a node", "B/s"),
    Column(
        "check_all_reduce_between_nodes_bytes_per_s",
        _F,
        "The same: bus bandwidth over one device of each of the pilot's nodes, all devices at once",
        "B/s",
    ),
    # one value a pipeline stage (times: of measured runs) or a step
    Column(
        "forward_by_stage_s",
        _L,
        "Median time of one micro-batch's forward through all chunks of a pipeline stage's ranks, waits excluded, mean "
        "over its ranks",
        "s",
    ),
    Column("backward_by_stage_s", _L, "The same of one micro-batch's backward", "s"),
    Column("forward_backward_by_stage_s", _L, "forward_backward_s of each pipeline stage's ranks, their mean", "s"),
    Column("pipeline_idle_by_stage_s", _L, "pipeline_idle_s of each pipeline stage's ranks, their mean", "s"),
    Column(
        "peak_allocated_by_step_bytes",
        pa.list_(_I),
        "Highest allocated memory of any rank in each step from the first, warm-up included",
        "B",
    ),
    Column("peak_reserved_by_step_bytes", pa.list_(_I), "The same of reserved memory", "B"),
)

STEP_COLUMNS: tuple[Column, ...] = (
    Column("attempt_id", _S, "Attempt this step belongs to", nullable=False),
    Column("experiment_id", _S, "Experiment this step belongs to", nullable=False),
    Column("measurement_version", _I, "Version of what the columns mean", nullable=False),
    Column("rank", _I, "Global rank", nullable=False),
    Column("dp_rank", _I, "Coordinate on the data-parallel axes"),
    Column("tp_rank", _I, "Coordinate on the tensor-parallel axis"),
    Column("pp_rank", _I, "Pipeline stage"),
    Column("step", _I, "Step from 0, warm-up included", nullable=False),
    Column("is_warmup", _B, "Not part of the timing", nullable=False),
    Column("step_time_s", _F, "Start of the step to the end of the optimizer on this rank", "s"),
    Column("forward_backward_s", _F, "Forward and backward, pipeline idle excluded", "s"),
    Column("reduce_exposed_s", _F, "Waiting for gradient reduction after the last backward", "s"),
    Column("optimizer_s", _F, "Clipping and optimizer", "s"),
    Column("pipeline_idle_s", _F, "Waiting for another pipeline stage", "s"),
    Column("tokens_per_s_per_gpu", _F, "tokens_per_step / step_time_s / world_size", "tokens/s"),
    Column("loss", _F, "Mean loss over the global batch", "nats/token"),
    Column("grad_norm", _F, "Norm of all gradients before clipping; null where they overflowed"),
    Column("loss_scale", _F, "By what the gradients were scaled; fp16 only"),
    Column("skipped", _B, "Gradients overflowed and nothing was updated; fp16 only"),
    Column("peak_allocated_bytes", _I, "Peak allocated memory in this step", "B"),
    Column("peak_reserved_bytes", _I, "Peak reserved memory in this step", "B"),
    Column("allocator_retries", _I, "Allocator retries in this step"),
    Column("sm_clock_mhz", _F, "Mean SM clock during a timed step", "MHz"),
)

LEDGER_COLUMNS: tuple[Column, ...] = (
    Column("sweep", _S, "Name of the sweep"),
    Column("grid", _S, "Grid that the point came from"),
    Column("point", _I, "Number of the point in the expanded sweep", nullable=False),
    Column("verdict", _S, "run, invalid, predicted_oom, cached or over_budget", nullable=False),
    Column("rule", _S, "Rule that an invalid point breaks; audit: predicted out of memory and run on purpose"),
    Column("detail", _S, "The verdict's numbers in words"),
    Column("predicted_peak_bytes", _I, "Closed-form peak of the highest stage", "B"),
    Column("limit_bytes", _I, "Device memory that training can have", "B"),
    *PREDICTED_TIME_COLUMNS,
    Column(
        "predicted_with", _S, "Probe and measured rows that the step time leans on; null: the engine's profile alone"
    ),
    Column("predicted_tokens_per_s_per_gpu", _F, "tokens_per_step / predicted_step_time_s / world_size", "tokens/s"),
    Column("expected_gpu_hours", _F, "Predicted run time times devices", "h"),
    Column("worst_gpu_hours", _F, "Deadline times devices", "h"),
    Column("cached_attempt", _S, "Finished attempt whose row is used instead of a run"),
    Column("cached_sweep", _S, "Sweep of cached_attempt: this one, or another one with plan.reuse=true"),
    *CONFIG_COLUMNS,
)


def _schema(table: str, columns: tuple[Column, ...]) -> pa.Schema:
    metadata = {"table": table, "schema_version": str(SCHEMA_VERSION), "measurement_version": str(MEASUREMENT_VERSION)}
    return pa.schema([column.field() for column in columns], metadata=metadata)


ATTEMPTS = _schema("attempts", ATTEMPT_COLUMNS)
STEPS = _schema("steps", STEP_COLUMNS)
LEDGER = _schema("ledger", LEDGER_COLUMNS)
