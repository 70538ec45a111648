"""An optimizer on the host: it trains as one on the device does, in every layout, and keeps what was given to it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.costs.shapes import WIDE
from tests.workloads.engine.parity import check, experiment, experts, on_backends
from tests.workloads.engine.test_loss_scale import engine, take_step
from tests.workloads.engine.test_memory import alone, total
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.host_activations import rank_host_bytes
from workloads.engine.collectives.parameters import local_shard
from workloads.engine.training import host_optimizer
from workloads.engine.training.host_copies import PlainCopies
from workloads.engine.training.host_optimizer import HostAdamW, kept_elements
from workloads.engine.update_ops.adamw import AdamW
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of

RATES: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MOE = experts()
CASES = [
    experiment(optimizer_offload=1.0),
    *(experiment(dp=2, zero_stage=zero, optimizer_offload=0.5, micro_batch_size=2) for zero in range(4)),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=3, optimizer_offload=0.3),
    experiment(dp=3, zero_stage=3, global_batch_size=12, micro_batch_size=2, optimizer_offload=1.0),
    experiment(tp=2, optimizer_offload=1.0),
    experiment(tp=2, sequence_parallel=False, optimizer_offload=0.4),
    experiment(cp=2, zero_stage=3, optimizer_offload=0.7, micro_batch_size=2),
    experiment(pp=2, pp_schedule="1f1b", optimizer_offload=1.0, micro_batch_size=2, tie=True),
    experiment(pp=2, pp_schedule="zero_bubble_v", virtual_stages=2, optimizer_offload=0.5, micro_batch_size=2),
    experiment(pp=2, dp=2, zero_stage=2, pp_schedule="interleaved_1f1b", virtual_stages=2, optimizer_offload=0.9),
    experiment(moe=MOE, dp=2, ep=2, zero_stage=1, optimizer_offload=0.5),
    experiment(moe=MOE, dp=2, tp=2, ep=2, etp=1, zero_stage=3, optimizer_offload=1.0),
]


@pytest.mark.parametrize(("backend", "case"), on_backends(sampled(CASES, 5, seconds=3), CASES))
def test_layouts_train_as_on_the_device(request: pytest.FixtureRequest, backend: str, case: Experiment) -> None:
    """``clip_at``: below the gradient norms of these cases, so that the host applies the factor of clipping."""
    pool: Pool = request.getfixturevalue(f"{backend}_pool")
    check(pool, case, "cpu" if backend == "gloo" else "cuda", clip_at=0.3)


def shards() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in ((5, 6), (3,), (0, 4), (11, 2))]


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("piece", [7, 2**22])
def test_a_part_on_the_host_is_updated_as_the_rest(share: float, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside torch's own AdamW over whole tensors, with a factor and a skipped step."""
    monkeypatch.setattr(host_optimizer, "PIECE", piece)
    weights = shards()
    expected = [nn.Parameter(weight.clone()) for weight in weights]
    plain = torch.optim.AdamW(expected, **RATES)
    parts = [weight.view(-1)[: kept_elements(weight.numel(), share)] for weight in weights]
    on_device = AdamW([nn.Parameter(part) for part in parts], **RATES, fused=True)
    on_host = HostAdamW(weights, share)
    for step in range(4):
        gradients = [torch.randn_like(weight) for weight in weights]
        factor, skip = torch.tensor(0.7, dtype=torch.float64), torch.tensor(float(step == 2))
        if step != 2:
            for parameter, gradient in zip(expected, gradients, strict=True):
                parameter.grad = factor * gradient
            plain.step()
        on_host.start_copies(gradients)
        on_host.announce(factor, skip)
        (group,) = on_device.param_groups
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            kept = gradient.view(-1)[: parameter.numel()].clone()
            parameter.grad = kept if kept.numel() else None
        on_device.update(factor, skip)
        on_host.update(RATES)
        for weight, parameter in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-14, atol=0)
    assert on_host.updates == 3


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_host_holds_the_share_that_it_was_given(share: float) -> None:
    weights = shards()
    on_host = HostAdamW(weights, share)
    elements = sum(weight.numel() for weight in weights)
    of_elements = on_host.host_bytes() - sum(t.nbytes for t in on_host.tensors()[-2:])  # two numbers and the step
    assert abs(of_elements - 4 * 8 * share * elements) <= 4 * 8 * len(weights)


def test_the_steps_of_an_update_come_in_their_order() -> None:
    on_host = HostAdamW(shards(), 1.0)
    with pytest.raises(AssertionError, match="no gradients were copied"):
        on_host.update(RATES)
    on_host.start_copies(shards())
    with pytest.raises(AssertionError, match="are copied once"):
        on_host.start_copies(shards())


class LateCopies(PlainCopies):
    """Copies that come as late as they may: when somebody waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[Tensor, Tensor]] = []

    def launch(self, target: Tensor, source: Tensor) -> int:
        self._open.append((target, source))
        self._launched += 1
        return self._launched - 1

    def wait(self, number: int) -> None:
        while self._launched - len(self._open) <= number:
            target, source = self._open.pop(0)
            target.copy_(source)

    def join(self) -> None:
        self.wait(self._launched - 1)

    def restart(self) -> None:
        assert not self._open, "nobody has waited for the copies of the last round"
        super().restart()


def updated(late: bool) -> list[Tensor]:
    """Weights after three updates in small pieces, with copies that are late or at once."""
    weights = shards()
    on_host = HostAdamW(weights, 0.6)
    if late:
        on_host.down, on_host.up, on_host.control = LateCopies(), LateCopies(), LateCopies()
    for step in range(3):
        on_host.start_copies([torch.full_like(weight, step + 1.0) for weight in weights])
        on_host.announce(torch.tensor(0.5 + step, dtype=torch.float64), torch.tensor(0.0))
        on_host.update(RATES)
    return weights


def test_nothing_is_read_before_its_copy_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_optimizer, "PIECE", 7)
    for late, at_once in zip(updated(late=True), updated(late=False), strict=True):
        assert torch.equal(late, at_once)


def fp16_steps(rank: int, share: float) -> list[tuple[bool | None, Tensor, int]]:
    """Of six steps from a loss scale that is too large: whether it was skipped, the weights, and the updates so far."""
    built = engine(rank, 2.0**21, optimizer_offload=share, micro_batch_size=2, dp=2, zero_stage=3)
    found = []
    for _ in range(6):
        record = take_step(built, 0)
        weights = torch.cat([local_shard(p.current).reshape(-1).clone() for p in built.optimizer.parameters])
        found.append((record.skipped, weights, built.optimizer._updates()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_fp16_skips_a_step_on_the_host_too(gloo_pool: Pool, share: float) -> None:
    expected, ranks = gloo_pool.run(fp16_steps, 2, 0.0), gloo_pool.run(fp16_steps, 2, share)
    assert {skipped for skipped, _, _ in ranks[0]} == {True, False}
    for one, other in zip(ranks, expected, strict=True):
        for (skipped, weights, updates), (skipped_before, weights_before, updates_before) in zip(
            one, other, strict=True
        ):
            assert (skipped, updates) == (skipped_before, updates_before)
            torch.testing.assert_close(weights, weights_before, rtol=1e-6, atol=0)


LAYOUTS: list[dict[str, Any]] = [
    {"optimizer_offload": 1.0, "dp": 2, "zero_stage": 3, "rounds": 2},
    {"optimizer_offload": 0.5, "dp": 2, "zero_stage": 1, "rounds": 3},
    {"optimizer_offload": 0.25, "pp": 2, "rounds": 4, "recompute": "full"},
    {"optimizer_offload": 1.0, "tp": 2},
]


def _case(rounds: int = 1, **layout: Any) -> Experiment:
    model = dataclasses.replace(WIDE, vocab_size=32768)
    sequences = 2 * layout.get("dp", 1) * rounds
    return Experiment.canonical(model=model, seq_len=256, micro_batch_size=2, global_batch_size=sequences, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled(LAYOUTS, 1, seconds=8), ids=str)
def test_predicted_peaks_are_the_traced_ones(layout: dict[str, Any]) -> None:
    case = _case(**layout)
    without = estimate_memory(case.replace(optimizer_offload=0.0))
    for rank, stage in enumerate(estimate_memory(case).stages):
        traced = alone(case, rank_of(case, pp=rank), fake=True)
        assert stage.peak_bytes == pytest.approx(total(traced), rel=0.001)
        kept = 1 - case.optimizer_offload
        # A counter of 4 bytes belongs to every tensor.
        assert traced.optimizer_bytes == pytest.approx(kept * without.stages[rank].optimizer_bytes, rel=1e-4, abs=400)


def host_bytes(rank: int, layout: dict[str, Any]) -> int:
    built = engine(rank, **layout)
    take_step(built, 0)
    assert built.optimizer.on_host is not None
    return built.optimizer.on_host.host_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero_stage": 3, "optimizer_offload": 0.5},
        {"pp": 2, "optimizer_offload": 1.0},
        {"tp": 2, "optimizer_offload": 0.75},
    ],
    ids=str,
)
def test_the_host_needs_what_is_predicted(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    layout = {**layout, "micro_batch_size": 1, "precision": "fp32"}
    case = engine_case(layout)
    found = max(gloo_pool.run(host_bytes, case.world_size, layout))
    assert found == pytest.approx(rank_host_bytes(case), rel=2e-3, abs=16 * 16)


def engine_case(layout: dict[str, Any]) -> Experiment:
    from tests.workloads.engine.parity import model

    return Experiment.canonical(**{"model": model(num_layers=2), "seq_len": 16, "global_batch_size": 4, **layout})
