"""Runs ZeRO 0 to 3 and HSDP through FSDP2's `fully_shard` on the (replicate, shard) mesh.

| stage | shard degree | gathered parameters        | gradients over dp                     |
|-------|--------------|----------------------------|---------------------------------------|
| 0     | 1            | kept for the whole step    | all-reduced with the last micro-batch |
| 1     | dp_shard·cp  | kept for the whole step    | reduce-scattered with the last one    |
| 2     | dp_shard·cp  | kept for the whole step    | reduce-scattered with every one       |
| 3     | dp_shard·cp  | gathered at use, both ways | reduce-scattered with every one       |

Replicas (HSDP) are all-reduced once, with the last micro-batch. Master weights and optimizer state live in fp32
shards, or in bf16 (`master_dtype`); the gathered copy has the compute dtype; gradients are reduced, and accumulated
over micro-batches, in fp32, or in bf16 (`reduce_dtype`).
Gradients are *summed* over ranks: the loss is already divided by the tokens of the global batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from workloads.engine.collectives.groups import Groups
from workloads.engine.layers.experts import Experts
from workloads.engine.layers.transformer import Chunk
from workloads.engine.ops.fp8 import Fp8Scaling
from workloads.engine.training.gradient_memory import InMemoryOfActivations, OwnPart
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment

_COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_FP8_SCALINGS: dict[str, Fp8Scaling] = {
    "fp8_tensorwise": "tensorwise",
    "fp8_rowwise": "rowwise",
    "fp8_blockwise": "blockwise",
}


def compute_dtype(experiment: Experiment) -> torch.dtype:
    """The dtype of activations and gathered weights. Raises `UnsupportedByEngine` for a precision without kernels."""
    if experiment.precision in _FP8_SCALINGS:
        return torch.bfloat16
    dtype = _COMPUTE_DTYPES.get(experiment.precision)
    if dtype is None:
        known = ", ".join((*_COMPUTE_DTYPES, *_FP8_SCALINGS))
        raise UnsupportedByEngine(
            f"the engine cannot run precision={experiment.precision} yet; it may be one of {known}"
        )
    return dtype


def fp8_scaling(experiment: Experiment) -> Fp8Scaling | None:
    """Scaling of the blocks' products in fp8; None for other precisions."""
    return _FP8_SCALINGS.get(experiment.precision)


def master_dtype(experiment: Experiment) -> torch.dtype:
    """The dtype of the shards that the optimizer updates, and of their reduced gradients."""
    return torch.bfloat16 if experiment.master_weights == "bf16" else update_dtype(experiment)


def update_dtype(experiment: Experiment) -> torch.dtype:
    return torch.float64 if experiment.precision == "fp64" else torch.float32


def reduce_dtype(experiment: Experiment) -> torch.dtype:
    """The dtype in which gradients are summed over micro-batches as long as they are not sharded, and over ranks.

    With ``grad_reduce=bf16`` both sums are in bf16, as FSDP2 has it with ``reduce_dtype=torch.bfloat16`` (torchtitan's
    ``mixed_precision_reduce``) and Megatron-LM without ``--accumulate-allreduce-grads-in-fp32``, whose main gradients
    are then bf16, too (Megatron-Bridge: ``grad_reduce_in_fp32=False``). So ZeRO 0 and 1 accumulate 2 bytes for each
    parameter instead of 4. Shards that ZeRO 2 and 3 add up over micro-batches have the dtype of the master weights.
    """
    return torch.bfloat16 if experiment.grad_reduce == "bf16" else update_dtype(experiment)


def apply_data_parallel(chunk: Chunk, groups: Groups) -> None:
    """Wrap with FSDP, innermost first: the experts, every block, the embedding, the head and the chunk.

    A single rank is wrapped too, for mixed precision. Experts are sharded over fewer ranks than the rest of their
    block: those that hold the same experts.
    """
    experiment = groups.experiment
    mesh = _without_single_replica(groups.data_mesh)
    experts_mesh = _without_single_replica(groups.expert_mesh) if groups.expert_mesh is not None else None
    dtype = compute_dtype(experiment)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype if dtype != master_dtype(experiment) else None,
        reduce_dtype=reduce_dtype(experiment) if dtype != update_dtype(experiment) else None,
        cast_forward_inputs=False,
    )
    reshard = experiment.zero_stage == 3

    def shard(module: nn.Module, *, reshard_after_forward: bool, of_experts: bool = False) -> None:
        mesh_of_module = experts_mesh if of_experts else mesh
        fully_shard(module, mesh=mesh_of_module, mp_policy=policy, reshard_after_forward=reshard_after_forward)

    for experts in [module for module in chunk.modules() if isinstance(module, Experts)]:
        shard(experts, reshard_after_forward=reshard, of_experts=True)
    for block in chunk.blocks:
        shard(block, reshard_after_forward=reshard)
    if not (experiment.model.tie_embeddings and chunk.embedding is not None and chunk.head is not None):
        # A tied weight belongs to two modules, so it stays with the chunk; untied ends are units of their own.
        if chunk.embedding is not None:
            shard(chunk.embedding, reshard_after_forward=reshard)
        if chunk.head is not None:
            shard(chunk.head, reshard_after_forward=False)  # its backward comes next
    shard(chunk, reshard_after_forward=False)
    for module in chunk.modules():
        if isinstance(module, FSDPModule):  # these two setters are not recursive
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            reduce_scatter = OwnPart if groups.is_rehearsal else InMemoryOfActivations
            for group in param_groups_of(module):
                module.set_custom_reduce_scatter(reduce_scatter(group))


def _without_single_replica(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh["replicate"].size() > 1 else mesh["shard"]


_Gradient = tuple[Any, str, Tensor]
"""(tensor or FSDP parameter that holds it, name of the attribute, gradient)"""


class GradientSync:
    """Tells FSDP, for every backward of one chunk, which gradients to reduce and which weights to keep gathered."""

    def __init__(self, chunk: Chunk, experiment: Experiment) -> None:
        assert isinstance(chunk, FSDPModule)
        self.chunk: FSDPModule = chunk
        ends: tuple[Any, ...] = (chunk.embedding, chunk.head)
        self.ends: list[FSDPModule] = [end for end in ends if isinstance(end, FSDPModule)]
        self.every_microbatch = experiment.zero_stage >= 2
        self.keep_gathered = experiment.zero_stage <= 2
        self._settings: tuple[bool, bool] | None = None
        self._deferred: dict[int, list[_Gradient]] = {}
        """Gradients of the input-gradient pass that wait for the weight-gradient pass, by micro-batch."""
        self._missing: Counter[Any] = Counter()
        """Number of gradients that each FSDP group still waits for in the current weight-gradient pass."""
        self._owners: dict[int, Any] = {}
        """FSDP groups by the ids of their gathered weights."""

    def before_backward(self, *, last: bool, last_through: bool) -> None:
        """Call before a whole backward.

        ``last``: last backward of this chunk in this step. ``last_through``: last one that produces input gradients.
        """
        self._tell(reduces=last or self.every_microbatch, last=last)
        self._tell_ends(last=last_through)

    def before_input_gradients(self, *, last_through: bool) -> None:
        """Call before the input-gradient pass of a split backward, in which the products' weights get no gradients
        yet."""
        self._tell(reduces=False, last=False)
        self._tell_ends(last=last_through)

    def after_input_gradients(self, microbatch: int) -> None:
        """Call after the input-gradient pass. With ZeRO 2 and 3 this pass's gradients of the blocks (those of their
        norms) are set aside until the weight-gradient pass, so that they are not reduced with another micro-batch."""
        if self.every_microbatch:
            self._deferred[microbatch] = [taken for group in self._groups() for taken in _take_gradients(group)]

    def before_weight_gradients(self, microbatch: int, weights: Iterable[Tensor], *, last: bool) -> None:
        """Call before the weight-gradient pass, which makes gradients of ``weights``. ``last``: last one of this chunk
        in this step."""
        self._tell(reduces=last or self.every_microbatch, last=last)
        for parameter, attribute, gradient in self._deferred.pop(microbatch, []):
            setattr(parameter, attribute, gradient)
        self._missing = Counter(self._group_of(weight) for weight in weights)

    def after_weight_gradient(self, weight: Tensor) -> None:
        """Call when the gradient of ``weight`` is complete. Reduces its group if it was the last one that the group
        waited for: at most one group's gradients are unsharded at a time, and the reduction overlaps with the next
        group's products."""
        group = self._group_of(weight)
        self._missing[group] -= 1
        if not self._missing[group]:
            self._reduce(group)

    def after_weight_gradients(self, *, last: bool) -> None:
        """Call after the weight-gradient pass. Reduces the groups that had all their gradients after the input-gradient
        pass.

        Groups that were already reduced in that pass are only marked as done: FSDP would wait here for the last block's
        reduction, which can overlap with what follows.
        """
        reduced = [group for end in self.ends for group in param_groups_of(end)] if self.every_microbatch else []
        for group in self._groups():
            if group in reduced and not last:
                group._training_state = TrainingState.POST_BACKWARD
            elif group not in self._missing:
                self._reduce(group)
        state: Any = self.chunk._get_fsdp_state()
        state._root_post_backward_final_callback()

    def _reduce(self, group: Any) -> None:
        """Do what FSDP's autograd hooks do, which did not run in the weight-gradient pass."""
        with _as_if_gathered(group):
            for parameter in group.fsdp_params:  # all of one dtype, the dtype of reductions, as FSDP requires
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()
            group.post_backward()

    def _group_of(self, weight: Tensor) -> Any:
        """FSDP group that shards a weight, given as the tensor that FSDP gathers: the same one in every step."""
        if not self._owners:
            self._owners = {
                id(parameter._unsharded_param): group
                for group in self._groups()
                for parameter in group.fsdp_params
                if hasattr(parameter, "_unsharded_param")
            }
        return self._owners[id(weight)]

    def _groups(self) -> Iterator[Any]:
        for module in self.chunk.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                yield from param_groups_of(module)

    def _tell(self, *, reduces: bool, last: bool) -> None:
        if self._settings == (reduces, last):
            return
        self._settings = reduces, last
        self.chunk.set_is_last_backward(last)
        self.chunk.set_requires_gradient_sync(reduces)
        self.chunk.set_requires_all_reduce(last)  # after the line above, which sets both
        if self.keep_gathered:
            self.chunk.set_reshard_after_backward(last)

    def _tell_ends(self, *, last: bool) -> None:
        """Reduce the gradients of the embedding and the head, which are complete after the input-gradient pass.

        With ZeRO 2 and 3 they are reduced there: they are large, and every micro-batch that waits for its
        weight-gradient pass would hold them unsharded. The weights stay gathered, because FSDP's prefetch would gather
        the head again after the last input-gradient pass.
        """
        if not self.every_microbatch:
            return
        for end in self.ends:
            end.set_requires_gradient_sync(True, recurse=False)
            end.set_requires_all_reduce(last, recurse=False)  # after the line above, which sets both


def initialise_shards(chunk: nn.Module) -> None:
    """Initialise FSDP, which otherwise happens in the first forward. It may move the shards, so call it before their
    tensors are held anywhere. A second call changes nothing."""
    assert isinstance(chunk, FSDPModule)
    state: Any = chunk._get_fsdp_state()
    state._lazy_init()


def param_groups_of(module: FSDPModule) -> list[Any]:
    """FSDP's parameter groups of one module (one attribute in torch 2.11, a list in 2.13)."""
    state: Any = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def _take_gradients(group: Any) -> Iterator[_Gradient]:
    """Remove and return the unsharded gradients of a group's parameters."""
    for parameter in group.fsdp_params:
        if not hasattr(parameter, "_unsharded_param"):
            continue
        for holder, attribute in ((parameter, "unsharded_accumulated_grad"), (parameter._unsharded_param, "grad")):
            if (gradient := getattr(holder, attribute)) is not None:
                setattr(holder, attribute, None)
                yield holder, attribute, gradient


@contextmanager
def _as_if_gathered(group: Any) -> Iterator[None]:
    """Let FSDP treat a group's weights as gathered.

    ZeRO 3 frees weights before their gradients are complete. FSDP requires gathered weights when it reduces gradients,
    although it reads none of them: gathering them again would cost a collective.
    """
    freed = [
        p for p in group.fsdp_params if p.sharded_state != ShardedState.UNSHARDED and hasattr(p, "_unsharded_param")
    ]
    states = [p.sharded_state for p in freed]
    reshard = group.reshard_after_backward
    if freed:
        group.reshard_after_backward = False
    for parameter in freed:
        parameter.sharded_state = ShardedState.UNSHARDED
    try:
        yield
    finally:
        group.reshard_after_backward = reshard
        for parameter, state in zip(freed, states, strict=True):
            parameter.sharded_state = state
