from __future__ import annotations

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.memory import microbatches_held
from workloads.costs.pipeline import simulate
from workloads.costs.schedule import Action, microbatches_in_flight, schedule_actions
from workloads.errors import UnsupportedByEngine
from workloads.experiment import Experiment

SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (3, 8), (4, 4), (8, 3), (8, 32)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_every_microbatch_goes_forward_then_backward_once(name: str, stages: int, microbatches: int) -> None:
    for stage in range(stages):
        actions = schedule_actions(name, stage, stages, microbatches)
        assert len(actions) == len(set(actions)) == 2 * microbatches
        for i in range(microbatches):
            assert actions.index(Action("F", i)) < actions.index(Action("B", i))
        backwards = [a.microbatch for a in actions if a.kind == "B"]
        assert backwards == sorted(backwards), "the last backward must be the last micro-batch's"


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_all_stages_together_do_not_wait_for_each_other_for_ever(name: str, stages: int, microbatches: int) -> None:
    lists = [schedule_actions(name, stage, stages, microbatches) for stage in range(stages)]
    assert simulate(lists, [1.0] * stages, [2.0] * stages).total_s == 3.0 * (microbatches + stages - 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_closed_form_of_microbatches_held(name: str, stages: int, microbatches: int) -> None:
    experiment = Experiment.canonical(model=LLAMA_8B, pp=stages, pp_schedule=name, global_batch_size=microbatches)
    for stage in range(stages):
        actions = schedule_actions(experiment.pp_schedule, stage, stages, microbatches)
        assert microbatches_held(experiment, stage) == microbatches_in_flight(actions)


def test_schedule_not_written_yet() -> None:
    with pytest.raises(UnsupportedByEngine, match="zero_bubble_v is not available yet; use 1f1b or gpipe"):
        schedule_actions("zero_bubble_v", 0, 2, 2)
