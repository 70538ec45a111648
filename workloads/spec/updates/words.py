"""The fields of an experiment that say how weights are updated, and the words for choices that are not the usual ones.

Number formats of gradients, states and weights, the optimizer, and the share of its states on the host. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UPDATE_FIELDS: Mapping[str, Any] = {
    "grad_reduce": "fp32",
    "optimizer": "adamw",
    "optimizer_states": "fp32",
    "master_weights": "fp32",
    "optimizer_offload": 0.0,
}
"""Fields of `Experiment` with their usual values, which are also those of all that was recorded before these fields
existed."""
_WORDS = {"grad_reduce": "reduce", "optimizer": "", "optimizer_states": "states", "master_weights": "master"}


def update_words(read: Mapping[str, Any]) -> list[str]:
    """Words for unusual values of `UPDATE_FIELDS`, such as ``states bf16``; ``read``: an experiment's fields or a row's
    columns, in which an unknown value is null or missing."""
    words = [
        f"{word} {read[name]}".strip()
        for name, word in _WORDS.items()
        if isinstance(read.get(name), str) and read[name] != UPDATE_FIELDS[name]
    ]
    share = read.get("optimizer_offload")
    if isinstance(share, (int, float)) and share > 0:
        words.append(f"offload {share:g}")
    return words
