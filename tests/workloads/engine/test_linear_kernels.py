"""Recurrent layers on the kernels of flash-linear-attention: beside the plain formulas in float64 on a GPU, and their
memory beside the closed form, on a GPU and by the package's own allocations without one."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.kind_models import attention, gated_delta, kimi_delta, kind_model, layer, mamba
from tests.workloads.engine.test_memory import alone, total
from workloads.contract.measure_spec import MeasureSpec
from workloads.costs.memory.estimate import estimate_memory
from workloads.engine.collectives.groups import make_groups
from workloads.engine.kind_ops import fused_scan, linear_kernels
from workloads.engine.kind_ops.delta_steps import GatedDeltaStep, KimiDeltaStep
from workloads.engine.kind_ops.fused_scan import AnyStep, recurrence
from workloads.engine.kind_ops.mamba_scan import MambaStep
from workloads.engine.kind_ops.segments import scanned
from workloads.engine.observing.memory import StorageTracker
from workloads.engine.training.build import build, choose_attention
from workloads.measuring.step import measure
from workloads.spec.experiment import Experiment

STEPS: dict[str, AnyStep] = {
    "gated_delta": GatedDeltaStep(key_heads=2, value_heads=4, key_dim=128, value_dim=128, kernel=4, eps=1e-6),
    "gated_delta_alike": GatedDeltaStep(key_heads=3, value_heads=3, key_dim=128, value_dim=64, kernel=4, eps=1e-6),
    "kimi_delta": KimiDeltaStep(heads=3, head_dim=128, kernel=4, eps=1e-6),
    "kimi_delta_narrow": KimiDeltaStep(heads=2, head_dim=64, kernel=4, eps=1e-6),
    "mamba": MambaStep(heads=8, head_dim=64, groups=2, state=128, kernel=4, eps=1e-5, bias=True),
    "mamba_one_group": MambaStep(heads=6, head_dim=32, groups=1, state=128, kernel=4, eps=1e-5, bias=False),
}
LENGTHS = ((2, 512), (1, 1024), (3, 192))


@pytest.fixture
def chosen() -> Iterator[None]:
    linear_kernels.choose_kernels(chosen=True)
    yield
    linear_kernels.choose_kernels(chosen=False)


def shapes_of(step: AnyStep) -> list[tuple[int, ...]]:
    """Shapes of the parameters."""
    if isinstance(step, GatedDeltaStep):
        return [(2 * step.keys + step.outputs, step.kernel), (2 * step.value_heads,), (step.value_dim,)]
    if isinstance(step, KimiDeltaStep):
        return [(3 * step.outputs, step.kernel), (step.outputs + step.heads,), (step.head_dim,)]
    channels = step.outputs + 2 * step.groups * step.state
    bias = [(channels,)] if step.bias else []
    return [(channels, step.kernel), *bias, (3 * step.heads,), (step.outputs,)]


def drawn(step: AnyStep, sequences: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
    """(sequences, parameters) in float64, rounded to bf16."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).bfloat16().double()

    inputs = [numbers(sequences, length, sum(widths)) for widths in fused_scan.columns(step)]
    return inputs, [numbers(*shape, scale=0.5) for shape in shapes_of(step)]


def leaves_of(step: AnyStep, inputs: Sequence[Tensor], parameters: Sequence[Tensor], device: str) -> list[Tensor]:
    """Both in bf16. KDA's rates are some columns of a wider tensor, as in its layer."""
    of_inputs = [x.bfloat16().to(device) for x in inputs]
    if isinstance(step, KimiDeltaStep):
        rates = of_inputs[1]
        of_inputs[1] = torch.cat([rates, rates], 2)[:, :, : rates.shape[2]]
    return [x.detach().requires_grad_() for x in (*of_inputs, *(x.bfloat16().to(device) for x in parameters))]


def gradients(
    run: Callable[..., Tensor], step: AnyStep, inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Output and the gradients of all inputs and parameters."""
    leaves = [x.detach().requires_grad_() for x in (*inputs, *parameters)]
    y = run(step, leaves[: len(inputs)], leaves[len(inputs) :])
    torch.manual_seed(1)
    grad = torch.randn(y.shape, dtype=torch.float64).to(y.dtype).to(y.device)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("name", STEPS)
def test_shapes_take_as_much_as_the_kernels(name: str) -> None:
    step, peaks = STEPS[name], []
    with FakeTensorMode():
        inputs = [torch.empty(2, 512, sum(widths), dtype=torch.bfloat16) for widths in fused_scan.columns(step)]
        parameters = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes_of(step)]
        leaves = [x.requires_grad_() for x in (*inputs, *parameters)]
        with StorageTracker() as tracker:
            y = recurrence(step, inputs, parameters)
            peaks.append(tracker.peak)
            assert y.shape == (2, 512, step.outputs)
        grad = torch.empty_like(y)
        with StorageTracker() as tracker:
            found = torch.autograd.grad(y, leaves, grad)
            peaks.append(tracker.peak)
        assert [x.shape for x in found] == [x.shape for x in leaves]
    assert tuple(peaks) == fused_scan.working(step, inputs[0])


def test_plain_formulas_need_no_memory_that_shapes_show() -> None:
    step = STEPS["mamba"]
    with FakeTensorMode():
        inputs = [torch.empty(2, 512, sum(widths), dtype=torch.bfloat16) for widths in fused_scan.columns(step)]
        parameters = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes_of(step)]
        with StorageTracker() as tracker:
            y = recurrence(step, inputs, parameters)
        assert tracker.peak == y.numel() * y.element_size()


@pytest.mark.usefixtures("chosen")
def test_float32_has_no_kernels() -> None:
    step = STEPS["mamba"]
    inputs, parameters = drawn(step, 1, 64)
    plain = scanned(step, [x.float() for x in inputs], [x.float() for x in parameters])
    assert torch.equal(recurrence(step, [x.float() for x in inputs], [x.float() for x in parameters]), plain)


@pytest.mark.parametrize(
    ("package", "triton", "capability", "keys", "reason"),
    [
        ("0.6.0", "3.6.0", (9, 0), (128, 256), None),
        ("0.6.0", "3.6.0", (9, 0), (128, 64), "Triton 3.6.0 compiles its backward for keys of 64 wrongly on Hopper"),
        ("0.6.0", "3.7.1", (9, 0), (64,), None),
        ("0.6.0", "3.6.0", (10, 0), (64,), None),
        ("0.6.0", "3.6.0", (7, 5), (128,), "it needs an Ampere GPU or a newer one, not a GPU"),
        ("0.5.0", "3.6.0", (9, 0), (128,), "it needs the package fla-core 0.6.0, and 0.5.0 is installed: pip install"),
        (None, "3.6.0", (9, 0), (128,), "it is not installed: pip install 'ultrasweep[recurrent]'"),
    ],
)
def test_why_kernels_cannot_run(
    monkeypatch: pytest.MonkeyPatch,
    package: str | None,
    triton: str,
    capability: tuple[int, int],
    keys: tuple[int, ...],
    reason: str | None,
) -> None:
    installed = {"fla-core": package, "triton": triton}
    monkeypatch.setattr(linear_kernels, "_installed", installed.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = linear_kernels.unusable(keys)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")


@pytest.mark.parametrize("batch", LENGTHS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_the_package_allocates_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch, name: str, batch: tuple[int, int]
) -> None:
    """Its own functions, with kernels that do nothing, on a CPU."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    kernels_do_nothing(monkeypatch)
    step = STEPS[name]
    inputs, parameters = drawn(step, *batch)
    leaves = leaves_of(step, inputs, parameters, "cpu")
    with StorageTracker() as forward:
        forward.leave_out(leaves)
        y = fused_scan._Kernels.apply(step, len(inputs), *leaves)
    grad = torch.empty_like(y)
    with StorageTracker() as backward:
        backward.leave_out([*leaves, grad])
        torch.autograd.grad(y, leaves, grad)
    predicted = fused_scan.working(step, inputs[0])
    assert forward.peak == pytest.approx(predicted.forward, rel=1e-3)
    assert backward.peak == pytest.approx(predicted.backward, rel=1e-3)


def kernels_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import autotuner, jit

    linear_kernels.functions()
    own = importlib.import_module("fla.ops.utils.cache").CachedAutotuner
    for owner in (autotuner.Autotuner, autotuner.Heuristics, jit.JITFunction, own):
        monkeypatch.setattr(owner, "run", lambda *_, **__: None)
    stand_ins = {"check_shared_mem": True, "get_multiprocessor_count": 132}  # of a Hopper GPU
    for module in [one for key, one in sys.modules.items() if key.startswith("fla.")]:
        for attribute, value in stand_ins.items():
            if hasattr(module, attribute):
                monkeypatch.setattr(module, attribute, lambda *_, value=value, **__: value)


def recurrent(name: str, heads: int) -> dict[str, Any]:
    of_kind: dict[str, dict[str, Any]] = {
        "gated_delta": gated_delta(key_heads=heads // 2, value_heads=heads, key_dim=128, value_dim=128),
        "kimi_delta": kimi_delta(heads=heads, head_dim=128),
        "mamba": mamba(heads=2 * heads, head_dim=64, groups=2, state=128),
    }
    return of_kind[name]


KINDS = ("gated_delta", "kimi_delta", "mamba")


def hybrid(name: str, recurrence: str, *, heads: int = 8, **changes: Any) -> Experiment:
    """A layer of attention and three recurrent ones, twice; as wide as that many heads of 64."""
    mlp = {"kind": "dense", "width": 192 * heads, "activation": "silu"}
    of_attention = attention(heads=heads, kv_heads=heads // 2, head_dim=64, value_dim=64)
    kinds = [layer(recurrent(name, heads), mlp), layer(of_attention, mlp)]
    model = kind_model((kinds, [1, 0, 0, 0] * 2), hidden_size=64 * heads, vocab_size=1024)
    model = dataclasses.replace(model, name=f"wide_{name}")
    usual = {"seq_len": 1024, "micro_batch_size": 2, "global_batch_size": 4, "cuda_graph": "none"}
    return Experiment.canonical(model=model, recurrence=recurrence, **{**usual, **changes})


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"tp": 2, "micro_batch_size": 1},
    {"dp": 2, "zero_stage": 2, "seq_len": 320},
    {"cp": 2, "cp_kind": "ulysses"},
    {"cp": 2, "zero_stage": 1, "recompute": "full"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "recurrence", "layout"),
    sampled([(one, how, layout) for one in KINDS for how in ("fla", "torch") for layout in LAYOUTS], 2, seconds=6),
    ids=str,
)
def test_predicted_peaks_are_the_traced_ones(name: str, recurrence: str, layout: dict[str, Any]) -> None:
    case = hybrid(name, recurrence, **layout)
    assert estimate_memory(case).peak_bytes == pytest.approx(total(alone(case, 0, fake=True)), rel=1e-3)


# GPUs


def needs_kernels(*keys: int) -> None:
    if (reason := linear_kernels.unusable(keys)) is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("length", [512, 200, 37])
@pytest.mark.parametrize("name", STEPS)
def test_kernels_compute_the_plain_formulas(name: str, length: int) -> None:
    """In bf16 beside float64. Kernels round states and products of a chunk to bf16, so single numbers differ by a few
    of its units in the last place of the largest ones, and norms by one."""
    needs_kernels()
    step = STEPS[name]
    inputs, parameters = drawn(step, 2, length)
    expected = gradients(scanned, step, inputs, parameters)
    on_device = [[x.bfloat16().cuda() for x in tensors] for tensors in (inputs, parameters)]
    found = gradients(recurrence, step, *on_device)
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        far = ((one.cpu().double() - other).norm() / other.norm()).item()
        assert far < 2e-2, (at, tuple(one.shape), far)
        torch.testing.assert_close(
            one.cpu().double(), other, rtol=5e-2, atol=5e-2 * max(1.0, other.abs().max().item()), msg=f"tensor {at}"
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("batch", LENGTHS, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_kernels_take_what_is_predicted(name: str, batch: tuple[int, int]) -> None:
    needs_kernels()
    step = STEPS[name]
    inputs, parameters = drawn(step, *batch)
    leaves = leaves_of(step, inputs, parameters, "cuda")
    run = lambda: recurrence(step, leaves[: len(inputs)], leaves[len(inputs) :])  # noqa: E731
    torch.autograd.grad(run().sum(), leaves)  # chooses blocks
    peaks, y = [], None
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        if y is None:
            y = run()
            grad, of_y = torch.empty_like(y), y.numel() * y.element_size()
            peaks.append(torch.cuda.max_memory_allocated() - held)
        else:
            torch.autograd.grad(y, leaves, grad)
            peaks.append(torch.cuda.max_memory_allocated() - held)
    predicted = fused_scan.working(step, inputs[0])
    assert peaks[0] == pytest.approx(max(predicted.forward, 2 * of_y), rel=3e-3)
    assert peaks[1] == pytest.approx(predicted.backward, rel=3e-3)


def stepped(rank: int, cases: list[Experiment]) -> list[tuple[list[float], list[float], int]]:
    """Losses, norms and the peak of timed steps of each case, one after the other."""
    found = []
    for case in cases:
        choose_attention(case)
        engine = build(case, make_groups(case, rank, torch.device("cuda", torch.cuda.current_device())))
        ran = measure(engine, MeasureSpec(warmup_steps=3, timed_steps=2))
        peak = max(one.peak_allocated_bytes or 0 for one in ran.steps[-2:])
        found.append(([one.loss for one in ran.steps], [one.grad_norm for one in ran.steps], peak))
        del engine
        torch.cuda.empty_cache()
    dist.barrier()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_a_step_of_a_hybrid_model(nccl_pool: Pool, name: str) -> None:
    """Losses as with the plain formulas; a captured step does what an eager one does."""
    needs_kernels()
    cases = [hybrid(name, "torch"), hybrid(name, "fla"), hybrid(name, "fla", cuda_graph="step")]
    ((plain, eager, captured),) = nccl_pool.run(stepped, 1, cases)
    assert eager[0] == pytest.approx(plain[0], rel=2e-3) and eager[1] == pytest.approx(plain[1], rel=2e-2)
    assert captured[0] == pytest.approx(eager[0], rel=1e-3) and captured[1] == pytest.approx(eager[1], rel=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", KINDS)
def test_the_peak_of_a_step_is_the_closed_form_s(nccl_pool: Pool, name: str, recompute: str) -> None:
    """Of a model so large that the workspace of cuBLAS, tens of MiB, is below the bound."""
    needs_kernels()
    case = hybrid(name, "fla", heads=32, seq_len=8192, recompute=recompute)
    (((_, _, peak),),) = nccl_pool.run(stepped, 1, [case])
    assert peak == pytest.approx(estimate_memory(case).stages[0].peak_bytes, rel=3e-3)
