"""Faults in the simulation of a step, and in the tiers of a network."""

from __future__ import annotations

from tests.planted.faults import DP, PP, faults_of
from tests.planted.plant import Fault

SIMULATION = "workloads.costs.time.step_simulation:"
COLLECTIVES = "workloads.costs.traffic.collectives:"

_OF_STEPS = faults_of(
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

_OF_TIERS = faults_of(
    "times",
    (
        "ring_leaves_a_unit_by_one_link",
        "outer tiers have one device's bandwidth, whatever members a unit has",
        COLLECTIVES + "group_of",
        "through = one.inner * link.bandwidth",
        "through = link.bandwidth",
        {},
    ),
    (
        "hops_all_of_the_innermost_tier",
        "hops that leave a node take as long as those inside of it",
        COLLECTIVES + "group_of",
        "startup += (leaving - farther) * link.latency_s",
        "startup += (leaving - farther) * spanned[0].tier.latency_s",
        {},
    ),
    (
        "tier_of_the_group_misplaced",
        "ranks that do not fill a unit count as one unit's",
        COLLECTIVES + "members_per_node",
        "devices_per_node // stride",
        "devices_per_node",
        {},
    ),
    (
        "adapters_do_not_carry_it_on",
        "an exchange through a leaf counts only what stays below it",
        COLLECTIVES + "collective_time_s",
        "(n if one.tier.network else domain) - one.inner",
        "one.members - one.inner",
        {},
    ),
    (
        "tree_as_deep_as_one_tier",
        "a tree is as deep as the outermost tier that it spans",
        COLLECTIVES + "group_of",
        "depth += ceil(",
        "depth = ceil(",
        {},
    ),
    check="network_tiers",
)
TIMES: list[Fault] = [*_OF_STEPS, *_OF_TIERS]
