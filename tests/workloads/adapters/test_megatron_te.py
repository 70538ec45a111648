"""Megatron-Core on Transformer Engine: losses and norms equal ours as far as 16 bits allow; its forced routing is ours.

What trains needs two GPUs and both packages.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.workloads.adapters.three_steps import steps_on_gpu
from tests.workloads.test_worker import MODEL
from workloads.adapters import megatron_graph
from workloads.adapters.forced_routing import forced_routing
from workloads.adapters.megatron_graph import is_graphed, require_warm_up
from workloads.adapters.seam import set_environment
from workloads.contract.measure_spec import MeasureSpec
from workloads.engine.layers.routing import forced_choice
from workloads.measuring.processes import on_ranks
from workloads.rules.engine_support import refused
from workloads.spec.engine_versions import ENGINES, WITHOUT_TRANSFORMER_ENGINE
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec

DENSE = dataclasses.replace(
    MODEL, num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True
)
EXPERTS = dataclasses.replace(
    DENSE,
    moe=MoESpec(num_experts=8, experts_per_token=2, expert_hidden_size=128, num_shared_experts=1, num_dense_layers=1),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "zero 1": {"dp": 2, "zero_stage": 1},
    "tp": {"tp": 2},
    "interleaved": {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
    "ring": {"cp": 2},
    "allgather, zero 1": {"cp": 2, "cp_kind": "allgather", "zero_stage": 1},
    "ulysses": {"cp": 2, "cp_kind": "ulysses"},
    "fp8": {"dp": 2, "precision": "fp8_tensorwise"},
    "experts": {"model": EXPERTS, "dp": 2, "ep": 2, "zero_stage": 1},
    "experts, divided": {"model": EXPERTS, "tp": 2, "etp": 2},
    "experts by their router": {"model": EXPERTS, "dp": 2, "ep": 2, "routing": "learned"},
    "experts under cp": {"model": EXPERTS, "cp": 2, "ep": 2},
    "graph, zero 1": {"dp": 2, "zero_stage": 1, "compile": "block"},
    "graph, tp": {"tp": 2, "compile": "block"},
    "graph, interleaved": {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2, "compile": "block"},
}


def of(engine: str, **fields: Any) -> Experiment:
    return Experiment.canonical(
        **{"model": DENSE, "seq_len": 256, "global_batch_size": 8, "micro_batch_size": 2, "engine": engine, **fields}
    )


@pytest.mark.multi_gpu
@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None, reason="transformer_engine is not installed"
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_norms_equal_ours(layout: str) -> None:
    theirs = of("megatron", **LAYOUTS[layout])
    ours = of("ultrasweep", **{**LAYOUTS[layout], "compile": "none"})
    assert refused(theirs) == []
    expected, *_ = on_ranks(partial(steps_on_gpu, ours), ours.world_size, "cuda", timeout_s=240)
    tolerance = (2e-3, 2e-2) if theirs.precision != "bf16" else (3e-4, 1e-2)
    for found in on_ranks(partial(steps_on_gpu, theirs), theirs.world_size, "cuda", timeout_s=240):
        assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=tolerance[0])
        assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=tolerance[1])


def test_tensor_parallelism_on_transformer_engine_has_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with mock.patch.dict("os.environ", clear=True) as environment:
        for experiment in (of("ultrasweep", tp=2), of("megatron", dp=2), of("megatron", tp=2)):
            set_environment(experiment)
            assert ("CUDA_DEVICE_MAX_CONNECTIONS" in environment) == (experiment == of("megatron", tp=2))
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
        set_environment(of("megatron", tp=2))
        assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "what the user has set stays"


def test_memory_grows_in_segments_as_users_of_torchtitan_have_it() -> None:
    with mock.patch.dict("os.environ", clear=True) as environment:
        set_environment(of("megatron"))
        assert environment == {}, "Megatron-Core cannot register such memory"
        set_environment(of("torchtitan"))
        assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        set_environment(of("ultrasweep"))
        assert environment.pop("NCCL_GRAPH_REGISTER") == "0"
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            environment.clear()
            environment[name] = "max_split_size_mb:512"
            set_environment(of("ultrasweep"))
            assert environment == {name: "max_split_size_mb:512", "NCCL_GRAPH_REGISTER": "0"}


def test_the_version_without_transformer_engine_is_chosen_by_name() -> None:
    assert of("megatron").engine_version == ENGINES["megatron"] != WITHOUT_TRANSFORMER_ENGINE
    chosen = of("megatron", engine_version=WITHOUT_TRANSFORMER_ENGINE)
    assert refused(chosen) == [] and chosen.id != of("megatron").id


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_forced_weights_are_the_scores_of_the_forced_experts(gate: Any, normalize: bool) -> None:
    moe = MoESpec(
        num_experts=4,
        experts_per_token=2,
        expert_hidden_size=8,
        gate=gate,
        normalize_weights=normalize,
        weight_scale=2.5,
    )
    choice, logits = forced_choice(torch.arange(6), moe, None), torch.randn(3, 2, 4, dtype=torch.float64)
    weights, visited = forced_routing(choice, moe)(logits)
    flat = logits.view(6, 4)
    scores = flat.softmax(-1) if gate == "softmax" else flat.sigmoid()
    for token in range(6):
        chosen = choice[token].tolist()
        assert sorted(chosen) == visited[token].nonzero().flatten().tolist()
        total = scores[token][chosen].sum() if normalize else 1.0
        assert torch.allclose(weights[token][chosen], 2.5 * scores[token][chosen] / total, rtol=1e-5)
        assert weights[token].count_nonzero() == 2


def test_a_graph_needs_a_second_step_of_warm_up() -> None:
    graphed = of("megatron", compile="block")
    assert refused(graphed) == [] and is_graphed(graphed) and not is_graphed(of("megatron"))
    require_warm_up(graphed, MeasureSpec(warmup_steps=2, timed_steps=1))
    require_warm_up(of("megatron"), MeasureSpec(warmup_steps=0, timed_steps=1))
    with pytest.raises(UnsupportedByEngine, match="use 2 or more"):
        require_warm_up(graphed, MeasureSpec(warmup_steps=1, timed_steps=1))


def test_the_second_step_is_captured_and_later_ones_are_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, stream = mock.Mock(), mock.Mock()
    called: list[Any] = []
    for name, stand_in in (("Stream", lambda: stream), ("current_stream", mock.Mock()), ("CUDAGraph", lambda: graph)):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: nullcontext())
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 7)
    monkeypatch.setattr(megatron_graph, "_register_random_states", lambda graph: None)

    def passes() -> str:
        called.append("passes")
        return "losses"

    steps = megatron_graph.StepGraph()
    for step in range(4):
        batches = steps.hold([{"tokens": torch.full((2,), step)}])
        assert batches[0]["tokens"].tolist() == [step, step]
        called.append((id(batches[0]["tokens"]), steps.run(passes)))
    assert called.count("passes") == 2 and graph.replay.call_count == 3, (
        "one step without, one captured, all but one run"
    )
    assert steps.bytes == 7, "the memory of replays is that of the capture"
    assert len({entry for entry in called if entry != "passes"}) == 1, "one memory, one result"
