"""The runs whose curves are compared: model, precision and layout. This module does not need torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import Precision
from workloads.spec.model_spec import ModelSpec, MoESpec

DENSE = ModelSpec(
    name="bytes",
    num_layers=4,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    ffn_hidden_size=768,
    vocab_size=256,
)
"""3.3 million parameters, one token per byte; same as `sweep/conf/model/bytes.yaml`."""
ROUTED = dataclasses.replace(
    DENSE,
    name="bytes_moe",
    moe=MoESpec(
        num_experts=8, experts_per_token=2, expert_hidden_size=384, balance="aux_loss", balance_coefficient=0.01
    ),
)
"""`DENSE` with 8 experts per layer, 2 of which process each token: 10.4 million parameters, 3.3 million of them active;
same as
`sweep/conf/model/bytes_moe.yaml`.
"""
assert ROUTED.moe is not None
BIASED = dataclasses.replace(
    ROUTED,
    name="bytes_moe_bias",
    moe=dataclasses.replace(ROUTED.moe, gate="sigmoid", balance="bias", balance_coefficient=0.001),
)
"""`ROUTED` without a balance term in the loss: sigmoid gates, and biases moved against the load at DeepSeek-V3's rate
(arXiv:2412.19437, section 4.2); same as `sweep/conf/model/bytes_moe_bias.yaml`."""
MODELS: Mapping[str, ModelSpec] = {model.name: model for model in (DENSE, ROUTED, BIASED)}
BATCH: Mapping[str, int] = {"global_batch_size": 16, "micro_batch_size": 8, "seq_len": 256}
REFERENCE = "one rank"
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    REFERENCE: {},
    "dp 2": {"dp": 2},
    "ZeRO 1": {"dp": 2, "zero_stage": 1},
    "ZeRO 2": {"dp": 2, "zero_stage": 2},
    "ZeRO 3": {"dp": 2, "zero_stage": 3},
    "tp 2": {"tp": 2},
    "cp 2": {"cp": 2},
    "pp 2 1F1B": {"pp": 2, "pp_schedule": "1f1b"},
    "pp 2 ZB-V": {"pp": 2, "pp_schedule": "zero_bubble_v"},
}
"""One rank and eight layouts of two ranks that compute the same step, by name."""
ROUTED_LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    REFERENCE: {},
    "dp 2": {"dp": 2},
    "ep 2": {"dp": 2, "ep": 2},
    "ep 2 ZeRO 2": {"dp": 2, "ep": 2, "zero_stage": 2},
    "ep 2 ZeRO 3": {"dp": 2, "ep": 2, "zero_stage": 3},
    "ep 2 tp 2": {"tp": 2, "ep": 2},
    "etp 2": {"tp": 2, "etp": 2},
    "ep 2 cp 2": {"cp": 2, "ep": 2},
    "pp 2 ZB-V": {"pp": 2, "pp_schedule": "zero_bubble_v"},
}
"""Layouts of the model with experts."""
BIASED_LAYOUTS: Mapping[str, Mapping[str, Any]] = {REFERENCE: {}}
"""Layouts of the model with biases: only one rank, to see whether they balance."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "fp16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise")


@dataclass(frozen=True, slots=True)
class Run:
    """One training run with its curve."""

    layout: str
    """Name of the layout in `layouts_of` its model."""
    experiment: Experiment

    @property
    def name(self) -> str:
        """Name of the run, for people and for the command line: ``bytes bf16 tp 2``."""
        return f"{self.experiment.model.name} {self.experiment.precision} {self.layout}"


def layouts_of(model: ModelSpec) -> Mapping[str, Mapping[str, Any]]:
    """The fields of each layout of a model, by the layout's name."""
    if model.moe is None:
        return LAYOUTS
    return BIASED_LAYOUTS if model.moe.balance == "bias" else ROUTED_LAYOUTS


def run_of(model: ModelSpec, precision: Precision, layout: str = REFERENCE, batch: Mapping[str, int] = BATCH) -> Run:
    """The run of one model, precision and layout. Experts are chosen by the learned router."""
    fields = layouts_of(model)[layout]
    return Run(
        layout,
        Experiment.canonical(model=model, precision=precision, routing="learned", cuda_graph="none", **batch, **fields),
    )


def all_runs() -> list[Run]:
    """All runs of the documented curves: for each model every precision on one rank, then bf16 in every other
    layout."""
    runs = []
    for model in MODELS.values():
        runs += [run_of(model, precision) for precision in PRECISIONS]
        runs += [run_of(model, "bf16", layout) for layout in layouts_of(model) if layout != REFERENCE]
    return runs
