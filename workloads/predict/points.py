"""Training configurations of a table as arrays: one array per quantity, one entry per row.

Predictions work on whole arrays, so that a table of thousands of rows takes a fraction of a second.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]
"""Array of float64."""
Texts = NDArray[Any]

RECOMPUTE = ("none", "selective", "full")
CAPTURED = " captured"
"""End of the version of a code base whose whole steps are CUDA graphs."""
UNLIKE = {
    "ring": 1.0, "routed": 0.0, "waits": 0.0, "latents": 0.0, "scaled": 1.0, "pace": 1.0, "launch": 1.0, "again": 1.0,
    "recomputed": 1.0, "doubt": 0.0, "structure_doubt": 0.0, "ends": 0.0, "unfused": math.nan, "split": math.nan,
    "adds": math.nan, "kernel": 1.0, "clock": 1.0, "deterministic": 0.0,
    "compiled": 0.0, "captured": 0.0,
}  # fmt: skip
"""Values of `Points` that a table need not state: dense layers with equal recomputation, a ring for context
parallelism, a usual host, no factor by which a row was divided, pipelines of layers alone, the attention kernel of the
code base, the usual power limit, layers that are not compiled, and steps that a host launches."""


def fp8_kind(precision: str) -> float:
    """Kind of the matrix products. 0: 16 bits or more; 1: fp8 with one scale per tensor, or with unknown scales; 2: fp8
    with a scale for each row or block, which is more work; 3: mxfp8; 4: nvfp4."""
    if re.search(r"mxfp8|nvfp4", precision):
        return 4.0 if "nvfp4" in precision else 3.0
    if re.search(r"fp8|float8|e4m3", precision) is None:
        return 0.0
    return 2.0 if re.search("row|block|axis", precision) else 1.0


RATE_NAMES = ("bf16", "fp8", "fp8", "mxfp8", "nvfp4")
"""The rate of a device that products of each `fp8_kind` have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Rows with enough information for a prediction. Counts are floats; unknown values are NaN."""

    gpus: Floats
    layers: Floats
    hidden: Floats
    heads: Floats
    kv_heads: Floats
    queries: Floats
    """Columns of all queries together: the number of heads times their size."""
    ffn: Floats
    matrices: Floats
    """Number of matrices of a feed-forward layer: 3 with a gate, 2 without."""
    vocab: Floats
    tied: Floats
    """1: the head shares the embedding's weight."""
    seq: Floats
    mbs: Floats
    """Number of sequences of a micro-batch on one data-parallel rank."""
    micro_batches: Floats
    dp: Floats
    tp: Floats
    pp: Floats
    vpp: Floats
    cp: Floats
    ep: Floats
    zero: Floats
    recompute: Floats
    """Index in `RECOMPUTE`."""
    fp8: Floats
    """`fp8_kind` of the layers' products."""
    fp16: Floats
    """1: products of 16 bits are in fp16, not bf16."""
    ring: Floats
    """1: with context parallelism keys and values go round a ring, in cp - 1 turns; 0: they are exchanged at once."""
    routed: Floats
    """Host work for a layer's routed experts, relative to one grouped kernel (`workloads.predict.experts.overheads`).
    0: none."""
    waits: Floats
    """Number of times per layer and micro-batch that the host waits for the token counts of ranks."""
    latents: Floats
    """1: latent attention."""
    scaled: Floats
    """Factor applied to the predicted time afterwards, for properties of layers without a column; 1: none."""
    again: Floats
    """Host work for recomputation, relative to recomputing every layer as ``recompute`` says."""
    recomputed: Floats
    """Share of the layers that recompute, for device work. In predictions of `layouts` a factor contains it."""
    pace: Floats
    """Factor on all host work; 1: usual or unknown."""
    launch: Floats
    """Launch time of one small operation during the row's run, relative to the usual one; 1: usual or unknown."""
    doubt: Floats
    """Training rows only: standard deviation of log(structure factor) by which the measured time was divided. Added to
    the row's noise in the fit."""
    structure_doubt: Floats
    """Standard deviation of the part of log(structure factor) that is off alike in rows that are alike
    (`workloads.predict.residuals`); in training rows, and in those that are predicted. 0: no factor."""
    ends: Floats
    """1: a pipeline counts the embedding and the loss as layers when it divides them over chunks."""
    unfused: Floats
    """1: attention writes its scores to memory, 0: it does not; NaN: as the code base does."""
    split: Floats
    """1: tensor parallelism has sequence parallelism, which divides norms and residuals, too; 0: it has not; NaN: as
    the code base does."""
    adds: Floats
    """1: products add weight gradients to their sums, 0: they are added apart; NaN: as the code base does."""
    kernel: Floats
    """Rate of the attention kernel over that of the code base's usual one."""
    clock: Floats
    """Rate of products and attention over that at the device's usual power limit."""
    deterministic: Floats
    """1: all algorithms are deterministic; 2: and the backward of attention stores the gradients of scores; 0: neither
    (`workloads.predict.cells.deterministic`)."""
    compiled: Floats
    """1: another engine than this project's compiles the layers and the loss. Compiled layers of this project's engine
    have no term of their own."""
    captured: Floats
    """1: whole steps are CUDA graphs, which no host launches."""
    codebase: Texts
    """Name of the profile."""
    version: Texts
    """Version of the code base as in the table; empty: unknown."""
    device: Texts
    peak: Floats
    """FLOP/s of the device in 16 bits."""
    peak_matmul: Floats
    """FLOP/s of the device in the precision of the layers' matrix products."""
    memory_bandwidth: Floats
    capacity: Floats
    """Bytes that the driver reports as total."""
    node: Floats
    """Number of devices in a node, or in linked nodes (`ClusterSpec.domain`)."""
    intra: Floats
    """B/s of each device inside a node."""
    inter: Floats
    """B/s of each device between nodes, in the first tier of the network; NaN: unknown."""
    pair: Floats
    hop_pair: Floats
    """``pair``, ``hop_pair``: B/s of each of two devices that are a group by themselves inside a node, and seconds to
    start one of their collectives, as probes found them; NaN: not known."""
    hop_inside: Floats
    hop_between: Floats
    """``hop_inside``, ``hop_between``: seconds to start one hop of a ring inside a node, and between nodes; the former
    on clusters of one node."""
    inner: Floats
    outer: Floats
    """``inner``, ``outer``: further tiers of the network, inside of a node (or linked nodes) and outside of the tier of
    ``inter``, from the innermost outwards, of shape (rows, tiers, 3): number of devices, B/s of each device, seconds of
    a hop. The number is that of a unit, for ``outer`` of the next tier inwards; NaN: this row has fewer tiers."""
    world_measured: Floats
    """Bus bandwidth of an all-reduce over all devices in B/s; NaN: not measured."""
    intra_measured: Floats
    """Bus bandwidth of an all-reduce inside a node in B/s; NaN: not measured."""

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, rows: Sequence[int] | NDArray[Any]) -> Points:
        """`Points` of the rows with these indices (or of this mask)."""
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @classmethod
    def joined(cls, parts: Sequence[Points]) -> Points:
        """`Points` of all parts, one after the other."""
        return cls(**{field.name: _joined([getattr(one, field.name) for one in parts]) for field in fields(cls)})

    @property
    def tokens(self) -> Floats:
        """Number of tokens of a micro-batch on one rank."""
        return self.mbs * self.seq / self.cp

    @property
    def layer_params(self) -> Floats:
        """Matrix parameters of one layer: attention ``2 h Q (1 + K/N)``, feed-forward ``k h F``."""
        attention: Floats = 2 * self.hidden * self.queries * (1 + self.kv_heads / self.heads)
        params: Floats = attention + self.matrices * self.hidden * self.ffn
        return params

    @property
    def vocabulary_params(self) -> Floats:
        return self.vocab * self.hidden

    @property
    def params(self) -> Floats:
        whole: Floats = self.layers * self.layer_params + (2 - self.tied) * self.vocabulary_params
        return whole


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Parts one after the other; tables of tiers are filled up to the most tiers."""
    if parts[0].ndim > 1:
        most = max(part.shape[1] for part in parts)
        parts = [tier_table([*part], most) for part in parts]
    return np.concatenate(parts)


def tier_table(rows: Sequence[Any], most: int | None = None) -> Floats:
    """`Points.inner` or `Points.outer` from the tiers of each row; ``most``: number of tiers to fill up to, None: that
    of the row with most."""
    most = max((len(tiers) for tiers in rows), default=0) if most is None else most
    table = np.full((len(rows), most, 3), math.nan)
    for row, tiers in enumerate(rows):
        if len(tiers):
            table[row, : len(tiers)] = tiers
    return table
