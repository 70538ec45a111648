"""Seconds that routed experts add in code bases whose dispatcher sends a token once to each rank that has some of its
experts (DeepEP, HybridEP), beyond the dense model with as many used columns that the closed form knows.

Of one layer and micro-batch, with T tokens a rank, width h, k experts a token of f columns, E experts on P ranks:

exchange    T h D values of 2 bytes a pass, D the mean number of ranks that hold experts of a token (`ranks_reached`);
            dispatch and combine forward, one for each backward, one dispatch more with full recomputation. Inside a
            node at the links' rate, which published kernels reach: 600 to 760 GB/s of D copies on GB200, where the
            cluster's file has 640, 153 to 158 of 160 on H800. Between nodes once to every other node reached, at
            `OF_NETWORK` of the network's rate; both at one time
permute     (D + k) T h values a pass, read where they arrive and written in the order of experts, and the reverse
casts       in formats with scales the copies, not the tokens, are cast: before the first product, and the gradient
            before the last one; read in 2 bytes, written in one along rows and one along columns
products    experts of R = T k P / E rows fill tiles of 128 rows, of which half a tile is empty; narrow ones are slower
            by the law of the form, by f as by h
fused       where gate, product, SwiGLU and casts are one kernel (cuDNN's grouped MLP of Transformer Engine), passes of
            SwiGLU and casts between the two products fall away
overlap     where the exchange runs beside the other direction of another micro-batch, the multiprocessors that carry it
            are missing there: `CARRIERS`

Sources: docs/README_Hybrid-EP.md and docs/legacy.md of deepseek-ai/DeepEP (rates, uniform routing, 7,168 values, 8
experts a token); docs/discussions/deepseek-v3-gb200-optimization of NVIDIA/Megatron-LM (permutations, casts, products
of 2,672 TFLOP/s in mxfp8 on GB200, 0.53 of its peak, which the form's share is without its casts); arXiv:2603.07685
(overlap, one kernel, whole passes as a graph).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import comb

import numpy as np

from workloads.predict.experts.columns import Experts
from workloads.predict.points import Floats, Points
from workloads.predict.time_terms import fill_share, low_rate, product_rate
from workloads.spec.cluster import ClusterSpec

OF_NETWORK = 0.88
"""Share of the network's rate that copies to other nodes reach: HybridEP on 64 H100, 50 GB/s of D copies, of which 7/8
leave a node, with ports of 50 GB/s."""
CARRIERS = 32 / 148
"""Multiprocessors that carry the exchange, of those of a B200: ``moe_hybridep_num_sms`` of Megatron-Bridge's
recipes."""
TILE = 128
"""Rows of a tile of grouped products."""
EXPERT_MATRICES = 3


def ranks_reached(experts: Experts, ranks: float) -> float:
    """Mean number of ranks on which a token's experts lie, of ``ranks`` with equally many experts each.

    Every choice of experts is equally likely; with `Experts.groups` every choice from some of the groups, which lie on
    a part of the ranks.
    """
    groups, of_groups = experts.groups
    open_experts, open_ranks = experts.number * of_groups // groups, ranks * of_groups / groups
    if open_ranks <= 1:
        return 1.0
    elsewhere = open_experts - round(open_experts / open_ranks)
    return float(open_ranks * (1 - comb(elsewhere, experts.per_token) / comb(open_experts, experts.per_token)))


def added_seconds(x: Points, p: Mapping[str, float], experts: Experts, cluster: ClusterSpec) -> float:
    """Seconds of a step, of one row. ``x``: that row; ``p``: values of `workloads.predict.parameters.TIME`."""
    layer = _layer_s(x, p, experts, cluster)
    layers = (x.layers - experts.dense_layers) / x.pp
    rounds = x.micro_batches + (x.pp - 1) * fill_share(x.vpp, x.micro_batches, x.pp)
    return float((layer * layers * rounds)[0])


def _layer_s(x: Points, p: Mapping[str, float], experts: Experts, cluster: ClusterSpec) -> Floats:
    """Seconds of one layer and micro-batch, forward and backward."""
    fused, k, tokens, h = experts.fused, experts.per_token, x.tokens / x.tp, x.hidden
    full = np.where(x.recompute == 2, x.recomputed, 0.0)
    memory = x.memory_bandwidth * p["memory"]
    domain = float(cluster.domain)
    reached = ranks_reached(experts, x.ep[0])
    nodes = max(1.0, x.ep[0] / domain)
    others = ranks_reached(experts, nodes) * (1 - 1 / nodes) if nodes > 1 else 0.0
    pass_s = 2 * tokens * h * reached / x.intra if x.ep[0] > 1 else np.zeros_like(tokens)
    if others:
        pass_s = np.maximum(pass_s, 2 * tokens * h * others / (OF_NETWORK * x.inter))
    uneven = experts.imbalance
    exchange = (4 + full) * uneven * pass_s * (CARRIERS if fused else 1.0)
    permute = (4 + full) * uneven * 2 * (reached + k) * tokens * h / memory
    copies = k if fused else k - 1  # of one, the form counts the casts
    casts = np.where(x.fp8 > 0, 2 * 4 * uneven * copies * tokens * h / memory, 0.0)
    rows = tokens * k * x.ep / experts.number
    slower = (1 + TILE / 2 / rows) * (1 + p["width"] / experts.columns) / (1 + p["width"] * x.tp / h)
    flops = 2 * tokens * (3 + full) * EXPERT_MATRICES * h * k * experts.columns
    products = flops / product_rate(x, p)
    swiglu = 3 * 2 * 3 * k * experts.columns * tokens / memory
    slower = slower * low_rate(x, p) if fused else slower
    added: Floats = (
        exchange + permute + casts + swiglu * (0 if fused else uneven) - swiglu + products * (slower * uneven - 1)
    )
    return added
