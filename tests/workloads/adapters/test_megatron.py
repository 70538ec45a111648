"""Megatron-Core as the engine of a point: losses and norms equal ours, from the same weights and tokens."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.sampling import sampled
from tests.workloads.adapters.cuda_stand_in import cuda_on_cpu
from tests.workloads.test_worker import MODEL
from workloads.adapters.seam import engine_of
from workloads.contract.measure_spec import MeasureSpec
from workloads.costs.shape.partition import experiment_layers
from workloads.measuring.processes import on_ranks
from workloads.rules.engine_support import refused
from workloads.spec.engine_versions import ENGINES, WITHOUT_TRANSFORMER_ENGINE
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "dp, full recomputation": {"dp": 2, "recompute": "full"},
    "zero 1": {"dp": 2, "zero_stage": 1},
    "tp": {"tp": 2},
    "tp without sequence parallelism": {"tp": 2, "sequence_parallel": False},
    "zero 1 and tp": {"dp": 2, "tp": 2, "zero_stage": 1},
    "1f1b": {"pp": 2},
    "interleaved": INTERLEAVED,
    "uneven stages": {"pp": 3},
    "zero 1 and interleaved": {
        "dp": 2,
        "pp": 2,
        "zero_stage": 1,
        "pp_schedule": "interleaved_1f1b",
        "virtual_stages": 2,
    },
    "tp and pp": {"tp": 2, "pp": 2},
    "tied": {"tied": True},
    "tied, tp": {"tied": True, "tp": 2},
    "tied, zero 1": {"tied": True, "dp": 2, "zero_stage": 1},
    "tied, 1f1b": {"tied": True, "pp": 2},
    "tied, interleaved": {"tied": True, **INTERLEAVED},
    "qk_norm": {"qk_norm": True},
    "qk_norm, tp": {"qk_norm": True, "tp": 2},
    "qk_norm, tp without sequence parallelism": {"qk_norm": True, "tp": 2, "sequence_parallel": False},
    "qk_norm, zero 1 and interleaved": {"qk_norm": True, "dp": 2, "zero_stage": 1, **INTERLEAVED},
}
Told = list[tuple[float, float | None]]


def of(engine: str = "megatron", **fields: Any) -> Experiment:
    shape = {"tie_embeddings": fields.pop("tied", False), "qk_norm": fields.pop("qk_norm", False)}
    model = dataclasses.replace(MODEL, num_layers=4, **shape)
    asked = {
        "model": model,
        "seq_len": 32,
        "global_batch_size": 12 if fields.get("pp") == 3 else 8,
        "precision": "fp32",
    }
    if engine == "megatron":
        asked["engine_version"] = WITHOUT_TRANSFORMER_ENGINE
    return Experiment.canonical(**{**asked, "engine": engine, **fields})


def steps(experiment: Experiment, rank: int) -> Told:
    """Losses and norms of three steps on one rank of a CPU."""
    with cuda_on_cpu() if experiment.engine == "megatron" else nullcontext():
        engine = engine_of(experiment, rank, torch.device("cpu"))
        engine.build()
        measured, traffic = engine.measure(
            MeasureSpec(warmup_steps=1, timed_steps=2), lambda step, is_warmup: None, None
        )
    assert experiment.engine != "megatron" or traffic is None
    return [(step.loss, step.grad_norm) for step in measured.steps]


def run(experiment: Experiment) -> list[Told]:
    """Of every rank."""
    assert refused(experiment) == []
    return on_ranks(partial(steps, experiment), experiment.world_size, "cpu", timeout_s=240)


@pytest.fixture(scope="module")
def ours() -> Callable[..., Told]:
    """What one process of ours does with the model and the global batch of an experiment."""
    known: dict[str, Told] = {}

    def told(experiment: Experiment) -> Told:
        size, model = experiment.global_batch_size, experiment.model
        alone = of("ultrasweep", global_batch_size=size, tied=model.tie_embeddings, qk_norm=model.qk_norm)
        if alone.id not in known:
            known[alone.id] = run(alone)[0]
        return known[alone.id]

    return told


@pytest.mark.slow(seconds=9)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", sampled(list(LAYOUTS), 2, seconds=8))
def test_losses_and_norms_equal_ours(ours: Callable[..., Told], layout: str) -> None:
    experiment = of(**LAYOUTS[layout])
    expected = ours(experiment)
    for theirs in run(experiment):
        assert [loss for loss, _ in theirs] == pytest.approx([loss for loss, _ in expected], rel=1e-6)
        assert [norm for _, norm in theirs] == pytest.approx([norm for _, norm in expected], rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.exhaustive(seconds=14)
def test_in_16_bits_losses_are_as_near_as_rounding_lets_them_be(ours: Callable[..., Told]) -> None:
    for fields in ({"dp": 2}, {"dp": 2, "zero_stage": 1}, {"tied": True, "qk_norm": True}):
        experiment = of(precision="bf16", **fields)
        for theirs in run(experiment):
            assert [loss for loss, _ in theirs] == pytest.approx([loss for loss, _ in ours(experiment)], rel=3e-4)


def check_settings(rank: int) -> None:
    from workloads.adapters import megatron_config as megatron

    e = of(tp=2, pp=2, dp=2, zero_stage=1, recompute="full", precision="bf16")
    config, data = megatron.transformer_config(e), megatron.data_parallel_config(e)
    optimizer = megatron.optimizer_config(e)
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (2, 2)
    assert config.sequence_parallel and config.bf16 and config.params_dtype == torch.bfloat16
    assert (config.recompute_granularity, config.recompute_num_layers) == ("full", 1)
    assert data.use_distributed_optimizer and optimizer.use_distributed_optimizer and data.grad_reduce_in_fp32
    assert optimizer.bf16 and optimizer.params_dtype == torch.bfloat16
    stages = config.pipeline_model_parallel_layout.layout
    layers = [sum(kind.name == "decoder" for kind in stage[0]) for stage in stages]
    assert layers == [len(stage) for stage in experiment_layers(e)]
    plain = of(sequence_parallel=False, tp=2)
    assert not megatron.transformer_config(plain).sequence_parallel
    assert not megatron.data_parallel_config(plain).use_distributed_optimizer
    assert megatron.virtual_stages(of(**INTERLEAVED)) == 2 and megatron.virtual_stages(plain) is None


def check_refusals(rank: int) -> None:
    from workloads.adapters.megatron import Megatron

    def refusal(**fields: Any) -> str:
        with pytest.raises(UnsupportedByEngine) as caught:
            Megatron(of(**fields), 0, torch.device("cpu"))
        return str(caught.value)

    assert "Megatron-Core runs on CUDA devices only" in refusal()
    with mock.patch("importlib.metadata.version", lambda name: "0.17.0"):
        assert refusal() == "megatron-core 0.17.0 is installed, but the experiment needs 0.16.1"
    with mock.patch("importlib.util.find_spec", lambda name: name):
        assert "transformer_engine is installed" in refusal()
        with_te = {"engine_version": ENGINES["megatron"], "precision": "bf16"}
        with mock.patch("importlib.metadata.version", {"megatron-core": "0.16.1", "transformer_engine": "2.9.0"}.get):
            assert refusal(**with_te) == "transformer_engine 2.9.0 is installed, but the experiment needs 2.11.0"
    assert f"engine_version={WITHOUT_TRANSFORMER_ENGINE!r}" in refusal(**with_te)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [check_settings, check_refusals])
def test_settings_and_refusals(check: Callable[[int], None]) -> None:
    """In a process of its own: the package changes settings of torch when it is imported."""
    on_ranks(check, 1, "cpu", timeout_s=240)
