"""What torchtitan 0.2.2 is told: its own parser's options, its weights as ours and back, fp8 emulated on a CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.sampling import sampled
from tests.workloads.adapters.test_torchtitan import FOUR, QWEN, WIDE_HEADS
from tests.workloads.adapters.test_torchtitan import pytestmark as pytestmark
from workloads.adapters.ultrasweep import Ultrasweep
from workloads.contract.measure_spec import MeasureSpec
from workloads.engine.collectives.parameters import initial_part
from workloads.measuring.processes import on_ranks
from workloads.spec import weights
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


def of(engine: str = "torchtitan", **fields: Any) -> Experiment:
    asked = {"model": FOUR, "seq_len": 32, "global_batch_size": 8, "precision": "fp32", "engine": engine}
    return Experiment.canonical(**{**asked, **fields})


def check_weights(rank: int) -> None:
    """Every weight of ours is in exactly one of its parameters, and comes back from there as it was."""
    from workloads.adapters.torchtitan import Torchtitan
    from workloads.adapters.torchtitan_models import to_ours, to_theirs, weight_of

    for model, is_reordered in ((FOUR, True), (QWEN, False), (WIDE_HEADS, False)):
        e = of(model=model)
        engine = Torchtitan(e, rank, torch.device("cpu"))
        engine.build()
        assert engine._trainer is not None
        [part] = engine._trainer.model_parts
        held = []
        for name, parameter in part.named_parameters():
            weight = weight_of(model, name)
            own = initial_part(weight, e.seed, torch.device("cpu"), {})
            held.append(weight.name)
            assert torch.equal(to_ours(model, name, parameter.detach()), own)
            assert torch.equal(to_ours(model, name, to_theirs(model, name, own)), own)
            if name.endswith("wq.weight"):
                assert torch.equal(parameter, own) is not is_reordered
        wanted = {weight.name for weight in (weights.embedding(model), weights.final_norm(model), weights.head(model))}
        for layer in range(model.num_layers):
            wanted |= {weight.name for weight in weights.block(model, f"layers.{layer}", routed=False)}
        assert sorted(held) == sorted(wanted)


def check_options(rank: int) -> None:
    """Its parser has every option that the adapter sets, with the value that is set."""
    from torchtitan.config import ConfigManager

    from workloads.adapters.torchtitan_config import FLOAT8, job_config

    assert FLOAT8.keys() == {"fp8_tensorwise", "fp8_rowwise"}
    for precision, options in FLOAT8.items():
        arguments = ["--model.converters", "quantize.linear.float8"]
        for option, value in options.items():
            name = f"--quantize.linear.float8.{option}"
            arguments += [name] if value is True else [name, value if isinstance(value, str) else ",".join(value)]
        read, told = ConfigManager().parse_args(arguments), job_config(of(precision=precision, dp=2, zero_stage=3))
        assert read.quantize == told.quantize
        assert read.model.converters == told.model.converters
        assert told.training.mixed_precision_param == "bfloat16"
    for kind, method in (("ring", "alltoall"), ("allgather", "allgather")):
        arguments = ["--parallelism.context_parallel_rotate_method", method]
        arguments += [
            "--parallelism.context_parallel_degree",
            "2",
            "--parallelism.fsdp_reshard_after_forward",
            "always",
        ]
        told = job_config(of(cp=2, cp_kind=kind, zero_stage=3))
        read = ConfigManager().parse_args(arguments)
        for field in ("context_parallel_rotate_method", "context_parallel_degree", "fsdp_reshard_after_forward"):
            assert getattr(read.parallelism, field) == getattr(told.parallelism, field)
    assert job_config(of(pp=2, pp_schedule="dualpipe_v")).parallelism.pipeline_parallel_schedule == "DualPipeV"


def check_missing_torchao(rank: int) -> None:
    from workloads.adapters.torchtitan import Torchtitan

    with mock.patch("importlib.util.find_spec", lambda name: None), pytest.raises(UnsupportedByEngine) as caught:
        Torchtitan(of(precision="fp8_tensorwise"), rank, torch.device("cpu"))
    assert str(caught.value) == (
        "precision=fp8_tensorwise of torchtitan needs the package torchao: pip install 'ultrasweep[torchtitan02]'"
    )


@pytest.mark.parametrize("check", [check_weights, check_options, check_missing_torchao])
def test_settings(check: Callable[[int], None]) -> None:
    """In a process of its own: the package asks for its device when it is imported."""
    on_ranks(check, 1, "cpu", timeout_s=240)


def rotation(experiment: Experiment, rank: int) -> str:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    from workloads.adapters.torchtitan import Torchtitan

    Torchtitan(experiment, rank, torch.device("cpu")).build()
    return _attention._cp_options.rotate_method.name


def test_context_parallelism_sends_as_the_experiment_says() -> None:
    for kind, method in (("ring", "ALL_TO_ALL"), ("allgather", "ALL_GATHER")):
        found = on_ranks(partial(rotation, of(cp=2, zero_stage=3, cp_kind=kind)), 2, "cpu", timeout_s=240)
        assert found == [method] * 2


Told = list[tuple[float | None, float | None]]


def emulated(experiment: Experiment, rank: int) -> tuple[Told, list[str]]:
    """Losses and norms of three steps in fp8 that is emulated, as torchtitan tests it; and which layers are in fp8."""
    from workloads.adapters import torchtitan
    from workloads.adapters.torchtitan_config import job_config

    def emulate(e: Experiment) -> Any:
        config = job_config(e)
        config.quantize.linear.float8.emulate = True
        return config

    with mock.patch.object(torchtitan, "job_config", emulate):
        engine = torchtitan.Torchtitan(experiment, rank, torch.device("cpu"))
        engine.build()
    measured, _ = engine.measure(MeasureSpec(warmup_steps=1, timed_steps=2), lambda step, is_warmup: None, None)
    assert engine._trainer is not None
    modules = engine._trainer.model_parts[0].named_modules()
    converted = [name for name, module in modules if type(module).__name__ == "Float8Linear"]
    return [(step.loss, step.grad_norm) for step in measured.steps], converted


def own_steps(experiment: Experiment, rank: int) -> Told:
    engine = Ultrasweep(experiment, rank, torch.device("cpu"))
    engine.build()
    measured, _ = engine.measure(MeasureSpec(warmup_steps=1, timed_steps=2), lambda step, is_warmup: None, None)
    return [(step.loss, step.grad_norm) for step in measured.steps]


@needs_torchao
@pytest.mark.parametrize(
    ("precision", "layout", "nearness"),
    sampled(
        [
            ("fp8_tensorwise", {"dp": 2, "zero_stage": 3}, 2e-3),  # its scales are no powers of two, ours are
            ("fp8_tensorwise", {"dp": 2}, 2e-3),
            ("fp8_rowwise", {"cp": 2, "zero_stage": 3, "recompute": "full"}, 4e-4),
            ("fp8_rowwise", {"dp": 2, "zero_stage": 2, "model": QWEN}, 4e-4),
        ],
        1,
        seconds=14,
    ),
)
def test_emulated_fp8_is_as_near_to_ours_as_rounding_lets_it_be(
    precision: str, layout: dict[str, Any], nearness: float
) -> None:
    e = of(precision=precision, **layout)
    [own] = on_ranks(partial(own_steps, of("ultrasweep", model=e.model, precision=precision)), 1, "cpu", timeout_s=240)
    for told, converted in on_ranks(partial(emulated, e), e.world_size, "cpu", timeout_s=240):
        assert len(converted) == 7 * e.model.num_layers and not any(name.endswith("output") for name in converted)
        assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in own], rel=1e-4)
        assert [norm for _, norm in told] == pytest.approx([norm for _, norm in own], rel=nearness)


def test_the_model_class_follows_the_shape() -> None:
    from workloads.rules.torchtitan_support import torchtitan_model

    assert torchtitan_model(FOUR) == "llama3"
    assert torchtitan_model(dataclasses.replace(FOUR, tie_embeddings=True)) == "qwen3"
    assert torchtitan_model(dataclasses.replace(FOUR, qk_norm=True)) == "qwen3"
    assert torchtitan_model(WIDE_HEADS) == "qwen3"
