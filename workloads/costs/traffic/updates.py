"""What an update sends: parts of matrices to their owners and back (Muon), sums of squares (Adafactor). No torch here.

Muon    in every round (`workloads.costs.shape.matrix_parts.rounds_of`) an all-to-all among the ranks of the stage: S,
        what this rank sends, is its part of every matrix whose owner is in its copy; then one for each copy of the
        matrices: S is this rank's own matrix, if it has one. Both in the dtype of the products
Adafactor  all-reduces of master values. Over the ranks that share rows: of each matrix its columns on this rank, its
        size and, where tensor parallelism divides the columns, the sum of all, and of each vector its size; then one
        number of each. Over the ranks that tensor parallelism divides a matrix among: its columns, or its rows on this
        rank and the sum of all, and its size; then one number of each. Experts are sent separately
"""

from __future__ import annotations

from workloads.costs.shape.held_model import padded_rows
from workloads.costs.shape.matrix_parts import Matrix, degrees_of, is_hidden_matrix, matrices_of, rounds_of, waves
from workloads.costs.shape.partition import experiment_layers
from workloads.costs.traffic.held_parameters import parameters_of_stage
from workloads.costs.traffic.sender import Sender
from workloads.spec.updates.optimizer import optimizer_of
from workloads.spec.weights import Weight

Parameters = list[tuple[Weight, ...]]
"""Weights that are one parameter each."""


def updates(s: Sender) -> None:
    """Count what the optimizer sends, for the model without copies of heads."""
    kind = optimizer_of(s.experiment)
    if kind.whole_matrices:
        _whole_matrices(s, held_parameters(s))
    elif kind.apart != "none":
        _squares(s, held_parameters(s))


def held_parameters(s: Sender) -> Parameters:
    """The parameters of this rank's stages, of the model without copies of heads."""
    e, parameters, padding = s.experiment, Parameters(), padded_rows(s.experiment)
    for stage in s.stages:
        layers = experiment_layers(e)[stage.index]
        ends = {"is_first": stage.is_first, "is_last": stage.is_last}
        parameters += parameters_of_stage(e.model, layers, **ends, padding=padding)
    return parameters


def _whole_matrices(s: Sender, parameters: Parameters) -> None:
    e, each = s.experiment, optimizer_of(s.experiment).product_bytes
    own = s.rank_in_stage
    for one in rounds_of(e, matrices_of(e, [parts for parts in parameters if is_hidden_matrix(parts[0])])):
        sent, results = 0, 0
        for owned in one:
            mine = next((part for part in owned.matrix.parts if part.member == own), None)
            sent += mine.numel if mine is not None and mine.copy == owned.copy else 0
        s.along_stage("all_to_all", each * sent)
        for wave in range(waves(one)):
            results = sum(owned.matrix.numel for owned in one if owned.owner == own and wave < owned.matrix.copies)
            s.along_stage("all_to_all", each * results)


def _squares(s: Sender, parameters: Parameters) -> None:
    e = s.experiment
    for of_experts in (False, True):
        mine = [parts for parts in parameters if parts[0].placement.is_expert == of_experts]
        over_shards, over_parts, matrices, divided = 0, 0, 0, 0
        for parts in mine:
            here = _on_rank(s, matrices_of(e, [parts]), of_experts)
            split = degrees_of(e, of_experts=of_experts).split
            dim = parts[0].placement.dim("etp" if of_experts else "tp")
            across = dim == (2 if of_experts else 1)
            columns = 0 if len(parts[0].shape) == 1 else here[0].columns // (split if across else 1)
            rows = sum(part.rows for one in here for part in one.parts if part.member == s.rank_in_stage)
            matrices += len(here)
            over_shards += len(here) * (columns + 1 + across)
            if dim is not None:
                divided += len(here)
                over_parts += len(here) * (1 + across) + (rows if across else len(here) * columns)
        if not mine:
            continue
        for numbers in (over_shards, matrices):
            s.along_shards("all_reduce", s.master * numbers, 1, of_experts=of_experts)
        for numbers in (over_parts, divided):
            if numbers and (not of_experts or e.etp > 1):
                s.along("tp", "all_reduce", s.master * numbers)


def _on_rank(s: Sender, matrices: list[Matrix], of_experts: bool) -> list[Matrix]:
    """Those of the experts that this rank holds, or all others."""
    if not of_experts:
        return matrices
    moe = s.experiment.model.moe
    assert moe is not None
    each = moe.num_experts // s.experiment.ep
    return [one for one in matrices if one.expert // each == s.expert_rank]
