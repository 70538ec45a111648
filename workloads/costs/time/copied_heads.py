"""Seconds of the sums of gradients over ranks with copies of key and value heads, once a step. No torch here."""

from __future__ import annotations

from collections import Counter

from workloads.costs.shape.held_model import copies_of, copies_of_heads, grouped_attention
from workloads.costs.shape.partition import StageParams
from workloads.costs.traffic.collectives import collective_time_s
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees
from workloads.spec.model_layers import layers_of
from workloads.spec.updates.optimizer import master_bytes


def copied_heads_s(e: Experiment, held: StageParams, cluster: ClusterSpec) -> float:
    """Seconds of a rank that holds ``held``, with equal shards; 0 without copies. Biases are left out."""
    if not copies_of_heads(e):
        return 0.0
    shards, elements = data_degrees(e)[1], Counter[int]()
    for kind, layers in zip(layers_of(e.model).kinds, held.of_kind, strict=True):
        one = grouped_attention(kind)
        if one is not None:
            columns = one.head_dim + (0 if one.shared_kv else one.value_dim)
            elements[copies_of(one.heads, one.kv_heads, e.tp)] += layers * columns * e.model.hidden_size
    return sum(
        collective_time_s("all_reduce", master_bytes(e) * count / shards, copies, 1, cluster)
        for copies, count in elements.items()
        if copies > 1 and count
    )
