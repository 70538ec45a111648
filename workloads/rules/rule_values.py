"""Values that rules on a layout may read, by name: fields of the experiment, its model and its cluster."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from operator import attrgetter
from typing import Any

from workloads.costs.shape.held_model import copies_in_layers
from workloads.costs.shape.partition import experiment_layers
from workloads.rules.engine_kinds import lacking_kinds
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.recurrent import Recurrent
from workloads.spec.layer_kinds.spans import Chunk, Window
from workloads.spec.model_layers import layers_of, numbers_of, splits_of
from workloads.spec.model_spec import ModelSpec
from workloads.spec.pipeline_stages import written_stages
from workloads.spec.recomputation import is_by_stage, stage_words
from workloads.spec.recurrent_kernels import key_sizes
from workloads.spec.recurrent_weights import columns as recurrent_columns

_OF_EXPERIMENT = (
    *("dp_replicate", "dp_shard", "dp", "tp", "cp", "pp", "ep", "world_size", "micro_batch_size", "global_batch_size"),
    *("num_microbatches", "seq_len", "zero_stage", "pp_schedule", "virtual_stages", "sequence_parallel", "precision"),
    *(
        "attention",
        "cp_kind",
        "compile",
        "recompute",
        "recompute_every",
        "activation_offload",
        "engine_version",
        "etp",
        "routing",
        "routing_imbalance",
        "engine",
        "pp_stages",
        "pad_vocab_to",
        "cuda_graph",
        "gradient_accumulation_fusion",
        "grad_reduce",
        "optimizer",
        "optimizer_states",
        "master_weights",
        "optimizer_offload",
        "documents",
        "recurrence",
    ),
)
_OF_MODEL = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
_OF_PARTS = (
    *(
        "model",
        "has_experts",
        "has_capacity",
        "has_latent_attention",
        "num_experts",
        "experts_per_token",
        "expert_hidden_size",
        "biased_outputs",  # of experts
    ),
    *("ffn_hidden_size", "shared_hidden_size", "query_size", "rope_size", "value_size", "query_latent", "latent"),
    *(
        "recurrent_heads",
        "recurrent_key",  # numbers of the largest, of kinds that have kernels
        "has_layer_list",
        "copies_in_layers",
        "local_attention",
        "special_attention",
        "kind_columns",
        "longest_window",
    ),
    *("stages_written", "layers_written", "modules_written", "empty_stage"),  # of pp_stages; 0 without it
    "modules_elsewhere",
    "mtp_modules",
    "numbers_describe",  # whether they do, apart from multi-token modules
    *("recompute_by_stage", "recompute_stages", "recompute_beyond", "recompute_one_by_one"),
)
CLUSTER_NAMES = ("cluster", "backend", "device", "devices_per_node", "joined_devices", "precisions")
_get_experiment, _get_model = attrgetter(*_OF_EXPERIMENT), attrgetter(*_OF_MODEL)
LAYOUT_NAMES = (*_OF_EXPERIMENT, *_OF_MODEL, *_OF_PARTS)


def layout_values(experiment: Experiment) -> tuple[Any, ...]:
    """Values that a rule of scope ``layout`` may read, in the order of `LAYOUT_NAMES`."""
    model = experiment.model
    moe, mla = model.moe, model.mla
    parts = (
        model.name,
        moe is not None,
        experiment.capacity_factor is not None,
        mla is not None,
        moe.num_experts if moe is not None else 0,
        moe.experts_per_token if moe is not None else 0,
        moe.expert_hidden_size if moe is not None else 0,
        _biased_outputs(model),
        *_columns(model),
        *((mla.qk_head_dim, mla.qk_rope_head_dim, mla.v_head_dim) if mla is not None else (model.head_dim,) * 3),
        *((mla.q_lora_rank, mla.kv_lora_rank) if mla is not None else (0, 0)),
        splits_of(model).recurrent_heads if model.layers is not None else 0,
        max(key_sizes(model), default=0),
        model.layers is not None,
        copies_in_layers(model, experiment.tp),
        *_special(model, experiment.tp),
        *_written(experiment.pp_stages, model),
        model.mtp_modules,
        numbers_of(model) is not None,
        *recompute_values(experiment),
    )
    return (*_get_experiment(experiment), *_get_model(model), *parts)


@lru_cache(maxsize=256)
def _special(model: ModelSpec, tp: int) -> tuple[bool, bool, int, int]:
    """(whether some layer has a window or a cap of scores, for which there is one kernel; whether some layer has chunks
    or a cap, which only attention to whole sequences has; greatest common divisor of the columns of projections, of
    outputs and of latents of experts that one rank has; tokens of the longest window). Of models that the engine runs
    by kind; else all false."""
    if model.layers is None or lacking_kinds(model):
        return False, False, 0, 0
    mixers = [kind.mixer for kind in model.layers.kinds if isinstance(kind.mixer, Attention)]
    windows = [one.span.size for one in mixers if isinstance(one.span, Window)]
    capped = any(one.soft_cap for one in mixers)
    chunked = any(isinstance(one.span, Chunk) for one in mixers)
    columns = 0
    for one in mixers:
        outputs = one.heads * one.value_dim // tp
        gates = {"none": 0, "head": one.heads // tp, "element": outputs}[one.gate]
        keys = max(1, one.kv_heads // tp) * (one.head_dim + (0 if one.shared_kv else one.value_dim))
        columns = gcd(columns, one.heads // tp * one.head_dim + keys + gates, outputs)
    for kind in model.layers.kinds:
        if isinstance(kind.mixer, Recurrent):
            columns = gcd(columns, *recurrent_columns(model, kind.mixer, tp))
        if isinstance(kind.mlp, RoutedMLP):
            columns = gcd(columns, kind.mlp.latent)
    return capped or len(windows) > 0, capped or chunked, columns, max(windows, default=0)


@lru_cache(maxsize=256)
def _biased_outputs(model: ModelSpec) -> int:
    """Outputs of experts with biases, which are divided as their columns are; 0 if there are none."""
    mlps = [kind.mlp for kind in layers_of(model).kinds if isinstance(kind.mlp, RoutedMLP)]
    return next((mlp.latent or model.hidden_size for mlp in mlps if mlp.expert.bias), 0)


def _columns(model: ModelSpec) -> tuple[int, int]:
    """(columns of dense layers, of all shared experts) that tensor parallelism must divide; 0 if there are none."""
    if model.layers is not None:
        splits = splits_of(model)
        return splits.columns, splits.shared_columns
    shared = model.moe.num_shared_experts * model.moe.expert_hidden_size if model.moe is not None else 0
    return model.ffn_hidden_size if model.has_dense_layers else 0, shared


def _written(stages: str | None, model: ModelSpec) -> tuple[int, int, int, int, int]:
    """(stages, layers, modules that the model lacks, first empty stage, modules before the last stage or missing in it)
    of stages that are written out. A model that has multi-token modules has them among its layers."""
    if stages is None:
        return 0, 0, 0, 0, 0
    written, modules = written_stages(stages), model.mtp_modules
    if modules:
        all_modules, at_end = written.multi_token_modules, written.stages[-1].count("m")
        elsewhere = all_modules - at_end + abs(modules - at_end)
        return len(written.stages), sum(written.with_modules), 0, written.empty_stage, elsewhere
    return len(written.stages), written.num_layers, written.multi_token_modules, written.empty_stage, 0


def recompute_values(e: Experiment) -> tuple[bool, int, int, bool]:
    """(whether ``recompute`` is more than one word for all layers; number of its words of stages, 0 with one word for
    all of them; the first stage, from 1, whose layers are no more than its word limits to, of one word that of all
    stages, else 0; whether some word recomputes operations one by one, and not all cheap ones alone)."""
    if not is_by_stage(e.recompute):
        return False, 0, 0, e.recompute not in ("none", "selective", "full")
    words = stage_words(e.recompute)
    one_by_one = any(one.word not in ("none", "selective", "full") for one in words)
    stages = len(words) if "/" in e.recompute or "*" in e.recompute else 0
    if stages not in (0, e.num_stages) or e.num_stages > e.model.num_layers:
        return True, stages, 0, one_by_one
    sizes = [len(layers) for layers in experiment_layers(e)]
    if not stages:
        return True, 0, int(words[0].first >= max(sizes)), one_by_one
    beyond = [stage + 1 for stage, one in enumerate(words) if one.first > 0 and one.first >= sizes[stage]]
    return True, stages, beyond[0] if beyond else 0, one_by_one


def cluster_values(cluster: ClusterSpec) -> tuple[Any, ...]:
    """Values that describe the cluster, in the order of `CLUSTER_NAMES`."""
    device, joined = cluster.device, cluster.joined_devices or 0  # 0: not known
    named = (cluster.name, cluster.backend, device.name, cluster.devices_per_node, joined)
    return (*named, list(device.peak_flops))
