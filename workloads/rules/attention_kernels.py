"""States which attention kernels a device can run: the cases of the planner's rule ``attention``; and which kernels of
recurrent layers, those of its rule ``recurrence``.

They were checked with torch 2.11 on an H200 and with torch 2.13 on a CPU, in bf16, fp16, fp32 and fp64 and with heads
of 4 to 512: ``auto`` and ``math`` ran everywhere, and so did every other combination that is not refused here. With
grouped queries there are fewer key and value heads than query heads. The fp8 precisions compute attention in bf16.
FlashAttention-4 was checked on an H200 with the sizes that its release 4.0.0b36 names.
"""

from __future__ import annotations

_SIZES = "{model} has {query_size} for queries and {value_size} for values; use attention="

ATTENTION_CASES = (
    (
        "attention",
        "attention in ('cudnn', 'efficient', 'flash4') and backend != 'cuda'",
        "attention={attention} needs CUDA devices, cluster {cluster} has {backend}; use attention=auto, flash or math",
    ),
    (
        "attention",
        "backend == 'cuda' and (attention in ('cudnn', 'flash', 'flash4') and precision in ('fp32', 'fp64') "
        "or attention == 'efficient' and precision == 'fp64')",
        "attention={attention} has no {precision} kernels on CUDA; use attention=auto or math",
    ),
    (
        "attention",
        "backend == 'cuda' and attention == 'efficient' and precision != 'fp64' and num_kv_heads < num_heads",
        "attention=efficient has no grouped queries on CUDA, {model} has num_heads={num_heads} and "
        "num_kv_heads={num_kv_heads}; use attention=auto or math",
    ),
    (
        "attention",
        "backend == 'cuda' and attention == 'efficient' and precision == 'fp32' and num_kv_heads == num_heads "
        "and gcd(query_size, value_size) % 4",
        "attention=efficient takes sizes of heads in fp32 that are multiples of 4, " + _SIZES + "auto or math",
    ),
    (
        "attention",
        "backend == 'cuda' and (attention in ('cudnn', 'flash4') or attention == 'efficient' "
        "and num_kv_heads == num_heads) and precision not in ('fp32', 'fp64') and gcd(query_size, value_size) % 8",
        "attention={attention} takes sizes of heads that are multiples of 8 on CUDA, " + _SIZES + "auto or math",
    ),
    (
        "attention",
        "backend == 'cuda' and (attention == 'flash' or attention in ('cudnn', 'flash4') "
        "and not gcd(query_size, value_size) % 8) "
        "and precision not in ('fp32', 'fp64') and (query_size > 256 or value_size > 256)",
        "attention={attention} takes heads of at most 256 on CUDA, " + _SIZES + "auto or math",
    ),
    (
        "attention_compile",
        "attention == 'flash4' and compile == 'block'",
        "compile=block with attention=flash4: torch.compile cannot look into its kernels; use compile=none, or "
        "attention=auto",
    ),
    (
        "attention_device",
        "attention == 'flash4' and backend == 'cuda' and 'fp8' not in precisions",
        "attention=flash4 needs Hopper or newer devices, {device} is older; use attention=auto",
    ),
    (
        "recurrence",
        "recurrence == 'mamba_ssm' and engine != 'transformers'",
        "recurrence=mamba_ssm is what engine=transformers looks for, not {engine}; use recurrence=fla or torch",
    ),
    (
        "recurrence",
        "(recurrence == 'fla' or recurrence == 'mamba_ssm' and engine == 'transformers') and backend != 'cuda'",
        "recurrence={recurrence} needs CUDA devices, cluster {cluster} has {backend}; use recurrence=torch",
    ),
    (
        "recurrence",
        "(recurrence == 'fla' or recurrence == 'mamba_ssm' and engine == 'transformers') and backend == 'cuda' "
        "and precision in ('fp32', 'fp64')",
        "recurrence={recurrence} has no {precision} kernels; use recurrence=torch",
    ),
    (
        "recurrence",
        "recurrence == 'fla' and backend == 'cuda' and precision not in ('fp32', 'fp64') and recurrent_key > 256",
        "recurrence=fla takes keys and states of at most 256 numbers, {model} has {recurrent_key}; use "
        "recurrence=torch",
    ),
)
"""(name, condition that breaks the rule, sentence); at most one of a name is broken at a time."""
