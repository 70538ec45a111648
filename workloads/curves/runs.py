"""The runs whose curves are compared: which model, in which precision, on which layout. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workloads.experiment import Experiment, ModelSpec, Precision

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
"""3.4 million parameters, one token a byte; `sweep/conf/model/bytes.yaml` is the same."""
BATCH: Mapping[str, int] = {"global_batch_size": 16, "micro_batch_size": 4, "seq_len": 256}
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
"""The same step on one rank and in eight layouts of two, by name. All of them accumulate over micro-batches."""
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class Run:
    """One training run with its curve."""

    layout: str
    """The key in `LAYOUTS`."""
    experiment: Experiment

    @property
    def name(self) -> str:
        """Of the run, for people and for the command line: ``bytes bf16 tp 2``."""
        return f"{self.experiment.model.name} {self.experiment.precision} {self.layout}"


def run_of(model: ModelSpec, precision: Precision, layout: str = REFERENCE, batch: Mapping[str, int] = BATCH) -> Run:
    """The run of one model, precision and layout."""
    fields = LAYOUTS[layout]
    return Run(layout, Experiment.canonical(model=model, precision=precision, **batch, **fields))


def all_runs() -> list[Run]:
    """Every run of the documented curves: each precision on one rank, then bf16 in every other layout."""
    runs = [run_of(DENSE, precision) for precision in PRECISIONS]
    return runs + [run_of(DENSE, "bf16", layout) for layout in LAYOUTS if layout != REFERENCE]
