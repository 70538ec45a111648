"""What routed experts cost beyond their products and messages: work and waits of the host; for rows of other code bases
a factor on the step."""

from __future__ import annotations

import math

from workloads.costs.memory.expert_activations import received_rows
from workloads.predict.points import fp8_kind
from workloads.predict.recomputed_layers import full_share
from workloads.spec.experiment import Experiment

EXPERTS, SHORT_EXPERTS, LEAST_ROWS = 1.16, 40.0, 160.0
"""Factor on the step time of layers with routed experts in other code bases, beyond their products and messages:
tokens are sorted and moved, products are small and many. The factor is ``EXPERTS (1 + SHORT_EXPERTS / R)`` with R rows
that an expert gets per micro-batch, fitted to 103 device-bound rows of three models on this project's engine, R from
160 to 16,000, when its own costs were not yet counted one by one. Fewer rows count as `LEAST_ROWS`."""
WIDE = 1408
"""Width of experts beyond which the factor's part above 1 falls with the root of the width: a row that is moved then
has more products. Mixtral 8x7B (14,336) and Llama 4 Scout (8,192) take 1.09 and 1.04 times as long on H200 as products
and messages say (13 recorded rows), the three models of the factor, with 768 to 1,408, 1.17 to 1.24 times."""
EXPERTS_ALONE = 40.0
"""Number of experts on a rank whose products, launched one by one, take the host as long as the rest of a layer's
routing: from one recorded row, DeepSeek-V2-Lite in fp16."""
ONE_BY_ONE = ("megatron",)
"""Engines whose grouped products launch every expert's product by itself, after the host has read how many tokens each
has, as Transformer Engine's do."""
EXCHANGED = 0.3
"""Share that sending tokens to other ranks and back adds to the host's part of routing: from 33 recorded host-bound
rows with ep > 1 and known launch times."""


def expert_factor(e: Experiment) -> float:
    """Factor on the time of a step of another code base whose layers have routed experts; 1 without experts."""
    if e.model.moe is None:
        return 1.0
    rows = received_rows(e) * e.ep / e.model.moe.num_experts
    narrow = EXPERTS * (1 + SHORT_EXPERTS / max(rows, LEAST_ROWS))
    return 1 + (narrow - 1) * min(1.0, math.sqrt(WIDE / e.model.moe.expert_hidden_size))


def host_work_of_experts(e: Experiment) -> float:
    """Host work for routed experts: 1 if expert products are one grouped kernel; more if each expert's products are
    launched separately, or if tokens go to other ranks; 0 without experts."""
    if e.model.moe is None:
        return 0.0
    grouped = e.engine not in ONE_BY_ONE and (e.precision == "bf16" or fp8_kind(e.precision) > 0)
    work = 1.0 + (EXCHANGED if e.ep > 1 else 0.0)
    return work if grouped else work + e.model.moe.num_experts / e.ep / EXPERTS_ALONE


def host_waits_of_experts(e: Experiment) -> float:
    """Number of times per layer and micro-batch that the host waits for the token counts of ranks: once per forward of
    learned routing over several ranks without a capacity factor, and of every routing where the host divides the
    experts' products."""
    learned = e.routing == "learned" and e.ep > 1 and e.capacity_factor is None
    if e.model.moe is None or not (learned or e.engine in ONE_BY_ONE):
        return 0.0
    return 1.0 + full_share(e)
