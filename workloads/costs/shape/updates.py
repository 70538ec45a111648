"""What an update needs beyond numbers of parameters: matrices by shape, for optimizers that treat them apart.

Muon keeps one moment of the layers' matrices and two of all else, and needs each matrix whole. Adafactor keeps rows and
columns of every matrix (`workloads.spec.updates.optimizer`). Both count weights one by one: gate and up are two
matrices, each expert has its own. Shards are taken as equal parts.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from workloads.costs.shape.held_model import grouped_attention
from workloads.costs.shape.matrix_parts import newton_schulz_numbers
from workloads.costs.shape.partition import StageParams
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.layer_kinds.model import Layer
from workloads.spec.layer_kinds.weight import ROW_PARALLEL, Held
from workloads.spec.mesh import data_degrees, expert_degrees
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec
from workloads.spec.updates.optimizer import optimizer_of


class LayerMatrix(NamedTuple):
    """Equal matrices of one layer, whole."""

    rows: int
    columns: int
    number: int
    held: Held
    divides_columns: bool
    """Whether tensor parallelism divides the columns; else the rows, if the ranks do not hold it whole."""
    kv_heads: int
    """Key and value heads that its rows belong to; 0 for other matrices."""


class RankMatrix(NamedTuple):
    """Equal matrices of one rank of a stage, before data parallelism shards their rows."""

    rows: int
    columns: int
    """Those that tensor parallelism leaves to a rank."""
    whole_rows: int
    whole_columns: int
    number: int
    """Of this rank; experts are those of one expert-parallel rank."""
    together: int
    """Number of them in one parameter, one after another."""
    is_expert: bool
    copies: int
    """Tensor-parallel ranks that hold the same: all of a whole matrix, several of copied key and value heads."""
    is_hidden: bool
    """Whether it is a layer's; embedding and output projection are not."""

    @property
    def numel(self) -> int:
        return self.whole_rows * self.whole_columns


@lru_cache(maxsize=1024)
def layer_matrices(model: ModelSpec, kind: Layer) -> tuple[LayerMatrix, ...]:
    """The matrices of one layer of a kind of the model's; one row or column is a vector."""
    found: list[LayerMatrix] = []
    attention = grouped_attention(kind)
    for weight in kind.weights(model.hidden_size):
        if weight.use != "matrix" or min(weight.outputs, weight.inputs) < 2:
            continue
        fused = 2 if weight.name in _gated(kind) else 1
        found.append(
            LayerMatrix(
                weight.outputs // fused,
                weight.inputs,
                weight.copies * fused,
                weight.held,
                weight.name in ROW_PARALLEL or weight.name == "expert down",
                attention.kv_heads if attention is not None and weight.name in ("k", "v") else 0,
            )
        )
    return tuple(found)


def _gated(kind: Layer) -> list[str]:
    """Weights that are a gate and an up projection together."""
    mlp = kind.mlp
    if mlp is None:
        return []
    if isinstance(mlp, DenseMLP):
        return ["up"] if mlp.gated else []
    shared = mlp.shared is not None and mlp.shared.gated
    return (["expert up"] if mlp.expert.gated else []) + (["shared up"] if shared else [])


def rank_matrices(e: Experiment, held: StageParams) -> list[RankMatrix]:
    """The matrices of one rank that holds ``held``."""
    found: list[RankMatrix] = []
    for kind, layers in zip(layers_of(e.model).kinds, held.of_kind, strict=True):
        if layers == 0:
            continue
        for one in layer_matrices(e.model, kind):
            is_expert, copies = one.held == "experts", e.tp if one.held == "whole" else 1
            if 0 < one.kv_heads < e.tp:
                copies = e.tp // one.kv_heads
            split = e.etp if is_expert else e.tp // copies
            rows, columns = (1, split) if one.divides_columns else (split, 1)
            together = one.number // (e.ep if is_expert else 1)
            shape = one.rows // rows, one.columns // columns
            found.append(
                RankMatrix(*shape, one.rows, one.columns, layers * together, together, is_expert, copies, True)
            )
    hidden = e.model.hidden_size
    for numbers in (held.embedding, held.head):
        if numbers:
            rows = numbers // hidden
            found.append(RankMatrix(rows // e.tp, hidden, rows, hidden, 1, 1, False, 1, False))
    return found


class MatrixNumbers(NamedTuple):
    """Numbers of one rank's shard."""

    elements: int
    """In matrices that the optimizer treats apart from other parameters."""
    lines: int
    """Rows and columns of these, and one number a matrix."""


def shard_numbers(e: Experiment, held: StageParams) -> MatrixNumbers:
    """Numbers in the shard of a rank that holds ``held``; zeros for an optimizer that treats all parameters alike."""
    kind = optimizer_of(e)
    elements, lines = 0, 0
    if kind.apart == "none":
        return MatrixNumbers(0, 0)
    for one in rank_matrices(e, held):
        if one.is_hidden or kind.apart == "matrices":
            shards = shards_of(e, one)
            elements += one.number * one.rows * one.columns // shards
            lines += one.number * (one.rows // shards + one.columns + 1)
    return MatrixNumbers(elements, lines)


def temporary_bytes(e: Experiment, held: StageParams) -> int:
    """Most memory of an update beside weights, gradients and states: of Muon in its largest round, of Adafactor for the
    mean squares of the largest matrix."""
    kind = optimizer_of(e)
    most = 0
    if kind.apart == "none":
        return 0
    for one in rank_matrices(e, held):
        if kind.apart == "matrices":
            rows = min(one.rows, -(-one.rows * one.together // shards_of(e, one)))
            most = max(most, kind.master_bytes * rows * one.columns)
        elif one.is_hidden:
            # Alone: the largest matrix; smaller ones together need no more (`batches_of`). Else result, message out and
            # message in; the last is up to half as large again where two ranks share a gate and an up projection as one
            # parameter.
            alone = newton_schulz_numbers(one.whole_rows, one.whole_columns)
            most = max(most, kind.product_bytes * (alone if stage_ranks(e) == 1 else 3 * one.numel))
    return most


def shards_of(e: Experiment, one: RankMatrix) -> int:
    """Number of ranks that share the rows of a matrix's parameter."""
    return expert_degrees(e)[1] if one.is_expert else data_degrees(e)[1]


def stage_ranks(e: Experiment) -> int:
    """Number of ranks that hold the same pipeline stages."""
    return e.world_size // e.pp
