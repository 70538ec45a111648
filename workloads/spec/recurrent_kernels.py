"""Device memory that the kernels of flash-linear-attention need inside one recurrent layer (``recurrence=fla``),
besides the layer's inputs and outputs. No torch here.

Read from the sources of ``fla-core`` 0.6.0 and from `workloads.engine.kind_ops.fused_scan`, which calls them: every
tensor that exists at the moment of the peak. The backward's peak is where the gradients of a chunk's keys are made; by
then the forward of the layer was computed again, and gate and norm have passed their gradients on. Gradients of the
layer's inputs are part of it: they are made from these tensors and exist alone later.

Symbols: T tokens, m chunks of 64 tokens in all sequences, J heads of keys, H of values, K numbers of a key, V of a
value; Mamba-2: H heads of P channels, N numbers of the state. Numbers in 16 bits unless said otherwise.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.model_spec import ModelSpec

CHUNK = 64
SEGMENT_TOKENS = 512
"""Tokens of a micro-batch that torch operations compute at one time, in whole chunks and at least one chunk of every
sequence."""
_WIDE, _NARROW = 4, 2
_TILE = 128
"""Channels of keys in one block of the kernel of gradients, on Hopper and Ampere GPUs."""
_KDA_TILE = 32
"""Channels of keys in one block of KDA's kernel of gradients within chunks."""


PACKAGE, RELEASE = "fla-core", "0.6.0"
LARGEST_KEY = 256
"""Numbers of a key, or of Mamba-2's state, that the kernels take at most."""
Kernels = GatedDeltaRule | KimiDelta | Mamba2
"""Mixers that have kernels."""


@lru_cache(maxsize=256)
def has_recurrences(model: ModelSpec) -> bool:
    """Whether some layer of the model is one of `Kernels`."""
    return model.layers is not None and any(
        isinstance(kind.mixer, GatedDeltaRule | KimiDelta | Mamba2) for kind in model.layers.kinds
    )


def key_size(mixer: Kernels) -> int:
    """Numbers of a key; of Mamba-2, of its state."""
    if isinstance(mixer, GatedDeltaRule):
        return mixer.key_dim
    return mixer.head_dim if isinstance(mixer, KimiDelta) else mixer.state


@lru_cache(maxsize=256)
def key_sizes(model: ModelSpec) -> tuple[int, ...]:
    """`key_size` of the model's kinds that have kernels."""
    kinds = model.layers.kinds if model.layers is not None else ()
    return tuple(key_size(kind.mixer) for kind in kinds if isinstance(kind.mixer, GatedDeltaRule | KimiDelta | Mamba2))


@lru_cache(maxsize=256)
def keys_with_one_decay(model: ModelSpec) -> tuple[int, ...]:
    """Those of kinds whose heads have one decay each: all but KDA."""
    kinds = model.layers.kinds if model.layers is not None else ()
    return tuple(key_size(kind.mixer) for kind in kinds if isinstance(kind.mixer, GatedDeltaRule | Mamba2))


class Working(NamedTuple):
    """Bytes that exist in one layer's pass at most, without its inputs, its outputs and the gradients of these."""

    forward: int
    backward: int


class Batch(NamedTuple):
    """Sequences of a micro-batch."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def chunks(self) -> int:
        return self.sequences * -(-self.length // CHUNK)


def gated_delta(batch: Batch, *, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Working:
    """Forward: states [m, H, K, V]; of values [T, H, V] those convolved, the solved, the new ones and the output;
    solved keys [T, H, K]; convolved and unit queries and keys [T, J, K]; each chunk's inverse [T, H, 64].

    Backward, at the gradient of the triangular system: states and their gradients; values, gradients of the output and
    of the gate, solved and new values, gradients of both; solved keys and their gradient, and that of keys of all value
    heads, which J heads sum. Or one kernel earlier, where queries and keys have gradients of all value heads."""
    tokens = batch.tokens
    state = batch.chunks * value_heads * key_dim * value_dim * _NARROW
    values = tokens * value_heads * value_dim * _NARROW
    of_values, keys = (tokens * heads * key_dim * _NARROW for heads in (value_heads, key_heads))
    inverse = tokens * value_heads * CHUNK * _NARROW
    numbers = tokens * (2 * _WIDE * key_heads + 2 * _NARROW * value_heads)  # lengths; raw rates and decays
    wide = tokens * value_heads * _WIDE
    forward = state + 4 * values + of_values + 4 * keys + inverse + numbers + 2 * wide
    shared = key_heads != value_heads
    blocks = -(-key_dim // _TILE)
    of_system = 7 * values + 3 * of_values + (5 if shared else 4) * keys + 5 * wide
    of_chunks = 6 * values + 4 * of_values + (3 if shared else 2) * keys + (2 + blocks) * wide
    return Working(forward, 2 * state + inverse + numbers + max(of_system, of_chunks))


def kimi_delta(batch: Batch, *, heads: int, head_dim: int) -> Working:
    """As `gated_delta` with J = H and K = V. Sums of decays [T, H, K] are in fp32; so are, in the backward, the
    gradients of queries, keys and decays within chunks and up to there, and those of both products within chunks [T, H,
    64]."""
    tokens = batch.tokens
    state = batch.chunks * heads * head_dim * head_dim * _NARROW
    width, wide = tokens * heads * head_dim * _NARROW, tokens * heads * head_dim * _WIDE
    products = tokens * heads * CHUNK
    number = tokens * heads
    forward = wide + state + 10 * width + 2 * _NARROW * products + 3 * _WIDE * number + _NARROW * number
    blocks = -(-head_dim // _KDA_TILE)
    backward = 7 * wide + 2 * state + 11 * width + 2 * (_NARROW + _WIDE) * products
    return Working(forward, backward + (5 + blocks) * _WIDE * number + _NARROW * number)


def mamba(batch: Batch, *, heads: int, head_dim: int, groups: int, state: int) -> Working:
    """Forward: states [m, H, N, P]; every head's B and C [T, H, N]; of channels [T, H, P] those convolved, multiplied
    by their steps, and the output; convolved B and C of groups. Backward: states and their gradients in fp32, B, C and
    their gradients of every head, channels, those with steps, gradients of output, gate, skip and scan."""
    tokens, number = batch.tokens, batch.tokens * heads
    states = batch.chunks * heads * state * head_dim
    width, of_heads, of_groups = (_NARROW * tokens * n for n in (heads * head_dim, heads * state, groups * state))
    forward = _NARROW * states + 2 * of_heads + 3 * width + 2 * of_groups + 3 * _WIDE * number
    return Working(forward, 2 * _WIDE * states + 4 * of_heads + 6 * width + 4 * _WIDE * number)


def working(mixer: Kernels, batch: Batch, ranks: int) -> Working:
    """Bytes of one layer on one of ``ranks`` ranks that share its heads (tp times cp). ``batch``: of whole
    sequences."""
    if isinstance(mixer, GatedDeltaRule):
        keys, values = mixer.key_heads // ranks, mixer.value_heads // ranks
        return gated_delta(batch, key_heads=keys, value_heads=values, key_dim=mixer.key_dim, value_dim=mixer.value_dim)
    if isinstance(mixer, KimiDelta):
        return kimi_delta(batch, heads=mixer.heads // ranks, head_dim=mixer.head_dim)
    heads, groups = mixer.heads // ranks, mixer.groups // ranks
    return mamba(batch, heads=heads, head_dim=mixer.head_dim, groups=groups, state=mixer.state)
