"""What an optimizer keeps for each parameter, what an update of it moves, and the bytes of what a step keeps.

Optimizers may treat matrices apart from other parameters: Muon those of the layers (Keller Jordan,
https://kellerjordan.github.io/posts/muon/; arXiv:2502.16982), Adafactor all of them (arXiv:1804.04235). No torch here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

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
    """Numbers that it keeps for each parameter between two updates, except in what it takes apart."""
    apart: Apart
    """Which parameters it treats apart."""
    apart_moments: int
    """Numbers that it keeps for each of these."""
    keeps_lines: bool
    """Whether it keeps a number for each row and each column of a matrix that it treats apart, and one for all."""
    moment_bytes: int
    """Bytes of each of them."""
    master_bytes: int
    """Bytes of a master weight, and of a reduced gradient of it."""
    passes: int
    """Number of reads and writes of a master-sized value for each parameter."""
    moment_passes: int
    """The same of its moments."""
    product_bytes: int
    """Bytes of a number in its matrix products; 0 without any."""

    @property
    def whole_matrices(self) -> bool:
        """Whether an update needs whole matrices, of which a rank may hold a shard."""
        return self.product_bytes > 0

    def state_bytes(self, params: int, elements: int = 0, lines: int = 0) -> int:
        """Bytes of the state of ``params`` parameters, of which ``elements`` are in matrices that it treats apart, with
        ``lines`` rows and columns."""
        numbers = self.moments * (params - elements) + self.apart_moments * elements
        return self.moment_bytes * (numbers + (lines if self.keeps_lines else 0))

    @property
    def least_moments(self) -> int:
        """Fewest numbers that it keeps for a parameter."""
        return self.moments if self.apart == "none" else min(self.moments, self.apart_moments)

    @property
    def traffic_bytes(self) -> int:
        """Bytes that norm, clipping and update of one parameter read and write, except in messages."""
        return self.passes * self.master_bytes + self.moment_passes * self.moment_bytes + 8 * self.product_bytes


Apart = Literal["none", "hidden", "matrices"]
"""Parameters that an optimizer treats apart: none, the matrices of the layers (hidden), or all matrices."""


class _Kind(NamedTuple):
    moments: int
    apart: Apart
    apart_moments: int
    keeps_lines: bool
    passes: int
    moment_passes: int


_KINDS: dict[str, _Kind] = {
    "adamw": _Kind(2, "none", 0, False, 6, 4),
    "sgd": _Kind(1, "none", 0, False, 6, 2),
    "adafactor": _Kind(1, "matrices", 0, True, 22, 0),
    "muon": _Kind(2, "hidden", 1, False, 11, 3),
}
"""AdamW keeps the means of the gradients and of their squares (arXiv:1711.05101); SGD a momentum; Adafactor the mean
square of each row and column of a matrix, and of each element of a vector; Muon a momentum, and AdamW's moments of what
is no matrix of a layer.

Every norm reads the gradient, and clipping reads and writes it: 3 passes. AdamW and SGD read gradient, weight and
moments once and write the last two. Muon writes the momentum (2 reads, 1 write), the direction into the gradient (2
reads, 1 write) and the weight twice (2 reads, 2 writes); and 8 passes in the format of its products: into and out of
messages, and what reads and writes them. They are counted as if all parameters were matrices of layers. Adafactor reads
the gradient for rows and for columns and the weight for its size (3), makes the mean squares (5), the update (3), its
norm (1), its scale (2), and updates the weight (5)."""


def optimizer_of(e: HowUpdated) -> OptimizerSpec:
    """The optimizer of an experiment."""
    kind = _KINDS[e.optimizer]
    number = _update_bytes(e)
    return OptimizerSpec(
        name=e.optimizer,
        moments=kind.moments,
        apart=kind.apart,
        apart_moments=kind.apart_moments,
        keeps_lines=kind.keeps_lines,
        moment_bytes=2 if e.optimizer_states == "bf16" else number,
        master_bytes=master_bytes(e),
        passes=kind.passes,
        moment_passes=kind.moment_passes,
        product_bytes=(8 if e.precision == "fp64" else 2) if e.optimizer == "muon" else 0,
    )


def master_bytes(e: HowUpdated) -> int:
    """Bytes of a master weight, and of its reduced gradient, which FSDP casts to the dtype of the weight."""
    return 2 if e.master_weights == "bf16" else _update_bytes(e)


def reduced_bytes(e: HowUpdated) -> int:
    """Bytes of a gradient in the sums over micro-batches that are not sharded, and in the messages that reduce it."""
    return 2 if e.grad_reduce == "bf16" else _update_bytes(e)


def _update_bytes(e: HowUpdated) -> int:
    """Bytes of a number in the arithmetic of an update."""
    return 8 if e.precision == "fp64" else 4
