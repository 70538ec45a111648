"""The recurrences in chunks and segments beside one token after the other: any length, strong decays, low precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.workloads.engine.recurrent_reference import token_by_token
from workloads.engine.kind_ops import segments
from workloads.engine.kind_ops.delta_rule import CHUNK, delta_rule, unit
from workloads.engine.kind_ops.mamba_scan import MambaStep
from workloads.engine.kind_ops.segments import scanned

MAMBA = MambaStep(heads=4, head_dim=3, groups=2, state=5, kernel=4, eps=1e-5, bias=False)
COLUMNS = (2 * 12 + 2 * 10 + 4, 12 + 2 * 10)
"""Columns of its projection, and of what is convolved."""


def drawn(length: int, *, channels: bool, decay: float) -> list[Tensor]:
    """q, k, v, log decays and rates of two sequences with three heads, in float64."""
    generator = torch.Generator().manual_seed(length)
    q, k, v, rates = (torch.randn(2, length, 3, *size, generator=generator).double() for size in ((6,), (6,), (4,), ()))
    decays = -decay * torch.rand(2, length, 3, *((6,) if channels else ()), generator=generator).double()
    return [unit(q), unit(k), v, decays, rates.sigmoid()]


def expected(q: Tensor, k: Tensor, v: Tensor, decays: Tensor, rates: Tensor) -> Tensor:
    return token_by_token(q, k, v, (decays if decays.dim() == 4 else decays.unsqueeze(3)).exp(), rates)


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("length", [1, 7, 8, CHUNK, CHUNK + 1, 2 * CHUNK + 9])
def test_chunks_equal_single_tokens_at_any_length(length: int, channels: bool) -> None:
    q, k, v, decays, rates = drawn(length, channels=channels, decay=0.3)
    o, _ = delta_rule(q * 6**-0.5, k, v, decays, rates, q.new_zeros(2, 3, 6, 4))
    torch.testing.assert_close(o, expected(q, k, v, decays, rates), rtol=0, atol=1e-13)


@pytest.mark.parametrize("channels", [False, True])
def test_strong_decays_do_not_overflow(channels: bool) -> None:
    """A state that is forgotten at once: the sum of log decays over a chunk is far below what fp32 can express."""
    parts = drawn(100, channels=channels, decay=40.0)
    q, k, v, decays, rates = (part.float().requires_grad_() for part in parts)
    o, _ = delta_rule(q * 6**-0.5, k, v, decays, rates, q.new_zeros(2, 3, 6, 4))
    torch.testing.assert_close(o.double(), expected(*parts), rtol=0, atol=1e-5)
    o.sum().backward()
    for part in (q, k, v, decays, rates):
        assert part.grad is not None and part.grad.isfinite().all()


def test_states_pass_from_part_to_part() -> None:
    """Two halves, with the state of the first given to the second, are the whole."""
    parts = drawn(90, channels=True, decay=0.3)
    whole, last = delta_rule(*parts, parts[0].new_zeros(2, 3, 6, 4))
    first, state = delta_rule(*(part[:, :37] for part in parts), parts[0].new_zeros(2, 3, 6, 4))
    second, after = delta_rule(*(part[:, 37:] for part in parts), state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(after, last, rtol=0, atol=1e-13)


def mamba_inputs(length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, length, COLUMNS[0]), (COLUMNS[1], 4), (12,), (12,)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def mamba(inputs: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the gradients of all inputs."""
    y = scanned(MAMBA, inputs[:1], inputs[1:])
    return y, list(torch.autograd.grad(y.square().sum(), inputs))


def test_segments_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = mamba_inputs(200, torch.float64)
    y, gradients = mamba(inputs)  # two segments of two sequences
    monkeypatch.setattr(segments, "SEGMENT_TOKENS", 1)  # a segment for every chunk
    others = mamba(inputs)
    torch.testing.assert_close(others[0], y, rtol=1e-12, atol=1e-13)
    for one, other in zip(gradients, others[1], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-11, atol=1e-11)


def test_states_and_gates_are_in_fp32_beside_bf16_inputs() -> None:
    """The error is that of rounded inputs and outputs, 2^-9 each, and does not grow along the sequence."""
    inputs = mamba_inputs(300, torch.bfloat16)
    y, gradients = mamba(inputs)
    exact, exact_gradients = mamba([one.detach().double().requires_grad_() for one in inputs])
    assert y.dtype == torch.bfloat16 and {one.dtype for one in gradients} == {torch.bfloat16}
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-4)
    for one, other in zip(gradients, exact_gradients, strict=True):
        assert ((one.double() - other).norm() / other.norm()).item() < 0.01


def test_only_the_inputs_are_kept() -> None:
    inputs, kept = mamba_inputs(70, torch.float32), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        y = scanned(MAMBA, inputs[:1], inputs[1:])
    assert y.requires_grad
    assert [one.data_ptr() for one in kept] == [one.data_ptr() for one in inputs]
