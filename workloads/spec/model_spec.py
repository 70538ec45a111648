"""Describes the shape of a model, with routed experts and latent attention, and reads it from user input. No torch
here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from workloads.spec.checks import build, flag, mapping, number, one_of, texts, whole_number
from workloads.spec.errors import InvalidExperiment

Part = TypeVar("Part", "MoESpec", "MLASpec")

Gate = Literal["softmax", "sigmoid"]
Balance = Literal["none", "aux_loss", "bias"]

MODEL_SIZES = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"),
)
"""Fields of `ModelSpec` that are whole numbers of at least 1, in the order of their checks."""
HEADS_DO_NOT_DIVIDE = "{label}: num_kv_heads={num_kv_heads} must divide num_heads={num_heads}"
"""Message of `ModelSpec` when it refuses; the report's explorer shows the same text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """Routed feed-forward layers. The first ``num_dense_layers`` layers stay dense, with ``ffn_hidden_size``."""

    num_experts: int
    experts_per_token: int
    expert_hidden_size: int
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    gate: Gate = "softmax"
    """Function that turns an expert's logit into its score: softmax over all experts (Mixtral, arXiv:2401.04088) or
    sigmoid of each logit (DeepSeek-V3, arXiv:2412.19437)."""
    normalize_weights: bool = True
    """Divide the weights of a token's chosen experts by their sum."""
    weight_scale: float = 1.0
    """Factor by which the weights are finally multiplied."""
    balance: Balance = "none"
    """Method that balances learned routing over the experts. ``aux_loss``: a loss term for every sequence (DeepSeek-V3,
    equations 17 to 20); ``bias``: one number per expert, added to the scores for the choice of experts and moved
    against the load after every step (arXiv:2408.15664)."""
    balance_coefficient: float = 0.0
    """Coefficient of the loss term, or size of one change of the bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads are
    projected from one latent, queries from another, and all heads share one rotated key."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int = 0
    """Size of the latent of queries; 0: queries are projected from the input without a latent (DeepSeek-V2-Lite)."""

    @property
    def qk_head_dim(self) -> int:
        """Size of a query or a key: a part without position and a rotated one."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


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

    def __hash__(self) -> int:
        """Hash of the name alone, for speed: a plan looks a model up in caches a hundred times a point."""
        return hash(self.name)


def model_from_dict(fields: Mapping[str, Any]) -> ModelSpec:
    """Makes a `ModelSpec` from user input (YAML); ``head_dim`` is hidden_size / num_heads if it is not given.

    Raises `InvalidExperiment` for an unknown field, with the closest known name, and for a wrong value.
    """
    label = f"model {fields.get('name', '(unnamed)')}"
    fields = dict(fields)
    for name in ("hidden_size", "num_heads"):
        if name in fields:
            whole_number(f"{label}: {name}", fields[name], 1, error=InvalidExperiment)
    if fields.get("head_dim") is None and "hidden_size" in fields and "num_heads" in fields:
        fields["head_dim"] = fields["hidden_size"] // fields["num_heads"]
    for name in ("rope_theta", "norm_eps"):
        if name in fields:  # a float, so that 1000000 and 1000000.0 are one model with one id
            fields[name] = float(number(f"{label}: {name}", fields[name], above=0, error=InvalidExperiment))
    if "name" in fields:
        fields["name"] = texts().check(f"{label}: name", fields["name"], error=InvalidExperiment)
    for name in ("tie_embeddings", "qk_norm"):
        if name in fields:
            flag(f"{label}: {name}", fields[name], error=InvalidExperiment)
    return checked_model(label, fields)


def checked_model(label: str, fields: Any) -> ModelSpec:
    values = mapping(label, fields, error=InvalidExperiment)
    if values.get("moe") is not None:
        values["moe"] = _part(MoESpec, f"{label}: moe", values["moe"])
    if values.get("mla") is not None:
        values["mla"] = _part(MLASpec, f"{label}: mla", values["mla"])
    return build(ModelSpec, label, values, noun="field", error=InvalidExperiment)


def _part(kind: type[Part], place: str, fields: Any) -> Part:
    """Makes the part for experts or latent attention. Whole numbers must be at least 1, or at least 0 if they have a
    default; some fields have a list of values."""
    values = mapping(place, fields, error=InvalidExperiment)
    for name in ("weight_scale", "balance_coefficient"):
        if name in values:  # floats, so that 1 and 1.0 are one model with one id
            values[name] = float(number(f"{place}: {name}", values[name], least=0, error=InvalidExperiment))
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
