"""Kinds of layers and number formats that this project's engine, or the engines behind adapters, do not run. They are
planned, and refused by name where something would run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from workloads.costs.shape.params import whole_model
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment_values import PLANNED_FORMATS
from workloads.spec.layer_kinds.attention import Attention, LatentAttention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.model_spec import ModelSpec

MULTI_TOKEN = "modules of multi-token prediction"
RUN_BY_KIND = (
    "attention without positions",
    "rotary positions of a part",
    "biases of queries, keys and values",
    "a bias of the attention's output",
    "a norm of queries and keys without a weight",
    "a norm of queries and keys over all heads",
    "norms of outputs in place of inputs",
    "an output gate of attention",
    "attention sinks",
    "a cap of attention scores",
    "scaled values",
    "values of another size than keys",
    "attention that differs by layer",
    "dense layers after routed ones",
    "a gate of the shared expert",
    "Mamba-2",
    "gated delta rule",
    "KDA",
    "latent attention without positions",
    "layers of a mixer alone",
    "layers of an MLP alone",
    "router weights on the inputs of experts",
    "latent experts",
    "biases of experts",
    "a bias of the router",
    "shared experts of another width",
    "a dense MLP beside the experts",
    "a norm of values",
    "scores scaled by",
    "shared keys and values",
    "scales of the router",
    "a cap of the logits",
    "scaled embeddings",
    MULTI_TOKEN,
)
"""Beginnings of the names, in `workloads.spec.config_json.expressible`, of what the engine runs although numbers cannot
describe it."""
_SPANS = re.compile(r"(sliding|chunked) \d+ attention")
"""Names of attention to windows and chunks, which it runs, too."""
_ACTIVATIONS = {(True, "silu"), (True, "gelu_tanh"), (False, "relu2")}
"""(gated, activation) of the dense MLPs that the engine runs (`workloads.engine.kind_ops.activations`)."""
_OF_EXPERTS = {*_ACTIVATIONS, (True, "clamped_silu")}
"""The same of experts (`workloads.engine.kind_ops.weighted_activations`)."""


@lru_cache(maxsize=256)
def adapters_lack(model: ModelSpec) -> tuple[str, ...]:
    """What the model's layers have that the engines behind adapters lack, by name: all that numbers do not describe."""
    if model.layers is None:
        return ()
    from workloads.spec.config_json.expressible import not_expressible

    return tuple(not_expressible(whole_model(model)))


@lru_cache(maxsize=256)
def lacking_kinds(model: ModelSpec) -> tuple[str, ...]:
    """What the model's layers have that the engine lacks, by name; empty if it runs them."""
    if model.layers is None:
        return ()
    kinds = [kind for kind, _ in whole_model(model).distinct()]
    run = {*_mlps_that_run(kinds), "sandwich norms (4 a layer)", "sandwich norms (7 a layer)"}
    lacking = [
        name
        for name in adapters_lack(model)
        if not name.startswith(RUN_BY_KIND) and not _SPANS.fullmatch(name) and name not in run
    ]
    return tuple(dict.fromkeys([*lacking, *_in_other_combinations(kinds)]))


def _mlps_that_run(kinds: list[Layer]) -> Iterator[str]:
    """Names of dense MLPs and of experts with an activation that the engine has."""
    for mlp in (kind.mlp for kind in kinds):
        if isinstance(mlp, DenseMLP) and (mlp.gated, mlp.activation) in _ACTIVATIONS:
            yield f"{mlp.label} MLPs"
        elif isinstance(mlp, RoutedMLP) and (mlp.expert.gated, mlp.expert.activation) in _OF_EXPERTS:
            yield f"{mlp.expert.label} experts"


def _in_other_combinations(kinds: list[Layer]) -> Iterator[str]:
    """What the engine runs, but not with what else the model has."""
    latent = {kind.mixer for kind in kinds if isinstance(kind.mixer, LatentAttention)}
    mixers = [kind.mixer for kind in kinds if isinstance(kind.mixer, Attention)]
    if latent and (len(latent) > 1 or mixers):
        yield "latent attention beside another kind of attention"
    if any(mixer.shared_kv and mixer.value_dim != mixer.head_dim for mixer in mixers):
        yield "shared keys and values of two sizes"
    if any(_is_former_gemma(mixer) for mixer in mixers):
        yield "proportional rotary positions in a file of an earlier version, which lacks other fields (write it again)"
    if any(mixer.score_scale and mixer.norm == "none" and mixer.rope is None for mixer in mixers):
        yield "scaled scores of queries without norm and positions"
    if any(mixer.norm == "all_heads" and (mixer.score_scale or mixer.value_norm) for mixer in mixers):
        yield "a norm over all heads with scaled scores or normed values"
    if any(mixer.value_dim > mixer.head_dim for mixer in mixers):  # kernels with one size of heads get padded values
        yield "values larger than keys"
    routed = {kind.mlp for kind in kinds if isinstance(kind.mlp, RoutedMLP)}
    if len(routed) > 1:
        yield "experts that differ by layer"
    if any(mlp.expert.activation == "clamped_silu" and not mlp.expert.limit for mlp in routed):
        yield "clamped experts without a limit"
    shared = [mlp.shared for mlp in routed if mlp.shared is not None]
    yield from (f"shared {mlp.label} experts" for mlp in shared if (mlp.gated, mlp.activation) not in _ACTIVATIONS)
    if any(mlp.bias for mlp in shared):
        yield "biases of shared experts"
    if any(kind.outputs_normed and (kind.routed or kind.mixer is None or kind.mlp is None) for kind in kinds):
        yield "norms of outputs in place of inputs with experts or in layers of one part"
    if any(kind.outputs_normed and kind.norms != 2 for kind in kinds):
        yield "norms of outputs in place of inputs beside others"
    if any(2 < kind.norms <= 4 and kind.routed for kind in kinds):
        yield "norms of the outputs of experts"
    if any(kind.normed_beside and not _has_parts_beside(kind) for kind in kinds):
        yield "seven norms without a dense MLP beside experts, or with a gate of it"
    if len({kind.normed_beside for kind in kinds if kind.routed}) > 1:
        yield "experts with norms of their own in some layers alone"
    if any(isinstance(kind.mlp, RoutedMLP) and kind.mlp.latent and kind.norms > 2 for kind in kinds):
        yield "latent experts with norms of outputs"
    if any(isinstance(kind.mlp, RoutedMLP) and kind.mlp.router_scales and not kind.normed_beside for kind in kinds):
        yield "scales of the router without seven norms"
    if any(kind.norms < 2 for kind in kinds if kind.mixer is not None and kind.mlp is not None):
        yield "layers with fewer norms than parts"
    if any(kind.norms != 1 for kind in kinds if kind.mixer is None or kind.mlp is None):
        yield "layers of one part with several norms or none"


def _is_former_gemma(mixer: Attention) -> bool:
    """Whether a layer was written before its kind of rotary positions, the norm of its values and the scale of its
    scores had fields: it would run as something else."""
    rope = mixer.rope
    return rope is not None and '"proportional"' in rope.scaling and not rope.proportional and rope.rotated != 1.0


def _has_parts_beside(kind: Layer) -> bool:
    """Whether a layer with seven norms has what they are norms of."""
    mlp = kind.mlp
    return (
        kind.mixer is not None
        and isinstance(mlp, RoutedMLP)
        and mlp.router_scales
        and mlp.shared is not None
        and not mlp.shared_gate
    )


def engine_lacks(model: ModelSpec, precision: str) -> tuple[str, ...]:
    """What the engine lacks to train the model in this precision, by name; empty if it can."""
    return lacking_kinds(model) + ((f"{precision} matrix products",) if precision in PLANNED_FORMATS else ())


def refuse_planned_formats(precisions: Iterable[str]) -> None:
    """Raises `UnsupportedByEngine`, one line for each precision whose matrix products the engines lack."""
    lines = [
        f"precision={precision} can be planned and exported, but not run: the engine has no {precision} matrix "
        "products; leave it out, or use one of fp8_tensorwise, fp8_rowwise, fp8_blockwise"
        for precision in sorted({*precisions} & {*PLANNED_FORMATS})
    ]
    if lines:
        raise UnsupportedByEngine(*lines)


def refuse_lacking_kinds(models: Iterable[ModelSpec]) -> None:
    """Raises `UnsupportedByEngine`, one line for each model whose kinds of layers the engine lacks."""
    lines = [
        f"model {model.name} can be planned, but not run yet: the engine lacks {'; '.join(lacking)}"
        for model in models
        if (lacking := lacking_kinds(model))
    ]
    if lines:
        raise UnsupportedByEngine(*lines)


def refuse_kinds(model: ModelSpec, engine: str, lacking: Sequence[str]) -> None:
    """Raises `UnsupportedByEngine` if there is something that no configuration of ``engine`` has."""
    if lacking:
        raise UnsupportedByEngine(
            f"model {model.name} cannot be exported to {engine} yet: no writer for {'; '.join(lacking)}"
        )
