"""Rules on activations that wait on the host, as cases of `workloads.rules.layout_rules`."""

from __future__ import annotations

from workloads.spec.experiment_values import PLANNED_FORMATS

_OFFLOADS = "engine == 'ultrasweep' and activation_offload != 'none'"
_NAMED = "activation_offload not in ('none', 'all')"
_LOW = ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", *PLANNED_FORMATS)

OFFLOAD_CASES = (
    (
        "activation_offload_model",
        f"{_OFFLOADS} and (has_layer_list or has_latent_attention)",
        "activation_offload={activation_offload}: the words name tensors of grouped-query attention and SwiGLU; "
        "{model} has other layers, so use activation_offload=none",
    ),
    *(
        (
            f"activation_offload_{word}",
            f"{_NAMED} and '{word}' in activation_offload and ('{word}' in recompute or 'selective' in recompute)",
            f"activation_offload={{activation_offload}} with recompute={{recompute}}: both name the tensors of {word}, "
            "which are either recomputed or offloaded; name them in one of both, or use activation_offload=all, which "
            "offloads what is not recomputed",
        )
        for word in ("norm", "rope", "swiglu")
    ),
    (
        "activation_offload_full",
        f"{_NAMED} and activation_offload != 'input' and 'full' in recompute",
        "activation_offload={activation_offload} with recompute={recompute}: full recomputation keeps the input of a "
        "layer alone; use activation_offload=input or all, or recompute=none",
    ),
    (
        "activation_offload_mlp",
        f"{_NAMED} and ('gate_up' in activation_offload or 'swiglu' in activation_offload) and not ffn_hidden_size and "
        "not shared_hidden_size",
        "activation_offload={activation_offload}, but {model} has neither dense layers nor shared experts, and what "
        "routed experts save stays on the device; leave gate_up and swiglu out",
    ),
    (
        "activation_offload_mixed",
        f"{_OFFLOADS} and recompute != 'none' and (recompute_every > 1 or ':' in recompute)",
        "activation_offload={activation_offload} with layers of one stage that recompute and others that do not "
        "(recompute={recompute}, recompute_every={recompute_every}) is not planned; use one word for all layers of a "
        "stage",
    ),
    (
        "activation_offload_compile",
        f"{_OFFLOADS} and compile == 'block'",
        "activation_offload={activation_offload} with compile=block: what a compiled block saves has no names; use "
        "compile=none",
    ),
    (
        "activation_offload_precision",
        f"{_OFFLOADS} and precision in {_LOW}",
        "activation_offload={activation_offload} with precision={precision}: products save copies in fewer bits, which "
        "have no words; use precision=bf16",
    ),
    (
        "activation_offload_attention",
        f"{_OFFLOADS} and attention in ('math', 'flash4')",
        "activation_offload={activation_offload} with attention={attention} has not been shown to be right; use "
        "attention=auto, cudnn, flash or efficient",
    ),
    (
        "activation_offload_schedule",
        f"{_OFFLOADS} and splits_backward",
        "activation_offload={activation_offload} with pp_schedule={pp_schedule}: the weight-gradient pass of a split "
        "backward holds tensors that the input-gradient pass has brought back; use 1f1b, interleaved_1f1b or gpipe",
    ),
    (
        "activation_offload_cp",
        f"{_OFFLOADS} and cp > 1 and cp_kind != 'allgather'",
        "activation_offload={activation_offload} with cp_kind={cp_kind} has not been shown to be right; use "
        "cp_kind=allgather",
    ),
    (
        "activation_offload_documents",
        f"{_OFFLOADS} and documents",
        "activation_offload={activation_offload} with packed documents has not been shown to be right; use "
        "documents=null, or activation_offload=none",
    ),
)
"""Name, condition that breaks the rule, and sentence of each."""

OFFLOAD_CLUSTER_CASES = (
    (
        "activation_offload_kernels",
        f"{_OFFLOADS} and attention not in ('math', 'flash4') and backend == 'cuda' and precision in ('fp32', 'fp64')",
        "activation_offload={activation_offload} with precision={precision}: its attention on CUDA saves other tensors "
        "than the words name; use precision=bf16 or fp16",
    ),
)
"""The same, of rules that depend on the cluster."""
