"""The words of ``Experiment.activation_offload``: which activations of a layer wait for its backward on the host.

Each word names tensors that a layer saves for its backward, and that backward reads again:

input      the input of a layer, which ``recompute=full`` keeps, and the residual between its attention and its MLP
norm       outputs of norms, which projections save
qkv        the projection to queries, keys and values
rope       rotated queries and keys
attention  the output of attention, which the output projection saves
gate_up    the projection to gate and up, of dense layers and shared experts
swiglu     their SwiGLU product, which the down projection saves

``norm``, ``rope`` and ``swiglu`` are tensors of the words of ``recompute`` with these names: a tensor is kept,
recomputed or offloaded. ``all`` offloads what ``recompute`` keeps of them. Whatever has no word stays on the device:
statistics of norms and of softmax (one number a row), weights, indices and what routed experts save.

No torch here.
"""

from __future__ import annotations

from typing import Any

from workloads.spec.recomputation import is_by_stage, operations_of, stage_words

WORDS = ("input", "norm", "qkv", "rope", "attention", "gate_up", "swiglu")
"""In the order in which a layer makes the tensors."""
ALL = "all"
MUST = f"none, all, or some of {', '.join(WORDS)}, joined by '+'"
"""List of the allowed values for messages."""


def kept_words(recompute: str) -> tuple[str, ...]:
    """Words of the tensors that a layer keeps whose word of ``recompute`` is this one."""
    if recompute == "full":
        return ("input",)
    again = operations_of(recompute)
    return tuple(word for word in WORDS if word not in again)


def offloaded_words(offload: str, recompute: str) -> tuple[str, ...]:
    """Words of the tensors that such a layer offloads, of those that it keeps."""
    if offload == "none":
        return ()
    named = offload.split("+")
    return tuple(word for word in kept_words(recompute) if offload == ALL or word in named)


def may_name(word: str, recompute: str) -> bool:
    """Whether a layout with this text of ``recompute`` may name the word: no layer of it may recompute the tensors."""
    words = [one.word for one in stage_words(recompute)]
    return all(word in kept_words(one) for one in words)


def last_layer_stays(pp_schedule: str) -> bool:
    """Whether the last layer before the head keeps everything on the device: its backward follows at once, except
    under GPipe, where all other forwards come first."""
    return pp_schedule != "gpipe"


def is_offload(value: object) -> bool:
    """Whether a value is a text of the field: `ALL`, ``none``, or words in their order, each once."""
    if not isinstance(value, str):
        return False
    named = value.split("+")
    return value in ("none", ALL) or (value != "" and value == "+".join(word for word in WORDS if word in named))


def canonical_offload(value: Any, recompute: Any) -> Any:
    """``value`` with its words in order, each once; and `ALL` for all that a layer keeps, where all layers have one
    word of ``recompute``. A value that is no offload is returned unchanged."""
    if not isinstance(value, str) or value in ("none", ALL):
        return value
    named = value.split("+")
    if not set(named) <= set(WORDS):
        return value
    if isinstance(recompute, str) and not is_by_stage(recompute) and set(named) == set(kept_words(recompute)):
        return ALL
    return "+".join(word for word in WORDS if word in named)
