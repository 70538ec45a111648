"""Faults of copied key and value heads: which head a rank has, sums of gradients, the norm, and updates of copies."""

from __future__ import annotations

from typing import Any

from tests.planted.faults import ENGINE, OPTIMIZER, faults_of
from tests.planted.plant import Fault

_COPIES: dict[str, Any] = {"tp": 4, "micro_batch_size": 2}
"""Two heads on four ranks."""
_SHARDED: dict[str, Any] = {**_COPIES, "dp": 2, "zero_stage": 3}
_BIASES: dict[str, Any] = {**_COPIES, "layers": "biases"}
_FINISH = OPTIMIZER + "ShardedOptimizer.finish_gradients"
_PARTS = "workloads.costs.shape.matrix_parts:"

HEADS: list[Fault] = faults_of(
    "tp",
    (
        "copies_not_summed",
        "gradients of copied heads are those of a rank's queries",
        _FINISH,
        "_sum_in_one_message(mine, group)",
        "pass",
        _COPIES,
    ),
    (
        "copied_biases_not_summed",
        "only matrices of copied heads are summed",
        _FINISH,
        "if rows.copies == copies",
        "if rows.copies == copies and p.gradient.dim() > 1",
        _BIASES,
    ),
    (
        "heads_of_all_ranks_summed",
        "gradients of all heads are summed, not those of copies alone",
        _FINISH,
        "_sum_in_one_message(mine, group)",
        '_sum_in_one_message(mine, self.groups.axes["tp"].group)',
        _COPIES,
    ),
    (
        "norm_counts_copied_heads",
        "the norm counts every copy of a head",
        OPTIMIZER + "ShardedOptimizer.local_square_norm",
        "self._share(p) / n for n",
        "self._share(p) for n",
        _COPIES,
    ),
    (
        "heads_in_turn",
        "ranks have heads in turn, not those of their queries",
        ENGINE + "collectives.parameters:initial_part",
        "[axes[axis].rank // copies]",
        "[axes[axis].rank % (axes[axis].size // copies)]",
        _COPIES,
    ),
    (
        "rows_of_the_first_shard",
        "every shard sums the rows that the first one has of heads",
        OPTIMIZER + "ShardedOptimizer._by_copies",
        "shard.size(), shard.rank())",
        "shard.size(), 0)",
        _SHARDED,
    ),
    (
        "copies_put_in_a_row",
        "copies of a head are taken for rows of the matrix",
        _PARTS + "_held",
        "place.split // copies",
        "place.split % 2",
        {**_COPIES, "optimizer": "muon"},
    ),
) + faults_of(
    "tp",
    (
        "squares_of_copies_counted",
        "the size of a matrix counts every copy of a head",
        ENGINE + "training.adafactor:_by_matrix",
        "sums if one.shares is None else sums * one.shares",
        "sums",
        {**_COPIES, "optimizer": "adafactor"},
    ),
    steps=3,  # where an update is larger than its scale allows, it does not matter
)
