"""Faults of optimizers: what each rank gives a whole matrix, and the formulas of updates."""

from __future__ import annotations

from tests.planted.faults import ENGINE, OPTIMIZER, faults_of

_MUON, _ADAFACTOR = ENGINE + "training.muon:", ENGINE + "training.adafactor:Adafactor."
_PARTS = "workloads.costs.shape.matrix_parts:"
_SHARDED = {"dp": 2, "zero_stage": 1, "micro_batch_size": 2, "optimizer": "muon"}
_SPLIT = {"tp": 2, "micro_batch_size": 2, "optimizer": "muon"}
_COPIED = {"dp": 2, "zero_stage": 0, "micro_batch_size": 2, "optimizer": "muon"}
_ALONE = {"micro_batch_size": 2, "optimizer": "muon"}
_FACTORED, _FACTORED_SPLIT = ({**layout, "optimizer": "adafactor"} for layout in (_SHARDED, _SPLIT))
UPDATES = [
    *faults_of(
        "optimizer",
        (
            "shard_orthogonalised",
            "Newton-Schulz sees the owner's part of a matrix alone",
            _MUON + "Muon._gathered",
            "_block(whole, part).copy_(values.view(part.rows, part.columns))",
            "_block(whole, part).copy_(values.view(part.rows, part.columns) * (part.member == self._own))",
            _SHARDED,
        ),
        (
            "columns_on_others",
            "the columns of all tensor-parallel ranks are put in one place",
            _PARTS + "_held",
            "column = split * columns if dim == 1 else 0",
            "column = 0",
            _SPLIT,
        ),
        (
            "ends_given_to_muon",
            "Muon takes the embedding, which is AdamW's",
            _PARTS + "is_hidden_matrix",
            'weight.name.startswith("layers.") and is_matrix(weight)',
            "is_matrix(weight)",
            _ALONE,
        ),
        ("update_not_scaled", "updates have another size than AdamW's", _MUON + "RMS_OF_ADAMW", None, 1.0, _ALONE),
        (
            "scale_of_smaller_side",
            "updates are scaled by the smaller side",
            _MUON + "Muon._apply",
            "math.sqrt(max(",
            "math.sqrt(min(",
            _ALONE,
        ),
        (
            "one_iteration_too_few",
            "Newton-Schulz stops after four iterations",
            ENGINE + "update_ops.newton_schulz:NEWTON_SCHULZ_STEPS",
            None,
            4,
            _ALONE,
        ),
        (
            "norm_of_a_batch",
            "matrices of a batch are divided by the norm of all of them",
            ENGINE + "update_ops.newton_schulz:newton_schulz",
            "dim=(-2, -1), keepdim=True",
            "",
            _ALONE,
        ),
        (
            "direction_of_the_first",
            "every matrix of a batch gets the update of the first one",
            _MUON + "_stacked",
            "place.copy_(_of_run(directions[run.parameter], run, batch.rows))",
            "place.copy_(_of_run(directions[batch.runs[0].parameter], batch.runs[0], batch.rows)[:1])",
            _ALONE,
        ),
        (
            "copies_not_told",
            "only one copy of a matrix gets its update",
            _MUON + "Muon._update_round",
            "range(waves(one))",
            "range(1)",
            _COPIED,
        ),
        (
            "columns_of_own_rows",
            "mean squares of columns are those of a rank's rows",
            _ADAFACTOR + "_add_squares",
            "sums.append((one, columns, True, not one.divides_columns))",
            "sums.append((one, columns, False, not one.divides_columns))",
            _FACTORED,
        ),
        (
            "rows_of_own_columns",
            "mean squares of rows are those of a rank's columns",
            _ADAFACTOR + "_add_squares",
            "(one, rows, False, True), ",
            "",
            _FACTORED_SPLIT,
        ),
        (
            "update_of_own_size",
            "an update is scaled by the size of a rank's part",
            _ADAFACTOR + "update",
            "total, True, True)",
            "total, False, True)",
            _FACTORED,
        ),
    ),
    *faults_of(
        "optimizer",
        (
            "momentum_not_nesterov",
            "the direction is the momentum",
            _MUON + "Muon._directions",
            "torch._foreach_lerp_(gradients, momenta, MOMENTUM)",
            "torch._foreach_copy_(gradients, momenta)",
            _ALONE,
        ),
        (
            "sgd_without_momentum",
            "SGD forgets its momentum",
            OPTIMIZER + "SGD_MOMENTUM",
            None,
            0.0,
            {**_ALONE, "optimizer": "sgd"},
        ),
        steps=3,  # a first step has no earlier momentum
    ),
]
