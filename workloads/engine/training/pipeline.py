"""Runs one step's micro-batches through this rank's model chunks, in the order of `workloads.costs.shape.schedule`.

A rank holds one chunk, or several under schedules with virtual stages; each chunk is one stage of the pipeline. The
loop is the same for any number of stages, and for whole and split backwards. `torch.distributed.pipelining` is not
used, for three reasons: it reduces gradients with the last micro-batch only, which is not ZeRO-2; it runs an extra
forward to learn shapes; and its warm-up does not work under a fake process group without patching its internals, on
torch 2.11 and on 2.13.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from workloads.costs.shape.schedule import Action, schedule_actions
from workloads.costs.shape.weight_sums import experts_add
from workloads.engine.collectives.groups import Groups
from workloads.engine.collectives.parameters import named_parameters
from workloads.engine.layers.experts import Experts
from workloads.engine.layers.transformer import Chunk, routers
from workloads.engine.ops.linear import DeferredGradients
from workloads.engine.training.activation_offload import ActivationStore, LayerTensors
from workloads.engine.training.clock import Clock, Mark
from workloads.engine.training.data import Batch, parts_of_batch
from workloads.engine.training.data_parallel import GradientSync, compute_dtype, reduce_dtype
from workloads.engine.training.fp8_gather import fp8_weights
from workloads.engine.training.gradient_sums import GradientSums
from workloads.engine.training.messages import Messages, connect


@dataclass
class PipelineMarks:
    """Device-time marks of one step."""

    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Marks around each wait for another stage, up to the last backward."""
    late_waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Marks, with several stages, after the last backward, around waits for pending sends and for sums over stages."""
    last_backward: Mark | None = None
    """Mark after the last backward's compute, before the rest of the gradient reduction."""
    last_backward_at: float | None = None
    """Host time of that mark, by `time.perf_counter`, in seconds."""
    actions: list[tuple[Action, Mark, Mark]] = field(default_factory=list)
    """Start and end of every action, excluding waits for other stages and the wait after the last backward."""


class _AtEndOfBackward(torch.autograd.Function):
    """Identity on a chunk's output. Its backward runs before all others, so its engine callback runs before FSDP's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Variable._execution_engine.queue_callback(ctx.callback)
        return grad, None


class Pipeline:
    """One rank's model chunks and the order of their forwards and backwards."""

    def __init__(self, chunks: list[Chunk], groups: Groups, clock: Clock) -> None:
        e = groups.experiment
        self.fp8_weights = fp8_weights(chunks, groups)
        self.chunks, self.groups, self.clock = chunks, groups, clock
        self.sync = [GradientSync(chunk, e) for chunk in chunks]
        self.actions = schedule_actions(
            e.pp_schedule, groups.position["pp"], e.pp, e.num_microbatches, e.virtual_stages
        )
        modules = [module for chunk in chunks for module in chunk.modules()]
        self.sums: GradientSums | None = None
        self.deferred: list[DeferredGradients] | None = None
        if e.gradient_accumulation_fusion:
            self.sums = GradientSums(modules, reduce_dtype(e))
        elif experts_add(e):
            experts = [module for module in modules if isinstance(module, Experts)]
            self.sums = GradientSums(experts, reduce_dtype(e))
            for module in experts:
                module.deferred = DeferredGradients(self.sums)
        if e.gradient_accumulation_fusion or any(a.kind == "W" for a in self.actions):
            self.deferred = [DeferredGradients(self.sums) for _ in chunks]
            for chunk, deferred in zip(chunks, self.deferred, strict=True):
                chunk.defer_to(deferred)
        self.modules_ahead = e.model.mtp_modules
        self.tokens = e.micro_batch_size * e.seq_len // e.cp
        """Tokens of one micro-batch on this rank."""
        self.boundary_shape = (self.tokens // (e.tp if e.sequence_parallel else 1), e.model.hidden_size)
        self.boundary_dtype = compute_dtype(e)
        self.store: ActivationStore | None = chunks[0].store
        self.running = ""
        """Kind of the current action, or of the last one."""

    def run(self, batches: list[Batch]) -> tuple[list[Tensor], PipelineMarks]:
        """Forward and backward of every micro-batch.

        Returns this rank's share of the mean loss, with modules of multi-token prediction followed by that of their
        mean loss (empty on ranks without the last stage), and the marks of the step.
        """
        step = _Step(self, self.actions, batches, is_rehearsal=self.groups.is_rehearsal)
        step.run()
        marks = step.marks
        start = self.clock.mark()
        step.messages.finish()
        marks.late_waits.append((start, self.clock.mark()))
        return [torch.stack(of_steps).sum() for of_steps in zip(*step.losses, strict=True)], marks

    def prepare(self) -> None:
        """Connect to the neighbouring stages and load every kernel, before any message is on its way."""
        connect(self.groups)
        self.load_kernels()

    def load_kernels(self) -> None:
        """Run one micro-batch through this rank's chunks, with placeholder inputs, and drop its gradients and router
        counts.

        The other axes communicate as in a step, so their communicators are created too.
        """
        e = self.groups.experiment
        actions = schedule_actions(e.pp_schedule, self.groups.position["pp"], e.pp, 1, e.virtual_stages)
        tokens = torch.zeros(self.tokens, dtype=torch.int64, device=self.groups.device)
        _Step(self, actions, [(tokens,) * parts_of_batch(e)], is_rehearsal=True).run()
        self.clock.finish()
        for chunk in self.chunks:
            for named in named_parameters(chunk):
                named.current.grad = None
            for router in routers(chunk):
                router.fill()


class _Step:
    """State of one step between its actions."""

    def __init__(self, pipeline: Pipeline, actions: list[Action], batches: list[Batch], *, is_rehearsal: bool) -> None:
        self.pipeline, self.actions, self.batches = pipeline, actions, batches
        backwards = [action for action in actions if action.kind in ("B", "W")]
        self.last_of_chunk = {action.chunk: action for action in backwards}
        """Action that completes each chunk's gradients."""
        self.last_through_chunk = {action.chunk: action for action in actions if action.kind in ("B", "I")}
        """Last action that makes input gradients of each chunk."""
        self.marks = PipelineMarks()
        self.messages = Messages(
            pipeline.groups,
            pipeline.clock,
            pipeline.boundary_shape,
            pipeline.boundary_dtype,
            is_rehearsal,
            self.marks.waits,
        )
        self.held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """(chunk, micro-batch) -> (chunk input, chunk output)"""
        self.last_layers: dict[tuple[int, int], LayerTensors] = {}
        """The last layer of each forward whose tensors wait on the host, by (chunk, micro-batch)."""
        self.losses: list[list[Tensor]] = []
        """Of each micro-batch: the loss, and with modules of multi-token prediction theirs."""

    def run(self) -> None:
        """Run all actions."""
        for weights in self.pipeline.fp8_weights:
            weights.find_scales()
        for action in self.actions:
            self._run(action)
        if self.pipeline.sums is not None:
            self.pipeline.sums.finish()

    def _run(self, action: Action) -> None:
        pipeline, clock = self.pipeline, self.pipeline.clock
        chunk = pipeline.chunks[action.chunk]
        pipeline.running = action.kind
        if pipeline.store is not None and (layer := self.last_layers.pop((action.chunk, action.microbatch), None)):
            pipeline.store.fetch(layer)  # while this rank waits for the gradient
        received = self.messages.take(action)
        start = clock.mark()
        if action.kind == "F":
            self._forward(action, chunk, received)
        elif action.kind == "W":
            self._weight_gradients(action)
        else:
            self._backward(action, chunk, received)
        if pipeline.sums is not None and action == self.last_of_chunk[action.chunk]:
            pipeline.sums.release()
        # After the last backward FSDP waits for the gradient reduction, which is timed separately.
        end = self.marks.last_backward if action is self.actions[-1] else clock.mark()
        assert end is not None
        self.marks.actions.append((action, start, end))

    def _forward(self, action: Action, chunk: Chunk, received: Tensor | None) -> None:
        pipeline = self.pipeline
        tokens, targets, *others = self.batches[action.microbatch]
        documents = others[: len(others) - pipeline.modules_ahead]
        x = tokens if received is None else received.requires_grad_()
        if chunk.modules_ahead:
            output: Tensor = chunk(x, targets, *documents, later_targets=others[len(documents) :])
        else:
            output = chunk(x, targets if chunk.is_last else None, *documents)
        if chunk.head is not None:
            self.losses.append(chunk.head.losses)
        else:
            self.messages.give(action, output.detach())
        last = self.actions[-1]
        if last.kind == "B" and (last.chunk, last.microbatch) == (action.chunk, action.microbatch):
            output = _AtEndOfBackward.apply(output, self._note_last_backward)
        self.held[action.chunk, action.microbatch] = x, output
        if pipeline.store is not None and len(chunk.blocks) and pipeline.store.newest is not None:
            self.last_layers[action.chunk, action.microbatch] = pipeline.store.newest

    def _backward(self, action: Action, chunk: Chunk, received: Tensor | None) -> None:
        pipeline = self.pipeline
        x, output = self.held.pop((action.chunk, action.microbatch))
        sync = pipeline.sync[action.chunk]
        last_through = action == self.last_through_chunk[action.chunk]
        if action.kind == "B":
            sync.before_backward(last=action == self.last_of_chunk[action.chunk], last_through=last_through)
            output.backward(received)
        else:
            assert pipeline.deferred is not None
            sync.before_input_gradients(last_through=last_through)
            pipeline.deferred[action.chunk].collect(action.microbatch)
            output.backward(received)
            pipeline.deferred[action.chunk].stop()
            sync.after_input_gradients(action.microbatch)
        if not chunk.is_first:
            assert x.grad is not None
            self.messages.give(action, x.grad)

    def _weight_gradients(self, action: Action) -> None:
        pipeline = self.pipeline
        assert pipeline.deferred is not None
        deferred, sync = pipeline.deferred[action.chunk], pipeline.sync[action.chunk]
        ends_step, microbatch = action == self.actions[-1], action.microbatch

        def after_gradient(weight: Tensor, missing: int) -> None:
            if ends_step and not missing:
                self._note_last_backward()
            sync.after_weight_gradient(weight)

        last = action == self.last_of_chunk[action.chunk]
        sync.before_weight_gradients(microbatch, deferred.weights(microbatch), last=last)
        deferred.compute(microbatch, after_gradient)
        sync.after_weight_gradients(last=last)

    def _note_last_backward(self) -> None:
        self.marks.last_backward = self.pipeline.clock.mark()
        self.marks.last_backward_at = time.perf_counter()
