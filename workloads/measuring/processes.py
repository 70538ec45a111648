"""Runs a function on processes of this machine, one for each rank: with gloo on a CPU, with NCCL on GPUs."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from results.errors import UltrasweepError


class RankFailed(UltrasweepError):
    """A rank has ended with an error."""


def on_ranks(
    work: Callable[[int], Any],
    world_size: int,
    device: str,
    *,
    preload: Sequence[str] = (),
    timeout_s: float = 600.0,
    first_gpu: int = 0,
) -> list[Any]:
    """Run ``work(rank)`` on every rank inside an initialised process group; returns the results by rank.

    ``work`` must be picklable; ranks are forked from a process that has imported the modules of ``preload``.
    ``timeout_s``: longest time in seconds during which no rank ends. On ``device`` ``cuda`` rank ``r`` uses GPU
    ``first_gpu + r``, modulo the number of GPUs. Raises `RankFailed` with the error of the first rank that fails; the
    other ranks are killed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload, "torch._dynamo"])
    with tempfile.TemporaryDirectory(prefix="ultrasweep-ranks-") as name:
        folder = Path(name)
        ranks = [
            context.Process(target=_run, args=(work, rank, world_size, device, folder, first_gpu), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            _wait_for(ranks, folder, timeout_s)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [_read(folder / f"rank_{rank}.pt") for rank in range(world_size)]


def _wait_for(ranks: Sequence[Any], folder: Path, timeout_s: float) -> None:
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        ended = wait(list(running), timeout_s)
        if not ended:
            raise RankFailed(f"ranks {sorted(running.values())} have not ended within {timeout_s:.0f} s")
        for sentinel in ended:
            assert isinstance(sentinel, int)
            rank = running.pop(sentinel)
            if (code := ranks[rank].exitcode) != 0:
                error = folder / f"rank_{rank}.error"
                reason = error.read_text() if error.is_file() else f"ended with status {code}"
                hint = " (killed: it may have had too little memory)" if code == -9 else ""
                raise RankFailed(f"rank {rank} of {len(ranks)}: {reason}{hint}")


def _read(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False)  # written by a process of this program


def _run(work: Callable[[int], Any], rank: int, world_size: int, device: str, folder: Path, first_gpu: int) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device((first_gpu + rank) % torch.cuda.device_count())
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        torch.save(work(rank), folder / f"rank_{rank}.pt")
        dist.barrier()  # gloo peers may still be reading from this rank
    except BaseException as error:
        (folder / f"rank_{rank}.error").write_text(f"{type(error).__name__}: {error}")
        if not isinstance(error, UltrasweepError):
            traceback.print_exc()
        os._exit(1)
    os._exit(0)
