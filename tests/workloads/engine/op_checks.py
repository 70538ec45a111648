"""What the tests of the fused operations are made of: fp64 references, and one check for each operation.

Run as a script (with ``TRITON_INTERPRET=1``), this file checks the Triton kernels on CPU tensors.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workloads.engine.ops import backend, fp8
from workloads.engine.ops.linear_cross_entropy import linear_cross_entropy
from workloads.engine.ops.rms_norm import rms_norm
from workloads.engine.ops.rope import apply_rope
from workloads.engine.ops.swiglu import swiglu
from workloads.engine.update_ops import adamw
from workloads.engine.update_ops.adamw import AdamW
from workloads.engine.update_ops.sgd import SGD
from workloads.engine.update_ops.stochastic_rounding import Segment

EPS = 1e-5


def randn(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu", seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float32, device=device, generator=generator).to(dtype)


def rope_tables(seq_len: int, head_dim: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    angle = torch.outer(torch.arange(seq_len, dtype=torch.float64, device=device), 10_000.0**-exponent)
    return angle.cos().float(), angle.sin().float()


# Independent references: textbook formulas, not the operations' own code.


def reference_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def reference_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs as complex numbers, multiplied by ``exp(i * angle)``."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos, sin).to(x.device)[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1)


def reference_swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def reference_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, scale: float, cap: float = 0.0) -> Tensor:
    logits = x @ weight.t()
    return scale * F.cross_entropy(cap * torch.tanh(logits / cap) if cap else logits, targets, reduction="sum")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def compare(
    op: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor], tolerance: float
) -> dict[str, float]:
    """Output and gradients of ``op`` against ``reference`` on the same values in fp64; returns the relative errors."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    actual, expected = op(*inputs), reference(*wide)
    grad = randn(*actual.shape, dtype=actual.dtype, device=str(actual.device), seed=7)
    actual_grads = torch.autograd.grad(actual, inputs, grad)
    expected_grads = torch.autograd.grad(expected, wide, grad.double())
    errors = {"output": relative_error(actual, expected)}
    for index, (a, e) in enumerate(zip(actual_grads, expected_grads, strict=True)):
        assert a.dtype == inputs[index].dtype
        errors[f"gradient {index}"] = relative_error(a, e)
    assert all(error <= tolerance for error in errors.values()), errors
    return errors


def check_rms_norm(rows: int, size: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    x, weight = randn(rows, size, dtype=dtype, device=device), randn(size, dtype=dtype, device=device)
    compare(partial(rms_norm, eps=EPS), reference_rms_norm, [x, weight], tolerance)


def check_rms_norm_of_heads(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, tolerance: float
) -> None:
    """``shape`` (B, S, N, K, H): query and key heads of one fused projection are normed where they lie."""
    batch, seq_len, heads, kv_heads, head_dim = shape

    def norm(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, norm_of: Callable[..., Tensor]) -> Tensor:
        q, k, v = qkv.view(batch, seq_len, -1, head_dim).split([heads, kv_heads, kv_heads], dim=2)
        normed = norm_of(q, q_weight), norm_of(k, k_weight)
        assert all(n.is_contiguous() and n.shape == x.shape for n, x in zip(normed, (q, k), strict=True))
        return torch.cat([*normed, v], dim=2).flatten(0, 1)

    qkv = randn(batch * seq_len, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    weights = [randn(head_dim, dtype=dtype, device=device, seed=seed) for seed in (1, 2)]
    fused = partial(norm, norm_of=partial(rms_norm, eps=EPS))
    plain = partial(norm, norm_of=lambda x, weight: reference_rms_norm(x.contiguous(), weight))
    compare(fused, plain, [qkv, *weights], tolerance)


def check_swiglu(rows: int, size: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    compare(swiglu, reference_swiglu, [randn(rows, 2 * size, dtype=dtype, device=device)], tolerance)


def check_rope(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, tolerance: float, transposed_grads: bool
) -> None:
    """``shape`` (B, S, N, K, H): views of one fused projection in, results laid out as attention's gradients are."""
    batch, seq_len, heads, kv_heads, head_dim = shape
    cos, sin = rope_tables(seq_len, head_dim, device)

    def split(qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.view(batch, seq_len, -1, head_dim).split([heads, kv_heads, kv_heads], dim=2)

    def join(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if transposed_grads:  # the gradient then reaches the operation with the strides of [B, N, S, H]
            q, k = q.transpose(1, 2).contiguous().transpose(1, 2), k.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], dim=1)

    def fused(qkv: Tensor) -> Tensor:
        q, k, v = split(qkv)
        rotated = apply_rope(q, k, cos, sin)
        assert all(r.is_contiguous() and r.shape == x.shape for r, x in zip(rotated, (q, k), strict=True))
        return join(*rotated, v)

    def plain(qkv: Tensor) -> Tensor:
        q, k, v = split(qkv)
        return join(reference_rope(q, cos.double(), sin.double()), reference_rope(k, cos.double(), sin.double()), v)

    qkv = randn(batch * seq_len, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    compare(fused, plain, [qkv], tolerance)


def check_cross_entropy(
    shape: tuple[int, int, int],
    chunk_tokens: int,
    dtype: torch.dtype,
    device: str,
    tolerance: float,
    cap: float = 0.0,
) -> None:
    """``shape`` (T, D, V). Gradients made in forward and in backward; the loss multiplied by 1 and by 3. With ``cap``
    the last two rows stand for no token."""
    tokens, size, vocabulary = shape
    x = randn(tokens, size, dtype=dtype, device=device)
    weight = randn(vocabulary, size, dtype=dtype, device=device) / math.sqrt(size)
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(3)).to(device)
    known = vocabulary - 2 if cap else vocabulary
    targets[0], targets[-1] = 0, known - 1
    targets.clamp_(max=known - 1)
    scale = 1 / (5 * tokens)
    for grads_in_forward in (True, False):
        for factor in (1.0, 3.0):
            options = {"scale": scale, "group": None, "chunk_tokens": chunk_tokens, "cap": cap}
            options |= {"vocabulary": known} if cap else {}

            def fused(x: Tensor, weight: Tensor) -> Tensor:
                loss = linear_cross_entropy(x, weight, targets, **options, grads_in_forward=grads_in_forward)  # noqa: B023
                assert loss.shape == () and loss.dtype == backend.accumulation_dtype(dtype)
                return loss * factor  # noqa: B023

            def plain(x: Tensor, weight: Tensor) -> Tensor:
                return reference_cross_entropy(x, weight[:known], targets, scale, cap) * factor  # noqa: B023

            compare(fused, plain, [x, weight], tolerance)


# Triton kernels


def interpreted_checks() -> None:
    """Every kernel, on sizes with and without ragged edges, more tiles than programs and several chunks."""
    from workloads.engine.ops import triton_cross_entropy, triton_rms_norm

    chosen = {backend.Backend.TORCH: backend.Backend.TRITON}
    choose = backend.backend_of
    for module in ("rms_norm", "rope", "swiglu", "chunked_logits"):
        loaded = sys.modules[f"workloads.engine.ops.{module}"]
        loaded.backend_of = lambda *tensors: (  # type: ignore[attr-defined]
            choose(*tensors) if tensors[0].dtype == torch.float64 else chosen[choose(*tensors)]
        )
    triton_rms_norm._TILE = 64
    triton_rms_norm._BACKWARD_THREADS = 128  # two programs
    triton_cross_entropy._BLOCK, triton_cross_entropy._MAX_PROGRAMS = 64, 2
    for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 2**-8)):
        for rows, size in ((8, 16), (9, 13), (1, 7), (5, 100)):
            check_rms_norm(rows, size, dtype, "cpu", tolerance)
            check_swiglu(rows, size, dtype, "cpu", tolerance)
        for shape in ((2, 5, 4, 2, 12), (1, 3, 3, 1, 8)):
            for transposed_grads in (False, True):
                check_rope(shape, dtype, "cpu", tolerance, transposed_grads)
            check_rms_norm_of_heads(shape, dtype, "cpu", 2 * tolerance)  # the interpreter cuts bf16 off
    for shape, chunk_tokens in (((7, 6, 150), 3), ((4, 8, 64), 64)):
        check_cross_entropy(shape, chunk_tokens, torch.float32, "cpu", 3e-6)
        check_cross_entropy(shape, chunk_tokens, torch.float32, "cpu", 3e-6, cap=0.7)
    check_sharded_kernels("cpu", 10, 70)
    for module in ("ops.fp8", "update_ops.adamw", "update_ops.sgd"):
        loaded = sys.modules[f"workloads.engine.{module}"]
        loaded.backend_of = lambda *tensors: chosen[choose(*tensors)]  # type: ignore[attr-defined]
    check_fp8_casts("cpu", (128, 256), interpreted=True)
    check_casts_of_groups("cpu", 3, (40, 96), interpreted=True)
    check_largest_values("cpu", 9, 40)
    check_adamw("cpu", (5, 70))
    check_adamw_in_bf16("cpu", (5, 70))
    check_sgd("cpu", (5, 70))


def check_fp8_casts(device: str, shape: tuple[int, int], *, interpreted: bool = False) -> None:
    """Kernels cast to the bits that torch casts to. (The interpreter rounds halves up, and loses the carry.)"""
    for dtype, recipe, role in itertools.product((torch.bfloat16, torch.float32), fp8.SCALINGS, fp8.ROLES):
        x = (randn(*shape) * randn(shape[0], 1, seed=1).exp()).to(dtype)
        found = fp8.cast(x.to(device), recipe, role)
        choose, fp8.backend_of = fp8.backend_of, lambda *tensors: backend.Backend.TORCH
        expected = fp8.cast(x, recipe, role)
        fp8.backend_of = choose
        for ours, right in zip(found, expected, strict=True):
            assert ours is not None and right is not None
            own, other = ours.values.cpu(), right.values
            if interpreted:
                assert ((own.float() - other.float()).abs() <= 0.5 * other.float().abs() + 2**-6).all()
            else:
                assert torch.equal(own.view(torch.uint8), other.view(torch.uint8)), (dtype, recipe, role)
            blocks = right.values.shape[1] // fp8.BLOCK if right.scaled == "squares" else None
            assert torch.equal(ours.factors.cpu()[..., :blocks], right.factors[..., :blocks])
    values = randn(*shape, device=device).to(fp8.E4M3)
    assert torch.equal(fp8.transposed(values).view(torch.uint8), values.view(torch.uint8).t())


def check_casts_of_groups(device: str, groups: int, shape: tuple[int, int], *, interpreted: bool = False) -> None:
    """Rows cast with scales that are given, or found at once, are cast as torch does, and each group is turned."""
    x = (randn(groups * shape[0], shape[1]) * randn(groups * shape[0], 1, seed=1).exp()).bfloat16()
    bits = x.float().abs().amax(1).view(torch.int32)
    scale, inverse = fp8.power_of_two(bits, fp8.E4M3)
    expected = (x.float() * scale[:, None]).to(fp8.E4M3).float()
    values = fp8.cast_rows_with(x.to(device), bits.to(device), fp8.E4M3)
    found, _ = fp8.cast(x.to(device), "rowwise", "activation", columns=False)
    assert found is not None and torch.equal(found.factors.cpu(), inverse)
    for one in (values, found.values):
        close = (one.cpu().float() - expected).abs() <= 0.5 * expected.abs() + 2**-6  # the interpreter rounds halves up
        assert close.all() if interpreted else torch.equal(one.cpu().float(), expected)
    turned = fp8.transposed_groups(values, groups).view(torch.uint8)
    assert torch.equal(turned, values.view(torch.uint8).view(groups, *shape).transpose(1, 2))


def check_largest_values(device: str, rows: int, size: int) -> None:
    """What kernels note on their way is the largest value of what they have written."""
    x = randn(rows, 2 * size, dtype=torch.bfloat16, device=device).requires_grad_()
    ones = torch.ones(2 * size, dtype=torch.bfloat16, device=device)
    normed, product = rms_norm(x, ones, EPS, for_fp8=True), swiglu(x * 1, for_fp8=True)
    seen: list[tuple[Tensor, Tensor]] = [(y.detach(), fp8.largest(y)) for y in (normed, product)]
    plain = x * 1
    plain.register_hook(lambda grad: seen.append((grad, fp8.largest(grad))))
    swiglu(plain, for_fp8=True).backward(randn(rows, size, dtype=torch.bfloat16, device=device, seed=2))
    assert len(seen) == 3
    for tensor, bits in seen:
        assert bits.view(torch.float32).item() == tensor.abs().max().item()


def check_adamw(device: str, shape: tuple[int, int]) -> None:
    """Four steps, of which one is skipped, against torch's own fused AdamW on gradients that were multiplied before."""
    ours, torchs = (torch.nn.Parameter(randn(*shape, dtype=torch.float32, device=device)) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
    one, other = AdamW([ours], **options), torch.optim.AdamW([torchs], **options)
    factor = torch.tensor(0.25, device=device)
    for step in range(4):
        skip = torch.tensor(float(step == 2), device=device)
        ours.grad = randn(*shape, dtype=torch.float32, device=device, seed=step)
        torchs.grad = ours.grad * factor
        one.update(factor, skip)
        if step != 2:
            other.step()
    torch.testing.assert_close(ours, torchs, rtol=2e-6, atol=2e-7)
    # a mean near 0 is what is left of gradients of up to 5 x 0.25, 0.05 of each, rounded in another order
    for name, apart in (("exp_avg", 3e-8), ("exp_avg_sq", 1e-8), ("step", 0.0)):
        torch.testing.assert_close(one.state[ours][name], other.state[torchs][name], rtol=2e-6, atol=apart)


def check_sgd(device: str, shape: tuple[int, int]) -> None:
    """Three steps against torch's own SGD on gradients that were multiplied before."""
    ours, torchs = (torch.nn.Parameter(randn(*shape, dtype=torch.float32, device=device)) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}
    one, other = SGD([ours], **options, fused=True), torch.optim.SGD([torchs], **options)
    factor = torch.tensor(0.25, device=device)
    for step in range(3):
        ours.grad = randn(*shape, dtype=torch.float32, device=device, seed=step)
        torchs.grad = ours.grad * factor
        one.update(factor, None)
        other.step()
    torch.testing.assert_close(ours, torchs, rtol=2e-6, atol=2e-7)
    momenta = (one.state[ours]["momentum_buffer"], other.state[torchs]["momentum_buffer"])
    torch.testing.assert_close(*momenta, rtol=2e-6, atol=2e-7)


def check_adamw_in_bf16(device: str, shape: tuple[int, int]) -> None:
    """The kernel stores what the torch backend stores, for weights and moments in bf16, each and both, of a run in the
    middle of a parameter whose index has more than 32 bits."""
    size = shape[0] * shape[1]
    segments = [Segment(0, 70, 2**62 + 11, 2**33 + 5, 7, 90), Segment(70, size, 3, 12, 10, 10)]
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}
    factor, kinds = torch.tensor(0.25, device=device), (torch.float32, torch.bfloat16)
    for of_weight, of_state in ((kinds[0], kinds[1]), (kinds[1], kinds[0]), (kinds[1], kinds[1])):
        both = [torch.nn.Parameter(randn(*shape, dtype=of_weight, device=device)) for _ in range(2)]
        ours, torchs = (AdamW([one], state_dtype=of_state, segments=[segments], **options) for one in both)
        for step in range(4):
            skip = torch.tensor(float(step == 2), device=device)
            for one in both:
                one.grad = randn(*shape, dtype=of_weight, device=device, seed=step)
            ours.update(factor, skip)
            choose, adamw.backend_of = adamw.backend_of, lambda *tensors: backend.Backend.TORCH
            torchs.update(factor, skip)
            adamw.backend_of = choose
        assert torch.equal(ours.state[both[0]]["step"], torchs.state[both[1]]["step"])
        pairs = [
            both,
            *([one.state[of][name] for one, of in zip((ours, torchs), both, strict=True)] for name in STATES),
        ]
        for mine, other in pairs:
            # the same bits choose the same neighbours, unless the numbers differ in their last bit and so at the edge
            apart = (mine.float() - other.float()).abs()
            assert (apart <= 2**-7 * other.float().abs() + 1e-7).all()
            assert (apart > 2e-6 * other.float().abs() + 1e-7).float().mean() < 0.01


STATES = ("exp_avg", "exp_avg_sq")


def check_sharded_kernels(device: str, tokens: int, vocabulary: int) -> None:
    """Two halves of the vocabulary, one after the other: first_row, and targets that belong to the other half."""
    from workloads.engine.ops import triton_cross_entropy

    logits, half = randn(tokens, vocabulary, dtype=torch.float32, device=device), vocabulary // 2
    targets = (torch.arange(tokens, device=device) * 7) % vocabulary
    parts = [aligned_rows(logits[:, :half]), aligned_rows(logits[:, half:])]
    statistics = [torch.empty(3, tokens, device=device) for _ in parts]
    for index, (part, out) in enumerate(zip(parts, statistics, strict=True)):
        triton_cross_entropy.statistics(part, targets, index * half, out)
    lse = torch.logsumexp(torch.stack([out[0] + out[1].log() for out in statistics]), dim=0)
    wide = logits.double()
    torch.testing.assert_close(lse.double(), wide.logsumexp(dim=-1), rtol=1e-6, atol=1e-6)
    picked = sum(out[2] for out in statistics)
    assert torch.equal(picked, logits.gather(1, targets[:, None]).squeeze(1))
    for index, part in enumerate(parts):
        triton_cross_entropy.logits_to_gradient(part, targets, index * half, lse, 0.5)
    expected = 0.5 * (wide.softmax(dim=-1) - F.one_hot(targets, vocabulary))
    torch.testing.assert_close(torch.cat(parts, dim=1).double(), expected, rtol=1e-5, atol=1e-7)


def aligned_rows(logits: Tensor) -> Tensor:
    """A copy whose rows start at multiples of 16 elements, with NaN in between."""
    padded = -(-logits.shape[1] // 16) * 16
    return logits.new_full((logits.shape[0], padded), math.nan)[:, : logits.shape[1]].copy_(logits)


if __name__ == "__main__":
    interpreted_checks()
