"""Lists what transformers with accelerate cannot run of a layout; models are in `transformers_kinds`. No torch here."""

from __future__ import annotations

from collections.abc import Callable

from workloads.rules.refusal import Refusal
from workloads.spec.engine_versions import ENGINES
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, Mamba2


def _mixes_by(e: Experiment, kind: type) -> bool:
    """Whether some layer's mixer is of this kind."""
    return e.model.layers is not None and any(isinstance(layer.mixer, kind) for layer in e.model.layers.kinds)


def _divides(axis: str) -> Callable[[Experiment], bool]:
    return lambda e: getattr(e, axis) > 1


_ONE_AXIS = "its adapter runs data parallelism alone; use {axis}=1"

TRANSFORMERS = (
    Refusal(
        "engine_version",
        lambda e: e.engine_version != ENGINES["transformers"],
        f"the adapter is for {ENGINES['transformers']}",
    ),
    *(Refusal(axis, _divides(axis), _ONE_AXIS.format(axis=axis)) for axis in ("tp", "pp", "cp", "ep")),
    Refusal("routing", lambda e: e.model.moe is not None and e.routing != "learned", "its router decides; use learned"),
    Refusal("capacity_factor", lambda e: e.capacity_factor is not None, "it drops no tokens; use null"),
    Refusal(
        "precision",
        lambda e: e.precision not in ("bf16", "fp32"),
        "use bf16 or fp32: its norms compute in fp32, and its adapter has neither fp16's loss scale nor fp8",
    ),
    Refusal(
        "precision",
        lambda e: e.precision == "fp32" and e.compile != "none",
        "accelerate turns TF32 on if it compiles without mixed precision; use bf16, or compile=none",
        on="cuda",
    ),
    Refusal(
        "recurrence",
        lambda e: e.recurrence == "fla" and not _mixes_by(e, GatedDeltaRule),
        "on flash-linear-attention it runs the gated delta rule, and Mamba-2 on mamba-ssm; use mamba_ssm or torch",
    ),
    Refusal(
        "recurrence",
        lambda e: e.recurrence == "mamba_ssm" and not _mixes_by(e, Mamba2),
        "it runs Mamba-2 alone on mamba-ssm; use fla or torch",
    ),
    Refusal("attention", lambda e: e.attention != "auto", "torch chooses the kernel there; use auto"),
    Refusal(
        "recompute",
        lambda e: e.recompute not in ("none", "full"),
        "it recomputes whole layers; use none or full",
    ),
    Refusal("recompute_every", lambda e: e.recompute_every > 1, "it recomputes every layer; use 1"),
)
"""Refusals of transformers and accelerate as `workloads.adapters.transformers` runs them."""
