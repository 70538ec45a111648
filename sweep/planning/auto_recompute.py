"""Chooses what becomes of activations where a grid says ``recompute: auto`` or ``activation_offload: auto``: what is
predicted to take least time within the budget.

The budget counts everything on a device: tensors, the workspace of matrix products and what the cluster reserves.
`workloads.predict.fitting_recompute` finds the least recomputation of every stage, within the whole budget, and within
the share of the device above which its allocator takes time (`workloads.predict.near_full`);
`sweep.planning.auto_offload` finds what may wait on the host. Of these and every word that fits in all stages alike,
the plan's own forecast decides; of those that it does not tell apart (`sweep.grids.step_time.ALIKE`), the one that
sends fewest bytes to the host, and of these the one that repeats least. So no word of a grid that fits the same budget
is predicted to be faster by more than that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from results.text.numbers import format_bytes
from sweep.grids.axes import CHOSEN
from sweep.grids.expand import Expansion, GridPoint
from sweep.grids.step_time import ALIKE, StepTime
from sweep.grids.walk import Progress, silent
from sweep.planning.auto_offload import Choice, OffloadSearch, bare, forbidden, words_beside
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import Known
from workloads.costs.memory.estimate import peak_stage, rank_peak_bytes
from workloads.costs.memory.host_activations import link_bytes, node_host_bytes
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
_RECOMPUTE, _OFFLOAD = CHOSEN


class Asked(NamedTuple):
    """A layout of which something is to be chosen."""

    experiment: Experiment
    """With ``none`` in what is to be chosen."""
    budget_gib: float | None = None
    """None: the device's memory."""
    axes: tuple[str, ...] = (_RECOMPUTE,)
    """Those of `sweep.grids.axes.CHOSEN` to choose."""

    @property
    def label(self) -> str:
        return " with ".join(f"{name}=auto" for name in self.axes)


class Chosen(NamedTuple):
    """What was chosen for one layout."""

    choice: Choice
    fits: bool
    why: str
    """One line with the peaks of the stages and the budget."""
    fallbacks: tuple[str, ...] = ()
    """Why a choice is none, one phrase for each that is; or that nothing fits the budget."""

    @property
    def recompute(self) -> str:
        return self.choice.recompute


def with_choices(
    expansion: Expansion, cluster: ClusterSpec, known: Known | None = None, progress: Progress = silent
) -> Expansion:
    """The expansion with what is chosen in every point that is to have a choice. Equal runs that this makes count as
    duplicates; the one with the larger budget stays. Raises `InvalidSweep` where nothing can be chosen: for other
    engines, and on clusters whose memory or rates are not known."""
    wanted = [Asked(one.experiment, one.budget_gib, one.autos) for one in expansion.points if one.autos]
    if not wanted:
        return expansion
    chosen = iter(choose(wanted, Forecast.of(cluster, known), progress))
    points: dict[Experiment, GridPoint] = {}
    duplicates = expansion.duplicates
    for point in expansion.points:
        if point.autos and (one := next(chosen)) is not None:
            experiment = one.choice.of(point.experiment)
            point = dataclasses.replace(
                point, experiment=experiment, chosen=one.why, fits=one.fits, fallbacks=one.fallbacks
            )
        other = points.get(point.experiment)
        duplicates += other is not None
        if other is None or _is_larger(point, other):
            points[point.experiment] = point
    return dataclasses.replace(expansion, points=tuple(points.values()), duplicates=duplicates)


def choose(asked: Sequence[Asked], forecast: Forecast, progress: Progress = silent) -> list[Chosen | None]:
    """What is chosen for each layout. None for a layout that breaks a rule, whatever becomes of its activations."""
    cluster = forecast.cluster
    _refuse(asked, forecast)
    search = FittingRecompute(StepTimes(cluster))
    found: list[_Found | None] = []
    for done, one in enumerate(asked):
        if not done % _PROGRESS_EVERY:
            progress("recomputation chosen", done, len(asked))
        rules = [rule for rule in violations(one.experiment, cluster) if rule.rule != "engine_support"]
        found.append(None if rules else _found(search, one, cluster))
    layouts = [layout for layout in found if layout is not None]
    times = iter(forecast.times([e for layout in layouts for e in layout.to_predict()]))
    for layout in layouts:
        layout.seconds = {choice: _known(next(times)) for choice in layout.peaks}
        layout.bare = {word: _known(next(times)) for word in layout.words}
    offloads = OffloadSearch(forecast, search)
    more = [layout.with_offload(offloads) if layout.words else {} for layout in layouts]
    times = iter(
        forecast.times([choice.of(layout.e) for layout, peaks in zip(layouts, more, strict=True) for choice in peaks])
    )
    for layout, peaks in zip(layouts, more, strict=True):
        layout.take(peaks, {choice: _known(next(times)) for choice in peaks})
    return [None if layout is None else layout.chosen(forecast, offloads) for layout in found]


def _known(time: StepTime | None) -> StepTime:
    assert time is not None  # the cluster's rates are known
    return time


def tensor_limit(cluster: ClusterSpec, budget_gib: float | None) -> int:
    """Bytes of tensors that a rank may have within a budget."""
    return _budget_bytes(cluster, budget_gib) - cluster.reserved_bytes - cluster.device.workspace_bytes


def budget_limit(cluster: ClusterSpec, budget_gib: float | None) -> int | None:
    """Bytes that training may take within a budget, tensors and workspace; None without a budget."""
    return None if budget_gib is None else _budget_bytes(cluster, budget_gib) - cluster.reserved_bytes


@dataclass(slots=True)
class _Found:
    """Choices for one layout, among which the forecast decides."""

    asked: Asked
    peaks: dict[Choice, int]
    """Bytes of tensors on the fullest rank."""
    fits: bool
    """Whether these fit; otherwise there is one, which needs least."""
    limits: tuple[int, ...]
    """Bytes of tensors that a rank may have: within the budget, and within what takes the allocator no time."""
    words: tuple[str, ...] = ()
    """Recomputation beside which activations may be on the host, if that is to be chosen."""
    forbidden: str | None = None
    """Why none may be."""
    seconds: dict[Choice, StepTime] = field(default_factory=dict)
    bare: dict[str, StepTime] = field(default_factory=dict)
    """Times of steps with nothing on the host, by `words`."""

    @property
    def e(self) -> Experiment:
        return self.asked.experiment

    def to_predict(self) -> list[Experiment]:
        return [*(choice.of(self.e) for choice in self.peaks), *(bare(self.e, word) for word in self.words)]

    def with_offload(self, search: OffloadSearch) -> dict[Choice, int]:
        """Further choices that fit, with their peaks."""
        best_s = min(self._near_full(search.forecast).values()) if self.fits else float("inf")
        by_stage = _RECOMPUTE in self.asked.axes
        return search.found(self.e, self.limits, self.bare, best_s, stages=by_stage)

    def take(self, peaks: dict[Choice, int], seconds: dict[Choice, StepTime]) -> None:
        """Adds choices that fit."""
        if peaks and not self.fits:
            self.peaks, self.seconds, self.fits = {}, {}, True
        self.peaks |= peaks
        self.seconds |= seconds

    def chosen(self, forecast: Forecast, search: OffloadSearch) -> Chosen:
        choice, host = self._simplest(self._near_full(forecast), search.by_stage.times), ""
        least = None if self.fits else search.least(self.e, self.words, self.limits[0])
        if least is not None and least[1] <= self.limits[0]:
            host = f"; devices have room with {_told(least[0])}, but {_of_host(least[0].of(self.e), forecast)}"
        elif least is not None and least[1] < self.peaks[choice]:
            choice = least[0]
        elif choice.offload != "none" and _OFFLOAD in self.asked.axes:
            host = f"; {_of_host(choice.of(self.e), forecast)}"
        elif self.forbidden is not None:
            host = f"; {self.forbidden}"
        return Chosen(
            choice,
            self.fits,
            _why(self, choice, forecast.cluster) + host,
            self._fallbacks(choice, forecast.cluster, on_nodes=least is not None and least[1] <= self.limits[0]),
        )

    def _fallbacks(self, choice: Choice, cluster: ClusterSpec, *, on_nodes: bool) -> tuple[str, ...]:
        """``on_nodes``: whether devices would have room, and hosts have not."""
        budget, layout = _budget_text(cluster, self.asked.budget_gib), choice.of(self.e)
        if not self.fits:
            why = ", since no host holds what devices have no room for" if on_nodes else self._whatever
            return (f"{self.asked.label} does not fit {budget}{why}",)
        kept = self.peaks.get(Choice("none", "none"), self.limits[0] + 1) <= self.limits[-1]
        phrases = []
        for name in self.asked.axes:
            if getattr(layout, name) != "none":
                continue
            if kept:
                why = f"what a step keeps fits {budget}"
            elif name == _OFFLOAD and self.forbidden is not None:
                why = self.forbidden
            else:
                other = _OFFLOAD if name == _RECOMPUTE else _RECOMPUTE
                value = getattr(layout, other)
                why = f"{other}={value} fits {budget}" if value != "none" else f"what a step keeps fits {budget}"
                why += " and is predicted to be no slower"
            phrases.append(f"{name}=auto is none: {why}")
        return tuple(phrases)

    @property
    def _whatever(self) -> str:
        """What was tried without any fitting."""
        tried = [name for name in self.asked.axes if name == _RECOMPUTE or self.forbidden is None]
        words = " and ".join("recomputed" if name == _RECOMPUTE else "offloaded" for name in tried)
        return f", whatever is {words}" if words else f": {self.forbidden}"

    def _near_full(self, forecast: Forecast) -> dict[Choice, float]:
        """Seconds of the choices, with what the allocator takes."""
        return {
            choice: forecast.near_full(time, self.peaks[choice]).step_time_s for choice, time in self.seconds.items()
        }

    def _simplest(self, seconds: dict[Choice, float], times: StepTimes) -> Choice:
        """Of the choices that are predicted to be about as fast as the fastest, the one that sends least to the host,
        and of these the one that repeats least in closed form. By a fitted time, and the ratio from which another
        word's follows, repeating little may look faster than nothing."""
        longest_s = (1 + ALIKE) * min(seconds.values())
        alike = {choice: choice.of(self.e) for choice in seconds if seconds[choice] <= longest_s}
        sent = {choice: link_bytes(layout) for choice, layout in alike.items()}
        least = [choice for choice in alike if sent[choice] == min(sent.values())]
        repeated = dict(zip(least, times.seconds([alike[choice] for choice in least]), strict=True))
        return min(least, key=lambda choice: (float(repeated[choice]), seconds[choice]))


def _found(search: FittingRecompute, asked: Asked, cluster: ClusterSpec) -> _Found:
    e, limit = asked.experiment, tensor_limit(cluster, asked.budget_gib)
    roomy = limit
    if cluster.device.memory_bytes is not None:
        roomy = int(near_full.FROM * cluster.device.memory_bytes) - cluster.device.workspace_bytes
    limits = (limit, roomy) if roomy < limit else (limit,)
    if _RECOMPUTE in asked.axes:
        peaks, fits = _recomputed(search, e, limits, cluster)
    else:
        peaks = {e.recompute: peak_stage(e).peak_bytes}
        fits = peaks[e.recompute] <= limit
    found = _Found(asked, {Choice(word, e.activation_offload): peak for word, peak in peaks.items()}, fits, limits)
    if _OFFLOAD in asked.axes:
        found.forbidden = forbidden(e, cluster)
        has_room = peaks.get(e.recompute, limits[-1] + 1) <= limits[-1]  # nothing is faster than to keep what is kept
        if found.forbidden is None and not has_room:
            found.words = tuple(words_beside(e, cluster)) if _RECOMPUTE in asked.axes else (e.recompute,)
    return found


def _recomputed(
    search: FittingRecompute, e: Experiment, limits: Sequence[int], cluster: ClusterSpec
) -> tuple[dict[str, int], bool]:
    """Bytes of tensors on the fullest rank by recomputations that fit, and true; or of the one that needs least, and
    false."""
    words = {word: peak_stage(with_word(e, word)).peak_bytes for word in words_of(e)}
    found = {word: peak for word, peak in words.items() if peak <= limits[0]}
    if "none" not in found:
        best = _allowed(search.fit(e, limits[0]), e, cluster)
        if best is not None and best.too_big is None:
            found[best.recompute] = max(best.peaks)
        if not found:
            least = min(words, key=lambda word: words[word])
            return {least: words[least]} if best is None else {best.recompute: max(best.peaks)}, False
    if len(limits) > 1 and words["none"] > limits[1]:
        other = _allowed(search.fit(e, limits[1]), e, cluster)
        if other is not None and other.too_big is None:
            found[other.recompute] = max(other.peaks)
    return found, True


def _allowed(fit: Fit, e: Experiment, cluster: ClusterSpec) -> Fit | None:
    """None if a rule forbids to recompute differently by stage."""
    return None if violations(with_word(e, fit.recompute), cluster) else fit


def _refuse(asked: Iterable[Asked], forecast: Forecast) -> None:
    cluster = forecast.with_rates()
    for one in asked:
        e, budget = one.experiment, one.budget_gib
        by_hand = "recompute=none or full" if _RECOMPUTE in one.axes else "activation_offload=none"
        if not is_own(e):
            raise InvalidSweep(
                f"{one.label} with engine={e.engine}: its memory is not predicted by stage; give {by_hand}"
            )
        if budget is None and cluster.usable_bytes is None:
            raise InvalidSweep(
                f"{one.label} needs memory_budget: the memory of {cluster.device.name} (cluster {cluster.name}) is "
                "not known"
            )
        refuse_no_room(cluster, budget)
        offloads = e.activation_offload != "none" or _OFFLOAD in one.axes
        absent = absent_rates(cluster, e.precision, uses_host=e.optimizer_offload > 0 or offloads)
        if absent:
            words = "words such as recompute=[none,selective,full]" if _RECOMPUTE in one.axes else by_hand
            if absent == ["host.link_bandwidth"]:
                words = "activation_offload=none"
            raise InvalidSweep(
                f"{one.label} compares predicted step times, and the file of cluster {cluster.name} "
                f"({cluster.device.name}) lacks {', '.join(absent)}; give cluster.{absent[0]}=..., or choose {words}"
            )


def refuse_no_room(cluster: ClusterSpec, budget_gib: float | None) -> None:
    """Raises `InvalidSweep` for a budget that is not more than what is reserved on a device."""
    if budget_gib is not None and tensor_limit(cluster, budget_gib) <= 0:
        raise InvalidSweep(
            f"memory_budget={budget_gib:g} GiB leaves nothing for training: cluster {cluster.name} reserves "
            f"{format_bytes(cluster.reserved_bytes + cluster.device.workspace_bytes)} of it"
        )


def _budget_bytes(cluster: ClusterSpec, budget_gib: float | None) -> int:
    memory = cluster.device.memory_bytes
    limits = [] if budget_gib is None else [int(budget_gib * GIB)]
    return min([*limits, *([] if memory is None else [memory])])


def _budget_text(cluster: ClusterSpec, budget_gib: float | None) -> str:
    """The budget with its name: the option, or the memory of the device where that is less."""
    limit, memory = _budget_bytes(cluster, budget_gib), cluster.device.memory_bytes
    named = f"memory_budget={budget_gib:g} GiB" if budget_gib is not None else ""
    if budget_gib is None or (memory is not None and memory < budget_gib * GIB):
        device = f"the {format_bytes(limit)} of a device"
        return f"{device} ({named} is more)" if named else device
    return named


def _why(found: _Found, choice: Choice, cluster: ClusterSpec) -> str:
    layout, axes = choice.of(found.e), found.asked.axes
    peaks = [rank_peak_bytes(layout, rank) for rank in range(layout.pp)]
    beside = cluster.reserved_bytes + cluster.device.workspace_bytes
    budget = _budget_text(cluster, found.asked.budget_gib)
    each = ", ".join(format_bytes(peak + beside) for peak in peaks)
    of_what = f"of {budget}, of which {format_bytes(beside)} are reserved or workspace"
    if found.fits:
        chosen = " and ".join(f"{name}=auto is {getattr(layout, name)}" for name in axes)
        return f"{chosen}: stages need {each} {of_what}"
    worst = max(range(len(peaks)), key=lambda rank: peaks[rank])
    whatever = found._whatever if found.forbidden is None else ""
    with_what = f"recompute={layout.recompute}" if axes == (_RECOMPUTE,) else _told(choice)
    return (
        f"{found.asked.label}: stage {worst} of {len(peaks)} does not fit{whatever}: it needs at least "
        f"{format_bytes(peaks[worst] + beside)} {of_what} ({with_what})"
    )


def _told(choice: Choice) -> str:
    return f"recompute={choice.recompute}, activation_offload={choice.offload}"


def _of_host(e: Experiment, forecast: Forecast) -> str:
    """What a node's host must hold, in numbers."""
    cluster = forecast.with_rates()
    needed, memory = node_host_bytes(e, cluster.devices_per_node), cluster.host.memory_bytes
    of_what = f"of {format_bytes(memory)}" if memory is not None else "and its memory is not known"
    return f"the host of a node needs {format_bytes(needed)} {of_what}"


def _is_larger(point: GridPoint, other: GridPoint) -> bool:
    return other.budget_gib is not None and (point.budget_gib is None or point.budget_gib > other.budget_gib)
