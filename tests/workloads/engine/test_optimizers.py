"""Every optimizer computes on every layout what it computes on the whole matrices of one process, in float64."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any, get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.optimizer_reference import optimizer_for, orthogonalised
from tests.workloads.engine.parity import check, experiment, experts
from tests.workloads.engine.test_adamw import ReadsOnHost
from workloads.engine.collectives.groups import make_groups
from workloads.engine.training.build import build, choose_attention
from workloads.engine.update_ops import newton_schulz as iterations
from workloads.engine.update_ops.newton_schulz import newton_schulz
from workloads.measuring.step import _batches, _finish, run_step
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import OptimizerName

CLIP_AT = 0.3
LAYOUTS: list[dict[str, Any]] = [
    {},
    *({"dp": 2, "zero_stage": stage} for stage in range(4)),
    {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2},
    {"tp": 2},
    {"tp": 2, "latent": 16},
    {"pp": 2, "tie": True},
    {"cp": 2, "zero_stage": 3},
    {"dp": 2, "tp": 2, "zero_stage": 3, "qk_norm": True},
    {"dp": 2, "tp": 2, "pp": 2, "zero_stage": 1},
    {"tp": 2, "num_kv_heads": 1, "qk_norm": True},
    {"dp": 2, "tp": 2, "num_kv_heads": 1, "zero_stage": 3},
    {"dp_replicate": 2, "tp": 4, "dp_shard": 1, "zero_stage": 0},
    {"moe": experts()},
    {"dp": 2, "ep": 2, "zero_stage": 1, "moe": experts()},
    {"dp": 2, "zero_stage": 3, "moe": experts()},
    {"dp": 4, "ep": 2, "zero_stage": 3, "moe": experts()},
    {"dp": 2, "ep": 2, "zero_stage": 0, "moe": experts()},
    {"dp": 2, "tp": 2, "ep": 2, "etp": 2, "zero_stage": 2, "moe": experts()},
]


def case(layout: dict[str, Any], optimizer: str) -> Experiment:
    return experiment(**layout, optimizer=optimizer)


def kinds_of(value: tuple[dict[str, Any], str]) -> list[str]:
    layout, optimizer = value
    return [optimizer, *(name for name in ("tp", "pp", "cp", "ep", "moe", "num_kv_heads") if name in layout)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "optimizer"),
    sampled(list(product(LAYOUTS, ["sgd", "adafactor", "muon"])), 9, kinds=kinds_of),
    ids=str,
)
def test_layouts_equal_one_process(gloo_pool: Pool, layout: dict[str, Any], optimizer: str) -> None:
    check(gloo_pool, case(layout, optimizer), clip_at=CLIP_AT, counts=True)


KINDS = [
    (layers, tp, optimizer)
    for layers, tp in (("gate_of_heads", 1), ("gate_of_shared_experts", 1), ("squared_relu", 1), ("biases", 4))
    for optimizer in ("adafactor", "muon")
]


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "tp", "optimizer"), sampled(KINDS, 3, kinds=lambda case: (case[0], case[2])))
def test_kinds_of_layers_equal_one_process(gloo_pool: Pool, layers: str, tp: int, optimizer: str) -> None:
    layout = {"dp": 2, "tp": tp, "zero_stage": 3, "layers": layers}
    check(gloo_pool, case(layout, optimizer), clip_at=CLIP_AT, counts=True)


RATES = {"adamw": 3e-3, "muon": 3e-3, "adafactor": 0.1, "sgd": 0.2}
"""Adafactor's is relative to the size of a weight, about 0.02; SGD's to that of a clipped gradient."""


def losses(rank: int, optimizer: str) -> list[float]:
    """Losses of 8 steps on the same sequences at a rate at which a small model learns."""
    e = experiment(dp=2, zero_stage=1, optimizer=optimizer).replace(precision="fp32")
    choose_attention(e)
    engine = build(e, make_groups(e, rank, torch.device("cpu")), lambda _: RATES[optimizer])
    found = []
    for step in range(8):
        pending = run_step(engine, step, _batches(engine, 0), is_warmup=False)
        record = _finish(engine, pending)
        assert record.loss is not None
        found.append(record.loss)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_a_model_learns_its_batch(gloo_pool: Pool, optimizer: str) -> None:
    """With every optimizer the loss falls at every step after the first."""
    ranks = gloo_pool.run(losses, 2, optimizer)
    assert ranks[0] == ranks[1]
    assert all(later < earlier for earlier, later in pairwise(ranks[0])), ranks[0]
    assert ranks[0][-1] < ranks[0][0] - 0.05, ranks[0]


def reads(rank: int, optimizer: str) -> int:
    """Numbers that the host reads from the device in an update."""
    e = experiment(moe=experts(), optimizer=optimizer).replace(precision="fp32")
    engine = build(e, make_groups(e, rank, torch.device("cpu")))
    engine.optimizer.allocate()
    for step in range(2):
        engine.pipeline.run(_batches(engine, step))
        engine.optimizer.finish_gradients()
        norm = engine.optimizer.local_square_norm().sqrt()
        with ReadsOnHost() as counted:
            engine.optimizer.step(norm)
    return counted.count


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon"])
def test_no_update_waits_for_the_device(gloo_pool: Pool, optimizer: str) -> None:
    """So that a captured step has it."""
    assert gloo_pool.run(reads, 1, optimizer) == [0]


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_iterations_are_those_of_torch(shape: tuple[int, int]) -> None:
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(newton_schulz(g.clone()), orthogonalised(g), rtol=1e-12, atol=1e-13)
    from torch.optim._muon import _zeropower_via_newtonschulz

    theirs = _zeropower_via_newtonschulz(g.bfloat16(), (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(newton_schulz(g.bfloat16()), theirs)


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 4, 6), (2, 5, 5)])
def test_matrices_of_a_batch_are_orthogonalised_apart(shape: tuple[int, int, int]) -> None:
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    g *= torch.arange(1, 1 + len(g)).view(-1, 1, 1)
    apart = torch.stack([orthogonalised(one) for one in g])
    torch.testing.assert_close(newton_schulz(g), apart, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (3, 4, 10)])
def test_three_quarters_of_symmetric_products_are_enough(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = newton_schulz(g.clone())
    monkeypatch.setattr(iterations, "computes_three_quarters", lambda rows, columns: True)
    torch.testing.assert_close(newton_schulz(g), whole, rtol=1e-12, atol=1e-13)


class Operations(TorchDispatchMode):
    """Counts operations that compute, which a device launches."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func is not torch.ops.aten._unsafe_view.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(6, 4), (3, 6, 4)])
def test_a_batch_has_as_many_operations_as_a_matrix(shape: tuple[int, ...]) -> None:
    """Norm, its bound, division, and three products in each of five iterations."""
    with Operations() as counted:
        newton_schulz(torch.ones(shape))
    assert counted.count - 1 == 3 + 3 * 5  # and the one that makes the argument


def test_the_plain_optimizers_are_torchs() -> None:
    """The reference, with which layouts are compared."""
    generator = torch.Generator().manual_seed(2)
    start = {"layers.0.w": (6, 4), "layers.0.norm": (6,), "embedding": (8, 4)}
    ours = {n: torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for n, s in start.items()}
    theirs = {n: w.detach().clone().requires_grad_() for n, w in ours.items()}
    plain = optimizer_for("adafactor", ours, lr=1e-2)
    torchs = torch.optim.Adafactor(list(theirs.values()), lr=1e-2, weight_decay=0.1)
    for _ in range(3):
        for name, weight in ours.items():
            weight.grad = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
            theirs[name].grad = weight.grad.clone()
        plain.step()
        torchs.step()
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-12, atol=0)
