"""The only module that calls attention kernels: as a whole, or forward and backward separately with the log-sum-exp.

Shapes: B sequences, N query heads, K key and value heads (N a multiple of K: query head n uses head n // (N / K)), S
queries, T keys, H head size of queries and keys, V of values. For each head, with the scores of masked keys left out:

    z = q @ k^T / sqrt(H)     lse = log(sum over keys of exp(z))     p = exp(z - lse)     o = p @ v
    dv = p^T @ do     dz = p * (do @ v^T - rowsum(do * o)) / sqrt(H)     dq = dz @ k     dk = dz^T @ q

Of the other keys of a row, backward needs only ``lse`` and ``rowsum(do * o)`` (FlashAttention-2, arXiv:2307.08691,
section 2.3). With ``o`` and ``lse`` of the whole row, the backward over a block of the keys is that block's exact part
of the gradients, and parts add up. Every kernel here works this way: FlashAttention and torch's CPU kernel compute
``p`` from the given ``lse`` and the row sums from the given ``o``; so does memory-efficient attention (its "delta");
cuDNN's backward takes ``o`` and the softmax statistics, which are ``lse``, as inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from workloads.engine.ops import flash4
from workloads.engine.ops.backend import accumulation_dtype

_aten = torch.ops.aten
_EFFICIENT_ROWS = 32
"""Memory-efficient attention pads the queries of its log-sum-exp to a multiple of this number, with infinity."""
_flash4_chosen = False


def choose_flash4(*, chosen: bool) -> None:
    """Run FlashAttention-4 on CUDA from now on (see `flash4.unusable`), or torch's kernels."""
    global _flash4_chosen
    _flash4_chosen = chosen


def runs_flash4(q: Tensor) -> bool:
    """Whether FlashAttention-4 computes attention of these queries."""
    return _flash4_chosen and q.device.type == "cuda"


def attention(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, *, causal: bool) -> Tensor:
    """Attention of every query over all keys: [B, N, S, V]. ``causal``: only over keys up to its position; needs S = T.

    Torch picks the kernel among those that the process allows (`workloads.engine.training.build.choose_attention`),
    unless the process has chosen FlashAttention-4.
    """
    if runs_flash4(q_BNSH):
        return flash4.attention(q_BNSH, k_BKTH, v_BKTV, causal=causal)
    grouped = q_BNSH.shape[1] != k_BKTH.shape[1]
    if not _needs_equal_sizes(q_BNSH, v_BKTV):
        return F.scaled_dot_product_attention(q_BNSH, k_BKTH, v_BKTV, is_causal=causal, enable_gqa=grouped)
    wide = _padded(v_BKTV, q_BNSH)
    o = F.scaled_dot_product_attention(q_BNSH, k_BKTH, wide, is_causal=causal, enable_gqa=grouped)
    return o[..., : v_BKTV.shape[-1]]


def _needs_equal_sizes(q: Tensor, v: Tensor) -> bool:
    """Whether values must be padded to the size of the queries for the kernel that will run.

    FlashAttention and torch's CPU kernel support one head size. cuDNN, memory-efficient attention and the plain
    formulas support two, and are used if they are allowed. Columns of zeros change no other column of the output, nor a
    gradient.
    """
    switches = torch.backends.cuda
    if runs_flash4(q) or q.shape[-1] == v.shape[-1] or not switches.flash_sdp_enabled():
        return False
    return _is_cpu(q) or not (switches.cudnn_sdp_enabled() or switches.mem_efficient_sdp_enabled())


def _padded(x: Tensor, q: Tensor) -> Tensor:
    return F.pad(x, (0, q.shape[-1] - x.shape[-1]))


@dataclass(frozen=True, slots=True)
class Saved:
    """Values that `attention_backward` needs from the forward, besides the tensors that the caller keeps."""

    kernel: AttentionKernel
    repeats: int
    """Number of times keys and values were repeated, for kernels that need as many of their heads as of queries'; else
    1."""
    random: tuple[Tensor, ...] = ()
    """Random state for dropout, which the kernels require although there is no dropout."""
    lse_dims: int = 3
    """cuDNN's log-sum-exp has a last dim of size 1 in some versions of torch."""
    padded: bool = False
    """Whether values were padded to the size of the queries, for a kernel that supports one size."""


def attention_forward(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, *, causal: bool) -> tuple[Tensor, Tensor, Saved]:
    """One kernel's forward without autograd: (o [B, N, S, V], lse [B, N, S], state for its backward).

    The kernel is the one that `attention` would use; ``lse`` is fp32 (fp64 for fp64 inputs). ``causal`` needs S = T,
    because kernels differ in the corner of a non-square matrix from which they draw the diagonal.
    """
    assert not causal or q_BNSH.shape[2] == k_BKTH.shape[2], "a causal block is square"
    value_size = v_BKTV.shape[-1]
    if _needs_equal_sizes(q_BNSH, v_BKTV):
        v_BKTV = _padded(v_BKTV, q_BNSH)
    kernel, repeats = _choose(q_BNSH, k_BKTH, v_BKTV, causal)
    o, lse, saved = kernel.forward(q_BNSH, _repeat(k_BKTH, repeats), _repeat(v_BKTV, repeats), causal)
    return o[..., :value_size], lse, replace(saved, repeats=repeats, padded=v_BKTV.shape[-1] != value_size)


def attention_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BNS: Tensor, saved: Saved, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one block of keys, in the dtype of the inputs.

    ``o`` and ``lse`` belong to the queries over all keys, of which ``k`` and ``v`` may be a part (see above). ``saved``
    is the state that `attention_forward` returned for the same block.
    """
    repeats, value_size = saved.repeats, v.shape[-1]
    if saved.padded:
        grad_o, v, o = (_padded(x, q) for x in (grad_o, v, o))
    args = (grad_o, q, _repeat(k, repeats), _repeat(v, repeats), o, lse_BNS)
    dq, dk, dv = saved.kernel.backward(*args, saved, causal)
    if repeats > 1:
        dk, dv = (grad.unflatten(1, (-1, repeats)).sum(2) for grad in (dk, dv))
    return dq, dk, dv[..., :value_size]


def _repeat(x_BKTH: Tensor, repeats: int) -> Tensor:
    return x_BKTH if repeats == 1 else x_BKTH.repeat_interleave(repeats, dim=1)


# Kernels


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """A kernel with its log-sum-exp as [B, N, S], whatever layout the kernel uses."""

    name: str
    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor, Saved]]
    """(q, k, v, causal) -> (o, lse, saved)."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(grad_o, q, k, v, o, lse, saved, causal) -> (dq, dk, dv)."""
    grouped: bool
    """Whether it supports fewer heads of keys and values than of queries."""


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Saved]:
    out = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
    lse = out[1]
    return out[0], lse.reshape(lse.shape[:3]), Saved(CUDNN, 1, (out[6], out[7]), lse.dim())


def _cudnn_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: Saved, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse.contiguous()
    stats = lse.unsqueeze(-1) if saved.lse_dims == 4 else lse
    lengths = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad_o, q, k, v, o, stats, *saved.random, None, None, None, *lengths, 0.0, causal
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Saved]:
    out = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return out[0], out[1], Saved(FLASH, 1, (out[6], out[7]))


def _flash_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: Saved, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lengths = q.shape[2], k.shape[2]
    return _aten._scaled_dot_product_flash_attention_backward(
        grad_o, q, k, v, o, lse.contiguous(), None, None, *lengths, 0.0, causal, *saved.random
    )


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Saved]:
    o, lse, seed, offset = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return o, lse[:, :, : q.shape[2]], Saved(EFFICIENT, 1, (seed, offset))


def _efficient_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: Saved, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lse = F.pad(lse, (0, -lse.shape[2] % _EFFICIENT_ROWS), value=math.inf).contiguous()
    # the backward reads it in the layout that the forward writes, whatever its strides say
    o = o.transpose(1, 2).contiguous().transpose(1, 2)
    wanted = [True, True, True, False]
    return _aten._scaled_dot_product_efficient_attention_backward(
        grad_o, q, k, v, None, o, lse, *saved.random, 0.0, wanted, causal
    )[:3]


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Saved]:
    o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    # On torch 2.11 the FakeTensor of the log-sum-exp of fp64 inputs has the wrong dtype, fp32.
    return o, lse.to(accumulation_dtype(q.dtype)), Saved(CPU, 1)


def _cpu_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: Saved, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(grad_o, q, k, v, o, lse, 0.0, causal)


def _math_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Saved]:
    """All scores at once, in fp32 (fp64 for fp64): for inputs that no kernel supports, and for ``attention=math``."""
    scores = _scores(q, k, causal)
    lse = scores.logsumexp(dim=-1)
    p_BKGST = torch.exp(scores - lse.unsqueeze(-1))
    o = (p_BKGST @ v.unsqueeze(2).to(p_BKGST.dtype)).flatten(1, 2)
    return o.to(q.dtype), lse.flatten(1, 2), Saved(MATH, 1)


def _math_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: Saved, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    groups = (k.shape[1], -1)
    scores = _scores(q, k, causal)
    wide_q, wide_o, wide_grad = (x.to(scores.dtype).unflatten(1, groups) for x in (q, o, grad_o))
    wide_k, wide_v = (x.to(scores.dtype).unsqueeze(2) for x in (k, v))
    p_BKGST = torch.exp(scores - lse.to(scores.dtype).unflatten(1, groups).unsqueeze(-1))
    dv = (p_BKGST.mT @ wide_grad).sum(2)
    row_sums = (wide_grad * wide_o).sum(-1, keepdim=True)
    dz = p_BKGST * (wide_grad @ wide_v.mT - row_sums) / math.sqrt(q.shape[-1])
    dq, dk = (dz @ wide_k).flatten(1, 2), (dz.mT @ wide_q).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """Scores [B, K, N / K, S, T], -inf where a key comes after its query."""
    dtype = accumulation_dtype(q.dtype)
    grouped = q.to(dtype).unflatten(1, (k.shape[1], -1)) / math.sqrt(q.shape[-1])
    scores = grouped @ k.to(dtype).unsqueeze(2).mT
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Saved]:
    return *flash4.forward(q, k, v, causal), Saved(FLASH4, 1)


def _flash4_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, saved: Saved, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return flash4.backward(grad_o, q, k, v, o, lse, causal)


CUDNN = AttentionKernel("cudnn", _cudnn_forward, _cudnn_backward, grouped=True)
FLASH = AttentionKernel("flash", _flash_forward, _flash_backward, grouped=True)
EFFICIENT = AttentionKernel("efficient", _efficient_forward, _efficient_backward, grouped=False)
CPU = AttentionKernel("cpu", _cpu_forward, _cpu_backward, grouped=True)
MATH = AttentionKernel("math", _math_forward, _math_backward, grouped=True)
FLASH4 = AttentionKernel("flash4", _flash4_forward, _flash4_backward, grouped=True)

_KERNELS = {
    SDPBackend.CUDNN_ATTENTION.value: CUDNN,
    SDPBackend.FLASH_ATTENTION.value: FLASH,
    SDPBackend.EFFICIENT_ATTENTION.value: EFFICIENT,
    SDPBackend.MATH.value: MATH,
}


def _choose(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[AttentionKernel, int]:
    """(kernel that torch would pick for these tensors, number of times keys and values must be repeated for it)."""
    if runs_flash4(q):
        return FLASH4, 1
    if _is_cpu(q) and torch.backends.cuda.flash_sdp_enabled():
        return CPU, 1  # torch is not asked, because it takes FakeTensors for tensors of another device
    repeats = q.shape[1] // k.shape[1]
    kernel = _picked(q, k, v, causal, grouped=repeats > 1)
    if kernel is MATH and repeats > 1:
        # Memory-efficient attention is the only fused kernel for fp32 on a GPU and does not support groups: repeated
        # keys and values are far smaller than all scores.
        as_many = (-1, q.shape[1], -1, -1)
        kernel = _picked(q, k[:, :1].expand(as_many), v[:, :1].expand(as_many), causal, grouped=False)
    return kernel, 1 if kernel.grouped else repeats


def _picked(q: Tensor, k: Tensor, v: Tensor, causal: bool, *, grouped: bool) -> AttentionKernel:
    kernel = _KERNELS.get(torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=grouped))
    if kernel is None:
        raise RuntimeError(f"none of the allowed attention kernels takes heads of {q.shape[-1]} in {q.dtype}")
    # Torch pads heads of other sizes for this kernel before it calls it.
    return MATH if kernel is FLASH and q.shape[-1] % 8 else kernel


def _is_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"
