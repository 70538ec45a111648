"""Modules of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2), the last blocks of a model.

Module k takes the hidden state of each token i from the module before it, or from the last layer, before any norm, and
the embedding of token i + k:

    h'_i = M_k [norm(h_i); norm(Emb(t_(i+k)))]        h_i = layer(h'_i)        logits of t_(i+k+1) = head(norm(h_i))

Embedding and head are those of the model. Shapes as in `workloads.engine.layers.block`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workloads.engine.collectives.tensor_parallel import WholeLinear
from workloads.engine.layers.block import AnyBlock
from workloads.engine.layers.norm import RMSNorm
from workloads.spec import kind_weights
from workloads.spec.model_spec import ModelSpec


class AheadBlock(nn.Module):
    """One module: its norms, its projection, and the layer of the model's last kind in it."""

    def __init__(self, layer: int, model: ModelSpec, block: AnyBlock) -> None:
        """``layer``: index of the module among the layers. ``block``: its layer."""
        super().__init__()
        held = kind_weights.ahead(model, f"layers.{layer}")
        self.hidden_norm = RMSNorm(held["hidden_norm"], model.norm_eps)
        self.embedding_norm = RMSNorm(held["embedding_norm"], model.norm_eps)
        self.projection = WholeLinear([held["projection"]])
        self.block = block
        self.norm = RMSNorm(held["norm"], model.norm_eps)

    def forward(self, x_TD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        """(hidden state, its norm for the head), each [T, D]. ``others``: what every block gets beside its input, and
        the embeddings of the later tokens, [T, D]."""
        *tables, later_TD = others
        both_TE = torch.cat([self.hidden_norm(x_TD), self.embedding_norm(later_TD)], 1)
        x_TD = self.block(self.projection(both_TE), *tables)
        return x_TD, self.norm(x_TD)


def with_modules(blocks: Sequence[AnyBlock], layers: Sequence[int], model: ModelSpec, count: int) -> list[nn.Module]:
    """The blocks of a stage, the last ``count`` of which are the layers of modules. ``layers``: their indices."""
    first = len(blocks) - count
    return [block if place < first else AheadBlock(layers[place], model, block) for place, block in enumerate(blocks)]
