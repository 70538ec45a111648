"""Persistent processes for multi-rank tests: one body, gloo on CPU or NCCL on GPUs.

Starting processes and importing torch costs seconds; a fork server and workers that live through the session bring a
2-rank test to a few tenths of a second. Traps that this file works round: DTensor's caches outlive a destroyed process
group and hold its meshes and threads, so they are cleared after every job; a failed rank leaves its peers hanging in a
collective, so after a failure or time-out all workers are replaced. In torch 2.11 something else keeps the threads of
groups alive, which slows every later job: workers that have gathered too many threads are replaced, too.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.utils.checkpoint"]
"""What every worker needs. FSDP imports ``torch._dynamo`` at its first use, which costs each process over a second."""


_MOST_THREADS = 150
"""A worker with more threads than this between two jobs is replaced. A layout's groups have some dozens."""


class RankFailed(AssertionError):
    """A rank raised; its traceback is the message."""


class Pool:
    def __init__(self, size: int, backend: str = "gloo") -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.size, self.backend = size, backend
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.context = context
        self.workers: list[tuple[Any, Connection]] = []
        self.folder = tempfile.TemporaryDirectory()
        self.jobs = 0

    def run(self, body: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 90.0) -> list[Any]:
        """``body(rank, *args)`` on ``world_size`` ranks inside an initialised process group; results by rank."""
        assert world_size <= self.size
        self._start_workers(world_size)
        self.jobs += 1
        store = Path(self.folder.name) / f"store{self.jobs}"
        for rank, (_, pipe) in enumerate(self.workers[:world_size]):
            pipe.send((body, rank, world_size, self.backend, str(store), args))
        results: list[Any] = [None] * world_size
        missing = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world_size])}
        failure: str | None = None
        while missing and failure is None:
            ready = wait(list(missing), timeout=timeout_s)
            if not ready:
                failure = f"no answer within {timeout_s} s from ranks {sorted(missing.values())}"
            for pipe in ready:
                rank = missing.pop(pipe)
                try:
                    good, value = pipe.recv()
                except EOFError:
                    good, value = False, "died"
                if not good:
                    failure = f"rank {rank}: {value}"
                results[rank] = value
        if failure is not None:
            self.close()
            raise RankFailed(failure)
        if any(_thread_count(process.pid) > _MOST_THREADS for process, _ in self.workers):
            self.close()
        return results

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers = []

    def _start_workers(self, count: int) -> None:
        while len(self.workers) < count:
            here, there = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self.workers.append((process, here))


def _thread_count(pid: int) -> int:
    """Threads of a process; 0 where the system does not tell."""
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return 0


def _serve(pipe: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            body, rank, world_size, backend, store, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, _in_group(body, rank, world_size, backend, store, args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _in_group(body: Callable[..., Any], rank: int, world_size: int, backend: str, store: str, args: Any) -> Any:
    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        return body(rank, *args)
    finally:
        dist.destroy_process_group()
        _forget_meshes()


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
    gc.collect()
