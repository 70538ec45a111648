"""Values of the axes of `sweep.advising.space`: those that a question gives, and those that are tried otherwise."""

from __future__ import annotations

from math import gcd
from typing import Any

from sweep.advising.question import Question
from workloads.costs.shape.held_model import kv_heads_fit
from workloads.rules.derived_values import divisors
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import ENGINE
from workloads.spec.model_layers import splits_of

KINDS = ("none", "selective", "full")
"""Kinds of recomputation, in the order of `workloads.predict.points.RECOMPUTE`."""
_LARGEST_MICRO_BATCH = 16
_LARGEST_CP = 16
_LEAST_SEQUENCE = 2048
"""Fewest tokens of a sequence on a context-parallel rank, unless ``cp`` is given: shorter parts are slower."""
_EVERY = (1, 2, 4)
_REPLICAS = (1, 2, 4, 8, 16, 32, 64)
_SCHEDULES = (
    *(("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("interleaved_zero_bubble", 1)),
    *(("interleaved_zero_bubble", 2), ("zero_bubble_v", 2), ("dualpipe_v", 2)),
)
"""Pairs (schedule, virtual stages). GPipe is left out: it takes as long as 1F1B and more memory."""
_TWOS = tuple(2**power for power in range(17))


def axes_of(q: Question) -> dict[str, tuple[Any, ...]]:
    """The values of each axis that rows and their groups take: the question's, or those that are tried by default.
    Raises `InvalidSweep` for a kind of recomputation that is not searched."""
    model, moe = q.model, q.model.moe
    largest, layers = max(q.sizes), model.num_layers
    micro = [size for size in divisors(q.global_batch_size) if size <= _LARGEST_MICRO_BATCH]
    alike = max(q.cluster.domain, gcd(model.num_heads, model.num_kv_heads))  # no copies of heads across the network
    tp = [one for one in tensor_degrees(q) if one <= min(largest, alike)]
    default: dict[str, tuple[Any, ...]] = {
        "tp": tuple(tp),
        "cp": tuple(cp for cp in _TWOS if cp == 1 or (cp <= _LARGEST_CP and q.seq_len >= cp * _LEAST_SEQUENCE)),
        "pp": tuple(sorted({one for one in (*divisors(layers), *_TWOS) if one <= min(layers, largest)})),
        "ep": tuple(divisors(moe.num_experts)) if moe is not None else (1,),
        "zero_stage": (0, 1, 2, 3),
        "dp_replicate": _REPLICAS,
        "micro_batch_size": tuple(micro),
        "recompute": KINDS,
        "recompute_every": _EVERY,
        "cp_kind": ("ring", "allgather", "ulysses"),
    }
    values_by_axis = {name: q.axes.get(name, values) for name, values in default.items()}
    values_by_axis["etp"] = q.axes.get("etp", tuple(sorted({1, *values_by_axis["tp"]})) if moe is not None else (1,))
    if q.chooses_by_stage:
        values_by_axis["recompute"] = KINDS
    for name in values_by_axis["recompute"]:
        if name not in KINDS:
            raise InvalidSweep(f"advise: recompute={name} is not searched; it may be {', '.join(KINDS)} or auto")
    return values_by_axis


def schedules_of(q: Question) -> tuple[tuple[str, int], ...]:
    """The shipped pairs, restricted by the user; all pairs of the user's values if both axes are given."""
    names, stages = q.axes.get("pp_schedule"), q.axes.get("virtual_stages")
    if names is not None and stages is not None:
        pairs = tuple((name, v) for name in names for v in stages)
    else:
        pairs = tuple(
            one for one in _SCHEDULES if (names is None or one[0] in names) and (stages is None or one[1] in stages)
        )
    if not pairs and names != ("none",):
        raise InvalidSweep(
            f"advise: pp_schedule={list(names or ())} with virtual_stages={list(stages or ())} is not searched; known: "
            f"{', '.join(f'{name} with {v}' for name, v in _SCHEDULES)}; or give both"
        )
    return pairs


def tensor_degrees(q: Question) -> list[int]:
    """Tensor-parallel degrees that divide query heads, columns and vocabulary, and key and value heads, too, or of
    which each rank has a copy of one, in this project's engine."""
    model, moe = q.model, q.model.moe
    if model.layers is not None:
        split = gcd(model.num_heads, model.vocab_size, *splits_of(model)[2:])
    else:
        shared = moe.num_shared_experts * moe.expert_hidden_size if moe is not None else 0
        split = gcd(model.num_heads, model.ffn_hidden_size if model.has_dense_layers else 0, model.vocab_size, shared)
    fits = [one for one in divisors(split) if kv_heads_fit(model, one)]
    return [one for one in fits if q.engine == ENGINE or model.num_kv_heads % one == 0]
