"""Chooses what is recomputed where a grid says ``recompute: auto``: what is predicted to take least time within the
budget.

The budget counts everything on a device: tensors, the workspace of matrix products and what the cluster reserves.
`workloads.predict.fitting_recompute` finds the least recomputation of every stage, within the whole budget, and within
the share of the device above which its allocator takes time (`workloads.predict.near_full`). Of these and every word
that fits in all stages alike, the plan's own forecast decides; of those that it does not tell apart
(`sweep.grids.step_time.ALIKE`), the one that repeats least. So no word of a grid that fits the same budget is predicted
to be faster by more than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from results.text.numbers import format_bytes
from sweep.grids.expand import Expansion, GridPoint
from sweep.grids.step_time import ALIKE
from sweep.grids.walk import Progress, silent
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import Known
from workloads.costs.memory.estimate import peak_stage, rank_peak_bytes
from workloads.costs.shape.partition import with_word
from workloads.costs.time.known_rates import absent_rates
from workloads.costs.time.step_times import StepTimes
from workloads.predict import near_full
from workloads.predict.fitting_recompute import Fit, FittingRecompute, words_of
from workloads.rules.engine_support import is_own
from workloads.rules.layout_rules import violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment

_PROGRESS_EVERY = 100
GIB = 2**30


class Chosen(NamedTuple):
    """The recomputation of one layout."""

    recompute: str
    fits: bool
    why: str
    """One line with the peaks of the stages and the budget."""


def with_choices(
    expansion: Expansion, cluster: ClusterSpec, known: Known | None = None, progress: Progress = silent
) -> Expansion:
    """The expansion with the chosen recomputation in every point that is to have one. Equal runs that this makes count
    as duplicates; the one with the larger budget stays. Raises `InvalidSweep` where nothing can be chosen: for other
    engines, and on clusters whose memory or rates are not known."""
    wanted = [point for point in expansion.points if point.is_auto]
    if not wanted:
        return expansion
    chosen = iter(choose([(one.experiment, one.budget_gib) for one in wanted], Forecast.of(cluster, known), progress))
    points: dict[Experiment, GridPoint] = {}
    duplicates = expansion.duplicates
    for point in expansion.points:
        if point.is_auto and (choice := next(chosen)) is not None:
            experiment = with_word(point.experiment, choice.recompute)
            point = dataclasses.replace(point, experiment=experiment, chosen=choice.why, fits=choice.fits)
        other = points.get(point.experiment)
        duplicates += other is not None
        if other is None or _is_larger(point, other):
            points[point.experiment] = point
    return dataclasses.replace(expansion, points=tuple(points.values()), duplicates=duplicates)


def choose(
    layouts: Sequence[tuple[Experiment, float | None]], forecast: Forecast, progress: Progress = silent
) -> list[Chosen | None]:
    """The recomputation of each layout, given with its budget in GiB (None: the device's memory). None for a layout
    that breaks a rule, whatever it recomputes."""
    cluster = forecast.cluster
    _refuse(layouts, cluster)
    search = FittingRecompute(StepTimes(cluster))
    found: list[_Found | None] = []
    for done, (e, budget) in enumerate(layouts):
        if not done % _PROGRESS_EVERY:
            progress("recomputation chosen", done, len(layouts))
        rules = [one for one in violations(e, cluster) if one.rule != "engine_support"]
        found.append(None if rules else _found(search, e, tensor_limit(cluster, budget), cluster))
    candidates = [with_word(e, text) for (e, _), one in zip(layouts, found, strict=True) if one for text in one.peaks]
    times = iter(forecast.times(candidates))
    result: list[Chosen | None] = []
    for (e, budget), one in zip(layouts, found, strict=True):
        if one is None:
            result.append(None)
            continue
        seconds = {}
        for text, peak in one.peaks.items():
            time = next(times)
            assert time is not None  # the cluster's rates are known
            seconds[text] = forecast.near_full(time, peak).step_time_s
        text = _simplest(e, seconds, search.times)
        why = _why(text, _peaks(e, text), cluster, budget, fits=one.fits)
        result.append(Chosen(text, one.fits, why))
    return result


def tensor_limit(cluster: ClusterSpec, budget_gib: float | None) -> int:
    """Bytes of tensors that a rank may have within a budget."""
    return _budget_bytes(cluster, budget_gib) - cluster.reserved_bytes - cluster.device.workspace_bytes


def budget_limit(cluster: ClusterSpec, budget_gib: float | None) -> int | None:
    """Bytes that training may take within a budget, tensors and workspace; None without a budget."""
    return None if budget_gib is None else _budget_bytes(cluster, budget_gib) - cluster.reserved_bytes


class _Found(NamedTuple):
    peaks: Mapping[str, int]
    """Bytes of tensors on the fullest rank, by the recomputations among which the forecast decides."""
    fits: bool


def _found(search: FittingRecompute, e: Experiment, limit: int, cluster: ClusterSpec) -> _Found:
    words = {word: peak_stage(with_word(e, word)).peak_bytes for word in words_of(e)}
    found = {word: peak for word, peak in words.items() if peak <= limit}
    if "none" not in found:
        best = _allowed(search.fit(e, limit), e, cluster)
        if best is not None and best.too_big is None:
            found[best.recompute] = max(best.peaks)
        if not found:
            least = min(words, key=lambda word: words[word])
            return _Found({least: words[least]} if best is None else {best.recompute: max(best.peaks)}, False)
    roomy = limit
    if cluster.device.memory_bytes is not None:
        roomy = int(near_full.FROM * cluster.device.memory_bytes) - cluster.device.workspace_bytes
    if roomy < limit and words["none"] > roomy:
        other = _allowed(search.fit(e, roomy), e, cluster)
        if other is not None and other.too_big is None:
            found[other.recompute] = max(other.peaks)
    return _Found(found, True)


def _allowed(fit: Fit, e: Experiment, cluster: ClusterSpec) -> Fit | None:
    """None if a rule forbids to recompute differently by stage."""
    return None if violations(with_word(e, fit.recompute), cluster) else fit


def _simplest(e: Experiment, seconds: Mapping[str, float], times: StepTimes) -> str:
    """Of the words that are predicted to be about as fast as the fastest, the one that repeats least in closed form. By
    a fitted time, and the ratio from which another word's follows, repeating little may look faster than nothing."""
    longest_s = (1 + ALIKE) * min(seconds.values())
    alike = [text for text in seconds if seconds[text] <= longest_s]
    repeated = dict(zip(alike, times.seconds([with_word(e, text) for text in alike]), strict=True))
    return min(alike, key=lambda text: (float(repeated[text]), seconds[text]))


def _peaks(e: Experiment, word: str) -> tuple[int, ...]:
    return tuple(rank_peak_bytes(with_word(e, word), rank) for rank in range(e.pp))


def _refuse(layouts: Iterable[tuple[Experiment, float | None]], cluster: ClusterSpec) -> None:
    for e, budget in layouts:
        if not is_own(e):
            raise InvalidSweep(
                f"recompute=auto with engine={e.engine}: its memory is not predicted by stage; give recompute=none or "
                "full"
            )
        if budget is None and cluster.usable_bytes is None:
            raise InvalidSweep(
                f"recompute=auto needs memory_budget: the memory of {cluster.device.name} (cluster {cluster.name}) is "
                "not known"
            )
        if budget is not None and tensor_limit(cluster, budget) <= 0:
            raise InvalidSweep(
                f"memory_budget={budget:g} GiB leaves nothing for training: cluster {cluster.name} reserves "
                f"{format_bytes(cluster.reserved_bytes + cluster.device.workspace_bytes)} of it"
            )
        absent = absent_rates(
            cluster,
            e.precision,
            updates_on_host=e.optimizer_offload > 0,
            waits_on_host=e.activation_offload != "none",
        )
        if absent:
            raise InvalidSweep(
                f"recompute=auto compares predicted step times, and the file of cluster {cluster.name} "
                f"({cluster.device.name}) lacks {', '.join(absent)}; give cluster.{absent[0]}=..., or choose "
                "words such as recompute=[none,selective,full]"
            )


def _budget_bytes(cluster: ClusterSpec, budget_gib: float | None) -> int:
    memory = cluster.device.memory_bytes
    limits = [] if budget_gib is None else [int(budget_gib * GIB)]
    return min([*limits, *([] if memory is None else [memory])])


def _why(text: str, peaks: Sequence[int], cluster: ClusterSpec, budget_gib: float | None, *, fits: bool) -> str:
    beside = cluster.reserved_bytes + cluster.device.workspace_bytes
    budget = format_bytes(_budget_bytes(cluster, budget_gib))
    each = ", ".join(format_bytes(peak + beside) for peak in peaks)
    of_what = f"of {budget} on a device, of which {format_bytes(beside)} are reserved or workspace"
    if fits:
        return f"recompute=auto is {text}: stages need {each} {of_what}"
    worst = max(range(len(peaks)), key=lambda rank: peaks[rank])
    return (
        f"recompute=auto: stage {worst} of {len(peaks)} fits with no recomputation, it needs at least "
        f"{format_bytes(peaks[worst] + beside)} {of_what} (recompute={text})"
    )


def _is_larger(point: GridPoint, other: GridPoint) -> bool:
    return other.budget_gib is not None and (point.budget_gib is None or point.budget_gib > other.budget_gib)
