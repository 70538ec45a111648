"""Memory with activations on the host: the device's against the engine on FakeTensors, the host's against its pool."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.costs.memory.test_memory_traced import routed
from tests.workloads.costs.memory.traced import experiment, shortened, traced
from tests.workloads.costs.shapes import LLAMA_8B, MIXTRAL, QWEN3_14B
from tests.workloads.engine.test_memory import MODEL
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.host_activations import activation_bytes, link_bytes, node_host_bytes
from workloads.engine.collectives.groups import make_groups
from workloads.engine.training.build import build, choose_attention
from workloads.measuring.step import _batches, run_step
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of

ALL: dict[str, Any] = {"activation_offload": "all"}
CASES = {
    "alone": experiment(layers=5, micro_batch_size=4, **ALL),
    "two layers": experiment(dp=8, zero_stage=3, micro_batch_size=8, **ALL),
    "one layer": experiment(layers=1, dp=8, zero_stage=3, micro_batch_size=8, **ALL),
    "ZeRO 3": experiment(layers=5, dp=8, zero_stage=3, micro_batch_size=8, **ALL),
    "ZeRO 3, full": experiment(layers=5, dp=8, zero_stage=3, micro_batch_size=8, recompute="full", **ALL),
    "ZeRO 2, selective": experiment(
        layers=5, dp=8, zero_stage=2, micro_batch_size=8, microbatches=2, recompute="selective", **ALL
    ),
    **{
        word: experiment(layers=4, dp=8, zero_stage=3, micro_batch_size=8, activation_offload=word)
        for word in ("input", "norm", "qkv", "rope", "attention", "gate_up", "swiglu")
    },
    "qk norm": experiment(QWEN3_14B, layers=4, dp=8, zero_stage=1, micro_batch_size=4, **ALL),
    "cp": experiment(layers=5, cp=2, cp_kind="allgather", zero_stage=1, micro_batch_size=8, **ALL),
    "tp": experiment(layers=4, tp=8, micro_batch_size=16, microbatches=3, **ALL),
    "tp, one micro-batch": experiment(layers=4, tp=8, micro_batch_size=16, **ALL),
    "tp, selective": experiment(layers=4, tp=8, micro_batch_size=16, microbatches=3, recompute="selective", **ALL),
    "tp, two words": experiment(
        layers=4, tp=8, micro_batch_size=16, microbatches=3, activation_offload="input+attention"
    ),
    "tp, whole tokens": experiment(
        layers=3, tp=8, micro_batch_size=16, microbatches=3, sequence_parallel=False, recompute="norm", **ALL
    ),
    # The peak is the end of the last layer's forward, while the layer before it is still on its way to the host.
    **{
        f"tp, {recompute}, {words}": experiment(
            layers=3, tp=2, micro_batch_size=4, microbatches=2, recompute=recompute, activation_offload=words
        )
        for recompute, words in (("selective", "input+gate_up"), ("selective", "all"), ("norm", "gate_up"))
    },
    "1f1b": experiment(layers=8, pp=2, micro_batch_size=8, microbatches=4, **ALL),
    "1f1b, full": experiment(layers=8, pp=2, micro_batch_size=8, microbatches=4, recompute="full", **ALL),
    "1f1b, by stage": experiment(layers=8, pp=2, micro_batch_size=8, microbatches=4, recompute="full/none", **ALL),
    "gpipe": experiment(
        layers=8, pp=2, micro_batch_size=4, microbatches=4, pp_schedule="gpipe", activation_offload="gate_up+swiglu"
    ),
    "interleaved": experiment(
        layers=8, pp=2, micro_batch_size=8, microbatches=4, pp_schedule="interleaved_1f1b", virtual_stages=2, **ALL
    ),
    "experts": routed(dp=8, zero_stage=3, ep=8, microbatches=2, **ALL),
    "few experts": routed(shortened(MIXTRAL, 3), dp=8, zero_stage=2, micro_batch_size=4, ep=2, **ALL),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(list(CASES), 6, seconds=9))
def test_predicted_peaks_are_the_traced_ones(name: str) -> None:
    case = CASES[name]
    without = estimate_memory(case.replace(activation_offload="none"))
    for rank, stage in enumerate(estimate_memory(case).stages):
        peak = traced(case, rank_of(case, pp=rank))
        assert stage.peak_bytes == pytest.approx(peak, rel=0.001)
        assert stage.peak_bytes <= without.stages[rank].peak_bytes


def test_offloaded_bytes_by_hand() -> None:
    """Llama 8B, 8 layers, 1 x 4096 tokens in bf16: every tensor with a word, and the exceptions."""
    tokens, width = 4096, 2 * 4096 * 4096  # bytes of one stream
    qkv, heads = 2 * tokens * (4096 + 2 * 1024), 2 * tokens * (4096 + 1024)
    feed_forward = 2 * tokens * 14336
    layer = 4 * width + qkv + heads + width + 2 * feed_forward + feed_forward
    case = experiment(LLAMA_8B, layers=8, microbatches=3, **ALL)
    assert activation_bytes(case) == [7 * layer]  # the last layer before the head stays
    assert link_bytes(case) == 2 * 3 * 7 * layer
    staged = experiment(LLAMA_8B, layers=8, pp=2, pp_split="even", microbatches=3, **ALL)
    assert activation_bytes(staged) == [2 * 4 * layer, 3 * layer - width]  # a received input stays
    of_inputs = dataclasses.replace(staged, recompute="full")
    assert activation_bytes(of_inputs) == [2 * 4 * width, 3 * width - width]
    assert node_host_bytes(of_inputs, 8) == 2 * 2 * 4 * width
    assert node_host_bytes(of_inputs.replace(activation_offload="none"), 8) == 0


def pool_bytes(rank: int, case: Experiment) -> int:
    import torch

    choose_attention(case)
    engine = build(case, make_groups(case, rank, torch.device("cpu")))
    for step in range(2):
        run_step(engine, step, _batches(engine, step), is_warmup=False)
    assert engine.store is not None
    return engine.store.host_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 2, "zero_stage": 3, "global_batch_size": 8},
        {"pp": 2, "global_batch_size": 12, "recompute": "full/selective"},
        {"pp": 2, "global_batch_size": 8, "pp_schedule": "gpipe", "activation_offload": "norm+gate_up"},
        {"pp": 2, "global_batch_size": 8, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
        {"tp": 2, "global_batch_size": 4, "recompute": "selective"},
    ],
    ids=str,
)
def test_the_pool_is_as_large_as_predicted(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    fields = {"seq_len": 64, "micro_batch_size": 2, "precision": "fp32", **ALL, **layout}
    case = Experiment.canonical(model=MODEL, **fields)
    found = gloo_pool.run(pool_bytes, case.world_size, case)
    expected = activation_bytes(case)
    for rank, size in enumerate(found):
        assert size == expected[rank * case.pp // case.world_size]
