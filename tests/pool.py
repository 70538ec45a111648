"""Persistent processes for multi-rank tests: one body, gloo on CPU or NCCL on GPUs.

Starting processes and importing torch costs seconds; a fork server and workers that live through the session bring a
2-rank test to a few tenths of a second. Traps that this file works round: DTensor's caches outlive a destroyed process
group and hold its meshes and threads, so they are cleared after every job; a failed rank leaves its peers hanging in a
collective, so after a failure or time-out all workers are replaced. In torch 2.11 something else keeps the threads of
groups alive, which slows every later job: workers that have gathered too many threads are replaced, too.

A shared machine may stop one process for a minute, which ends a collective of the others. A job that timed out
therefore runs once more; a warning says so, with the place where each rank stood. What hangs by its code does so twice.
So does a job one of whose processes died without a word of Python: a worker that had run hundreds of layouts once ended
in glibc's "malloc(): unaligned tcache chunk detected", the same layout passed in fresh ones.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import io
import multiprocessing.context
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    *("torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.checkpoint"),
    *("torch.distributed.tensor.debug", "workloads.measuring.step", "workloads.parity.training"),
    *("torch.testing._internal.distributed.fake_pg", "workloads.rehearse", "tests.workloads.engine.parity"),
    "tests.frozen",
]
"""Modules that processes of tests need, imported once before they are forked. FSDP imports ``torch._dynamo`` at its
first use, which costs each process over a second."""


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have imported `PRELOAD`. A worker of tests has one fork server, so whoever starts it must
    name what all need."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    return context


_MOST_THREADS = 150
"""A worker with more threads than this between two jobs is replaced. A layout's groups have some dozens."""


_START_TIMEOUT_S = 180.0
"""Importing takes nothing where the fork server has done it, and seconds where another user of it started it first."""


_TIME_OUTS = ("Timed out waiting", "timed out after", "Wait timeout", "Watchdog caught collective operation timeout")
"""How gloo, NCCL and a store say that a peer did not answer in time."""


class RankFailed(AssertionError):
    """A rank raised; its traceback is the message."""


class RankDied(RankFailed):
    """A rank's process is gone; the message says by which signal or with which code."""


class RankTimedOut(RankFailed):
    """A rank waited for another one too long, or did not answer; the message says where each rank stood."""


class Pool:
    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self.context = fork_server()
        self.workers: list[tuple[Any, Connection]] = []
        self.folder = tempfile.TemporaryDirectory()
        self.jobs = 0

    def run(self, body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
        """``body(rank, *args)`` on ``world_size`` ranks inside an initialised process group; results by rank.

        Raises `RankFailed` where a rank raises, and where the second attempt has ended like the first `RankTimedOut` or
        `RankDied`.
        """
        assert world_size <= self.size
        try:
            return self._run_once(body, world_size, args, timeout_s)
        except (RankTimedOut, RankDied) as first:
            warnings.warn(f"ranks timed out or died and start again: {first}", stacklevel=2)
        return self._run_once(body, world_size, args, timeout_s)

    def _run_once(
        self, body: Callable[..., Any], world_size: int, args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        self._start_workers(world_size)
        self.jobs += 1
        store = Path(self.folder.name) / f"store{self.jobs}"
        for rank, (_, pipe) in enumerate(self.workers[:world_size]):
            pipe.send((body, rank, world_size, self.backend, str(store), args))
        results: list[Any] = [None] * world_size
        missing = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world_size])}
        failure: str | None = None
        timed_out = False
        while missing and failure is None:
            ready = wait(list(missing), timeout=timeout_s)
            if not ready:
                timed_out = True
                failure = f"no answer within {timeout_s} s from ranks {sorted(missing.values())}"
            for pipe in ready:
                rank = missing.pop(pipe)
                try:
                    good, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    good, value = False, "died"
                if not good:
                    timed_out = any(words in value for words in _TIME_OUTS)
                    failure = f"rank {rank}: {value}"
                results[rank] = value
        if failure is not None:
            # A peer may have said first that it lost the connection.
            died = self._deaths(world_size)
            stacks = self._stacks(sorted(missing.values())) if timed_out else ""
            self.close()
            raise (RankDied if died else RankTimedOut if timed_out else RankFailed)(failure + died + stacks)
        if any(_thread_count(process.pid) > _MOST_THREADS for process, _ in self.workers):
            self.close()
        return results

    def _stacks(self, ranks: list[int]) -> str:
        """Where these ranks stand; a process that the machine has stopped writes nothing within the second."""
        ranks = [rank for rank in ranks if self.workers[rank][0].exitcode is None]
        for rank in ranks:
            os.kill(self.workers[rank][0].pid, signal.SIGUSR1)
        time.sleep(1.0)
        found = {rank: _stack_file(self.folder.name, self.workers[rank][0].pid) for rank in ranks}
        return "".join(f"\nrank {rank} stands at\n{file.read_text()}" for rank, file in found.items() if file.exists())

    def _deaths(self, world_size: int) -> str:
        """The exit codes of ranks whose processes are gone; a dying one has a second for it."""
        found = ""
        for rank, (process, _) in enumerate(self.workers[:world_size]):
            process.join(1.0 / world_size)
            if process.exitcode is not None:
                found += f"\nrank {rank} is gone, exit code {process.exitcode}"
        return found

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers = []

    def _start_workers(self, count: int) -> None:
        """Start what lacks of ``count`` workers and wait for their imports: a time-out is for the body alone."""
        new = []
        while len(self.workers) < count:
            here, there = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(there, self.folder.name), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))
            new.append(here)
        for pipe in new:
            try:
                if not pipe.poll(_START_TIMEOUT_S):
                    self.close()
                    raise RankTimedOut(f"a worker has not imported its modules within {_START_TIMEOUT_S:.0f} s")
                pipe.recv()
            except (EOFError, ConnectionResetError) as error:
                self.close()
                raise RankDied("a worker ended while it imported its modules") from error


def _thread_count(pid: int) -> int:
    """Threads of a process; 0 where the system does not tell."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0


def _stack_file(folder: str, pid: int) -> Path:
    return Path(folder) / f"stack{pid}"


def _serve(pipe: Connection, folder: str) -> None:
    import torch

    for module in PRELOAD:
        importlib.import_module(module)
    faulthandler.register(signal.SIGUSR1, file=_stack_file(folder, os.getpid()).open("w"), all_threads=True)
    torch.set_num_threads(1)
    _forget_garbage()
    pipe.send("ready")
    while True:
        try:
            body, rank, world_size, backend, store, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = _packed((True, _in_group(body, rank, world_size, backend, store, args)))
        except BaseException:
            answer = _packed((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _packed(value: Any) -> bytes:
    """Pickle with the bytes of tensors inside. torch's reduction for pipes opens a file of shared memory for each one,
    and a layout has hundreds of small ones."""
    buffer = io.BytesIO()
    _Packer(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


class _Packer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is torch.Tensor and value.device.type == "cpu" and value.layout is torch.strided:
            flat = value.detach().contiguous().view(-1)
            return _unpacked, (flat.view(torch.uint8).numpy().tobytes(), value.dtype, tuple(value.shape))
        return NotImplemented


def _unpacked(content: bytes, dtype: Any, shape: tuple[int, ...]) -> Any:
    import torch

    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


def _in_group(body: Callable[..., Any], rank: int, world_size: int, backend: str, store: str, args: Any) -> Any:
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    joined = dist.FileStore(store, world_size)
    dist.init_process_group(backend, store=joined, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    try:
        _wait_for_all(joined, rank, world_size)
        return body(rank, *args)
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _wait_for_all(store: Any, rank: int, world_size: int) -> None:
    """Wait until all ranks have connected: one whose body ended sooner would close its connections, and peers that are
    still connecting would fail."""
    store.set(f"joined{rank}", "")
    store.wait([f"joined{peer}" for peer in range(world_size)], timedelta(seconds=60))


def _forget_meshes() -> None:
    """Clear every DTensor cache that keeps a mesh, and with it a destroyed group's threads, alive."""
    import torch.distributed.tensor.debug as debug

    debug._clear_sharding_prop_cache()
    for module, path in (
        ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache"),
        ("torch.distributed.tensor._redistribute", "_gen_transform_infos.cache_clear"),
        ("torch.distributed.tensor._collective_utils", "MeshTopoInfo.build_from_mesh.cache_clear"),
        ("torch.distributed.tensor._sharding_prop", "ShardingPropagator._propagate_tensor_meta_cached.cache_clear"),
    ):
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is not None:
            found()
    _forget_garbage()


_looked_at = 0
"""Modules that were imported when their objects were last taken out of later collections."""


def _forget_garbage() -> None:
    """Objects of imported modules are never garbage: without them a collection is thirty times faster. Jobs import more
    of them: compiled layers have Inductor's."""
    global _looked_at
    gc.collect()
    if len(sys.modules) != _looked_at:
        gc.freeze()
        _looked_at = len(sys.modules)
