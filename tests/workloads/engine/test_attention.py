"""Attention kernels with their log-sum-exp against the textbook in fp64, alone and block by block."""

from __future__ import annotations

import math
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.workloads.costs.shapes import H200, ONE_NODE
from tests.workloads.engine.attention_checks import inputs, relative_error, textbook_gradients
from tests.workloads.engine.parity import model
from workloads.engine.ops import attention as ops
from workloads.engine.ops import flash4
from workloads.engine.ops.attention import AttentionKernel, attention, attention_backward, attention_forward
from workloads.engine.training.build import choose_attention
from workloads.rules.layout_rules import violations
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import Attention

GROUPS = [(2, 4, 4, 13, 8), (2, 6, 2, 13, 8), (1, 4, 1, 40, 16), (2, 4, 4, 13, 24, 16), (1, 4, 2, 40, 16, 8)]
"""(B, N, K, S, H) or with the size of values: as many keys as queries, groups, one key head for all, two sizes."""
GPU_SHAPES = [(2, 8, 8, 256, 64), (1, 8, 2, 512, 128), (2, 8, 8, 256, 192, 128)]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}
CUDA_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def check(shape: tuple[int, ...], dtype: torch.dtype, causal: bool, device: str = "cpu") -> AttentionKernel:
    """One kernel's forward and backward against the textbook; returns the kernel."""
    q, k, v, grad = inputs(shape, dtype, device, keys=0 if causal else shape[3] + 8)
    o, lse, saved = attention_forward(q, k, v, causal=causal)
    assert o.dtype == dtype and lse.shape == q.shape[:3]
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    gradients = attention_backward(grad, q, k, v, o, lse, saved, causal=causal)
    assert [g.dtype for g in gradients] == [dtype] * 3
    compare((o, lse, *gradients), textbook_gradients(q, k, v, grad, causal=causal), TOLERANCE[dtype])
    return saved.kernel


def compare(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    errors = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) <= tolerance, dict(zip(("o", "lse", "dq", "dk", "dv"), errors, strict=True))


def check_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> AttentionKernel:
    """Backwards over two halves of the keys, given output and log-sum-exp over all keys, add up to the gradients."""
    q, k, v, grad = inputs(shape, dtype, device, keys=2 * shape[3])
    half = shape[3]
    expected = textbook_gradients(q, k, v, grad, causal=False)
    o, lse = expected[0].to(dtype), expected[1].to(ops.accumulation_dtype(dtype))
    parts = []
    for part in (slice(0, half), slice(half, 2 * half)):
        _, _, saved = attention_forward(q, k[:, :, part], v[:, :, part], causal=False)
        parts.append(attention_backward(grad, q, k[:, :, part], v[:, :, part], o, lse, saved, causal=False))
    (dq1, dk1, dv1), (dq2, dk2, dv2) = parts
    gradients = dq1.double() + dq2.double(), torch.cat([dk1, dk2], 2), torch.cat([dv1, dv2], 2)
    compare((o, lse, *gradients), expected, TOLERANCE[dtype])
    return saved.kernel


@pytest.fixture(params=["cpu", "math"])
def kernel(request: pytest.FixtureRequest) -> Any:
    allowed = [SDPBackend.MATH] if request.param == "math" else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(allowed):
        yield ops.MATH if request.param == "math" else ops.CPU


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_forward_and_backward(shape: Any, causal: bool, dtype: torch.dtype, kernel: AttentionKernel) -> None:
    assert check(shape, dtype, causal) is kernel


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_backward_of_a_block_of_keys_is_its_part_of_the_gradient(
    shape: Any, dtype: torch.dtype, kernel: AttentionKernel
) -> None:
    assert check_blocks(shape, dtype) is kernel


@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_whole_attention(shape: Any, kernel: AttentionKernel) -> None:
    q, k, v, grad = inputs(shape)
    wide = [x.requires_grad_() for x in (q, k, v)]
    o = attention(*wide, causal=True)
    expected = textbook_gradients(q, k, v, grad, causal=True)
    compare((o, expected[1], *torch.autograd.grad(o, wide, grad)), expected, 1e-13)


def test_a_causal_block_is_square() -> None:
    q, k, v, _ = inputs((1, 2, 2, 4, 8), keys=6)
    with pytest.raises(AssertionError, match="square"):
        attention_forward(q, k, v, causal=True)


def test_without_its_switch_a_kernel_is_not_used() -> None:
    q, k, v, _ = inputs((1, 4, 2, 8, 8))
    assert attention_forward(q, k, v, causal=True)[2].kernel is ops.CPU
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]):
        assert attention_forward(q, k, v, causal=True)[2].kernel is ops.MATH


@pytest.mark.parametrize("shape", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_fake_tensors_take_the_same_kernel_and_shapes(shape: Any, dtype: torch.dtype, kernel: AttentionKernel) -> None:
    real = inputs(shape, dtype)
    with FakeTensorMode() as mode:
        q, k, v, grad = (mode.from_tensor(x) for x in real)
        o, lse, saved = attention_forward(q, k, v, causal=True)
        gradients = attention_backward(grad, q, k, v, o, lse, saved, causal=True)
    assert saved.kernel is kernel
    wanted, wanted_lse, _ = attention_forward(*real[:3], causal=True)
    for fake, x in zip((o, lse, *gradients), (wanted, wanted_lse, *real[:3]), strict=True):
        assert (fake.shape, fake.dtype) == (x.shape, x.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("precision", ["bf16", "fp32", "fp64"])
def test_what_the_rules_let_through_has_a_kernel_and_nothing_else(device: str, precision: str) -> None:
    """Of equal heads, grouped ones, and heads that are no multiple of 8 or above 256, on this machine's torch."""
    cluster = ONE_NODE if device == "cpu" else H200
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[precision]
    kernels = set(get_args(Attention)) - {"flash4"}  # of another package: a CPU rehearses it with a kernel of torch
    for kernel, (heads, kv_heads, size) in product(sorted(kernels), [(2, 2, 16), (2, 1, 16), (2, 2, 20), (2, 2, 264)]):
        shape = model(num_heads=heads, num_kv_heads=kv_heads, head_dim=size)
        case = Experiment.canonical(model=shape, global_batch_size=1, precision=precision, attention=kernel)
        refused = any(rule == "attention" for rule, _ in violations(case, cluster))
        q, k, v, _ = inputs((1, heads, kv_heads, 64, size), dtype, device)
        with sdpa_kernel([SDPBackend.MATH]):  # sets the switches back at its end
            choose_attention(case)
            with pytest.raises(RuntimeError) if refused else nullcontext():
                attention(q, k, v, causal=True)
            with pytest.raises(RuntimeError) if refused else nullcontext():
                attention_forward(q, k, v, causal=True)


# Kernels of GPUs, without one


@pytest.mark.parametrize("kernel", [ops.CUDNN, ops.FLASH, ops.EFFICIENT], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("causal", [True, False])
def test_calls_fit_the_operators(kernel: AttentionKernel, causal: bool) -> None:
    """On meta tensors torch checks every argument and gives the results' shapes."""
    q, k, v, grad = inputs((2, 4, 4, 40, 16), torch.bfloat16, "meta", keys=40 if causal else 56)
    o, lse, saved = kernel.forward(q, k, v, causal)
    assert (o.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
    gradients = kernel.backward(grad, q, k, v, o, lse, saved, causal)
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


class Imitated:
    """GPU operators made of the plain formulas, with each one's layout of the log-sum-exp: asked for and given back."""

    def __init__(self, cudnn_dims: int) -> None:
        self.cudnn_dims = cudnn_dims

    def _scaled_dot_product_cudnn_attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Any, ...]:
        assert args[:3] == (None, True, 0.0)
        o, lse, _ = ops.MATH.forward(q, k, v, args[3])
        seed = torch.zeros(())
        return o, lse.unsqueeze(-1) if self.cudnn_dims == 4 else lse, None, None, q.shape[2], k.shape[2], seed, seed

    def _scaled_dot_product_cudnn_attention_backward(self, *args: Any) -> tuple[Tensor, ...]:
        grad, q, k, v, o, stats, _, _, bias, *cumulated, s, t, dropout, causal = args
        assert (bias, cumulated, s, t, dropout) == (None, [None, None], q.shape[2], k.shape[2], 0.0)
        assert stats.shape == ((*q.shape[:3], 1) if self.cudnn_dims == 4 else q.shape[:3]) and stats.is_contiguous()
        return ops.MATH.backward(grad, q, k, v, o, stats.reshape(q.shape[:3]), None, causal)

    def _scaled_dot_product_flash_attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Any, ...]:
        assert args[0] == 0.0
        o, lse, _ = ops.MATH.forward(q, k, v, args[1])
        return o, lse, None, None, q.shape[2], k.shape[2], torch.zeros(2), torch.zeros(()), torch.zeros(0)

    def _scaled_dot_product_flash_attention_backward(self, *args: Any) -> tuple[Tensor, ...]:
        grad, q, k, v, o, lse, *cumulated, s, t, dropout, causal, state, unused = args
        assert (cumulated, s, t, dropout) == ([None, None], q.shape[2], k.shape[2], 0.0)
        assert state.shape == (2,) and unused.shape == () and lse.is_contiguous()
        return ops.MATH.backward(grad, q, k, v, o, lse, None, causal)

    def _scaled_dot_product_efficient_attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Any, ...]:
        assert args[:3] == (None, True, 0.0) and q.shape[1] == k.shape[1]
        o, lse, _ = ops.MATH.forward(q, k, v, args[3])
        padded = torch.full((*lse.shape[:2], math.ceil(lse.shape[2] / 32) * 32), math.inf, dtype=lse.dtype)
        padded[:, :, : lse.shape[2]] = lse
        return o, padded, torch.zeros(()), torch.zeros(())

    def _scaled_dot_product_efficient_attention_backward(self, *args: Any) -> tuple[Any, ...]:
        grad, q, k, v, bias, o, lse, _, _, dropout, wanted, causal = args
        assert (bias, dropout, wanted) == (None, 0.0, [True, True, True, False])
        assert lse.shape[2] % 32 == 0 and lse.is_contiguous() and lse[:, :, q.shape[2] :].isposinf().all()
        return *ops.MATH.backward(grad, q, k, v, o, lse[:, :, : q.shape[2]], None, causal), None


@pytest.mark.parametrize("shape", GROUPS, ids=str)
@pytest.mark.parametrize(("name", "cudnn_dims"), [("cudnn", 3), ("cudnn", 4), ("flash", 4), ("efficient", 4)])
def test_layouts_of_the_log_sum_exp(name: str, cudnn_dims: int, shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch picks for a GPU, memory-efficient attention without groups, is translated both ways."""
    backend = CUDA_KERNELS[name]

    def pick(q: Tensor, k: Tensor, *args: Any, enable_gqa: bool) -> int:
        assert (q.shape[1] != k.shape[1]) == enable_gqa
        return int((SDPBackend.MATH if name == "efficient" and enable_gqa else backend).value)

    monkeypatch.setattr(ops, "_aten", Imitated(cudnn_dims))
    monkeypatch.setattr(ops.torch, "_fused_sdp_choice", pick)
    monkeypatch.setattr(ops, "_is_cpu", lambda x: False)
    for causal in (True, False):
        assert check(shape, torch.float64, causal).name == name
    assert check_blocks(shape, torch.float64).name == name


class Flash4:
    """The package's two functions, made of the plain formulas: sequences come before heads."""

    @staticmethod
    def _flash_attn_fwd(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, return_lse: bool
    ) -> tuple[Tensor, Tensor | None, None]:
        o, lse, _ = ops.MATH.forward(*(x.transpose(1, 2) for x in (q, k, v)), causal)
        return o.transpose(1, 2), lse if return_lse else None, None

    @staticmethod
    def _flash_attn_bwd(*args: Tensor, causal: bool) -> tuple[Tensor, ...]:
        *tensors, lse = args
        q, k, v, o, grad = (x.transpose(1, 2) for x in tensors)
        assert lse.is_contiguous()
        return tuple(x.transpose(1, 2) for x in ops.MATH.backward(grad, q, k, v, o, lse, None, causal))


@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_flash4_as_a_whole_and_by_blocks(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "_interface", lambda: Flash4)
    monkeypatch.setattr(ops, "runs_flash4", lambda q: True)
    for causal in (True, False):
        assert check(shape, torch.float64, causal) is ops.FLASH4
    assert check_blocks(shape, torch.float64) is ops.FLASH4
    q, k, v, grad = (x.requires_grad_() for x in inputs(shape))
    o = attention(q, k, v, causal=True)
    found = (o, *torch.autograd.grad(o, (q, k, v), grad))
    o, _, *gradients = textbook_gradients(q, k, v, grad, causal=True)
    assert max(relative_error(a.detach(), e) for a, e in zip(found, (o, *gradients), strict=True)) < 1e-13


@pytest.mark.parametrize(("installed", "here"), [(None, "it is not installed"), ("4.0.0b1", "4.0.0b1 is installed")])
def test_flash4_of_another_release_is_refused(
    installed: str | None, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash4, "_installed", lambda: installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    case = Experiment.canonical(model=model(), global_batch_size=1, attention="flash4")
    with pytest.raises(UnsupportedByEngine, match=f"flash-attn-4 4.0.0b36, and {here}: pip install"):
        choose_attention(case)


def test_flash4_on_an_older_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "_installed", lambda: flash4.RELEASE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA L40S")
    assert flash4.unusable() == "it needs a Hopper GPU or a newer one, not NVIDIA L40S"


# GPU


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("flash_attn") is None, reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_flash4_on_a_gpu(shape: Any, causal: bool) -> None:
    ops.choose_flash4(chosen=True)
    try:
        assert check(shape, torch.bfloat16, causal, "cuda") is ops.FLASH4
        assert check_blocks(shape, torch.bfloat16, "cuda") is ops.FLASH4
        q, k, v, grad = (x.requires_grad_() for x in inputs(shape, torch.bfloat16, "cuda"))
        o = attention(q, k, v, causal=True)
        found = (o, *torch.autograd.grad(o, (q, k, v), grad))
    finally:
        ops.choose_flash4(chosen=False)
    o, _, *gradients = textbook_gradients(q, k, v, grad, causal=True)
    assert max(relative_error(a.detach(), e) for a, e in zip(found, (o, *gradients), strict=True)) < 3e-2


SWITCHES = {name: [backend] for name, backend in CUDA_KERNELS.items()}
SWITCHES["efficient"].append(SDPBackend.MATH)  # what torch falls back to where groups of heads are in the way


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_gpu_kernels(name: str, shape: Any, causal: bool) -> None:
    with sdpa_kernel(SWITCHES[name]):
        assert check(shape, torch.bfloat16, causal, "cuda").name == name


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("name", CUDA_KERNELS)
def test_gpu_backward_of_a_block_of_keys(name: str, shape: Any) -> None:
    with sdpa_kernel(SWITCHES[name]):
        assert check_blocks(shape, torch.bfloat16, "cuda").name == name
