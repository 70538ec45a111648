"""Values that several rules use, each computed from values of `workloads.rules.rule_values` or from those above it.

They are data, as the rules are: the planner evaluates them here, and the report's explorer evaluates the same
expressions in the browser.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

from workloads.costs.shape.schedule import INTERLEAVED, SPLIT_BACKWARD, V_SHAPED
from workloads.spec.expressions import parse


def divisors(value: int) -> list[int]:
    """Every divisor of a whole number of at least 1, smallest first; empty for 0."""
    return [d for d in range(1, value + 1) if value % d == 0]


FUNCTIONS: Mapping[str, Callable[..., Any]] = {"gcd": gcd, "divisors": divisors}
"""Functions that conditions and sentences may call."""

SPLIT = ("num_heads", "num_kv_heads", "ffn_hidden_size", "vocab_size", "shared_hidden_size")
"""Sizes that tensor parallelism splits: heads, feed-forward columns and vocabulary rows. The columns of dense layers
and ``shared_hidden_size``, the columns of all shared experts, are 0 if there are none; 0 is divisible by everything and
does not change a greatest common divisor."""

DERIVED = {
    name: parse(text, name, FUNCTIONS)
    for name, text in {
        "round": "dp * micro_batch_size",  # sequences that all data-parallel ranks together process in one micro-batch
        "rest": "global_batch_size % round",
        "chunks": "pp * virtual_stages",
        "schedule_fits": "(pp > 1) == (pp_schedule != 'none')",
        "interleaved": f"pp_schedule in {INTERLEAVED}",
        # With one chunk a rank, interleaved 1F1B is a worse 1F1B, but interleaved zero-bubble is ZB-H1.
        "least_chunks": f"2 if pp_schedule in {('interleaved_1f1b', *V_SHAPED)} else 1",
        "splits_backward": f"pp_schedule in {SPLIT_BACKWARD}",
        "tokens": "micro_batch_size * seq_len // cp",  # of one micro-batch on one context-parallel rank
        # Rows of embedding and head with their padding, and the key and value heads of all ranks with their copies.
        "row_multiple": "pad_vocab_to * tp if pad_vocab_to else 1",
        "padded_vocab_size": "(vocab_size + row_multiple - 1) // row_multiple * row_multiple",
        "copies_heads": "copies_in_layers or tp > num_kv_heads and tp % num_kv_heads == 0 and num_heads % tp == 0 and "
        "not has_latent_attention and not has_layer_list",
        "held_kv_heads": "tp if copies_heads else num_kv_heads",
        # Degrees that divide every size; more may work where heads are copied or rows padded.
        "split": f"gcd({', '.join(SPLIT)})",
        "divided": "gcd(num_heads, held_kv_heads, ffn_hidden_size, padded_vocab_size, shared_hidden_size)",
        "cp_part": "2 * cp",
        "ep_ranks": "dp * cp * tp // etp",
        # ranks that share an expert's master weights
        "ep_shards": "1 if zero_stage == 0 else dp_shard * cp * tp // etp",
        "most_imbalance": "num_experts / experts_per_token if has_experts else 1",
        # Tensor cores need multiples of 16 bytes; a blockwise scale covers 128 values, one of mxfp8 32.
        "fp8_multiple": "128 if precision == 'fp8_blockwise' else 32 if precision in ('mxfp8', 'nvfp4') else 16",
        "low_precision": "'fp8' in precision or precision == 'nvfp4'",
        "rate_name": "precision if precision in ('mxfp8', 'nvfp4') else 'fp8'",
        "projected": "(num_heads + 2 * held_kv_heads) * head_dim // tp",
        "fp8_parts": "[num_heads * head_dim // tp, projected, ffn_hidden_size // tp] if ffn_hidden_size else "
        "[num_heads * head_dim // tp, projected]",
        "fp8_sizes": "gcd(hidden_size, num_heads * head_dim // tp, projected, ffn_hidden_size // tp, tokens)",
        "fp8_list_sizes": "gcd(hidden_size, ffn_hidden_size // tp, tokens)",
        # For latent attention. Its down projections stay in bf16 with blockwise fp8; they process each rank's own
        # tokens.
        "key_value_columns": "num_heads * (query_size - rope_size + value_size) // tp",
        "fp8_down": "0 if precision == 'fp8_blockwise' else query_latent + latent + rope_size",
        "fp8_stream": "tokens // tp if sequence_parallel else tokens",
        "fp8_latent_sizes": "gcd(hidden_size, num_heads * query_size // tp, key_value_columns, "
        "num_heads * value_size // tp, query_latent, latent, ffn_hidden_size // tp, tokens)",
    }.items()
}
"""Names that several conditions and sentences use; each may use the ones above it."""
