"""Captured steps: what is copied into a graph and out of it, which step is captured, and what the row says of it.

On a CPU `tests.workloads.measuring.graph_stand_in` takes the place of CUDA's graph.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.planted.plant import Fault, planted
from tests.pool import Pool
from tests.workloads.engine.parity import experts
from tests.workloads.measuring.graph_stand_in import StandIn, measured, stood_in_for, values_of, with_its_modules
from tests.workloads.measuring.test_step import MODEL, engine
from workloads.contract.measure_spec import EAGER_STEPS, MeasureSpec
from workloads.engine.collectives.groups import make_groups
from workloads.engine.training import captured_step
from workloads.engine.training import clock as clock_module
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.engine.training.captured_step import CapturedStep, CudaGraph, Launched, fullest
from workloads.engine.training.pipeline import PipelineMarks
from workloads.measuring.step import Measurements, measure
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.worker import described

pytestmark = pytest.mark.drawn(one_in=2)

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "zero_stage": 1, "global_batch_size": 4},
    {"dp": 2, "zero_stage": 3, "global_batch_size": 4},
    {"pp": 2, "global_batch_size": 4},
    {"dp": 2, "zero_stage": 1, "global_batch_size": 4, "modules": 2},
)
REPLAY = "workloads.engine.training.captured_step:CapturedStep.replay"
FAULTS = [
    Fault(name=name, what=what, axis="graph", place=REPLAY, old=old, new=new)
    for name, what, old, new in (
        ("unseen_batch", "the graph does not see the batch of a step", "self._batches.copy_(batches)", "pass"),
        (
            "shared_totals",
            "a later replay writes over the loss",
            "self._launched.totals.clone()",
            "self._launched.totals",
        ),
        (
            "early_totals",
            "the loss is read before the replay",
            "self._graph.replay()\n",
            "totals = self._launched.totals.clone(); self._graph.replay(); self._replayed_at = 0.0; return totals\n",
        ),
    )
]


def both_ways(rank: int, layout: dict[str, Any], fault: Fault | None) -> tuple[Any, Any, list[Any], list[str]]:
    """Losses and norms without and with a graph, what the latter's records lack, and the calls of the graph."""
    with stood_in_for(), planted(fault):
        eager, graphed = (measured(rank, layout, graph) for graph in ("none", "step"))
    assert (eager.cuda_graph, graphed.cuda_graph, graphed.not_captured) == ("none", "step", None)
    lacking = [one.optimizer_s is None for one in graphed.steps]
    return values_of(eager), values_of(graphed), lacking, StandIn.calls


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replays_compute_what_eager_steps_do(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    for eager, graphed, lacking, calls in gloo_pool.run(both_ways, 2, layout, None):
        assert graphed == eager and len(set(eager)) == 6
        assert calls == ["capture", *["replay"] * 4, "reset"], "two eager steps, a first replay, three timed ones"
        assert lacking == [False, False, False, True, True, False], "marks are those of the last replay of a loop"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_memory_that_a_graph_does_not_share_is_noticed(gloo_pool: Pool, fault: Fault) -> None:
    ((eager, graphed, _, _),) = gloo_pool.run(both_ways, 1, {}, fault)
    assert graphed[:2] == eager[:2] and graphed[2:] != eager[2:]


def reasons(rank: int) -> list[str]:
    """Why steps run eagerly: on a CPU, and with too few steps before the timed ones."""
    told = [measured(rank, {}, "auto").not_captured or ""]
    with pytest.raises(UnsupportedByEngine) as refusal:
        measured(rank, {}, "step")
    told.append(str(refusal.value))
    with stood_in_for():
        few = measured(rank, {}, "auto", warmup_steps=2)
    assert few.cuda_graph == "none" and len(few.steps) == 5
    return [*told, few.not_captured or ""]


def test_what_is_not_captured_says_why(gloo_pool: Pool) -> None:
    on_cpu = "CUDA graphs need CUDA devices, not backend=cpu"
    ((auto, refused, few),) = gloo_pool.run(reasons, 1)
    assert auto == on_cpu
    assert refused == f"cuda_graph=step: {on_cpu}; or use cuda_graph=none or auto"
    assert "measure.warmup_steps is 2; use 3 or more" in few


def without_room(rank: int) -> list[Measurements]:
    with stood_in_for("no room"):
        return [measured(rank, {"dp": 2}, graph, warmup_steps=4) for graph in ("auto", "step", "none")]


def test_without_room_for_a_graph_auto_runs_eagerly(gloo_pool: Pool) -> None:
    for auto, step_, none in gloo_pool.run(without_room, 2):
        assert (auto.cuda_graph, auto.not_captured) == ("none", "no room")
        assert (step_.cuda_graph, step_.not_captured) == ("step", None), "what is asked for is tried"
        assert values_of(auto) == values_of(none)
        assert [one.is_warmup for one in auto.steps] == [True] * 4 + [False] * 3


def test_the_fullest_device_tells_whether_a_graph_finds_its_memory() -> None:
    gib = 2**30
    assert fullest([(100 * gib, 104 * gib), (90 * gib, 95 * gib)]) is None
    reason = fullest([(100 * gib, 140 * gib), (120 * gib, 122 * gib), (130 * gib, 133 * gib)])
    assert reason is not None
    assert "on rank 1 eager steps reserve 120.0 GiB, and a graph up to 123.6 of 122.0 GiB" in reason


def phases(rank: int) -> list[tuple[int, bool, bool]]:
    """(step, warm-up, replay) of each announcement."""
    told: list[tuple[int, bool, bool]] = []
    StandIn.engine = at = engine(rank, cuda_graph="step")
    with stood_in_for():
        measure(
            at,
            MeasureSpec(timed_steps=2),
            lambda number, warm: told.append((number, warm, False)),
            before_replay=lambda number, warm: told.append((number, warm, True)),
        )
    return told


def test_replays_are_announced_as_such(gloo_pool: Pool) -> None:
    eager = [(0, True, False), (1, True, False), (2, True, False)]  # the third one announces the capture
    assert gloo_pool.run(phases, 1) == [[*eager, (2, True, True), (3, False, True), (4, False, True)]]


def bytes_of_moments(rank: int, graph: str) -> list[int]:
    """Bytes of the optimizer's state before each of the first two steps."""
    StandIn.engine = at = engine(rank, cuda_graph=graph)
    told: list[int] = []
    with stood_in_for():
        measure(at, MeasureSpec(timed_steps=1), lambda number, warm: told.append(at.optimizer.state_bytes()))
    return told[:2]


def test_moments_are_allocated_before_a_step_that_leaves_them_between_activations(gloo_pool: Pool) -> None:
    ((eager, (before, after)),) = zip(
        *(gloo_pool.run(bytes_of_moments, 1, graph) for graph in ("none", "step")), strict=True
    )
    assert before == after > 0 and eager == [0, after]


class OutOfMemory:
    """A graph of torch, whose capture cannot be ended in order after an error."""

    def capture_begin(self, **_: Any) -> None: ...

    def capture_end(self) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


def test_an_error_inside_a_capture_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(CUDAGraph=OutOfMemory, synchronize=lambda: None, empty_cache=lambda: None)
    monkeypatch.setattr(captured_step.torch, "cuda", cuda)

    def work() -> Launched:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        CudaGraph().capture(work)


class FakeEvent:
    """As `torch.cuda.Event`, without a device."""

    def __init__(self, *, enable_timing: bool, external: bool) -> None:
        self.external = external

    def record(self) -> None: ...


def test_marks_inside_a_graph_live_as_long_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=FakeEvent)))
    clock = clock_module.Clock(torch.device("cuda"))
    before = clock.mark()
    with clock.inside_graph() as held:
        inside = weakref.ref(clock.mark())
    after = clock.mark()
    mark = inside()
    assert mark is not None and [mark] == held
    assert [event.external for event in (before, mark, after)] == [False, True, False]  # type: ignore[union-attr]
    del mark, held
    assert inside() is None


def test_a_captured_step_holds_the_marks_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    class Marks(list[Any]): ...

    marks = [Marks()]
    alive = weakref.ref(marks[0])
    monkeypatch.setattr(captured_step, "CudaGraph", lambda: SimpleNamespace(capture=lambda work: work()))
    clock: Any = SimpleNamespace(cuda=False, inside_graph=lambda: nullcontext(marks[0]))
    tokens = torch.zeros(2, dtype=torch.int64)
    launched = Launched(tokens, PipelineMarks(), 0.0)
    step_of_graph = CapturedStep([], clock, lambda batches: launched, [(tokens, tokens)])
    marks.clear()
    gc.collect()
    assert alive() is not None
    del step_of_graph
    assert alive() is None


# GPUs

LARGER = dataclasses.replace(MODEL, hidden_size=128, head_dim=32, ffn_hidden_size=256, num_layers=4)
ROUTED = dataclasses.replace(LARGER, moe=experts(expert_hidden_size=64, num_shared_experts=0))
LEARNED = dataclasses.replace(LARGER, moe=experts(expert_hidden_size=64, balance="bias", balance_coefficient=1e-3))
ON_GPUS: tuple[dict[str, Any], ...] = (
    {"attention": "auto"},
    {"recompute": "selective", "precision": "fp8_tensorwise"},
    {"precision": "fp16", "recompute": "full"},
    {"model": LEARNED, "routing": "learned"},
    *({"dp": 2, "zero_stage": stage} for stage in (0, 3)),
    {"dp": 2, "zero_stage": 2, "precision": "fp8_rowwise"},
    {"tp": 2},
    *({"cp": 2, "zero_stage": 2, "cp_kind": kind} for kind in ("ring", "ulysses")),
    {"dp": 2, "ep": 2, "zero_stage": 2, "model": ROUTED},
    {"dp": 2, "ep": 2, "zero_stage": 1, "model": LEARNED, "routing": "learned", "capacity_factor": 1.25},
    {"tp": 2, "ep": 2, "model": ROUTED},
    {"pp": 2, "pp_schedule": "1f1b"},
    *(
        {"pp": 2, "pp_schedule": schedule, "virtual_stages": 2}
        for schedule in ("interleaved_1f1b", "zero_bubble_v", "dualpipe_v")
    ),
    {"optimizer_offload": 0.5},
    {"optimizer_offload": 1.0, "precision": "fp16", "model": ROUTED},
    {"optimizer_offload": 1.0, "optimizer_states": "bf16", "master_weights": "bf16", "global_batch_size": 2},
    {"optimizer_offload": 0.5, "dp": 2, "zero_stage": 3},
    {"activation_offload": "all", "attention": "flash"},
    {"activation_offload": "qkv+attention", "attention": "flash", "recompute": "norm", "optimizer_offload": 0.5},
    {"activation_offload": "all", "attention": "flash", "dp": 2, "zero_stage": 3},
    {"activation_offload": "all", "attention": "flash", "pp": 2, "pp_schedule": "1f1b"},
    {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2},
    {"dp": 2, "tp": 2, "zero_stage": 3},
    {"dp": 2, "pp": 2, "zero_stage": 1},
    {"modules": 2},
    {"modules": 2, "precision": "fp8_tensorwise", "recompute": "selective"},
    {"modules": 1, "precision": "fp16", "recompute": "full"},
    {"modules": 1, "model": LEARNED, "routing": "learned"},
    {"modules": 2, "optimizer_offload": 0.5},
    *({"modules": 2, "dp": 2, "zero_stage": stage} for stage in (1, 3)),
    {"modules": 2, "tp": 2},
    {"modules": 2, "cp": 2, "zero_stage": 2, "cp_kind": "ring"},
    {"modules": 2, "pp": 2, "pp_schedule": "1f1b"},
    {"modules": 2, "pp": 2, "pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
    {"modules": 1, "dp": 2, "ep": 2, "zero_stage": 2, "model": ROUTED},
)
"""About three seconds each; most with a kernel of attention whose backward repeats itself to the bit."""


def ranks_of(layout: dict[str, Any]) -> int:
    return math.prod(layout.get(axis, 1) for axis in ("dp", "dp_replicate", "dp_shard", "tp", "cp", "pp"))


def built_on_a_gpu(rank: int, layout: dict[str, Any], graph: str) -> Engine:
    fields = {"seq_len": 256, "global_batch_size": 4, "attention": "math"}
    case = Experiment.canonical(**{**fields, **with_its_modules(layout, LARGER), "cuda_graph": graph})
    choose_attention(case)
    return build(case, make_groups(case, rank, torch.device("cuda", torch.cuda.current_device())))


def on_gpus(rank: int, layout: dict[str, Any], fault: Fault | None = None) -> tuple[list[Any], ...]:
    """Losses and norms of eager steps, of captured ones, and of eager ones again if these differ."""
    found = []
    for graph in ("none", "step", "none"):
        with planted(fault) if graph == "step" else nullcontext():
            ran = measure(built_on_a_gpu(rank, layout, graph), MeasureSpec(timed_steps=3))
        assert ran.cuda_graph == graph
        found.append(values_of(ran))
        differ = torch.tensor(float(found[0] != found[-1]), device="cuda")
        dist.all_reduce(differ)
        if graph == "step" and not differ.item():
            break
    return tuple(found)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=[pytest.mark.multi_gpu] if ranks_of(one) > 1 else []) for one in ON_GPUS],
    ids=str,
)
def test_captured_steps_equal_eager_ones_to_the_bit(nccl_pool: Pool, layout: dict[str, Any]) -> None:
    if ranks_of(layout) > nccl_pool.size:
        pytest.skip(f"needs {ranks_of(layout)} devices")
    for eager, graphed, *again in nccl_pool.run(on_gpus, ranks_of(layout), layout):
        if again and again[0] != eager:  # attention's backward adds in no fixed order
            torch.testing.assert_close(torch.tensor(graphed), torch.tensor(eager), rtol=2e-3, atol=0)
        else:
            assert graphed == eager


@pytest.mark.gpu
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_of_memory_is_noticed_on_a_gpu(nccl_pool: Pool, fault: Fault) -> None:
    ((eager, graphed, again),) = nccl_pool.run(on_gpus, 1, {}, fault)
    assert eager == again and graphed[2:] != eager[2:]


def out_of_memory_in_a_capture(rank: int) -> tuple[str, str]:
    """How a rank describes the error of a capture for which no memory is left."""
    ballast: list[torch.Tensor] = []

    def take_all(number: int, is_warmup: bool) -> None:
        if number == EAGER_STEPS:  # announces the capture
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info()
            ballast.append(torch.empty(free - 2**23, dtype=torch.uint8, device="cuda"))

    try:
        measure(built_on_a_gpu(rank, {"seq_len": 4096}, "step"), MeasureSpec(), take_all)
    except torch.OutOfMemoryError as error:
        return described(error)
    return "none", ""


@pytest.mark.gpu
def test_no_memory_inside_a_capture_on_a_gpu(nccl_pool: Pool) -> None:
    ((kind, text),) = nccl_pool.run(out_of_memory_in_a_capture, 1)
    nccl_pool.close()  # the next test gets processes without a broken capture
    assert kind == "oom" and "out of memory" in text
