"""FLOPs of training on one token, by several named conventions. A multiply and an add are two FLOPs.

Symbols: T = seq_len, L layers, H query heads, Q head size, N parameters. Forward is ``2 N`` and backward ``4 N`` per
token; attention scores and values are ``4 L H Q T`` forward and twice that backward (PaLM, arXiv:2204.02311, appendix
B). Norms, RoPE, SwiGLU and softmax are not counted, as is usual in the literature.
"""

from __future__ import annotations

from typing import Literal, get_args

from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.params import (
    latent_up,
    latent_up_params,
    matmul_of,
    matmul_of_layer,
    matmul_params,
    num_dense_layers,
    playbook_params,
    whole_model,
)
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec

FlopsConvention = Literal["palm", "causal", "playbook"]


def flops_per_token(model: ModelSpec, seq_len: int, convention: FlopsConvention, *, pp: int = 1) -> float:
    """Model FLOPs to train on one token: forward and backward, recomputation not counted.

    palm      ``6 N_matmul + 12 L H Q T``: every score is counted (PaLM, arXiv:2204.02311, appendix B).
    causal    ``6 N_matmul + 6 L H Q T``: a causal mask needs half of the scores.
    playbook  ``6 N_all + 12 L h T``, h the hidden size: the Ultra-Scale Playbook's, whose N_all includes the input
              embedding and counts tied embeddings twice when ``pp > 1``.

    With latent attention ``2 Q`` is replaced by the query/key size plus the value size. In a model with a list of
    layers each layer counts by its kind; palm counts every score of attention to all earlier tokens, and in other
    kinds those that are needed. Raises ValueError for another convention.
    """
    if convention == "playbook":
        return 6.0 * playbook_params(model, pp) + 12.0 * model.num_layers * model.hidden_size * seq_len
    if convention not in get_args(FlopsConvention):
        raise ValueError(f"convention={convention!r}; it may be one of {', '.join(get_args(FlopsConvention))}")
    if model.layers is not None:
        unmasked = sum(
            layers * kind.mixing(seq_len).training * (seq_len - 1) / (seq_len + 1)
            for kind, layers in whole_model(model).distinct()
            if kind.sees_all
        )
        return whole_model(model).training_flops(seq_len) + (unmasked if convention == "palm" else 0.0)
    share = 1.0 if convention == "palm" else 0.5
    forward = model.num_layers * attention_forward_flops(model, seq_len)
    return 6.0 * matmul_params(model) + 3.0 * share * forward


def attention_forward_flops(model: ModelSpec, seq_len: int) -> float:
    """Forward FLOPs of one layer's scores and values, one token against ``seq_len`` keys, no mask: ``4 H Q T``."""
    qk, v = head_sizes(model)
    return 2.0 * model.num_heads * (qk + v) * seq_len


def head_sizes(model: ModelSpec) -> tuple[int, int]:
    """(query/key size, value size) of one head."""
    if model.mla is None:
        return model.head_dim, model.head_dim
    return model.mla.qk_head_dim, model.mla.v_head_dim


def hardware_flops_per_token(experiment: Experiment) -> float:
    """FLOPs that devices execute for one token: causal attention halved, recomputation counted.

    Full recomputation repeats the forward of every recomputed block up to the last tensor that backward needs: of a
    dense block all but the down projection, of one with routed experts everything. Selective recomputation repeats no
    matrix product, except that ``mla_up`` repeats those of latents and ``experts`` two of three of routed experts.
    GPipe keeps no gradients of the head between forward and backward, so its logits are computed twice. The scores that
    a flash attention kernel recomputes in its backward are not counted: every run has them, and they replace memory
    traffic.
    """
    model = as_held(experiment).model
    total = flops_per_token(model, experiment.seq_len, "causal")
    head = model.vocab_size * model.hidden_size
    if model.layers is not None:
        total += sum(_repeated_of_kind(experiment, model.layers.kinds[at]) for at in recomputed_layers(experiment))
    elif experiment.recompute == "full":
        layers, of_dense = _recomputed_layers(experiment)
        down = model.ffn_hidden_size * model.hidden_size
        repeated_params = of_dense * (matmul_of_layer(model, routed=False) - down)
        if model.moe is not None:
            repeated_params += (layers - of_dense) * matmul_of_layer(model, routed=True)
        total += 2.0 * repeated_params + 0.5 * layers * attention_forward_flops(model, experiment.seq_len)
    if "experts" in experiment.recomputed_operations and model.moe is not None and model.layers is None:
        layers, of_dense = _recomputed_layers(experiment)
        gate_up = 2 * model.hidden_size * model.moe.expert_hidden_size
        total += 2.0 * (layers - of_dense) * model.moe.experts_per_token * gate_up
    if "mla_up" in experiment.recomputed_operations and model.layers is None:
        total += 2.0 * -(-model.num_layers // experiment.recompute_every) * latent_up_params(model)
    if experiment.pp_schedule == "gpipe":
        total += 2.0 * head
    return total


def recomputed_layers(e: Experiment) -> tuple[int, ...]:
    """Kinds of the layers that the recompute policy covers."""
    return layers_of(e.model).order[:: e.recompute_every] if e.recompute != "none" else ()


def _repeated_of_kind(e: Experiment, kind: Layer) -> float:
    """FLOPs that one token repeats in a recomputed layer of a kind."""
    hidden, named = e.model.hidden_size, e.recomputed_operations
    if e.recompute == "full":
        last = kind.mlp.width * hidden if isinstance(kind.mlp, DenseMLP) else 0
        return 2.0 * (matmul_of(kind, hidden) - last) + kind.mixing(e.seq_len).forward
    repeated = 0
    for weight in kind.weights(hidden):
        if "experts" in named and weight.name == "expert up":
            repeated += weight.active
        if "mla_up" in named and weight.name in latent_up(kind):
            repeated += weight.active
    return 2.0 * repeated


def _recomputed_layers(e: Experiment) -> tuple[int, int]:
    """(number of recomputed layers, number of those without routed experts)."""
    layers = -(-e.model.num_layers // e.recompute_every)
    return layers, min(layers, -(-num_dense_layers(e.model) // e.recompute_every))
