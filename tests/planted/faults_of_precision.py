"""The faults of loss scales (apex and torch issues on scales that are applied twice, or not undone before clipping) and
of products in fp8: scales of a part of a tensor, and an operand with the scale of another."""

from __future__ import annotations

from tests.planted.faults import ENGINE, STEP, faults_of

_SCALE = ENGINE + "training.loss_scale:LossScale."
_GROUPED = ENGINE + "ops.fp8_grouped:"
_PRODUCTS = ENGINE + "ops.fp8_linear:Fp8Products."

_ROUNDING = ENGINE + "update_ops.stochastic_rounding:"

PRECISION = [
    *faults_of(
        "precision",
        ("cut", "weights and moments are cut to bf16", _ROUNDING + "rounded", "(bits & 0xFFFF)", "(bits & 0)", {}),
        ("nearest", "they are rounded to nearest", _ROUNDING + "rounded", "(bits & 0xFFFF)", "(bits * 0 + 0x7FFF)", {}),
        ("few_bits", "a bit of the choice is always 0", _ROUNDING + "rounded", "bits & 0xFFFF", "bits & 0x7FFF", {}),
        (
            "same_every_step",
            "the same elements are rounded up in every step",
            _ROUNDING + "philox",
            "step.to(torch.int64).expand_as(index)",
            "torch.zeros_like(index)",
            {},
        ),
        check="stochastic_rounding",
    ),
    *faults_of(
        "precision",
        ("scale_not_halved", "the scale stays after an overflow", _SCALE + "update", "BACKOFF", "1.0", {}),
        (
            "overflow_updates",
            "a step that overflows updates the weights",
            STEP,
            "self.optimizer.update(factor, overflowed)",
            "self.optimizer.update(factor, None)",
            {},
        ),
        (
            "norm_with_scale",
            "the loss scale is in the norm by which gradients are clipped",
            ENGINE + "training.optimizer:ShardedOptimizer.local_square_norm",
            "norms = norms / self.loss_scale.value",
            "pass",
            {},
        ),
        (
            "scale_not_undone",
            "AdamW gets gradients with the loss scale in them",
            STEP,
            "factor = factor / self.loss_scale.value",
            "pass",
            {},
        ),
        (
            "scale_twice",
            "the loss scale is applied twice",
            ENGINE + "ops.chunked_logits:logits_to_gradient",
            "gradient_scale * scale",
            "gradient_scale * gradient_scale * scale",
            {},
        ),
        check="loss_scaling",
    ),
    *faults_of(
        "precision",
        (
            "balance_without_scale",
            "routers do not know the loss scale, so the balance term counts for nothing",
            ENGINE + "training.build:assemble",
            "router.loss_scale = optimizer.loss_scale.value",
            "pass",
            {},
        ),
        (
            "balance_scale_twice",
            "the loss scale is applied to the balance term twice",
            ENGINE + "layers.routing:Router._with_balance_term",
            "slope * self.loss_scale",
            "slope * self.loss_scale * self.loss_scale",
            {},
        ),
        check="loss_scaling_of_experts",
    ),
    *faults_of(
        "precision",
        (
            "rate_of_skipped_steps",
            "a step that is skipped moves the learning rate on",
            ENGINE + "training.optimizer:ShardedOptimizer._updates",
            "if self.loss_scale is None or self.optimizer is None:",
            "if True:",
            {},
        ),
        (
            "biases_of_skipped_steps",
            "a step that is skipped moves the biases of experts",
            ENGINE + "training.balance:finish_routing",
            "if skipped is not None:",
            "if False:",
            {},
        ),
        check="skipped_steps",
    ),
    *faults_of(
        "precision",
        (
            "turned_weight_scale",
            "the transposed weight has another scale",
            _PRODUCTS + "_transposed_weight",
            "Operand(transposed(weight.detach()), self.weight_factors",
            "Operand(transposed(weight.detach()), 2 * self.weight_factors",
            {},
        ),
        (
            "factors_of_other_rows",
            "the transposed operand has the blockwise factors of other rows",
            ENGINE + "ops.fp8:_cast_blocks",
            "_operand(as_columns, column_factors, scaled)",
            "_operand(as_columns, column_factors if squares else column_factors.flip(1), scaled)",
            {},
        ),
        (
            "inverse_of_other_exponent",
            "a scale and its inverse are off by a power of two",
            ENGINE + "ops.fp8:power_of_two",
            "inverse.masked_fill",
            "(2 * inverse).masked_fill",
            {},
        ),
        (
            "input_scale_for_gradient",
            "the weight's gradient takes the factors of its other operand",
            _PRODUCTS + "weight_gradient",
            "Operand(kept[0], kept[1],",
            "Operand(kept[0], kept[1] * 2,",
            {},
        ),
        check="fp8_products",
    ),
    *faults_of(
        "precision",
        (
            "largest_of_one_shard",
            "the scale of a gathered weight is of this rank's shard alone",
            ENGINE + "training.fp8_gather:Fp8Weights.find_scales",
            "if self._group is not None:",
            "if False:",
            {},
        ),
        check="fp8_gathers",
    ),
    *faults_of(
        "precision",
        (
            "one_expert_for_all",
            "rows of every expert are multiplied by the first one's weights",
            _GROUPED + "rows_by_weights",
            "of_group = Operand(values[group]",
            "of_group = Operand(values[0]",
            {},
        ),
        (
            "rows_with_scales_of_the_first",
            "rows of an expert have the factors of as many rows from the first on",
            _GROUPED + "rows_by_weights",
            "rows.wide(group_rows)",
            "Operand(rows.values[group_rows], rows.factors[:size], 'row').wide()",
            {},
        ),
        check="fp8_experts",
    ),
    *faults_of(
        "precision",
        (
            "largest_of_own_experts_rows",
            "the scale of an expert that ranks share is of this rank's rows alone",
            ENGINE + "training.fp8_gather:Fp8Experts.find_scales",
            "if self._group is not None:",
            "if False:",
            {},
        ),
        (
            "rows_of_the_expert_before",
            "rows of a shard count as those of the experts of the first shard",
            ENGINE + "training.fp8_gather:Fp8Experts._experts_of_rows",
            "parameter.mesh_info.shard_mesh_rank * rows",
            "0",
            {},
        ),
        (
            "scales_of_the_step_before",
            "the largest values of experts are never forgotten",
            ENGINE + "training.fp8_gather:Fp8Experts.find_scales",
            "self._bits.zero_()",
            "pass",
            {},
        ),
        check="fp8_expert_gathers",
    ),
]
