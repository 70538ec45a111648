"""The backend of a device's name: NVIDIA GPUs are run and planned, AMD GPUs only planned, others neither."""

from __future__ import annotations

import re
from collections.abc import Iterable

from workloads.spec.errors import InvalidSweep

PLANNED_ONLY = "rocm"
"""Backend of AMD GPUs, for which everything is predicted and nothing runs: the engine is for CUDA."""
BACKENDS = ("cuda", "cpu", PLANNED_ONLY)
_AMD = r"AMD|Instinct|Radeon|MI ?[1-9][0-9]{1,2}[AX]?|gfx[0-9]+\w*|ROCm"
_OTHERS = (
    r"Intel|Gaudi ?[0-9]*|Habana|Ponte Vecchio|TPU\w*|Trainium[0-9]*|Inferentia[0-9]*|Ascend\w*|Cambricon|MLU[0-9]+|"
    r"Hygon|DCU|Moore Threads|Apple|Cerebras|Graphcore|IPU"
)


def is_amd(name: str) -> bool:
    """Whether an accelerator of this name, the driver's or Slurm's, is AMD's."""
    return _word(name, _AMD) is not None


def refuse_wrong_backend(place: str, backend: str, names: Iterable[str]) -> None:
    """Raises `InvalidSweep` with one line if one of a device's ``names`` shows that ``backend`` does not fit it."""
    for name in names:
        if (word := _word(name, _OTHERS)) is not None:
            raise InvalidSweep(
                f"{place}: device {name!r} is no NVIDIA or AMD GPU ({word}); other accelerators are neither run nor "
                "predicted"
            )
        if backend == "cuda" and is_amd(name):
            raise InvalidSweep(
                f"{place}: device {name!r} is an AMD GPU; give backend: {PLANNED_ONLY}, with which it can be planned "
                "and not run"
            )
        if backend == PLANNED_ONLY and "nvidia" in name.lower():
            raise InvalidSweep(f"{place}: device {name!r} is an NVIDIA GPU; give backend: cuda")


def _word(name: str, words: str) -> str | None:
    text = re.sub("[_-]", " ", name)
    match = None if "nvidia" in text.lower() else re.search(rf"\b(?:{words})\b", text, re.IGNORECASE)
    return match[0] if match is not None else None
