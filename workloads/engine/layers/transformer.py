"""The modules of a Llama-shaped transformer, and the chunk of it that is one pipeline stage.

Shapes: B sequences of a micro-batch, S tokens a sequence, T = B*S tokens (T/tp between tensor-parallel regions with
sequence parallelism), D hidden size, N query heads and K key/value heads of this tensor-parallel rank, H head size, F
feed-forward columns of this rank, V vocabulary rows of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from workloads.costs.shape.held_model import padded_rows
from workloads.costs.shape.partition import experiment_layers
from workloads.engine.collectives.context_parallel import ContextParallel, context_attention, local_positions
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
from workloads.engine.layers.experts import ExpertParallel, RoutedFeedForward
from workloads.engine.layers.latent_attention import LatentAttention
from workloads.engine.layers.norm import RMSNorm
from workloads.engine.layers.recompute import RecomputeRegistry
from workloads.engine.layers.routing import Router, Routing
from workloads.engine.ops.attention import attention
from workloads.engine.ops.fp8 import Fp8Scaling
from workloads.engine.ops.fp8_linear import Fp8Products
from workloads.engine.ops.linear import DeferredGradients, SumOf
from workloads.engine.ops.linear_cross_entropy import linear_cross_entropy
from workloads.engine.ops.rms_norm import rms_norm
from workloads.engine.ops.rope import apply_rope
from workloads.engine.ops.swiglu import swiglu
from workloads.spec import weights
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec
from workloads.spec.weights import Weight, routed


class Attention(nn.Module):
    """Grouped-query attention. With ``qk_norm`` every head of the queries and keys is normed before rotation, with one
    weight of size H for all query heads and one for all key heads (Qwen3, arXiv:2505.09388)."""

    recomputes = "rope"

    def __init__(
        self, prefix: str, model: ModelSpec, batch: int, tp: TensorParallel, cp: ContextParallel | None = None
    ) -> None:
        super().__init__()
        self.batch, self.cp = batch, cp
        self.heads, self.kv_heads = model.num_heads // tp.size, model.num_kv_heads // tp.size
        self.head_dim = model.head_dim
        attention_weights = weights.attention(model, prefix)
        self.qkv = ColumnParallelLinear([attention_weights["q"], attention_weights["k"], attention_weights["v"]], tp)
        self.out = RowParallelLinear(attention_weights["o"], tp, "attention")
        self.q_norm = RMSNorm(attention_weights["q_norm"], model.norm_eps) if model.qk_norm else None
        self.k_norm = RMSNorm(attention_weights["k_norm"], model.norm_eps) if model.qk_norm else None
        self.recomputations: RecomputeRegistry | None = None

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        qkv = self.qkv(x_TD).view(self.batch, -1, self.heads + 2 * self.kv_heads, self.head_dim)
        q_BSNH, k_BSKH, v_BSKH = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        if self.recomputations is None:
            q_BSNH, k_BSKH = self._norm_and_rotate(q_BSNH, k_BSKH, cos_SH, sin_SH)
        else:
            # Recomputation needs the plain queries and keys. They take no extra memory: backward keeps the values,
            # which are a view of the whole projection.
            plain_q, plain_k = q_BSNH.detach(), k_BSKH.detach()
            q_BSNH, k_BSKH = self._norm_and_rotate(q_BSNH, k_BSKH, cos_SH, sin_SH)
            self.recomputations.register(
                (q_BSNH, k_BSKH), lambda: self._norm_and_rotate(plain_q, plain_k, cos_SH, sin_SH)
            )
        q_BNSH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
        if self.cp is None:
            o_BNSH = attention(q_BNSH, k_BKSH, v_BKSH, causal=True)
        else:
            o_BNSH = context_attention(q_BNSH, k_BKSH, v_BKSH, *self.cp)
        return self.out(o_BNSH.transpose(1, 2).reshape(-1, self.heads * self.head_dim))

    def _norm_and_rotate(self, q_BSNH: Tensor, k_BSKH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is not None and self.k_norm is not None:
            # Not called as modules: their outputs need no recomputation, since rotation does not save its input.
            q_BSNH = rms_norm(q_BSNH, self.q_norm.weight, self.q_norm.eps)
            k_BSKH = rms_norm(k_BSKH, self.k_norm.weight, self.k_norm.eps)
        return apply_rope(q_BSNH, k_BSKH, cos_SH, sin_SH)


class FeedForward(nn.Module):
    recomputes = "swiglu"

    def __init__(self, parts: dict[str, Weight], tp: TensorParallel, *, shares_input: bool = False) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear([parts["gate"], parts["up"]], tp, shares_input=shares_input)
        self.down = RowParallelLinear(parts["down"], tp, "swiglu")
        self.recomputations: RecomputeRegistry | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        gate_up = self.gate_up(x_TD)
        product_TF = swiglu(gate_up, for_fp8=self.down.has_one_scale)
        if self.recomputations is not None:
            gate_up = gate_up.detach()
            self.recomputations.register((product_TF,), lambda: (swiglu(gate_up),))
        return self.down(product_TF)


class Block(nn.Module):
    """Attention and feed-forward part of one layer. ``experts``: how ranks share the experts; None for a dense
    layer."""

    def __init__(
        self,
        layer: int,
        model: ModelSpec,
        batch: int,
        tp: TensorParallel,
        cp: ContextParallel | None = None,
        experts: ExpertParallel | None = None,
    ) -> None:
        super().__init__()
        prefix = f"layers.{layer}"
        self.attention_norm = RMSNorm(weights.norm(f"{prefix}.attention_norm", model.hidden_size), model.norm_eps)
        kind = Attention if model.mla is None else LatentAttention
        self.attention = kind(f"{prefix}.attention", model, batch, tp, cp)
        self.ffn_norm = RMSNorm(weights.norm(f"{prefix}.ffn_norm", model.hidden_size), model.norm_eps)
        self.ffn: nn.Module
        if experts is None:
            self.ffn = FeedForward(weights.feed_forward(model, f"{prefix}.ffn", model.ffn_hidden_size), tp)
        else:
            shared = weights.shared_experts(model, prefix)
            shared_experts = FeedForward(shared, tp, shares_input=True) if shared else None  # the router saves it too
            self.ffn = RoutedFeedForward(prefix, model, experts, shared_experts)

    def forward(self, x_TD: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), cos_SH, sin_SH)
        return x_TD + self.ffn(self.ffn_norm(x_TD))


class Head(nn.Module):
    """Final norm and vocabulary-parallel cross-entropy; the logits of a whole micro-batch never exist."""

    weight: nn.Parameter

    def __init__(self, experiment: Experiment, tp: TensorParallel) -> None:
        super().__init__()
        model = experiment.model
        self.tp = tp
        self.norm = RMSNorm(weights.final_norm(model), model.norm_eps)
        padding = padded_rows(experiment)
        self.vocabulary = model.vocab_size if padding else None
        add_parameter(self, "weight", [weights.head(model, padding)], tp.sizes)
        self.scale = 1.0 / experiment.tokens_per_step
        # GPipe holds every micro-batch between its forward and backward: keep one number per token, not two gradients.
        self.grads_in_forward = experiment.pp_schedule != "gpipe"
        self.loss_scale: Tensor | None = None
        """Factor on all gradients from the loss on, but not on the loss itself."""
        self.sum_of: SumOf | None = None
        """As of `DeferredGradients`. The gradient is never deferred."""

    def forward(self, x_TD: Tensor, targets_T: Tensor) -> Tensor:
        """This micro-batch's share of the global batch's mean loss (fp32, or fp64 in fp64 runs), a scalar."""
        return linear_cross_entropy(
            gather_tokens(self.norm(x_TD), self.tp),
            self.weight,
            targets_T,
            scale=self.scale,
            group=self.tp.axis.group,
            grads_in_forward=self.grads_in_forward,
            gradient_scale=self.loss_scale,
            vocabulary=self.vocabulary,
            sum_of=self.sum_of,
        )


class Chunk(nn.Module):
    """One model chunk, which is one stage of the pipeline: some layers, the embedding before the first, the head after
    the last. A rank holds several chunks if it has virtual stages.

    The chunk of the first stage takes tokens; that of the last stage also takes targets and returns the loss.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, experiment: Experiment, groups: Groups, stage: int) -> None:
        super().__init__()
        model = experiment.model
        tp = TensorParallel(groups.axes["tp"], experiment.sequence_parallel)
        self.stage = stage
        self.is_first, self.is_last = stage == 0, stage == experiment.num_stages - 1
        cp = (groups.axes["cp"], experiment.cp_kind) if experiment.cp > 1 else None
        self.placed = experiment.seq_len, experiment.cp, groups.position["cp"], experiment.cp_kind
        self.rope_dim, self.theta = model.rope_dim, model.rope_theta
        vectors = weights.embedding(model, padded_rows(experiment))
        self.embedding = VocabularyParallelEmbedding(vectors, tp) if self.is_first else None
        layers = experiment_layers(experiment)[stage]
        experts = ExpertParallel(Routing(experiment, groups), tp) if model.moe is not None else None
        self.blocks = nn.ModuleList(
            Block(layer, model, experiment.micro_batch_size, tp, cp, experts if routed(model, layer) else None)
            for layer in layers
        )
        self.head = Head(experiment, tp) if self.is_last else None
        if self.embedding is not None and self.head is not None and model.tie_embeddings:
            self.head.weight = self.embedding.weight
        for table in ("cos", "sin"):
            rows = torch.empty(experiment.seq_len // experiment.cp, self.rope_dim // 2)
            self.register_buffer(table, rows, persistent=False)
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
        exponent = torch.arange(0, self.rope_dim, 2, dtype=torch.float64, device=self.cos.device) / self.rope_dim
        position = local_positions(*self.placed).to(self.cos.device, torch.float64)
        angle = torch.outer(position, self.theta**-exponent)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: Tensor, targets_T: Tensor | None = None) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = self._mark(x)
            x = block(x, self.cos, self.sin)
        x = self._mark(x)
        if self.head is not None:
            assert targets_T is not None
            x = self.head(x, targets_T)
        return x

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
            if isinstance(block, Block):
                block.attention_norm.for_fp8 = block.ffn_norm.for_fp8 = knows_all_tokens and scaling == "tensorwise"

    def _mark(self, x: Tensor) -> Tensor:
        return x if self.between_blocks is None else self.between_blocks(x)


def routers(chunk: nn.Module) -> list[Router]:
    """Routers of a chunk, in the order of its layers."""
    return [module for module in chunk.modules() if isinstance(module, Router)]


def replace_blocks(chunk: Chunk, blocks: Sequence[nn.Module]) -> None:
    chunk.blocks = nn.ModuleList(blocks)
