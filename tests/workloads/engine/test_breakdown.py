"""A step's time divided among its kernels: on hand-made time lines, and on a trace as torch's profiler writes it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from workloads.contract.protocol import AxisTime, Breakdown
from workloads.engine.observing.breakdown import OPTIMIZER_RANGE, STEP_RANGE, KernelSpan, Kind, break_down, kind_of
from workloads.engine.observing.trace import read_step

PARTS = ("matmul", "attention", "optimizer", "memory_bound", "comm_exposed", "bubble", "launch_gaps")


def span(kind: Kind, start: float, end: float, axis: str | None = None) -> KernelSpan:
    return KernelSpan(name=kind, start_s=start, end_s=end, kind=kind, axis=axis)


def parts(found: Breakdown) -> dict[str, float]:
    """The parts that are not 0."""
    return {part: value for part in PARTS if (value := getattr(found, f"{part}_s"))}


def total(found: Breakdown) -> float:
    return sum(parts(found).values())


def test_kernels_one_after_the_other() -> None:
    line = [span("matmul", 0, 3), span("memory_bound", 3, 4), span("attention", 5, 7), span("optimizer", 9, 10)]
    found = break_down(line, 0, 10)
    assert parts(found) == {"matmul": 3, "memory_bound": 1, "attention": 2, "optimizer": 1, "launch_gaps": 3}
    assert (found.step_time_s, found.comm_hidden_s, found.comm_by_axis) == (10, 0, [])


def test_communication_hides_behind_compute() -> None:
    line = [span("matmul", 0, 4), span("communication", 1, 6, "dp_shard"), span("memory_bound", 5, 8)]
    found = break_down(line, 0, 8)
    assert parts(found) == {"matmul": 4, "comm_exposed": 1, "memory_bound": 3}
    assert found.comm_by_axis == [AxisTime(axis="dp_shard", exposed_s=1, hidden_s=4)]
    assert found.comm_hidden_s == 4


def test_nested_kernels_count_once() -> None:
    """A copy on another stream inside a matmul, and two matmuls at once."""
    line = [span("matmul", 0, 10), span("memory_bound", 2, 3), span("matmul", 4, 6), span("attention", 9, 12)]
    assert parts(break_down(line, 0, 12)) == {"matmul": 10, "attention": 2}


def test_two_axes_at_once() -> None:
    """Without compute the innermost one is exposed; beside compute both are hidden."""
    line = [
        span("communication", 0, 4, "dp_shard"),
        span("communication", 1, 3, "tp"),
        span("matmul", 2, 5),
        span("communication", 2, 6, None),
    ]
    found = break_down(line, 0, 6)
    assert parts(found) == {"matmul": 3, "comm_exposed": 3}
    assert found.comm_by_axis == [
        AxisTime(axis="tp", exposed_s=1, hidden_s=1),
        AxisTime(axis="dp_shard", exposed_s=1, hidden_s=3),
        AxisTime(axis=None, exposed_s=1, hidden_s=3),
    ]
    assert found.comm_hidden_s == 7


def test_waiting_for_other_stages_is_the_bubble() -> None:
    """A message that is asked for early is hidden while anything else runs, other communication too."""
    line = [
        span("communication", 0, 9, "pp"),
        span("matmul", 0, 4),
        span("communication", 5, 6, "dp_shard"),
        span("communication", 9, 10, "world"),
    ]
    found = break_down(line, 0, 10, waiting=("pp", "world"))
    assert parts(found) == {"matmul": 4, "comm_exposed": 1, "bubble": 5}
    assert found.comm_by_axis == [
        AxisTime(axis="dp_shard", exposed_s=1, hidden_s=0),
        AxisTime(axis="pp", exposed_s=None, hidden_s=5),
        AxisTime(axis="world", exposed_s=None, hidden_s=0),
    ]


def test_only_the_step_counts() -> None:
    line = [span("matmul", -3, 1), span("communication", 2, 9, "tp"), span("matmul", 6, 7)]
    assert parts(break_down(line, 0, 4)) == {"matmul": 1, "launch_gaps": 1, "comm_exposed": 2}
    assert parts(break_down([], 0, 4)) == {"launch_gaps": 4}


def test_parts_add_up_on_any_time_line() -> None:
    """And each part is what a look at every tenth of a millisecond finds."""
    rng = random.Random(5)
    kinds: tuple[Kind, ...] = ("matmul", "attention", "optimizer", "memory_bound", "communication")
    for _ in range(50):
        line = []
        for _ in range(rng.randrange(1, 40)):
            start, kind = rng.randrange(-5, 100), rng.choice(kinds)
            axis = rng.choice(("tp", "pp", "dp_shard", None)) if kind == "communication" else None
            line.append(span(kind, start, start + rng.randrange(0, 20), axis))
        found = break_down(line, 0, 100)
        assert total(found) == pytest.approx(found.step_time_s)
        looked = dict.fromkeys(PARTS, 0)
        for moment in range(100):
            running = [s for s in line if s.start_s <= moment < s.end_s]
            found_kind = next((kind for kind in kinds if any(s.kind == kind for s in running)), "launch_gaps")
            if found_kind == "communication":
                found_kind = "bubble" if all(s.axis == "pp" for s in running) else "comm_exposed"
            looked[found_kind] += 1
        assert parts(found) == {part: count for part, count in looked.items() if count}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "matmul",
            (
                "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
                "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
                "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_nn",
                "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_32x1_tn_align8>(...)",
                "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>(...)",
                "triton_tem_fused_mm_3",
            ),
        ),
        (
            "attention",
            (
                "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128_4x1x1_kernel0_0",
                "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_32_64x128x128_4x1x1_kernel0_0",
                "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)",
                "fmha_cutlassB_bf16_aligned_64x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)",
            ),
        ),
        (
            "memory_bound",
            (
                "triton_poi_fused_add_mul_silu_4",
                "triton_red_fused__scaled_dot_product_cudnn_attention_mm_2",  # named after its neighbours
                "_norm_forward",
                "_rotate",
                "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)",
                "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<c10::BFloat16, float>(...)",
                "Memcpy DtoD (Device -> Device)",
            ),
        ),
        (
            "communication",
            (
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "ncclKernel_SendRecv",
                "Memcpy PtoP (Device -> Device)",
                "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
            ),
        ),
    ],
)
def test_kernels_are_known_by_their_names(kind: Kind, names: tuple[str, ...]) -> None:
    for name in names:
        assert kind_of(name) == kind, name
    optimizer = "communication" if kind == "communication" else "optimizer"
    assert all(kind_of(name, in_optimizer=True) == optimizer for name in names)


GEMM, NORM = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_TNN", "_norm_forward"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class TraceWriter:
    """Makes a trace as Kineto writes it: launches on host threads, kernels on streams, NCCL's arguments."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 900.0},
        ]
        self.correlation = 0

    def range(self, name: str, start: float, end: float) -> None:
        host = {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": start, "dur": end - start}
        self.events.append(host | {"args": {"External id": 7, "Record function id": 0}})
        # The same on the device's time line, where it is as long as its kernels.
        self.events.append(host | {"cat": "gpu_user_annotation", "pid": 0, "tid": 7, "ts": start + 50})

    def kernel(
        self, name: str, launched: float, start: float, end: float, group: str | None = None, **event: Any
    ) -> None:
        self.correlation += 1
        args: dict[str, Any] = {"External id": 9, "correlation": self.correlation, "stream": 7, "device": 0}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2, "ts": launched}
        self.events.append(launch | {"dur": 2.5, "args": {"cbid": 211, "correlation": self.correlation}})
        if group is not None:
            args |= {
                "stream": 20,
                "Collective name": "_allgather_base",
                "dtype": "BFloat16",
                "In msg nelems": 1024,
                "Out msg nelems": 2048,
                "Group size": 2,
                "Process Group Name": group,
                "Process Group Description": "mesh_dp_shard",
                "Process Group Ranks": "[0, 1]",
            }
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": args["stream"], "ts": start, "args": args}
        self.events.append(kernel | {"dur": end - start} | event)

    def trace(self) -> dict[str, Any]:
        """In no order, as the threads' buffers come."""
        shuffled = random.Random(1).sample(self.events, len(self.events))
        return {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": shuffled}


def two_steps() -> TraceWriter:
    """The host is ahead: it launches the second step while the device runs the first."""
    made = TraceWriter()
    made.range(STEP_RANGE, 100, 200)
    made.kernel(GEMM, 110, 150, 250)
    made.kernel(NORM, 190, 250, 300)
    made.range(STEP_RANGE, 210, 330)
    made.kernel(GATHER, 212, 280, 340, group="5")
    made.kernel(GEMM, 220, 320, 400)
    made.kernel("Memcpy DtoD (Device -> Device)", 225, 400, 410, cat="gpu_memcpy")
    made.kernel(GATHER, 230, 420, 440, group="77")
    made.range(OPTIMIZER_RANGE, 300, 320)
    made.kernel("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>(...)", 310, 440, 500)
    made.kernel(GEMM, 400, 520, 530)  # after the step
    return made


def test_the_last_step_of_a_trace() -> None:
    recorded = read_step(two_steps().trace(), {"5": "dp_shard", "0": "world"})
    assert (recorded.start_s, recorded.end_s) == (pytest.approx(300e-6), pytest.approx(500e-6))
    found = break_down(recorded.spans, recorded.start_s, recorded.end_s)
    expected = Breakdown(
        step_time_s=200e-6,
        matmul_s=80e-6,
        attention_s=0,
        optimizer_s=60e-6,
        memory_bound_s=10e-6,
        comm_exposed_s=40e-6,
        bubble_s=0,
        launch_gaps_s=10e-6,
        comm_hidden_s=20e-6,
        comm_by_axis=[],
    )
    for field in dataclasses.fields(Breakdown):
        if field.name != "comm_by_axis":
            assert getattr(found, field.name) == pytest.approx(getattr(expected, field.name)), field.name
    by_axis = {time.axis: (time.exposed_s, time.hidden_s) for time in found.comm_by_axis}
    assert by_axis == {"dp_shard": (pytest.approx(20e-6), pytest.approx(20e-6)), None: (pytest.approx(20e-6), 0)}


def test_a_trace_of_one_step_begins_with_its_first_kernel() -> None:
    made = TraceWriter()
    made.range(STEP_RANGE, 100, 200)
    made.kernel(GEMM, 110, 150, 250)
    made.kernel(NORM, 120, 260, 300)
    recorded = read_step(made.trace(), {})
    assert (recorded.start_s, recorded.end_s) == (pytest.approx(150e-6), pytest.approx(300e-6))


def test_a_trace_without_a_step_is_refused() -> None:
    made = TraceWriter()
    made.kernel(GEMM, 110, 150, 250)
    with pytest.raises(ValueError, match="the trace holds 0 steps"):
        read_step(made.trace(), {})
    made.range(STEP_RANGE, 300, 400)
    with pytest.raises(ValueError, match="the trace holds 1 step and, in the last of them, no kernel"):
        read_step(made.trace(), {})
