"""A pilot whose ranks run another engine that fails as the seed of the experiment says. Run as a pilot with
``python -m tests.workloads.adapters.faulty SWEEP_DIR PILOT_ID``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch

from launchers.pilot import command
from workloads import worker
from workloads.contract import protocol
from workloads.contract.beats import Beat

FAULTS = {1: "ok", 2: "oom", 3: "hang", 4: "raise", 5: "ok"}
"""By seed: what the engine's second step does."""


def run_rank(folder: Path, rank: int, local_rank: int, beat: Beat) -> NoReturn:
    fault = FAULTS[protocol.read_task(folder).experiment.seed]
    if fault != "ok":
        _plant(fault)
    worker.run_rank(folder, rank, local_rank, beat)


def _plant(fault: str) -> None:
    """In torchtitan's own training step, behind the adapter."""
    from torchtitan.train import Trainer

    original, calls = Trainer.train_step, []

    def train_step(trainer: Any, batches: Any) -> None:
        calls.append(fault)
        if len(calls) == 2:
            if fault == "oom":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if fault == "raise":
                raise RuntimeError("a tensor of another shape")
            time.sleep(600)
        original(trainer, batches)

    Trainer.train_step = train_step


if __name__ == "__main__":
    sys.exit(command.main(sys.argv[1:], run_rank=run_rank))
