"""Lower bound on the memory of many layouts at once, to rule most of them out before anything is timed.

The bound is one moment of the closed form (`workloads.costs.memory.estimate`) and never above it: the first pipeline
rank in the backward of its last block, with the fewest layers of any rank, and of the model's the smallest, without the
head and without the block's working memory. V-shaped schedules hold a little less, see `V_SHARE`.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from sweep.advising.axes import KINDS
from sweep.advising.question import Question
from sweep.advising.space import Ints, LayoutGroup, LayoutSpace
from workloads.costs.memory.kind_sizes import saved_parts
from workloads.costs.shape.params import COMPUTE_BYTES, layer_counts
from workloads.predict.points import Floats
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import layers_of
from workloads.spec.updates.optimizer import master_bytes, optimizer_of, reduced_bytes

V_SHARE = 0.8
"""Least share of the micro-batches of 1F1B's first rank that V-shaped schedules hold."""


class Floor(NamedTuple):
    """Bytes, shape (rows, `KINDS`)."""

    piped: Floats
    """Bound for 1F1B, interleaved schedules and no pipeline."""
    v_shaped: Floats


def floor_of(space: LayoutSpace, replicas: int = 1, saved: Floats | None = None) -> Floor:
    """Computes the bound. ``replicas``: replicas of ZeRO's shards. ``saved``: result of `saved_of`, if already
    computed."""
    q, model, x = space.question, space.question.model, space
    tp, held = x.tp, model.num_layers // x.pp
    kinds = [layer_counts(model, kind) for kind in layers_of(model).kinds]
    rest = _least_held(space, np.stack([one.split // tp + one.replicated for one in kinds], axis=-1))
    experts = _least_held(space, np.stack([one.experts // (x.ep * x.etp) for one in kinds], axis=-1))
    embedding = model.vocab_size // tp * model.hidden_size
    sharded = x.zero > 0
    shards = np.where(sharded, np.maximum(1, x.dp * x.cp // replicas), 1)
    of_experts = np.maximum(1.0, np.where(sharded, shards * tp / x.etp / x.ep, 1.0))
    update = optimizer_of(q)
    g, r, c = master_bytes(q), reduced_bytes(q), COMPUTE_BYTES[q.precision]
    b = 1 if q.precision.startswith("fp8") else c
    m, in_flight = x.micro_batches, in_flight_of(space)
    table = saved_of(space) if saved is None else saved
    saved = np.stack([_least_held(space, table[:, kind]) for kind in range(len(KINDS))], axis=1)
    floors = []
    for ends, share in ((embedding, 1.0), (0, V_SHARE)):
        own = (rest + ends) / shards + experts / of_experts
        states = (g + (1 - q.optimizer_offload) * update.least_moments * update.moment_bytes) * own
        copies = np.where(x.zero <= 2, b * (rest + experts) + c * ends, 0)
        gradients = np.where(m > 2, np.where(x.zero <= 1, r * (rest + experts + ends), g * own), 0)
        floors.append((states + copies + gradients)[:, None] + share * in_flight[:, None] * saved)
    # Most that integer division in the closed form can lose.
    return Floor(*(np.maximum(0.0, one - 4096.0 * (1 + held)[:, None]) for one in floors))


def saved_of(space: LayoutSpace) -> Floats:
    """Bytes that a layer saves per micro-batch; shape (rows, `KINDS`, kinds of layers)."""
    x, q = space, space.question
    keys, where = np.unique(np.stack([x.tp, x.cp, x.mbs, x.ep, x.etp], axis=1), axis=0, return_inverse=True)
    table = np.array([[_saved_by(q, kind, *map(int, key)) for kind in KINDS] for key in keys], dtype=float)
    saved_of_rows: Floats = table[where.reshape(-1)]
    return saved_of_rows


def in_flight_of(space: LayoutSpace) -> Ints:
    """Least number of micro-batches that the first rank holds with 1F1B."""
    m = space.micro_batches
    least: Ints = np.minimum(space.pp, np.where(m > 2, m - 1, m))
    return least


def more_saved(space: LayoutSpace, saved: Floats, group: LayoutGroup) -> Floats:
    """Bytes per micro-batch that the layers which a group does not recompute save in addition, at least, by row. A
    chunk of n layers recomputes no more than n / every, rounded up. ``saved``: result of `saved_of`."""
    held, kind, every = space.question.model.num_layers // space.pp, KINDS.index(group.recompute), group.every
    again = np.minimum(held, (held + group.virtual_stages * (every - 1)) // every)
    mixed = _least_held(space, saved[:, 0], held - again) + _least_held(space, saved[:, kind], again)
    more: Floats = np.maximum(0.0, mixed - _least_held(space, saved[:, kind]))
    return more


def _least_held(space: LayoutSpace, of_kinds: Floats, held: Ints | None = None) -> Floats:
    """Least sum over so many layers (None: those that any rank of a row holds), of which no more are of a kind than the
    model has. ``of_kinds``: of one layer, shape (rows, kinds of layers)."""
    order = layers_of(space.question.model).order
    counts, left = Counter(order), space.question.model.num_layers // space.pp if held is None else held
    cheapest, least = np.argsort(of_kinds, axis=1), np.zeros(len(space))
    for place in range(of_kinds.shape[1]):
        kind = cheapest[:, place]
        taken = np.minimum(left, np.array([counts[one] for one in range(of_kinds.shape[1])])[kind])
        least += taken * of_kinds[np.arange(len(space)), kind]
        left = left - taken
    return least


def _saved_by(q: Question, kind: str, tp: int, cp: int, mbs: int, ep: int, etp: int) -> list[int]:
    """Bytes that a layer of each kind saves per micro-batch."""
    dp = ep * etp
    e = Experiment.canonical(
        model=q.model,
        dp_shard=dp,
        zero_stage=1 if dp * cp > 1 else 0,
        tp=tp,
        cp=cp,
        ep=ep,
        etp=etp,
        micro_batch_size=mbs,
        global_batch_size=dp * mbs,
        seq_len=q.seq_len,
        recompute=kind,
        activation_offload=q.activation_offload,
        precision=q.precision,
        routing=q.routing,
        routing_imbalance=q.routing_imbalance,
    )
    c = COMPUTE_BYTES[e.precision]
    return [sum(saved_parts(e, layer, c, recomputed=True).values()) for layer in layers_of(e.model).kinds]
