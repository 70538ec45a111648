"""A checkpointed block: what torch's own checkpoint gives, and what it says where its promises are broken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from workloads.engine.layers.checkpoint import Block, checkpointed
from workloads.engine.observing.memory import StorageTracker
from workloads.engine.ops.linear import DeferredGradients, linear


def _block(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Saves its input, outputs and tensors of its own, and ends with operations that save nothing."""
    y = (x * x * cos).sigmoid()
    z = torch.softmax(y @ y.t(), dim=-1) @ (x * sin)
    return x + 2 * z


def _by_torch(block: Block, *inputs: Tensor) -> Tensor:
    out: Tensor = checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


def _by_us(block: Block, *inputs: Tensor) -> Tensor:
    return checkpointed(block, *inputs, nullcontext)  # type: ignore[arg-type]


def _run(call: Callable[..., Tensor], of: Block = _block) -> tuple[Tensor, list[int], int]:
    """(gradient, bytes alive at each forward of a block, most bytes alive) of three blocks in a row."""
    cos, sin = torch.linspace(0.1, 0.9, 6), torch.linspace(0.2, 0.7, 6)
    x = torch.arange(30, dtype=torch.float32).view(5, 6).div(30).requires_grad_()
    tracker, alive = StorageTracker(), []
    for there in (x, cos, sin):
        tracker.add(there.detach())

    def block(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        alive.append(tracker.current)
        return of(x, cos, sin)

    with tracker:
        y = x
        for _ in range(3):
            y = call(block, y, cos, sin)
        y.sum().backward()
    assert x.grad is not None
    return x.grad, alive, tracker.peak


def test_gradients_and_memory_are_those_of_torchs_checkpoint() -> None:
    expected, got = _run(_by_torch), _run(_by_us)
    assert len(expected[1]) == 6, "each block runs twice"
    assert torch.equal(expected[0], got[0])
    assert expected[1:] == got[1:]


def test_a_saved_choice_is_no_more_memory_on_fake_tensors_than_with_torchs_checkpoint() -> None:
    """As a router's forced choice is, whose numbers are known where all else is fake."""
    choice = torch.arange(30).view(5, 6) % 6

    def choosing(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return _block(x.gather(1, choice), cos, sin)

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert _run(_by_us, choosing)[1:] == _run(_by_torch, choosing)[1:]


def test_an_input_that_is_changed_in_place_is_told() -> None:
    x = torch.ones(5, 6, requires_grad=True) + 1
    y = _by_us(_block, x, torch.ones(6), torch.ones(6)).sum()
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.backward()


def test_a_second_forward_that_saves_less_is_told() -> None:
    runs: list[int] = []

    def forgets(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        runs.append(1)
        return x * cos if len(runs) > 1 else (x * cos).sigmoid() * sin

    x = torch.ones(6, requires_grad=True)
    y = _by_us(forgets, x, torch.ones(6), torch.ones(6)).sum()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"saved \d tensors in the first forward and 1 in the second"):
            y.backward(retain_graph=True)


def test_a_second_backward_is_told() -> None:
    x = torch.ones(5, 6, requires_grad=True)
    y = _by_us(_block, x, torch.ones(6), torch.ones(6)).sum()
    y.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def test_the_last_product_is_not_repeated() -> None:
    """Neither as autograd's own function nor where its weight's gradient is added to a sum."""
    for deferred in (None, DeferredGradients()):
        weight = torch.ones(6, 6, requires_grad=True)

        def block(x: Tensor, cos: Tensor, sin: Tensor, deferred: DeferredGradients | None = deferred) -> Tensor:
            return x + linear(linear(x, weight, deferred).relu(), weight, deferred)  # noqa: B023

        x = torch.ones(5, 6, requires_grad=True)
        out = checkpointed(block, x, torch.ones(6), torch.ones(6), nullcontext)  # type: ignore[arg-type]
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        assert counter.get_total_flops() == (1 + 4) * 2 * 5 * 6 * 6, "one product again, and four of gradients"
