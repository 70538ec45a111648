"""The modules of a Llama-shaped transformer, and the chunk of it that is one pipeline stage.

Shapes: B sequences of a micro-batch, S tokens a sequence, T = B*S tokens (T/tp between tensor-parallel regions with
sequence parallelism), D hidden size, N query heads and K key/value heads of this tensor-parallel rank, H head size, F
feed-forward columns of this rank, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from workloads.costs.shape.held_model import padded_rows
from workloads.costs.shape.partition import experiment_layers
from workloads.engine.collectives.context_parallel import local_positions
from workloads.engine.collectives.document_exchange import seen_keys
from workloads.engine.collectives.groups import Groups
from workloads.engine.collectives.parameters import add_parameter
from workloads.engine.collectives.peer_memory import PeerMemory
from workloads.engine.collectives.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    WholeLinear,
    gather_tokens,
)
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.layers.ahead import with_modules
from workloads.engine.layers.block import AnyBlock, block_of
from workloads.engine.layers.experts import ExpertParallel
from workloads.engine.layers.norm import RMSNorm
from workloads.engine.layers.routing import Router, Routing
from workloads.engine.ops.fp8 import Fp8Scaling
from workloads.engine.ops.fp8_linear import Fp8Products
from workloads.engine.ops.linear import DeferredGradients, SumOf
from workloads.engine.ops.linear_cross_entropy import linear_cross_entropies
from workloads.spec import weights
from workloads.spec.documents.kernels import by_length, extremes
from workloads.spec.experiment import Experiment
from workloads.spec.kind_weights import Rotation, kind_of, rotation, rotations
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import routed


class Head(nn.Module):
    """Final norm and vocabulary-parallel cross-entropy; the logits of a whole micro-batch never exist. Modules of
    multi-token prediction have their own norms, and the mean of their losses times ``mtp_loss_weight`` is added to the
    model's."""

    weight: nn.Parameter

    def __init__(self, experiment: Experiment, tp: TensorParallel) -> None:
        super().__init__()
        model = experiment.model
        self.tp = tp
        self.norm = RMSNorm(weights.final_norm(model), model.norm_eps)
        padding = padded_rows(experiment)
        self.vocabulary = model.vocab_size if padding else None
        self.cap = model.logit_cap
        add_parameter(self, "weight", [weights.head(model, padding)], tp.sizes)
        self.scale = 1.0 / experiment.tokens_per_step
        modules = model.mtp_modules
        self.scales = [self.scale, *[self.scale * model.mtp_loss_weight / modules for _ in range(modules)]]
        self.mtp_loss_weight = model.mtp_loss_weight
        self.losses: list[Tensor] = []
        """Of the last forward, without a gradient: this micro-batch's share of the global batch's mean loss, and with
        modules of that of the mean of theirs."""
        # GPipe holds every micro-batch between its forward and backward: keep one number per token, not two gradients.
        self.grads_in_forward = experiment.pp_schedule != "gpipe"
        self.loss_scale: Tensor | None = None
        """Factor on all gradients from the loss on, but not on the loss itself."""
        self.sum_of: SumOf | None = None
        """As of `DeferredGradients`. The gradient is never deferred."""

    def forward(self, x_TD: Tensor, targets_T: Tensor, *later: Tensor) -> Tensor:
        """This micro-batch's share of the global batch's mean loss (fp32, or fp64 in fp64 runs), a scalar. ``later``:
        normed hidden states [T, D] of modules of multi-token prediction, then the targets of each [T]."""
        modules = len(later) // 2
        total, (of_model, *of_modules) = linear_cross_entropies(
            [gather_tokens(normed_TD, self.tp) for normed_TD in (self.norm(x_TD), *later[:modules])],
            self.weight,
            [targets_T, *later[modules:]],
            scales=self.scales,
            group=self.tp.axis.group,
            grads_in_forward=self.grads_in_forward,
            gradient_scale=self.loss_scale,
            vocabulary=self.vocabulary,
            cap=self.cap,
            sum_of=self.sum_of,
        )
        self.losses = [of_model, *([torch.stack(of_modules).sum() / self.mtp_loss_weight] if of_modules else [])]
        return total


class Chunk(nn.Module):
    """One model chunk, which is one stage of the pipeline: some layers, the embedding before the first, the head after
    the last. A rank holds several chunks if it has virtual stages. Modules of multi-token prediction are all in the
    last stage, which has a copy of the embedding for them.

    The chunk of the first stage takes tokens; that of the last stage also takes targets and returns the loss.
    """

    cos: Tensor
    sin: Tensor
    index: Tensor
    """All indices of a sequence, only with documents."""

    def __init__(self, experiment: Experiment, groups: Groups, stage: int) -> None:
        super().__init__()
        model = experiment.model
        tp = TensorParallel(groups.axes["tp"], experiment.sequence_parallel)
        self.stage = stage
        self.is_first, self.is_last = stage == 0, stage == experiment.num_stages - 1
        self.cp = cp = (groups.axes["cp"], experiment.cp_kind) if experiment.cp > 1 else None
        self.packs = experiment.documents is not None
        """Whether documents are packed into sequences."""
        self.limits = extremes(experiment) if by_length(experiment) else None
        """Most documents of a micro-batch and tokens of one, where attention takes each document as a sequence."""
        self.placed = experiment.seq_len, experiment.cp, groups.position["cp"], experiment.cp_kind
        self.rotations = rotations(model)
        vectors = weights.embedding(model, padded_rows(experiment))
        self.modules_ahead = model.mtp_modules if self.is_last else 0
        """Modules of multi-token prediction, which are the last blocks."""
        self.embedding = None
        if self.is_first or self.modules_ahead:
            self.embedding = VocabularyParallelEmbedding(vectors, tp)
        self.embedding_scale = model.embedding_scale
        layers, batch = experiment_layers(experiment)[stage], experiment.micro_batch_size
        experts = ExpertParallel(Routing(experiment, groups), tp) if model.moe is not None else None
        blocks = [block_of(layer, model, batch, tp, cp, experts if routed(model, layer) else None) for layer in layers]
        self.blocks = nn.ModuleList(with_modules(blocks, layers, model, self.modules_ahead))
        self.head = Head(experiment, tp) if self.is_last else None
        if self.embedding is not None and self.head is not None and model.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.table_of = [_table(model, layer, self.rotations) for layer in layers]
        """For each block the index of its rotary tables."""
        for at, rotated in enumerate(self.rotations):
            for table in _names_of_tables(at):
                # Any rank may hold any place of a document.
                positions = experiment.seq_len // (1 if self.packs else experiment.cp)
                rows = torch.empty(positions, rotated.columns // 2)
                self.register_buffer(table, rows, persistent=False)
        if self.packs:
            index_T = torch.empty(experiment.seq_len, dtype=torch.int32)
            self.register_buffer("index", index_T, persistent=False)
        self.store: Any = None
        """Where activations of its blocks wait on the host (`workloads.engine.training.activation_offload`)."""
        self.between_blocks: Callable[[Tensor], Tensor] | None = None
        """Called on the residual stream before every block and after the last; the memory probe attaches here."""

    def fill_buffers(self) -> None:
        """Set the initial values of everything that is not a parameter."""
        self._fill_rope()
        for router in routers(self):
            router.fill()

    @torch.no_grad()
    def _fill_rope(self) -> None:
        """RoPE tables (arXiv:2104.09864), angles in fp64 so that every precision rotates by the same amount."""
        index = local_positions(*self.placed)
        if self.packs:
            index = torch.arange(self.placed[0])
            self.index.copy_(index)
        position = index.to(self.cos.device, torch.float64)
        for rotated, (cos, sin) in zip(self.rotations, self.tables(), strict=True):
            pair = torch.arange(rotated.columns // 2, dtype=torch.float64, device=self.cos.device)
            turns = rotated.theta ** -(2 * pair / rotated.columns) * (pair < rotated.turning)
            angle = torch.outer(position, turns)
            cos.copy_(angle.cos())
            sin.copy_(angle.sin())

    def tables(self) -> list[tuple[Tensor, Tensor]]:
        """(cosines, sines) [S, R / 2] of every base and number of rotated columns."""
        names = [_names_of_tables(at) for at in range(len(self.rotations))]
        return [(getattr(self, cos), getattr(self, sin)) for cos, sin in names]

    def round_tables(self, dtype: torch.dtype) -> None:
        """Keep the rotary tables in ``dtype``."""
        for at in range(len(self.rotations)):
            for name in _names_of_tables(at):
                setattr(self, name, getattr(self, name).to(dtype))

    def forward(
        self,
        x: Tensor,
        targets_T: Tensor | None = None,
        positions_T: Tensor | None = None,
        *others: Tensor,
        later_targets: Sequence[Tensor] = (),
    ) -> Tensor:
        """``positions_T``: place of each token in its document, if documents are packed, and ``others``: what attention
        must know of other ranks' tokens (`workloads.engine.training.data.Batch`). ``later_targets``: [T] of each module
        of multi-token prediction, in the stage that has them."""
        later: Sequence[Tensor] = ()
        if self.modules_ahead:
            assert targets_T is not None and len(later_targets) == self.modules_ahead
            inputs = [targets_T, *later_targets[:-1]]
            if self.is_first:
                x, *later = self._embedded([x, *inputs])
            else:
                later = self._embedded(inputs)
        elif self.embedding is not None:
            (x,) = self._embedded([x])
        tables: list[tuple[Any, ...]] = [*self.tables()]
        if positions_T is not None:
            seen = seen_keys(positions_T, others, self.index, self.cp, x, self.limits)
            tables = [(cos[positions_T], sin[positions_T], seen) for cos, sin in tables]
        blocks = zip(self.blocks, self.table_of, strict=True)
        for block, table in islice(blocks, len(self.blocks) - self.modules_ahead):
            x = self._mark(x)
            x = block(x, *tables[table])
        x = hidden = self._mark(x)
        normed: list[Tensor] = []
        for block, table in blocks:
            hidden, of_head = block(hidden, *tables[table], later[len(normed)])
            normed.append(of_head)
        if self.head is not None:
            assert targets_T is not None
            x = self.head(x, targets_T, *normed, *later_targets)
        return x

    def _embedded(self, tokens: Sequence[Tensor]) -> Sequence[Tensor]:
        """Vectors of this rank's tokens of each of several lists [T]: one look-up, and one message. No token
        (`NO_TARGET`) has the vector of token 0, which nothing reads that has a loss."""
        assert self.embedding is not None
        if len(tokens) == 1:
            return (self._scaled(self.embedding(tokens[0])),)
        tp = self.embedding.tp
        parts = tp.size if tp.sequence_parallel else 1  # a rank gets the same part of each list
        tokens_KPT = torch.stack([*tokens]).clamp_(min=0).view(len(tokens), parts, -1)
        x = self._scaled(self.embedding(tokens_KPT.transpose(0, 1).reshape(-1)))
        return x.view(len(tokens), -1, x.shape[-1]).unbind()

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def defer_to(self, deferred: DeferredGradients) -> None:
        """Leave the weight gradients of this chunk's products to ``deferred``."""
        if self.head is not None:
            self.head.sum_of = deferred.sum_of
        for module in self.modules():
            if hasattr(module, "deferred"):
                setattr(module, "deferred", deferred)  # noqa: B010 - nn.Module's own attributes are typed as tensors

    def exchange_through(self, peers: PeerMemory) -> None:
        """Exchange the tokens of tensor-parallel products through memory that the ranks share."""
        for module in self.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module.peers = peers

    def use_fp8(self, scaling: Fp8Scaling) -> None:
        """Run the products of the blocks in fp8, except those of routed experts, whose weights are gathered in fp8
        (`workloads.engine.training.fp8_gather`).

        Attention keeps its output for its own backward. With blockwise scaling (128 values a scale) the down
        projections of latent attention stay in bf16: in no shipped model is the size of latents plus shared key a
        multiple of 128.
        """
        knows_all_tokens = True
        for module in self.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                module.fp8 = Fp8Products(scaling, keeps_input=module.shares_input)
                knows_all_tokens = knows_all_tokens and module.tp.size == 1
            elif isinstance(module, WholeLinear) and scaling != "blockwise":
                module.fp8 = Fp8Products(scaling, keeps_input=module.shares_input)
        for block in self.modules():
            # With tp > 1 the tokens are cast together with those of other ranks, whose largest value is not known here.
            if isinstance(block, AnyBlock):
                for norm in block.norms:
                    norm.for_fp8 = knows_all_tokens and scaling == "tensorwise"

    def _mark(self, x: Tensor) -> Tensor:
        return x if self.between_blocks is None else self.between_blocks(x)


def _names_of_tables(at: int) -> tuple[str, str]:
    """Names of the buffers of the ``at``-th rotary tables: cos and sin, cos1 and sin1 ..."""
    return f"cos{at or ''}", f"sin{at or ''}"


def _table(model: ModelSpec, layer: int, known: Sequence[Rotation]) -> int:
    """Index of the rotary tables of a layer; 0 for a layer without positions."""
    kind = kind_of(model, layer)
    found = rotation(kind) if kind is not None else None
    return 0 if found is None else known.index(found)


def routers(chunk: nn.Module) -> list[Router]:
    """Routers of a chunk, in the order of its layers."""
    return [module for module in chunk.modules() if isinstance(module, Router)]


def replace_blocks(chunk: Chunk, blocks: Sequence[nn.Module]) -> None:
    chunk.blocks = nn.ModuleList(blocks)
