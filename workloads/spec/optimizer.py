"""What an optimizer keeps for each parameter, what an update of it moves, and the bytes of what a step keeps.

An update reads and writes each tensor once, after a pass for the gradient norm. No torch here.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from workloads.spec.experiment_values import OptimizerName, Precision, StoredIn


class HowUpdated(Protocol):
    """Fields of an experiment that determine its `OptimizerSpec`."""

    @property
    def precision(self) -> Precision: ...
    @property
    def grad_reduce(self) -> StoredIn: ...
    @property
    def optimizer(self) -> OptimizerName: ...
    @property
    def optimizer_states(self) -> StoredIn: ...
    @property
    def master_weights(self) -> StoredIn: ...


class OptimizerSpec(NamedTuple):
    """An optimizer with the formats of an experiment. Its state is sharded like the master weights."""

    name: str
    moments: int
    """Numbers that it keeps for each parameter between two updates."""
    moment_bytes: int
    """Bytes of each of them."""
    master_bytes: int
    """Bytes of a master weight, and of a reduced gradient of it."""
    whole_matrices: bool
    """Whether an update needs the gradient of a whole matrix, of which a rank may hold a shard."""
    product_flops: int
    """FLOPs of an update's matrix products for each parameter."""

    def state_bytes(self, params: int) -> int:
        """Bytes of the state of ``params`` parameters."""
        return self.moments * self.moment_bytes * params

    @property
    def traffic_bytes(self) -> int:
        """Bytes that norm, clipping and update of one parameter read and write: the norm reads the gradient, clipping
        reads and writes it, and the update reads gradient, weight and moments and writes the last two."""
        return 4 * self.master_bytes + 2 * (self.master_bytes + self.moments * self.moment_bytes)


def optimizer_of(e: HowUpdated) -> OptimizerSpec:
    """The optimizer of an experiment."""
    moments, whole_matrices, product_flops = _KINDS[e.optimizer]
    moment = 2 if e.optimizer_states == "bf16" else _update_bytes(e)
    return OptimizerSpec(e.optimizer, moments, moment, master_bytes(e), whole_matrices, product_flops)


_KINDS: dict[str, tuple[int, bool, int]] = {"adamw": (2, False, 0)}
"""(moments, whether an update needs whole matrices, FLOPs of its products for each parameter) by optimizer. AdamW keeps
the means of the gradients and of their squares (arXiv:1711.05101)."""


def master_bytes(e: HowUpdated) -> int:
    """Bytes of a master weight, and of its reduced gradient, which FSDP casts to the dtype of the weight."""
    return 2 if e.master_weights == "bf16" else _update_bytes(e)


def reduced_bytes(e: HowUpdated) -> int:
    """Bytes of a gradient in the sums over micro-batches that are not sharded, and in the messages that reduce it."""
    return 2 if e.grad_reduce == "bf16" else _update_bytes(e)


def _update_bytes(e: HowUpdated) -> int:
    """Bytes of a number in the arithmetic of an update."""
    return 8 if e.precision == "fp64" else 4
