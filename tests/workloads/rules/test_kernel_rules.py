"""Rules on what devices and captured steps can run: kernels of attention, and steps as one CUDA graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.workloads.costs.shapes import DEEPSEEK_V3, H200, LLAMA_8B, ONE_NODE, QWEN3_30B
from tests.workloads.rules.broken_rules import broken
from workloads.rules.captured_steps import not_captured
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import with_modules

WITHOUT_GROUPS = dataclasses.replace(LLAMA_8B, num_kv_heads=32)
PADDED = dataclasses.replace(WITHOUT_GROUPS, head_dim=20)
WIDE = dataclasses.replace(LLAMA_8B, head_dim=264)


@pytest.mark.parametrize(
    ("cluster", "fields", "says"),
    [
        (ONE_NODE, {"attention": "cudnn"}, "needs CUDA"),
        (ONE_NODE, {"attention": "efficient"}, "has cpu; use attention=auto, flash or math"),
        (ONE_NODE, {"attention": "efficient", "precision": "fp64"}, "needs CUDA"),
        (ONE_NODE, {"attention": "flash", "precision": "fp64"}, None),
        (H200, {"attention": "efficient"}, "no grouped queries on CUDA, llama8b has num_heads=32 and num_kv_heads=8"),
        (H200, {"attention": "efficient", "precision": "fp64"}, "no fp64 kernels on CUDA; use attention=auto or math"),
        (H200, {"attention": "efficient", "model": WITHOUT_GROUPS}, None),
        (H200, {"attention": "efficient", "model": PADDED}, "multiples of 8 on CUDA, llama8b has 20 for queries"),
        (H200, {"attention": "efficient", "model": PADDED, "precision": "fp32"}, None),
        (H200, {"attention": "efficient", "model": DEEPSEEK_V3}, None),
        (H200, {"attention": "cudnn", "model": PADDED}, "multiples of 8"),
        (H200, {"attention": "cudnn", "model": WIDE, "precision": "fp8_rowwise"}, "heads of at most 256"),
        (H200, {"attention": "flash", "model": WIDE}, "heads of at most 256 on CUDA, llama8b has 264 for queries"),
        (H200, {"attention": "flash", "model": PADDED}, None),
        (H200, {"attention": "math", "model": WIDE, "precision": "fp64"}, None),
        (ONE_NODE, {"attention": "flash4"}, "attention=flash4 needs CUDA"),
        (H200, {"attention": "flash4"}, None),
        (H200, {"attention": "flash4", "precision": "fp32"}, "attention=flash4 has no fp32 kernels on CUDA"),
        (H200, {"attention": "flash4", "model": PADDED}, "multiples of 8"),
        (H200, {"attention": "flash4", "model": WIDE}, "heads of at most 256"),
    ],
    ids=str,
)
def test_a_kernel_that_the_device_lacks_is_refused(
    cluster: ClusterSpec, fields: dict[str, Any], says: str | None
) -> None:
    """What is refused is what torch has no kernel for (`tests.workloads.engine.test_attention`)."""
    message = broken(cluster, **fields).get("attention")
    assert message is None if says is None else message is not None and says in message


LEARNED: dict[str, Any] = {"model": QWEN3_30B, "routing": "learned"}


@pytest.mark.parametrize(
    ("cluster", "fields", "says"),
    [
        (ONE_NODE, {}, "CUDA graphs need CUDA devices, not backend=cpu"),
        (
            H200,
            LEARNED | {"dp_shard": 8, "ep": 8},
            "with routing=learned the host waits in every layer for the sizes of the me",
        ),
        (H200, {"model": with_modules(LLAMA_8B, 2)}, None),
        (H200, LEARNED | {"precision": "fp16"}, "with routing=learned in precision=fp16 the host waits"),
        (H200, LEARNED | {"dp_shard": 8, "ep": 8, "zero_stage": 1, "capacity_factor": 1.25}, None),
        (H200, LEARNED | {"precision": "fp32", "capacity_factor": 1.25}, None),
        (H200, LEARNED, None),
        (H200, {"model": QWEN3_30B, "dp_shard": 8, "ep": 8, "zero_stage": 2}, None),
        (H200, {"compile": "block", "pp": 4, "pp_schedule": "1f1b"}, None),
        (H200, {"dp_replicate": 2, "tp": 2, "precision": "fp8_tensorwise", "recompute": "full"}, None),
    ],
    ids=str,
)
def test_steps_that_cannot_be_captured(cluster: ClusterSpec, fields: dict[str, Any], says: str | None) -> None:
    """``step`` is refused in one sentence, with the reason that ``auto`` has for running eagerly."""
    if says is None:
        assert broken(cluster, **fields, cuda_graph="step") == {}
        return
    message = broken(cluster, **fields, cuda_graph="step")["cuda_graph"]
    reason = message.removeprefix("cuda_graph=step: ").removesuffix("; use cuda_graph=none or auto")
    assert says in reason
    e = Experiment.canonical(**{"model": LLAMA_8B, "global_batch_size": 8, "cuda_graph": "auto", **fields})
    assert not_captured(e, cluster.backend) == reason
    assert "cuda_graph" not in broken(cluster, **fields, cuda_graph="auto")
