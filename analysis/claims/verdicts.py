"""What a check of a claim answers with, and how many runs it takes to decide one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from analysis.rows.stats import MIN_FOR_INTERVAL

PASS, FAIL, UNKNOWN = "pass", "fail", "not enough data"
STUDY, AUDIT = "the study", "audit"
"""Who says what is checked: the study, or nobody but us, about what the study says."""
FEWEST = MIN_FOR_INTERVAL
"""Fewer runs or pairs than this on a side decide nothing."""
SAME = 0.03
"""Ratios of throughput within this of 1 count as no difference."""
_STUDY_ENGINE = "nanotron"


@dataclass(frozen=True, slots=True)
class Tally:
    """In how many of ``of`` cells (models and sizes, pairs, steps) a claim holds."""

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
    """In how many of all cells that could be compared the claim holds; None where it is not asked cell by cell."""
    kept: Tally | None = None
    """The same after what ``left_out`` says has been left out."""
    left_out: str = ""
    """By which rule cells were left out; empty where none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    name: str
    statement: str
    """What is claimed, in one sentence."""
    source: str
    """`STUDY` or `AUDIT`."""
    said_in: str
    """Where the study says it, or why it is asked."""
    computed: str
    """What the check computes."""
    holds_if: str
    """When the claim holds."""
    counted: str
    """What a `Tally` counts: pairs, models and sizes."""
    tables: tuple[str, ...]
    """Files of the report's tables that have the rows it comes from."""
    check: Callable[[pd.DataFrame], Verdict]
    """From the attempts of one measured cohort."""


def is_study(frame: pd.DataFrame) -> bool:
    """Whether all rows are of the study's published table."""
    return "study_label" in frame and bool((frame["engine"] == _STUDY_ENGINE).all())
