"""torchtitan 0.2.2 as the engine of a point: losses and norms equal ours, from the same weights and tokens."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.adapters.conftest import TORCHTITAN_02
from tests.workloads.test_worker import MODEL, run
from workloads.contract import protocol
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import StepRecord
from workloads.rules.engine_support import refused
from workloads.spec.experiment import Experiment

MISSING = [
    name
    for name in ("torchtitan", "datasets", "tokenizers", "torchdata", "tensorboard", "triton", "tyro")
    if importlib.util.find_spec(name) is None
]
pytestmark = [
    pytest.mark.slow(seconds=12),
    pytest.mark.drawn(one_in=2),
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(MISSING) or not TORCHTITAN_02.is_dir(),
        reason=f"{', '.join(MISSING) or TORCHTITAN_02} not installed: tests/workloads/adapters/packages installs them",
    ),
    pytest.mark.usefixtures("torchtitan_02"),
]
FOUR = dataclasses.replace(MODEL, num_layers=4)
TIED = dataclasses.replace(FOUR, tie_embeddings=True)
QK_NORM = dataclasses.replace(FOUR, qk_norm=True)
QWEN = dataclasses.replace(TIED, qk_norm=True)
WIDE_HEADS = dataclasses.replace(FOUR, head_dim=16)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "ddp, full recomputation": {"dp": 2, "recompute": "full"},
    "zero 2": {"dp": 2, "zero_stage": 2},
    "zero 3": {"dp": 2, "zero_stage": 3},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
    "tp": {"tp": 2},
    "dp and tp": {"dp": 2, "tp": 2, "zero_stage": 2},
    "gpipe": {"pp": 2, "pp_schedule": "gpipe"},
    "1f1b": {"pp": 2},
    "interleaved": {"pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
    "zero bubble v": {"pp": 2, "pp_schedule": "zero_bubble_v"},
    "zero bubble v, zero 1": {"dp": 2, "pp": 2, "zero_stage": 1, "pp_schedule": "zero_bubble_v"},
    "interleaved, zero 3": {
        "dp": 2,
        "pp": 2,
        "zero_stage": 3,
        "pp_schedule": "interleaved_1f1b",
        "virtual_stages": 2,
    },
    "dualpipe v": {"pp": 2, "pp_schedule": "dualpipe_v"},
    "dualpipe v, zero 1, full recomputation": {
        "dp": 2,
        "pp": 2,
        "zero_stage": 1,
        "pp_schedule": "dualpipe_v",
        "global_batch_size": 16,
        "recompute": "full",
    },
    "dualpipe v and tp": {"tp": 2, "pp": 2, "pp_schedule": "dualpipe_v"},
    "zero 1 and pp": {"dp": 2, "pp": 2, "zero_stage": 1},
    "zero 3 and pp": {"dp": 2, "pp": 2, "zero_stage": 3},
    "tp and pp": {"tp": 2, "pp": 2},
    "cp": {"cp": 2, "zero_stage": 3},
    "cp, all gathered": {"cp": 2, "zero_stage": 2, "cp_kind": "allgather"},
    "cp of four": {"cp": 4, "zero_stage": 2},
    "dp and cp": {"dp": 2, "cp": 2, "zero_stage": 2, "micro_batch_size": 2},
    "replicas and cp": {"dp_replicate": 2, "cp": 2, "zero_stage": 3},
    "cp and tp": {"cp": 2, "tp": 2, "zero_stage": 3, "recompute": "full"},
    "cp and pp": {"cp": 2, "pp": 2, "zero_stage": 1, "micro_batch_size": 2},
    "cp and dualpipe v": {"cp": 2, "pp": 2, "zero_stage": 1, "pp_schedule": "dualpipe_v"},
    "compiled": {"compile": "block"},
    "cp, compiled": {"cp": 2, "zero_stage": 3, "compile": "block"},
    "tied": {"model": TIED},
    "tied, ddp": {"model": TIED, "dp": 2},
    "tied, zero 2": {"model": TIED, "dp": 2, "zero_stage": 2, "recompute": "full"},
    "tied, uneven vocabulary over tp": {"model": dataclasses.replace(TIED, vocab_size=127), "tp": 2},
    "qk_norm and tp": {"model": QK_NORM, "tp": 2},
    "qk_norm, tied, zero 3 and tp": {"model": QWEN, "dp": 2, "tp": 2, "zero_stage": 3},
    "qk_norm, tied, cp": {"model": QWEN, "cp": 2, "zero_stage": 3, "recompute": "full"},
    "head size of its own, hsdp": {"model": WIDE_HEADS, "dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
}


def steps(folder: Path, engine: str, **fields: Any) -> list[list[StepRecord]]:
    """Of every rank."""
    experiment = Experiment.canonical(
        **{"model": FOUR, "seq_len": 32, "global_batch_size": 8, "precision": "fp32", "engine": engine, **fields}
    )
    assert refused(experiment, "cpu") == []
    folder.mkdir()
    codes = run(folder, experiment, timeout_s=240, measure=MeasureSpec(warmup_steps=1, timed_steps=2))
    errors = [protocol.read_error(folder, rank) for rank in range(experiment.world_size)]
    assert codes == [0] * experiment.world_size, [error.message for error in errors if error is not None]
    results = [protocol.read_result(folder, rank) for rank in range(experiment.world_size)]
    return [result.steps for result in results if result is not None]


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[StepRecord]]:
    """Of one rank: those of our other layouts are the same (tests/workloads/engine/test_parity.py)."""

    @cache
    def of(**fields: Any) -> list[StepRecord]:
        return steps(tmp_path_factory.mktemp("ours") / "task", "ultrasweep", **fields)[0]

    return of


@pytest.mark.parametrize("layout", sampled(list(LAYOUTS), 1, seconds=20))
def test_losses_and_norms_equal_ours(tmp_path: Path, layout: str, ours: Callable[..., list[StepRecord]]) -> None:
    asked = LAYOUTS[layout]
    own = ours(**{field: asked[field] for field in ("model", "global_batch_size") if field in asked})
    for theirs in steps(tmp_path / "theirs", "torchtitan", **asked):
        assert [step.loss for step in theirs] == pytest.approx([step.loss for step in own], rel=1e-6)
        assert [step.grad_norm for step in theirs] == pytest.approx([step.grad_norm for step in own], rel=1e-6)
        assert all(step.pipeline_idle_s is None and step.reduce_exposed_s is None for step in theirs)
        assert all(step.step_time_s > 0 for step in theirs)
