"""The rules that a layout of an 8B model breaks, with their messages."""

from __future__ import annotations

from typing import Any

from tests.workloads.costs.shapes import H200, LLAMA_8B
from workloads.rules.layout_rules import violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment


def broken(cluster: ClusterSpec = H200, **fields: Any) -> dict[str, str]:
    """Message of every rule that an 8B experiment with these fields breaks."""
    experiment = Experiment(**{"model": LLAMA_8B, "global_batch_size": 256, **fields})
    found = violations(experiment, cluster)
    assert len(found) == len({v.rule for v in found}), "a rule reports once"
    return {v.rule: v.message for v in found}
