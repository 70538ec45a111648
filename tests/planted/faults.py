"""The faults, by the axis of the layout that they are in.

They are the classes that users of training engines have met: wrong scales and doubled or lost sums (torchtitan issues
2318 and 2972, Megatron-LM issues 673, 906 and 5916), compositions of two axes (Megatron-LM issue 7452), wrong masks,
recomputation and stale weights (TTrace, arXiv:2506.09280), updates that reach no weight, clipping and copies that drift
(TrainCheck, arXiv:2506.14813), gradients of ring attention (TransformerEngine issue 1557).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.planted.plant import Fault
from tests.workloads.engine.parity import experts

ENGINE = "workloads.engine."
STEP = ENGINE + "training.optimizer:ShardedOptimizer.step"
OPTIMIZER = ENGINE + "training.optimizer:"
DATA_PARALLEL = ENGINE + "training.data_parallel:apply_data_parallel"
SYNC = ENGINE + "training.data_parallel:GradientSync.__init__"
BATCHES = ENGINE + "training.data:step_batches"
SEQUENCES = ENGINE + "training.data:sequences_of"
RUN_STEP = "workloads.measuring.step:run_step"
LAUNCH = "workloads.measuring.step:_launch"
HEAD = ENGINE + "layers.transformer:Head.__init__"
TENSOR = ENGINE + "collectives.tensor_parallel:"
EXCHANGE = ENGINE + "collectives.tensor_products:Exchange."
CROSS_ENTROPY = ENGINE + "ops.linear_cross_entropy:"
LOGITS = ENGINE + "ops.chunked_logits:"
CONTEXT = ENGINE + "collectives.context_parallel:"
PIPELINE = ENGINE + "training.pipeline:_Step."
SCALE = "1.0 / experiment.tokens_per_step"

TWO = {"micro_batch_size": 2}
DP = {"dp": 2, **TWO}
HSDP = {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2, "micro_batch_size": 1}
TP = {"tp": 2, "micro_batch_size": 4}
TP_ONLY = {**TP, "sequence_parallel": False}
CP3 = {"cp": 3, "micro_batch_size": 4, "seq_len": 18}
RING, GATHER = {**CP3, "cp_kind": "ring"}, {**CP3, "cp_kind": "allgather"}
ULYSSES = {"cp": 2, "cp_kind": "ulysses", "micro_batch_size": 4}
PP = {"pp": 2, "pp_schedule": "1f1b", **TWO}
TIED = {**PP, "tie": True}
INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, **TWO}
ZERO_BUBBLE = {"pp": 2, "pp_schedule": "interleaved_zero_bubble", "virtual_stages": 2, **TWO}
VEE = {"pp": 2, "pp_schedule": "zero_bubble_v", "virtual_stages": 2, **TWO}
CLIPPED = {"dp": 2, "zero_stage": 1, "micro_batch_size": 4}


def faults_of(axis: str, *rows: tuple[str, str, str, str | None, Any, Mapping[str, Any]], **common: Any) -> list[Fault]:
    """Rows of (name, what, place, old, new, layout)."""
    return [
        Fault(name=name, what=what, axis=axis, place=place, old=old, new=new, layout=layout, **common)
        for name, what, place, old, new, layout in rows
    ]


SCALES = faults_of(
    "scale",
    ("loss_by_own_tokens", "the loss is a mean over a rank's own tokens", HEAD, SCALE, f"experiment.dp * {SCALE}", DP),
    (
        "loss_not_accumulated",
        "the loss is not divided by the micro-batches",
        HEAD,
        SCALE,
        f"experiment.num_microbatches * {SCALE}",
        PP,
    ),
    (
        "loss_divided_twice",
        "micro-batches are counted twice",
        HEAD,
        SCALE,
        f"{SCALE} / experiment.num_microbatches",
        TWO,
    ),
    ("loss_times_cp", "the loss is a mean over a rank's positions", HEAD, SCALE, f"experiment.cp * {SCALE}", ULYSSES),
    ("loss_over_stages", "stages share the loss", HEAD, SCALE, f"{SCALE} / experiment.pp", PP),
    (
        "gradient_mean_over_dp",
        "gradients are averaged where the loss already is",
        DATA_PARALLEL,
        "set_gradient_divide_factor(1.0)",
        "set_gradient_divide_factor(2.0)",
        {**DP, "zero_stage": 2},
    ),
    (
        "gradient_over_stages",
        "a gradient is scaled on its way to the stage before",
        PIPELINE + "_backward",
        "self.messages.give(action, x.grad)",
        "self.messages.give(action, x.grad / 2)",
        PP,
    ),
    ("loss_of_every_tp_rank", "each tp rank adds its loss", LAUNCH, 'groups.axes["tp"].rank == 0', "True", TP),
    ("loss_not_summed", "loss and norm are each rank's own", LAUNCH, "dist.all_reduce(totals)", "pass", DP),
)

DATA = (
    faults_of(
        "data",
        (
            "same_batch",
            "every step has the batch of the first",
            ENGINE + "training.data:generator_of",
            "+ step)",
            "+ 0)",
            DP,
        ),
        steps=2,
    )
    + faults_of(
        "data",
        (
            "own_target",
            "a token is its own target",
            BATCHES,
            "[rows[:, :-1], rows[:, 1:]]",
            "[rows[:, :-1], rows[:, :-1]]",
            DP,
        ),
        ("two_tokens_ahead", "targets are two tokens ahead", BATCHES, "rows[:, 1:]", "rows[:, 1:].roll(-1, 1)", DP),
        (
            "one_batch",
            "all ranks have one batch",
            SEQUENCES,
            "microbatch * experiment.dp + data_rank",
            "microbatch * experiment.dp",
            DP,
        ),
        check="targets",
    )
    + faults_of(
        "data",
        (
            "stale_targets",
            "targets are those of the first micro-batch",
            PIPELINE + "_forward",
            "tokens, targets, *others = self.batches[action.microbatch]",
            "(tokens, _, *others), targets = self.batches[action.microbatch], self.batches[0][1]",
            PP,
        ),
        (
            "last_microbatch_dropped",
            "the last micro-batch is dropped",
            "workloads.costs.shape.schedule:schedule_actions",
            "< num_microbatches]",
            "< max(1, num_microbatches - 1)]",
            PP,
        ),
    )
)

_INITIAL = ENGINE + "collectives.parameters:initial_part"
SEEDS = faults_of(
    "weights",
    (
        "weights_without_seed",
        "weights are the same with every seed",
        ENGINE + "collectives.parameters:_stream",
        "{seed}/{name}",
        "{name}",
        {},
    ),
    (
        "experts_alike",
        "all experts of a layer have the same weights",
        ENGINE + "collectives.parameters:initial_part",
        'f"{part.name}.{i}"',
        "part.name",
        {"moe": experts()},
    ),
    (
        "tokens_without_seed",
        "tokens are the same with every seed",
        ENGINE + "training.data:generator_of",
        "experiment.seed * 1_000_003 + step",
        "step",
        {},
    ),
    check="seeds",
)

WEIGHTS = faults_of(
    "weights",
    ("larger_start", "weights start larger", "workloads.spec.weights:INIT_STD", None, 0.025, {}),
    (
        "depth_forgotten",
        "the residual stream's weights ignore the depth",
        "workloads.spec.weights:residual_std",
        "INIT_STD / math.sqrt(2 * (model.num_layers - model.mtp_modules))",
        "INIT_STD",
        {},
    ),
    check="initial_weights",
) + faults_of(
    "weights",
    (
        "seed_of_rank",
        "tensor-parallel ranks draw from streams of their own",
        _INITIAL,
        "part.std, seed, part.name, device)",
        "part.std, seed + sum(axis.rank for axis in axes.values()), part.name, device)",
        TP,
    ),
    (
        "keys_of_other_heads",
        "a rank has the keys of another rank's heads",
        _INITIAL,
        "[axes[axis].rank // copies]",
        "[(axes[axis].rank + part.name.endswith('.k')) % axes[axis].size]",
        TP,
    ),
    (
        "first_shard_everywhere",
        "every ZeRO shard has the first rows",
        ENGINE + "collectives.parameters:initialise",
        "whole[shard_rank * rows : (shard_rank + 1) * rows]",
        "whole[:rows]",
        {**DP, "zero_stage": 2},
    ),
    (
        "contiguous_chunks",
        "interleaved chunks hold the layers that follow each other",
        ENGINE + "layers.transformer:Chunk.__init__",
        "experiment_layers(experiment)[stage]",
        "experiment_layers(experiment)[groups.position['pp'] * experiment.virtual_stages + stage // experiment.pp]",
        INTERLEAVED,
    ),
    (
        "chunks_of_no_vee",
        "a V's second leg has the layers of an interleaved schedule",
        ENGINE + "layers.transformer:Chunk.__init__",
        "experiment_layers(experiment)[stage]",
        "experiment_layers(experiment)[(stage if stage < experiment.pp else 5 - stage)]",
        VEE,
    ),
)

TENSORS = faults_of(
    "tp",
    (
        "column_input_gradient",
        "input gradients of column-parallel layers are not summed",
        EXCHANGE + "summed_product",
        "sum_async(x @ matrix, self.tp)",
        "(x @ matrix)",
        TP_ONLY,
    ),
    (
        "row_gradient_summed",
        "the gradient behind a row-parallel layer is summed as its output was",
        TENSOR + "_SumPartials.backward",
        "else grad)",
        "else grad * ctx.tp.size)",
        TP_ONLY,
    ),
    (
        "vocabulary_input_gradient",
        "the input gradient of the vocabulary-parallel head is not summed",
        TENSOR + "_GatherTokens.backward",
        "wait(sum_async(grad, tp))",
        "grad",
        TP_ONLY,
    ),
    (
        "embedding_mask",
        "a token of another rank's rows is looked up",
        TENSOR + "VocabularyParallelEmbedding.forward",
        " * mine.unsqueeze(-1)",
        "",
        TP,
    ),
    (
        "embedding_offset",
        "every rank looks up the first rows",
        TENSOR + "VocabularyParallelEmbedding.forward",
        "self.tp.rank * self.rows",
        "0 * self.rows",
        TP,
    ),
    (
        "embedding_not_summed",
        "the parts of the embedding are not summed",
        TENSOR + "VocabularyParallelEmbedding.forward",
        "_SumPartials.apply(x_TD, self.tp)",
        "x_TD",
        TP_ONLY,
    ),
    (
        "norms_not_summed",
        "with sequence parallelism gradients of norms are not summed",
        OPTIMIZER + "ShardedOptimizer.finish_gradients",
        '_sum_in_one_message(partial, self.groups.axes["tp"].group)',
        "pass",
        TP,
    ),
    (
        "norms_summed_without_sp",
        "without sequence parallelism gradients of norms are summed",
        "workloads.spec.weights:Placement.summed_over",
        'self.divided_use == "heads" or sequence_parallel',
        "True",
        TP_ONLY,
    ),
    (
        "head_norms_not_summed",
        "without sequence parallelism norms of heads are taken for whole",
        "workloads.spec.weights:Placement.summed_over",
        'self.divided_use == "heads" or sequence_parallel',
        "sequence_parallel",
        {**TP_ONLY, "qk_norm": True},
    ),
)

LOSS = faults_of(
    "vocabulary",
    (
        "target_offset",
        "targets are looked for in the first rows on every rank",
        CROSS_ENTROPY + "_LinearCrossEntropy.forward",
        "dist.get_rank(how.group) * weight.shape[0]",
        "0",
        TP,
    ),
    (
        "own_maximum",
        "each rank subtracts its own largest logit",
        LOGITS + "log_sum_exp",
        "dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)",
        "pass",
        TP,
    ),
    (
        "maximum_not_applied",
        "sums of exponentials keep their own largest logits",
        LOGITS + "log_sum_exp",
        "total.mul_(local.sub_(largest).exp_())",
        "pass",
        TP,
    ),
    (
        "exponentials_not_summed",
        "sums of exponentials are each rank's own",
        LOGITS + "log_sum_exp",
        "dist.all_reduce(statistics[1:], group=group)",
        "dist.all_reduce(statistics[2:], group=group)",
        TP,
    ),
    (
        "target_logit_not_summed",
        "the target's logit is known on one rank",
        LOGITS + "log_sum_exp",
        "dist.all_reduce(statistics[1:], group=group)",
        "dist.all_reduce(statistics[1:2], group=group)",
        TP,
    ),
    (
        "log_tp",
        "the vocabulary counts once for each rank: the loss is too large by log(tp)",
        LOGITS + "log_sum_exp",
        "largest + total.log()",
        "largest + (total * (1 if group is None else dist.get_world_size(group))).log()",
        TP,
    ),
)
