"""Rounding to bf16 is unbiased, is another one in every step, and is the same for an element in every layout."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from workloads.engine.update_ops.adamw import AdamW
from workloads.engine.update_ops.stochastic_rounding import Segment, philox, rounded

ONE = torch.ones(())


def test_words_are_those_of_philox() -> None:
    """The published vectors of Philox 4x32-10 (Random123, kat_vectors)."""
    words = philox(0, torch.zeros(1, dtype=torch.int64), torch.zeros(()))
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_every_choice_of_bits_together_has_no_bias() -> None:
    """Over all 65,536 values of the bits the mean is the number itself, for normal, negative and exact numbers."""
    bits = torch.arange(2**16)
    for value in (1.0 + 2**-9 + 2**-20, -3.14159, 1e-30, 0.5, 0.0, -(2.0**-126)):
        x = torch.full((2**16,), value)
        results = rounded(x, bits).double()
        assert results.mean().item() == x[0].double().item()
        assert len(results.unique()) == (1 if x[0] == x[0].bfloat16() else 2)
    assert rounded(torch.tensor([math.inf, -math.inf]), torch.tensor([65535, 65535])).tolist() == [math.inf, -math.inf]


def updated(weight: Tensor, states: torch.dtype, gradients: list[Tensor], rate: float = 0.01) -> AdamW:
    parameter = nn.Parameter(weight)
    run = Segment(0, weight.numel(), 7, 0, weight.numel(), weight.numel())
    optimizer = AdamW([parameter], state_dtype=states, segments=[[run]], lr=rate, betas=(0.9, 0.95), fused=True)
    for gradient in gradients:
        parameter.grad = gradient.to(weight.dtype)
        optimizer.update(ONE, None)
    return optimizer


def test_moments_in_bf16_follow_those_in_fp32() -> None:
    """A second moment changes by 0.05 of a squared gradient: near its mean that is often less than the half of a step
    that round-to-nearest needs. The mean over many elements with one gradient stays that of fp32."""
    gradients = [torch.full((20_000,), 1.0 + 0.02 * step) for step in range(20)]
    narrow = updated(torch.zeros(20_000), torch.bfloat16, gradients)
    wide = updated(torch.zeros(20_000), torch.float32, gradients)
    ((state,), (exact,)) = (list(one.state.values()) for one in (narrow, wide))
    for name in ("exp_avg", "exp_avg_sq"):
        assert state[name].dtype == torch.bfloat16
        # a step of bf16 is at most 2^-7 of a number; roundings of about 20 steps decay, and 20,000 elements average
        error = state[name].double().mean() / exact[name].double().mean() - 1
        assert abs(error) < 5 * 2**-7 / math.sqrt(20_000) * math.sqrt(20)
        assert state[name].unique().numel() > 1


def test_weights_in_bf16_move_by_less_than_their_steps() -> None:
    """Each update is 1e-4 of weights of 1, a 40th of the step below them; rounded to nearest they would stay 1."""
    gradients = [torch.ones(20_000)] * 30
    narrow = updated(torch.ones(20_000, dtype=torch.bfloat16), torch.float32, gradients, rate=1e-4)
    wide = updated(torch.ones(20_000), torch.float32, gradients, rate=1e-4)
    ((stored,), (exact,)) = (one.param_groups[0]["params"] for one in (narrow, wide))
    moved = 1 - exact.double().mean().item()
    assert stored.dtype == torch.bfloat16
    assert 1 - stored.double().mean().item() == pytest.approx(moved, rel=0.05)
    assert stored.unique().numel() > 1


def test_steps_and_tensors_have_bits_of_their_own() -> None:
    index = torch.arange(4096)
    first, second = (philox(5, index, torch.tensor(float(step))) for step in (1, 2))
    words = [*first, *second, *philox(6, index, ONE)]
    for number, one in enumerate(words):
        for other in words[:number]:
            assert (one == other).float().mean() < 0.01
        assert abs((one & 0xFFFF).double().mean() / 32767.5 - 1) < 0.05
