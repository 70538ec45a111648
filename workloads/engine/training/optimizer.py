"""Computes the global gradient norm, clips, and updates the local shards with the experiment's optimizer.

The optimizer sees each parameter's local tensor rather than its DTensor: one fused kernel over plain tensors, without
dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workloads.costs.shape.copied_rows import Rows, rows_of_shard
from workloads.engine.collectives.groups import Groups
from workloads.engine.collectives.parameters import NamedParameter, local_shard, named_parameters
from workloads.engine.training.adafactor import Adafactor
from workloads.engine.training.data_parallel import initialise_shards
from workloads.engine.training.loss_scale import LossScale
from workloads.engine.training.muon import Muon
from workloads.engine.training.rounding_indices import segments_of
from workloads.engine.training.streamed_moments import StreamedAdamW, kept_elements
from workloads.engine.update_ops.adamw import AdamW
from workloads.engine.update_ops.sgd import SGD
from workloads.engine.update_ops.stochastic_rounding import Segment, cut

LEARNING_RATE = 3e-5
"""Learning rate of a sweep's runs. It is small, because there is no warm-up, and the loss, by which layouts are
compared, must not diverge. `workloads.engine.training.build.build` takes another."""
BETAS = (0.9, 0.95)
EPSILON = 1e-8
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
SGD_MOMENTUM = 0.9
"""Megatron-LM's default (``--sgd-momentum``)."""


class Updates(Protocol):
    """An optimizer over the local shards."""

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> Mapping[Any, Mapping[str, Any]]:
        """State by local parameter."""

    def allocate(self) -> None:
        """Allocate the state, which otherwise happens in the first update."""

    def update(self, factor: Tensor, skip: Tensor | None) -> None:
        """Update once with gradients times ``factor`` (0-dim), or not at all if ``skip`` (0-dim) is 1. Invalidates the
        gradients."""


def make_updates(named: Sequence[NamedParameter], locals_: Sequence[nn.Parameter], groups: Groups) -> Updates:
    """The optimizer of an experiment over the local shards of parameters."""
    name = groups.experiment.optimizer
    common: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    if name == "sgd":
        return SGD(locals_, **common, momentum=SGD_MOMENTUM, fused=True)
    if name == "adafactor":
        return Adafactor(named, locals_, groups, **common)
    of_adamw: dict[str, Any] = {**common, "betas": BETAS, "eps": EPSILON, "fused": True}
    if name == "muon":
        return Muon(named, locals_, groups, **of_adamw)
    state_dtype, segments = stored_as(named, groups)
    kept = [cut(one, slice(0, len(local.view(-1)))) for one, local in zip(segments, locals_, strict=False)]
    return AdamW(locals_, **of_adamw, state_dtype=state_dtype, segments=kept)


def stored_as(
    named: Sequence[NamedParameter], groups: Groups
) -> tuple[torch.dtype | None, Sequence[Sequence[Segment]]]:
    """Dtype of AdamW's moments, and the indices of each shard's elements; (None, ()) if nothing is kept in bf16."""
    e = groups.experiment
    if "bf16" not in (e.optimizer_states, e.master_weights):
        return None, ()
    dtype = torch.bfloat16 if e.optimizer_states == "bf16" else torch.float32
    return dtype, [segments_of(one, groups) for one in named]


class ShardedOptimizer:
    """The experiment's optimizer over the shards that this rank holds. ``rate``: learning rate by number of the update,
    from 0; a step that is skipped in fp16 is no update."""

    def __init__(self, chunks: Sequence[nn.Module], groups: Groups, rate: Callable[[int], float] | None = None) -> None:
        self.groups = groups
        self._chunks = chunks
        self._rate, self._steps = rate, 0
        self.parameters: list[NamedParameter] = [named for chunk in chunks for named in named_parameters(chunk)]
        self._rows: list[list[Rows] | None] = [self._by_copies(p) for p in self.parameters]
        """Rows of each shard by number of copies; None for a shard without copied heads."""
        self._locals: list[nn.Parameter] = []
        self._weights: Tensor | None = None
        self.optimizer: Updates | None = None
        self.streamed: StreamedAdamW | None = None
        """Updates the share of every shard whose moments ``optimizer_offload`` gives to the host."""
        fp16 = groups.experiment.precision == "fp16"
        self.loss_scale = LossScale(groups.device, never_skips=groups.is_rehearsal) if fp16 else None
        """Factor on the gradients until `step` divides by it."""

    def finish_gradients(self) -> None:
        """Sum over tp the gradients of weights that every rank holds whole and uses on its own tokens or heads, and of
        key and value heads over the ranks with copies of them."""
        e = self.groups.experiment
        partial = [
            p.gradient
            for p in self.parameters
            if p.spec.placement.summed_over(tp=e.tp, sequence_parallel=e.sequence_parallel)
        ]
        _sum_in_one_message(partial, self.groups.axes["tp"].group)
        for copies, group in self.groups.copies.items():
            held = [(p, rows) for p, apart in zip(self.parameters, self._rows, strict=True) for rows in apart or ()]
            mine = [p.gradient[rows.start : rows.stop] for p, rows in held if rows.copies == copies]
            _sum_in_one_message(mine, group)

    def add_tied_copies(self) -> None:
        """Sum the gradients of the two copies of an embedding, in the first and the last stage: of a tied one, or of
        one that modules of multi-token prediction look up, too."""
        copies = [p.gradient for p in self.parameters if p.spec.parts[0].name == "embedding"]
        if len(copies) == 2:  # both stages are on this rank
            copies[0].add_(copies[1])
            copies[1].copy_(copies[0])
        elif self.groups.tied_embedding is not None:
            dist.all_reduce(copies[0], group=self.groups.tied_embedding)

    def local_square_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm, without the loss scale. The sum over all ranks counts every
        element once."""
        gradients = [p.gradient for p in self.parameters]
        if self.streamed is not None:
            self.streamed.begin()
        wide = torch.float32 if gradients[0].dtype == torch.bfloat16 else None
        pieces: list[Tensor] = []
        for gradient, apart in zip(gradients, self._rows, strict=True):
            pieces += [gradient] if apart is None else [gradient[rows.start : rows.stop] for rows in apart]
        norms = torch.stack(torch._foreach_norm(pieces, 2.0, dtype=wide))
        if self._weights is None:
            weights: list[float] = []
            for p, apart in zip(self.parameters, self._rows, strict=True):
                weights += [self._share(p) / n for n in ([1] if apart is None else [rows.copies for rows in apart])]
            self._weights = torch.tensor(weights, dtype=norms.dtype, device=norms.device)
        if self.loss_scale is not None:
            norms = norms / self.loss_scale.value
        return (norms.square() * self._weights).sum()

    def step(self, norm: Tensor) -> Tensor | None:
        """Scale gradients so that the global norm is at most MAX_GRAD_NORM, update, and free the gradients.

        ``norm``: global norm of the gradients without the loss scale. If it is not finite, fp16 runs update nothing.
        Returns 1 for such a skipped step and else 0, on the device; None in other precisions, which skip none.
        """
        if self.optimizer is None:
            self.optimizer = self._made()
            if self.streamed is not None:
                self.streamed.begin()
        if self._rate is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = self._rate(self._updates())
        self._steps += 1
        gradients = [p.gradient for p in self.parameters]
        factor = torch.clamp(MAX_GRAD_NORM / (norm + 1e-6), max=1.0)
        overflowed = None
        if self.loss_scale is not None:
            factor = factor / self.loss_scale.value
            overflowed = self.loss_scale.overflowed(norm)
        for parameter, gradient in zip(self._locals, gradients, strict=True):
            gradient = gradient if self.streamed is None else gradient.view(-1)[: parameter.numel()]
            parameter.grad = gradient if gradient.numel() else None  # more shards than rows: some ranks hold none
        if self.streamed is not None:
            self.streamed.launch(gradients, factor, overflowed, self.optimizer.param_groups[0])
        self.optimizer.update(factor, overflowed)
        if self.streamed is not None:
            self.streamed.finish()
        for parameter, named in zip(self._locals, self.parameters, strict=True):
            parameter.grad = named.current.grad = None
        if self.loss_scale is not None and overflowed is not None:
            self.loss_scale.update(overflowed)
        return overflowed

    def allocate(self) -> None:
        """Allocate moments before the first step, which would put them into memory between activations: memory around
        them could then be used by nothing but other tensors of the same pool, and a captured step has its own pool."""
        for chunk in self._chunks:
            initialise_shards(chunk)
        if self.optimizer is None:
            self.optimizer = self._made()
            self.optimizer.allocate()

    def _made(self) -> Updates:
        """The optimizer over the local shards. FSDP must have initialised itself, which may move them."""
        e = self.groups.experiment
        shards = [local_shard(p.current) for p in self.parameters]
        if e.optimizer_offload:
            self.streamed = StreamedAdamW(shards, e.optimizer_offload, *stored_as(self.parameters, self.groups))
            shards = [shard.view(-1)[: kept_elements(shard.numel(), e.optimizer_offload)] for shard in shards]
        self._locals = [nn.Parameter(shard) for shard in shards]
        return make_updates(self.parameters, self._locals, self.groups)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the last step."""
        assert self.optimizer is not None, "no step was taken yet"
        return float(self.optimizer.param_groups[0]["lr"])

    def _updates(self) -> int:
        """Number of updates so far. In fp16 only AdamW's count on the device knows which steps were skipped, so the
        host waits for it; a sweep's runs have one rate and never ask."""
        if self.loss_scale is None or self.optimizer is None:
            return self._steps
        if self.streamed is not None:
            return self.streamed.updates
        return int(next((state["step"].item() for state in self.optimizer.state.values()), 0))

    def state_tensors(self) -> list[Tensor]:
        """Optimizer state on the device; empty before the first step."""
        if self.optimizer is None:
            return []
        of_states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return of_states + (self.streamed.device_tensors() if self.streamed is not None else [])

    def host_tensors(self) -> list[Tensor]:
        """What the optimizer keeps on the host beside its state on the device, which no device holds."""
        return self.streamed.host_tensors() if self.streamed is not None else []

    def state_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.state_tensors())

    def _by_copies(self, named: NamedParameter) -> list[Rows] | None:
        """Rows of this rank's shard of a parameter, if it has any of copied heads."""
        tp, parts = self.groups.experiment.tp, named.spec.parts
        if all(part.copies(tp) == 1 for part in parts):
            return None
        shard = self.groups.mesh_of(named.spec.placement).get_group("shard")
        rows = rows_of_shard(parts, tp, shard.size(), shard.rank())
        return rows if any(one.copies > 1 for one in rows) else None

    def _share(self, named: NamedParameter) -> float:
        """One over the number of copies of a parameter's elements on all ranks."""
        e = self.groups.experiment
        placement = named.spec.placement
        copies = self.groups.mesh_of(placement).get_group("replicate").size()
        if not placement.is_expert:
            copies *= placement.copies({"tp": e.tp})
        copied = e.model.tie_embeddings or e.model.mtp_modules > 0
        if copied and e.num_stages > 1 and named.spec.parts[0].name == "embedding":
            copies *= 2
        return 1.0 / copies


def _sum_in_one_message(gradients: Sequence[Tensor], group: dist.ProcessGroup | None) -> None:
    """Sum gradients over a group in place."""
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
