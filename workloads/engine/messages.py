"""Messages between pipeline stages: activations to the next stage, gradients to the one before.

Receives are posted one action before the action that needs them, so that a message that is there already costs no
waiting. Stages that follow each other on one rank hand their tensors over without a message.

On GPUs a receive is a kernel that runs until its message is there. Whatever makes the host wait for all kernels, such
as loading another kernel, then waits for another rank; two ranks can wait for each other without end. So `connect` and
`workloads.engine.pipeline.Pipeline.load_kernels` do all that happens once before any message is on its way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.costs.schedule import Action
from workloads.engine.clock import Clock, Mark
from workloads.engine.groups import Groups


@dataclass
class _Arriving:
    tensor: Tensor
    work: dist.Work | None
    """None when the tensor is here already."""


@dataclass
class Messages:
    """Everything that one rank sends and receives in one step."""

    groups: Groups
    clock: Clock
    shape: tuple[int, ...]
    """Of what stages pass on."""
    dtype: torch.dtype
    alone: bool = False
    """Nothing is sent, and what is received is made up."""
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Around each wait for a message."""
    _arriving: dict[tuple[str, int, int], _Arriving] = field(default_factory=dict)
    """By kind, receiving stage and micro-batch."""
    _leaving: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    """A tensor must live until it has been sent."""

    def post(self, action: Action) -> None:
        """Start receiving what ``action`` needs, unless that is here, or on its way, or comes from this rank."""
        kind, stage, source = self._needed(action)
        key = kind, stage, action.microbatch
        if source is None or key in self._arriving or self.groups.rank_of_stage(source) == self.groups.rank:
            return
        x = torch.empty(self.shape, dtype=self.dtype, device=self.groups.device)
        if self.alone:
            # With numbers of the usual size power and clocks are those of a real run.
            self._arriving[key] = _Arriving(x.normal_(), None)
            return
        work = dist.irecv(x, self.groups.rank_of_stage(source), group=self.groups.channel(kind, source, stage))
        assert work is not None
        self._arriving[key] = _Arriving(x, work)

    def take(self, action: Action) -> Tensor | None:
        """What ``action`` needs from another stage, waited for; None where it needs nothing."""
        kind, stage, source = self._needed(action)
        if source is None:
            return None
        self.post(action)
        arriving = self._arriving.pop((kind, stage, action.microbatch))
        if arriving.work is not None:
            start = self.clock.mark()
            arriving.work.wait()
            self.waits.append((start, self.clock.mark()))
        return arriving.tensor

    def give(self, action: Action, x: Tensor) -> None:
        """Send the result of ``action`` to the stage that needs it."""
        stage = self.groups.stage_of(action.chunk)
        kind, target = ("F", stage + 1) if action.kind == "F" else ("B", stage - 1)
        peer = self.groups.rank_of_stage(target)
        if peer == self.groups.rank:
            self._arriving[kind, target, action.microbatch] = _Arriving(x, None)
            return
        if self.alone:
            return
        x = x.contiguous()
        work = dist.isend(x, peer, group=self.groups.channel(kind, stage, target))
        assert work is not None
        self._leaving = [(work, tensor) for work, tensor in self._leaving if not work.is_completed()]
        self._leaving.append((work, x))

    def finish(self) -> None:
        """Wait until everything has left."""
        assert not self._arriving, f"received and not used: {sorted(self._arriving)}"
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()

    def _needed(self, action: Action) -> tuple[str, int, int | None]:
        """(kind, own stage, the stage that sends): what ``action`` needs; None where it needs no message."""
        stage = self.groups.stage_of(action.chunk)
        if action.kind == "W":
            return "B", stage, None
        kind, source = ("F", stage - 1) if action.kind == "F" else ("B", stage + 1)
        return kind, stage, source if 0 <= source < self.groups.experiment.num_stages else None


def connect(groups: Groups) -> None:
    """Send one message on every way between this rank's stages and their neighbours. Collective over the pipeline.

    NCCL connects two ranks with their first message on a way, and their hosts wait for each other. In a step each could
    wait on another way. Here all go from the first stage to the last.
    """
    x = torch.zeros(1, device=groups.device)
    connected = set()
    for stage in range(groups.experiment.num_stages - 1):
        for kind, source, target in (("F", stage, stage + 1), ("B", stage + 1, stage)):
            sender, receiver = groups.rank_of_stage(source), groups.rank_of_stage(target)
            if sender == receiver or (kind, sender, receiver) in connected:
                continue
            connected.add((kind, sender, receiver))
            if groups.rank == sender:
                dist.send(x, receiver, group=groups.channel(kind, source, target))
            elif groups.rank == receiver:
                dist.recv(x, sender, group=groups.channel(kind, source, target))
