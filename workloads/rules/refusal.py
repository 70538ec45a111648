"""One thing that an external training engine cannot do. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Refusal:
    """One thing that an engine cannot do."""

    field: str
    holds: Callable[[Experiment], bool]
    why: str
    """End of the message "torchtitan 0.2.2+2 cannot run tp=2: ..."."""
    on: str | None = None
    """The refusal applies only to devices of this backend."""
    off: str | None = None
    """The refusal applies to all devices except those of this backend."""

    def speaks_of(self, backend: str) -> bool:
        return self.on in (None, backend) and self.off != backend
