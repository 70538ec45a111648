"""The closed form of ranks with several chunks, or with split backwards, against the real engine on FakeTensors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.costs.memory.traced import experiment, rounding, shortened, traced
from tests.workloads.costs.shapes import DEEPSEEK_V2_LITE, LLAMA_1B, LLAMA_8B, MIXTRAL, QWEN3_30B
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of

pytestmark = pytest.mark.slow

CHUNKED = {
    schedule: Experiment.canonical(
        model=shortened(LLAMA_8B, 4),
        seq_len=4096,
        pp=2,
        pp_schedule=schedule,
        virtual_stages=2,
        global_batch_size=8,
    )
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")
}
SHARDED_CHUNKS = {
    schedule: Experiment.canonical(
        model=shortened(LLAMA_8B, 7),
        seq_len=4096,
        dp=2,
        zero_stage=2,
        pp=2,
        pp_schedule=schedule,
        virtual_stages=2,
        global_batch_size=16,
    )
    for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")
}


def split(pp: int = 2, layers: int = 4, chunks: int = 1, **fields: Any) -> Experiment:
    """Backwards in two halves, on ranks that share their weights."""
    fields = {"dp": 2, "zero_stage": 2, "microbatches": 8, **fields}
    return experiment(layers=layers, pp=pp, pp_schedule="interleaved_zero_bubble", virtual_stages=chunks, **fields)


SPLIT = {
    **{
        f"ZeRO {zero}, {microbatches} micro-batches": split(zero_stage=zero, microbatches=microbatches)
        for zero in (2, 3)
        for microbatches in (1, 2, 3, 8)
    },
    "ZeRO 1": split(zero_stage=1),
    "four ranks": split(4, 8, zero_stage=3),
    "four ranks, two chunks": split(4, 16, 2, dp=8, micro_batch_size=2),
    "two chunks, ZeRO 3": split(layers=7, chunks=2, zero_stage=3),
    "full": split(layers=6, recompute="full", micro_batch_size=2),
}
"""Interleaved zero-bubble: the ends' gradients are reduced in the first half, each block's in the second."""


ONE_CHUNK = {
    f"ZeRO {zero}, {microbatches} micro-batches of {tokens} tokens, {'added' if adds else 'rounded'}": (
        Experiment.canonical(
            model=shortened(LLAMA_8B, layers),
            seq_len=tokens,
            dp=4 if zero else 1,
            zero_stage=zero,
            pp=2,
            pp_schedule="interleaved_zero_bubble",
            global_batch_size=microbatches * (4 if zero else 1),
            gradient_accumulation_fusion=adds,
        )
    )
    for zero, microbatches, layers, tokens, adds in (
        (0, 1, 2, 512, False),
        (0, 2, 4, 4096, True),
        (1, 1, 5, 1024, False),
        (1, 2, 4, 4096, True),
        (1, 4, 2, 512, False),
        (2, 2, 4, 4096, False),
        (3, 2, 2, 512, False),
        (3, 3, 2, 512, False),
    )
}
"""Interleaved zero-bubble of one chunk: what exists differs between the passes of a backward, and between its first,
second and last micro-batch."""


FEW = {
    f"{schedule}, ZeRO {zero}": Experiment.canonical(
        model=shortened(LLAMA_8B, 7),
        seq_len=4096,
        dp=min(2, zero + 1),
        zero_stage=zero,
        pp=2,
        pp_schedule=schedule,
        virtual_stages=2,
        global_batch_size=microbatches * min(2, zero + 1),
    )
    for schedule, microbatches in (("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2), ("zero_bubble_v", 3))
    for zero in (0, 2, 3)
}
"""As many micro-batches as ranks, or one more: a chunk has had its last backward before another has its first."""


RECOMPUTED = {
    f"{schedule}, {recompute} every {every}, {microbatches}": Experiment.canonical(
        model=shortened(LLAMA_1B, 10),
        seq_len=4096,
        micro_batch_size=4,
        pp=2,
        pp_schedule=schedule,
        recompute=recompute,
        recompute_every=every,
        global_batch_size=4 * microbatches,
    )
    for schedule, recompute, every, microbatches in (
        ("zero_bubble_v", "full", 1, 1),
        ("zero_bubble_v", "full", 2, 2),
        ("zero_bubble_v", "selective", 1, 1),
        ("dualpipe_v", "full", 1, 1),
        ("dualpipe_v", "norm+swiglu", 1, 1),
    )
}
"""Halves of a backward with large activations: the first computes again and leaves what the second needs, which
computes nothing again and reduces the head last."""


HEAD_LAST = {
    f"ZeRO {zero}": Experiment.canonical(
        model=shortened(LLAMA_8B, 16),
        seq_len=1024,
        micro_batch_size=8,
        dp=zero + 1,
        zero_stage=zero,
        pp=2,
        pp_schedule="zero_bubble_v",
        global_batch_size=8 * (zero + 1),
    )
    for zero in (0, 1)
}
"""One micro-batch: the highest moment is the head's reduction after the second half of its chunk, while the other chunk
holds what it saved."""


def _in_halves(zero_stage: int, microbatches: int, micro_batch_size: int, **fields: Any) -> dict[str, Experiment]:
    return {
        f"{model.name}, {schedule}, {microbatches}": Experiment.canonical(
            **fields,
            model=shortened(model, layers),
            seq_len=4096,
            micro_batch_size=micro_batch_size,
            dp=min(2, zero_stage + 1),
            zero_stage=zero_stage,
            pp=2,
            pp_schedule=schedule,
            virtual_stages=2,
            global_batch_size=microbatches * micro_batch_size * min(2, zero_stage + 1),
        )
        for model, layers in ((MIXTRAL, 5), (QWEN3_30B, 6), (DEEPSEEK_V2_LITE, 6))
        for schedule in ("interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")
    }


EXPERTS_IN_HALVES = _in_halves(0, 1, 2) | _in_halves(0, 4, 1)
SHARDED_EXPERTS_IN_HALVES = _in_halves(2, 2, 2)
FREED_EXPERTS_IN_HALVES = _in_halves(3, 2, 4)
UNSHARDED_UNTIL_THE_END = _in_halves(1, 1, 2)
EXPERTS_IN_32_BITS = _in_halves(2, 1, 1, precision="fp32")
"""Experts are reduced in the second half of a backward, when their rows and their outputs' gradients are free."""


GPIPE = {
    f"ZeRO {zero}, {microbatches} micro-batches of {tokens} tokens, {offload}": experiment(
        layers=4,
        dp=min(2, zero + 1),
        zero_stage=zero,
        pp=2,
        pp_split="even",
        pp_schedule="gpipe",
        micro_batch_size=tokens // 4096,
        microbatches=microbatches,
        activation_offload=offload,
    )
    for zero, microbatches, tokens, offload in (
        (0, 1, 8192, "none"),
        (0, 3, 8192, "all"),
        (1, 2, 4096, "none"),
        (2, 3, 8192, "none"),
        (3, 1, 8192, "none"),
        (3, 3, 4096, "all"),
        (3, 3, 8192, "none"),
    )
}
"""The head's gradients are made after all forwards, with more than 4096 tokens chunk by chunk."""


NEAR = {
    "GPipe": (GPIPE, 0.001),
    "chunks": (CHUNKED, 0.002),
    "sharded chunks of 2, 2, 2 and 1 layers": (SHARDED_CHUNKS, 0.001),
    "chunks and few micro-batches": (FEW, 0.001),
    "recomputation in halves": (RECOMPUTED, 0.005),
    "the head reduced last": (HEAD_LAST, 0.002),
    "split backwards": (SPLIT, 0.018),
    "split backwards of one chunk": (ONE_CHUNK, 0.002),
    "experts in halves": (EXPERTS_IN_HALVES, 0.005),
    "sharded experts in halves": (SHARDED_EXPERTS_IN_HALVES, 0.003),
    "freed experts in halves": (FREED_EXPERTS_IN_HALVES, 0.018),
    "experts in halves, ZeRO 1": (UNSHARDED_UNTIL_THE_END, 0.01),
    "experts in halves, fp32": (EXPERTS_IN_32_BITS, 0.02),
}
"""Groups of layouts, and how far the closed form may be off the traced peak."""


@pytest.mark.parametrize(
    ("group", "name"),
    sampled([(group, name) for group, (cases, _) in NEAR.items() for name in cases], 2),
)
def test_peak_is_near_the_traced_engine(group: str, name: str) -> None:
    cases, within = NEAR[group]
    case = cases[name] if cases is ONE_CHUNK else rounding(cases[name])
    peaks = [traced(case, rank_of(case, pp=rank)) for rank in range(case.pp)]
    assert [stage.peak_bytes for stage in estimate_memory(case).stages] == pytest.approx(peaks, rel=within)
