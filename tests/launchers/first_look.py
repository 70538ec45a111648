"""Reads all waiting points of a queue once, as a pilot does: ``python -m tests.launchers.first_look SWEEP``."""

from __future__ import annotations

import sys
from pathlib import Path

from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import SweepDir

if __name__ == "__main__":
    print(len(QueueReader(SweepDir.open(Path(sys.argv[1])), "pilot", print).waiting()))
