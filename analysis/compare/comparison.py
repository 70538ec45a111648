"""A comparison of two results: reading both, matching their points, and judging the changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.compare import findings, matching, moved, verdicts
from analysis.page.render import PageTable
from analysis.rows.load import load
from results.errors import InvalidResults
from results.tables import store


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a comparison, in sentences and tables. Ratios are B over A."""

    verdicts: str | None
    """Number of matched points with each verdict; None if no point matched."""
    sides: tuple[str, str]
    """One line each that describes A and B."""
    cautions: list[str]
    """Differences that affect all numbers: A and B differ in method, cluster, device or engine."""
    alarms: list[str]
    """Differences that invalidate speeds: the losses differ."""
    matching: list[str]
    """How points were matched, and why others were not."""
    found: list[str]
    """Sentences on what changed."""
    pairs: pd.DataFrame
    """The matched points, as `analysis.compare.verdicts.with_verdicts` returns them."""
    only_a: pd.DataFrame
    """Points of A without a partner, with the columns of `analysis.compare.matching.points`."""
    only_b: pd.DataFrame
    by_axis: pd.DataFrame
    """Table of `analysis.compare.moved.by_axis`."""
    noise: moved.Noise
    problems: tuple[str, ...]
    """One line for each file that could not be read."""

    def tables(self, most: int) -> list[PageTable]:
        """Short tables in words: changes by axis, and at most ``most`` points that changed."""
        return [*findings.axis_tables(self.by_axis), findings.moved_table(self.pairs, most)]


def compare(
    a: Path,
    b: Path,
    methods: tuple[str, str] | None = None,
    across: Sequence[str] = (),
    noise: float | None = None,
    engines: tuple[str, str] | None = None,
) -> Comparison:
    """Match the results at ``a`` and ``b`` and judge every matched point.

    ``methods``: methods of A's and B's rows, by default one that both have. ``across``: axes in which partners may
    differ. ``noise``: a fraction that replaces the estimate from the data. ``engines``: engines of A's and B's rows, by
    default all. Raises `InvalidResults` if there is nothing comparable.
    """
    loaded = [load(path) for path in (a, b)]
    for path, read in zip((a, b), loaded, strict=True):
        if read.attempts.empty and read.problems:
            raise InvalidResults(f"{path} has no row that can be read: {read.problems[0]}")
    methods = matching.choose_methods(loaded[0].attempts, loaded[1].attempts, methods)
    rows = [results.attempts[results.attempts["method"] == of] for results, of in zip(loaded, methods, strict=True)]
    if engines is not None:
        rows = [
            matching.of_engine(part, *named) for part, named in zip(rows, zip("AB", engines, strict=True), strict=True)
        ]
    points = [
        matching.points(part, _step_times(path) if of == "measured" else None)
        for part, path, of in zip(rows, (a, b), methods, strict=True)
    ]
    matches = matching.match(points[0], points[1], across)
    judged_by = moved.noise_of(points[0], points[1], noise)
    same_numbers = not set(across) & set(moved.SAME_NUMBERS) and "seed" not in matches.unrecorded
    pairs = verdicts.with_verdicts(moved.judged(matches.pairs, judged_by, compare_losses=same_numbers), judged_by)
    ignored = (*matches.crossed, *matches.unrecorded, *across)
    why_a = matching.why_unmatched(matches.only_a, points[1], ignored)
    why_b = matching.why_unmatched(matches.only_b, points[0], ignored)
    beside = findings.beside(rows[0], rows[1])
    return Comparison(
        verdicts=verdicts.sentence(pairs),
        sides=(
            findings.side("A", a, rows[0], len(points[0])),
            findings.side("B", b, rows[1], len(points[1])),
        ),
        cautions=findings.cautions(rows[0], rows[1]),
        alarms=findings.alarms(pairs),
        matching=[*([beside] if beside else []), *findings.matched(matches, why_a, why_b, across)],
        found=findings.found(pairs, judged_by),
        pairs=pairs,
        only_a=matches.only_a,
        only_b=matches.only_b,
        by_axis=moved.by_axis(pairs),
        noise=judged_by,
        problems=(*loaded[0].problems, *loaded[1].problems),
    )


def regressions(pairs: pd.DataFrame, fraction: float) -> pd.DataFrame:
    """Pairs that regressed by more than ``fraction`` of the throughput, or because B does not finish."""
    return pairs[(pairs["verdict"] == verdicts.REGRESSION) & ~(pairs["ratio"] >= 1 - fraction)]


def not_held(pairs: pd.DataFrame, fraction: float) -> pd.DataFrame:
    """Pairs as much slower or failing in B whose verdict is not a regression: method or machine changed, or unknown
    spread."""
    slower = (pairs["ratio"] < 1 - fraction) & (pairs["verdict"] != verdicts.NOISE)
    failing = (pairs["outcome_a"] == "ok") & (pairs["outcome_b"] != "ok")
    return pairs[(slower | failing) & (pairs["verdict"] != verdicts.REGRESSION)]


def _step_times(path: Path) -> Mapping[str, Sequence[float]]:
    """Time in seconds of every timed step by attempt, of its slowest rank; empty if steps are not recorded."""
    if not path.is_dir():
        return {}
    steps = store.scan(path, "steps").table.select(["attempt_id", "step", "is_warmup", "step_time_s"]).to_pandas()
    timed = steps[steps["is_warmup"].eq(False) & steps["step_time_s"].between(0, math.inf, inclusive="neither")]
    slowest = timed.groupby(["attempt_id", "step"])["step_time_s"].max()
    return {str(attempt): times.tolist() for attempt, times in slowest.groupby(level="attempt_id")}
