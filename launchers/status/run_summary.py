"""Summary of one call of ``run`` or ``watch``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from launchers.status.status import SweepStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Result of one call of ``run`` or ``watch``. Counts are of points unless stated otherwise."""

    outcomes: Mapping[str, int]
    """Finished points by outcome, including those of earlier runs."""
    attempts: int
    """Attempts of this run."""
    left: int
    """Points that still wait or run."""
    too_wide: int
    """Number of remaining points that need more devices than this run can give them."""
    interrupted: bool
    message: str = ""
    """Why points are left although nobody interrupted the run; empty otherwise."""
    detached: bool = False
    """Whether pilots keep running without this process."""

    @property
    def exit_code(self) -> int:
        """0: every point has its row (a failure has one too). 130: interrupted. 1: points are left that cannot run."""
        if self.interrupted:
            return 130
        return 1 if self.message else 0

    def with_message(self, message: str) -> RunSummary:
        """This summary with one more reason why points are left."""
        return dataclasses.replace(self, message="; ".join(part for part in (self.message, message) if part))


def summarize(
    before: SweepStatus,
    after: SweepStatus,
    *,
    too_wide: int = 0,
    interrupted: bool = False,
    message: str = "",
    detached: bool = False,
) -> RunSummary:
    """The summary of a run from the sweep's status before and after it."""
    return RunSummary(
        outcomes=after.done,
        attempts=len(after.attempts) - len(before.attempts),
        left=after.left,
        too_wide=too_wide,
        interrupted=interrupted,
        message="; ".join(part for part in (message, after.damage) if part),
        detached=detached,
    )
