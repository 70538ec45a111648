"""What steps take longer whose algorithms are all deterministic, as with ``--deterministic-mode`` of Megatron-LM.

attention   Transformer Engine takes FlashAttention-2 with its deterministic backward; on Hopper cuDNN's, which stores
            the gradient of every score (`STORED`). cuDNN had no such backward on Ampere, and on Blackwell none before
            9.18.1 (get_attention_backend of Transformer Engine, its pull requests 992, 2130 and 2584)
loss        cross-entropy fusion is refused: float32 copies of the logits are read and written by one operation after
            the other
embedding   with a vocabulary split over ranks, tokens of other ranks are looked up in one row, to which the backward
            of an index adds their gradients one by one

Rates were measured on one H200 with torch 2.11 (CUDA 13) at a hidden size of 4,096 with 32 heads of 128, 8,192 tokens
a sequence: one sequence with all heads, and two with a quarter of heads and vocabulary. Not counted are the writes with
which ``torch.use_deterministic_algorithms`` fills new tensors: 1.1 and 0.4 ms of 23.8 and 13.2 ms a layer there, in
eager layers of torch; those of Transformer Engine have fewer tensors.
"""

from __future__ import annotations

from workloads.predict.parameters import TIME

FLASH2 = 0.19
"""Share of Hopper's peak of FlashAttention-2 with deterministic backward, as `TIME`'s ``attention``: 10.2 and 5.9 ms
forward and backward (without: 7.0 and 3.8 ms; cuDNN without: 3.8 and 2.1 ms)."""
SLOWER = 0.67
"""Rate of FlashAttention-2 forward and backward with a deterministic backward over that without, from the same."""
NEWEST = 0.93
"""`SLOWER` of the newest kernels on Blackwell: FlashAttention-4 on B200, 3.28 ms instead of 3.05 (Dao-AILab/
flash-attention, pull request 2280: causal, 8,192 tokens)."""
HOPPER = 989e12
"""FLOP/s of Hopper in 16 bits. FlashAttention-2 has no instructions of Blackwell, where it reaches what it reaches on
Hopper: 354 to 362 TFLOP/s forward at 2,048 to 8,192 tokens on B200 (meta-pytorch/tritonbench, pull request 171), 310
on H200."""
STORED = 4.0
"""Bytes a score, forward and backward, of cuDNN's backward on Hopper: the gradient of the scores in 16 bits, written
and read (NVIDIA/cudnn-frontend, pull request 398). Counted, not measured."""
LOSS = 67.0
"""Bytes moved for a logit by the loss, as `TIME`'s ``loss``: 19.9 ms for 8,192 x 131,200 logits, 10.2 ms for
16,384 x 32,800."""
LOOKUP_S = 1.0e-6
"""Seconds of the embedding for a token of another rank's part of the vocabulary: 16.5 ms longer for 16,384 of them,
12.3 ms for three quarters as many."""


def kernel_and_kind(generation: str, kind: str, usual: float, peak: float) -> tuple[float, float]:
    """`Points.kernel` and `Points.deterministic`. ``generation``: of the device, "hopper", "blackwell" or another;
    ``kind``: of the kernel that a row names (`workloads.predict.cells.words.kernel_of`), empty: none; ``usual``: the
    code base's share of peak; ``peak``: FLOP/s of the device of which attention reaches a share."""
    if generation == "hopper" and kind != "flash2":
        return TIME["attention"].value / usual, 2.0
    if generation == "blackwell" and kind == "newest":
        return NEWEST, 1.0
    if generation:
        return FLASH2 * HOPPER / (usual * peak), 1.0
    return SLOWER, 1.0
