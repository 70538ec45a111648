"""Whole runs on a cluster that exists only on PATH; the test itself does the pilots' work."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from launchers.slurm import submit
from launchers.slurm.options import SlurmOptions
from launchers.state import queue
from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import SweepDir
from launchers.status.run_summary import RunSummary
from tests.launchers.scripted import settings


def run(sweep: SweepDir, *, detach: bool = False, feed: Callable[[], str] = lambda: "", **options: Any) -> RunSummary:
    chosen = SlurmOptions(**{"time_min": 5, **options})
    launch = settings(num_devices=2)
    return submit.run_slurm(sweep, launch, chosen, live=False, command="test", detach=detach, feed=feed)


@contextmanager
def meanwhile(ready: Callable[[], bool], act: Callable[[], object]) -> Iterator[None]:
    """Run ``act`` in a thread as soon as ``ready`` is true."""

    def wait() -> None:
        until = time.monotonic() + 20
        while not ready() and time.monotonic() < until:
            time.sleep(0.02)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    yield
    thread.join()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def finish_all(sweep: SweepDir) -> None:
    queue_reader = QueueReader(sweep, "p", lambda line: None)
    while (claim := queue_reader.claim_next(lambda waiting: waiting)) is not None:
        queue.finish(claim, "ok")
