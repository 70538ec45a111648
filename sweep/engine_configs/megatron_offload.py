"""Flags of Megatron-LM for what waits in the memory of the host: an optimizer, and activations."""

from __future__ import annotations

from sweep.engine_configs.draft import Draft
from workloads.spec.activations.offload import WORDS, offloaded_words
from workloads.spec.recomputation import is_by_stage

OFFLOADED = {"input": ("attn_norm", "mlp_norm"), "rope": ("core_attn",), "attention": ("attn_proj",)}
"""Modules of ``--offload-modules`` whose inputs are the tensors of a word of ``activation_offload``."""


def offload_optimizer(draft: Draft) -> None:
    """The optimizer on the host, which Megatron has for its distributed optimizer (`OptimizerConfig`)."""
    e = draft.experiment
    if e.zero_stage >= 2:
        draft.refuse("optimizer_offload", "not known of Megatron-FSDP; zero_stage=1 would work")
    elif e.zero_stage == 0 and e.dp * e.cp > 1:
        draft.refuse("optimizer_offload", "it needs the distributed optimizer; zero_stage=1 would work")
    if e.optimizer_states != "fp32":
        draft.refuse("optimizer_states", "its optimizer on the host keeps them in fp32; fp32 would work")
    draft.set(
        {
            "use-distributed-optimizer": True,
            "use-precision-aware-optimizer": True,
            "optimizer-cpu-offload": True,
            "optimizer-offload-fraction": e.optimizer_offload,
            "overlap-cpu-optimizer-d2h-h2d": True,
        }
    )
    draft.warnings.append(
        "optimizer_offload: it moves whole parameters, and their fp32 master weights too: the device needs less "
        "memory; the host's processors update them, which takes longer than is predicted here"
    )


def offload_activations(draft: Draft) -> None:
    """Its modules are named by their inputs: those of both norms are the streams of a layer (``input``), those of
    attention rotated queries and keys with the values, which are a part of the projection (``qkv`` and ``rope``)."""
    e = draft.experiment
    words = set(offloaded_words(e.activation_offload, "none" if is_by_stage(e.recompute) else e.recompute))
    if e.recompute == "full" or is_by_stage(e.recompute):
        draft.refuse("activation_offload", "it offloads no input of fully recomputed layers; recompute=none would work")
    elif e.zero_stage >= 2:
        draft.refuse("activation_offload", "not known of Megatron-FSDP; zero_stage=1 would work")
    elif lacking := [word for word in WORDS if word in words & {"norm", "gate_up", "swiglu"}]:
        them = " and ".join(lacking)
        draft.refuse("activation_offload", f"no module there has {them}; some of input, qkv+rope, attention would work")
    elif len(words & {"qkv", "rope"}) == 1 or ("attention" in words and "qkv" not in words):
        draft.refuse("activation_offload", "its core_attn and attn_proj need qkv and rope together; both would work")
    modules = [name for word, names in OFFLOADED.items() if word in words for name in names]
    draft.set({"fine-grained-activation-offloading": True, "offload-modules": " ".join(modules)})
