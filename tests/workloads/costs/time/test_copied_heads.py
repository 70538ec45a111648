"""Copies of heads add the sums of their gradients to a step, and no matrix for Muon."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from tests.workloads.costs.shapes import WIDE as MODEL
from tests.workloads.costs.time.test_matrix_updates import CLUSTER, NARROW, SQUARE, WIDE
from workloads.costs.shape.partition import experiment_stages
from workloads.costs.time.matrix_updates import rounds_by_shape
from workloads.costs.time.timeline import estimate_time
from workloads.costs.traffic.collectives import collective_time_s
from workloads.spec.experiment import Experiment


def of(kv_heads: int, **fields: object) -> Experiment:
    model = dataclasses.replace(MODEL, num_kv_heads=kv_heads)
    return Experiment.canonical(model=model, tp=8, seq_len=512, global_batch_size=8, **fields)


@pytest.mark.parametrize(("kv_heads", "copies"), [(4, 2), (1, 8)])
@pytest.mark.parametrize("shards", [1, 2])
def test_gradients_of_copies_are_summed_once_a_step(kv_heads: int, copies: int, shards: int) -> None:
    """Beside a model with a head for every rank: 8 layers of a key and a value head, each 64 x 512, in fp32."""
    layout = {"dp": shards, "zero_stage": int(shards > 1)}
    cluster = dataclasses.replace(CLUSTER, devices_per_node=16)
    copied, whole = (estimate_time(of(heads, **layout), cluster) for heads in (kv_heads, 8))
    message = collective_time_s("all_reduce", 4 * 8 * 2 * 64 * 512 / shards, copies, 1, cluster)
    assert copied.step_time_s - whole.step_time_s == pytest.approx(message, rel=1e-6)


def test_muon_orthogonalises_a_copied_matrix_once() -> None:
    """Of 4 heads on 8 ranks: keys and values stay 256 rows of 512, two of each layer, in two rounds of 8 owners."""
    e = of(4, optimizer="muon")
    found = Counter[tuple[int, int, int]]()
    for one, rounds in rounds_by_shape(e, experiment_stages(e)[0]):
        found[one.whole_rows, one.whole_columns, one.copies] += rounds
    assert WIDE > SQUARE > NARROW  # in this order
    assert found == {(1536, 512, 1): 2, (512, 1536, 1): 1, (512, 512, 1): 2, (256, 512, 2): 2}
