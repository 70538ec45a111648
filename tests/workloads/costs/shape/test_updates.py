"""Matrices by shape, as closed forms count them, are those of the table of weights and of the engine's parameters."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.workloads.costs.shapes import WIDE
from tests.workloads.engine.kind_models import MODELS
from tests.workloads.engine.parity import experiment, experts
from workloads.costs.shape.matrix_parts import batches_of, is_hidden_matrix, matrices_of, rounds_of, waves
from workloads.costs.shape.partition import experiment_stages
from workloads.costs.shape.updates import layer_matrices, rank_matrices, shard_numbers, temporary_bytes
from workloads.costs.time.matrix_updates import copies_of, rounds_by_shape
from workloads.costs.traffic.held_parameters import parameters_of_layer, parameters_of_stage
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import MoESpec

KINDS = {name: {"layers": name} for name in MODELS}
SHAPES = {"dense": {}, "latent": {"latent": 16}, "norms": {"qk_norm": True}, "experts": {"moe": experts()}, **KINDS}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_layers_have_the_matrices_of_the_table(shape: dict[str, object]) -> None:
    e = experiment(optimizer="muon", **shape)
    layers, checked = layers_of(e.model), set()
    for layer, kind in enumerate(layers.order):
        if kind in checked:
            continue
        checked.add(kind)
        counted = Counter[tuple[int, int]]()
        for one in layer_matrices(e.model, layers.kinds[kind]):
            counted[one.rows, one.columns] += one.number
        parameters = [parts for parts in parameters_of_layer(e.model, layer) if is_hidden_matrix(parts[0])]
        assert counted == Counter((one.rows, one.columns) for one in matrices_of(e, parameters))


LAYOUTS = [
    experiment(optimizer="muon", **layout)
    for layout in (
        {},
        {"dp": 2, "zero_stage": 0},
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2, "tp": 2},
        {"dp": 2, "tp": 2, "zero_stage": 3, "latent": 16},
        {"dp": 2, "tp": 4, "zero_stage": 1},
        {"tp": 2, "num_kv_heads": 1},
        {"dp": 4, "ep": 2, "zero_stage": 1, "moe": experts()},
        {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "zero_stage": 2, "moe": experts()},
    )
]


@pytest.mark.parametrize("e", LAYOUTS, ids=lambda e: e.id)
def test_rounds_in_closed_form_are_those_of_the_plan(e: Experiment) -> None:
    (held,) = experiment_stages(e)
    parameters = parameters_of_stage(e.model, range(e.model.num_layers), is_first=True, is_last=True)
    matrices = matrices_of(e, [parts for parts in parameters if is_hidden_matrix(parts[0])])
    planned = Counter((one[0].matrix.flops, one[0].matrix.weight.placement.is_expert) for one in rounds_of(e, matrices))
    closed = Counter[tuple[int, bool]]()
    sent, sent_closed = sum(map(waves, rounds_of(e, matrices))), 0
    for one, rounds in rounds_by_shape(e, held):
        closed[_flops(one.whole_rows, one.whole_columns), one.is_expert] += rounds
        sent_closed += rounds * copies_of(e, one)
    assert +closed == planned
    if not any(one.copies > 1 for one in rank_matrices(e, held)):
        assert sent == sent_closed
    for one in matrices:
        assert sum(part.numel for part in one.parts) == one.numel * one.copies
    assert shard_numbers(e, held).elements <= sum(one.numel for one in matrices)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batches_have_every_matrix_and_need_no_more_memory(shape: dict[str, object]) -> None:
    e = experiment(optimizer="muon", **shape)
    parameters = parameters_of_stage(e.model, range(e.model.num_layers), is_first=True, is_last=True)
    matrices = matrices_of(e, [parts for parts in parameters if is_hidden_matrix(parts[0])])
    places = [
        (run.parameter, run.row + at * batch.rows, batch.rows, batch.columns)
        for batch in batches_of(matrices)
        for run in batch.runs
        for at in range(run.number)
    ]
    wanted = [(one.parameter, one.parts[0].local_row, one.rows, one.columns) for one in matrices]
    assert sorted(places) == sorted(wanted)
    (held,) = experiment_stages(e)
    for batch in batches_of(matrices):
        least = min(batch.rows, batch.columns)
        needed = batch.number * (2 * batch.rows * batch.columns + least * least)
        assert 8 * needed <= temporary_bytes(e, held)


def test_small_experts_share_a_batch_and_one_run() -> None:
    """Dense gates of 512 x 1536 need 1,835,008 numbers, the matrices of experts, of 512 x 64, 69,632: 26 at once. Gates
    and ups are one parameter, whose rows follow one another."""
    moe = MoESpec(num_experts=32, experts_per_token=2, expert_hidden_size=64, num_dense_layers=7)
    e = Experiment.canonical(model=replace(WIDE, moe=moe), seq_len=64, global_batch_size=1, optimizer="muon")
    parameters = parameters_of_stage(e.model, range(e.model.num_layers), is_first=True, is_last=True)
    matrices = matrices_of(e, [parts for parts in parameters if is_hidden_matrix(parts[0])])
    batches: dict[tuple[int, int], list[list[int]]] = {shape: [] for shape in ((64, 512), (512, 64))}
    for batch in batches_of(matrices):
        batches.get((batch.rows, batch.columns), []).append([run.number for run in batch.runs])
    assert batches == {(64, 512): [[26], [26], [12]], (512, 64): [[26], [6]]}


def _flops(rows: int, columns: int) -> int:
    """Five times X X^T, its square and the product with X."""
    n, m = sorted((rows, columns))
    return 5 * (2 * n * n * m + 2 * n * n * n + 2 * n * n * m)
