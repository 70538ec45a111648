"""Faults in the simulation of a step."""

from __future__ import annotations

from tests.planted.faults import DP, PP, faults_of
from tests.planted.plant import Fault

SIMULATION = "workloads.costs.time.step_simulation:"

TIMES: list[Fault] = faults_of(
    "times",
    (
        "reduction_not_waited_for",
        "a rank goes on before its gradients are reduced",
        SIMULATION + "simulate_step",
        "end = max(end, free[rank])",
        "pass",
        DP,
    ),
    (
        "message_before_it_is_asked_for",
        "a message is under way before its receiver is ready",
        SIMULATION + "simulate_step",
        "max(start, ends[event.awaited]) + hop",
        "max(start, ends[event.awaited] + hop)",
        PP,
    ),
    (
        "reduction_always_hides",
        "a reduction that takes longer than its backward hides behind it",
        SIMULATION + "reduced_s",
        "together_s(compute_s, gather_s + reduce_s, most, beside)",
        "compute_s",
        DP,
    ),
    check="step_times",
)
