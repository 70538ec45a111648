"""Interleaved pipelines: the form divides the fill of 1F1B, and a factor has what their execution takes beyond that."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sweep.composing.conffiles import ConfFolders
from tests.workloads.predict.test_layouts import H200, of
from workloads.costs.shape.partition import head_in_layers
from workloads.costs.time.step_times import StepTimes
from workloads.predict import layouts
from workloads.predict.time_terms import fill_share

CHUNKS = {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "global_batch_size": 2}


def test_a_heavy_head_makes_a_chunk_that_few_micro_batches_wait_for() -> None:
    """The dense stand-in of gpt-oss, whose head is more work than half of eight layers; and Llama 8B."""
    heavy, light = (
        of(model=layouts.plain_model(ConfFolders().model(name)), **CHUNKS)
        for name in ("gpt_oss_20b_8_layers", "llama8b")
    )
    assert head_in_layers(heavy.model, heavy.seq_len) > 4 > 3 > head_in_layers(light.model, light.seq_len)
    of_heavy, of_light = layouts.Structures(H200).factors([heavy, light])
    assert 1.1 < of_heavy < 1.4 and of_light == pytest.approx(1.0, abs=0.02)


def test_the_neighbour_is_1f1b_with_its_fill_divided() -> None:
    e = of(**{**CHUNKS, "pp": 4, "global_batch_size": 8})
    assert not layouts.is_plain(e) and layouts.plain(e) == e
    once = dataclasses.replace(e, pp_schedule="1f1b", virtual_stages=1)
    assert layouts.is_plain(once)
    [seconds], [fill] = StepTimes(H200).filled_s([once])
    divided, whole = layouts.Structures(H200).plain_s([e, once])
    assert whole == pytest.approx(seconds) and divided == pytest.approx(seconds - fill / 2)
    # Three of eleven parts of equal stages; the last stage has the head.
    assert fill / seconds == pytest.approx(3 / 11, rel=0.1)
    assert layouts.points_of([e, once], H200).vpp.tolist() == [2, 1]


def test_fewer_micro_batches_than_stages_keep_more_of_the_fill() -> None:
    chunks, m, stages = (np.array(one, dtype=float) for one in ([2, 2, 2, 1], [1, 2, 8, 8], [4, 4, 4, 4]))
    assert fill_share(chunks, m, stages).tolist() == pytest.approx([1.0, 1 - 1 / 6, 0.5, 1.0])
