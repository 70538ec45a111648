"""The layers of a model that a few numbers cannot describe, and the same as plain mappings for JSON and YAML."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from workloads.spec.checks import check_names, flag, mapping, number, one_of, text, whole_number
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.attention import (
    Attention,
    BlockSparseAttention,
    CompressedAttention,
    Indexer,
    LatentAttention,
    Rope,
)
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import HyperConnections, Layer, LayeredModel
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, LightningAttention, Mamba2
from workloads.spec.layer_kinds.spans import Chunk, Full, Window

PARTS: Mapping[str, type[Any]] = {
    "full": Full,
    "window": Window,
    "chunk": Chunk,
    "rope": Rope,
    "indexer": Indexer,
    "attention": Attention,
    "latent_attention": LatentAttention,
    "block_sparse_attention": BlockSparseAttention,
    "compressed_attention": CompressedAttention,
    "gated_delta_rule": GatedDeltaRule,
    "kimi_delta": KimiDelta,
    "mamba2": Mamba2,
    "lightning_attention": LightningAttention,
    "dense": DenseMLP,
    "routed": RoutedMLP,
}
"""Every part of a layer by its name in files. A new kind of mixer or MLP is added here."""
_NAMES = {kind: name for name, kind in PARTS.items()}
_MOST_KINDS = 100
MTP_LOSS_WEIGHT = 0.1
"""Megatron-LM's default (``--mtp-loss-scaling-factor``), and DeepSeek-V3's for its last 4.8 T tokens after 0.3 for the
first 10 T (arXiv:2412.19437, section 4.2)."""
_FORMER_CAP = 30.0
"""``final_logit_softcapping`` of the families that files of earlier versions could have a cap of: Gemma 2 and 4."""


@dataclass(frozen=True, slots=True)
class LayerList:
    """Layers by kind."""

    kinds: tuple[Layer, ...]
    """Kinds in the order of their first layers."""
    order: tuple[int, ...]
    """Index of each layer's kind."""
    streams: int = 1
    """Copies of the hidden state between layers (hyper-connections)."""
    logit_cap: float = 0.0
    """Largest absolute logit; 0: no cap."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of the hidden size."""
    same_cost: tuple[str, ...] = ()
    """What the model computes otherwise than its kinds at the same cost, by name: factors of residuals and logits, a
    norm after the rotation. No engine here computes it."""
    mtp_loss_weight: float = MTP_LOSS_WEIGHT
    """Factor of the mean loss of the modules of multi-token prediction, if there are any."""

    @property
    def modules(self) -> int:
        """Number of modules of multi-token prediction, which are the last layers."""
        count = 0
        for at in reversed(self.order):
            if not self.kinds[at].ahead:
                break
            count += 1
        return count

    @classmethod
    def of(cls, model: LayeredModel) -> LayerList:
        kinds = [layer for layer, _ in model.distinct()]
        place = {layer: at for at, layer in enumerate(kinds)}
        return cls(
            tuple(kinds),
            tuple(place[layer] for layer in model.layers),
            model.streams.streams if model.streams is not None else 1,
            model.logit_cap,
            model.scaled_embedding,
            model.same_cost,
        )

    def with_modules(self, count: int, loss_weight: float = MTP_LOSS_WEIGHT) -> LayerList:
        """The list with modules of multi-token prediction of the last layer's kind at its end."""
        if not count:
            return self
        module = dataclasses.replace(self.kinds[self.order[-1]], ahead=True)
        order = (*self.order, *[len(self.kinds)] * count)
        return dataclasses.replace(self, kinds=(*self.kinds, module), order=order, mtp_loss_weight=loss_weight)

    def without_modules(self) -> LayerList:
        """The list without its modules of multi-token prediction."""
        kinds = tuple(kind for kind in self.kinds if not kind.ahead)
        order = tuple(kinds.index(self.kinds[at]) for at in self.order if not self.kinds[at].ahead)
        return dataclasses.replace(self, kinds=kinds, order=order, mtp_loss_weight=MTP_LOSS_WEIGHT)

    def model(self, name: str, hidden: int, vocabulary: int, *, tied: bool, norm_eps: float) -> LayeredModel:
        """The whole model, whose sums are parameters and FLOPs."""
        return LayeredModel(
            name=name,
            hidden_size=hidden,
            vocab_size=vocabulary,
            tie_embeddings=tied,
            layers=tuple(self.kinds[at] for at in self.order),
            norm_eps=norm_eps,
            streams=HyperConnections(self.streams) if self.streams > 1 else None,
            logit_cap=self.logit_cap,
            scaled_embedding=self.scaled_embedding,
            same_cost=self.same_cost,
        )


def to_plain(layers: LayerList) -> dict[str, Any]:
    """The list as JSON and YAML hold it. Options at their default are left out."""
    plain: dict[str, Any] = {"kinds": [_of_layer(layer) for layer in layers.kinds], "order": list(layers.order)}
    for field in ("streams", "logit_cap", "scaled_embedding", "mtp_loss_weight"):
        if getattr(layers, field) != LayerList.__dataclass_fields__[field].default:
            plain[field] = getattr(layers, field)
    if layers.same_cost:
        plain["same_cost"] = list(layers.same_cost)
    return plain


def _of_layer(layer: Layer) -> dict[str, Any]:
    return {
        "mixer": None if layer.mixer is None else _of_part(layer.mixer),
        "mlp": None if layer.mlp is None else _of_part(layer.mlp),
        "norms": layer.norms,
        **{name: True for name in ("outputs_normed", "ahead") if getattr(layer, name)},
    }


def _of_part(part: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {"kind": _NAMES[type(part)]}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if value != field.default:
            plain[field.name] = _of_part(value) if dataclasses.is_dataclass(value) else value
    return plain


def from_plain(place: str, value: Any) -> LayerList:
    """Inverse of `to_plain`. Raises `InvalidExperiment` that names what is wrong."""
    fields = mapping(place, value, error=InvalidExperiment)
    known = [field.name for field in dataclasses.fields(LayerList)]
    check_names(place, fields, known, ("kinds", "order"), noun="field", error=InvalidExperiment)
    kinds, order = fields["kinds"], fields["order"]
    for name in ("kinds", "order"):
        if not isinstance(fields[name], list | tuple) or not fields[name]:
            raise InvalidExperiment(f"{place}: {name} must be a list with at least one entry")
    if len(kinds) > _MOST_KINDS:
        raise InvalidExperiment(
            f"{place}: kinds has {len(kinds)} entries; at most {_MOST_KINDS} are known to be useful"
        )
    for at in order:
        whole_number(f"{place}: order", at, 0, error=InvalidExperiment)
    if set(order) != set(range(len(kinds))):
        raise InvalidExperiment(f"{place}: order must use each of the {len(kinds)} kinds, as 0 to {len(kinds) - 1}")
    of_kinds = tuple(_layer(f"{place}: kinds[{at}]", kind) for at, kind in enumerate(kinds))
    _refuse_module_places(place, [of_kinds[at].ahead for at in order])
    return LayerList(
        of_kinds,
        tuple(order),
        whole_number(f"{place}: streams", fields.get("streams", 1), 1, error=InvalidExperiment),
        _logit_cap(f"{place}: logit_cap", fields.get("logit_cap", 0.0)),
        flag(f"{place}: scaled_embedding", fields.get("scaled_embedding", False), error=InvalidExperiment),
        _same_cost(f"{place}: same_cost", fields.get("same_cost", [])),
        float(
            number(
                f"{place}: mtp_loss_weight",
                fields.get("mtp_loss_weight", MTP_LOSS_WEIGHT),
                above=0,
                error=InvalidExperiment,
            )
        ),
    )


def _refuse_module_places(place: str, ahead: list[bool]) -> None:
    """Raises `InvalidExperiment` unless modules of multi-token prediction follow the last layer, of which there is
    one."""
    if ahead != sorted(ahead):
        raise InvalidExperiment(
            f"{place}: order has a layer after a module of multi-token prediction (ahead); modules are the last ones"
        )
    if all(ahead):
        raise InvalidExperiment(f"{place}: order has modules of multi-token prediction (ahead) alone, and no layer")


def _same_cost(place: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidExperiment(f"{place} must be a list of texts")
    return tuple(text(place, entry) for entry in value)


def _logit_cap(place: str, value: Any) -> float:
    """Files of earlier versions say only whether there is a cap."""
    if isinstance(value, bool):
        return _FORMER_CAP if value else 0.0
    return float(number(place, value, least=0, error=InvalidExperiment))


def _layer(place: str, value: Any) -> Layer:
    fields = mapping(place, value, error=InvalidExperiment)
    known = ("mixer", "mlp", "norms", "outputs_normed", "ahead")
    check_names(place, fields, known, ("mixer", "mlp"), noun="field", error=InvalidExperiment)
    norms = whole_number(f"{place}: norms", fields.get("norms", 2), 0, error=InvalidExperiment)
    mixer, mlp = (
        None if fields[name] is None else _part(f"{place}: {name}", fields[name]) for name in ("mixer", "mlp")
    )
    if isinstance(mixer, DenseMLP | RoutedMLP) or not isinstance(mlp, DenseMLP | RoutedMLP | None):
        raise InvalidExperiment(f"{place}: mixer must be a kind of mixer, and mlp dense or routed")
    outputs, ahead = (
        flag(f"{place}: {name}", fields.get(name, False), error=InvalidExperiment)
        for name in ("outputs_normed", "ahead")
    )
    return Layer(mixer=mixer, mlp=mlp, norms=norms, outputs_normed=outputs, ahead=ahead)


def _part(place: str, value: Any) -> Any:
    fields = mapping(place, value, error=InvalidExperiment)
    name = one_of(*PARTS).check(f"{place}: kind", fields.pop("kind", None), error=InvalidExperiment)
    kind = PARTS[name]
    named = {field.name: field for field in dataclasses.fields(kind)}
    needed = [field.name for field in named.values() if field.default is dataclasses.MISSING]
    check_names(place, fields, list(named), needed, noun="field", error=InvalidExperiment)
    hints = _hints(name)
    return kind(**{name: _value(f"{place}: {name}", hints[name], given) for name, given in fields.items()})


@lru_cache(maxsize=64)
def _hints(name: str) -> dict[str, Any]:
    return typing.get_type_hints(PARTS[name])


def _value(place: str, hint: Any, value: Any) -> Any:
    """A field's value, checked by the type of the field."""
    if hint is bool:
        return flag(place, value, error=InvalidExperiment)
    if hint is int:
        return whole_number(place, value, 0, error=InvalidExperiment)
    if hint is float:
        return float(number(place, value, least=0, error=InvalidExperiment))
    if hint is str:
        return text(place, value)
    if typing.get_origin(hint) is typing.Literal:
        return one_of(*typing.get_args(hint)).check(place, value, error=InvalidExperiment)
    if value is None and type(None) in typing.get_args(hint):
        return None
    part = _part(place, value)
    if not isinstance(part, hint):
        raise InvalidExperiment(f"{place}: {_NAMES[type(part)]} cannot stand here")
    return part
