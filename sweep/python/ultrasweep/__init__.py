"""The Python interface: plan, advise, predict and memory, and measured rows, as pandas frames and dataclasses.

Every function does what the command of its name does, takes plain Python values in the place of words on a command
line, and raises `UltrasweepError` with the same text. Nothing runs on a GPU.
"""

from __future__ import annotations

from results.errors import UltrasweepError
from ultrasweep.advice import Advice, advise
from ultrasweep.layout_memory import LayoutMemory, memory
from ultrasweep.measured import Results, load
from ultrasweep.plans import Plan, plan
from ultrasweep.predictions import Predictions, predict

__all__ = [
    "Advice",
    "LayoutMemory",
    "Plan",
    "Predictions",
    "Results",
    "UltrasweepError",
    "advise",
    "load",
    "memory",
    "plan",
    "predict",
]
