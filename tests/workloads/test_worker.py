"""A rank's whole life, in a forked process as the pilot does it: result, failure, and what each is called."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tests.pool import fork_server
from workloads.contract import protocol
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import Phase, Task
from workloads.costs.shape.params import COMPUTE_BYTES, MASTER_BYTES
from workloads.engine.collectives import groups
from workloads.engine.training.data_parallel import compute_dtype
from workloads.measuring.step import Diverged
from workloads.spec.cluster import ClusterSpec, DeviceSpec, LinkSpec
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PLANNED_FORMATS, Precision
from workloads.spec.model_spec import MLASpec, ModelSpec
from workloads.worker import classify, described, run_rank

MODEL = ModelSpec(
    name="worker",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=128,
)
LATENT = MLASpec(q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16)
ROOT = Path(__file__).resolve().parents[2]


def cluster(memory_bytes: int | None = None) -> ClusterSpec:
    return ClusterSpec(
        name="cpu",
        backend="cpu",
        device=DeviceSpec(name="cpu", memory_bytes=memory_bytes),
        devices_per_node=8,
        intra_node=LinkSpec(bandwidth=1e9, latency_s=1e-4),
        inter_node=None,
    )


@dataclass
class LastBeat:
    """A `workloads.contract.beats.Beat` that can be sent to another process: it keeps the last one in a file."""

    folder: Path
    rank: int

    @property
    def file(self) -> Path:
        return self.folder / f"beat_{self.rank}"

    def __call__(self, phase: Phase, step: int | None = None, *, failed: bool = False) -> None:
        self.file.write_text(f"{phase} {step} {failed}")


def run(folder: Path, experiment: Experiment, *, timeout_s: float = 60, **fields: Any) -> list[int | None]:
    """Exit codes of all ranks; null for one that has not ended ``timeout_s`` after the rank before it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    task = Task(
        **{
            "attempt_id": "a",
            "experiment": experiment,
            "measure": MeasureSpec(warmup_steps=1, timed_steps=2),
            "cluster": cluster(),
            "rendezvous_port": port,
            **fields,
        }
    )
    protocol.write_task(folder, task)
    context = fork_server()
    ranks = [
        context.Process(target=run_rank, args=(folder, r, r, LastBeat(folder, r))) for r in range(experiment.world_size)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout_s)
    return [rank.exitcode for rank in ranks]


def experiment(**layout: Any) -> Experiment:
    return Experiment.canonical(**{"model": MODEL, "seq_len": 32, "global_batch_size": 4, **layout})


@pytest.mark.slow
def test_two_ranks_measure_one_step_alike(tmp_path: Path) -> None:
    assert run(tmp_path, experiment(dp=2, zero_stage=1)) == [0, 0]
    first, second = (protocol.read_result(tmp_path, rank) for rank in range(2))
    assert first is not None
    assert second is not None
    assert [s.is_warmup for s in first.steps] == [True, False, False]
    assert [s.loss for s in first.steps] == [s.loss for s in second.steps]
    for step in first.steps:
        assert step.step_time_s == pytest.approx(
            step.forward_backward_s + step.reduce_exposed_s + step.optimizer_s + step.pipeline_idle_s
        )
    assert list(first.phase_started_at) == ["spawn", "rendezvous", "build", "warmup", "step", "teardown"]
    assert first.coordinates["dp"] == 0
    assert second.coordinates["dp"] == 1
    assert LastBeat(tmp_path, 0).file.read_text() == "done None False"


@pytest.mark.slow
def test_a_row_can_say_why_steps_ran_eagerly(tmp_path: Path) -> None:
    assert run(tmp_path, experiment(cuda_graph="auto")) == [0]
    result = protocol.read_result(tmp_path, 0)
    assert result is not None
    reason = "CUDA graphs need CUDA devices, not backend=cpu"
    assert (result.cuda_graph, result.not_captured) == ("none", reason)
    assert run(tmp_path / "refused", experiment(cuda_graph="step")) == [1]
    error = protocol.read_error(tmp_path / "refused", 0)
    assert error is not None
    assert error.kind == "unsupported" and reason in error.message


@pytest.mark.slow
def test_a_cpu_rank_gets_the_memory_its_cluster_promises(tmp_path: Path) -> None:
    # One tensor alone is too large: among many small ones it may be native code that meets the limit, and dies of it.
    wide = experiment(micro_batch_size=4, seq_len=2**18, global_batch_size=4)
    codes = run(tmp_path, wide, cluster=cluster(memory_bytes=64 * 2**20))
    assert codes == [1]
    error = protocol.read_error(tmp_path, 0)
    assert error is not None
    assert error.kind == "oom", error.message
    assert protocol.read_result(tmp_path, 0) is None
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY, "the parent keeps its own limit"


@pytest.mark.slow
def test_a_lonely_rank_gives_up_and_says_where(tmp_path: Path) -> None:
    case = experiment(dp=2)
    task = Task(
        attempt_id="a",
        experiment=case,
        measure=MeasureSpec(),
        cluster=cluster(),
        rendezvous_port=1,  # nobody listens there
        collective_timeout_s=1.0,
    )
    protocol.write_task(tmp_path, task)
    beat = LastBeat(tmp_path, 1)
    rank = fork_server().Process(target=run_rank, args=(tmp_path, 1, 1, beat))
    rank.start()
    rank.join(30)
    error = protocol.read_error(tmp_path, 1)
    assert rank.exitcode == 1
    assert error is not None
    assert (error.phase, error.kind) == ("rendezvous", "nccl_error")
    assert beat.file.read_text() == "rendezvous None True"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "crash"),
        (torch.distributed.DistBackendError("NCCL error in: ncclUniqueId"), "nccl_error"),
        (torch.distributed.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), "oom"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), "nccl_error"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (ValueError("shape mismatch in the NCCL buffer that gloo uses"), "crash"),
        (RuntimeError("The size of tensor a must match; NCCL has nothing to do with it"), "crash"),
        (Diverged("loss of step 3 is nan"), "diverged"),
        (UnsupportedByEngine("no"), "unsupported"),
        (KeyError("x"), "crash"),
    ],
)
def test_a_failure_is_called_by_its_name(error: BaseException, kind: str) -> None:
    assert classify(error) == kind


def _raised_from(*chain: Exception) -> Exception:
    for error, cause in pairwise(chain):
        error.__cause__ = cause
    return chain[0]


def test_a_failure_that_torch_wraps_is_called_by_its_cause() -> None:
    """As `torch.distributed.pipelining` does with whatever a stage raises."""
    stage = RuntimeError("\n    Failed to run stage backward:\n    Stage output: Tensor")
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.96 GiB")
    assert described(_raised_from(stage, ValueError("between"), full)) == (
        "oom",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB",
    )
    kind, message = described(_raised_from(stage, KeyError("x")))
    assert kind == "crash"
    assert message.startswith("RuntimeError: Failed to run stage backward:\nStage output"), "no empty first line"
    assert message.endswith("because of KeyError: 'x'")
    itself = KeyError("x")
    assert described(_raised_from(itself, itself)) == ("crash", "KeyError: 'x'")


def test_what_the_engine_lacks_is_refused_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "lacking", lambda experiment: ["a fourth kind of fp8", "ten dimensions"])
    with pytest.raises(UnsupportedByEngine, match="cannot run a fourth kind of fp8, ten dimensions yet") as refused:
        groups.make_groups(experiment(), 0, torch.device("cpu"))
    assert classify(refused.value) == "unsupported"


def test_every_precision_has_a_dtype_and_a_size() -> None:
    assert set(COMPUTE_BYTES) == set(MASTER_BYTES) == set(get_args(Precision))
    for precision, size in COMPUTE_BYTES.items():
        if precision in PLANNED_FORMATS:
            with pytest.raises(UnsupportedByEngine, match=f"precision={precision} yet"):
                compute_dtype(experiment(precision=precision))
            continue
        assert compute_dtype(experiment(precision=precision)).itemsize == size


@pytest.mark.slow(seconds=3)
def test_what_every_rank_needs_is_imported_before_the_ranks_are_forked(tmp_path: Path) -> None:
    """FSDP imports torch._dynamo at its first use, which costs each rank more than a second."""
    code = (
        "import sys, os; from workloads import worker; worker.preload(); import torch\n"
        "print('torch._dynamo' in sys.modules, torch.cuda.is_initialized(), len(os.listdir('/proc/self/task')))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["True", "False", "1"], "one thread: with more of them a fork is not safe"


@pytest.mark.gpu
def test_ranks_forked_after_the_imports_can_use_the_device() -> None:
    code = (
        "import os; from pathlib import Path; from workloads import worker\n"
        "worker.preload()\n"
        "opened = [str(fd.readlink()) for fd in Path('/proc/self/fd').iterdir() if fd.exists()]\n"
        "assert not [name for name in opened if 'nvidia' in name], opened\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    import torch\n"
        "    os._exit(int(torch.ones(3, device='cuda').sum().item()))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.stdout.split() == ["3"], told.stderr
