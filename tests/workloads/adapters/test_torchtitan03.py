"""torchtitan 0.3 as the engine of a point: losses and norms equal ours, from the same weights and tokens."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.sampling import sampled
from tests.workloads.adapters.test_torchtitan import FOUR, MISSING, QK_NORM, QWEN, TIED, WIDE_HEADS
from tests.workloads.adapters.three_steps import Told, run
from workloads.engine.collectives.parameters import initial_part
from workloads.measuring.processes import on_ranks
from workloads.spec import weights
from workloads.spec.engine_versions import ENGINE_VERSIONS
from workloads.spec.experiment import Experiment

pytestmark = [
    pytest.mark.slow(seconds=12),
    pytest.mark.drawn(one_in=2),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(MISSING) or importlib.util.find_spec("spmd_types") is None,
        reason="torchtitan 0.3 is not installed: tests/workloads/adapters/packages installs it",
    ),
]
INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2}
GATHERED = {"cp_kind": "allgather", "seq_len": 256}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "replicas, full recomputation": {"dp": 2, "recompute": "full"},
    "zero 2": {"dp": 2, "zero_stage": 2},
    "zero 3": {"dp": 2, "zero_stage": 3},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
    "tp": {"tp": 2, "recompute": "full"},
    "tp without sequence parallelism": {"tp": 2, "sequence_parallel": False},
    "replicas and tp": {"dp": 2, "tp": 2},
    "zero 2 and tp": {"dp": 2, "tp": 2, "zero_stage": 2},
    "gpipe": {"pp": 2, "pp_schedule": "gpipe"},
    "1f1b": {"pp": 2},
    "interleaved": INTERLEAVED,
    "interleaved, zero 3": {"dp": 2, "zero_stage": 3, **INTERLEAVED},
    "interleaved zero bubble": {**INTERLEAVED, "pp_schedule": "interleaved_zero_bubble"},
    "zero bubble v, zero 1": {"dp": 2, "pp": 2, "zero_stage": 1, "pp_schedule": "zero_bubble_v"},
    "dualpipe v and tp": {"tp": 2, "pp": 2, "pp_schedule": "dualpipe_v"},
    "zero 1 and pp": {"dp": 2, "pp": 2, "zero_stage": 1},
    "replicas and pp": {"dp": 2, "pp": 2},
    "tp and pp": {"tp": 2, "pp": 2},
    "cp": {"cp": 2, "zero_stage": 3, **GATHERED},
    "dp and cp": {"dp": 2, "cp": 2, "zero_stage": 2, "micro_batch_size": 2, **GATHERED},
    "replicas and cp": {"dp_replicate": 2, "cp": 2, "zero_stage": 3, **GATHERED},
    "cp and tp": {"cp": 2, "tp": 2, "zero_stage": 3, "recompute": "full", **GATHERED},
    "cp and pp": {"cp": 2, "pp": 2, "zero_stage": 1, **GATHERED},
    "tied, zero 2": {"model": TIED, "dp": 2, "zero_stage": 2, "recompute": "full"},
    "tied, uneven vocabulary": {"model": dataclasses.replace(TIED, vocab_size=127), "dp": 2, "zero_stage": 3},
    "qk_norm and pp": {"model": QK_NORM, "pp": 2},
    "qk_norm, tied, zero 3 and tp": {"model": QWEN, "dp": 2, "tp": 2, "zero_stage": 3},
    "qk_norm, tied, cp": {"model": QWEN, "cp": 2, "zero_stage": 3, **GATHERED},
    "head size of its own, hsdp": {"model": WIDE_HEADS, "dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
}


def of(engine: str = "torchtitan", **fields: Any) -> Experiment:
    asked = {"model": FOUR, "seq_len": 32, "global_batch_size": 8, "precision": "fp32", "engine": engine}
    version = {"engine_version": ENGINE_VERSIONS["torchtitan"][-1]} if engine == "torchtitan" else {}
    return Experiment.canonical(**{**asked, **version, **fields})


@pytest.fixture(scope="module")
def ours() -> Callable[..., Told]:
    """Of one rank: those of our other layouts are the same (tests/workloads/engine/test_parity.py)."""
    return cache(lambda **fields: run(of("ultrasweep", **fields))[0])


@pytest.mark.parametrize("layout", sampled(list(LAYOUTS), 1, seconds=20))
def test_losses_and_norms_equal_ours(layout: str, ours: Callable[..., Told]) -> None:
    asked = LAYOUTS[layout]
    own = ours(**{field: asked[field] for field in ("model", "seq_len") if field in asked})
    for told in run(of(**asked)):
        assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in own], rel=1e-6)
        assert [norm for _, norm in told] == pytest.approx([norm for _, norm in own], rel=1e-6)


@pytest.mark.exhaustive(seconds=40)
def test_in_16_bits_losses_are_as_near_as_rounding_lets_them_be(ours: Callable[..., Told]) -> None:
    """tp and pp alone, too, which compute in bf16 there because FSDP is always used."""
    for fields in ({"dp": 2, "zero_stage": 3}, {"tp": 2}, {"pp": 2}):
        for told in run(of(precision="bf16", **fields)):
            assert [loss for loss, _ in told] == pytest.approx([loss for loss, _ in ours()], rel=3e-4)


def check_weights(rank: int) -> None:
    """Every weight of ours is in exactly one of its parameters, and comes back from there as it was."""
    from workloads.adapters.torchtitan03 import Torchtitan03
    from workloads.adapters.torchtitan03_models import to_ours, weights_of

    for model in (FOUR, QWEN, WIDE_HEADS):
        e = of(model=model)
        engine = Torchtitan03(e, rank, torch.device("cpu"))
        engine.build()
        assert engine._trainer is not None
        held = []
        [part] = engine._trainer.model_parts
        for name, parameter in part.named_parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            parts = weights_of(model, name)
            for weight, value in zip(parts, to_ours(model, name, local.detach()), strict=True):
                assert torch.equal(value, initial_part(weight, e.seed, torch.device("cpu"), {}))
            held += [weight.name for weight in parts]
        wanted = {weight.name for weight in (weights.embedding(model), weights.final_norm(model), weights.head(model))}
        for layer in range(model.num_layers):
            wanted |= {weight.name for weight in weights.block(model, f"layers.{layer}", routed=False)}
        assert sorted(held) == sorted(wanted)


def check_configuration(rank: int) -> None:
    from workloads.adapters.torchtitan03_config import Nothing, trainer_config

    for fields, has_graphs, loss in (
        ({"dp": 2, "zero_stage": 3}, True, "ChunkedLossWrapper.Config"),
        (INTERLEAVED, False, "ChunkedLossWrapper.Config"),
        ({"pp": 2, "pp_schedule": "dualpipe_v"}, False, "CrossEntropyLoss.Config"),
    ):
        config = trainer_config(of(**fields), Nothing.Config())
        assert config.training.disable_cuda_graphs is not has_graphs
        assert type(config.loss).__qualname__ == loss
    assert trainer_config(of(cp=2, zero_stage=3, **GATHERED), Nothing.Config()).loss.num_chunks == 8
    assert trainer_config(of(seq_len=36), Nothing.Config()).loss.num_chunks == 4


@pytest.mark.parametrize("check", [check_weights, check_configuration])
def test_settings(check: Callable[[int], None]) -> None:
    """In a process of its own: the package asks for its device when it is imported."""
    on_ranks(check, 1, "cpu", timeout_s=240)
