"""Recurrences over whole sequences with the kernels of `workloads.engine.kind_ops.linear_kernels`, or, without them, in
segments (`workloads.engine.kind_ops.segments`).

Either way only the inputs are saved. With the kernels the backward runs a layer's forward once more, from the
convolution to the gate, in the kernels and on all tokens at once, and then theirs.

    Gated DeltaNet, KDA   convolution and SiLU; unit keys and queries, decays, rates and the rule; norm and gate
    Mamba-2               convolution and SiLU; steps and decays in torch operations; the scan of every head with its
                          group's B and C repeated, and the skip (`workloads.engine.kind_ops.mamba_inputs`); gate, norm

Kernels multiply in 16 bits and add in fp32; the states of chunks are in 16 bits between the kernels of a delta rule.

Shapes as in `workloads.engine.kind_ops.delta_steps` and `mamba_scan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from workloads.costs.memory.recurrent_segments import segments_working
from workloads.engine.kind_ops.delta_steps import GatedDeltaStep, KimiDeltaStep
from workloads.engine.kind_ops.head_shares import AnyStep, ShareOfHeads
from workloads.engine.kind_ops.linear_kernels import functions, kernels_chosen
from workloads.engine.kind_ops.mamba_inputs import spread, with_skip
from workloads.engine.kind_ops.mamba_scan import MambaStep
from workloads.engine.kind_ops.segments import scanned
from workloads.engine.ops.backend import Backend, backend_of
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.recurrent_kernels import Batch, Kernels, Working, gated_delta, kimi_delta, mamba


@torch.compiler.disable  # one graph break, as with attention to windows
def recurrence(step: AnyStep | ShareOfHeads, sequences: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Outputs [B, S, O] of a recurrence over ``sequences`` [B, S, C], in their dtype. The inputs are saved."""
    x = sequences[0]
    if kernels_chosen(x) and (x.is_cuda or backend_of(x) is Backend.SHAPES):
        return _Kernels.apply(step, len(sequences), *sequences, *parameters)
    return scanned(step, sequences, parameters, _in_segments(step, x) if backend_of(x) is Backend.SHAPES else 0)


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: AnyStep | ShareOfHeads, count: int, *tensors: Tensor) -> Tensor:
        ctx.step, ctx.count = step, count
        ctx.save_for_backward(*tensors)
        if backend_of(*tensors) is Backend.SHAPES:
            _take(tensors[0], working(step, tensors[0]).forward)
            return tensors[0].new_empty(*tensors[0].shape[:2], step.outputs)
        return with_kernels(step, _parts(step, tensors[:count]), tensors[count:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        step, count, tensors = ctx.step, ctx.count, ctx.saved_tensors
        if backend_of(*tensors) is Backend.SHAPES:
            _take(tensors[0], working(step, tensors[0]).backward)
            return None, None, *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors)
        sequences = [x.detach().requires_grad_() for x in _parts(step, tensors[:count])]
        parameters = [x.detach().requires_grad_() for x in tensors[count:]]
        with torch.enable_grad():
            edge = get_gradient_edge(with_kernels(step, sequences, parameters))  # the output itself is not kept
        grads = torch.autograd.grad(edge, (*sequences, *parameters), dy)
        of_parts, found = iter(grads[: len(sequences)]), []
        for x in tensors[:count]:
            columns, parts = 0, []
            while columns < x.shape[2]:
                parts.append(next(of_parts))
                columns += parts[-1].shape[2]
            found.append(torch.cat(parts, 2) if len(parts) > 1 else parts[0])
        return None, None, *found, *grads[len(sequences) :]


def _take(like: Tensor, size: int) -> None:
    """Allocate ``size`` bytes, as the kernels would, and free them."""
    like.new_empty(size, dtype=torch.uint8)


def working(step: AnyStep | ShareOfHeads, like: Tensor) -> Working:
    """Memory that the kernels need besides inputs and outputs."""
    if isinstance(step, ShareOfHeads):
        return working(step.step, like)
    batch = Batch(*like.shape[:2])
    if isinstance(step, GatedDeltaStep):
        heads = {"key_heads": step.key_heads, "value_heads": step.value_heads}
        return gated_delta(batch, **heads, key_dim=step.key_dim, value_dim=step.value_dim)
    if isinstance(step, KimiDeltaStep):
        return kimi_delta(batch, heads=step.heads, head_dim=step.head_dim)
    return mamba(batch, heads=step.heads, head_dim=step.head_dim, groups=step.groups, state=step.state)


def _in_segments(step: AnyStep | ShareOfHeads, like: Tensor) -> int:
    """Memory that the backward needs in torch operations besides inputs and outputs."""
    if isinstance(step, ShareOfHeads):
        return _in_segments(step.step, like)
    mixer: Kernels
    if isinstance(step, GatedDeltaStep):
        mixer = GatedDeltaRule(
            key_heads=step.key_heads,
            value_heads=step.value_heads,
            key_dim=step.key_dim,
            value_dim=step.value_dim,
            kernel=step.kernel,
        )
    elif isinstance(step, KimiDeltaStep):
        mixer = KimiDelta(heads=step.heads, head_dim=step.head_dim, kernel=step.kernel)
    else:
        heads, size, groups = step.heads, step.head_dim, step.groups
        mixer = Mamba2(heads=heads, head_dim=size, groups=groups, state=step.state, kernel=step.kernel)
    return segments_working(mixer, Batch(*like.shape[:2]), 1, like.element_size())


def _parts(step: AnyStep | ShareOfHeads, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Views of the columns that are separate inputs of the kernels."""
    step = step.step if isinstance(step, ShareOfHeads) else step
    return [part for x, widths in zip(sequences, columns(step), strict=True) for part in x.split(widths, 2)]


def columns(step: AnyStep) -> list[list[int]]:
    """Columns of the separate inputs in each of the sequences of a step."""
    if isinstance(step, GatedDeltaStep):
        return [[step.keys, step.keys, step.outputs, step.outputs, step.value_heads, step.value_heads]]
    if isinstance(step, KimiDeltaStep):
        return [[step.outputs] * 3, [step.heads], [step.outputs], [step.outputs]]
    of_groups = step.groups * step.state
    return [[step.outputs, step.outputs, of_groups, of_groups, step.heads]]


def with_kernels(step: AnyStep | ShareOfHeads, parts: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    """Outputs [B, S, O] with autograd. ``parts``: the tensors of `columns`, one after the other."""
    if isinstance(step, ShareOfHeads):
        return with_kernels(step.step, parts, step.own(parameters))
    of_kind: dict[type, Callable[..., Tensor]] = {
        GatedDeltaStep: _gated_delta,
        KimiDeltaStep: _kimi_delta,
        MambaStep: _mamba,
    }
    return of_kind[type(step)](step, parts, parameters)


def _convolved(parts: Sequence[Tensor], kernel: Tensor, bias: Tensor | None = None) -> list[Tensor]:
    """Each part after its convolution and SiLU, contiguous. ``kernel``, ``bias``: of all channels in a row."""
    widths = [part.shape[2] for part in parts]
    biases = [None] * len(parts) if bias is None else bias.split(widths)
    run = functions().convolution
    return [
        run(x=part, weight=weight, bias=one, activation="silu")[0]
        for part, weight, one in zip(parts, kernel.split(widths), biases, strict=True)
    ]


def _gated_delta(step: GatedDeltaStep, parts: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    (*mixed, gate, decay, rate), (kernel, vectors, norm) = parts, parameters
    q, k, v = _convolved(mixed, kernel)
    log_rate_H, bias_H = vectors.chunk(2)
    o, _ = functions().gated_delta_rule(
        q=q.unflatten(2, (-1, step.key_dim)),
        k=k.unflatten(2, (-1, step.key_dim)),
        v=v.unflatten(2, (-1, step.value_dim)),
        g=decay,
        beta=rate,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        A_log=log_rate_H,
        dt_bias=bias_H,
    )
    gate = gate.unflatten(2, (-1, step.value_dim))
    return functions().norm_before_gate(o, gate, norm, None, activation="swish", eps=step.eps).flatten(2)


def _kimi_delta(step: KimiDeltaStep, parts: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    (*mixed, rate, decay, gate), (kernel, vectors, norm) = parts, parameters
    of_heads = (step.heads, step.head_dim)
    bias_W, log_rate_H = vectors.split([step.outputs, step.heads])
    q, k, v = (x.unflatten(2, of_heads) for x in _convolved(mixed, kernel))
    o, _ = functions().kimi_delta(
        q=q,
        k=k,
        v=v,
        g=decay.unflatten(2, of_heads),
        beta=rate,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        A_log=log_rate_H,
        dt_bias=bias_W,
    )
    gate = gate.unflatten(2, of_heads)
    return functions().norm_before_gate(o, gate, norm, None, activation="sigmoid", eps=step.eps).flatten(2)


def _mamba(step: MambaStep, parts: Sequence[Tensor], parameters: Sequence[Tensor]) -> Tensor:
    (z, *mixed, steps), (kernel, *rest) = parts, parameters
    bias = rest.pop(0) if step.bias else None
    vectors, norm = rest
    decay_H, step_bias_H, skip_H = vectors.chunk(3)
    x, b, c = _convolved(mixed, kernel, bias)
    x_BLHP = x.unflatten(2, (step.heads, step.head_dim))
    b_BLGN, c_BLGN = (one.unflatten(2, (step.groups, step.state)) for one in (b, c))
    steps_BLH = F.softplus(steps.float() + step_bias_H.float())
    v, k, q = spread(x_BLHP, b_BLGN, c_BLGN, steps_BLH)
    y, _ = functions().one_decay(q=q, k=k, v=v, g=-decay_H.float().exp() * steps_BLH, scale=1.0)
    y, gate = with_skip(y, x_BLHP, skip_H, z)
    group, y = step.outputs // step.groups, y.flatten(2)
    return functions().gate_before_norm(y, norm, None, z=gate, eps=step.eps, group_size=group, norm_before_gate=False)
