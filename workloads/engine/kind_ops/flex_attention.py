"""Attention by torch's FlexAttention (arXiv:2412.05496): a cap of the scores, which torch's fused kernels lack, with a
window or without, and masks of packed documents.

Shapes as in `workloads.engine.ops.attention`. Blocks of 128 queries by 128 keys that no query of a block sees are
skipped: which ones they are is computed from the window or the documents, never from a mask of S x S. Saved for
backward: queries, keys, values, output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils._python_dispatch import _disable_current_modes

_BLOCK = 128
_MOST_SHAPES = 64
"""Number of shapes and windows that may be compiled in one process. Beyond torch's limit of 8 the function would run
uncompiled, with all scores in memory."""
_compiled: Callable[..., Any] | None = None


def flexible_attention(
    q_BNSH: Tensor, k_BKSH: Tensor, v_BKSV: Tensor, window: int, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(o [B, N, S, V], lse [B, N, S] in fp32), both with gradients. Compiled on a GPU, once for each shape."""
    mask = block_mask(q_BNSH.shape[2], min(window, q_BNSH.shape[2]), q_BNSH.device)
    return masked_attention(q_BNSH, k_BKSH, v_BKSV, mask, cap)


def masked_attention(
    q_BNSH: Tensor, k_BKTH: Tensor, v_BKTV: Tensor, mask: BlockMask, cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """The same with the keys that a mask leaves."""
    grouped = q_BNSH.shape[1] != k_BKTH.shape[1]
    with _unwatched(q_BNSH.device), torch._dynamo.config.patch(recompile_limit=_MOST_SHAPES):
        o, more = _function(q_BNSH.device)(
            q_BNSH,
            k_BKTH,
            v_BKTV,
            score_mod=_capped_by(cap),
            block_mask=mask,
            enable_gqa=grouped,
            return_aux=AuxRequest(lse=True),
        )
    return o, more.lse


def _unwatched(device: torch.device) -> AbstractContextManager[None]:
    """On a GPU no dispatch mode sees the function, since nothing is compiled while one is active. It sends nothing that
    a mode would count."""
    unwatched: AbstractContextManager[None] = nullcontext() if device.type == "cpu" else _disable_current_modes()
    return unwatched


def _function(device: torch.device) -> Callable[..., Any]:
    """On a CPU the plain formulas of the same function, which tests compare."""
    global _compiled
    if device.type == "cpu":
        return flex_attention
    if _compiled is None:
        _compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return _compiled


@lru_cache(maxsize=64)
def block_mask(length: int, window: int, device: torch.device) -> BlockMask:
    """The blocks of keys that queries of each block see. In those that the window or the diagonal cuts, single keys are
    masked; the others are whole."""
    count = -(-length // _BLOCK)
    block = torch.arange(count, device=device)
    last_seen = block.unsqueeze(1)
    first_seen = ((block * _BLOCK - window + 1).clamp(min=0) // _BLOCK).unsqueeze(1)
    # whole: after the last query's window begins, and before the diagonal
    first_whole = (((block + 1) * _BLOCK - window).clamp(min=0) + _BLOCK - 1).div(_BLOCK, rounding_mode="floor")
    seen = (block >= first_seen) & (block <= last_seen)
    whole = seen & (block >= first_whole.unsqueeze(1)) & (block < last_seen)

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window)

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(length, length),
    )


def document_mask(first_BS: Tensor, index_BS: Tensor, keys: int) -> BlockMask:
    """The blocks of ``keys`` keys that queries of each block see, if a query at ``index`` of its sequence sees those
    from ``first`` on, both int32, as kernels count keys. The mask reads these tensors, and its lists have the size of
    all blocks: another micro-batch compiles nothing. Nothing here waits for the device."""
    first_BQ = _by_block(first_BS)
    last_BQ = _by_block(index_BS)
    block_K = torch.arange(-(-keys // _BLOCK), device=first_BS.device)
    lowest, highest = block_K * _BLOCK, block_K * _BLOCK + _BLOCK - 1
    seen = (highest >= first_BQ.amin(-1, keepdim=True)) & (lowest <= last_BQ.amax(-1, keepdim=True))
    whole = (lowest >= first_BQ.amax(-1, keepdim=True)) & (highest <= last_BQ.amin(-1, keepdim=True))

    def mask(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_BS[batch, query]) & (key <= index_BS[batch, query])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole),
        *_listed(seen & whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=mask,
        seq_lengths=(first_BS.shape[1], keys),
    )


def _by_block(x_BS: Tensor) -> Tensor:
    """[B, blocks, 128]; the last query fills the last block."""
    missing = -x_BS.shape[1] % _BLOCK
    if missing:
        x_BS = torch.cat([x_BS, x_BS[:, -1:].expand(-1, missing)], 1)
    return x_BS.unflatten(1, (-1, _BLOCK))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(number of blocks of keys [B, 1, Q], their indices first in each row [B, 1, Q, K]), int32, of blocks [B, Q, K] or
    [Q, K], whose B is 1."""
    blocks = blocks if blocks.dim() == 3 else blocks[None]
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None].contiguous()


@lru_cache(maxsize=8)
def _capped_by(cap: float | None) -> Callable[..., Tensor] | None:
    if cap is None:
        return None

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return capped
