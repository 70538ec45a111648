"""Nodes excluded after failures: those that fail alone, not those that fail together with others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from launchers.state.history import AttemptRecord
from launchers.state.node_exclusions import failing
from tests.launchers.scripted import attempt_record

NOW = 10_000.0
ESTALE = "rank 3 in step 1: OSError: [Errno 116] Stale file handle: '/shared/sweep/attempts/x'"


def failed(number: int, node: str, outcome: str = "node_failure", evidence: str = "because") -> AttemptRecord:
    return attempt_record(
        number, outcome, True, experiment_id=f"e{number}", nodes=(node,), failed_node=node, evidence=evidence
    )


def good(number: int, node: str) -> AttemptRecord:
    return attempt_record(number, "ok", experiment_id=f"e{number}", nodes=(node,))


def excluded(records: Sequence[AttemptRecord]) -> set[str]:
    nodes = {record.nodes[0] for record in records}
    return set(failing(records, nodes, NOW))


def test_a_node_that_fails_while_others_work() -> None:
    records = [failed(n, "bad") for n in (1, 3, 5)] + [good(n, "fine") for n in (2, 4)]
    assert excluded(records) == {"bad"}
    assert excluded(records[1:]) == set()  # two failures prove little
    assert excluded([*records, good(6, "bad")]) == set()


def test_a_node_of_which_there_is_no_other() -> None:
    assert excluded([failed(n, "only", "hang") for n in (1, 2, 3)]) == {"only"}


@pytest.mark.parametrize("outcome", ["node_failure", "nccl_error", "hang"])
def test_several_nodes_that_fail_at_once_are_not_to_blame(outcome: str) -> None:
    records = [failed(n, f"node{n % 3}", outcome) for n in range(1, 10)]
    assert excluded([good(0, "node0"), good(0, "node1"), *records]) == set()


def test_a_bad_node_is_found_although_another_failed_once() -> None:
    records = [failed(n, "bad") for n in (1, 3, 5)] + [failed(2, "unlucky"), good(4, "a"), good(4, "b")]
    assert excluded(records) == {"bad"}


def test_an_old_failure_of_another_node_does_not_count() -> None:
    assert excluded([failed(1, "old"), *[failed(n, "bad") for n in (2, 3, 4)]]) == {"bad"}


@pytest.mark.parametrize(
    "evidence",
    [
        ESTALE,
        "rank 0 in build: OSError: [Errno 5] Input/output error",
        "rank 0 in build: OSError: [Errno 28] No space left on device: '/shared/sweep/x'",
        "rank 1 in step 3 could not write its files: the disk of /shared/sweep is full or gone",
    ],
)
def test_an_ill_file_system_is_no_fault_of_the_node(evidence: str) -> None:
    records = [failed(n, "node1", "crash", evidence) for n in range(1, 6)]
    assert excluded(records) == set()
    assert excluded([good(0, "node2"), *records]) == set()  # that was before


def test_a_stale_mount_of_one_node_is_its_own() -> None:
    records = [failed(n, "bad", "crash", ESTALE) for n in (1, 3, 5)] + [good(4, "fine")]
    assert excluded(records) == {"bad"}
