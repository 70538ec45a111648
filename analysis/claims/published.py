"""Published numbers of the Ultra-Scale Playbook's study: its models and the winners of its pair of heatmaps.

The claims compare rows with these facts from the published figure (February 2025). Nothing here comes from this
project's runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from analysis.rows import labels

DEVICES_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that identify a model; it has as many key-value heads as heads."""

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_hidden_size: int
    vocab_size: int = 131_072


@dataclass(frozen=True, slots=True)
class PublishedCell:
    """One cell of the heatmaps: the best configuration by the study's MFU."""

    mfu_percent: float
    memory_gb: float
    """Reserved memory, GiB."""
    dp: int
    tp: int
    pp: int
    acc: int
    mbs: int
    zero: int

    @property
    def layout(self) -> tuple[int, int, int, int, int, int]:
        return self.dp, self.tp, self.pp, self.acc, self.mbs, self.zero

    @property
    def label(self) -> str:
        """The layout as reports write it."""
        row = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "zero_stage": self.zero, "pp_schedule": "1f1b"}
        row |= {"micro_batch_size": self.mbs, "num_microbatches": self.acc}
        return f"{labels.degrees(row)} · {labels.batching(row)}"


SHAPES = {
    "1.34B": Shape(16, 2048, 32, 8192),
    "3.57B": Shape(28, 3072, 32, 8192),
    "8.86B": Shape(32, 4096, 32, 14336),
    "80B": Shape(80, 8192, 64, 28672),
    "469B": Shape(126, 16384, 128, 53248),
}
WINNERS = {
    ("1.34B", 1): PublishedCell(44.32, 41.76, 4, 1, 2, 16, 4, 1),
    ("1.34B", 2): PublishedCell(41.59, 19.45, 8, 1, 2, 32, 1, 1),
    ("1.34B", 4): PublishedCell(38.38, 16.39, 16, 1, 2, 16, 1, 1),
    ("1.34B", 8): PublishedCell(32.47, 16.27, 32, 1, 2, 8, 1, 1),
    ("1.34B", 16): PublishedCell(29.46, 38.84, 64, 2, 1, 1, 4, 0),
    ("1.34B", 32): PublishedCell(23.20, 19.57, 64, 4, 1, 1, 4, 0),
    ("1.34B", 64): PublishedCell(5.25, 8.40, 128, 2, 2, 1, 2, 1),
    ("3.57B", 1): PublishedCell(46.68, 56.87, 4, 1, 2, 32, 2, 1),
    ("3.57B", 2): PublishedCell(43.77, 54.31, 8, 1, 2, 16, 2, 1),
    ("3.57B", 4): PublishedCell(40.39, 53.33, 16, 1, 2, 8, 2, 1),
    ("3.57B", 8): PublishedCell(35.53, 36.73, 32, 1, 2, 8, 1, 1),
    ("3.57B", 16): PublishedCell(34.59, 66.20, 32, 4, 1, 1, 8, 0),
    ("3.57B", 32): PublishedCell(26.77, 38.98, 64, 4, 1, 1, 4, 0),
    ("3.57B", 64): PublishedCell(10.49, 16.42, 128, 4, 1, 1, 2, 1),
    ("8.86B", 1): PublishedCell(45.22, 63.07, 2, 1, 4, 128, 1, 1),
    ("8.86B", 2): PublishedCell(43.94, 58.34, 4, 4, 1, 16, 4, 1),
    ("8.86B", 4): PublishedCell(43.31, 61.10, 16, 1, 2, 16, 1, 1),
    ("8.86B", 8): PublishedCell(39.50, 59.09, 32, 1, 2, 8, 1, 1),
    ("8.86B", 16): PublishedCell(36.33, 66.88, 16, 8, 1, 2, 8, 0),
    ("8.86B", 32): PublishedCell(32.71, 63.39, 32, 8, 1, 1, 8, 0),
    ("8.86B", 64): PublishedCell(18.69, 57.76, 128, 4, 1, 1, 2, 0),
    ("80B", 4): PublishedCell(14.76, 65.97, 1, 8, 4, 256, 1, 0),
    ("80B", 8): PublishedCell(30.65, 63.07, 1, 4, 16, 256, 1, 0),
    ("80B", 16): PublishedCell(34.29, 61.18, 1, 4, 32, 256, 1, 0),
    ("80B", 32): PublishedCell(30.75, 64.21, 4, 4, 16, 64, 1, 1),
    ("80B", 64): PublishedCell(17.79, 53.46, 32, 16, 1, 4, 2, 1),
    ("469B", 64): PublishedCell(4.27, 59.19, 4, 32, 4, 32, 2, 1),
}
"""Winners by label and number of nodes. The winner of 80B on 8 nodes has 8 key-value heads, so it is another model."""
INFLATION = {"1.34B": 1.17, "3.57B": 1.10}
"""Factor by which the published MFU of a pipeline with tied embeddings is too high: published, two digits."""
BEST_PIPELINE_BEFORE_AND_AFTER = ("3.57B", 4, 0.079, 0.369)
"""Label, nodes, and the best MFU of a pipeline before and after its communication was rewritten."""
BARS = {
    "dp, 1.34B": {8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23, 128: 26446.44, 256: 15700.38},
    "tp with sequence parallelism, 3B": {2: 14167.25, 4: 13460.16, 8: 10888.53, 16: 6159.3, 32: 3609.73},
}
"""Tokens/s/GPU by degree in the scaling figures."""
BANDWIDTHS = {
    ("all_reduce", 1): 435.97,
    ("all_reduce", 2): 361.75,
    ("all_reduce", 4): 160.14,
    ("all_reduce", 8): 99.56,
    ("all_reduce", 16): 84.74,
    ("all_reduce", 32): 64.93,
    ("all_reduce", 64): 32.94,
    ("all_gather", 1): 249.85,
    ("all_gather", 2): 184.61,
    ("all_gather", 4): 118.97,
    ("all_gather", 8): 69.00,
    ("all_gather", 16): 54.97,
    ("all_gather", 32): 27.97,
    ("all_gather", 64): 11.04,
    ("reduce_scatter", 1): 249.73,
    ("reduce_scatter", 2): 181.55,
    ("reduce_scatter", 4): 115.76,
    ("reduce_scatter", 8): 68.55,
    ("reduce_scatter", 16): 54.52,
    ("reduce_scatter", 32): 27.94,
    ("reduce_scatter", 64): 11.07,
}
"""GB/s by collective and number of nodes, as plotted."""
BANDWIDTH_DIGIT = 0.01
FAILED_SHARE = 0.45
"""Share of the requested devices held by runs that did not finish."""
FAILED_SHARE_DIGIT = 0.05
"""Largest difference of shares that counts as agreement."""
