"""``model``: what a config.json describes, and the file of ``conf/model`` for it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from results.text.numbers import plural
from results.text.printable import printable
from workloads.costs.shape.params import num_params
from workloads.rules.engine_kinds import lacking_kinds
from workloads.spec.config_json.expressible import model_spec, not_expressible, spec_fields
from workloads.spec.layer_kinds.attention import Attention, LatentAttention
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.model import LayeredModel
from workloads.spec.layer_kinds.summary import BIAS_STEP

_SHORT = 4_096
"""Sequence length at which the FLOPs of every model are given, in addition to the model's own longest sequence."""


def description(model: LayeredModel) -> dict[str, Any]:
    """What is known about a model, as JSON holds it."""
    lengths = sorted({_SHORT, model.longest or _SHORT})
    return {
        "name": model.name,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "layers": len(model.layers),
        "kinds": [{"count": count, "layer": label} for label, count in _labels(model).items()],
        "vocabulary": model.vocab_size,
        "own_seq_len": model.longest,
        "flops_per_token": [
            {
                "seq_len": length,
                "forward": round(model.forward_flops(length)),
                "training": round(model.training_flops(length)),
            }
            for length in lengths
        ],
        "mtp_modules": model.predicted_ahead,
        "mtp_parameters": _module_parameters(model),
        "left_out": list(model.left_out),
        "without_effect": list(model.without_effect),
        "not_expressible": not_expressible(model),
        "engine_lacks": _engine_lacks(model),
    }


def _engine_lacks(model: LayeredModel) -> list[str]:
    """What the engine lacks to run the model, by name; empty if it runs it."""
    residuals = [what for what in not_expressible(model) if what.startswith("residuals")]
    return list(dict.fromkeys([*lacking_kinds(model_spec(model, ahead=True)), *residuals]))


def _labels(model: LayeredModel) -> Counter[str]:
    """Layers by label: those that differ only in what their label does not say count together."""
    return Counter(layer.label for layer in model.layers)


def _module_parameters(model: LayeredModel) -> int:
    """Parameters of its modules of multi-token prediction; embedding and head are the model's own."""
    if not model.predicted_ahead:
        return 0
    return num_params(model_spec(model, ahead=True)) - num_params(model_spec(model))


def print_model(model: LayeredModel, console: Console) -> None:
    """Print a description, one fact a line."""
    facts = description(model)
    lines = [
        (facts["name"], ""),
        ("parameters", f"{facts['parameters']:,}"),
        ("active a token", f"{facts['active_parameters']:,}"),
        ("layers", f"{facts['layers']:,}"),
        *(("", f"{kind['count']:,} x {kind['layer']}") for kind in facts["kinds"]),
    ]
    for flops in facts["flops_per_token"]:
        length = f"{flops['seq_len']:,}" + (", its own length" if flops["seq_len"] == model.longest else "")
        lines.append(("FLOPs a token", f"{flops['training'] / 1e9:,.2f} G forward and backward at {length}"))
    if model.longest is None:
        lines.append(("own length", "the file does not say"))
    if modules := facts["mtp_modules"]:
        named = plural(modules, "module of multi-token prediction", "modules of multi-token prediction")
        more = f"{facts['mtp_parameters']:,} more parameters"
        lines.append(("beside them", f"{named} with {more}, in plans with model=PATH"))
    lines += [("left out", what) for what in facts["left_out"]]
    if facts["without_effect"]:
        lines.append(("without effect", ", ".join(facts["without_effect"])))
    missing = facts["engine_lacks"]
    lines.append(("plan, advise", "yes, with model=PATH"))
    lines.append(("run", f"not yet; the engine lacks: {'; '.join(missing)}" if missing else "yes, with model=PATH"))
    for name, text in lines:
        console.print(printable(f"{name:15} {text}".rstrip()), markup=False, highlight=False, soft_wrap=True)


def to_json(model: LayeredModel) -> str:
    return json.dumps(description(model), indent=2) + "\n"


def to_yaml(model: LayeredModel, path: Path, source: Path, *, ahead: bool = True) -> str:
    """The file of ``conf/model`` with the name ``path``, which begins with what it leaves out. ``ahead``: with modules
    of multi-token prediction."""
    notes = [f"Shape: {source.name} of {model.name}."]
    left_out = list(model.left_out)
    if model.predicted_ahead and not ahead:
        left_out.append("modules of multi-token prediction (mtp_modules)")
    notes += [f"Left out: {', '.join(left_out)}."] if left_out else []
    mixer, experts = model.layers[0].mixer, model.layers[-1].mlp
    if isinstance(mixer, Attention | LatentAttention) and mixer.rope is not None and mixer.rope.scaling:
        notes.append(f"Scaling of positions, without effect on cost: {mixer.rope.scaling}.")
    if isinstance(experts, RoutedMLP) and experts.groups > 1:
        notes.append(f"Experts are chosen from some of {experts.groups} groups, without effect on cost.")
    if isinstance(experts, RoutedMLP) and experts.correction:
        notes.append(f"The file does not say by how much biases change; {BIAS_STEP:g} is that of DeepSeek-V3.")
    fields = spec_fields(model, path.name.removesuffix(".yaml"), ahead=ahead)
    flow = None if "layers" in fields else False
    text = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, default_flow_style=flow)
    return "".join(f"# {printable(note)}\n" for note in notes) + text
