"""Names that other programs use are answered with ours."""

from __future__ import annotations

import dataclasses

import pytest

from sweep.grids.axes import AXES
from workloads.spec import other_names
from workloads.spec.checks import suggest
from workloads.spec.cluster import ClusterSpec, DeviceSpec
from workloads.spec.model_fields import OF_LAYERS
from workloads.spec.model_spec import MLASpec, ModelSpec, MoESpec

MODEL, CLUSTER = ([field.name for field in dataclasses.fields(kind)] for kind in (ModelSpec, ClusterSpec))
LAUNCHER = [
    "cpus_per_task",
    "gpus",
    "max_attempts",
    "max_nodes",
    "max_pilots",
    "mem",
    "partition",
    "sbatch",
    "time_min",
]


@pytest.mark.parametrize(
    ("known", "word", "said"),
    [
        # Hugging Face
        (MODEL, "num_hidden_layers", "did you mean 'num_layers'?"),
        (MODEL, "num_key_value_heads", "did you mean 'num_kv_heads'?"),
        (MODEL, "intermediate_size", "did you mean 'ffn_hidden_size'?"),
        (MODEL, "rms_norm_eps", "did you mean 'norm_eps'?"),
        (MODEL, "num_local_experts", "it is num_experts of moe: write moe: {num_experts: ...}"),
        (MODEL, "kv_lora_rank", "it is kv_lora_rank of mla: write mla: {kv_lora_rank: ...}"),
        (MODEL, "max_position_embeddings", "it is the axis seq_len of a grid: grid.axes.seq_len=..."),
        (MODEL, "hidden_act", "the feed-forward layer is SwiGLU; leave it out"),
        (AXES, "gradient_checkpointing", "did you mean 'recompute'?"),
        (AXES, "per_device_train_batch_size", "did you mean 'micro_batch_size'?"),
        # Megatron and torchtitan
        (MODEL, "num-query-groups", "did you mean 'num_kv_heads'?"),
        (AXES, "--tensor-model-parallel-size", "did you mean 'tp'?"),
        (AXES, "parallelism.data_parallel_shard_degree", "did you mean 'dp_shard'?"),
        (AXES, "num_layers_per_virtual_pipeline_stage", "give virtual_stages"),
        (MODEL, "n_kv_heads", "did you mean 'num_kv_heads'?"),
        # submitit and Slurm
        (LAUNCHER, "slurm_array_parallelism", "did you mean 'max_pilots'?"),
        (LAUNCHER, "slurm_additional_parameters", "did you mean 'sbatch'?"),
        (LAUNCHER, "timeout_min", "did you mean 'time_min'?"),
        (LAUNCHER, "slurm_partition", "did you mean 'partition'?"),
        (LAUNCHER, "mail_user", "it is mail_user of sbatch: write sbatch: {mail_user: ...}"),
        (LAUNCHER, "gpus_per_node", "it is an option of the cluster: cluster.devices_per_node=..."),
        (LAUNCHER, "tasks_per_node", "one agent starts on each node; cluster.devices_per_node gives its GPUs"),
        (CLUSTER, "gpus_per_node", "did you mean 'devices_per_node'?"),
    ],
)
def test_names_of_other_programs(known: list[str], word: str, said: str) -> None:
    assert said in suggest(word, known).partition(" known:")[0]


def test_every_name_of_ours_exists() -> None:
    parts = {"moe": MoESpec, "mla": MLASpec, "device": DeviceSpec}
    for place in other_names._SAME:
        kind, *sections, last = place.split(".") if "." in place else ("", place)
        if kind == "axes":
            assert last in AXES, place
        elif kind in ("model", "cluster"):
            spec = parts[sections[0]] if sections else {"model": ModelSpec, "cluster": ClusterSpec}[kind]
            known = {field.name for field in dataclasses.fields(spec)}
            assert last in known or (kind == "model" and not sections and last in OF_LAYERS), place


def test_a_name_that_is_known_nowhere_gets_the_list_alone() -> None:
    assert suggest("zzz", ["tp", "pp"]) == "; known: pp, tp"
