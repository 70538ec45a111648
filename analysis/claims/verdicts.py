"""The result of a check of a claim, and the number of runs it takes to decide one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from analysis.rows.stats import MIN_FOR_INTERVAL

PASS, FAIL, UNKNOWN = "pass", "fail", "not enough data"
STUDY, AUDIT = "the study", "audit"
"""Source of a claim: the study itself, or our audit of what the study says."""
FEWEST = MIN_FOR_INTERVAL
"""Smallest number of runs or pairs on each side that can decide a claim."""
SAME = 0.03
"""Largest distance from 1 of a ratio of throughputs that counts as no difference."""
_STUDY_ENGINE = "nanotron"


@dataclass(frozen=True, slots=True)
class Tally:
    """Number of cells (models and sizes, pairs, steps), out of ``of``, in which a claim holds."""

    holds: int
    of: int

    def __str__(self) -> str:
        return f"{self.holds} of {self.of}"


@dataclass(frozen=True, slots=True)
class Verdict:
    verdict: str
    """`PASS`, `FAIL` or `UNKNOWN`."""
    evidence: str
    """What was compared, how many runs or pairs, and the numbers; or what is missing."""
    compared: Tally | None = None
    """Tally over all comparable cells; None if the claim is not checked by cell."""
    kept: Tally | None = None
    """Tally over the cells that remain after the rule ``left_out``."""
    left_out: str = ""
    """Rule by which cells were left out; empty if none were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyClaim:
    name: str
    statement: str
    """The claim in one sentence."""
    source: str
    """`STUDY` or `AUDIT`."""
    said_in: str
    """Where the study says it, or why it is checked."""
    computed: str
    """Computation of the check, in words."""
    holds_if: str
    """Condition under which the claim holds."""
    counted: str
    """What a `Tally` counts: pairs, models and sizes."""
    tables: tuple[str, ...]
    """Names of the report's tables with the rows behind the check."""
    check: Callable[[pd.DataFrame], Verdict]
    """Function from the attempts of one measured cohort to the verdict."""


def is_study(frame: pd.DataFrame) -> bool:
    """Whether all rows are of the study's published table."""
    return "study_label" in frame and bool((frame["engine"] == _STUDY_ENGINE).all())
