"""How far layouts may be from each other, by hand and against layouts that are right or wrong."""

from __future__ import annotations

import math
from functools import partial
from itertools import product

import pytest
import torch

from results.statistics.agreement import TOLERANCES
from tests.planted.faults_of_ranks import FAULTS
from tests.planted.plant import with_fault
from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.layouts import larger
from tests.workloads.engine.parity import experiment
from workloads.parity.compare import (
    HIGHER,
    NOISE_FACTOR,
    Difference,
    allowed_difference,
    compare,
    first_that_differs,
    noise_of,
    roundings,
)
from workloads.parity.order import Computed, Phase, in_order
from workloads.parity.shards import Whole
from workloads.parity.training import train_rank
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import Precision

ONE = experiment()


def computed(phase: Phase, value: torch.Tensor, name: str = "w", spread: float = 0.0) -> Computed:
    return Computed(0, phase, name, Whole(value, spread))


def test_fp64_by_hand() -> None:
    # The longest sum: 8 sequences of 16 tokens; 7 products in each of 3 layers and the head, forward and twice back.
    assert roundings(ONE) == 128 * 3 * 22
    of = computed("backward", torch.ones(4))
    assert allowed_difference(ONE, of, None) == pytest.approx(16 * 2.0**-53 * math.sqrt(8448))
    update = allowed_difference(ONE, computed("update", torch.ones(4)), None)
    assert update == pytest.approx(2 * math.sqrt(allowed_difference(ONE, of, None)))
    assert allowed_difference(ONE, computed("initial weights", torch.ones(4)), None) == 0.0


def test_noise_gives_the_others() -> None:
    case = ONE.replace(precision="bf16")
    of = computed("backward", torch.ones(1000))
    noise = {of.key: 0.01, (0, "update", "w"): 0.001}
    assert allowed_difference(case, of, noise) == NOISE_FACTOR * 0.01
    assert allowed_difference(case, of, {of.key: 0.0}) == 2.0**-8
    later = Computed(1, "backward", "w", of.whole)
    assert allowed_difference(case, later, {later.key: 0.01}) == NOISE_FACTOR * 0.01
    fp32 = ONE.replace(precision="fp32")
    assert allowed_difference(fp32, of, {of.key: 1e-6}) == pytest.approx(NOISE_FACTOR * 1e-6)
    assert allowed_difference(fp32, later, {later.key: 1e-6}) == pytest.approx(4 * NOISE_FACTOR * 1e-6)
    loss = computed("loss", torch.ones(()), "loss")
    assert allowed_difference(case, loss, {loss.key: 0.0}) == TOLERANCES["bf16"][0]
    flips = NOISE_FACTOR * 0.01 * 1000
    wanted = 2 * math.sqrt((flips + 3 * math.sqrt(flips) + 1) / 1000)
    assert allowed_difference(case, computed("update", torch.ones(1000)), noise) == pytest.approx(wanted)


def test_an_update_that_was_not_made_always_differs() -> None:
    """The noise of its gradient is never so large that it would be allowed; of the smallest parameters, too."""
    case = ONE.replace(precision="bf16")
    for count in (8, 32, 4096):
        of = computed("update", torch.ones(count))
        assert allowed_difference(case, of, {(0, "backward", "w"): 0.02, of.key: 0.3}) < 1.0


def test_the_first_that_differs_and_where() -> None:
    left = [computed("forward", torch.ones(8, 16, 4)), computed("loss", torch.tensor(1.0), "loss")]
    value = torch.ones(8, 16, 4)
    value[5, 3, 2] += 1e-3
    right = [computed("forward", value), computed("loss", torch.tensor(2.0), "loss")]
    case = experiment(dp=2, micro_batch_size=2)
    found = first_that_differs(compare(left, right, case, None))
    assert found is not None and found.sequence == 5
    assert found.microbatch == 1, "2 ranks take 2 sequences each: 4 to 7 are the second micro-batch"
    assert found.relative == pytest.approx(1e-3, rel=1e-3)
    assert first_that_differs(compare(left, left, case, None)) is None


def test_copies_within_a_layout_count() -> None:
    left, right = computed("backward", torch.ones(4)), computed("backward", torch.ones(4), spread=0.5)
    (found,) = compare([left], [right], ONE, None)
    assert found.differs and found.relative == 0.5


def test_a_number_that_is_none_differs() -> None:
    (found,) = compare([computed("loss", torch.ones(()))], [computed("loss", torch.tensor(math.nan))], ONE, None)
    assert found.differs


BODY = partial(train_rank, with_activations=True)
LAYOUTS = [
    *({"dp": 2, "zero_stage": zero, "micro_batch_size": 2} for zero in (0, 3)),
    {"tp": 2, "micro_batch_size": 4, "recompute": "full"},
    {"tp": 2, "micro_batch_size": 4, "sequence_parallel": False, "qk_norm": True},
    *({"cp": 2, "cp_kind": kind, "micro_batch_size": 4} for kind in ("ring", "allgather", "ulysses")),
    {"pp": 2, "pp_schedule": "dualpipe_v", "virtual_stages": 2, "micro_batch_size": 2, "tie": True},
    {"pp": 2, "dp": 2, "zero_stage": 2, "recompute": "selective"},
]


def compared(pool: Pool, case: Experiment, precision: Precision) -> list[Difference]:
    def alone(precision: Precision) -> list[Computed]:
        one = Experiment.canonical(
            model=case.model, global_batch_size=case.global_batch_size, seq_len=case.seq_len, precision=precision
        )
        return in_order(one, pool.run(BODY, 1, one, 2))

    case = case.replace(precision=precision)
    left = alone(precision)
    noise = noise_of(left, alone(HIGHER[precision])) if precision in HIGHER else None
    return compare(left, in_order(case, pool.run(BODY, case.world_size, case, 2)), case, noise)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision"),
    sampled(
        list(product(LAYOUTS, ("fp64", "fp32", "bf16"))),
        4,
        seconds=4,
        kinds=lambda case: [case[1], *(axis for axis in ("dp", "tp", "cp", "pp") if axis in case[0])],
    ),
    ids=str,
)
def test_right_layouts_agree(gloo_pool: Pool, layout: dict, precision: Precision) -> None:
    differences = compared(gloo_pool, experiment(**layout), precision)
    assert len(differences) > 150
    assert first_that_differs(differences) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(larger(3, 8, 3, seed=11), 1, seconds=6), ids=lambda case: case.id)
def test_right_layouts_of_several_axes_agree(gloo_pool: Pool, case: Experiment) -> None:
    assert first_that_differs(compared(gloo_pool, case, "fp64")) is None


WRONG = ("loss_by_own_tokens", "norms_not_summed", "ring_own_dq", "shard_not_updated")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), sampled(list(product(WRONG, ("fp32", "bf16"))), 3, seconds=4))
def test_wrong_layouts_differ_in_low_precision_too(gloo_pool: Pool, name: str, precision: Precision) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == name)
    case = experiment(**fault.layout).replace(precision=precision)
    one = Experiment.canonical(
        model=case.model, global_batch_size=case.global_batch_size, seq_len=case.seq_len, precision=precision
    )
    left = in_order(one, gloo_pool.run(BODY, 1, one, 1))
    higher = one.replace(precision=HIGHER[precision])
    noise = noise_of(left, in_order(higher, gloo_pool.run(BODY, 1, higher, 1)))
    right = in_order(case, gloo_pool.run(with_fault, case.world_size, fault, BODY, case, 1))
    assert first_that_differs(compare(left, right, case, noise)) is not None
