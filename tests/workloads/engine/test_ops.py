"""Fused operations against plain torch in fp64: on the CPU, under Triton's interpreter, and on a GPU."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
from workloads.engine.ops import linear_cross_entropy as ops_linear_cross_entropy
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


def test_a_gradient_that_nobody_asked_for_is_not_computed() -> None:
    x, weight, targets = randn(5, 4), randn(7, 4).requires_grad_(), torch.tensor([0, 6, 3, 3, 5])
    with saved_tensors() as saved:
        linear_cross_entropy(x, weight, targets, scale=1.0, group=None)
    assert saved == [((7, 4), torch.float64)]
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, targets, scale=1.0, group=None).requires_grad


def test_gradients_are_scaled_in_place_so_a_second_backward_is_refused() -> None:
    x, weight, targets = randn(5, 4).requires_grad_(), randn(7, 4).requires_grad_(), torch.tensor([0, 6, 3, 3, 5])
    loss = linear_cross_entropy(x, weight, targets, scale=1.0, group=None)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# What is saved for backward, and how the operations live with checkpointing, compile and fake tensors


@contextlib.contextmanager
def saved_tensors():
    """Shapes and dtypes saved for backward, in order."""
    saved: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def small_block(x: Tensor, weight: Tensor, projection: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All three operations of a block and a matmul. x [8, 12] as 2 sequences of 4 tokens with 2 + 1 heads of 4."""
    qk = rms_norm(x, weight, EPS).view(2, 4, 3, 4)
    q, k = apply_rope(*qk.split([2, 1], dim=2), cos, sin)
    return swiglu(torch.cat([q.flatten(2), k.flatten(2)], dim=2).flatten(0, 1) @ projection)


def small_inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    inputs = [randn(8, 12, dtype=dtype), randn(12, dtype=dtype), randn(12, 10, dtype=dtype)]
    return [tensor.requires_grad_() for tensor in inputs]


def gradients(run: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(*inputs, *rope_tables(4, 4)).square().sum(), inputs)


def keep_matmuls(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("selective", [False, True])
def test_recomputed_gradients_are_the_same(selective: bool) -> None:
    context = {"context_fn": partial(create_selective_checkpoint_contexts, keep_matmuls)} if selective else {}
    inputs = small_inputs()
    recomputed = gradients(partial(checkpoint, small_block, use_reentrant=False, **context), inputs)
    for a, b in zip(recomputed, gradients(small_block, inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("grads_in_forward", [True, False])
def test_recomputed_cross_entropy(grads_in_forward: bool) -> None:
    x, weight, targets = randn(5, 4).requires_grad_(), randn(7, 4).requires_grad_(), torch.tensor([0, 6, 3, 3, 5])
    op = partial(
        linear_cross_entropy,
        targets_T=targets,
        scale=0.3,
        group=None,
        chunk_tokens=2,
        grads_in_forward=grads_in_forward,
    )
    recomputed = torch.autograd.grad(checkpoint(op, x, weight, use_reentrant=False), [x, weight])
    for a, b in zip(recomputed, torch.autograd.grad(op(x, weight), [x, weight]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_compiled_blocks_take_the_plain_expressions() -> None:
    """One graph without our functions in it, with the eager gradients."""
    graphs: list[torch.fx.GraphModule] = []

    def collect(graph: torch.fx.GraphModule, example_inputs: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    inputs = small_inputs()
    torch._dynamo.reset()
    compiled = gradients(torch.compile(small_block, backend=collect, fullgraph=True), inputs)
    for a, b in zip(compiled, gradients(small_block, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if "autograd_function" in str(node.target)]


def run_everything(inputs: list[Tensor], head: list[Tensor], targets: Tensor, grads_in_forward: bool) -> Tensor:
    hidden = small_block(*inputs)
    loss = linear_cross_entropy(
        hidden, head[0], targets, scale=1.0, group=None, chunk_tokens=3, grads_in_forward=grads_in_forward
    )
    loss.backward()
    return loss


@pytest.mark.parametrize("grads_in_forward", [True, False])
def test_fake_tensors_save_what_real_tensors_save(grads_in_forward: bool) -> None:
    def make() -> tuple[list[Tensor], list[Tensor], Tensor]:
        inputs = [tensor.detach().to(torch.bfloat16).requires_grad_() for tensor in small_inputs()]
        head = [randn(7, 5, dtype=torch.bfloat16).requires_grad_()]
        return [*inputs, *rope_tables(4, 4)], head, torch.zeros(8, dtype=torch.int64)

    with saved_tensors() as real:
        inputs, head, targets = make()
        loss = run_everything(inputs, head, targets, grads_in_forward)
    mode = FakeTensorMode()
    fake_inputs = [mode.from_tensor(tensor) for tensor in inputs]
    fake_head = [mode.from_tensor(tensor) for tensor in head]
    with mode, saved_tensors() as fake:
        fake_loss = run_everything(fake_inputs, fake_head, mode.from_tensor(targets), grads_in_forward)
    assert fake == real
    assert (fake_loss.shape, fake_loss.dtype) == (loss.shape, loss.dtype)
    for a, b in zip([*fake_inputs[:3], *fake_head], [*inputs[:3], *head], strict=True):
        assert (a.grad.shape, a.grad.dtype) == (b.grad.shape, b.grad.dtype)


class Allocations(TorchDispatchMode):
    """Names of the operations whose results are new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.names.append(str(func))
        return result


def test_a_fake_gradient_is_neither_computed_nor_given_memory_of_its_own() -> None:
    """A GPU adds a bf16 product to the fp32 sum in place. Torch's way of doing that to fake tensors is another in every
    version: 2.11 has none, 2.13 allocates the product and the sum."""
    with FakeTensorMode():
        total = torch.empty(7, 5, dtype=torch.float32)
        dz, x = torch.empty(3, 7, dtype=torch.bfloat16), torch.empty(3, 5, dtype=torch.bfloat16)
        with Allocations() as seen:
            for first in (True, False):
                ops_linear_cross_entropy._accumulate(total, dz, x, first=first)
    assert seen.names == []


def test_saved_for_backward() -> None:
    """The whole list: inputs, one fp32 number a token, the tables, and both gradients of the loss."""
    x, weight = randn(6, 8, dtype=torch.bfloat16).requires_grad_(), randn(8, dtype=torch.bfloat16).requires_grad_()
    bf16, fp32 = torch.bfloat16, torch.float32
    with saved_tensors() as saved:
        rms_norm(x, weight, EPS)
    assert saved == [((6, 8), bf16), ((8,), bf16), ((6,), fp32)]
    heads = x.view(1, 6, 4, 2)[:, :, 1:3]
    with saved_tensors() as saved:
        rms_norm(heads, weight[:2], EPS)
    assert saved == [((1, 6, 2, 2), bf16), ((2,), bf16), ((1, 6, 2), fp32)]
    with saved_tensors() as saved:
        swiglu(x)
    assert saved == [((6, 8), bf16)]
    with saved_tensors() as saved:
        apply_rope(x.view(1, 6, 2, 4), x.view(1, 6, 2, 4), *rope_tables(6, 4))
    assert saved == [((6, 2), fp32), ((6, 2), fp32)]
    head, targets = randn(11, 8, dtype=torch.bfloat16).requires_grad_(), torch.arange(6)
    with saved_tensors() as saved:
        linear_cross_entropy(x, head, targets, scale=1.0, group=None)
    assert saved == [((6, 8), bf16), ((11, 8), bf16)]
    with saved_tensors() as saved:
        linear_cross_entropy(x, head, targets, scale=1.0, group=None, grads_in_forward=False)
    assert saved == [((6, 8), bf16), ((11, 8), bf16), ((6,), torch.int64), ((6,), fp32)]


def test_heads_of_a_projection_are_saved_without_a_copy() -> None:
    projection = randn(2, 3, 4, 8).requires_grad_()
    heads = projection[:, :, :2]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        rms_norm(heads, randn(8), EPS)
    assert kept[0].untyped_storage().data_ptr() == projection.untyped_storage().data_ptr()


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


def test_kernels_under_the_interpreter() -> None:
    triton = pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("op_checks.py"))],
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

    def test_sharded_vocabulary(self) -> None:
        check_sharded_kernels("cuda", 500, 32064)

    def test_weight_gradient_of_rms_norm_is_reproducible(self) -> None:
        x, weight = randn(5000, 4096, dtype=torch.bfloat16, device="cuda"), torch.ones(4096, device="cuda").bfloat16()
        weight.requires_grad_()
        runs = [torch.autograd.grad(rms_norm(x, weight, EPS).square().sum(), weight)[0] for _ in range(3)]
        assert torch.equal(runs[0], runs[1]) and torch.equal(runs[0], runs[2])

    def test_saved_tensors_are_those_of_the_cpu(self) -> None:
        saved = []
        for device in ("cpu", "cuda"):
            inputs = [t.detach().to(device, torch.bfloat16).requires_grad_() for t in small_inputs()]
            head = [randn(7, 5, dtype=torch.bfloat16).to(device).requires_grad_()]
            with saved_tensors() as seen:
                targets = torch.zeros(8, dtype=torch.int64, device=device)
                run_everything([*inputs, *rope_tables(4, 4, device)], head, targets, True)
            saved.append(seen)
        assert saved[0] == saved[1]
