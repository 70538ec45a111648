"""Moments on the host: layouts train as with moments on the device, and the host holds the share it was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
from workloads.engine.training import streamed_moments
from workloads.engine.training.host_copies import Copies
from workloads.engine.training.streamed_moments import StreamedAdamW, kept_elements
from workloads.engine.update_ops.adamw import AdamW
from workloads.engine.update_ops.stochastic_rounding import Segment, cut
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
    """``clip_at``: below the gradient norms of these cases, so that the factor of clipping is not 1."""
    pool: Pool = request.getfixturevalue(f"{backend}_pool")
    check(pool, case, "cpu" if backend == "gloo" else "cuda", clip_at=0.3)


def shards() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in ((5, 6), (3,), (0, 4), (11, 2))]


def take_steps(streamed: StreamedAdamW, gradients: list[Tensor], factor: float, skip: float = 0.0) -> None:
    streamed.begin()
    streamed.launch(gradients, torch.tensor(factor, dtype=torch.float64), torch.tensor(skip), RATES)
    streamed.finish()


@pytest.mark.parametrize("share", [0.3, 0.5, 1.0])
@pytest.mark.parametrize("piece", [3, 7, 2**21])
def test_a_part_on_the_host_is_updated_as_the_rest(share: float, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside torch's own AdamW over whole tensors, with a factor and a skipped step."""
    monkeypatch.setattr(streamed_moments, "PIECE", piece)
    weights = shards()
    expected = [nn.Parameter(weight.clone()) for weight in weights]
    plain = torch.optim.AdamW(expected, **RATES)
    parts = [weight.view(-1)[: kept_elements(weight.numel(), share)] for weight in weights]
    on_device = AdamW([nn.Parameter(part) for part in parts], **RATES, fused=True)
    streamed = StreamedAdamW(weights, share)
    for step in range(4):
        gradients = [torch.randn_like(weight) for weight in weights]
        factor, skip = torch.tensor(0.7, dtype=torch.float64), torch.tensor(float(step == 2))
        if step != 2:
            for parameter, gradient in zip(expected, gradients, strict=True):
                parameter.grad = factor * gradient
            plain.step()
        (group,) = on_device.param_groups
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            kept = gradient.view(-1)[: parameter.numel()].clone()
            parameter.grad = kept if kept.numel() else None
        take_steps(streamed, gradients, 0.7, float(step == 2))
        on_device.update(factor, skip)
        for weight, parameter in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, parameter.detach(), rtol=1e-14, atol=0)
    assert streamed.updates == 3


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_the_host_holds_the_share_that_it_was_given(share: float) -> None:
    weights = shards()
    elements = sum(weight.numel() for weight in weights)
    assert abs(StreamedAdamW(weights, share).host_bytes() - 2 * 8 * share * elements) <= 2 * 8 * len(weights)


def test_a_share_of_nothing_has_no_pieces() -> None:
    streamed = StreamedAdamW([torch.empty(0, 4)], 1.0)
    take_steps(streamed, [torch.empty(0, 4)], 1.0)
    assert streamed.host_bytes() == 0


def test_the_calls_of_a_step_come_in_their_order() -> None:
    streamed = StreamedAdamW(shards(), 1.0)
    with pytest.raises(AssertionError, match="no step was begun"):
        streamed.launch(shards(), torch.tensor(1.0), None, RATES)
    streamed.begin()
    with pytest.raises(AssertionError, match="begins once"):
        streamed.begin()


class LateCopies:
    """Copies that come as late as they may: when something waits for them."""

    def __init__(self) -> None:
        self._open: list[tuple[Tensor, Tensor]] = []
        self._launched = 0

    def follow(self, other: Copies | None = None) -> None:
        if other is not None:
            other.join()

    def launch(self, target: Tensor, source: Tensor) -> None:
        self._open.append((target, source))
        self._launched += 1

    def join(self, number: int | None = None) -> None:
        last = self._launched - 1 if number is None else number
        while self._launched - len(self._open) <= last:
            target, source = self._open.pop(0)
            target.copy_(source)

    def restart(self) -> None:
        assert not self._open, "nothing has waited for the copies of the last round"
        self._launched = 0


def updated(late: bool) -> list[Tensor]:
    """Weights after three updates in small pieces, with copies that are late or at once."""
    weights = shards()
    streamed = StreamedAdamW(weights, 0.6)
    if late:
        streamed.down, streamed.up = LateCopies(), LateCopies()
    for step in range(3):
        take_steps(streamed, [torch.full_like(weight, step + 1.0) for weight in weights], 0.5 + step)
    return weights


def test_nothing_is_read_before_its_copy_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_moments, "PIECE", 3)
    for late, at_once in zip(updated(late=True), updated(late=False), strict=True):
        assert torch.equal(late, at_once)


def updated_on_a_gpu(
    states: torch.dtype, weights: torch.dtype, captured: bool, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights after four updates with all moments on the device, and with three quarters of them on the host."""
    generator = torch.Generator("cuda").manual_seed(1)
    first = [torch.randn(shape, device="cuda", dtype=weights, generator=generator) for shape in shapes]
    gradients = [torch.empty_like(one) for one in first]
    factor, skip = torch.tensor(0.7, device="cuda"), torch.tensor(0.0, device="cuda")
    wide = states == weights and states != torch.bfloat16
    segments = [] if wide else [[Segment(0, one.numel(), 5, 2**33, 11, 90)] for one in first]
    ways = []
    for share in (0.0, 0.75):
        shards = [one.clone() for one in first]
        kept = [one.view(-1)[: kept_elements(one.numel(), share)] for one in shards]
        parameters, dtype = [nn.Parameter(one) for one in kept], None if wide else states
        of_kept = [cut(one, slice(0, len(part))) for one, part in zip(segments, kept, strict=False)]
        on_device = AdamW(parameters, state_dtype=dtype, segments=of_kept, **RATES, fused=True)
        on_device.allocate()
        streamed = StreamedAdamW(shards, share, dtype, segments)

        def update(streamed: StreamedAdamW = streamed, on_device: AdamW = on_device) -> None:
            copies = [one.clone() for one in gradients]
            (group,) = on_device.param_groups
            for parameter, one in zip(group["params"], copies, strict=True):
                parameter.grad = one.view(-1)[: parameter.numel()]
            streamed.begin()
            streamed.launch(copies, factor, skip, RATES)
            on_device.update(factor, skip)
            streamed.finish()

        ways.append((shards, update))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _, update in ways:
        graph = torch.cuda.CUDAGraph()
        for step in range(4):
            generator.manual_seed(step)
            for one in gradients:
                one.normal_(generator=generator)
            skip.fill_(float(step == 2))
            torch.cuda.synchronize()
            if not captured or step == 0:
                with torch.cuda.stream(stream):
                    update()
            else:
                if step == 1:
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        update()
                graph.replay()
            torch.cuda.synchronize()
    return ways[0][0], ways[1][0]


ALIGNED = (1024, 1300), (64,), (8, 65536), (2**21,)
ODD = (1000, 1300), (3,), (7, 65537), (2**21 + 5,)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("states", "weights", "captured"),
    [
        *((torch.float32, torch.float32, captured) for captured in (False, True)),
        *((torch.bfloat16, torch.float32, captured) for captured in (False, True)),
        *((torch.bfloat16, torch.bfloat16, captured) for captured in (False, True)),
        (torch.float64, torch.float64, False),
    ],
    ids=str,
)
def test_weights_on_a_gpu_are_the_same_to_the_bit(states: torch.dtype, weights: torch.dtype, captured: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for one, other in zip(*updated_on_a_gpu(states, weights, captured, ALIGNED), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_weights_of_odd_sizes_on_a_gpu_differ_in_their_last_bit(captured: bool) -> None:
    """Triton compiles another kernel for addresses that are no multiples of 16 bytes."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    for one, other in zip(*updated_on_a_gpu(torch.float32, torch.float32, captured, ODD), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def fp16_steps(rank: int, share: float) -> list[tuple[bool | None, Tensor, int]]:
    """Of six steps from a loss scale that is too large: whether it was skipped, the weights, and the updates so far."""
    built = engine(rank, 2.0**21, optimizer_offload=share, micro_batch_size=2, dp=2, zero_stage=3)
    found = []
    for _ in range(6):
        record = take_step(built, 0)
        weights = torch.cat([local_shard(p.current).reshape(-1).clone() for p in built.optimizer.parameters])
        found.append((record.skipped, weights, built.optimizer._updates()))
    return found


def weights_in_bf16(rank: int, share: float) -> Tensor:
    formats = {"precision": "bf16", "optimizer_states": "bf16", "master_weights": "bf16", "dp": 2, "tp": 2}
    built = engine(rank, **formats, zero_stage=3, micro_batch_size=2, optimizer_offload=share)
    for _ in range(3):
        take_step(built, 0)
    return torch.cat([local_shard(p.current).reshape(-1).float() for p in built.optimizer.parameters])


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_rounding_is_that_of_the_device(gloo_pool: Pool, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same random bits round the same elements, whichever part they are in."""
    expected, found = gloo_pool.run(weights_in_bf16, 4, 0.0), gloo_pool.run(weights_in_bf16, 4, share)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_fp16_skips_a_step_of_both_parts(gloo_pool: Pool, share: float) -> None:
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
    for rank, stage in enumerate(estimate_memory(case).stages):
        traced = alone(case, rank_of(case, pp=rank), fake=True)
        assert stage.peak_bytes == pytest.approx(total(traced), rel=0.001)
        # A counter of 4 bytes belongs to every tensor.
        assert traced.optimizer_bytes == pytest.approx(stage.optimizer_bytes, rel=1e-4, abs=400)


def host_bytes(rank: int, layout: dict[str, Any]) -> int:
    built = engine(rank, **layout)
    take_step(built, 0)
    assert built.optimizer.streamed is not None
    return built.optimizer.streamed.host_bytes()


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
