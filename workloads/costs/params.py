"""Parameter counts of a model, of its layers and of what one pipeline rank holds. From the shape alone.

Counts are split by how parallelism treats them: ``split`` over tensor-parallel ranks, ``replicated`` on each of them
(norms, router, latent down-projections), ``experts`` over expert-parallel and tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from workloads.costs.schedule import V_SHAPED
from workloads.experiment import Experiment, ModelSpec
from workloads.mesh import layers_of_stage


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of parameters by how they are divided over ranks (see above)."""

    split: int = 0
    replicated: int = 0
    experts: int = 0

    @property
    def total(self) -> int:
        return self.split + self.replicated + self.experts

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.split + other.split, self.replicated + other.replicated, self.experts + other.experts)

    def __mul__(self, factor: int) -> Counts:
        return Counts(self.split * factor, self.replicated * factor, self.experts * factor)


@dataclass(frozen=True, slots=True)
class StageParams:
    """What one pipeline rank holds. Counts are over the whole tensor-parallel group."""

    dense_layers: int
    moe_layers: int
    layers: Counts
    embedding: int
    """Input embedding; 0 where this rank has none."""
    head: int
    """Output projection of its own; 0 where this rank has none or where it is the tied embedding beside it."""
    has_head: bool
    final_norm: int

    @property
    def num_layers(self) -> int:
        return self.dense_layers + self.moe_layers

    @property
    def total(self) -> int:
        return self.layers.total + self.embedding + self.head + self.final_norm


@lru_cache(maxsize=256)
def attention_params(model: ModelSpec) -> Counts:
    """Projections of one attention layer, and its query/key norms."""
    h = model.hidden_size
    mla = model.mla
    if mla is None:
        q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        return Counts(split=h * q + 2 * h * kv + q * h, replicated=_norms_in_attention(model))
    # DeepSeek-V2, arXiv:2405.04434, section 2.1: W_UQ, W_UK, W_UV and W_O have heads; W_DQ, W_DKV and W_KR do not.
    qk = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    up = mla.q_lora_rank * qk + mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
    down = h * (mla.q_lora_rank + mla.kv_lora_rank + mla.qk_rope_head_dim)
    return Counts(split=model.num_heads * (up + mla.v_head_dim * h), replicated=down + _norms_in_attention(model))


@lru_cache(maxsize=256)
def dense_layer(model: ModelSpec) -> Counts:
    """One block with a dense feed-forward layer: attention, SwiGLU (gate, up, down) and two norms."""
    feed_forward = Counts(split=3 * model.hidden_size * model.ffn_hidden_size, replicated=2 * model.hidden_size)
    return attention_params(model) + feed_forward


@lru_cache(maxsize=256)
def moe_layer(model: ModelSpec) -> Counts:
    """One block with routed experts: attention, router, experts, shared experts and two norms."""
    moe = model.moe
    assert moe is not None
    expert = 3 * model.hidden_size * moe.expert_hidden_size
    return attention_params(model) + Counts(
        split=moe.num_shared_experts * expert,
        replicated=model.hidden_size * moe.num_experts + 2 * model.hidden_size,
        experts=moe.num_experts * expert,
    )


def num_dense_layers(model: ModelSpec) -> int:
    """Layers without routed experts."""
    return model.num_layers if model.moe is None else model.moe.num_dense_layers


@lru_cache(maxsize=256)
def num_params(model: ModelSpec) -> int:
    """All parameters, tied embeddings counted once."""
    return sum(stage.total for stage in stages(model, 1))


@lru_cache(maxsize=256)
def matmul_params(model: ModelSpec) -> int:
    """Parameters that multiply one token in matrix products: with the output head, without input embedding and norms.

    Of routed experts only the ``experts_per_token`` that a token visits count.
    """
    dense = num_dense_layers(model)
    total = dense * matmul_of_layer(model, routed=False) + model.vocab_size * model.hidden_size
    if model.moe is not None:
        total += (model.num_layers - dense) * matmul_of_layer(model, routed=True)
    return total


def active_params(model: ModelSpec) -> int:
    """Parameters of one token's path, as model cards count them: all but the experts that it does not visit."""
    total = num_params(model)
    if model.moe is None:
        return total
    idle = model.moe.num_experts - model.moe.experts_per_token
    expert = 3 * model.hidden_size * model.moe.expert_hidden_size
    return total - (model.num_layers - num_dense_layers(model)) * idle * expert


def playbook_params(model: ModelSpec, pp: int = 1) -> int:
    """Parameters as the Ultra-Scale Playbook counts them: tied embeddings twice when the pipeline splits them.

    Of a mixture of experts only active parameters count (the playbook has none).
    """
    copies = 2 if model.tie_embeddings and pp > 1 else 1
    return active_params(model) + (copies - 1) * model.vocab_size * model.hidden_size


@lru_cache(maxsize=256)
def matmul_of_layer(model: ModelSpec, *, routed: bool) -> int:
    """Parameters of one layer that take part in one token's matrix products: everything but norms and idle experts."""
    attention = attention_params(model).total - _norms_in_attention(model)
    if not routed:
        return attention + 3 * model.hidden_size * model.ffn_hidden_size
    moe = model.moe
    assert moe is not None
    expert = 3 * model.hidden_size * moe.expert_hidden_size
    router = model.hidden_size * moe.num_experts
    return attention + (moe.experts_per_token + moe.num_shared_experts) * expert + router


@lru_cache(maxsize=4096)
def stages(model: ModelSpec, pp: int, virtual_stages: int = 1, v_shaped: bool = False) -> tuple[StageParams, ...]:
    """What each pipeline rank holds.

    With ``virtual_stages`` v > 1 the model is cut into ``v * pp`` chunks; rank s holds chunks ``s, s + pp, ...``, or
    ``s`` and ``2 * pp - 1 - s`` in a V. A tied embedding that ends up on two ranks is held, and trained, by both.
    """
    result = []
    dense_total = num_dense_layers(model)
    vocabulary = model.vocab_size * model.hidden_size
    for stage in range(pp):
        chunks = [stage, 2 * pp - 1 - stage] if v_shaped else [stage + turn * pp for turn in range(virtual_stages)]
        count = 2 * pp if v_shaped else virtual_stages * pp
        layers = [layer for chunk in chunks for layer in layers_of_stage(model.num_layers, count, chunk)]
        dense = sum(layer < dense_total for layer in layers)
        held = dense_layer(model) * dense
        if len(layers) > dense:
            held = held + moe_layer(model) * (len(layers) - dense)
        has_embedding, has_head = 0 in chunks, count - 1 in chunks
        result.append(
            StageParams(
                dense_layers=dense,
                moe_layers=len(layers) - dense,
                layers=held,
                embedding=vocabulary if has_embedding else 0,
                head=vocabulary if has_head and not (has_embedding and model.tie_embeddings) else 0,
                has_head=has_head,
                final_norm=model.hidden_size if has_head else 0,
            )
        )
    return tuple(result)


def stage_params(model: ModelSpec, pp: int, stage: int) -> StageParams:
    """What pipeline rank ``stage`` of ``pp`` holds, without virtual stages."""
    return stages(model, pp)[stage]


def experiment_stages(experiment: Experiment) -> tuple[StageParams, ...]:
    """What each pipeline rank of an experiment holds."""
    return stages(experiment.model, experiment.pp, experiment.virtual_stages, experiment.pp_schedule in V_SHAPED)


def local_params(experiment: Experiment, counts: Counts) -> tuple[int, int]:
    """(parameters, expert parameters) that one rank of the tensor- and expert-parallel group computes with."""
    dense = counts.split // experiment.tp + counts.replicated
    return dense, counts.experts // (experiment.ep * experiment.tp)


def _norms_in_attention(model: ModelSpec) -> int:
    if model.mla is not None:
        return model.mla.q_lora_rank + model.mla.kv_lora_rank
    return 2 * model.head_dim if model.qk_norm else 0
