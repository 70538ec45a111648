"""More faults: of data and pipeline parallelism, recomputation, gradient norm, optimizer and measurement; and all."""

from __future__ import annotations

from tests.planted.faults import (
    CLIPPED,
    DATA,
    DATA_PARALLEL,
    DP,
    ENGINE,
    HSDP,
    LAUNCH,
    LOSS,
    OPTIMIZER,
    PIPELINE,
    RUN_STEP,
    SCALES,
    SEEDS,
    STEP,
    SYNC,
    TENSORS,
    TIED,
    TP,
    TWO,
    VEE,
    WEIGHTS,
    ZERO_BUBBLE,
    faults_of,
)
from tests.planted.faults_of_adapters import ADAPTERS
from tests.planted.faults_of_attention import ATTENTION, POSITIONS
from tests.planted.faults_of_choices import CHOICES
from tests.planted.faults_of_documents import DOCUMENTS
from tests.planted.faults_of_experts import EXPERTS
from tests.planted.faults_of_gemma import GEMMA
from tests.planted.faults_of_heads import HEADS
from tests.planted.faults_of_hosts import HOSTS
from tests.planted.faults_of_kinds import KINDS
from tests.planted.faults_of_latents import LATENTS
from tests.planted.faults_of_modules import MODULES
from tests.planted.faults_of_precision import PRECISION
from tests.planted.faults_of_recurrences import RECURRENCES
from tests.planted.faults_of_sums import SUMS
from tests.planted.faults_of_times import TIMES
from tests.planted.faults_of_updates import UPDATES
from tests.planted.plant import Fault

_MESH = "_without_single_replica(groups.data_mesh)"
_SHARD = 'groups.data_mesh["shard"]'
_FIRST = 'self.__dict__.setdefault("first", self.weight.detach().clone()) + self.weight - self.weight.detach()'
_UPDATE = "self.optimizer.update(factor, overflowed)"
_UPDATE_BUT_ONE = f"{_UPDATE} if self.groups.rank else None"
ZERO1, ZERO2, ZERO3 = ({**DP, "zero_stage": zero_stage} for zero_stage in (1, 2, 3))
SHARDING = [
    *faults_of(
        "dp",
        ("replicas_not_summed", "HSDP replicas keep their own gradients", DATA_PARALLEL, _MESH, _SHARD, HSDP),
        ("dp_not_summed", "data-parallel ranks keep their own gradients", DATA_PARALLEL, _MESH, _SHARD, DP),
        (
            "updates_a_copy",
            "the optimizer updates a copy of the weights",
            OPTIMIZER + "ShardedOptimizer._made",
            "nn.Parameter(shard)",
            "nn.Parameter(shard.clone())",
            ZERO3,
        ),
        ("shard_not_updated", "one rank's shards are not updated", STEP, _UPDATE, _UPDATE_BUT_ONE, ZERO1),
        ("replicas_drift", "one of two replicas is not updated", STEP, _UPDATE, _UPDATE_BUT_ONE, DP),
    ),
    *faults_of(
        "dp",
        (
            "stale_gathered_weights",
            "gathered weights are those of the first step",
            ENGINE + "collectives.tensor_parallel:RowParallelLinear.forward",
            "linear(x_TF, self.weight, self.deferred)",
            f"linear(x_TF, {_FIRST}, self.deferred)",
            ZERO3,
        ),
        (
            "gradients_kept",
            "gradients are not reset after a step",
            STEP,
            "parameter.grad = named.current.grad = None",
            "parameter.grad = None",
            ZERO2,
        ),
        steps=2,
    ),
    *faults_of(
        "dp",
        (
            "gradients_reduced_in_bf16",
            "gradients are reduced in bf16",
            DATA_PARALLEL,
            "reduce_dtype=reduce_dtype(experiment)",
            "reduce_dtype=dtype",
            {**DP, "gradient_accumulation_fusion": False},
        ),
        (
            "gradients_reduced_in_fp32",
            "gradients are reduced in fp32 although bf16 was chosen",
            ENGINE + "training.data_parallel:reduce_dtype",
            'experiment.grad_reduce == "bf16"',
            "False",
            {**DP, "gradient_accumulation_fusion": False},
        ),
        check="reduction_precision",
    ),
    *faults_of(
        "traffic",
        (
            "zero3_gathered_after_forward",
            "ZeRO 3 stays gathered after the forward",
            DATA_PARALLEL,
            "experiment.zero_stage == 3",
            "False",
            ZERO3,
        ),
        (
            "zero3_gathered_after_backward",
            "ZeRO 3 stays gathered after the backward",
            SYNC,
            "experiment.zero_stage <= 2",
            "True",
            ZERO3,
        ),
        (
            "zero2_reduces_once",
            "ZeRO 2 reduces once a step",
            SYNC,
            "experiment.zero_stage >= 2",
            "experiment.zero_stage >= 3",
            ZERO2,
        ),
        (
            "zero1_reduces_always",
            "ZeRO 1 reduces every micro-batch",
            SYNC,
            "experiment.zero_stage >= 2",
            "True",
            {**ZERO1, "gradient_accumulation_fusion": False},
        ),
        check="traffic",
    ),
]

_COMPUTE = ENGINE + "ops.linear:DeferredGradients.compute"
_TIED = OPTIMIZER + "ShardedOptimizer.add_tied_copies"
STAGES = faults_of(
    "pp",
    (
        "tied_not_summed",
        "the two ends of a tied embedding are not summed",
        _TIED,
        "dist.all_reduce(copies[0], group=self.groups.tied_embedding)",
        "pass",
        TIED,
    ),
    (
        "tied_drift_in_vee",
        "of two ends on one rank only the first gets the sum",
        _TIED,
        "copies[1].copy_(copies[0])",
        "pass",
        {**VEE, "tie": True},
    ),
    (
        "weight_gradient_lost",
        "the second half of a split backward makes nothing",
        _COMPUTE,
        "gradient = make()",
        "gradient = 0 * make()",
        {**ZERO_BUBBLE, "gradient_accumulation_fusion": False},
    ),
    (
        "weight_gradient_of_last",
        "later micro-batches replace a weight's gradient",
        _COMPUTE,
        "weight.grad.add_(gradient)",
        "gradient",
        {**ZERO_BUBBLE, "micro_batch_size": 1, "gradient_accumulation_fusion": False},
    ),
    (
        "weight_gradient_twice",
        "both halves of a split backward make a weight's gradient",
        ENGINE + "ops.linear:_Linear.backward",
        "None if deferred.add(parameter, make) else make()",
        "(deferred.add(parameter, make), make())[1]",
        {**VEE, "gradient_accumulation_fusion": False},
    ),
    (
        "first_half_lost",
        "gradients of norms from the first half are lost",
        ENGINE + "training.data_parallel:GradientSync.before_weight_gradients",
        "setattr(parameter, attribute, gradient)",
        "setattr(parameter, attribute, 0 * gradient)",
        {**ZERO_BUBBLE, "dp": 2, "zero_stage": 2, "micro_batch_size": 1},
    ),
    (
        "boundary_of_other_microbatch",
        "a stage runs its first input again",
        PIPELINE + "_forward",
        "received.requires_grad_()",
        "(next(iter(self.held.values()))[0].detach() if self.held else received).clone().requires_grad_()",
        {"pp": 2, "pp_schedule": "gpipe", **TWO},
    ),
)

_OTHER_INPUT = "checkpointed(lambda x, *t, runs=[]: self.block(0.9 * x if runs.append(1) or len(runs) > 1 else x, *t),"
RECOMPUTATION = [
    *faults_of(
        "recompute",
        (
            "rotated_backwards",
            "queries and keys are rotated the other way when they are computed again",
            ENGINE + "layers.block:Attention.forward",
            "lambda q, k: self._norm_and_rotate(q, k, cos_SH, sin_SH)",
            "lambda q, k: self._norm_and_rotate(q, k, cos_SH, -sin_SH)",
            {"recompute": "selective", **TWO},
        ),
        (
            "swiglu_of_other_rows",
            "SwiGLU is computed again of other tokens",
            ENGINE + "layers.block:FeedForward.forward",
            "lambda gate_up: (swiglu(gate_up),)",
            "lambda gate_up: (swiglu(gate_up.flip(0)),)",
            {"recompute": "selective", **TP},
        ),
        (
            "norm_of_other_eps",
            "norms are computed again with another epsilon",
            ENGINE + "layers.norm:RMSNorm.forward",
            "lambda x_TD: (rms_norm(x_TD, self.scaled_weight(), self.eps),)",
            "lambda x_TD: (rms_norm(x_TD, self.scaled_weight(), 100 * self.eps),)",
            {"recompute": "selective", **TWO},
        ),
        (
            "block_of_other_input",
            "a block is computed again from another input",
            ENGINE + "layers.recompute:FullBlock.forward",
            "checkpointed(self.block,",
            _OTHER_INPUT,
            {"recompute": "full", **DP},
        ),
    ),
    *faults_of(
        "words",
        (
            "word_of_the_layer_before",
            "the first layer of a stage has the word of its neighbour",
            ENGINE + "training.build:_shape",
            "recompute = words[layer]",
            "recompute = words[layer - 1]",
            {"pp": 2, "recompute": "full/none", "rounds": 2},
        ),
        check="stage_words",
    ),
]

_SHARE = OPTIMIZER + "ShardedOptimizer._share"
_CLAMP = "torch.clamp(MAX_GRAD_NORM / (norm + 1e-6), max=1.0)"
_COUPLED = f"self.optimizer.param_groups[0].update(decoupled_weight_decay=False); {_UPDATE}"
_COPIES = 'copies *= placement.copies({"tp": e.tp})'
_REPLICAS = 'self.groups.mesh_of(placement).get_group("replicate").size()'
_OWN_NORM = "(self.local_square_norm().sqrt() + 1e-6)"
NORM = [
    *faults_of(
        "norm",
        (
            "norm_counts_tp_copies",
            "the norm counts weights that all tp ranks have for each",
            _SHARE,
            _COPIES,
            "pass",
            TP,
        ),
        ("norm_counts_replicas", "the norm counts every replica", _SHARE, _REPLICAS, "1", HSDP),
        (
            "norm_counts_tied_twice",
            "the norm counts both ends of a tied embedding",
            _SHARE,
            "copies *= 2",
            "pass",
            TIED,
        ),
        ("norm_of_square", "gradients are clipped by the squared norm", LAUNCH, "totals[1].sqrt()", "totals[1]", DP),
        ("norm_of_own_shard", "each rank clips by its own shard's norm", STEP, "(norm + 1e-6)", _OWN_NORM, CLIPPED),
        scale=2.0,
    ),
    *faults_of(
        "norm",
        ("never_clipped", "gradients are never clipped", STEP, _CLAMP, "norm / norm", CLIPPED),
        ("other_largest_norm", "another largest norm", OPTIMIZER + "MAX_GRAD_NORM", None, 2.0, CLIPPED),
        check="updates",
        scale=1000.0,
    ),
    *faults_of(
        "norm",
        ("always_clipped", "gradients are always scaled to the largest norm", STEP, ", max=1.0", ", max=1e9", CLIPPED),
        check="updates",
    ),
]

CONSTANTS = [
    *faults_of(
        "optimizer",
        ("learning_rate", "another learning rate", OPTIMIZER + "LEARNING_RATE", None, 3e-4, CLIPPED),
        ("epsilon", "another epsilon", OPTIMIZER + "EPSILON", None, 1e-6, CLIPPED),
        ("weight_decay", "torch's own weight decay", OPTIMIZER + "WEIGHT_DECAY", None, 0.01, CLIPPED),
        ("coupled_decay", "weight decay passes the moments", STEP, _UPDATE, _COUPLED, CLIPPED),
        check="updates",
    ),
    *faults_of(
        "optimizer",
        ("betas", "torch's own betas", OPTIMIZER + "BETAS", None, (0.9, 0.999), CLIPPED),
        check="updates",
        steps=2,
    ),
]

_LAUNCHED, _MARKED = "launched = _launch(engine, batches)\n", "end = engine.clock.mark()\n"
_END, _SWAPPED = f"{_LAUNCHED}        {_MARKED}", f"{_MARKED}        {_LAUNCHED}"
MARKS = faults_of(
    "clock",
    ("end_before_work", "the end of a step is marked before its work", RUN_STEP, _END, _SWAPPED, DP),
    (
        "reduction_in_backward",
        "the last backward ends after FSDP's wait",
        PIPELINE + "_run",
        "self.marks.last_backward if action is self.actions[-1] else clock.mark()",
        "clock.mark()",
        DP,
    ),
    check="marks",
)

FAULTS: list[Fault] = [
    *SCALES,
    *DATA,
    *SEEDS,
    *WEIGHTS,
    *TENSORS,
    *LOSS,
    *POSITIONS,
    *ATTENTION,
    *LATENTS,
    *KINDS,
    *MODULES,
    *HEADS,
    *GEMMA,
    *RECURRENCES,
    *EXPERTS,
    *SHARDING,
    *SUMS,
    *DOCUMENTS,
    *HOSTS,
    *STAGES,
    *RECOMPUTATION,
    *NORM,
    *CONSTANTS,
    *UPDATES,
    *MARKS,
    *PRECISION,
    *TIMES,
    *CHOICES,
    *ADAPTERS,
]
"""All of them, in the order of the report."""
