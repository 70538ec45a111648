"""What one call of ``run`` or ``watch`` did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Counts are of points unless they say otherwise."""

    outcomes: Mapping[str, int]
    """Finished points by outcome, those of earlier runs included."""
    attempts: int
    """Attempts made by this run."""
    left: int
    """Points that still wait."""
    too_wide: int
    """Of those, how many need more devices than this machine gives them."""
    interrupted: bool
    message: str = ""
    """Why points are left although nobody interrupted, empty otherwise."""
    detached: bool = False
    """Pilots go on without this process."""

    @property
    def exit_code(self) -> int:
        """0: every point has its row (failures are rows too). 130: interrupted. 1: something keeps points waiting."""
        if self.interrupted:
            return 130
        return 1 if self.message else 0
