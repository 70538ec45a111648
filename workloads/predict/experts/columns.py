"""Routed experts of a table's rows: their columns, and the experiment whose costs tell what they change.

The closed form of a row (`workloads.predict.time_terms`) knows dense models. A row with experts is predicted as the
dense model with equally many used columns, times the ratio of the two in this project's calibrated costs: of their step
times (as `workloads.predict.layouts` does for plans) and of their memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from workloads.predict.cells.words import Refused
from workloads.predict.points import RECOMPUTE, Points, fp8_kind
from workloads.predict.profiles import Profile
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS
from workloads.spec.model_spec import MLASpec, ModelSpec, MoESpec

LEARNED = 1.7
"""Tokens of the fullest rank over the mean if the router chooses the experts: explains how much longer four steps of
Qwen3-235B-A22B on 256 H100 take without forced balance, 1.25 to 1.09 times from 16,384 to 131,072 tokens a sequence
(yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3): 1.64, 1.71, 1.74 and 1.74. One of this project's mixtures of two
ranks had 1.68 (docs/experts.md)."""

EXPERT_COLUMNS = ("num_experts", "experts_per_token", "expert_ffn", "shared_experts", "dense_layers")


class Experts(NamedTuple):
    """Routed experts of a model, all sizes in whole numbers."""

    number: int
    per_token: int
    columns: int
    """Feed-forward size of one expert."""
    shared: int
    """Number of experts that every token uses, of the same size."""
    dense_layers: int
    """Number of first layers without experts."""
    dense_columns: int
    """Feed-forward size of these layers."""
    mla: MLASpec | None = None
    """Latent attention; None: as the row's heads."""
    groups: tuple[int, int] = (1, 1)
    """Number of equal groups of experts, and from how many of these a token chooses."""
    dispatched: bool = False
    """Whether a token goes once to each rank (`Profile.dispatches`)."""
    imbalance: float = 1.0
    """Tokens of the fullest rank over the mean."""
    fused: bool = False
    """Whether its experts are one kernel beside which tokens are exchanged (`Profile.fuses_experts`)."""

    def used_columns(self, layers: float) -> float:
        """Mean number of feed-forward columns that a token uses in a layer."""
        routed = (self.per_token + self.shared) * self.columns
        return (self.dense_layers * self.dense_columns + (layers - self.dense_layers) * routed) / layers


def experts_of(
    n: Mapping[str, float | None], model: Mapping[str, float], ep: float, routed: bool, note: list[str]
) -> Experts | None:
    """Experts that a row's numbers describe; None for a dense model. ``model``: fields of `Points` of its dense layers.

    Raises `Refused` if they describe them in part, or contradict each other. ``routed``: whether expert parallelism
    without such columns is accepted.
    """
    if not any(n[name] for name in EXPERT_COLUMNS):
        if ep > 1:
            if not routed:
                raise Refused(
                    f"ep {ep:g}, but no experts: give num_experts, experts_per_token and expert_ffn, or calibrate with "
                    "rows that have ep > 1"
                )
            note.append("experts are in no column: taken as a dense model, and corrected by the calibration")
        return None
    if missing := [name for name in EXPERT_COLUMNS[:3] if not n[name]]:
        raise Refused(f"the experts are described in part: {' and '.join(missing)} not given")
    count, per_token, columns, shared, dense = (int(n[name] or 0) for name in EXPERT_COLUMNS)
    for name, usual in (("shared_experts", "0"), ("dense_layers", "0")):
        if n[name] is None:
            note.append(f"{name} not given: {usual}")
    if per_token > count:
        raise Refused(f"experts_per_token {per_token} is more than num_experts {count}")
    if dense >= model["layers"]:
        raise Refused(f"dense_layers {dense} leaves no layer with experts of {model['layers']:g} layers")
    if model["matrices"] != 3:
        raise Refused("experts without a gate cannot be predicted: gated_mlp is false")
    if count % ep:
        raise Refused(f"ep {ep:g} does not divide num_experts {count}")
    return Experts(count, per_token, columns, shared, dense, max(1, round(model["ffn"])))


def dispatched_by(profile: Profile, experts: Experts, fp8: float, dispatched: bool | None, learned: bool) -> Experts:
    """The experts with what a code base does to send tokens to them. ``fp8``: `fp8_kind` of the row's products;
    ``dispatched``: what the row says, None: as the code base does; ``learned``: whether the router chooses. Then sizes
    are not known in advance, and recipes that need them do not apply."""
    sent = profile.dispatches if dispatched is None else dispatched
    fused = sent and not learned and any(fp8_kind(one) == fp8 for one in profile.fuses_experts)
    return experts._replace(dispatched=sent, fused=fused, imbalance=LEARNED if learned else 1.0)


def experiment_of(points: Points, place: int, experts: Experts | None, **fields: object) -> Experiment:
    """The experiment that a row describes, as closely as this engine can run it. ``fields``: values of `Experiment`
    that replace those of the row.

    Raises `ValueError` for numbers that are not whole, and `InvalidExperiment` for a model that cannot be described.
    """
    names = (
        *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied", "seq", "mbs", "micro_batches", "dp", "tp"),
        *("pp", "vpp", "cp", "ep", "zero", "recompute", "recomputed", "fp8", "fp16", "matrices"),
        "queries",
    )
    number = {name: float(getattr(points, name)[place]) for name in names}
    if experts is not None:
        number["ffn"] = experts.dense_columns
    number["recomputed"] = round(1 / number["recomputed"])
    if any(value != round(value) for value in number.values()):
        raise ValueError("not in whole numbers")
    n = {name: round(value) for name, value in number.items()}
    if n["queries"] % n["heads"]:
        raise ValueError("heads do not divide the hidden size")
    if n["matrices"] != 3:
        raise ValueError("feed-forward layers without a gate")
    if n["ep"] > 1 and experts is None:
        raise ValueError("with experts that no column describes")
    shape = tuple(n[name] for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied", "queries"))
    schedule = {"pp_schedule": "interleaved_1f1b" if n["vpp"] > 1 else "1f1b"} if n["pp"] > 1 else {}
    values: dict[str, Any] = {
        "model": _model(shape, experts),
        **{name: n[name] for name in ("dp", "tp", "pp", "cp", "ep")},
        "virtual_stages": n["vpp"],
        "zero_stage": n["zero"],
        "micro_batch_size": n["mbs"],
        "global_batch_size": n["dp"] * n["mbs"] * n["micro_batches"],
        "seq_len": n["seq"],
        "recompute": RECOMPUTE[n["recompute"]],
        "recompute_every": n["recomputed"],
        "precision": "fp16" if n["fp16"] else ("bf16", "fp8_tensorwise", "fp8_rowwise", *PLANNED_FORMATS)[n["fp8"]],
        **schedule,
        **fields,
    }
    return Experiment.canonical(**values)


@lru_cache(maxsize=1024)
def _model(shape: tuple[int, ...], experts: Experts | None) -> ModelSpec:
    """Returns the same object for equal shapes, under a name of its own: other caches use the model's name as key."""
    layers, hidden, heads, kv_heads, ffn, vocab, tied, queries = shape
    mla = experts.mla if experts is not None else None
    head_dim = queries // heads if mla is None else mla.qk_nope_head_dim + mla.qk_rope_head_dim
    kind = f"{heads}:{kv_heads} heads" if head_dim == hidden // heads else f"{heads}:{kv_heads} heads of {head_dim}"
    moe = experts and MoESpec(
        num_experts=experts.number,
        experts_per_token=experts.per_token,
        expert_hidden_size=experts.columns,
        num_shared_experts=experts.shared,
        num_dense_layers=experts.dense_layers,
    )
    return ModelSpec(
        name=f"{layers}x{hidden}, {kind}, {ffn}, {vocab}, {tied}" + (f", {experts}" if moe else ""),
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=ffn,
        vocab_size=vocab,
        tie_embeddings=bool(tied),
        moe=moe,
        mla=mla,
    )
