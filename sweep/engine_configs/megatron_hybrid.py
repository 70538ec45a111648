"""Flags of Megatron-LM for hybrids: layers of one part each, a Mamba-2 mixer, an attention or an MLP."""

from __future__ import annotations

from collections.abc import Sequence

from sweep.engine_configs.draft import Draft
from workloads.costs.shape.partition import experiment_layers
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, Mamba2

SCRIPT = "pretrain_hybrid.py"
_SPEC = "megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
_KERNEL = 4
"""Columns of its convolution, for which it has no flag."""


def is_of_one_part(layer: Layer) -> bool:
    """Whether the layer is a mixer or an MLP alone."""
    return layer.mixer is None or layer.mlp is None


def set_hybrid(draft: Draft, layers: Sequence[Layer]) -> None:
    """Writes the layers as a pattern of symbols, which says stages, too, and the sizes of Mamba-2."""
    if not all(map(is_of_one_part, layers)):
        draft.refuse("model.layers", "its hybrid layers have one part each, a mixer or an MLP")
        return
    if draft.experiment.model.mtp_modules:
        draft.refuse("model.mtp_modules", "modules of hybrids are not written; 0 would work")
    for option in ("num-layers", "num-virtual-stages-per-pipeline-rank", "pipeline-model-parallel-layout"):
        draft.options.pop(option, None)
    symbols = "".join(map(_symbol, layers))
    parts, begin = [], 0
    for stage in experiment_layers(draft.experiment):
        parts.append(symbols[begin : begin + len(stage)])
        begin += len(stage)
    draft.set({"spec": _SPEC, "hybrid-layer-pattern": "|".join(parts)})
    rules = {layer.mixer for layer in layers if isinstance(layer.mixer, Mamba2)}
    if len(rules) > 1:
        draft.refuse("model.layers", "its Mamba-2 layers are alike")
    for rule in rules:
        draft.set(
            {
                "mamba-num-heads": rule.heads,
                "mamba-head-dim": rule.head_dim,
                "mamba-num-groups": rule.groups,
                "mamba-state-dim": rule.state,
            }
        )
        if rule.kernel != _KERNEL or rule.bias or not rule.convolution_bias:
            why = f"its Mamba-2 has a convolution of {_KERNEL} columns with a bias, and projections without"
            draft.refuse("model.layers", why)
        draft.notes.append("its Mamba-2 needs mamba-ssm and causal-conv1d")


def _symbol(layer: Layer) -> str:
    if layer.mlp is not None:
        return "E" if isinstance(layer.mlp, RoutedMLP) else "-"
    if isinstance(layer.mixer, Mamba2):
        return "M"
    if isinstance(layer.mixer, GatedDeltaRule):
        return "G"
    assert isinstance(layer.mixer, Attention)
    return "*"
