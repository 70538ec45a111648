"""Says what an external training engine cannot run (torchtitan, Megatron-Core, transformers): refused at
planning. No torch here.

A refusal names the field, its value and what would work. It also covers layouts for which an engine would silently do
something else (another precision, another sharding): a row must describe what was run.
"""

from __future__ import annotations

from collections.abc import Mapping

from workloads.costs.shape.held_model import copies_of_heads
from workloads.rules import megatron_kinds
from workloads.rules.engine_kinds import adapters_lack, lacking_kinds
from workloads.rules.megatron_support import MEGATRON
from workloads.rules.refusal import Refusal
from workloads.rules.torchtitan_kinds import FAMILIES, kinds_family, kinds_lacking
from workloads.rules.torchtitan_support import NEWER_REFUSALS, TORCHTITAN
from workloads.rules.transformers_kinds import families_lack
from workloads.rules.transformers_support import TRANSFORMERS
from workloads.spec.engine_versions import ENGINE
from workloads.spec.experiment import Experiment
from workloads.spec.pipeline_stages import written_stages

REFUSALS: Mapping[str, tuple[Refusal, ...]] = {
    ENGINE: (),
    "torchtitan": TORCHTITAN,
    "megatron": MEGATRON,
    "transformers": TRANSFORMERS,
}


_EVERYWHERE = (
    Refusal("pad_vocab_to", lambda e: e.pad_vocab_to is not None, "no adapter pads the vocabulary; use null"),
    Refusal(
        "cuda_graph",
        lambda e: e.cuda_graph == "step",
        "only engine=ultrasweep captures whole steps here; use none or auto",
    ),
    Refusal(
        "gradient_accumulation_fusion",
        lambda e: e.gradient_accumulation_fusion,
        "its adapter decides that (with Transformer Engine products add gradients); use false",
    ),
    Refusal("grad_reduce", lambda e: e.grad_reduce != "fp32", "its adapter reduces in fp32; use fp32"),
    Refusal("optimizer", lambda e: e.optimizer != "adamw", "its adapter has AdamW alone; use adamw"),
    Refusal("optimizer_states", lambda e: e.optimizer_states != "fp32", "its adapter keeps them in fp32; use fp32"),
    Refusal("master_weights", lambda e: e.master_weights != "fp32", "its adapter keeps them in fp32; use fp32"),
    Refusal("optimizer_offload", lambda e: e.optimizer_offload > 0, "its adapter keeps states on the device; use 0"),
    Refusal(
        "activation_offload",
        lambda e: e.activation_offload != "none",
        "its adapter keeps activations on the device; use none",
    ),
    Refusal(
        "recurrence",
        lambda e: e.recurrence != "torch" and e.engine != "transformers",
        "its adapter runs no recurrent layers; use torch",
    ),
    Refusal("documents", lambda e: e.documents is not None, "no adapter packs documents; use null"),
    Refusal(
        "tp", lambda e: bool(copies_of_heads(e)), "no adapter copies key and value heads; use at most num_kv_heads"
    ),
    Refusal(
        "pp_stages",
        lambda e: e.engine == "torchtitan" and e.pp_stages is not None and 0 in written_stages(e.pp_stages).layers,
        "its adapter needs a layer in every stage",
    ),
)
"""What no engine but this project's may have, in a matter of sizes."""
ON_CUDA_ALONE = ("megatron",)
"""Engines that run on CUDA devices only."""


def is_own(experiment: Experiment) -> bool:
    """Whether closed forms, rehearsals and probes apply to this experiment: they know only this project's engine."""
    return experiment.engine == ENGINE


def refused(experiment: Experiment, backend: str = "cuda") -> list[str]:
    """Reasons why the experiment's engine cannot run it on devices of ``backend``, one sentence per field; empty if it
    can."""
    if is_own(experiment):
        return []
    name = f"{experiment.engine} {experiment.engine_version}"
    if experiment.engine not in REFUSALS:
        return [f"engine={experiment.engine} is not one of {', '.join(REFUSALS)}"]
    lacking = adapters_lack(experiment.model)
    if lacking and experiment.engine == "torchtitan" and (family := kinds_family(experiment.model)) is not None:
        lacking = tuple(kinds_lacking(experiment.model, experiment.seq_len, experiment.engine_version))
        if lacking:
            what = f"its {FAMILIES[family]} lacks {'; '.join(lacking)}"
            return [f"{name} cannot run model={experiment.model.name}: {what}"]
    if lacking and experiment.engine == "megatron":
        lacking = tuple(megatron_kinds.kinds_lacking(experiment.model, experiment.seq_len))
        if lacking:
            what = f"Megatron-Core's GPT model lacks {'; '.join(lacking)}"
            instead = "" if lacking_kinds(experiment.model) else f"; engine={ENGINE} runs it"
            return [f"{name} cannot run model={experiment.model.name}: {what}{instead}"]
    if experiment.engine == "transformers" and (lacking := tuple(families_lack(experiment.model))):
        what = f"no family of transformers here has {'; '.join(lacking)}"
        return [f"{name} cannot run model={experiment.model.name}: {what}"]
    if lacking:
        return [f"{name} cannot run model={experiment.model.name}: no reader here for {'; '.join(lacking)}"]
    entries = REFUSALS[experiment.engine]
    if experiment.engine == "torchtitan":
        entries = NEWER_REFUSALS.get(experiment.engine_version, entries)
    refusals = [entry for entry in (*entries, *_EVERYWHERE) if entry.speaks_of(backend) and entry.holds(experiment)]
    reasons = [f"{name} cannot run {entry.field}={_value(experiment, entry.field)}: {entry.why}" for entry in refusals]
    if backend != "cuda" and experiment.engine in ON_CUDA_ALONE:
        reasons.append(f"{name} cannot run on backend={backend}: its buffers and gradient clipping need CUDA devices")
    return reasons


def _value(experiment: Experiment, field: str) -> object:
    return experiment.model.name if field == "model" else getattr(experiment, field)
