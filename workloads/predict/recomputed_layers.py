"""How much of a layout recomputes, for predictions whose plain layouts have one word for every layer.

Where the stages of a pipeline have words of their own, the stage that recomputes most sets the pace of the host.
"""

from __future__ import annotations

from collections.abc import Callable

from workloads.costs.shape.partition import experiment_layers, recompute_by_layer
from workloads.predict.points import RECOMPUTE
from workloads.spec.experiment import Experiment
from workloads.spec.recomputation import SELECTIVE, is_by_stage, operations_of


def nearest_word(e: Experiment) -> str:
    """The word of `RECOMPUTE` that is nearest: of several the one that repeats most."""
    if e.recompute in RECOMPUTE:
        return e.recompute
    if not is_by_stage(e.recompute):
        return "selective"
    words = set(recompute_by_layer(e))
    return "full" if "full" in words else "selective" if words != {"none"} else "none"


def host_share(e: Experiment) -> float:
    """Host work for recomputation, divided by that of `nearest_word` in every layer. All operations of a list count
    equally, so a long list is more than ``selective``."""
    if not is_by_stage(e.recompute):
        return _of_layer(e.recompute) / e.recompute_every
    nearest = nearest_word(e)
    if nearest == "none":
        return 1.0
    return _most_of_a_stage(e, lambda word: 1.0 if word == nearest else 0.0 if word == "none" else _of_layer(word))


def full_share(e: Experiment) -> float:
    """Share of the layers whose whole forward runs again."""
    if not is_by_stage(e.recompute):
        return 1 / e.recompute_every if e.recompute == "full" else 0.0
    return _most_of_a_stage(e, lambda word: 1.0 if word == "full" else 0.0)


def _of_layer(word: str) -> float:
    return 1.0 if word in RECOMPUTE else len(operations_of(word)) / len(SELECTIVE)


def _most_of_a_stage(e: Experiment, of_word: Callable[[str], float]) -> float:
    words = recompute_by_layer(e)
    stages = [[of_word(words[layer]) for layer in layers] for layers in experiment_layers(e) if len(layers)]
    return max(sum(shares) / len(shares) for shares in stages)
