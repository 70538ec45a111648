"""Checks of activations and of experts' biases against plain torch in fp64, on any device.

Run as a script (with ``TRITON_INTERPRET=1``), this file checks the Triton kernels on CPU tensors.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.nn import functional

from tests.workloads.engine.op_checks import compare, randn
from workloads.engine.kind_ops import activations, group_bias, weighted_activations
from workloads.engine.kind_ops.activations import gelu_gated, relu2
from workloads.engine.kind_ops.group_bias import add_group_bias, with_group_bias
from workloads.engine.kind_ops.mamba_inputs import spread, with_skip
from workloads.engine.kind_ops.weighted_activations import weighted_activation
from workloads.engine.ops.backend import Backend
from workloads.engine.ops.grouped_linear import RowGroups
from workloads.spec.layer_kinds.mlp import DenseMLP

GPT_OSS = DenseMLP(width=24, activation="clamped_silu", limit=0.7, slope=1.702, offset=1.0)
DEEPSEEK_V4 = dataclasses.replace(GPT_OSS, slope=1.0, offset=0.0)
GELU = DenseMLP(width=24, activation="gelu_tanh")
SILU = DenseMLP(width=24, activation="silu")
RELU2 = DenseMLP(width=24, activation="relu2", gated=False)


def plain_activation(x: Tensor, weights: Tensor, mlp: DenseMLP) -> Tensor:
    if mlp.activation == "relu2":
        return functional.relu(x) ** 2 * weights[:, None]
    gate, up = x.chunk(2, 1)
    if mlp.activation == "silu":
        return functional.silu(gate) * up * weights[:, None]
    if mlp.activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up * weights[:, None]
    gate, up = torch.where(gate > mlp.limit, mlp.limit, gate), up.clamp(-mlp.limit, mlp.limit)
    return gate * torch.sigmoid(mlp.slope * gate) * (up + mlp.offset) * weights[:, None]


def check_activation(mlp: DenseMLP, rows: int, columns: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    x = randn(rows, columns * (2 if mlp.gated else 1), dtype=dtype, device=device)
    weights = randn(rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)
    compare(
        lambda x, w: weighted_activation(x, w, mlp), lambda x, w: plain_activation(x, w, mlp), [x, weights], tolerance
    )


def row_groups(sizes: list[int], device: str = "cpu") -> RowGroups:
    return RowGroups(torch.tensor(sizes).cumsum(0).to(device, torch.int32), lambda: sizes)


def check_dense(mlp: DenseMLP, rows: int, columns: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    x = randn(rows, columns * (2 if mlp.gated else 1), dtype=dtype, device=device)
    one = torch.ones(rows, device=device)
    compare(gelu_gated if mlp.gated else relu2, lambda x: plain_activation(x, one, mlp), [x], tolerance)


def check_bias(sizes: list[int], out: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    which, rows = row_groups(sizes, device), sum(sizes)
    y, bias = (randn(n, c, dtype=dtype, device=device) for n, c in ((rows, out), (len(sizes) * out // 2, 1)))
    weights = randn(rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32, device=device)

    def plain(y: Tensor, bias: Tensor, weights: Tensor) -> Tensor:
        of_row = bias.view(len(sizes), -1).repeat_interleave(torch.tensor(sizes, device=device), 0)
        return y + functional.pad(of_row * weights[:, None], (out // 2, 0))

    compare(lambda y, bias, w: add_group_bias(y.clone(), bias, which, w, part=1), plain, [y, bias, weights], tolerance)
    whole = randn(len(sizes) * out, 1, dtype=dtype, device=device)

    def unweighted(y: Tensor, bias: Tensor) -> Tensor:
        return y + bias.view(len(sizes), -1).repeat_interleave(torch.tensor(sizes, device=device), 0)

    compare(lambda y, bias: add_group_bias(y.clone(), bias, which), unweighted, [y, whole], tolerance)
    assert torch.equal(with_group_bias(y.clone(), whole, which), add_group_bias(y.clone(), whole, which))


def check_mamba_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str, tolerance: float) -> None:
    """``shape``: sequences, tokens, heads, channels, groups, numbers of a state. Gates are columns of a wider
    tensor."""
    sequences, tokens, heads, size, groups, state = shape
    x, y = (randn(sequences, tokens, heads, size, dtype=dtype, device=device, seed=seed) for seed in range(2))
    b, c = (randn(sequences, tokens, groups, state, dtype=dtype, device=device, seed=seed) for seed in range(2))
    steps = randn(sequences, tokens, heads, dtype=torch.float32, device=device).abs().to(dtype).float()
    skip, wide = randn(heads, dtype=dtype, device=device), randn(sequences, tokens, heads * size + 3, device=device)

    def joined(*parts: Tensor) -> Tensor:
        return torch.cat([part.flatten() for part in parts])

    def plain_spread(x: Tensor, b: Tensor, c: Tensor, steps: Tensor) -> Tensor:
        of_heads = (one.repeat_interleave(heads // groups, 2) for one in (b, c))
        return joined(x * steps.unsqueeze(3), *of_heads)

    compare(lambda *inputs: joined(*spread(*inputs)), plain_spread, [x, b, c, steps], tolerance)
    compare(
        lambda y, x, skip, wide: joined(*with_skip(y, x, skip, wide[:, :, 2:-1])),
        lambda y, x, skip, wide: joined(y + x * skip.unsqueeze(1), wide[:, :, 2:-1]),
        [y, x, skip, wide.to(dtype)],
        tolerance,
    )


def interpreted_checks() -> None:
    """Every kernel, on rows of one block and of two, and on a group without rows."""
    for module in (activations, group_bias, weighted_activations):
        module.backend_of = lambda *tensors: Backend.TRITON  # type: ignore[attr-defined]
    for mlp in (SILU, GPT_OSS, DEEPSEEK_V4, GELU, RELU2):
        check_activation(mlp, 3, 2051, torch.float32, "cpu", 2e-6)
        check_activation(mlp, 7, 24, torch.bfloat16, "cpu", 2**-7)  # the interpreter cuts bf16 off
    for mlp in (GELU, RELU2):
        check_dense(mlp, 5, 40, torch.float32, "cpu", 2e-6)
    check_bias([5, 0, 11, 3], 12, torch.float32, "cpu", 2e-6)
    check_bias([2, 1], 4100, torch.float32, "cpu", 2e-6)
    for shape in ((1, 5, 6, 5, 2, 7), (2, 33, 2, 8, 1, 4)):
        check_mamba_inputs(shape, torch.float32, "cpu", 3e-6)
        check_mamba_inputs(shape, torch.bfloat16, "cpu", 2**-6)  # the interpreter cuts bf16 off


if __name__ == "__main__":
    interpreted_checks()
