"""Names that other programs use for fields and options of this one, to answer a user who writes them. No torch here.

The programs are Hugging Face (``config.json``, Trainer), Megatron, torchtitan, nanotron, DeepSpeed, torchrun, submitit
and Slurm. Names are compared without case, ``_``, ``-``, submitit's prefix ``slurm_``, and sections (``parallelism.``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

_SAME: Mapping[str, str] = {
    "model.num_layers": "num_hidden_layers n_layers n_layer",
    "model.hidden_size": "d_model dim hidden_dim n_embd embedding_dim",
    "model.num_heads": "num_attention_heads n_heads n_head",
    "model.num_kv_heads": "num_key_value_heads num_query_groups n_kv_heads multi_query_group_num",
    "model.head_dim": "kv_channels attention_head_dim d_head d_kv",
    "model.ffn_hidden_size": "intermediate_size ffn_dim inter_dim n_inner d_ff",
    "model.vocab_size": "padded_vocab_size n_vocab",
    "model.mtp_modules": "num_nextn_predict_layers mtp_num_layers mtp_num_hidden_layers num_mtp_modules",
    "model.mtp_loss_weight": "mtp_loss_scaling_factor",
    "model.tie_embeddings": "tie_word_embeddings enable_weight_tying share_embeddings_and_output_weights",
    "model.qk_norm": "qk_layernorm use_qk_norm",
    "model.rope_theta": "rotary_base rope_base rotary_emb_base",
    "model.norm_eps": "rms_norm_eps norm_epsilon layernorm_epsilon layer_norm_eps layer_norm_epsilon",
    "model.moe": "moe_args moe_config",
    "model.moe.num_experts": "num_experts num_local_experts n_routed_experts num_moe_experts moe_num_experts",
    "model.moe.experts_per_token": "experts_per_token num_experts_per_tok num_experts_per_token moe_router_topk top_k "
    "moe_top_k n_activated_experts",
    "model.moe.expert_hidden_size": "expert_hidden_size moe_intermediate_size moe_ffn_hidden_size moe_inter_dim",
    "model.moe.num_shared_experts": "num_shared_experts n_shared_experts",
    "model.moe.num_dense_layers": "num_dense_layers first_k_dense_replace n_dense_layers",
    "model.moe.gate": "gate scoring_func score_func moe_router_score_function",
    "model.moe.normalize_weights": "normalize_weights norm_topk_prob route_norm",
    "model.moe.weight_scale": "weight_scale routed_scaling_factor route_scale moe_router_topk_scaling_factor",
    "model.moe.balance": "balance moe_router_load_balancing_type",
    "model.moe.balance_coefficient": "balance_coefficient router_aux_loss_coef aux_loss_alpha moe_aux_loss_coeff "
    "load_balance_coeff moe_router_bias_update_rate",
    "model.mla": "multi_latent_attention",
    "model.mla.kv_lora_rank": "kv_lora_rank",
    "model.mla.q_lora_rank": "q_lora_rank",
    "model.mla.qk_nope_head_dim": "qk_nope_head_dim qk_head_dim",
    "model.mla.qk_rope_head_dim": "qk_rope_head_dim qk_pos_emb_head_dim",
    "model.mla.v_head_dim": "v_head_dim",
    "axes.dp": "data_parallel_size data_parallel_degree dp_size dp_degree",
    "axes.dp_replicate": "data_parallel_replicate_degree num_distributed_optimizer_instances",
    "axes.dp_shard": "data_parallel_shard_degree fsdp fsdp_size fsdp_degree",
    "axes.tp": "tensor_parallel_degree tensor_model_parallel_size tensor_parallel_size tp_size tp_degree autotp_size",
    "axes.pp": "pipeline_parallel_degree pipeline_model_parallel_size pipeline_parallel_size pp_size pp_degree",
    "axes.cp": "context_parallel_degree context_parallel_size cp_size cp_degree sequence_parallel_size",
    "axes.ep": "expert_parallel_degree expert_model_parallel_size expert_parallel_size ep_size ep_degree",
    "axes.etp": "expert_tensor_parallel_degree expert_tensor_parallel_size",
    "axes.world_size": "world_size gpus num_gpus n_gpus ngpus num_devices num_processes",
    "axes.micro_batch_size": "per_device_train_batch_size local_batch_size train_micro_batch_size_per_gpu mbs "
    "pipeline_parallel_microbatch_size",
    "axes.global_batch_size": "train_batch_size gbs",
    "axes.num_microbatches": "gradient_accumulation_steps batch_accumulation_per_replica num_micro_batches",
    "axes.seq_len": "seq_length sequence_length max_seq_len max_seq_length max_position_embeddings model_max_length "
    "n_positions n_ctx context_length",
    "axes.zero_stage": "zero_optimization zero use_distributed_optimizer data_parallel_sharding_strategy "
    "fsdp_reshard_after_forward reshard_after_forward sharding_strategy fsdp_sharding_strategy",
    "axes.recompute": "activation_checkpoint activation_checkpointing gradient_checkpointing recompute_granularity "
    "recompute_layer recompute_modules",
    "axes.recompute_every": "selective_ac_option activation_checkpoint_interval",
    "axes.activation_offload": "fine_grained_activation_offloading offload_modules cpu_offloading save_on_cpu",
    "axes.pp_schedule": "pipeline_parallel_schedule pp_engine pipeline_schedule",
    "axes.virtual_stages": "virtual_pipeline_model_parallel_size",
    "axes.pp_split": "account_for_loss_in_pipeline_split account_for_embedding_in_pipeline_split",
    "axes.pp_stages": "pipeline_model_parallel_layout module_fqns_per_model_part",
    "axes.pad_vocab_to": "make_vocab_size_divisible_by",
    "axes.gradient_accumulation_fusion": "fuse_wgrad_accumulation no_gradient_accumulation_fusion",
    "axes.grad_reduce": "grad_reduce_in_fp32 mixed_precision_reduce reduce_dtype accumulate_allreduce_grads_in_fp32",
    "axes.optimizer_states": "exp_avg_dtype exp_avg_sq_dtype use_precision_aware_optimizer state_dtype",
    "axes.master_weights": "main_params_dtype master_weights_dtype bf16_master_weights_and_grads",
    "axes.optimizer_offload": "optimizer_cpu_offload optimizer_offload_fraction offload_optimizer cpu_offload",
    "axes.cp_kind": "cp_comm_type context_parallel_rotate_method",
    "axes.sequence_parallel": "enable_sequence_parallel tp_mode",
    "axes.precision": "torch_dtype dtype params_dtype mixed_precision mixed_precision_param fp8_format fp8_recipe "
    "bf16 fp16",
    "axes.attention": "attn_implementation attention_backend use_flash_attn",
    "axes.compile": "torch_compile enable_compile",
    "axes.routing": "moe_router_force_load_balancing moe_force_load_balance",
    "axes.capacity_factor": "moe_expert_capacity_factor",
    "cluster.devices_per_node": "gpus_per_node num_gpus_per_node nproc_per_node",
    "cluster.nodes": "num_nodes nnodes n_nodes",
    "cluster.device": "accelerator",
    "cluster.device.memory_bytes": "vram gpu_memory",
    "cluster.intra_node": "nvlink",
    "cluster.inter_node": "infiniband",
    "cluster.price_per_device_hour": "price_per_gpu_hour gpu_hour_price",
    "launcher.time_min": "time timeout_min time_limit walltime",
    "launcher.max_pilots": "array_parallelism",
    "launcher.sbatch": "additional_parameters sbatch_args sbatch_options",
    "launcher.partition": "queue",
    "launcher.mem": "mem_gb memory",
    "launcher.signal_delay_s": "signal",
    "launcher.gpus": "gres gpus_per_task",
    "launcher.setup": "local_setup",
    "launcher.srun_args": "srun_options",
    "launcher.environment": "env env_vars environment_variables export",
    "launcher.max_attempts": "max_num_timeout",
    "launcher.collective_timeout_s": "nccl_timeout train_timeout_seconds distributed_timeout_minutes",
    "launcher.exclude": "exclude_nodes",
    "measure.warmup_steps": "warmup_iters",
    "measure.timed_steps": "steps max_steps train_iters train_steps training_steps",
    "measure.profile": "enable_profiling",
    "results_dir": "output_dir dump_folder",
    # values
    "bf16": "bfloat16",
    "fp16": "float16 half",
    "fp32": "float32",
    "fp64": "float64 double",
    "flash": "flash_attention flash_attention_2",
    "auto": "sdpa",
    "math": "eager",
    "zero_bubble_v": "ZBVZeroBubble",
    "ulysses": "a2a alltoall",
    "ring": "p2p",
}
"""Other programs' names by ours. A name of ours is a place (kind of file, section, field), or a value."""

_SBATCH = (
    "acctg-freq batch bb bbf begin container container-id contiguous core-spec cores-per-socket cpu-freq "
    "cpus-per-gpu deadline delay-boot dependency distribution export-file extra extra-node-info get-user-env "
    "gid gpu-bind gpu-freq gpus-per-socket gres-flags hint hold input kill-on-invalid-dep licenses mail-type "
    "mail-user mcs-label mem-bind mem-per-cpu mem-per-gpu mincpus network no-kill ntasks-per-core "
    "ntasks-per-gpu ntasks-per-socket overcommit oversubscribe power prefer priority profile propagate quiet "
    "reboot resv-ports segment sockets-per-node spread-job stepmgr switches thread-spec threads-per-core tmp "
    "tres-bind tres-per-task uid use-min-nodes verbose wait-all-nodes wckey x11"
)
"""Long parameters of sbatch without an option of the launcher; they go into its option ``sbatch``."""

_ABSENT: Mapping[str, str] = {
    "the feed-forward layer is SwiGLU; leave it out": "hidden_act hidden_activation activation_function swiglu",
    "projections have no biases; leave it out": "attention_bias mlp_bias add_bias_linear add_qkv_bias "
    "disable_bias_linear",
    "there is no dropout; leave it out": "attention_dropout hidden_dropout attn_pdrop resid_pdrop embd_pdrop",
    "it does not change a step's time or memory; leave it out": "architectures model_type "
    "transformers_version  auto_map initializer_range init_method_std bos_token_id eos_token_id "
    "pad_token_id use_cache pretraining_tp rope_scaling  rope_parameters output_attentions "
    "original_seq_len",
    "every layer attends to the whole sequence; leave it out": "sliding_window use_sliding_window max_window_layers "
    "layer_types window_size",
    "give the resulting width as ffn_hidden_size": "multiple_of ffn_dim_multiplier",
    "blocks have RMSNorm and rotary embeddings; leave it out": "normalization position_embedding_type",
    "give num_kv_heads, fewer than num_heads": "group_query_attention",
    "give the fields of the experts as moe": "moe_enabled",
    "give tie_embeddings, its opposite": "untie_embeddings_and_output_weights",
    "give num_shared_experts in moe: each is as wide as a routed expert": ""
    "moe_shared_expert_intermediate_size shared_expert_intermediate_size",
    "give num_dense_layers in moe, the number of first layers without experts": "moe_layer_freq decoder_sparse_step "
    "mlp_only_layers interleave_moe_layer_step",
    "experts are chosen from all, without groups; leave it out": "n_group topk_group moe_router_num_groups "
    "moe_router_group_topk topk_method num_expert_groups num_limited_groups",
    "give virtual_stages, the number of model chunks of a pipeline rank": "num_layers_per_virtual_pipeline_stage "
    "pipeline_parallel_layers_per_stage",
    "give recompute=full:3 for 3 layers of a stage, or recompute_every": "recompute_method recompute_num_layers",
    "every run has the same optimizer and rate; leave it out": "lr learning_rate weight_decay adam_beta1 adam_beta2 "
    "optimizer",
}
"""Names without a counterpart, by what to do instead."""

_ABSENT_OF_JOBS: Mapping[str, str] = {
    "one agent starts on each node; cluster.devices_per_node gives its GPUs": "ntasks ntasks_per_node tasks_per_node "
    "use_srun",
    "the number of nodes of a job follows from its points; max_nodes limits all jobs": "nodes",
    "name=NAME names the sweep and its jobs": "job_name name",
    "results_dir=DIR holds the sweeps": "folder",
    "nothing runs after a pilot's points; leave it out": "teardown",
    "the launcher sets it; leave it out": "comment map_count",
    "the output of jobs is in the sweep's folder slurm/": "output error stderr_to_stdout",
}
"""The same for options of a launcher of jobs."""


OF_SUBMITIT = ("slurm_", "timeout_min", "mem_gb")
"""Beginnings of submitit's names that a launcher of Slurm jobs takes for its own (`launchers.slurm.submitit_names`)."""


def _key(name: str) -> str:
    """A name as it is compared: its last part, in small letters and digits."""
    last = name.rpartition(".")[2].lower().lstrip("-").removeprefix("slurm_")
    return re.sub(r"[^a-z0-9]", "", last)


def _by_key() -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for ours, theirs in _SAME.items():
        for name in theirs.split():
            places.setdefault(_key(name), []).append(ours)
    for name in _SBATCH.split():
        places.setdefault(_key(name), []).append(f"launcher.sbatch.{name.replace('-', '_')}")
    return places


_PLACES = _by_key()
_REASONS, _REASONS_OF_JOBS = (
    {_key(name): reason for reason, names in table.items() for name in names.split()}
    for table in (_ABSENT, _ABSENT_OF_JOBS)
)


def same_here(name: str, known: Collection[str]) -> str | None:
    """The one of the ``known`` names that means what ``name`` means elsewhere; None if there is none."""
    for place in _PLACES.get(_key(name), ()):
        if (last := place.rpartition(".")[2]) in known:
            return last
    return None


def inside(name: str, known: Collection[str]) -> str | None:
    """The place of ``name`` inside one of the ``known`` sections, such as ``launcher.sbatch.mail_user``."""
    for place in _PLACES.get(_key(name), ()):
        sections = place.split(".")[1:-1]
        if sections and sections[-1] in known:
            return place
    return None


def what_to_write(name: str, known: Collection[str], value: str = "...") -> str:
    """What a user who wrote ``name`` has to write elsewhere, or why nothing; empty if the name is not known.

    ``known``: the names that the user could have written instead. ``value``: what the user wrote for it.
    """
    if (place := inside(name, known)) is not None:
        *_, section, last = place.split(".")
        return f"it is {last} of {section}: write {section}: {{{last}: {value}}}"
    reasons = {**_REASONS, **_REASONS_OF_JOBS} if "sbatch" in known else _REASONS
    if (reason := reasons.get(_key(name))) is not None:
        return reason
    return next((_describe(place, value) for place in _PLACES.get(_key(name), ()) if "." in place), "")


def _describe(place: str, value: str) -> str:
    kind, _, rest = place.partition(".")
    if kind == "axes":
        return f"it is the axis {rest} of a grid: grid.axes.{rest}={value}"
    if kind == "model":
        return f"it is {rest} of a model file"
    return f"it is an option of the {kind}: {place}={value}"
