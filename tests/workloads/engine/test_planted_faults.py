"""What a test would not notice is not tested: faults are planted in the engine, and a check must find each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.pool import Pool, RankFailed
from tests.workloads.engine import checks
from tests.workloads.engine.planted import Fault

Check = Callable[[Pool, Fault | None], None]
STEP = "workloads.engine.optimizer:ShardedAdamW.step"
CONSTANTS = "workloads.engine.optimizer:"
DATA_PARALLEL = "workloads.engine.data_parallel:apply_data_parallel"
SYNC = "workloads.engine.data_parallel:GradientSync.__init__"
BATCHES = "workloads.engine.data:step_batches"
RUN_STEP = "workloads.step:run_step"
CLIPPING = "torch._foreach_mul_(gradients, torch.clamp(MAX_GRAD_NORM / (norm + 1e-6), max=1.0))"
END = "    engine.optimizer.step(totals[1].sqrt())\n    end = clock.mark()\n"
SWAPPED = "    end = clock.mark()\n    engine.optimizer.step(totals[1].sqrt())\n"

FAULTS: list[tuple[Check, Fault]] = [
    (checks.updates, Fault("gradients are never clipped", STEP, "pass", CLIPPING)),
    (checks.updates, Fault("gradients are always scaled to the largest norm", STEP, ", max=1e9", ", max=1.0")),
    (checks.updates, Fault("another learning rate", CONSTANTS + "LEARNING_RATE", 3e-4)),
    (checks.updates, Fault("torch's own betas", CONSTANTS + "BETAS", (0.9, 0.999))),
    (checks.updates, Fault("another epsilon", CONSTANTS + "EPSILON", 1e-6)),
    (checks.updates, Fault("torch's own weight decay", CONSTANTS + "WEIGHT_DECAY", 0.01)),
    (checks.updates, Fault("another largest norm", CONSTANTS + "MAX_GRAD_NORM", 2.0)),
    (
        checks.targets,
        Fault("a token is its own target", BATCHES, "rows[:, :-1], rows[:, :-1]", "rows[:, :-1], rows[:, 1:]"),
    ),
    (checks.targets, Fault("targets are two tokens ahead", BATCHES, "rows[:, 1:].roll(-1, 1)", "rows[:, 1:]")),
    (checks.targets, Fault("all ranks have one batch", BATCHES, "(microbatch * dp)", "(microbatch * dp + data_rank)")),
    (checks.initial_weights, Fault("weights start larger", "workloads.weights:INIT_STD", 0.025)),
    (
        checks.initial_weights,
        Fault(
            "depth is forgotten",
            "workloads.weights:residual_std",
            "INIT_STD",
            "INIT_STD / math.sqrt(2 * model.num_layers)",
        ),
    ),
    (checks.marks, Fault("the end is marked before the optimizer", RUN_STEP, SWAPPED, END)),
    (
        checks.marks,
        Fault(
            "the last backward ends after FSDP's wait",
            "workloads.engine.pipeline:_Step._run",
            "clock.mark()",
            "self.marks.last_backward if action is self.actions[-1] else clock.mark()",
        ),
    ),
    (
        checks.reduction_precision,
        Fault(
            "gradients are reduced in bf16",
            DATA_PARALLEL,
            "reduce_dtype=dtype",
            "reduce_dtype=master_dtype(experiment)",
        ),
    ),
    (
        checks.traffic,
        Fault("ZeRO 3 stays gathered after the forward", DATA_PARALLEL, "False", "experiment.zero_stage == 3"),
    ),
    (checks.traffic, Fault("ZeRO 3 stays gathered after the backward", SYNC, "True", "experiment.zero_stage <= 2")),
    (
        checks.traffic,
        Fault("ZeRO 2 reduces once a step", SYNC, "experiment.zero_stage >= 3", "experiment.zero_stage >= 2"),
    ),
    (checks.traffic, Fault("ZeRO 1 reduces every micro-batch", SYNC, "True", "experiment.zero_stage >= 2")),
]


@pytest.mark.slow
@pytest.mark.parametrize("check", list(dict.fromkeys(check for check, _ in FAULTS)), ids=lambda check: check.__name__)
def test_the_engine_passes(gloo_pool: Pool, check: Check) -> None:
    check(gloo_pool, None)


@pytest.mark.slow
@pytest.mark.parametrize(("check", "fault"), FAULTS, ids=lambda value: str(value) if isinstance(value, Fault) else "")
def test_a_planted_fault_is_found(gloo_pool: Pool, check: Check, fault: Fault) -> None:
    with pytest.raises(AssertionError) as caught:
        check(gloo_pool, fault)
    assert not isinstance(caught.value, RankFailed), "the fault could not be planted, or it is found by any run at all"
