"""Messages between pipeline stages: activations to the next stage, gradients to the previous one.

Consecutive stages on the same rank pass their tensors on without a message.

On GPUs a message is a kernel on both sides that runs until the other side has started it too. It takes multiprocessors
and power from concurrent kernels. So a receive is posted only when it is needed: posted one action earlier, two stages
of Llama 8B on H200 were 5 % slower under 1F1B. And whatever makes the host wait for all kernels, such as loading
another kernel, then waits for another rank; two ranks can deadlock. So `connect` and
`workloads.engine.training.pipeline.Pipeline.load_kernels` do all one-time work before any message is sent.
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
    """Sends and receives of one rank in one step."""

    groups: Groups
    clock: Clock
    shape: tuple[int, ...]
    """Shape of the tensors that stages pass on."""
    dtype: torch.dtype
    is_rehearsal: bool = False
    """Nothing is sent, and received tensors are random numbers."""
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)
    """Marks around each wait for a message."""
    _local: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    """Tensors passed between two stages of this rank, by kind, receiving stage and micro-batch."""
    _pending_sends: list[tuple[int, dist.Work, Tensor]] = field(default_factory=list)
    """Pending sends: micro-batch, work and tensor. A tensor must live until it has been sent."""
    _rehearsed_sends: list[Tensor] = field(default_factory=list)
    """Tensors that a rehearsal would have sent since it has last taken a message, as if all had arrived by then."""

    def take(self, action: Action) -> Tensor | None:
        """Receive the tensor that ``action`` needs from another stage, and wait for it; None if it needs none."""
        kind, stage, source = self._needed(action)
        if action.kind != "W":
            self._release_sends()
            self._rehearsed_sends.clear()
        if source is None:
            return None
        peer = self.groups.rank_of_stage(source)
        if peer == self.groups.rank:
            return self._local.pop((kind, stage, action.microbatch))
        x = torch.empty(self.shape, dtype=self.dtype, device=self.groups.device)
        start = self.clock.mark()
        if not self.is_rehearsal:
            work = dist.irecv(x, peer, group=self.groups.channel(kind, source, stage))
            assert work is not None
            work.wait()
            self._release_sends(arrived=action.microbatch)
        self.waits.append((start, self.clock.mark()))
        # With numbers of the usual size, power and clocks are as in a real run.
        return x.normal_() if self.is_rehearsal else x

    def give(self, action: Action, x: Tensor) -> None:
        """Send the result of ``action`` to the stage that needs it."""
        stage = self.groups.stage_of(action.chunk)
        kind, target = ("F", stage + 1) if action.kind == "F" else ("B", stage - 1)
        peer = self.groups.rank_of_stage(target)
        if peer == self.groups.rank:
            self._local[kind, target, action.microbatch] = x
            return
        x = x.contiguous()
        if self.is_rehearsal:
            self._rehearsed_sends.append(x)
            return
        work = dist.isend(x, peer, group=self.groups.channel(kind, stage, target))
        assert work is not None
        self._pending_sends.append((action.microbatch, work, x))

    def _release_sends(self, arrived: int | None = None) -> None:
        """Release send buffers: completed sends, and every send of micro-batch ``arrived``, whose reply proves it was
        received.

        Waiting for those costs the device nothing. A host far ahead of its device sees no send complete: without this
        release it held ten of them, 3 % of the peak, in a step of Llama 1B. A host that captures is as far ahead, and
        may not ask whether a send has completed.
        """
        pending, self._pending_sends = self._pending_sends, []
        for microbatch, work, x in pending:
            if microbatch == arrived or (not self.clock.captures and work.is_completed()):
                work.wait()  # returns at once; the process group then releases the tensor
            else:
                self._pending_sends.append((microbatch, work, x))

    def finish(self) -> None:
        """Wait until all sends have completed."""
        assert not self._local, f"passed to a stage of this rank but not used: {sorted(self._local)}"
        for _, work, _ in self._pending_sends:
            work.wait()
        self._pending_sends.clear()
        self._rehearsed_sends.clear()

    def _needed(self, action: Action) -> tuple[str, int, int | None]:
        """(kind, stage of the action, sending stage) of the tensor that ``action`` needs; the sender is None if it
        needs none."""
        stage = self.groups.stage_of(action.chunk)
        if action.kind == "W":
            return "B", stage, None
        kind, source = ("F", stage - 1) if action.kind == "F" else ("B", stage + 1)
        return kind, stage, source if 0 <= source < self.groups.experiment.num_stages else None


def connect(groups: Groups) -> None:
    """Send one message in each direction between this rank's stages and their neighbours. Collective over the pipeline.

    NCCL connects two ranks with the first message in a direction, and their hosts wait for each other. Within a step,
    each could wait for a different connection. Here all ranks connect in the order of the stages.
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
