"""Flags of Megatron-LM for the model: the sizes and kinds of its layers, and its routed experts."""

from __future__ import annotations

from collections.abc import Mapping

from sweep.engine_configs.draft import NOTHING, Choice, Draft, Options
from workloads.spec.model_spec import ModelSpec, MoESpec

SHAPE = {
    "num_layers": "num-layers",
    "hidden_size": "hidden-size",
    "ffn_hidden_size": "ffn-hidden-size",
    "num_heads": "num-attention-heads",
    "norm_eps": "norm-epsilon",
}
BLOCK: Options = {
    "transformer-impl": "transformer_engine",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable-bias-linear": True,
    "position-embedding-type": "rope",
    "attention-dropout": 0,
    "hidden-dropout": 0,
    "cross-entropy-loss-fusion": True,
    # It refuses Transformer Engine's own, the other implementation, as unstable.
    "cross-entropy-fusion-impl": "native",
    "tokenizer-type": "NullTokenizer",
    "make-vocab-size-divisible-by": 1,
    "mock-data": True,
    # A mask of seq_len x seq_len for every sequence, which causal attention does not read.
    "no-create-attention-mask-in-dataloader": True,
}
"""Flags that every model has: the kind of its layers, its loss, and data that need no text."""
ROUTING: Mapping[str, Choice] = {
    "balanced": Choice(options={"moe-router-force-load-balancing": True}),
    "learned": NOTHING,
    "skewed": Choice(refused="it forces an even load on experts or a random one, not an imbalance"),
}


def set_model(draft: Draft, model: ModelSpec) -> None:
    """Writes the sizes of dense layers, attention and vocabulary of the model without multi-token modules."""
    draft.set({option: getattr(model, field) for field, option in SHAPE.items()})
    if model.num_kv_heads != model.num_heads:
        draft.set({"group-query-attention": True, "num-query-groups": model.num_kv_heads})
    if model.mla is None:
        draft.set({"kv-channels": model.head_dim})
    else:
        latent = {
            "multi-latent-attention": True,
            "rope-type": "rope",
            "kv-lora-rank": model.mla.kv_lora_rank,
            "qk-head-dim": model.mla.qk_nope_head_dim,
            "qk-pos-emb-head-dim": model.mla.qk_rope_head_dim,
            "v-head-dim": model.mla.v_head_dim,
            # Without this flag Megatron builds no norms of the latents.
            "qk-layernorm": True,
            # Its fused rotation of latent attention is for YaRN alone.
            "no-rope-fusion": True,
        }
        draft.set(latent | ({"q-lora-rank": model.mla.q_lora_rank} if model.mla.q_lora_rank else {}))
    draft.set(BLOCK)
    base = round(model.rope_theta)
    draft.set({"rotary-base": base, "vocab-size": model.vocab_size})
    if draft.experiment.pad_vocab_to is not None:
        draft.set({"make-vocab-size-divisible-by": draft.experiment.pad_vocab_to})
    if model.rope_theta != base:
        draft.refuse("model.rope_theta", f"its rotary base is a whole number; {base} would work")
    if not model.tie_embeddings:
        draft.set({"untie-embeddings-and-output-weights": True})
    if model.qk_norm:
        draft.set({"qk-layernorm": True})


def set_modules(draft: Draft) -> None:
    """Writes the modules of multi-token prediction, which are layers of the model's last kind there, too, and the
    factor of their mean loss."""
    layers = draft.experiment.model.layers
    assert layers is not None
    draft.set({"mtp-num-layers": layers.modules, "mtp-loss-scaling-factor": layers.mtp_loss_weight})


def set_experts(draft: Draft, moe: MoESpec, num_layers: int) -> None:
    """Writes the routed experts of a model of so many layers, and how tokens are sent to them."""
    e = draft.experiment
    draft.set(
        {
            "num-experts": moe.num_experts,
            "moe-router-topk": moe.experts_per_token,
            "moe-ffn-hidden-size": moe.expert_hidden_size,
            "moe-grouped-gemm": True,
            "moe-permute-fusion": True,
            "moe-router-fusion": True,
            "moe-token-dispatcher-type": "alltoall",
            "moe-router-score-function": moe.gate,
            "expert-tensor-parallel-size": e.etp,
        }
    )
    if moe.num_shared_experts:
        draft.set({"moe-shared-expert-intermediate-size": moe.num_shared_experts * moe.expert_hidden_size})
    if moe.num_dense_layers:
        dense, rest = moe.num_dense_layers, num_layers - moe.num_dense_layers
        draft.set({"moe-layer-freq": f"([0]*{dense}+[1]*{rest})"})
    if moe.experts_per_token == 1 and moe.normalize_weights:
        draft.refuse("model.moe.normalize_weights", "it does not divide the weight of one expert; false would work")
    elif not moe.normalize_weights and moe.gate == "softmax":
        draft.set({"moe-router-pre-softmax": True})
    elif not moe.normalize_weights and moe.experts_per_token > 1:
        draft.refuse("model.moe.normalize_weights", "it divides the weights of several sigmoid gates by their sum")
    if moe.weight_scale != 1.0:
        draft.set({"moe-router-topk-scaling-factor": moe.weight_scale})
    draft.choose("routing", ROUTING)
    balance = moe.balance if e.routing == "learned" else "none"
    if balance == "aux_loss":
        draft.set({"moe-router-load-balancing-type": "seq_aux_loss", "moe-aux-loss-coeff": moe.balance_coefficient})
    else:
        draft.set({"moe-router-load-balancing-type": "none"})
    if balance == "bias":
        draft.set({"moe-router-enable-expert-bias": True, "moe-router-bias-update-rate": moe.balance_coefficient})
        if moe.gate != "sigmoid":
            draft.refuse("model.moe.balance", "its expert bias needs the gate sigmoid")
    if e.capacity_factor is not None:
        draft.set({"moe-expert-capacity-factor": e.capacity_factor})
    if e.tp > 1 and not e.sequence_parallel:
        draft.refuse("sequence_parallel", "its experts with tp need it; true would work")
