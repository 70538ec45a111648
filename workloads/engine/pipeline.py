"""Runs one step's micro-batches through this rank's stage, in the order of `workloads.costs.schedule`.

The loop is the same for one stage and for many. `torch.distributed.pipelining` is not used, for three reasons: it
reduces gradients with the last micro-batch only, which is not ZeRO-2; it runs an extra forward to learn shapes; and its
warm-up does not work under a fake process group without patching its internals, on torch 2.11 and on 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from workloads.costs.schedule import Action, schedule_actions
from workloads.engine.clock import Clock
from workloads.engine.data_parallel import GradientSync, compute_dtype
from workloads.engine.groups import Groups
from workloads.engine.model import Stage

Mark = Any


@dataclass
class PipelineMarks:
    """Device-time marks of one step."""

    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Around each wait for a neighbour stage, up to the last backward."""
    late_waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    """With several stages: around waiting for messages to leave and for sums over stages, after the last backward."""
    last_backward: Mark | None = None
    """After the last backward's compute, before what is left of the gradient reduction."""
    actions: list[tuple[Action, Mark, Mark]] = field(default_factory=list)
    """Every forward and backward, waits for neighbours and the wait after the last backward excluded."""


class _AtEndOfBackward(torch.autograd.Function):
    """Identity on a stage's output. Its backward runs before all others, so its engine callback runs before FSDP's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Variable._execution_engine.queue_callback(ctx.callback)
        return grad, None


class Pipeline:
    """One rank's stage and the order of its forwards and backwards."""

    def __init__(self, stage: Stage, groups: Groups, clock: Clock) -> None:
        experiment = groups.experiment
        self.stage, self.groups, self.clock = stage, groups, clock
        self.sync = GradientSync(stage, experiment)
        self.actions = schedule_actions(
            experiment.pp_schedule, groups.stage, experiment.pp, experiment.num_microbatches
        )
        tokens = experiment.micro_batch_size * experiment.seq_len
        shards = experiment.tp if experiment.sequence_parallel else 1
        self.boundary_shape = (tokens // shards, experiment.model.hidden_size)
        self.boundary_dtype = compute_dtype(experiment)

    def run(self, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensor | None, PipelineMarks]:
        """Forward and backward of every micro-batch.

        Returns this rank's share of the mean loss (None before the last stage) and the marks of the step.
        """
        marks = PipelineMarks()
        held: dict[int, tuple[Tensor, Tensor]] = {}  # micro-batch -> (stage input, stage output)
        sends: list[tuple[dist.Work, Tensor]] = []  # a tensor must live until it has been sent
        losses: list[Tensor] = []
        last = len(batches) - 1
        for action in self.actions:
            i = action.microbatch
            if action.kind == "F":
                x = batches[i][0] if self.groups.is_first_stage else self._receive(-1, marks).requires_grad_()
                start = self.clock.mark()
                output = self._forward(x, batches[i][1], i == last, marks)
                held[i] = x, output
                if self.groups.is_last_stage:
                    losses.append(output.detach())
                else:
                    sends += self._send(output.detach(), +1)
            else:
                x, output = held.pop(i)
                gradient = None if self.groups.is_last_stage else self._receive(+1, marks)
                start = self.clock.mark()
                self.sync.before_backward(last=i == last)
                output.backward(gradient)
                if not self.groups.is_first_stage:
                    assert x.grad is not None
                    sends += self._send(x.grad, -1)
            del x, output
            # After the last backward FSDP waits for the gradients' reduction, which is counted apart from it.
            end = marks.last_backward if action == self.actions[-1] else self.clock.mark()
            marks.actions.append((action, start, end))
            sends = [(work, tensor) for work, tensor in sends if not work.is_completed()]
        start = self.clock.mark()
        for work, _ in sends:
            work.wait()
        marks.late_waits.append((start, self.clock.mark()))
        return (torch.stack(losses).sum() if losses else None), marks

    def _forward(self, x: Tensor, targets_T: Tensor, is_last: bool, marks: PipelineMarks) -> Tensor:
        output: Tensor = self.stage(x, targets_T if self.groups.is_last_stage else None)
        if not is_last:
            return output

        def note() -> None:
            marks.last_backward = self.clock.mark()

        return _AtEndOfBackward.apply(output, note)

    def _send(self, x: Tensor, offset: int) -> list[tuple[dist.Work, Tensor]]:
        """Start sending to a neighbour stage; the tensor in the result must live until the work is done."""
        if self.groups.is_rehearsal:
            return []  # a fake group never reports that a message was sent
        group = self.groups.pp_forward if offset > 0 else self.groups.pp_backward
        x = x.contiguous()
        work = dist.isend(x, self.groups.neighbour(offset), group=group)
        assert work is not None
        return [(work, x)]

    def _receive(self, offset: int, marks: PipelineMarks) -> Tensor:
        """Activations from the stage before (offset -1) or gradients from the stage after (+1)."""
        group = self.groups.pp_forward if offset < 0 else self.groups.pp_backward
        x = torch.empty(self.boundary_shape, dtype=self.boundary_dtype, device=self.groups.device)
        start = self.clock.mark()
        work = dist.irecv(x, self.groups.neighbour(offset), group=group)
        assert work is not None
        work.wait()
        marks.waits.append((start, self.clock.mark()))
        if self.groups.is_rehearsal:
            x.normal_()  # nothing was sent: with numbers of the usual size, power and clocks are those of a real run
        return x
