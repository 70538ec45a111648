"""Faults of weight gradients that products add to sums over micro-batches."""

from __future__ import annotations

from tests.planted.faults import CROSS_ENTROPY, DP, ENGINE, faults_of
from tests.workloads.engine.parity import experts

_FUSED = {**DP, "zero_stage": 1, "gradient_accumulation_fusion": True}
_EXPERTS = {**_FUSED, "moe": experts(), "ep": 2}
_NO_ROWS = {**_EXPERTS, "micro_batch_size": 1, "routing": "skewed", "routing_imbalance": 4.0}
_GROUPED = ENGINE + "ops.grouped_linear:"
_SUM_OF = ENGINE + "training.gradient_sums:GradientSums.__call__"
SUMS = [
    *faults_of(
        "dp",
        (
            "sum_not_zeroed",
            "a sum begins with what was in its memory",
            _SUM_OF,
            "GradientSum(total, is_empty=True)",
            "GradientSum(total.fill_(1.0), is_empty=False)",
            _FUSED,
        ),
        (
            "product_overwrites_sum",
            "a product replaces the sum of earlier micro-batches",
            ENGINE + "ops.linear:DeferredGradients.product",
            "first=so_far.is_empty",
            "first=True",
            _FUSED,
        ),
        (
            "head_overwrites_sum",
            "the head's product replaces the sum of earlier micro-batches",
            CROSS_ENTROPY + "_Gradients.add",
            "chunk.start == 0 and (self.total is None or self.total.is_empty)",
            "chunk.start == 0",
            _FUSED,
        ),
        (
            "sum_of_last_micro_batch",
            "sums are dropped after every micro-batch but the last",
            ENGINE + "training.gradient_sums:GradientSums._post_backward",
            "of_fsdp(*args)",
            'of_fsdp(*args) or [setattr(p, "unsharded_accumulated_grad", None) for p in group.fsdp_params]',
            _FUSED,
        ),
        (
            "shard_not_added",
            "the shard of a micro-batch replaces that of earlier ones",
            ENGINE + "training.gradient_sums:_give",
            "_foreach_add_(",
            "_foreach_copy_(",
            {**_FUSED, "zero_stage": 2},
        ),
    ),
    *faults_of(
        "ep",
        (
            "experts_overwrite_sums",
            "a grouped product replaces the sum of earlier micro-batches",
            _GROUPED + "_GroupedLinear.backward",
            "first=so_far.is_empty",
            "first=True",
            _EXPERTS,
        ),
        (
            "sums_of_experts_not_zeroed",
            "a grouped product adds to what was in the memory of its sum",
            _GROUPED + "_GroupedLinear.backward",
            "first=so_far.is_empty",
            "first=so_far.is_empty and so_far.total_OI.fill_(1.0) is None",
            _EXPERTS,
        ),
        (
            "gradient_without_rows",
            "the gradient of an expert without rows is what was in its memory",
            _GROUPED + "add_weight_gradients",
            "of_group.zero_()",
            "of_group.fill_(1.0)",
            _NO_ROWS,
        ),
    ),
]
