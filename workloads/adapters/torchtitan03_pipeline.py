"""Lets torch's pipeline schedules take a list of micro-batches, as torchtitan 0.3 passes it.

Those of torch 2.14 and later take it. Those of torch 2.13 take a whole batch alone and split it themselves.
"""

from __future__ import annotations

import inspect
from typing import Any


def take_lists(schedule: Any) -> None:
    """Replace ``schedule.step`` if it has no argument for lists of micro-batches."""
    if "arg_mbs" in inspect.signature(schedule.step).parameters:
        return
    stages = getattr(schedule, "_stages", None) or [schedule._stage]

    def step(*, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, loss_kwargs: Any, **_: Any) -> None:
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, False, loss_kwargs=loss_kwargs)

    schedule.step = step
