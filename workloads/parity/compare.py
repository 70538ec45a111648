"""Decides whether two layouts agree, and which tensor is the first that differs by more than rounding explains.

**fp64.** Rounding in other orders moves a result by about ``u * sqrt(n)``, with the unit roundoff ``u = 2^-53`` and n
roundings on the way, since rounding errors are of both signs (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019). Here
``n`` is the length of the longest sum (hidden size, feed-forward columns, vocabulary, tokens of a step) times the
number of consecutive products (7 a layer forward, twice that backward). `SAFETY` is larger than any factor seen with
correct layouts.

**fp32, bf16, fp16, fp8.** The left layout is trained a second time in the next higher precision. The distance between
its two runs is the noise of each tensor: a correct layout is about as far away (TTrace, arXiv:2506.09280, estimates the
noise by a perturbation). Allowed is `NOISE_FACTOR` times the noise, and at least one rounding of the largest element. A
loss and a gradient norm are single numbers, which may be close by chance: they are allowed at least the tolerance of
`results.statistics.agreement`.

**Updates.** AdamW's first update is nearly the sign of the gradient. If gradients may differ by e, about a share e of
their entries is smaller than that and may get the other sign: of n entries ``e n``, plus for chance three times the
square root of that and one more. Each of them adds ``4 / n`` to the relative mean square.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from results.statistics.agreement import TOLERANCES
from workloads.parity.activations import differing, microbatch_of
from workloads.parity.order import Computed, Key, difference
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import Precision

UNIT_ROUNDOFF = {
    "fp8_tensorwise": 2.0**-4,
    "fp8_rowwise": 2.0**-4,
    "fp8_blockwise": 2.0**-4,
    "bf16": 2.0**-8,
    "fp16": 2.0**-11,
    "fp32": 2.0**-24,
    "fp64": 2.0**-53,
}
HIGHER: Mapping[Precision, Precision] = {
    "fp8_tensorwise": "bf16",
    "fp8_rowwise": "bf16",
    "fp8_blockwise": "bf16",
    "bf16": "fp32",
    "fp16": "fp32",
    "fp32": "fp64",
}
SAFETY = 16.0
NOISE_FACTOR = 8.0
RARE_FACTOR = 4.0
"""Additional factor on the allowed difference of later steps in fp32. An entry that an update moves the other way is so
rare there that the left layout may have none, and it affects everything that follows. (In bf16 there are always some.)
"""
MOST_OF_UPDATE = 0.9
"""Largest allowed difference of an update; a missing update differs by 1."""
LIKELY = 1e-4
"""Expected numbers of flipped entries up to this count as zero."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Comparison of one tensor of both layouts."""

    computed: Computed
    """The tensor as the right layout computed it."""
    relative: float
    allowed: float
    sequence: int | None = None
    microbatch: int | None = None
    """For an activation that differs: the first such sequence of the global batch, and the right layout's
    micro-batch."""

    @property
    def differs(self) -> bool:
        return not self.relative <= self.allowed


def compare(
    left: Sequence[Computed], right: Sequence[Computed], experiment: Experiment, noise: Mapping[Key, float] | None
) -> list[Difference]:
    """Compare every tensor that both layouts have, in the order of the computation. ``experiment``: the right layout.

    ``noise``: noise of each tensor, by `Computed.key`; None in fp64.
    """
    expected = {of.key: of for of in left}
    differences = []
    for of in right:
        if (other := expected.get(of.key)) is None:
            continue
        allowed = allowed_difference(experiment, of, noise)
        relative, sequence = difference(of, other), None
        if of.phase == "forward" and relative > allowed:
            sequence = differing(of.whole.value, other.whole.value, allowed)
        microbatch = None if sequence is None else microbatch_of(experiment, sequence)
        differences.append(Difference(of, relative, allowed, sequence, microbatch))
    return differences


def noise_of(values: Iterable[Computed], higher: Iterable[Computed]) -> dict[Key, float]:
    """Relative difference of each tensor from the same layout's in a higher precision, by `Computed.key`."""
    expected = {of.key: of for of in higher}
    return {of.key: difference(of, expected[of.key]) for of in values if of.key in expected}


def allowed_difference(experiment: Experiment, computed: Computed, noise: Mapping[Key, float] | None) -> float:
    """Largest relative difference that rounding explains. ``noise`` as in `compare`."""
    if computed.phase == "initial weights":
        return 0.0  # drawn from the seed, not computed
    if computed.phase == "update":
        gradient = _allowed(experiment, (computed.step, "backward", computed.name), noise)
        count = computed.whole.value.numel()
        flips = gradient * count
        if flips > LIKELY:
            flips += 3 * math.sqrt(flips) + 1
        noisy = NOISE_FACTOR * noise[computed.key] if noise is not None else 0.0
        return min(max(2 * math.sqrt(flips / count), noisy), MOST_OF_UPDATE)
    return _allowed(experiment, computed.key, noise)


def _allowed(experiment: Experiment, key: Key, noise: Mapping[Key, float] | None) -> float:
    unit, phase = UNIT_ROUNDOFF[experiment.precision], key[1]
    if noise is None:
        return SAFETY * unit * math.sqrt(roundings(experiment))
    loss, grad_norm = TOLERANCES[experiment.precision]
    least = loss if phase == "loss" else grad_norm if phase == "gradient norm" else unit
    rare = RARE_FACTOR if experiment.precision == "fp32" and key[0] else 1.0
    return max(rare * NOISE_FACTOR * noise[key], least)


def roundings(experiment: Experiment) -> int:
    """Length of the longest sum times the number of consecutive products in a step's forward and backward."""
    model = experiment.model
    longest = max(model.hidden_size, model.ffn_hidden_size, model.vocab_size, experiment.tokens_per_step)
    return longest * 3 * (7 * model.num_layers + 1)


def first_that_differs(differences: Iterable[Difference]) -> Difference | None:
    return next((candidate for candidate in differences if candidate.differs), None)
