"""Stages that are written out, and stages of which embedding and head count as layers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.shape.partition import experiment_chunks, experiment_layers, experiment_stages
from workloads.spec.experiment import Experiment


def layers(**fields: Any) -> list[int]:
    return [
        len(held) for held in experiment_layers(Experiment.canonical(model=LLAMA_8B, global_batch_size=16, **fields))
    ]


@pytest.mark.parametrize(
    ("pp", "expected"),
    [(2, [16, 16]), (4, [8, 9, 8, 7]), (17, [1, *[2] * 15, 1]), (32, [1, 2, *[1] * 29, 0])],
)
def test_embedding_and_head_count_as_layers(pp: int, expected: list[int]) -> None:
    """With 2 and 17 stages, which divide 34, as Megatron-LM with both of its flags ``account-for-*``."""
    assert layers(pp=pp, pp_split="ends_count") == expected
    assert sum(expected) == 32


def test_written_stages_hold_what_they_say() -> None:
    assert layers(pp=4, pp_stages="Et*7|(t*9|)*2t*7L") == [7, 9, 9, 7]
    case = Experiment.canonical(model=LLAMA_8B, global_batch_size=16, pp=4, pp_stages="E|(t*16|)*2L")
    held = experiment_stages(case)
    assert [one.num_layers for one in held] == [0, 16, 16, 0]
    assert [bool(one.embedding) for one in held] == [True, False, False, False]
    assert [one.has_head for one in held] == [False, False, False, True]
    assert held[0].total == held[0].embedding


def test_virtual_stages_are_in_the_order_of_megatron_core() -> None:
    """``layout[pp_rank][vpp_rank]`` of its `PipelineParallelLayerLayout` for the same text."""
    case = Experiment.canonical(
        model=LLAMA_8B,
        global_batch_size=16,
        pp=2,
        pp_schedule="interleaved_1f1b",
        virtual_stages=2,
        pp_stages="Et*5|t*8|t*12|t*7L",
    )
    assert [[chunk.num_layers for chunk in rank] for rank in experiment_chunks(case)] == [[5, 12], [8, 7]]


def test_a_text_for_another_pipeline_leaves_the_split() -> None:
    """The rules refuse it; what reads the layers meanwhile finds a whole model."""
    assert sum(layers(pp=2, pp_stages="Et*9|L")) == sum(layers(pp=3, pp_stages="Et*16|t*16L")) == 32
