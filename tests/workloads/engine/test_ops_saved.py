"""What the fused operations save for backward, and how they live with checkpointing, compile and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.workloads.engine.op_checks import (
    EPS,
    randn,
    rope_tables,
)
from workloads.engine.ops.linear import accumulate
from workloads.engine.ops.linear_cross_entropy import linear_cross_entropy
from workloads.engine.ops.rms_norm import rms_norm
from workloads.engine.ops.rope import apply_rope
from workloads.engine.ops.swiglu import swiglu


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
                accumulate(total, dz, x, first=first)
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


def test_a_gradient_that_nobody_asked_for_is_not_computed() -> None:
    x, weight, targets = randn(5, 4), randn(7, 4).requires_grad_(), torch.tensor([0, 6, 3, 3, 5])
    with saved_tensors() as saved:
        linear_cross_entropy(x, weight, targets, scale=1.0, group=None)
    assert saved == [((7, 4), torch.float64)]
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, targets, scale=1.0, group=None).requires_grad


@pytest.mark.gpu
def test_saved_tensors_are_those_of_the_cpu() -> None:
    saved = []
    for device in ("cpu", "cuda"):
        inputs = [t.detach().to(device, torch.bfloat16).requires_grad_() for t in small_inputs()]
        head = [randn(7, 5, dtype=torch.bfloat16).to(device).requires_grad_()]
        with saved_tensors() as seen:
            targets = torch.zeros(8, dtype=torch.int64, device=device)
            run_everything([*inputs, *rope_tables(4, 4, device)], head, targets, True)
        saved.append(seen)
    assert saved[0] == saved[1]
