"""Device memory of many rows at one time, in closed form, with parameters that a fit may adjust.

Symbols for one stage: P parameters of a rank, S ranks over which ZeRO shards (arXiv:1910.02054, section 5), g bytes of
a gradient, T tokens, h hidden size, F feed-forward columns, V vocabulary, fitted a and b:

states       weights 2 P (ZeRO 3: / S), gradients g P (ZeRO 2 and 3: / S), optimizer 12 P (from ZeRO 1 on: / S)
activations  of every micro-batch in flight and every layer: T (a h + b F) values of 2 bytes over tp (in the form of
             arXiv:2205.05198; b with a gate, two thirds of it without; without sequence parallelism all but the norms'
             inputs and results are split); with selective recomputation a share of that,
             with full recomputation the layer's input and one layer's working set
loss         on the last stage, T V / tp logits in 16 bits and in fp32
gathered     ZeRO 3: two layers' weights; of every layer and micro-batch in flight the gathered inputs of the products
             behind its two norms, ``2 (1 - 1 / tp) T h`` values more than their shards, in versions that keep them for
             the backward (nanotron without ``tp_recompute_allgather``)
reserved     memory taken by the allocator: a multiple of the peak and a constant (context, communication buffers)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from workloads.predict.facts import Facts
from workloads.predict.parameters import Parameter
from workloads.predict.points import Floats, Points

GIB = float(2**30)

MEMORY: dict[str, Parameter] = {
    "weights": Parameter(2.0, 0.2, "bytes of a parameter's weight"),
    "gradients": Parameter(1.0, 0.3, "gradients over their bytes"),
    "optimizer": Parameter(12.0, 0.15, "bytes of a parameter's optimizer state"),
    "hidden": Parameter(8.0, 0.3, "values a token and hidden unit that a layer keeps"),
    "ffn": Parameter(3.0, 0.3, "values a token and feed-forward column that a layer keeps"),
    "whole": Parameter(0.2, 0.8, "values a token and hidden unit that tensor parallelism does not split"),
    "gathered": Parameter(2.0, 0.3, "values a token and hidden unit that tensor parallelism gathers, where they stay"),
    "selective": Parameter(0.7, 0.3, "share of activations kept with selective recomputation"),
    "loss": Parameter(10.0, 0.5, "bytes of a logit on the last stage"),
    "embedding": Parameter(2.0, 0.8, "bytes a token and hidden unit on every stage, besides the layers"),
    "head": Parameter(4.0, 0.8, "bytes a token and hidden unit on the last stage, not split by tp"),
    "constant": Parameter(2.0, 0.5, "GiB of reserved memory besides a multiple of the peak"),
    "allocator": Parameter(1.08, 0.08, "reserved over allocated"),
}
"""Defaults and spreads before any row is seen."""


UNSPLIT = 4.0
"""Values a token and hidden unit, of those that a layer keeps, which tensor parallelism alone does not split: inputs
and results of its two norms (arXiv:2205.05198, equation 2, without the masks of dropout)."""


def peaks(x: Points, facts: Facts, p: Mapping[str, float]) -> tuple[Floats, Floats]:
    """Peak allocated bytes of the first stage and of the fullest one. ``p``: values of `MEMORY`."""
    stages = facts.stages
    shards = x.dp * x.cp
    sizes = stages.layers * (x.layer_params / x.tp)[:, None]
    ends = stages.first + stages.head * (1 - x.tied * (x.pp == 1))[:, None]
    sizes = sizes + ends * (x.vocabulary_params / x.tp)[:, None]
    weights = p["weights"] / np.where(x.zero == 3, shards, 1.0)
    gradients = p["gradients"] * facts.gradient_bytes / np.where(x.zero >= 2, shards, 1.0)
    optimizer = p["optimizer"] / np.where(x.zero >= 1, shards, 1.0)
    state = sizes * (weights + gradients + optimizer)[:, None]
    state = state + (4 * x.layer_params / x.tp * ((x.zero == 3) & (shards > 1)))[:, None]

    shared = np.where(facts.sequence_parallel > 0, x.tp, 1.0)
    tokens = x.tokens
    of_hidden, of_ffn = p["hidden"] - facts.fp8_hidden, p["ffn"] - facts.fp8_ffn
    unsplit = np.minimum(UNSPLIT, of_hidden)
    of_hidden = unsplit / shared + (of_hidden - unsplit) / x.tp
    whole = p["whole"] + facts.keeps_gathers * p["gathered"] * (1 - 1 / x.tp)
    layer = 2 * tokens * (of_hidden * x.hidden + of_ffn * x.ffn * x.matrices / 3 / x.tp + whole * x.hidden)
    layer = layer + facts.unfused * 5 * x.mbs * x.heads * x.seq**2 / x.tp
    kept = np.where(x.recompute == 1, p["selective"] * layer, layer)
    kept = np.where(x.recompute == 2, 2 * tokens * x.hidden / shared, kept)
    kept = x.recomputed * kept + (1 - x.recomputed) * layer
    working = np.where(x.recompute == 2, layer, 0.0)
    activations = stages.in_flight * stages.layers * kept[:, None] + (stages.layers > 0) * working[:, None]
    logits = p["loss"] * tokens * x.vocab / x.tp + p["head"] * tokens * x.hidden
    embedding = p["embedding"] * tokens * x.hidden
    total = state + activations + stages.head * logits[:, None] + embedding[:, None]
    total = np.where(stages.number > 0, total, 0.0)
    return total[:, 0], total.max(axis=1)


def reserved(allocated: Floats, p: Mapping[str, float]) -> Floats:
    return p["allocator"] * allocated + p["constant"] * GIB
