"""Rules on the recomputation of activations, as cases of `workloads.rules.layout_rules`."""

from __future__ import annotations

RECOMPUTE_CASES = (
    (
        "recompute_mla_up",
        "'mla_up' in recompute and not has_latent_attention",
        "recompute={recompute}, but {model} has no latent attention with up-projections to recompute; leave mla_up out",
    ),
    (
        "recompute_experts",
        "'experts' in recompute and not has_experts",
        "recompute={recompute}, but {model} has no routed experts to recompute; leave experts out",
    ),
    (
        "recompute_stages",
        "recompute_stages and recompute_stages != chunks",
        "recompute={recompute} has words of {recompute_stages} stages, but pp={pp} and virtual_stages={virtual_stages} "
        "make {chunks}; give one word for all stages or one for each",
    ),
    (
        "recompute_first",
        "recompute_beyond",
        "recompute={recompute}: stage {recompute_beyond} has no more layers than that, so all of them are recomputed; "
        "write full",
    ),
    (
        "recompute_every_stages",
        "recompute_by_stage and recompute_every > 1",
        "recompute={recompute} with recompute_every={recompute_every}: words of stages say which layers are "
        "recomputed; use recompute_every=1, or one word such as full",
    ),
    (
        "recompute_stages_compiled",
        "recompute_by_stage and compile == 'block' and tp > 1 and (has_layer_list or documents or "
        "cp > 1 and cp_kind != 'ulysses')",
        "recompute={recompute} with compile=block and tp={tp}: only some of the layers would be compiled, because ring "
        "and all-gather attention, documents and lists of layers break the graph of a recomputed one; use one word for "
        "all, compile=none, or cp_kind=ulysses",
    ),
    # A compiled block is recomputed by torch's selective checkpointing, which sees it as aten operations.
    (
        "compile_recompute",
        "compile == 'block' and recompute_one_by_one",
        "compile=block with recompute={recompute}: in a compiled block norms, RoPE and SwiGLU are no longer separate "
        "operations that could be recomputed one by one; use recompute=none, selective or full, or compile=none",
    ),
)
"""Name, condition that breaks the rule, and sentence of each."""
