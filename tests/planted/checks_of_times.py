"""Checks of predicted times: what small steps, and collectives on three tiers of a network, take by hand."""

from __future__ import annotations

from unittest.mock import patch

from tests.planted.plant import Fault, planted
from tests.pool import Pool
from tests.workloads.costs.traffic import test_tiers
from workloads.costs.time import step_simulation
from workloads.costs.time.step_simulation import ChunkWork, StepWork
from workloads.costs.traffic import collectives


def network_tiers(pool: Pool, fault: Fault | None) -> None:
    """Three tiers of 8, 32 and 128 devices, as in the tests of the module."""
    del pool
    with planted(fault):
        test_tiers.test_the_tier_of_a_group_is_the_one_that_its_members_span()
        test_tiers.test_three_tiers_by_hand()
        test_tiers.test_groups_that_leave_out_a_tier_by_hand()
        test_tiers.test_a_network_adapter_carries_what_goes_on_outwards()


def step_times(pool: Pool, fault: Fault | None) -> None:
    """Two micro-batches on one or two ranks, in seconds that can be counted by hand. Compute and traffic do not slow
    each other here."""
    del pool  # nothing is run
    apart = {"COMPUTE_BESIDE": 1.0, "TRAFFIC_BESIDE": 1.0}
    with planted(fault), patch.multiple(collectives, **apart):
        # GPipe with F = B = 1 and messages of 1.5 that start when both sides are ready, as in the tests of the module.
        plain = ChunkWork(1.0, 1.0, 0.5, 0.5)
        work = StepWork(schedule="gpipe", num_microbatches=2, chunks=((plain,),) * 2, latency_s=0.5, message_s=1.0)
        assert step_simulation.simulate_step(work).step_s == 12
        # F 4, B 8 in four units, twice; a reduction of 4 leaves a quarter of it, one of 16 hides in one unit less.
        for reduction, last in ((4.0, 8 + 1), (16.0, 2 + 16)):
            chunk = ChunkWork(4.0, 8.0, 4.0, 4.0, 4, 0.0, reduction)
            work = StepWork(schedule="1f1b", num_microbatches=2, chunks=((chunk,),), zero_stage=1)
            assert step_simulation.simulate_step(work).step_s == 4 + 8 + 4 + last
