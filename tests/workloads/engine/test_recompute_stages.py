"""Words of recomputation by stage in the engine: each stage's layers have the word of their stage, and every layout
computes and sends what a single process and the closed forms say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planted.checks_of_budgets import wrapped_layers
from tests.sampling import sampled
from tests.workloads.engine.parity import check_on, experiment, on_backends
from workloads.costs.shape.partition import recompute_by_layer
from workloads.engine.layers.recompute import FullBlock, SelectiveBlock
from workloads.spec.experiment import Experiment

CLIP_AT = 0.3
_DATA: list[dict[str, Any]] = [{}, {"dp": 2, "zero_stage": 3}]
CASES = [
    experiment(recompute="full:2", micro_batch_size=2),
    experiment(dp=2, zero_stage=3, recompute="full:1", micro_batch_size=2),
    *(experiment(pp=2, recompute=words, rounds=4, **data) for words in ("full/none", "full:2/norm") for data in _DATA),
    experiment(pp=3, recompute="full/selective/none", rounds=4),
    experiment(pp=2, tp=2, recompute="full:1/selective", rounds=2),
    experiment(pp=2, tp=2, sequence_parallel=False, recompute="none/full", rounds=2),
    experiment(pp=2, cp=2, recompute="full:2/none", rounds=2),
    experiment(pp=2, tp=2, latent=16, recompute="norm+mla_up/full", rounds=2, attention="math"),
    *(
        experiment(pp=2, pp_schedule=schedule, virtual_stages=2, recompute=words, rounds=4, **data)
        for schedule in ("interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v")
        for words, data in (("full/none*2/swiglu", _DATA[0]), ("none/full/selective/none", _DATA[1]))
    ),
    experiment(pp=2, pp_schedule="interleaved_zero_bubble", recompute="full/none", rounds=4, dp=2, zero_stage=3),
]


@pytest.mark.parametrize(("backend", "case"), on_backends(sampled(CASES, 4), []))
def test_a_layout_with_words_of_stages_equals_a_single_process(
    request: pytest.FixtureRequest, backend: str, case: Experiment
) -> None:
    check_on(request, backend, case, CLIP_AT)


@pytest.mark.parametrize("case", [case for case in CASES if case.world_size == case.pp], ids=str)
def test_every_layer_has_the_word_of_its_stage(case: Experiment, gloo_pool: Any) -> None:
    wrapped = {layer: name for held in gloo_pool.run(wrapped_layers, case.world_size, case) for layer, name in held}
    for layer, word in enumerate(recompute_by_layer(case)):
        assert (wrapped[layer] == FullBlock.__name__) == (word == "full")
        assert (wrapped[layer] == SelectiveBlock.__name__) == (word not in ("none", "full"))
