"""Parameter counts of a model and of its layers, from the shape alone.

Counts are split by how parallelism treats them: ``split`` over tensor-parallel ranks, ``replicated`` on each of them
(norms, router, latent down-projections), ``experts`` over expert-parallel and tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS, Precision
from workloads.spec.layer_kinds.attention import LatentAttention
from workloads.spec.layer_kinds.model import Layer, LayeredModel
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec

_LOW: tuple[Precision, ...] = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", *PLANNED_FORMATS)
MASTER_BYTES: dict[Precision, int] = {"bf16": 4, "fp16": 4, "fp32": 4, "fp64": 8, **dict.fromkeys(_LOW, 4)}
"""Bytes per element of master weights, reduced gradients and each optimizer moment."""
COMPUTE_BYTES: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, **dict.fromkeys(_LOW, 2)}
"""Bytes per element of gathered weights and activations; formats below 16 bits keep bf16 between their matmuls."""


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


@lru_cache(maxsize=1024)
def layer_counts(model: ModelSpec, kind: Layer) -> Counts:
    """Parameters of one layer of a kind of the model's, with its part of hyper-connections."""
    held = [*kind.weights(model.hidden_size)]
    if (streams := whole_model(model).streams) is not None:
        held += streams.weights(model.hidden_size)
    of = dict.fromkeys(("split", "whole", "experts"), 0)
    for weight in held:
        of[weight.held] += weight.parameters
    return Counts(of["split"], of["whole"], of["experts"])


@lru_cache(maxsize=256)
def whole_model(model: ModelSpec) -> LayeredModel:
    """The model as a list of layers, whose sums are parameters and FLOPs."""
    tied = model.tie_embeddings
    return layers_of(model).model(model.name, model.hidden_size, model.vocab_size, tied=tied, norm_eps=model.norm_eps)


@lru_cache(maxsize=256)
def num_params(model: ModelSpec) -> int:
    """Number of all parameters, tied embeddings counted once."""
    return whole_model(model).parameters


@lru_cache(maxsize=256)
def matmul_params(model: ModelSpec) -> int:
    """Parameters that multiply one token in matrix products, with the output head, without input embedding and norms.

    For routed experts only the ``experts_per_token`` that a token visits count.
    """
    return whole_model(model).multiplied_parameters


@lru_cache(maxsize=256)
def active_params_with_embedding(model: ModelSpec) -> int:
    """Parameters of one token's path: all except the experts that it does not visit, with the whole input embedding.

    Mixtral (12.9 B) and Qwen3 (3.3 B of 30B-A3B, 22 B of 235B-A22B) publish this number, others the one of
    `active_params_without_embedding`.
    """
    return whole_model(model).active_parameters


def active_params_without_embedding(model: ModelSpec) -> int:
    """`active_params_with_embedding` less the input embedding, of which a token reads one row. A tied embedding stays,
    because it is the output projection, too.

    gpt-oss (5.1 B of 120b, 3.6 B of 20b; arXiv:2508.10925, table 1) and DeepSeek (37 B of V3, 2.4 B of V2-Lite) publish
    this number.
    """
    embedding = 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    return active_params_with_embedding(model) - embedding


def playbook_params(model: ModelSpec, pp: int = 1) -> int:
    """Parameters as the Ultra-Scale Playbook counts them: tied embeddings twice if the pipeline splits them.

    In a mixture of experts only active parameters count (the playbook has none).
    """
    copies = 2 if model.tie_embeddings and pp > 1 else 1
    return active_params_with_embedding(model) + (copies - 1) * model.vocab_size * model.hidden_size


@lru_cache(maxsize=1024)
def matmul_of(kind: Layer, hidden: int) -> int:
    """Parameters of one layer of a kind that take part in one token's matrix products."""
    return sum(weight.active for weight in kind.weights(hidden) if weight.use == "matrix")


def latent_up(kind: Layer) -> tuple[str, ...]:
    """Names of the weights that project latents up to heads."""
    if not isinstance(kind.mixer, LatentAttention):
        return ()
    return ("q", "kv") if kind.mixer.q_rank else ("kv",)


def counted_tokens(model: ModelSpec, seq_len: float) -> float:
    """Length of the sequence whose scores count in `Layer.mixing`. Of models described by numbers half of all scores
    count, as is usual in the literature: each token's with itself does not."""
    return seq_len if model.layers is not None else seq_len - 1


def local_params(experiment: Experiment, counts: Counts) -> tuple[int, int]:
    """(parameters, expert parameters) that one rank computes with."""
    dense = counts.split // experiment.tp + counts.replicated
    return dense, counts.experts // (experiment.ep * experiment.etp)
