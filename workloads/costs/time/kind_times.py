"""Seconds of one micro-batch in a layer of a kind on one rank, of models with a list of layers.

Products, messages and memory passes are those that the kind says (`workloads.spec.layer_kinds`,
`workloads.costs.memory.kind_tensors`), at the rates of `workloads.costs.time.layer_times`. What a mixer computes beyond
its products runs at the rate of attention, that of recurrent mixers too, as much as their kernels of chunks compute.
`workloads.costs.time.timeline` states the other assumptions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from workloads.costs.memory.activations import rank_tokens
from workloads.costs.memory.kind_tensors import Sizes, expert_tensors_of, kind_tensors
from workloads.costs.shape.params import COMPUTE_BYTES, MASTER_BYTES, latent_up
from workloads.costs.time.expert_times import NO_EXPERTS, ExpertTimes
from workloads.costs.time.rank_times import LayerTimes, Rates
from workloads.costs.traffic.collectives import Collective, collective_time_s, together_s
from workloads.costs.traffic.kind_messages import context_messages_of
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import Recurrent
from workloads.spec.layer_kinds.weight import ROW_PARALLEL, Weight
from workloads.spec.mesh import stride

ATTENTION_BACKWARD = 2.5
"""As in `workloads.costs.time.layer_times`."""


def kind_times(e: Experiment, cluster: ClusterSpec, rates: Rates, kind: Layer) -> LayerTimes:
    """Compute and exposed communication of one layer."""
    c, hidden, streams = COMPUTE_BYTES[e.precision], e.model.hidden_size, e.model.streams
    tokens, stream = rank_tokens(e)
    products, mixing = _products(kind, hidden), kind.mixing(e.seq_len)
    per_number = 2.0 / rates.matmul
    matmul = per_number * (tokens * products.split / e.tp + stream * (products.whole + _mixed_streams(hidden, streams)))
    trained = mixing.trained
    if isinstance(kind.mixer, Recurrent):
        trained = kind.mixer.kernel_flops()
    attention = tokens * trained / e.tp / rates.attention
    scores = tokens * mixing.untrained / e.tp / rates.attention
    experts = _experts(e, cluster, rates, kind, c)
    tensors = kind_tensors(kind, Sizes.of(e, c), streams).all()
    parts = (kind.mixer is not None) + (kind.mlp is not None)
    passes = sum(one.moved for one in tensors) + c * parts * (2 * streams + 1) * stream * hidden
    memory = passes / rates.memory + experts.swiglu_s + experts.permute_s
    # The head's forward computes its gradients too.
    of_head = 6.0 * tokens * e.model.vocab_size * hidden / e.tp / rates.head if kind.ahead else 0.0
    forward = matmul + experts.forward_s + attention + scores + memory + of_head
    backward = 2 * matmul + ATTENTION_BACKWARD * attention + 2 * memory + experts.inputs_s + experts.weights_s

    tp = _tp_exposed(e, cluster, kind, c, matmul + experts.forward_s, products)
    cp_forward, cp_backward = (_cp_exposed_s(e, cluster, kind, attention, backward=turn) for turn in (False, True))
    recompute_s, recompute_exposed_s, named = 0.0, 0.0, e.recomputed_operations
    if e.recompute == "full":
        recompute_s, recompute_exposed_s = forward - of_head, tp.forward_s + experts.dispatch_s + cp_forward
        if isinstance(kind.mlp, DenseMLP):  # backward needs neither the last product's output nor the sum after it
            recompute_s -= per_number * tokens * kind.mlp.width * hidden / e.tp
            recompute_exposed_s -= tp.last_sum_s
    elif named:
        recompute_s = sum(one.moved for one in tensors if one.dropped_by in named) / rates.memory
        if "experts" in named:
            recompute_s += 2.0 / 3.0 * experts.forward_s + experts.swiglu_s
        elif "swiglu" in named:
            recompute_s += experts.swiglu_s
        if "mla_up" in named:
            again = sum(weight.active for weight in _matrices(kind, hidden) if weight.name in latent_up(kind))
            recompute_s += per_number * tokens * again / e.tp
            recompute_exposed_s = tp.latents_s
    others = experts.dispatch_s + experts.combine_s
    exposed = tp.forward_s + others + cp_forward, tp.backward_s + others + cp_backward
    return LayerTimes(forward, backward, matmul + experts.weights_s, *exposed, recompute_s, recompute_exposed_s)


def _mixed_streams(hidden: int, streams: int) -> int:
    """Numbers by which a token is multiplied to mix the streams of hyper-connections around both parts."""
    mixes = streams * streams + 2 * streams
    return 2 * (mixes * streams * hidden + mixes * hidden) if streams > 1 else 0


class _Products(NamedTuple):
    """Weights of a layer that a token meets in products, without routed experts."""

    split: int
    """Divided over tensor-parallel ranks."""
    whole: int
    """Met by each rank's own tokens."""
    into_share: float
    """Part of ``split`` whose inputs are gathered."""


@lru_cache(maxsize=4096)
def _matrices(kind: Layer, hidden: int) -> tuple[Weight, ...]:
    return tuple(one for one in kind.weights(hidden) if one.use == "matrix" and one.held != "experts")


@lru_cache(maxsize=4096)
def _products(kind: Layer, hidden: int) -> _Products:
    matrices = _matrices(kind, hidden)
    split = sum(one.active for one in matrices if one.held == "split")
    rows = sum(one.active for one in matrices if one.name in ROW_PARALLEL)
    whole = sum(one.active for one in matrices if one.held == "whole")
    return _Products(split, whole, (split - rows) / split if split else 0.0)


def _experts(e: Experiment, cluster: ClusterSpec, rates: Rates, kind: Layer, c: int) -> ExpertTimes:
    if not isinstance(kind.mlp, RoutedMLP):
        return NO_EXPERTS
    mlp, hidden = kind.mlp, e.model.hidden_size
    x = expert_tensors_of(e, mlp, rank_tokens(e)[1], c)
    matrices = 3 if mlp.expert.gated else 2
    shared = (3 if mlp.shared.gated else 2) * hidden * mlp.shared.width if mlp.shared is not None else 0
    return ExpertTimes.of_tensors(e, cluster, rates, x, width=mlp.latent or hidden, matrices=matrices, shared=shared)


class _TensorParallel(NamedTuple):
    """Exposed tensor-parallel communication of one layer, in seconds, as in `workloads.costs.time.layer_times`."""

    forward_s: float
    backward_s: float
    latents_s: float
    last_sum_s: float


def _tp_exposed(
    e: Experiment, cluster: ClusterSpec, kind: Layer, c: int, matmul_s: float, products: _Products
) -> _TensorParallel:
    if e.tp == 1:
        return _TensorParallel(0.0, 0.0, 0.0, 0.0)

    def time_of(op: Collective, numbers: int) -> float:
        return collective_time_s(op, float(c * rank_tokens(e)[0] * numbers), e.tp, 1, cluster)

    hidden, inputs, shared, sums = e.model.hidden_size, list[int](), 0, 0
    if kind.mixer is not None:
        along = kind.mixer.tensor_parallel(hidden)
        inputs, shared, sums = [*along.gathered], along.shared, 1
    if isinstance(kind.mlp, RoutedMLP):
        gathering = (kind.mlp.shared is not None) + (e.etp > 1)  # experts that tp ranks split get all tokens
    else:
        gathering = int(kind.mlp is not None)
    inputs, sums = [*inputs, *[hidden] * gathering], sums + gathering
    if not inputs:
        return _TensorParallel(0.0, 0.0, 0.0, 0.0)
    overlapping_s = matmul_s * products.into_share / len(inputs)

    def beside(op: Collective, numbers: int) -> float:
        return float(together_s(overlapping_s, time_of(op, numbers)) - overlapping_s)

    if not e.sequence_parallel:
        reduce = time_of("all_reduce", hidden)
        backward = sum(beside("all_reduce", width) for width in inputs)
        return _TensorParallel(
            sums * reduce, backward + (time_of("all_reduce", shared) if shared else 0.0), 0.0, reduce
        )
    gather, scatter = time_of("all_gather", hidden), time_of("reduce_scatter", hidden)
    latents = sum(time_of("all_gather", width) for width in inputs if width != hidden)
    gathers = sum(time_of("all_gather", width) for width in inputs)
    backward = sums * gather + sum(beside("all_gather", w) + beside("reduce_scatter", w) for w in inputs)
    if shared:
        gathers += time_of("all_gather", shared)
        backward += time_of("reduce_scatter", shared)
    return _TensorParallel(gathers + sums * scatter, backward, latents, scatter)


def _cp_exposed_s(e: Experiment, cluster: ClusterSpec, kind: Layer, attention_s: float, *, backward: bool) -> float:
    """Exposed context-parallel communication of one layer. ``attention_s``: its mixing's forward."""
    total, hidden_by = 0.0, 0.0
    for message in context_messages_of(
        e, kind, COMPUTE_BYTES[e.precision], MASTER_BYTES[e.precision], backward=backward
    ):
        op: Collective = "p2p" if message.op == "send" else message.op
        # Collectives are given the whole buffer, including this rank's own part.
        whole = message.bytes_each if op == "p2p" else message.bytes_each * e.cp / (e.cp - 1)
        total += message.calls * collective_time_s(op, whole, e.cp, stride(e, "cp"), cluster)
        hidden_by = attention_s if op == "p2p" else 0.0
    return max(0.0, total - (ATTENTION_BACKWARD if backward else 1.0) * hidden_by)
