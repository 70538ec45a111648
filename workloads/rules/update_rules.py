"""Rules about how weights are updated: number formats of gradients, states and weights, optimizers, and offload.

bf16 gradients and bf16 weights go with products in bf16 or fp8, whose gradients are bf16 already; bf16 states go with
every precision but fp64, which is for comparisons of layouts.
"""

from __future__ import annotations

UPDATE_CASES = (
    (
        "grad_reduce_precision",
        "grad_reduce == 'bf16' and precision in ('fp16', 'fp32', 'fp64')",
        "grad_reduce=bf16 with precision={precision}: gradients of {precision} would lose what {precision} was chosen "
        "for; use precision=bf16 or an fp8 one, or grad_reduce=fp32",
    ),
    (
        "optimizer_states_precision",
        "optimizer_states == 'bf16' and precision == 'fp64'",
        "optimizer_states=bf16 with precision=fp64: states would be rounded to 8 of 53 bits; use precision=fp32 or "
        "bf16, or optimizer_states=fp32",
    ),
    (
        "master_weights_precision",
        "master_weights == 'bf16' and precision in ('fp16', 'fp32', 'fp64')",
        "master_weights=bf16 with precision={precision}: no weight would have more bits than bf16; use precision=bf16 "
        "or an fp8 one, or master_weights=fp32",
    ),
)
"""(name, condition that breaks the rule, sentence) of layouts that no engine can have."""

UPDATES_LACKING = (
    (
        "optimizer_fp16",
        "engine == 'ultrasweep' and optimizer != 'adamw' and precision == 'fp16'",
        "optimizer={optimizer} with precision=fp16, since only AdamW skips steps whose gradients overflow (bf16 works)",
    ),
    (
        "optimizer_of_formats",
        "engine == 'ultrasweep' and optimizer != 'adamw' and (optimizer_states != 'fp32' or master_weights != 'fp32')",
        "optimizer_states={optimizer_states} and master_weights={master_weights} with optimizer={optimizer} (fp32 "
        "works)",
    ),
    (
        "optimizer_recurrent",
        "engine == 'ultrasweep' and optimizer in ('muon', 'adafactor') and recurrent_heads > 0",
        "optimizer={optimizer} with the recurrent layers of {model}, whose convolutions are no matrices (adamw and sgd "
        "work)",
    ),
    (
        "optimizer_offload_of",
        "engine == 'ultrasweep' and optimizer_offload > 0 and optimizer != 'adamw'",
        "optimizer_offload={optimizer_offload} with optimizer={optimizer} (those of adamw can be on the host; or "
        "optimizer_offload=0)",
    ),
)
"""The same of what this project's engine cannot run yet."""
