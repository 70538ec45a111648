"""Rules about matrix products in 8 bits or fewer: sizes that they need on every rank, and compiled blocks."""

from __future__ import annotations

FP8_CASES = (
    (
        "compile_fp8",
        "engine == 'ultrasweep' and compile == 'block' and low_precision",
        "compile=block with precision={precision}: fp8 products use separate kernels for casts, which a compiled block "
        "cannot contain; use compile=none, or precision=bf16",
    ),
    (
        "fp8_sizes",
        "low_precision and divided % tp == 0 and has_layer_list and fp8_list_sizes % fp8_multiple",
        "precision={precision} needs multiples of {fp8_multiple} on every rank: {tokens} tokens of a micro-batch, "
        "hidden_size={hidden_size}, and {ffn_hidden_size // tp if ffn_hidden_size else 'no'} columns of dense layers; "
        "choose another micro_batch_size, seq_len or tp, or precision=bf16",
    ),
    (
        "fp8_sizes",
        "low_precision and divided % tp == 0 and has_layer_list and fp8_list_sizes % fp8_multiple == 0 and "
        "kind_columns % fp8_multiple",
        "precision={precision} needs multiples of {fp8_multiple} on every rank: the columns of all projections of one "
        "input in the kinds of {model} have {kind_columns} as their greatest common divisor; choose another tp, or "
        "precision=bf16",
    ),
    (
        "fp8_sizes",
        "low_precision and divided % tp == 0 and not has_latent_attention and not has_layer_list and "
        "fp8_sizes % fp8_multiple",
        "precision={precision} needs multiples of {fp8_multiple} on every rank: {tokens} tokens of a micro-batch, "
        "hidden_size={hidden_size}, and {fp8_parts} columns of queries, of all projections"
        "{' and of the feed-forward layer' if ffn_hidden_size else ''}; choose another micro_batch_size, seq_len or "
        "tp, or precision=bf16",
    ),
    (
        "fp8_sizes",
        "low_precision and divided % tp == 0 and has_latent_attention and "
        "(not has_layer_list or (fp8_list_sizes % fp8_multiple == 0 and kind_columns % fp8_multiple == 0)) and "
        "(fp8_latent_sizes % fp8_multiple or fp8_down % 16 or fp8_stream % 16)",
        "precision={precision} needs multiples of {fp8_multiple} on every rank: {tokens} tokens of a micro-batch, "
        "hidden_size={hidden_size}, {num_heads * query_size // tp}, {key_value_columns} and {num_heads * value_size // "
        "tp} columns of queries, keys with values and outputs, {query_latent} and {latent} of latents, "
        "{ffn_hidden_size // tp if ffn_hidden_size else 'no columns'} of the feed-forward layer; and of 16: {fp8_down} "
        "columns and {fp8_stream} tokens of the down projection; choose another micro_batch_size, seq_len or tp, or "
        "precision=bf16",
    ),
    (
        "fp8_experts",
        "low_precision and has_experts and divided % tp == 0 and expert_hidden_size % etp == 0 and "
        "(expert_hidden_size // etp % 16 or shared_hidden_size // tp % fp8_multiple)",
        "precision={precision} needs multiples of 16 columns of an expert on every rank, {expert_hidden_size // etp}, "
        "and of {fp8_multiple} of shared ones, {shared_hidden_size // tp}; use another tp or etp, or precision=bf16",
    ),
)
"""(name, condition that breaks the rule, sentence); at most one of a name is broken at a time."""
