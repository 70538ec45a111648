"""A model as a list of layers, and the sums over their kinds: parameters and FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from workloads.spec.layer_kinds.attention import Attention, BlockSparseAttention, CompressedAttention, LatentAttention
from workloads.spec.layer_kinds.mlp import MLP, RoutedMLP
from workloads.spec.layer_kinds.recurrent import Recurrent
from workloads.spec.layer_kinds.weight import NO_MIXING, Mixing, Splits, Weight, vector, whole

Mixer = Attention | LatentAttention | BlockSparseAttention | CompressedAttention | Recurrent


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer: a mixer, an MLP, and norms around them."""

    mixer: Mixer | None
    mlp: MLP | None
    norms: int = 2
    """Norms of the hidden size: one before each part, and more around them in sandwich norms: 4 with one of each part's
    output, 7 with those of the dense MLP beside the experts and of the experts, too (`normed_beside`)."""
    outputs_normed: bool = False
    """Whether the norms are of the outputs of both parts, in place of their inputs (OLMo 2)."""
    ahead: bool = False
    """Whether it is a module of multi-token prediction (arXiv:2412.19437, section 2.2): a layer between a product that
    joins the hidden state with the next token's embedding, and another pass of the model's head."""

    @property
    def label(self) -> str:
        mixer = self.mixer.label if self.mixer is not None else "no mixer"
        kind = f"{mixer} / {self.mlp.label if self.mlp is not None else 'no MLP'}"
        return f"multi-token prediction: {kind}" if self.ahead else kind

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        parts = [vector("norms", hidden, self.norms, self.norms)]
        for part in (self.mixer, self.mlp):
            parts += part.weights(hidden) if part is not None else ()
        if self.ahead:  # norms of both inputs and of the head's
            parts += [whole("ahead", 2 * hidden, hidden), vector("ahead norm", hidden, 3, 3)]
        return tuple(parts)

    @property
    def routed(self) -> bool:
        return isinstance(self.mlp, RoutedMLP)

    @property
    def normed_beside(self) -> bool:
        """Whether experts and the dense MLP beside them have norms of their own, before and after each, and another one
        of their sum; the router norms its input itself (Gemma 4)."""
        return self.norms == 7

    @property
    def ends_in_product(self) -> bool:
        """Whether the layer's last operation, but for the sum with its input, is a product whose output no backward
        reads: full recomputation repeats neither it nor its sum over tensor-parallel ranks. Not so of routed experts,
        whose outputs are sent back, of layers with a norm after their last part, and of modules, whose norm before the
        head follows."""
        return not self.routed and not self.ahead and not self.norms_outputs

    @property
    def norms_outputs(self) -> bool:
        """Whether a norm follows the last part."""
        return self.outputs_normed or self.norms > (self.mixer is not None) + (self.mlp is not None)

    @property
    def needs_experts_outputs(self) -> bool:
        """Whether a backward reads what routed experts send back: a norm or a projection out of their latent follows
        them, or, in a module of multi-token prediction, the norm before the head."""
        return isinstance(self.mlp, RoutedMLP) and (self.norms_outputs or self.ahead or self.mlp.latent > 0)

    @property
    def sees_all(self) -> bool:
        """Whether queries see every earlier token."""
        return isinstance(self.mixer, Attention | LatentAttention) and self.mixer.sees_all

    @property
    def splits(self) -> Splits:
        """Numbers that tensor parallelism must divide."""
        parts = [part.splits for part in (self.mixer, self.mlp) if part is not None]
        return reduce(Splits.both, parts, Splits())

    def mixing(self, seq_len: float) -> Mixing:
        return self.mixer.mixing(seq_len) if self.mixer is not None else NO_MIXING


@dataclass(frozen=True, slots=True)
class HyperConnections:
    """Several streams of the hidden state between layers, mixed around each part (DeepSeek-V4)."""

    streams: int

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """Those of one layer: twice a product with all streams that makes the weights of mixing."""
        outputs = self.streams**2 + 2 * self.streams
        return (
            Weight("streams", self.streams * hidden, outputs, copies=2, used=2, held="whole"),
            vector("streams bias", outputs + 3, copies=2, used=2),
        )

    def weights_at_end(self, hidden: int) -> tuple[Weight, ...]:
        return (whole("streams", self.streams * hidden, self.streams), vector("streams bias", self.streams + 1))

    def mixing(self, hidden: int) -> Mixing:
        """Of one layer."""
        return Mixing(4.0 * (self.streams**2 + 2 * self.streams) * hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredModel:
    """The language part of a published model."""

    name: str
    hidden_size: int
    vocab_size: int
    tie_embeddings: bool
    layers: tuple[Layer, ...]
    norm_eps: float
    longest: int | None = None
    """Its own sequence length; None: the file does not say."""
    streams: HyperConnections | None = None
    predicted_ahead: int = 0
    """Modules of multi-token prediction that the file names. They are in no sum here."""
    logit_cap: float = 0.0
    """Largest absolute logit: logits are ``cap * tanh(logits / cap)`` (Gemma 2); 0: no cap."""
    scaled_embedding: bool = False
    """Embeddings are multiplied by the root of the hidden size (Gemma)."""
    same_cost: tuple[str, ...] = ()
    """What the model computes otherwise than its kinds at the same cost, by name: factors of residuals and logits, a
    norm after the rotation. No engine here computes it."""
    left_out: tuple[str, ...] = ()
    """What the file has and no number here counts, as sentences."""
    without_effect: tuple[str, ...] = ()
    """Fields of the file that are known to change neither parameters nor FLOPs."""

    def distinct(self) -> Iterator[tuple[Layer, int]]:
        """Every kind of layer with the number of its layers, in the order of their first ones."""
        yield from Counter(self.layers).items()

    def weights(self) -> Iterator[tuple[Weight, int]]:
        """Every weight except the embedding, with the number of layers that have it."""
        hidden = self.hidden_size
        for layer, count in self.distinct():
            yield from ((weight, count) for weight in layer.weights(hidden))
        if self.streams is not None:
            yield from ((weight, len(self.layers)) for weight in self.streams.weights(hidden))
            yield from ((weight, 1) for weight in self.streams.weights_at_end(hidden))
        yield vector("last norm", hidden), 1

    @property
    def embedding_parameters(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def parameters(self) -> int:
        """All parameters, a head shared with the embedding once."""
        ends = self.embedding_parameters * (1 if self.tie_embeddings else 2)
        return ends + sum(weight.parameters * count for weight, count in self.weights())

    @property
    def active_parameters(self) -> int:
        """As model cards count: all but the experts that a token does not visit; with the embedding."""
        ends = self.embedding_parameters * (1 if self.tie_embeddings else 2)
        return ends + sum(weight.active * count for weight, count in self.weights())

    @property
    def multiplied_parameters(self) -> int:
        """Weights that a token meets in a matrix product: the head always, the embedding never."""
        matrices = ((weight, count) for weight, count in self.weights() if weight.use == "matrix")
        return self._heads * self.embedding_parameters + sum(weight.active * count for weight, count in matrices)

    @property
    def _heads(self) -> int:
        """Passes of the head: one, and one for each module of multi-token prediction."""
        return 1 + sum(layer.ahead for layer in self.layers)

    def forward_flops(self, seq_len: float) -> float:
        """Forward FLOPs of one token, on average over a sequence of this length."""
        return self._product_flops() + sum(mixing.forward * count for mixing, count in self._mixing(seq_len))

    def training_flops(self, seq_len: float) -> float:
        """FLOPs of one token forward and backward, without recomputation."""
        return 3 * self._product_flops() + sum(mixing.training * count for mixing, count in self._mixing(seq_len))

    def _product_flops(self) -> int:
        return 2 * self._heads * self.embedding_parameters + sum(
            weight.forward_flops * count for weight, count in self.weights()
        )

    def _mixing(self, seq_len: float) -> Iterator[tuple[Mixing, int]]:
        yield from ((layer.mixing(seq_len), count) for layer, count in self.distinct())
        if self.streams is not None:
            yield self.streams.mixing(self.hidden_size), len(self.layers)
