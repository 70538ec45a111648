"""No kind of layer or multi-token module makes a tensor of the host's numbers in a step: a captured one may not copy
them to its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.kind_models import MODELS, RECURRENT, kind_model
from tests.workloads.measuring.graph_stand_in import StandIn, measured, stood_in_for
from tests.workloads.measuring.test_captured import LARGER, ON_GPUS, ranks_of
from workloads.engine.training import captured_step
from workloads.engine.training.captured_step import Launched

MAKERS = ((torch, "tensor"), (torch, "as_tensor"), (torch.Tensor, "new_tensor"))
WITH_MODULES = [layout for layout in ON_GPUS if "modules" in layout]
LAYOUTS: tuple[dict[str, Any], ...] = ({"tp": 2}, {"dp": 2, "zero_stage": 3}, {"pp": 2, "micro_batch_size": 1})


class Watching(StandIn):
    """Raises `AssertionError` if what it captures calls one of `MAKERS`."""

    def capture(self, work: Callable[[], Launched]) -> Launched:
        patches = [patch.object(of, name, Mock(side_effect=AssertionError(name))) for of, name in MAKERS]
        for one in patches:
            one.start()
        try:
            return super().capture(work)
        finally:
            for one in patches:
                one.stop()


def captured(rank: int, fields: dict[str, Any]) -> list[str]:
    with stood_in_for():
        captured_step.CudaGraph = Watching  # type: ignore[misc,assignment]
        measured(rank, fields, "step")
    return StandIn.calls[:1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", sampled([*MODELS, *RECURRENT], 4))
def test_no_kind_brings_numbers_of_the_host_into_a_captured_step(
    gloo_pool: Pool, name: str, layout: dict[str, Any]
) -> None:
    fields = {"model": kind_model(name), "seq_len": 20, "micro_batch_size": 4, "global_batch_size": 8, **layout}
    assert gloo_pool.run(captured, 2, fields) == [["capture"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(WITH_MODULES, 2), ids=str)
def test_no_module_brings_numbers_of_the_host_into_a_captured_step(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    ranks = ranks_of(layout)
    assert gloo_pool.run(captured, ranks, {"model": LARGER, "global_batch_size": 4, **layout}) == [["capture"]] * ranks
