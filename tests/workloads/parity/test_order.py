"""Whole tensors from the pieces of ranks, and the order in which a step computes them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.workloads.engine.layouts import larger
from tests.workloads.engine.parity import experiment
from workloads.engine.collectives.context_parallel import local_positions
from workloads.engine.collectives.parameters import ParameterSpec
from workloads.parity.activations import Piece, names_in_order, put_activations_together
from workloads.parity.order import Computed, in_order
from workloads.parity.shards import Shard, Whole, put_together, relative_difference
from workloads.parity.training import RankTrace, StepTrace
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import coordinates, data_degrees
from workloads.spec.weights import COLUMNS, ROWS, WHOLE, Placement, Weight

CASES = larger(12, 16, 2, seed=5)


def pieces_of(case: Experiment, whole: Tensor) -> list[list[Piece]]:
    """What each rank has of an activation, written down from the definition of a layout."""
    ranks: list[list[Piece]] = []
    for rank in range(case.world_size):
        at = coordinates(case, rank)
        data_rank = at["dp_replicate"] * case.dp_shard + at["dp_shard"]
        rounds = whole.view(case.num_microbatches, case.dp, case.micro_batch_size, case.seq_len, -1)
        positions = local_positions(case.seq_len, case.cp, at["cp"], case.cp_kind)
        own = []
        for microbatch in range(case.num_microbatches):
            rows = rounds[microbatch, data_rank][:, positions].flatten(0, 1)
            if case.sequence_parallel:
                rows = rows.chunk(case.tp)[at["tp"]]
            own.append(Piece("layers.0", microbatch, at, rows))
        ranks.append(own)
    return ranks


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_activations_are_put_together(case: Experiment) -> None:
    whole = torch.randn(case.global_batch_size, case.seq_len, case.model.hidden_size, dtype=torch.float64)
    ranks = pieces_of(case, whole)
    found = put_activations_together(case, ranks)["layers.0"]
    assert torch.equal(found.value, whole) and found.spread == 0.0
    del ranks[0][0]
    missing = put_activations_together(case, ranks)["layers.0"].value
    copies = case.pp * (1 if case.sequence_parallel else case.tp)
    assert missing.isnan().any() == (copies == 1)


def test_copies_of_activations_that_differ_are_seen() -> None:
    case = experiment(tp=2, sequence_parallel=False)
    whole = torch.randn(8, 16, 32, dtype=torch.float64)
    ranks = pieces_of(case, whole)
    ranks[1][3].values.mul_(2)
    assert put_activations_together(case, ranks)["layers.0"].spread == pytest.approx(1.0)


def shards_of(case: Experiment, name: str, whole: Tensor, placement: Placement) -> list[list[Shard]]:
    shards = data_degrees(case)[1]
    found = []
    for rank in range(case.world_size):
        at = coordinates(case, rank)
        dim = placement.dim("tp")
        part = whole if dim is None else whole.chunk(case.tp, dim)[at["tp"]]
        inside = rank // case.tp % (case.dp * case.cp)
        position = {**at, "replicate": inside // shards, "shard": inside % shards, "copy": 0}
        rows = -(-part.shape[0] // shards)
        own = part[position["shard"] * rows : (position["shard"] + 1) * rows]
        found.append([Shard(ParameterSpec((Weight(name, tuple(whole.shape), 1.0, placement),)), position, own.clone())])
    return found


@pytest.mark.parametrize("placement", [ROWS, COLUMNS, WHOLE], ids=["rows", "columns", "whole"])
@pytest.mark.parametrize("case", [case for case in CASES if case.pp == 1] or CASES[:1], ids=lambda c: c.id)
def test_shards_are_put_together(case: Experiment, placement: Placement) -> None:
    whole = torch.randn(48, 24)
    ranks = shards_of(case, "w", whole, placement)
    found = put_together(case, ranks)["w"]
    assert torch.equal(found.value, whole) and found.spread == 0.0


def test_copies_of_weights_that_differ_are_seen() -> None:
    case = experiment(dp=2)
    ranks = shards_of(case, "w", torch.ones(8, 4), ROWS)
    ranks[1][0].values[3, 2] += 0.5
    assert put_together(case, ranks)["w"].spread == 0.5


def test_relative_difference() -> None:
    a = torch.tensor([1.0, -4.0])
    assert relative_difference(a, a) == 0.0
    assert relative_difference(torch.tensor([1.0, -3.0]), a) == 0.25
    assert relative_difference(torch.tensor([1.0, torch.nan]), a) == float("inf")
    assert relative_difference(torch.zeros(3), a) == float("inf")
    assert relative_difference(a, torch.zeros(2)) == float("inf")
    assert relative_difference(torch.zeros(2), torch.zeros(2)) == 0.0
    assert Whole(a).joined_by(torch.tensor([1.0, -3.0])).spread == 0.25


def test_the_order_is_that_of_a_step() -> None:
    case = experiment().replace(model=experiment().model)
    names = ["embedding", "layers.0.attention.q", "layers.0.attention_norm", "layers.2.ffn.down", "norm", "head"]
    random.Random(0).shuffle(names)
    shards = [shards_of(case, name, torch.randn(8, 4), ROWS)[0][0] for name in names]
    streams = [Piece(name, 0, coordinates(case, 0), torch.randn(16, 32)) for name in ("embedding", "layers.2")]
    step = StepTrace(1.0, 2.0, shards, shards, streams, streams)
    order = [of.what for of in in_order(case, [RankTrace(shards, [step])])]
    assert order[6:] == [
        "output of embedding",
        "output of layers.2",
        "loss",
        "gradient of head",
        "gradient of norm",
        "gradient of the output of layers.2",
        "gradient of layers.2.ffn.down",
        "gradient of layers.0.attention.q",
        "gradient of layers.0.attention_norm",
        "gradient of the output of embedding",
        "gradient of embedding",
        "gradient norm",
        *(f"update of {name}" for name in [what.removeprefix("initial ") for what in order[:6]]),
    ]
    assert order[0] == "initial embedding" and order[5] == "initial head"


def test_names_in_order() -> None:
    names = list(names_in_order(2))
    assert names[0] == "embedding" and names[-1] == "norm" and len(names) == 12
    assert names.index("layers.0.ffn") < names.index("layers.0") < names.index("layers.1.attention_norm")


def test_a_computed_tensor_has_a_key() -> None:
    computed = Computed(0, "forward", "layers.0", Whole(torch.ones(1)))
    assert computed.key == (0, "forward", "layers.0") and computed.what == "output of layers.0"
