"""Fields of config.json that change neither parameters nor FLOPs of a training step, in any family of models."""

from __future__ import annotations

from typing import Any

_GENERIC = frozenset(
    (
        *("_name_or_path", "add_cross_attention", "architectures", "auto_map", "bad_words_ids"),
        *("begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward", "cross_attention_hidden_size"),
        *("decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping", "eod_token_id"),
        *("encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task"),
        *("forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "id2label", "is_decoder"),
        *("is_encoder_decoder", "label2id", "length_penalty", "max_length", "min_length", "model_type"),
        *("name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences"),
        *("output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type"),
        *("pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict"),
        *("return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature"),
        *("tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype"),
        *("torchscript", "transformers_version", "typical_p", "unsloth_version", "use_bfloat16", "use_cache"),
    )
)
"""Fields of every configuration of transformers: tokens, generation of text, versions."""
_KNOWN = frozenset(
    (
        *(
            "_attn_implementation",
            "_attn_implementation_autoset",
            "attn_implementation",
            "cache_implementation",
            "embd_pdrop",
            "ep_size",
        ),
        *("expert_dtype", "ignore_index", "initializer_range", "initializer_factor", "keep_router_dtype"),
        *("keys_to_ignore_at_inference", "mamba_ssm_cache_dtype", "mamba_ssm_dtype", "num_logits_to_keep"),
        *("output_router_logits", "pretraining_tp", "quantization_config", "rescale_prenorm_residual"),
        *("residual_in_fp32", "router_dtype", "seq_aux", "torch_compile", "use_mamba_kernels"),
    )
)
"""Precisions of stored weights and caches, starting values, sizes of a step that serves text."""
_OFF = ("use_", "add_", "enable_", "is_", "has_")
_MEDIA = ("mm", "image", "video", "vision", "audio", "media", "boi", "eoi", "boa", "eoa")


def is_generic(name: str) -> bool:
    """Whether a field belongs to every configuration of transformers, and is not worth a line to the user."""
    return name in _GENERIC


def has_no_effect(name: str, value: Any) -> bool:
    """Whether a field with this value changes neither parameters nor FLOPs: a known one, one that is null, a part that
    is switched off, a token of other media, dropout of 0."""
    if name in _GENERIC or name in _KNOWN or value is None:
        return True
    if value is False and (name.startswith(_OFF) or name == "mlp_bias"):
        return True
    if name.endswith(("dropout", "_pdrop", "jitter_noise")) and value == 0:
        return True
    return name.startswith(_MEDIA) and name.endswith(("token", "token_id", "token_index", "placeholder", "per_image"))
