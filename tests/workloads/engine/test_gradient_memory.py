"""Where reduced gradients are allocated. Streams and their memory are CUDA's; that gradients are right on GPUs is shown
by the parity tests, which run with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from workloads.engine.training.gradient_memory import InMemoryOfActivations


def group(grads: list[object], *, replicas: bool = False, all_reduce: bool = True, **changes: Any) -> SimpleNamespace:
    """What is read of an ``FSDPParamGroup``."""
    kind = DDPMeshInfo if replicas else FSDPMeshInfo
    fields: dict[str, Any] = {
        "mesh_info": kind.__new__(kind),
        "all_reduce_grads": all_reduce,
        "fsdp_params": [SimpleNamespace(sharded_param=SimpleNamespace(grad=grad)) for grad in grads],
        "comm_ctx": SimpleNamespace(reduce_scatter_stream="reductions"),
        "_reduce_dtype": torch.float32,
        "_orig_dtype": torch.float32,
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stream that is current, and those on which something was allocated, in order."""
    current, seen = ["compute"], list[str]()

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            current.append(self.name)

        def __exit__(self, *error: object) -> None:
            current.pop()

    def empty(*size: int, **options: Any) -> str:
        seen.append(current[-1])
        return "memory"

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", Stream)
    monkeypatch.setattr(torch, "empty", empty)
    return seen


def allocated(own: SimpleNamespace, streams: list[str]) -> list[str]:
    """Streams of an input and of a result, allocated as FSDP does it."""
    comm, device = InMemoryOfActivations(own), torch.device("cuda", 0)
    comm.allocate((8,), dtype=torch.float32, device=device)
    with torch.cuda.stream("reductions"):  # type: ignore[arg-type]
        comm.allocate((4,), dtype=torch.float32, device=device)
    return streams


def test_a_result_that_becomes_the_gradient_is_allocated_for_compute(streams: list[str]) -> None:
    assert allocated(group([None, None]), streams) == ["compute", "compute"]


def test_of_replicas_too_once_they_are_summed(streams: list[str]) -> None:
    assert allocated(group([None], replicas=True), streams) == ["compute", "compute"]


@pytest.mark.parametrize(
    "own",
    [
        group([None, "grad"]),
        group([None], replicas=True, all_reduce=False),
        group([None], _orig_dtype=torch.bfloat16),
    ],
    ids=["added to a gradient", "summed over replicas later", "cast to the dtype of the shards"],
)
def test_a_result_that_is_freed_soon_stays_with_the_stream_of_reductions(
    own: SimpleNamespace, streams: list[str]
) -> None:
    """Compute could take its memory while it is still being read."""
    assert allocated(own, streams) == ["compute", "reductions"]
