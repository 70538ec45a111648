"""Every matrix of a model: its name, shape, initial values, and how the ranks of a layout hold it. No torch here.

The engine makes its parameters from this table. Initial values, data parallelism, the sums of gradients and the
gradient norm read from the parameter how it is held. The closed forms count the weights of layer kinds
(`workloads.spec.layer_kinds`); a test requires that both count the same.

h is the hidden size, N and K are the numbers of query and key/value heads of size H, f the feed-forward columns, V the
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from workloads.spec.model_spec import ModelSpec

INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Placement:
    """How the ranks of a layout hold one parameter.

    Data and context parallelism are not part of this, because they treat every parameter alike: their ranks see
    different tokens, so all gradients are summed over them; with ZeRO they shard, without it each rank has a copy.
    Experts are the exception: expert parallelism gives each rank only some of them.
    """

    split: tuple[tuple[str, int], ...] = ()
    """Axes that divide the parameter, each with the dim of the matrix that it divides. Each part's gradient is
    complete."""
    divided_use: Literal["tokens", "heads"] = "tokens"
    """The work that the tensor-parallel ranks divide when they use a parameter that each of them holds whole.
    Heads are always divided, tokens only with sequence parallelism; if divided, each rank's gradient is a partial sum.
    """

    def dim(self, axis: str) -> int | None:
        """The dim that ``axis`` divides; None if each of its ranks holds the whole parameter."""
        return dict(self.split).get(axis)

    def summed_over(self, *, tp: int, sequence_parallel: bool) -> tuple[str, ...]:
        """Axes over which gradients must be summed, in addition to data and context parallelism."""
        divided = self.divided_use == "heads" or sequence_parallel
        return ("tp",) if tp > 1 and self.dim("tp") is None and not self.is_expert and divided else ()

    @property
    def is_expert(self) -> bool:
        """Whether this is a parameter of routed experts, which are held on the expert mesh
        (`workloads.spec.mesh.expert_degrees`)."""
        return self.dim("ep") is not None

    def copies(self, sizes: Mapping[str, int]) -> int:
        """Number of ranks along the axes in ``sizes`` that hold the same elements."""
        return math.prod(size for axis, size in sizes.items() if self.dim(axis) is None)


WHOLE = Placement()
"""Each tensor-parallel rank holds the whole parameter and uses it on its own tokens."""
WHOLE_BY_HEADS = Placement(divided_use="heads")
ROWS = Placement(split=(("tp", 0),))
"""Column-parallel: the outputs are divided."""
COLUMNS = Placement(split=(("tp", 1),))
"""Row-parallel: the inputs are divided."""
EXPERT_ROWS = Placement(split=(("ep", 0), ("etp", 1)))
EXPERT_COLUMNS = Placement(split=(("ep", 0), ("etp", 2)))


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix of the unsharded model. Several with one placement may be fused into one parameter."""

    name: str
    shape: tuple[int, ...]
    std: float | None
    """Standard deviation of the normal distribution of the initial values; None means ones (norms)."""
    placement: Placement
    padding: int = 0
    """Number of the last rows that stand for no token. They begin as zeros, get no gradient and so stay zeros."""
    kv_heads: int = 0
    """Key and value heads that its rows belong to; 0 for other weights. No rank holds a part of a head: of more
    tensor-parallel ranks than heads, ranks in a row hold copies of one, and each copy's gradient is a partial sum."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def copies(self, tp: int) -> int:
        """Number of tensor-parallel ranks in a row that hold the same key and value head; 1 for other weights."""
        return tp // self.kv_heads if 0 < self.kv_heads < tp else 1

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of the part that one rank holds; ``sizes`` are degrees by axis."""
        local = list(self.shape)
        for axis, dim in self.placement.split:
            size = sizes.get(axis, 1)
            local[dim] //= size // self.copies(size)
        return tuple(local)


def fused_shape(parts: Sequence[Weight], **degrees: int) -> tuple[int, ...]:
    """Shape of one parameter made of ``parts``, concatenated on dim 0 (for experts: on dim 0 of each expert), on one
    rank of a layout with these degrees."""
    shapes = [part.local_shape(degrees) for part in parts]
    if parts[0].placement.is_expert:
        experts, _, columns = shapes[0]
        return experts * sum(shape[1] for shape in shapes), columns
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def residual_std(model: ModelSpec) -> float:
    """Standard deviation of projections that add to the residual stream; it falls with depth (GPT-2), which
    modules of multi-token prediction do not change."""
    return INIT_STD / math.sqrt(2 * (model.num_layers - model.mtp_modules))


def norm(name: str, size: int, placement: Placement = WHOLE) -> Weight:
    return Weight(name, (size,), None, placement)


def embedding(model: ModelSpec, padding: int = 0) -> Weight:
    return Weight("embedding", (model.vocab_size + padding, model.hidden_size), INIT_STD, ROWS, padding)


def head(model: ModelSpec, padding: int = 0) -> Weight:
    """The output projection. Tied to the embedding it is the same weight."""
    if model.tie_embeddings:
        return embedding(model, padding)
    return Weight("head", (model.vocab_size + padding, model.hidden_size), INIT_STD, ROWS, padding)


def final_norm(model: ModelSpec) -> Weight:
    return norm("norm", model.hidden_size)


def attention(model: ModelSpec, prefix: str) -> dict[str, Weight]:
    """Weights of one attention layer by their short names.

    Grouped-query: q, k, v, o, and with ``qk_norm`` the norms of every head. Latent (DeepSeek-V2, arXiv:2405.04434,
    section 2.1): weights with heads (W_UQ, W_UK with W_UV, W_O) are divided over tensor-parallel ranks; W_DQ and W_DKV
    with W_KR are not. Without a latent for queries, W_Q replaces W_DQ and W_UQ.
    """
    h, heads, mla = model.hidden_size, model.num_heads, model.mla

    def weight(name: str, out: int, into: int, placement: Placement, std: float = INIT_STD) -> Weight:
        return Weight(f"{prefix}.{name}", (out, into), std, placement)

    if mla is not None:
        latent = mla.kv_lora_rank
        if mla.q_lora_rank:
            queries = [
                weight("q_down", mla.q_lora_rank, h, WHOLE),
                weight("q_up", heads * mla.qk_head_dim, mla.q_lora_rank, ROWS),
                norm(f"{prefix}.q_norm", mla.q_lora_rank),
            ]
        else:
            queries = [weight("q", heads * mla.qk_head_dim, h, ROWS)]
        weights = [
            *queries,
            weight("kv_down", latent + mla.qk_rope_head_dim, h, WHOLE),
            weight("kv_up", heads * (mla.qk_nope_head_dim + mla.v_head_dim), latent, ROWS),
            weight("o", h, heads * mla.v_head_dim, COLUMNS, residual_std(model)),
            norm(f"{prefix}.kv_norm", latent),
        ]
    else:
        q, kv = heads * model.head_dim, model.num_kv_heads * model.head_dim
        weights = [
            weight("q", q, h, ROWS),
            *(Weight(f"{prefix}.{name}", (kv, h), INIT_STD, ROWS, kv_heads=model.num_kv_heads) for name in "kv"),
            weight("o", h, q, COLUMNS, residual_std(model)),
        ]
        if model.qk_norm:
            weights += [norm(f"{prefix}.{name}", model.head_dim, WHOLE_BY_HEADS) for name in ("q_norm", "k_norm")]
    return _by_short_name(weights)


def attention_parameters(model: ModelSpec, prefix: str) -> list[tuple[Weight, ...]]:
    """The weights of one attention layer as the engine holds them: weights with the same input and placement are fused
    into one parameter."""
    weights = attention(model, prefix)
    fused = [("q_down", "kv_down"), ("q", "k", "v")]
    apart = [(name,) for name in weights if not any(name in names for names in fused)]
    held = [tuple(weights[name] for name in names if name in weights) for names in [*fused, *apart]]
    return [parts for parts in held if parts]


def feed_forward(model: ModelSpec, prefix: str, columns: int) -> dict[str, Weight]:
    """Weights of a SwiGLU layer: gate, up and down, ``columns`` wide."""
    h = model.hidden_size
    return _by_short_name(
        [
            Weight(f"{prefix}.gate", (columns, h), INIT_STD, ROWS),
            Weight(f"{prefix}.up", (columns, h), INIT_STD, ROWS),
            Weight(f"{prefix}.down", (h, columns), residual_std(model), COLUMNS),
        ]
    )


def experts(model: ModelSpec, prefix: str, width: int | None = None) -> dict[str, Weight]:
    """The router and the routed experts, stacked on dim 0. ``width``: at which experts work; None: the hidden size."""
    moe = model.moe
    assert moe is not None
    h, count, columns = width or model.hidden_size, moe.num_experts, moe.expert_hidden_size
    return _by_short_name(
        [
            Weight(f"{prefix}.router", (count, model.hidden_size), INIT_STD, WHOLE),
            Weight(f"{prefix}.gate", (count, columns, h), INIT_STD, EXPERT_ROWS),
            Weight(f"{prefix}.up", (count, columns, h), INIT_STD, EXPERT_ROWS),
            Weight(f"{prefix}.down", (count, h, columns), residual_std(model), EXPERT_COLUMNS),
        ]
    )


def shared_experts(model: ModelSpec, prefix: str) -> dict[str, Weight] | None:
    """Weights of the shared experts of a layer with routed experts, as one feed-forward part. None if there are
    none."""
    moe = model.moe
    if moe is None or not moe.num_shared_experts:
        return None
    return feed_forward(model, f"{prefix}.shared", moe.num_shared_experts * moe.expert_hidden_size)


def routed(model: ModelSpec, layer: int) -> bool:
    """Whether a layer has routed experts; ``layer`` is its index in the model."""
    if model.layers is not None:
        return model.layers.kinds[model.layers.order[layer]].routed
    return model.moe is not None and layer >= model.moe.num_dense_layers


def block(model: ModelSpec, prefix: str, *, routed: bool) -> Iterator[Weight]:
    """Every weight of one layer, with a dense feed-forward part or with routed experts."""
    for name in ("attention_norm", "ffn_norm"):
        yield norm(f"{prefix}.{name}", model.hidden_size)
    yield from attention(model, f"{prefix}.attention").values()
    if not routed:
        yield from feed_forward(model, f"{prefix}.ffn", model.ffn_hidden_size).values()
        return
    yield from experts(model, f"{prefix}.experts").values()
    yield from (shared_experts(model, prefix) or {}).values()


def _by_short_name(weights: list[Weight]) -> dict[str, Weight]:
    return {weight.name.rpartition(".")[2]: weight for weight in weights}
