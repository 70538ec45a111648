"""Trains two layouts on this machine and compares them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workloads.parity.compare import HIGHER, Difference, compare, first_that_differs, noise_of
from workloads.parity.order import Computed, Phase, in_order
from workloads.parity.processes import train
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class ParityComparison:
    left: Experiment
    right: Experiment
    computed: tuple[Sequence[Computed], Sequence[Computed]]
    """Tensors of the left and of the right layout."""
    differences: list[Difference]
    """Differences of all tensors, in the order of the computation."""

    @property
    def first(self) -> Difference | None:
        """First tensor that differs by more than rounding explains; None if all agree."""
        return first_that_differs(self.differences)

    def by_phase(self) -> dict[tuple[int | None, Phase], list[Difference]]:
        groups: dict[tuple[int | None, Phase], list[Difference]] = {}
        for difference in self.differences:
            groups.setdefault(difference.computed.key[:2], []).append(difference)
        return groups

    def numbers(self) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
        """Yields, for each step, the (left, right) losses and the (left, right) gradient norms."""
        left, right = ({of.key: of.whole.value for of in side} for side in self.computed)
        for step in sorted({key[0] for key in right if key[0] is not None}):
            loss: tuple[int, Phase, str] = (step, "loss", "loss")
            norm: tuple[int, Phase, str] = (step, "gradient norm", "gradient norm")
            yield (left[loss].item(), right[loss].item()), (left[norm].item(), right[norm].item())


def compare_layouts(left: Experiment, right: Experiment, steps: int, device: str) -> ParityComparison:
    """Train each layout for ``steps`` steps on ``device`` (``cpu`` or ``cuda``), one after the other.

    Raises `workloads.measuring.processes.RankFailed` if a rank fails.
    """
    noise = None
    left_values = in_order(left, train(left, steps, device))
    if (precision := HIGHER.get(left.precision)) is not None:
        higher = left.replace(precision=precision, attention="auto")
        noise = noise_of(left_values, in_order(higher, train(higher, steps, device)))
    right_values = in_order(right, train(right, steps, device))
    return ParityComparison(left, right, (left_values, right_values), compare(left_values, right_values, right, noise))
