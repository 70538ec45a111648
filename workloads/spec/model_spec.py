"""Describes the shape of a model, with routed experts and latent attention, and reads it from user input. No torch
here.

Some fields have no effect in some models: the head size with latent attention, the feed-forward size if every layer has
routed experts, the coefficient of a balance that is switched off. `canonical_model` gives them the values that they
have in the models of users. Stored models keep the values that they were stored with, because ids are hashes over them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_args

from workloads.spec import model_relations
from workloads.spec.checks import build, flag, mapping, number, one_of, shown, texts, whole_number
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import Attention, LatentAttention, Rope
from workloads.spec.layer_kinds.layer_list import MTP_LOSS_WEIGHT, LayerList, from_plain, to_plain
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer, Mixer
from workloads.spec.layer_kinds.model_parts import Balance as Balance
from workloads.spec.layer_kinds.model_parts import Gate as Gate
from workloads.spec.layer_kinds.model_parts import MLASpec as MLASpec
from workloads.spec.layer_kinds.model_parts import MoESpec as MoESpec
from workloads.spec.layer_kinds.summary import summary
from workloads.spec.model_fields import refuse_mistakes

Part = TypeVar("Part", "MoESpec", "MLASpec")

MODEL_SIZES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"),
)
"""Fields of `ModelSpec` that are whole numbers of at least 1, in the order of their checks."""
HEADS_DO_NOT_DIVIDE = "{label}: num_kv_heads={num_kv_heads} must divide num_heads={num_heads}"
"""Message of `ModelSpec` when it refuses; the report's explorer shows the same text."""


MOST_LAYERS = 10_000
"""A plan takes time for every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape of a Llama-like decoder: RMSNorm, RoPE, SwiGLU, no biases."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tie_embeddings: bool = False
    qk_norm: bool = False
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    moe: MoESpec | None = None
    mla: MLASpec | None = None
    layers: LayerList | None = None
    """The layers of a model that the other fields cannot express. They then follow from it
    (`workloads.spec.layer_kinds.summary`)."""

    def __post_init__(self) -> None:
        label = f"model {self.name}"
        for field in MODEL_SIZES:
            whole_number(f"{label}: {field}", getattr(self, field), 1, error=InvalidExperiment)
        if self.num_layers > MOST_LAYERS:
            raise InvalidExperiment(f"{label}: num_layers={self.num_layers:,} must be at most {MOST_LAYERS:,}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidExperiment(
                HEADS_DO_NOT_DIVIDE.format(label=label, num_kv_heads=self.num_kv_heads, num_heads=self.num_heads)
            )
        if self.mla is None:
            return
        if self.num_kv_heads != self.num_heads:
            raise InvalidExperiment(
                f"{label}: latent attention has keys and values for every head: num_kv_heads={self.num_kv_heads} "
                f"must equal num_heads={self.num_heads}"
            )
        if self.mla.v_head_dim > self.mla.qk_head_dim:
            raise InvalidExperiment(
                f"{label}: mla: v_head_dim={self.mla.v_head_dim} must be at most qk_nope_head_dim + qk_rope_head_dim = "
                f"{self.mla.qk_head_dim}: attention kernels take values no larger than queries"
            )
        if self.qk_norm:
            raise InvalidExperiment(
                f"{label}: latent attention has norms of latents, not of heads: qk_norm must be false"
            )

    @property
    def rope_dim(self) -> int:
        """Number of rotated columns of a query or key head: all of them, except with latent attention."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def streams(self) -> int:
        """Copies of the hidden state between layers: more than 1 with hyper-connections."""
        return 1 if self.layers is None else self.layers.streams

    @property
    def logit_cap(self) -> float:
        """Largest absolute logit; 0: no cap."""
        return 0.0 if self.layers is None else self.layers.logit_cap

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings before the first layer."""
        return math.sqrt(self.hidden_size) if self.layers is not None and self.layers.scaled_embedding else 1.0

    @property
    def mtp_modules(self) -> int:
        """Number of modules of multi-token prediction, which are the last ones of ``num_layers``."""
        return 0 if self.layers is None else self.layers.modules

    @property
    def mtp_loss_weight(self) -> float:
        """Factor of the mean loss of these modules; 0 without any."""
        return 0.0 if self.layers is None or not self.layers.modules else self.layers.mtp_loss_weight

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has a dense feed-forward part; otherwise ``ffn_hidden_size`` has no effect."""
        return self.moe is None or self.moe.num_dense_layers > 0

    def __hash__(self) -> int:
        """Hash of the name alone, for speed: a plan looks a model up in caches a hundred times a point."""
        return hash(self.name)


def model_to_dict(model: ModelSpec) -> dict[str, Any]:
    """Plain nested dict of every field, without ``layers`` if there are none. `dataclasses.asdict` takes ten times as
    long."""
    plain = _plain(model)
    for name in ("moe", "mla"):
        if plain[name] is not None:
            plain[name] = _plain(plain[name])
    if model.layers is None:  # stored models of earlier versions have no such field
        del plain["layers"]
    else:
        plain["layers"] = to_plain(model.layers)
    return plain


def _plain(part: ModelSpec | MoESpec | MLASpec) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.__slots__}


def canonical_model(model: ModelSpec) -> ModelSpec:
    """The same model with canonical values in the fields without effect, so that one model has one id.

    With latent attention ``head_dim`` is the size of a query. Without dense layers ``ffn_hidden_size`` is the number of
    routed columns that a token visits. Without a balance its coefficient is 0.
    """
    moe, mla = model.moe, model.mla
    canonical: dict[str, Any] = {}
    if mla is not None:
        canonical["head_dim"] = mla.qk_head_dim
    if moe is not None and not model.has_dense_layers:
        canonical["ffn_hidden_size"] = moe.experts_per_token * moe.expert_hidden_size
    if moe is not None and moe.balance == "none" and moe.balance_coefficient:
        canonical["moe"] = dataclasses.replace(moe, balance_coefficient=0.0)
    if all(getattr(model, name) == value for name, value in canonical.items()):
        return model
    return dataclasses.replace(model, **canonical)


def model_from_dict(fields: Mapping[str, Any]) -> ModelSpec:
    """Makes a canonical `ModelSpec` from user input (YAML). ``head_dim`` is hidden_size / num_heads if it is not given;
    fields without effect need not be given, nor ``num_kv_heads`` with latent attention.

    ``mtp_modules`` and ``mtp_loss_weight`` add modules of multi-token prediction to its layers.

    Raises `InvalidExperiment` for all unknown fields, with the closest known names, all missing and wrong values, and
    then for fields that do not fit together.
    """
    label = f"model {fields.get('name', '(unnamed)')}"
    fields = dict(fields)
    if fields.get("layers") is not None:
        fields = _of_layers(label, fields)
    refuse_mistakes(label, fields)
    for name in ("hidden_size", "num_heads"):
        if name in fields:
            whole_number(f"{label}: {name}", fields[name], 1, error=InvalidExperiment)
    _fill(label, fields)
    for name in ("rope_theta", "norm_eps"):
        if name in fields:  # a float, so that 1000000 and 1000000.0 are one model with one id
            place = f"{label}: {name}"
            fields[name] = _finite(place, number(place, fields[name], above=0, error=InvalidExperiment))
    if "name" in fields:
        fields["name"] = texts().check(f"{label}: name", fields["name"], error=InvalidExperiment)
    for name in ("tie_embeddings", "qk_norm"):
        if name in fields:
            flag(f"{label}: {name}", fields[name], error=InvalidExperiment)
    modules, loss_weight = fields.pop("mtp_modules", 0), fields.pop("mtp_loss_weight", None)
    model = canonical_model(checked_model(label, fields))
    if broken := broken_relations(model):
        raise InvalidExperiment(f"{label}: {'; '.join(broken)}")
    return _with_modules(label, model, modules, loss_weight)


def _with_modules(label: str, model: ModelSpec, modules: int, loss_weight: float | None) -> ModelSpec:
    """The model with modules of multi-token prediction. Raises `InvalidExperiment` for those of a list of layers that
    has some, and for a weight of none."""
    if loss_weight is not None and not modules:
        raise InvalidExperiment(f"{label}: mtp_loss_weight={loss_weight:g} without mtp_modules has no effect")
    if model.mtp_modules and modules:
        raise InvalidExperiment(
            f"{label}: mtp_modules={modules}, but its layers have {model.mtp_modules} (ahead); leave one of them out"
        )
    if model.num_layers + modules > MOST_LAYERS:
        raise InvalidExperiment(f"{label}: mtp_modules={modules} must be at most {MOST_LAYERS - model.num_layers:,}")
    return with_modules(model, modules, *([] if loss_weight is None else [float(loss_weight)]))


def _of_layers(label: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a model with a list of layers, from which all sizes of layers follow. Raises `InvalidExperiment`
    for sizes that say something else."""
    layers = from_plain(f"{label}: layers", fields["layers"])
    follows = summary(layers)
    for name, value in follows.items():
        given = fields.get(name, value)
        if given != value and not (isinstance(given, Mapping) and value is not None and value.items() <= given.items()):
            raise InvalidExperiment(f"{label}: {name}={shown(given)} does not fit its layers; leave {name} out")
    return {**fields, **follows, "layers": layers}


def broken_relations(model: ModelSpec) -> list[str]:
    """Sentences of the relations between fields that a model breaks (`workloads.spec.model_relations`)."""
    names: dict[str, Any] = {f"has_{part}": getattr(model, part) is not None for part in ("moe", "mla", "layers")}
    for part in (model, model.moe, model.mla):
        if part is not None:
            names |= {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return model_relations.broken(names)


def _fill(label: str, fields: dict[str, Any]) -> None:
    """Adds sizes that are not given because others determine them, or because they have no effect (then any value will
    do). Raises `InvalidExperiment` if no whole head size follows from ``hidden_size``."""
    moe = fields.get("moe")
    if isinstance(moe, Mapping) and not moe.get("num_dense_layers") and fields.get("ffn_hidden_size") is None:
        fields["ffn_hidden_size"] = 1
    if fields.get("mla") is not None:
        if fields.get("head_dim") is None:
            fields["head_dim"] = 1
        if fields.get("num_kv_heads") is None and "num_heads" in fields:
            fields["num_kv_heads"] = fields["num_heads"]
    elif fields.get("head_dim") is None and "hidden_size" in fields and "num_heads" in fields:
        hidden, heads = fields["hidden_size"], fields["num_heads"]
        if hidden % heads:
            raise InvalidExperiment(
                f"{label}: head_dim is not given, and hidden_size={hidden} is not a multiple of num_heads={heads}; "
                f"write head_dim, for example {max(2, 2 * round(hidden / heads / 2))}, or use another num_heads"
            )
        fields["head_dim"] = hidden // heads


def _finite(place: str, value: float) -> float:
    """Returns the number as a float. Raises `InvalidExperiment` if it is infinite."""
    if math.isinf(value):
        raise InvalidExperiment(f"{place}={value} must be a finite number")
    return float(value)


def checked_model(label: str, fields: Any) -> ModelSpec:
    values = mapping(label, fields, error=InvalidExperiment)
    if values.get("moe") is not None:
        values["moe"] = _part(MoESpec, f"{label}: moe", values["moe"])
    if values.get("mla") is not None:
        values["mla"] = _part(MLASpec, f"{label}: mla", values["mla"])
    if isinstance(values.get("layers"), Mapping):
        values["layers"] = from_plain(f"{label}: layers", values["layers"])
    return build(ModelSpec, label, values, noun="field", error=InvalidExperiment)


def _part(kind: type[Part], place: str, fields: Any) -> Part:
    """Makes the part for experts or latent attention. Whole numbers must be at least 1, or at least 0 if they have a
    default; some fields have a list of values."""
    values = mapping(place, fields, error=InvalidExperiment)
    for name in ("weight_scale", "balance_coefficient"):
        if name in values:  # floats, so that 1 and 1.0 are one model with one id
            values[name] = _finite(
                f"{place}: {name}", number(f"{place}: {name}", values[name], least=0, error=InvalidExperiment)
            )
    part = build(kind, place, values, noun="field", error=InvalidExperiment)
    for field in dataclasses.fields(kind):
        value, where = getattr(part, field.name), f"{place}: {field.name}"
        if field.name in _PART_CHOICES:
            one_of(*_PART_CHOICES[field.name]).check(where, value, error=InvalidExperiment)
        elif field.name == "normalize_weights":
            flag(where, value, error=InvalidExperiment)
        elif field.default is dataclasses.MISSING or isinstance(field.default, int):
            least = 1 if field.default is dataclasses.MISSING else 0
            whole_number(where, value, least, error=InvalidExperiment)
    if isinstance(part, MoESpec) and part.experts_per_token > part.num_experts:
        raise InvalidExperiment(
            f"{place}: experts_per_token={part.experts_per_token} must be at most num_experts={part.num_experts}"
        )
    return part


_PART_CHOICES = {"gate": get_args(Gate), "balance": get_args(Balance)}


@lru_cache(maxsize=256)
def layers_of(model: ModelSpec) -> LayerList:
    """The model's layers by kind. Of a model described by numbers these are dense layers, then those with experts."""
    if model.layers is not None:
        return model.layers
    mixer, moe = _mixer(model), model.moe
    dense = model.num_layers if moe is None else min(moe.num_dense_layers, model.num_layers)
    kinds = [Layer(mixer=mixer, mlp=DenseMLP(width=model.ffn_hidden_size, activation="silu"))] if dense else []
    if moe is not None and dense < model.num_layers:
        kinds.append(Layer(mixer=mixer, mlp=_experts(moe)))
    return LayerList(tuple(kinds), (0,) * dense + (len(kinds) - 1,) * (model.num_layers - dense))


def with_modules(model: ModelSpec, count: int, loss_weight: float = MTP_LOSS_WEIGHT) -> ModelSpec:
    """The model with modules of multi-token prediction after its last layer, which are more of its layers; itself for
    none."""
    if not count:
        return model
    layers = layers_of(model).with_modules(count, loss_weight)
    return dataclasses.replace(model, layers=layers, num_layers=model.num_layers + count)


def _mixer(model: ModelSpec) -> Mixer:
    rope, mla = Rope(model.rope_theta), model.mla
    if mla is None:
        return Attention(
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            value_dim=model.head_dim,
            rope=rope,
            norm="head" if model.qk_norm else "none",
        )
    return LatentAttention(
        heads=model.num_heads,
        kv_rank=mla.kv_lora_rank,
        nope_dim=mla.qk_nope_head_dim,
        rope_dim=mla.qk_rope_head_dim,
        value_dim=mla.v_head_dim,
        q_rank=mla.q_lora_rank,
        rope=rope,
    )


def _experts(moe: MoESpec) -> RoutedMLP:
    shared = moe.num_shared_experts * moe.expert_hidden_size
    return RoutedMLP(
        experts=moe.num_experts,
        chosen=moe.experts_per_token,
        expert=DenseMLP(width=moe.expert_hidden_size, activation="silu"),
        shared=DenseMLP(width=shared, activation="silu") if shared else None,
        shared_experts=moe.num_shared_experts,
        score=moe.gate,
        normalize=moe.normalize_weights,
        scale=moe.weight_scale,
        correction=moe.balance == "bias",
        balance_loss=moe.balance_coefficient if moe.balance == "aux_loss" else 0.0,
    )
