"""Tokens of a micro-batch on one rank, and bytes of activations of the head.

Symbols: T tokens of a micro-batch on one rank; T_s = T / tp of them between tensor-parallel regions with sequence
parallelism (else T_s = T); c bytes per element of the compute dtype; h hidden size; V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from workloads.spec.experiment import Experiment

STATISTICS_BYTES = 4
"""Bytes per element of norm statistics and softmax normalizers, which are fp32."""

LOSS_CHUNK_TOKENS = 4096
"""Number of tokens whose logits exist at one time in the engine's chunked cross-entropy."""


def rank_tokens(experiment: Experiment) -> tuple[int, int]:
    """(T, T_s): tokens of a micro-batch on one rank, inside and between tensor-parallel regions."""
    tokens = experiment.micro_batch_size * experiment.seq_len // experiment.cp
    return tokens, tokens // experiment.tp if experiment.sequence_parallel else tokens


@dataclass(frozen=True, slots=True)
class HeadBytes:
    """Bytes of the final norm, the head and the loss, for one micro-batch on one rank of the last stage."""

    saved: int
    """Bytes held from forward to backward by every micro-batch in flight on the last stage."""
    working: int
    """Bytes alive at the end of the head's forward, ``saved`` included."""


def head_bytes(experiment: Experiment, c: int) -> HeadBytes:
    """Bytes of the final norm and the chunked linear cross-entropy over the local vocabulary, V / tp rows.

    Saved: the norm's input and statistics, and the gradients of the hidden states (``c T h``) and of the weight
    (``c V h / tp``), which the forward computes already. GPipe holds every micro-batch and therefore saves the normed
    (gathered) input and one normalizer per token instead of the gradients.

    Working: the norm's input and statistics, the normed input, the gradient of the hidden states, and the larger of

    1. one chunk of logits (overwritten by their gradient) and the weight's gradient, accumulated in fp32 if there are
       several chunks;
    2. that fp32 gradient and its copy in the compute dtype, if there are several chunks.

    With modules of multi-token prediction there are hidden states, and their gradients, of each of them too. The norm's
    input is then the first module's, and its place here that of the last module's output, which full recomputation does
    not save.

    With ``gradient_accumulation_fusion`` the weight's gradient is its sum over micro-batches, not counted here.
    """
    model = experiment.model
    passes = 1 + model.mtp_modules
    tokens, stream_tokens = rank_tokens(experiment)
    full = c * tokens * model.hidden_size * passes
    rows = model.vocab_size // experiment.tp
    chunks = passes * -(-tokens // LOSS_CHUNK_TOKENS)
    logits = c * -(-tokens // (chunks // passes)) * rows
    gradient = 0 if experiment.gradient_accumulation_fusion else c * rows * model.hidden_size
    accumulator = gradient if chunks == 1 or not gradient else max(c, STATISTICS_BYTES) * rows * model.hidden_size
    weight = max(logits + accumulator, accumulator + gradient if chunks > 1 else 0)
    own = c * model.hidden_size * stream_tokens
    norm_input = own + STATISTICS_BYTES * stream_tokens
    later = own * model.mtp_modules if experiment.tp > 1 and experiment.sequence_parallel else 0
    working = norm_input + full + full + weight + later
    if model.mtp_modules and experiment.recompute == "full":
        norm_input -= own
    if experiment.pp_schedule == "gpipe":
        return HeadBytes(saved=norm_input + full + STATISTICS_BYTES * tokens * passes, working=working)
    return HeadBytes(saved=norm_input + full + gradient, working=working)
