"""Stochastic rounding from fp32 to bf16, with random bits that depend on nothing but a seed, a step and an index.

A number between two neighbours in bf16 becomes the upper one with the probability of its distance from the lower one,
so that the expected value is the number itself; round-to-nearest would drop every update below half of a bf16 step,
2^-9 of a weight (Gupta et al., arXiv:1502.02551; Zamirai et al., arXiv:2010.06192).

The bits come from Philox 4x32-10 (Salmon et al., SC 2011, doi:10.1145/2063384.2063405), a hash of a key and a counter:
the key is a parameter's, the counter an element's index in the parameter of the unsharded model and the number of the
update. `workloads.engine.update_ops.triton_adamw` computes the same bits by Triton's ``tl.philox``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_INCREMENTS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


class Segment(NamedTuple):
    """A run of elements of a local tensor, flattened, and their indices in the whole parameter: element ``i`` of the
    run is ``base + j // columns * whole_columns + j % columns`` there, with ``j = offset + i``."""

    start: int
    stop: int
    key: int
    """Key of the parameter's random bits: 63 bits."""
    base: int
    columns: int
    whole_columns: int
    offset: int = 0
    """Elements of the run that were cut off before its first one."""

    def indices(self, start: int, stop: int, device: torch.device) -> Tensor:
        """Indices in the whole parameter of elements ``start`` to ``stop`` of the run, int64."""
        j = torch.arange(self.offset + start, self.offset + stop, device=device)
        return self.base + j // self.columns * self.whole_columns + j % self.columns


def cut(segments: Sequence[Segment], part: slice) -> list[Segment]:
    """The runs of a part of a flattened tensor, which begin at 0 there."""
    found = []
    for one in segments:
        start, stop = max(one.start, part.start), min(one.stop, part.stop)
        if start < stop:
            at, offset = start - part.start, one.offset + start - one.start
            found.append(one._replace(start=at, stop=at + stop - start, offset=offset))
    return found


def philox(key: int, index: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four words of 32 random bits, as int64, for every element of ``index`` (int64). ``step``: 0-dim."""
    c0, c1 = index & _WORD, index >> 32
    c2, c3 = step.to(torch.int64).expand_as(index), torch.zeros_like(index)
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = (
            _high(_MULTIPLIERS[1], c2) ^ c1 ^ k0,
            _MULTIPLIERS[1] * c2 & _WORD,
            _high(_MULTIPLIERS[0], c0) ^ c3 ^ k1,
            _MULTIPLIERS[0] * c0 & _WORD,
        )
        k0, k1 = k0 + _INCREMENTS[0] & _WORD, k1 + _INCREMENTS[1] & _WORD
    return c0, c1, c2, c3


def _high(a: int, b: Tensor) -> Tensor:
    """The upper 32 bits of a product of 32-bit numbers, of which int64 has only 63."""
    return a * (b >> 16) + (a * (b & 0xFFFF) >> 16) >> 16


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 ``x`` rounded to bf16 by the lower 16 of ``bits``: added below the last bit that bf16 keeps, of which the
    carry is the choice, and then cut. Infinities stay."""
    raised = x.view(torch.int32) + (bits & 0xFFFF).to(torch.int32)
    return (raised & -0x10000).view(torch.float32).to(torch.bfloat16)
