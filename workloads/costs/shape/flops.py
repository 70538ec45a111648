"""FLOPs of training on one token, by several named conventions. A multiply and an add are two FLOPs.

Symbols: T = seq_len (with packed documents `Experiment.attended_length`), L layers, H query heads, Q head size, N
parameters. Forward is ``2 N`` and backward ``4 N`` per token; attention scores and values are ``4 L H Q T`` forward and
twice that backward (PaLM, arXiv:2204.02311, appendix B). Norms, RoPE, SwiGLU and softmax are not counted, as is usual
in the literature.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.params import counted_tokens, latent_up, matmul_of, playbook_params, whole_model
from workloads.costs.shape.partition import recompute_by_layer
from workloads.spec.documents.kernels import gathers_documents
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import FULL
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec
from workloads.spec.recomputation import operations_of

FlopsConvention = Literal["palm", "causal", "playbook"]


def flops_per_token(model: ModelSpec, seq_len: float, convention: FlopsConvention, *, pp: int = 1) -> float:
    """Model FLOPs to train on one token: forward and backward, recomputation not counted.

    palm      ``6 N_matmul + 12 L H Q T``: every score is counted (PaLM, arXiv:2204.02311, appendix B).
    causal    ``6 N_matmul + 6 L H Q T``: a causal mask needs half of the scores.
    playbook  ``6 N_all + 12 L h T``, h the hidden size: the Ultra-Scale Playbook's, whose N_all includes the input
              embedding and counts tied embeddings twice when ``pp > 1``.

    With latent attention ``2 Q`` is replaced by the query/key size plus the value size. Each layer counts by its kind;
    palm counts every score of attention to all earlier tokens, and in other kinds those that are needed. With packed
    documents T is `Experiment.attended_length`, so palm counts every score within a document. Raises ValueError for
    another convention.
    """
    if convention == "playbook":
        return 6.0 * playbook_params(model, pp) + 12.0 * model.num_layers * model.hidden_size * seq_len
    if convention not in get_args(FlopsConvention):
        raise ValueError(f"convention={convention!r}; it may be one of {', '.join(get_args(FlopsConvention))}")
    whole, counted = whole_model(model), counted_tokens(model, seq_len)
    total = float(whole.training_flops(counted))
    if convention == "palm":
        needed = sum(layers * kind.mixing(counted).training for kind, layers in whole.distinct() if kind.sees_all)
        total += needed * (seq_len / FULL.keys(counted) - 1)
    return total


def hardware_flops_per_token(experiment: Experiment) -> float:
    """FLOPs that devices execute for one token: causal attention halved, recomputation counted.

    Full recomputation repeats the forward of every recomputed block up to the last tensor that backward needs: of a
    dense block all but the down projection, of one with routed experts everything. Selective recomputation repeats no
    matrix product, except that ``mla_up`` repeats those of latents and ``experts`` two of three of routed experts.
    GPipe keeps no gradients of the head between forward and backward, so its logits are computed twice. With packed
    documents whose keys are gathered attention runs its forward twice. The scores that a flash attention kernel
    recomputes in its backward are not counted: every run has them, and they replace memory traffic.
    """
    e = as_held(experiment)
    total = flops_per_token(e.model, e.attended_length, "causal")
    layers, recomputed = layers_of(e.model), Counter(zip(recompute_by_layer(e), layers_of(e.model).order, strict=True))
    total += sum(count * _repeated(e, layers.kinds[at], word) for (word, at), count in recomputed.items())
    if gathers_documents(e):
        counted = counted_tokens(e.model, e.attended_length)
        total += sum(layers.kinds[at].mixing(counted).forward for at in layers.order)
    if e.pp_schedule == "gpipe":
        total += 2.0 * e.model.vocab_size * e.model.hidden_size * (1 + e.model.mtp_modules)
    return total


def _repeated(e: Experiment, kind: Layer, word: str) -> float:
    """FLOPs that one token repeats in a layer of a kind with this word of recomputation."""
    hidden, named = e.model.hidden_size, operations_of(word)
    if word == "full":
        last = kind.mlp.width * hidden if isinstance(kind.mlp, DenseMLP) and not kind.ahead else 0
        return 2.0 * (matmul_of(kind, hidden) - last) + kind.mixing(counted_tokens(e.model, e.attended_length)).forward
    repeated = 0
    for weight in kind.weights(hidden):
        if "experts" in named and weight.name == "expert up":
            repeated += weight.active
        if "mla_up" in named and weight.name in latent_up(kind):
            repeated += weight.active
    return 2.0 * repeated
