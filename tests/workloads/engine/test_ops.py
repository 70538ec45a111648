"""Fused operations against plain torch in fp64: on the CPU, under Triton's interpreter, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import gradcheck

from tests.pool import Pool
from tests.workloads.engine.op_checks import (
    EPS,
    check_cross_entropy,
    check_rms_norm,
    check_rms_norm_of_heads,
    check_rope,
    check_sharded_kernels,
    check_swiglu,
    compare,
    randn,
    reference_cross_entropy,
    relative_error,
    rope_tables,
)
from workloads.engine.ops import backend
from workloads.engine.ops.linear_cross_entropy import linear_cross_entropy
from workloads.engine.ops.rms_norm import rms_norm
from workloads.engine.ops.rope import apply_rope
from workloads.engine.ops.swiglu import swiglu

ROOT = Path(__file__).resolve().parents[3]


# CPU


@pytest.fixture(params=[1 << 20, 40], ids=["one block", "many blocks"])
def block_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "BLOCK_ELEMENTS", request.param)


@pytest.mark.usefixtures("block_elements")
class TestFloat64:
    """Exact to rounding against the references, and against finite differences."""

    def test_rms_norm(self) -> None:
        check_rms_norm(7, 13, torch.float64, "cpu", 1e-14)
        x, weight = randn(3, 5).requires_grad_(), randn(5).requires_grad_()
        assert gradcheck(partial(rms_norm, eps=EPS), (x, weight))

    @pytest.mark.parametrize("shape", [(2, 5, 4, 2, 6), (1, 3, 2, 1, 4)])
    def test_rms_norm_of_heads(self, shape: tuple[int, int, int, int, int]) -> None:
        check_rms_norm_of_heads(shape, torch.float64, "cpu", 1e-14)

    def test_swiglu(self) -> None:
        check_swiglu(7, 13, torch.float64, "cpu", 1e-14)
        assert gradcheck(swiglu, (randn(3, 10).requires_grad_(),))

    @pytest.mark.slow
    @pytest.mark.parametrize("transposed_grads", [False, True])
    def test_rope(self, transposed_grads: bool) -> None:
        check_rope((2, 5, 4, 2, 6), torch.float64, "cpu", 1e-14, transposed_grads)
        cos, sin = rope_tables(3, 4)
        q, k = randn(2, 3, 2, 4).requires_grad_(), randn(2, 3, 1, 4).requires_grad_()
        assert gradcheck(apply_rope, (q, k, cos, sin))

    @pytest.mark.slow
    @pytest.mark.parametrize("chunk_tokens", [4, 5, 11, 4096])
    def test_linear_cross_entropy(self, chunk_tokens: int) -> None:
        check_cross_entropy((11, 6, 19), chunk_tokens, torch.float64, "cpu", 1e-14)
        check_cross_entropy((11, 6, 19), chunk_tokens, torch.float64, "cpu", 1e-14, cap=0.7)

    def test_linear_cross_entropy_gradcheck(self) -> None:
        # With gradients from forward a second backward, which gradcheck makes, is refused.
        targets = torch.tensor([0, 6, 3, 3, 5])
        options = {"targets_T": targets, "scale": 0.3, "group": None, "chunk_tokens": 2, "grads_in_forward": False}
        op = partial(linear_cross_entropy, **options)
        assert gradcheck(op, (randn(5, 4).requires_grad_(), randn(7, 4).requires_grad_()))


def test_rotation_turns_the_first_half_into_the_second() -> None:
    # Half-split, not interleaved: with H = 4 and a quarter turn, (1, 0, 0, 0) becomes (0, 0, 1, 0).
    quarter, none = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    x = torch.tensor([1.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    q, _ = apply_rope(x, x, quarter, none)
    assert q.flatten().tolist() == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
def test_leading_dims_are_kept(leading: tuple[int, ...]) -> None:
    x = randn(*leading, 2, 8)
    assert torch.equal(swiglu(x).flatten(0, -2), swiglu(x.flatten(0, -2)))
    assert torch.equal(rms_norm(x, randn(8), EPS).flatten(0, -2), rms_norm(x.flatten(0, -2), randn(8), EPS))


@pytest.mark.slow
def test_bf16_is_rounded_once() -> None:
    # One rounding to 8 significant bits: at most 2^-9 for an element, less in the norm. Two roundings would show.
    check_rms_norm(64, 96, torch.bfloat16, "cpu", 2**-9)
    check_rms_norm_of_heads((2, 64, 1, 1, 128), torch.bfloat16, "cpu", 2**-9)
    check_swiglu(64, 96, torch.bfloat16, "cpu", 2**-9)
    check_rope((2, 16, 4, 2, 16), torch.bfloat16, "cpu", 2**-9, False)
    check_cross_entropy((64, 32, 100), 20, torch.bfloat16, "cpu", 2**-7)


def test_chunks_do_not_change_a_bf16_weight_gradient_beyond_rounding() -> None:
    """Products of chunks add up in fp32: 32 chunks are as exact as one (bf16 sums would lose several times as much)."""
    x, targets = (
        randn(512, 16, dtype=torch.bfloat16),
        torch.randint(40, (512,), generator=torch.Generator().manual_seed(1)),
    )
    weight = randn(40, 16, dtype=torch.bfloat16) / 4
    errors = []
    for chunk_tokens in (512, 16):
        op = partial(linear_cross_entropy, targets_T=targets, scale=1.0, group=None, chunk_tokens=chunk_tokens)
        wide = partial(reference_cross_entropy, targets=targets, scale=1.0)
        errors.append(compare(op, wide, [x, weight], 2**-6)["gradient 1"])
    assert errors[1] < 1.5 * errors[0]


def test_gradients_are_scaled_in_place_so_a_second_backward_is_refused() -> None:
    x, weight, targets = randn(5, 4).requires_grad_(), randn(7, 4).requires_grad_(), torch.tensor([0, 6, 3, 3, 5])
    loss = linear_cross_entropy(x, weight, targets, scale=1.0, group=None)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("grads_in_forward", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_that_stand_for_no_token_change_nothing(dtype: torch.dtype, grads_in_forward: bool) -> None:
    """Neither the loss nor a gradient changes, whatever is in these rows; theirs are exactly 0."""
    x, weight, targets = randn(5, 4, dtype=dtype), 9 * randn(7, 4, dtype=dtype), torch.tensor([0, 4, 3, 3, 2])
    of_all = x.clone().requires_grad_(), weight.clone().requires_grad_()
    of_tokens = x.clone().requires_grad_(), weight[:5].clone().requires_grad_()
    op = partial(linear_cross_entropy, targets_T=targets, scale=0.5, group=None, grads_in_forward=grads_in_forward)
    losses = op(*of_all, vocabulary=5), op(*of_tokens)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0)
    torch.testing.assert_close(
        of_all[0].grad, of_tokens[0].grad, rtol=1e-12 if dtype == torch.float64 else 1e-2, atol=0
    )
    gradient = of_all[1].grad
    assert gradient is not None
    torch.testing.assert_close(gradient[:5], of_tokens[1].grad, rtol=1e-12, atol=0)
    assert not gradient[5:].any()


@pytest.mark.slow
def test_the_package_imports_where_triton_is_missing() -> None:
    code = "import sys; sys.modules['triton'] = None; import workloads.engine.ops"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


# Vocabulary split over processes


VOCABULARY_TARGETS = [0, 9, 10, 19, 5, 15, 3, 3, 12, 11, 8]
VOCABULARY_CASES = [(grads_in_forward, chunk_tokens) for grads_in_forward in (True, False) for chunk_tokens in (4, 64)]


def vocabulary_inputs(dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x [11, 6], the whole vocabulary's weight [20, 6] (spread out: ranks differ in their largest logit), targets."""
    x, weight = randn(11, 6, dtype=dtype, device=device), 3 * randn(20, 6, dtype=dtype, device=device)
    return x, weight, torch.tensor(VOCABULARY_TARGETS, device=device)


def vocabulary_rank(rank: int, dtype: torch.dtype, device: str) -> list[tuple[float, np.ndarray, np.ndarray]]:
    """(loss, partial dx, dW of this rank's rows) for every case, as fp64."""
    x, weight, targets = vocabulary_inputs(dtype, device)
    results = []
    for grads_in_forward, chunk_tokens in VOCABULARY_CASES:
        mine = weight.chunk(dist.get_world_size())[rank].clone().requires_grad_()
        local_x = x.clone().requires_grad_()
        group = dist.group.WORLD
        options = {"scale": 0.1, "group": group, "chunk_tokens": chunk_tokens, "grads_in_forward": grads_in_forward}
        loss = linear_cross_entropy(local_x, mine, targets, **options)
        (2 * loss).backward()
        results.append((loss.item(), local_x.grad.double().cpu().numpy(), mine.grad.double().cpu().numpy()))
    return results


def check_vocabulary_parallel(pool: Pool, dtype: torch.dtype, device: str, tolerance: float) -> None:
    ranks = pool.run(vocabulary_rank, 2, dtype, device)
    x, weight, targets = vocabulary_inputs(dtype, device)
    x, weight = x.double().cpu().requires_grad_(), weight.double().cpu().requires_grad_()
    loss = reference_cross_entropy(x, weight, targets.cpu(), 0.1)
    (2 * loss).backward()
    for (loss_0, dx_0, dw_0), (loss_1, dx_1, dw_1) in zip(*ranks, strict=True):
        assert loss_0 == loss_1 == pytest.approx(loss.item(), rel=tolerance)
        assert relative_error(torch.from_numpy(dx_0 + dx_1), x.grad) <= tolerance
        assert relative_error(torch.from_numpy(np.concatenate([dw_0, dw_1])), weight.grad) <= tolerance


@pytest.mark.slow
def test_vocabulary_parallel_cross_entropy_is_the_unsharded_one(gloo_pool: Pool) -> None:
    check_vocabulary_parallel(gloo_pool, torch.float64, "cpu", 1e-14)


@pytest.mark.multi_gpu
def test_vocabulary_parallel_cross_entropy_on_nccl(nccl_pool: Pool) -> None:
    check_vocabulary_parallel(nccl_pool, torch.float64, "cuda", 1e-13)
    check_vocabulary_parallel(nccl_pool, torch.float32, "cuda", 1e-5)


# Triton kernels: interpreted on the CPU at small sizes, compiled on a GPU at real ones


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("script", ["op_checks.py", "kind_op_checks.py"])
def test_kernels_under_the_interpreter(script: str) -> None:
    triton = pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script))],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=170,
    )
    if "only 0-dimensional arrays can be converted to Python scalars" in done.stderr:
        pytest.skip(
            f"the interpreter of triton {triton.__version__} takes arrays of one element for numbers in loops over a "
            f"range, which numpy refuses from 2.4 on (here {np.__version__})"
        )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
class TestOnGPU:
    # bf16 has 8 significant bits; a result rounded once is off by 2^-9 at most and by about 0.6 * 2^-9 in the norm.
    TOLERANCE = SimpleNamespace(bf16=2**-9, fp32=2e-6)

    @pytest.mark.parametrize(("rows", "size"), [(16384, 4096), (1000, 5120), (4097, 128), (77, 4100), (33, 16384)])
    def test_rms_norm(self, rows: int, size: int) -> None:
        check_rms_norm(rows, size, torch.bfloat16, "cuda", self.TOLERANCE.bf16)
        check_rms_norm(rows, size, torch.float32, "cuda", self.TOLERANCE.fp32)

    @pytest.mark.parametrize("shape", [(2, 4096, 32, 8, 128), (3, 1000, 4, 1, 64), (1, 77, 7, 7, 80)])
    def test_rms_norm_of_heads(self, shape: tuple[int, int, int, int, int]) -> None:
        # A weight has so few elements that the norm of their roundings may be nearer to the worst one.
        check_rms_norm_of_heads(shape, torch.bfloat16, "cuda", 2 * self.TOLERANCE.bf16)
        check_rms_norm_of_heads(shape, torch.float32, "cuda", self.TOLERANCE.fp32)

    @pytest.mark.parametrize(("rows", "size"), [(4096, 14336), (1000, 1792), (77, 2731)])
    def test_swiglu(self, rows: int, size: int) -> None:
        check_swiglu(rows, size, torch.bfloat16, "cuda", self.TOLERANCE.bf16)
        check_swiglu(rows, size, torch.float32, "cuda", self.TOLERANCE.fp32)

    @pytest.mark.parametrize("transposed_grads", [False, True])
    @pytest.mark.parametrize("shape", [(2, 4096, 32, 8, 128), (3, 1000, 4, 1, 64), (1, 77, 7, 7, 80)])
    def test_rope(self, shape: tuple[int, int, int, int, int], transposed_grads: bool) -> None:
        check_rope(shape, torch.bfloat16, "cuda", self.TOLERANCE.bf16, transposed_grads)
        check_rope(shape, torch.float32, "cuda", self.TOLERANCE.fp32, transposed_grads)

    @pytest.mark.parametrize(
        ("shape", "chunk_tokens"), [((4096, 1024, 32064), 4096), ((2500, 512, 16032), 1024), ((513, 256, 50257), 200)]
    )
    def test_cross_entropy(self, shape: tuple[int, int, int], chunk_tokens: int) -> None:
        # Logits of about 1 rounded to bf16 are off by 2^-9 or so, and so is every probability made of them.
        check_cross_entropy(shape, chunk_tokens, torch.bfloat16, "cuda", 2**-7)
        check_cross_entropy(shape, chunk_tokens, torch.float32, "cuda", 1e-4)
        check_cross_entropy(shape, chunk_tokens, torch.float32, "cuda", 1e-4, cap=0.7)

    def test_sharded_vocabulary(self) -> None:
        check_sharded_kernels("cuda", 500, 32064)

    def test_weight_gradient_of_rms_norm_is_reproducible(self) -> None:
        x, weight = randn(5000, 4096, dtype=torch.bfloat16, device="cuda"), torch.ones(4096, device="cuda").bfloat16()
        weight.requires_grad_()
        runs = [torch.autograd.grad(rms_norm(x, weight, EPS).square().sum(), weight)[0] for _ in range(3)]
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])
