"""The closed form of layouts whose stages recompute differently, against the real engine on FakeTensors and against
layouts with one word."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.costs.memory.traced import experiment, rounding, traced
from tests.workloads.costs.shapes import DEEPSEEK_V2_LITE
from workloads.costs.memory.estimate import estimate_memory, peak_stage, rank_peak_bytes
from workloads.costs.shape.partition import words_of_stages
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of


def layout(words: str, layers: int = 4, **fields: Any) -> Experiment:
    fields = {"dp": 2, "zero_stage": 2, "microbatches": 4, "micro_batch_size": 4, "pp_split": "even", **fields}
    return experiment(layers=layers, recompute=words, **fields)


ONE_STAGE = {
    "full:2, ZeRO 3": layout("full:2", dp=8, zero_stage=3, microbatches=1),
    "full:1, accumulation": layout("full:1", zero_stage=1, microbatches=3, micro_batch_size=2),
    "full:3, tp": layout("full:3", dp=1, zero_stage=0, tp=4, micro_batch_size=8, microbatches=3),
}
STAGES = {
    "four words": layout("full/selective/none*2", 8, pp=4, dp=8, zero_stage=3, microbatches=8, micro_batch_size=2),
    "first layer": layout("full:1/none", pp=2),
    "none, selective, ZeRO 1": layout("none/selective", pp=2, zero_stage=1, pp_split="balanced"),
    "none, full, ZeRO 1": layout("none/full", pp=2, zero_stage=1),
    "experts": layout("full:1/none", 6, model=DEEPSEEK_V2_LITE, pp=2, micro_batch_size=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled([*ONE_STAGE, *STAGES], 1))
def test_peaks_are_those_of_the_traced_engine(name: str) -> None:
    case = rounding((ONE_STAGE | STAGES)[name])
    peaks = [traced(case, rank_of(case, pp=rank)) for rank in range(case.pp)]
    assert [stage.peak_bytes for stage in estimate_memory(case).stages] == pytest.approx(peaks, rel=0.001)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_zero_bubble"])
@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_rank_peaks_as_if_every_stage_had_its_word(schedule: str, zero_stage: int) -> None:
    words = ("full", "selective", "norm", "none")
    dp = 2 if zero_stage else 1
    case = layout("/".join(words), 8, pp=4, pp_schedule=schedule, zero_stage=zero_stage, dp=dp)
    alone = [
        estimate_memory(layout(word, 8, pp=4, pp_schedule=schedule, zero_stage=zero_stage, dp=dp)) for word in words
    ]
    expected = [estimate.stages[rank].peak_bytes for rank, estimate in enumerate(alone)]
    assert len(set(expected)) == 4
    assert [stage.peak_bytes for stage in estimate_memory(case).stages] == expected
    assert [rank_peak_bytes(case, rank) for rank in range(4)] == expected
    assert peak_stage(case).peak_bytes == max(expected)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v"])
def test_chunks_of_a_rank_have_words_of_their_own(schedule: str) -> None:
    """Each rank of a layout with words by chunk needs no less than if all its chunks recomputed fully, and no more than
    if none did; a word on one rank leaves the other as it was."""
    fields = {"pp": 2, "pp_schedule": schedule, "virtual_stages": 2, "zero_stage": 3, "micro_batch_size": 2}

    def peaks(words: str) -> list[int]:
        return [stage.peak_bytes for stage in estimate_memory(layout(words, 8, **fields)).stages]

    none, full, mixed = peaks("none"), peaks("full"), peaks("full/none*3")
    assert mixed[1] == none[1]
    assert full[0] < mixed[0] < none[0]
    assert peaks("/".join(["full"] * 4)) == full


def test_too_few_words_do_not_stop_the_rules() -> None:
    case = layout("full/none", 8, pp=4)
    assert [one.text for one in words_of_stages(case)] == ["full", "none", "full", "full"]
