"""Messages between pipeline stages: activations to the next stage, gradients to the one before.

Stages that follow each other on one rank hand their tensors over without a message.

On GPUs a message is a kernel on both sides that runs until the other side is there too. It takes multiprocessors and
power from the kernels beside it. So a receive is posted when it is needed: posted one action earlier, two stages of
Llama 8B on H200 were 5 % slower under 1F1B. And whatever makes the host wait for all kernels, such as loading another
kernel, then waits for another rank; two ranks can wait for each other without end. So `connect` and
`workloads.engine.training.pipeline.Pipeline.load_kernels` do all that happens once before any message is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.costs.shape.schedule import Action
from workloads.engine.collectives.groups import Groups
from workloads.engine.training.clock import Clock, Mark


@dataclass
class Messages:
    """Everything that one rank sends and receives in one step."""

    groups: Groups
    clock: Clock
    shape: tuple[int, ...]
    """Of what stages pass on."""
    dtype: torch.dtype
    is_rehearsal: bool = False
    """Nothing is sent, and what is received is made up."""
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Around each wait for a message."""
    _here: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    """From a stage of this rank to another one, by kind, receiving stage and micro-batch."""
    _leaving: list[tuple[int, dist.Work, Tensor]] = field(default_factory=list)
    """Micro-batch and what is sent of it. A tensor must live until it has been sent."""

    def take(self, action: Action) -> Tensor | None:
        """What ``action`` needs from another stage, waited for; None where it needs nothing."""
        kind, stage, source = self._needed(action)
        if source is None:
            return None
        peer = self.groups.rank_of_stage(source)
        if peer == self.groups.rank:
            return self._here.pop((kind, stage, action.microbatch))
        self._let_go()
        x = torch.empty(self.shape, dtype=self.dtype, device=self.groups.device)
        start = self.clock.mark()
        if not self.is_rehearsal:
            work = dist.irecv(x, peer, group=self.groups.channel(kind, source, stage))
            assert work is not None
            work.wait()
            self._let_go(arrived=action.microbatch)
        self.waits.append((start, self.clock.mark()))
        # With numbers of the usual size power and clocks are those of a real run.
        return x.normal_() if self.is_rehearsal else x

    def give(self, action: Action, x: Tensor) -> None:
        """Send the result of ``action`` to the stage that needs it."""
        stage = self.groups.stage_of(action.chunk)
        kind, target = ("F", stage + 1) if action.kind == "F" else ("B", stage - 1)
        peer = self.groups.rank_of_stage(target)
        if peer == self.groups.rank:
            self._here[kind, target, action.microbatch] = x
            return
        if self.is_rehearsal:
            return
        x = x.contiguous()
        work = dist.isend(x, peer, group=self.groups.channel(kind, stage, target))
        assert work is not None
        self._leaving.append((action.microbatch, work, x))

    def _let_go(self, arrived: int | None = None) -> None:
        """Free what has left, and all that was sent of micro-batch ``arrived``, of which something came back.

        That was made from what this rank sent before, so the device waits for nothing. A host far ahead of its device
        sees no message leave: without this it held ten of them, 3 % of the peak, in a step of Llama 1B.
        """
        leaving, self._leaving = self._leaving, []
        for microbatch, work, x in leaving:
            if microbatch == arrived or work.is_completed():
                work.wait()  # it waits for nothing; the process group lets go of the tensor
            else:
                self._leaving.append((microbatch, work, x))

    def finish(self) -> None:
        """Wait until everything has left."""
        assert not self._here, f"made and not used: {sorted(self._here)}"
        for _, work, _ in self._leaving:
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
