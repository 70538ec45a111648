"""How differences from a plain neighbour make a prediction: by hand, and in the parts of real layouts."""

from __future__ import annotations

import numpy as np
import pytest

from sweep.composing.conffiles import ConfFolders
from tests.workloads.predict.test_layouts import H200, NARROW, of
from workloads.costs.shape.partition import head_in_layers
from workloads.costs.time.step_times import StepTimes
from workloads.predict import layouts
from workloads.predict.factors import Factors
from workloads.predict.time_terms import TimeTerms, fill_share

PARTS = TimeTerms(*(np.array([seconds]) for seconds in (8.0, 1.0, 1.0, 6.0, 5.0, 0.2)))
"""A pipeline of 8 s, 1 s of seen traffic and 1 s after it, 0.2 s of them constant; hosts launch its work in 5 s."""
SECONDS = ((4.0, 1.0, 1.0), (8.0, 1.5, 1.25), (4.0, 0.5, 0.25))
"""Work, exposed traffic and updates of a neighbour and of two layouts."""


def test_work_is_multiplied_traffic_and_updates_are_added() -> None:
    near, more, less = (np.array([[work], [exposed], [updates]]) for work, exposed, updates in SECONDS)
    twice = Factors.between(more, near)
    assert twice.step_s(PARTS).tolist() == [2 * 8 + 1.5 + 1.25]
    assert twice.of_step(PARTS).tolist() == [1.875]
    assert Factors.between(less, near).step_s(PARTS).tolist() == pytest.approx([8.9])  # what is less is a share
    assert Factors.between(more, np.array([[1.0], [0.0], [0.0]])).traffic_s(PARTS).tolist() == [1 + 1.5]
    assert Factors.nothing(1).step_s(PARTS).tolist() == [10.0]


def test_no_schedule_is_faster_than_its_hosts() -> None:
    fast = Factors.nothing(1)._replace(work=np.array([0.5])).with_hosts(np.ones(1), PARTS)
    assert fast.step_s(PARTS).tolist() == [5 + 1 + 1]
    assert fast.without_schedule(np.ones(1), PARTS).tolist() == pytest.approx([7 / 10 / (5 / 8)])


def test_the_parts_of_a_step_are_its_seconds() -> None:
    experiments = [
        of(dp=2, zero_stage=3, global_batch_size=8),
        of(dp=2, pp=4, zero_stage=1, global_batch_size=16),
        of(model=NARROW, dp=4, zero_stage=2, global_batch_size=16),
        of(dp=2, pp=4, pp_schedule="zero_bubble_v", virtual_stages=2, zero_stage=1, global_batch_size=16),
    ]
    times = StepTimes(H200)
    work, exposed, updates, fill = times.parted_s(experiments)
    assert (updates > 0).all() and (work + exposed + updates).tolist() == pytest.approx(
        times.seconds(experiments).tolist()
    )
    assert (exposed > 0).all() and fill[0] == pytest.approx(0, abs=1e-9) and (fill[[1, 3]] > 0).all()
    alone = times.parted_s([one.replace(dp_shard=1, zero_stage=0, global_batch_size=8) for one in experiments[:2]])
    assert alone[1].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_a_heavy_head_makes_interleaved_pipelines_longer_than_their_divided_fill() -> None:
    """The dense stand-in of gpt-oss, whose head is more work than half of eight layers; and Llama 8B."""
    chunks = {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "global_batch_size": 2}
    heavy, light = (
        of(model=layouts.plain_model(ConfFolders().model(name)), **chunks)
        for name in ("gpt_oss_20b_8_layers", "llama8b")
    )
    assert head_in_layers(heavy.model, heavy.seq_len) > 4 > 3 > head_in_layers(light.model, light.seq_len)
    of_heavy, of_light = layouts.Structures(H200).factors([heavy, light]).work
    assert 1.1 < of_heavy < 1.4 and of_light == pytest.approx(1.0, abs=0.02)


def test_fewer_micro_batches_than_stages_keep_more_of_the_fill() -> None:
    chunks, m, stages = (np.array(one, dtype=float) for one in ([2, 2, 2, 1], [1, 2, 8, 8], [4, 4, 4, 4]))
    assert fill_share(chunks, m, stages).tolist() == pytest.approx([1.0, 1 - 1 / 6, 0.5, 1.0])
