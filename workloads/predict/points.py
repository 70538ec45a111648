"""The training configurations of a table as arrays: one entry a row, one array a quantity.

Everything that predicts works on whole arrays, so that a table of thousands of rows takes a fraction of a second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from numpy.typing import NDArray

Floats = NDArray[Any]
"""Of float64."""
Texts = NDArray[Any]

RECOMPUTE = ("none", "selective", "full")
UNLIKE = {
    "ring": 1.0, "routed": 0.0, "waits": 0.0, "latents": 0.0, "scaled": 1.0, "pace": 1.0, "launch": 1.0, "again": 1.0,
    "recomputed": 1.0, "doubt": 0.0,
}  # fmt: skip
"""Of `Points`: what a table need not say, with its values for dense layers that all recompute the same, a ring where
ranks share a sequence, a usual host, and nothing that a row was divided by."""


def fp8_kind(precision: str) -> float:
    """0: products of 16 bits or more; 1: of fp8 (or fp4) with one scale a tensor, or unknown ones; 2: of fp8 with a
    scale for each row or block, which are more work."""
    if re.search(r"fp8|float8|e4m3|mxfp8|nvfp4|fp4", precision) is None:
        return 0.0
    return 2.0 if re.search("row|block|axis", precision) else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Rows of which enough is known to predict them. Counts are floats; what is not known is NaN."""

    gpus: Floats
    layers: Floats
    hidden: Floats
    heads: Floats
    kv_heads: Floats
    ffn: Floats
    matrices: Floats
    """Matrices of a feed-forward layer: 3 with a gate, 2 without."""
    vocab: Floats
    tied: Floats
    """1: the head is the embedding."""
    seq: Floats
    mbs: Floats
    """Sequences of a micro-batch on one data-parallel rank."""
    micro_batches: Floats
    dp: Floats
    tp: Floats
    pp: Floats
    vpp: Floats
    cp: Floats
    ep: Floats
    zero: Floats
    recompute: Floats
    """Place in `RECOMPUTE`."""
    fp8: Floats
    """Of the layers' products, as `fp8_kind` says."""
    fp16: Floats
    """1: products of 16 bits are in fp16, not bf16."""
    ring: Floats
    """1: with context parallelism keys and values go round a ring, in cp - 1 turns; 0: they are exchanged at once."""
    routed: Floats
    """How much more a layer's routed experts give the host to do (`workloads.predict.layouts`); 0: none."""
    waits: Floats
    """Times a layer and micro-batch that the host waits for the device to tell it how many tokens go to which rank."""
    latents: Floats
    """1: latent attention; likewise."""
    scaled: Floats
    """What the predicted time is multiplied by afterwards for what the columns do not say of layers; 1: nothing."""
    again: Floats
    """The host's work for recomputation, over that for recomputing every layer as ``recompute`` says."""
    recomputed: Floats
    """Share of the layers that recompute, of what the device does; what `layouts` predicts has it in a factor."""
    pace: Floats
    """How many times as long as usual the host takes for all it does; 1: as usual, or unknown."""
    launch: Floats
    """How many times as long as usual the host took to launch one small operation beside the row's run; likewise."""
    doubt: Floats
    """Of a row to learn from: standard deviation of the logarithm of what it was divided by for what the columns do not
    say, beside its noise."""
    codebase: Texts
    """Name of the profile."""
    version: Texts
    """The code base's version as the table has it; empty: unknown."""
    device: Texts
    peak: Floats
    """FLOP/s of the device in 16 bits."""
    peak_matmul: Floats
    """FLOP/s of the device in the precision of the layers' matrix products."""
    memory_bandwidth: Floats
    capacity: Floats
    """Bytes that the driver reports as total."""
    node: Floats
    """Devices of a node."""
    intra: Floats
    """B/s of each device inside a node."""
    inter: Floats
    """B/s of each device between nodes; NaN: no such link is known."""
    world_measured: Floats
    """Bus bandwidth of an all-reduce over all devices in B/s; NaN: not measured."""
    intra_measured: Floats
    """The same inside a node."""

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, rows: Sequence[int] | NDArray[Any]) -> Points:
        """The rows of these indices (or of this mask)."""
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def tokens(self) -> Floats:
        """Tokens of a micro-batch that one rank works on."""
        return self.mbs * self.seq / self.cp

    @property
    def step_tokens(self) -> Floats:
        return self.mbs * self.seq * self.dp * self.micro_batches

    @property
    def layer_params(self) -> Floats:
        """Matrix parameters of one layer: attention ``2 h² (1 + K/N)``, feed-forward ``k h F``."""
        attention: Floats = 2 * self.hidden**2 * (1 + self.kv_heads / self.heads)
        found: Floats = attention + self.matrices * self.hidden * self.ffn
        return found

    @property
    def vocabulary_params(self) -> Floats:
        return self.vocab * self.hidden

    @property
    def params(self) -> Floats:
        whole: Floats = self.layers * self.layer_params + (2 - self.tied) * self.vocabulary_params
        return whole
