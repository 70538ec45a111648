"""FlashAttention-4's kernels (package ``flash-attn-4``, in Python and CuTe) for ``attention=flash4``.

Their names: B sequences, S queries, T keys, N query heads, K key and value heads, H head size of queries and keys, V of
values, as in `workloads.engine.ops.attention`; the package wants sequences before heads. Kernels are compiled at the
first call of a shape, which takes seconds. The package has one public function, for a whole attention. This module
calls the two functions below it, because context parallelism needs a forward that returns its log-sum-exp and a
backward that takes one: so the release is pinned.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

PACKAGE, RELEASE = "flash-attn-4", "4.0.0b36"


def unusable() -> str | None:
    """Why the kernels cannot run in this process: the package's release, or the device; None if they can."""
    installed = _installed()
    if installed != RELEASE:
        here = f"{installed} is installed" if installed else "it is not installed"
        return f"it needs the package {PACKAGE} {RELEASE}, and {here}: pip install 'ultrasweep[flash4]'"
    if torch.cuda.get_device_capability() < (9, 0):
        return f"it needs a Hopper GPU or a newer one, not {torch.cuda.get_device_name()}"
    return None


def _installed() -> str | None:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


@lru_cache(maxsize=1)
def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def forward(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(o [B, N, S, V], lse [B, N, S] in fp32)."""
    q, k, v = (x.detach().transpose(1, 2) for x in (q_BNSH, k_BKTH, v_BKTV))
    o, lse, *_ = _interface()._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
    return o.transpose(1, 2), lse


def backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_BNS: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of one block of keys, given output and log-sum-exp of the queries over all keys."""
    turned = (x.transpose(1, 2) for x in (q, k, v, o, grad_o))
    dq, dk, dv = _interface()._flash_attn_bwd(*turned, lse_BNS.contiguous(), causal=causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def forward_by_length(
    q_RNH: Tensor, k_RKH: Tensor, v_RKV: Tensor, bounds_D: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    """Causal attention of sequences of variable length, one after the other in R rows: (o [R, N, V], lse [N, R] in
    fp32). ``bounds_D``: their first rows and R, int32 [sequences + 1]; ``longest``: most rows of one."""
    o, lse, *_ = _interface()._flash_attn_fwd(
        q_RNH.detach(), k_RKH.detach(), v_RKV.detach(), causal=True, return_lse=True, **_lengths(bounds_D, longest)
    )
    return o, lse


def backward_by_length(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse_NR: Tensor, bounds_D: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of `forward_by_length`."""
    dq, dk, dv = _interface()._flash_attn_bwd(q, k, v, o, grad_o, lse_NR, causal=True, **_lengths(bounds_D, longest))
    return dq, dk, dv


def _lengths(bounds_D: Tensor, longest: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": bounds_D,
        "cu_seqlens_k": bounds_D,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        o, lse = forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, lse = ctx.saved_tensors
        return *backward(grad, q, k, v, o, lse, ctx.causal), None


def attention(q_BNSH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, *, causal: bool) -> Tensor:
    """Attention of every query over all keys, with autograd: [B, N, S, V]."""
    o: Tensor = _Attention.apply(q_BNSH, k_BKTH, v_BKTV, causal)
    return o
