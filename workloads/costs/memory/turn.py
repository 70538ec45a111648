"""What one action of one micro-batch is: the moment of a step in which a pipeline rank runs it.

Symbols are those of `workloads.costs.memory.estimate`.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.events import Live
from workloads.costs.memory.sizes import Part, Shared
from workloads.spec.experiment import Experiment


class Turn(NamedTuple):
    """The action of one micro-batch."""

    in_flight: int
    """Number of micro-batches held when a backward starts."""
    prior: int
    """Bytes of gradients left by earlier micro-batches."""
    last: bool
    """Whether this is the last backward of the step, which reduces gradients at the latest."""
    forward_follows: bool
    """Whether another micro-batch's forward follows."""
    reduces: bool
    """Whether gradients are reduced in it."""
    earlier: bool
    """Whether a forward before this micro-batch's still waits for its backward in FSDP's order of units, or came before
    a backward that was not the last: the first unit's backward gathers the last unit of that forward ahead."""
    own_deferred: int = 0
    """Bytes this micro-batch saves for its deferred weight-gradient pass; 0 if the backward is not split."""
    first_half: bool = False
    """Whether this is an input-gradient pass only: blocks get no weight gradients in it."""
    second_half: bool = False
    """Whether this is a weight-gradient pass: the head, whose gradient exists, stays gathered until its reduction at
    the end."""
    flat: int | None = None
    """What `pending` is in a rank with several chunks; None in others."""

    def pending(self, x: Shared, part: Part) -> int:
        """Bytes of FSDP's flat reduce-scatter buffer of the previous micro-batch's last unit, freed by the next
        reduction. Of split backwards in a rank's only chunk that unit is a block, or an end before the first
        weight-gradient pass."""
        if self.flat is not None:
            return self.flat
        if not self.prior or x.unsharded:
            return 0
        if x.splits and x.chunks == 1:
            return x.left(part.first_block if self.prior >= part.accumulated else part.head or part.first)
        return x.left(part.first)

    def start(self, x: Shared, part: Part, always: Live) -> Live:
        """What exists when a backward starts. ``always``: what exists all the time."""
        return {
            **always,
            "others": (self.in_flight - 1) * (part.saved + part.packed + part.of_head),
            "saved": part.saved,
            "documents": part.packed,
            "weights": 0 if x.zero3 else part.whole,
            "gradients": self.prior,
            "flat": self.pending(x, part),
        }

    def adapted(self, e: Experiment, x: Shared) -> Shared:
        """``x`` for this turn: a first backward makes the sums of gradients, or every one does; blocks have none in an
        input-gradient pass. Until the last backward, gradients of replicas stay in the dtype of reductions."""
        if not self.last and (x.sums, x.sums_experts) != (x.g, x.g_experts):
            x = x._replace(g=x.sums, g_experts=x.sums_experts)
        if not (x.adds or x.experts_add) or (self.prior and not x.only_sums):
            return x
        made = Shared.of(e, makes_sums=True)
        if self.prior:
            made = made.of_second_sums()
        if self.first_half:
            return made._replace(w_blocks=x.w_blocks, w_experts=x.w_experts, sizes=x.sizes)
        return made

    def finished(self, x: Shared, rest: int, experts: int) -> int:
        """Bytes by which sums of earlier micro-batches' gradients grow (below 0: shrink) when the last backward has
        reduced those of ``rest`` and ``experts`` elements; 0 in other backwards."""
        return x.shard(rest, experts) - x.summed(rest, experts) if self.last and self.prior else 0

    def first_gradient(self, x: Shared, part: Part) -> int:
        """Bytes of the head's gradient after its backward, unless added to an earlier one."""
        if self.prior:
            return 0
        return x.g * part.head // x.shards if self.reduces else x.r * part.head

    def gradients(self, x: Shared, rest: int, experts: int) -> int:
        """Bytes of gradients when units of ``rest`` elements and ``experts`` elements of experts have theirs."""
        shard, unsharded = x.shard(rest, experts), x.r * (rest + experts)
        gradients = self.prior or (shard if self.reduces else unsharded)
        return gradients + (shard - x.summed(rest, experts) if self.last and (self.prior or x.unsharded) else 0)

    def scaled(self, x: Shared) -> int:
        """Bytes per element of what one shard alone takes beside the flat copy: an accumulated gradient, which is
        counted with others, makes room for the scaled copy or for the gradient."""
        return max(x.r, x.g) if x.unsharded and self.prior else x.scaled
