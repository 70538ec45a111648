"""The recomputation that takes least time among those with which every pipeline rank fits a limit of memory.

A rank's peak depends on the words of its own stages alone: what it holds for other stages are messages between them,
and those are the same however the others recompute. And a step is no faster when one of its actions takes longer, since
the actions of every rank keep their order: it is a longest path. So with one stage a rank the least choice of every
rank by itself is the least of all. A rank of several chunks first gets the least word that fits for all of them; then
each chunk, the earliest first, gets the least with which the rank still fits, which need not be the best of all.

Choices of a stage: nothing; each set of operations that the model has; everything; everything in the first layers
alone, as few as fit. With activations on the host all layers of a stage have one word, and none of what is offloaded by
name. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from workloads.costs.memory.estimate import rank_peak_bytes
from workloads.costs.shape.partition import experiment_layers, ranks_alike, with_word
from workloads.costs.shape.schedule import SPLIT_BACKWARD, stage_at
from workloads.costs.time.step_times import StepTimes
from workloads.predict.points import Floats
from workloads.spec.activations.offload import ALL, may_name
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import layers_of
from workloads.spec.recomputation import CHOICES, StageWord, joined_stages, operations_of

NONE, FULL = StageWord("none", 0), StageWord("full", 0)


class Fit(NamedTuple):
    """What was found for one layout."""

    recompute: str
    """The words; where no choice fits, those with which each rank needs least of what was tried."""
    peaks: tuple[int, ...]
    """Bytes at the peak of every pipeline rank with these words."""
    too_big: int | None
    """The first rank that fits with no choice; None: all fit."""


def words_of(e: Experiment) -> tuple[str, ...]:
    """The words that layers of an experiment may have: sets of operations that its model has, of these for compiled
    blocks all cheap ones alone, and none of tensors that it offloads by name."""
    if e.compile == "block":
        return "none", "selective", "full"
    lacks = {"mla_up"} if e.model.mla is None else set[str]()
    lacks |= {"experts"} if e.model.moe is None else set()
    named = [] if e.activation_offload in ("none", ALL) else e.activation_offload.split("+")
    return tuple(
        word for word in CHOICES if not lacks & set(operations_of(word)) and all(may_name(one, word) for one in named)
    )


@dataclass(slots=True)
class FittingRecompute:
    """Finds the least recomputation of layouts on one cluster, whose rates must be known for their precision."""

    times: StepTimes

    def fit(self, experiment: Experiment, limit_bytes: int) -> Fit:
        """``experiment``: a layout that breaks no rule, with any recomputation of every layer. ``limit_bytes``: for the
        tensors of a rank."""
        e = with_word(experiment, "none")
        costs = {word: self.times.again_s(e, word) for word in words_of(e)}
        stages = _Stages(e, costs, limit_bytes)
        found: list[StageWord] = [NONE] * e.num_stages
        peaks = [0] * e.pp
        too_big = None
        alike, passed = ranks_alike(e), dict[int, tuple[int, int]]()
        monotone = e.virtual_stages == 1 and e.pp_schedule not in SPLIT_BACKWARD
        for rank in reversed(range(e.pp)):
            # An earlier rank of equal layers holds no fewer micro-batches: what did not fit the later one is not tried.
            first, layers = passed.get(alike[rank], (0, 1)) if monotone else (0, 1)
            choice = stages.choose(rank, first, layers)
            passed[alike[rank]] = choice.first, choice.layers
            for stage, word in zip(stages.of_rank(rank), choice.words, strict=True):
                found[stage] = word
            peaks[rank] = choice.peak
            too_big = rank if choice.peak > limit_bytes else too_big
        return Fit(joined_stages(tuple(found)), tuple(peaks), too_big)


class _Choice(NamedTuple):
    words: tuple[StageWord, ...]
    peak: int
    first: int
    """Place of the least word of all layers that fits."""
    layers: int
    """Least number of first layers that are worth a try."""


@dataclass(slots=True)
class _Stages:
    """The stages of one layout."""

    e: Experiment
    costs: Mapping[str, Floats]
    """Seconds of recomputation of a layer of each kind, by word."""
    limit: int
    _peaks: dict[tuple[int, tuple[StageWord, ...]], int] = field(default_factory=dict)
    _written: dict[str, Experiment] = field(default_factory=dict)
    """The experiment by its words of recomputation."""

    def of_rank(self, rank: int) -> list[int]:
        return [stage_at(self.e.pp_schedule, rank, chunk, self.e.pp) for chunk in range(self.e.virtual_stages)]

    def choose(self, rank: int, first: int, layers: int) -> _Choice:
        """The least choice of a rank. ``first``, ``layers``: from which on words, and numbers of first layers, may
        fit."""
        stages, place, tried = self.of_rank(rank), first, list[tuple[int, tuple[StageWord, ...]]]()
        words: tuple[StageWord, ...] = (NONE,)
        ordered = sorted(self.costs, key=lambda word: sum(self._cost(stage, StageWord(word, 0)) for stage in stages))
        while place < len(ordered):
            words = (StageWord(ordered[place], 0),) * len(stages)
            tried.append((self.peak(rank, words), words))
            if tried[-1][0] <= self.limit:
                break
            place += 1
        else:
            peak, words = min(tried, key=lambda one: one[0])
            return _Choice(words, peak, first, layers)
        for chunk, stage in enumerate(stages):
            words, layers = self._relaxed(rank, words, chunk, stage, ordered[:place], layers)
        return _Choice(words, self.peak(rank, words), place, layers)

    def _relaxed(
        self,
        rank: int,
        words: tuple[StageWord, ...],
        chunk: int,
        stage: int,
        cheaper: Sequence[str],
        least: int,
    ) -> tuple[tuple[StageWord, ...], int]:
        """The words with the least one of this chunk with which the rank still fits, and the least number of first
        layers that may fit."""

        def fits(word: StageWord) -> bool:
            return self.peak(rank, (*words[:chunk], word, *words[chunk + 1 :])) <= self.limit

        best = words[chunk]
        if len(words) > 1:  # else no cheaper word fits
            best = next((StageWord(word, 0) for word in cheaper if fits(StageWord(word, 0))), best)
        cost, size = self._cost(stage, best), len(experiment_layers(self.e)[stage])
        low, high = least, size - 1
        if self.e.activation_offload != "none":
            high = 0  # one word for all layers of a stage (the rule activation_offload_mixed)
        while high > 0 and self._cost(stage, StageWord("full", high)) >= cost:
            high -= 1
        if best == NONE or low > high or not fits(StageWord("full", high)):
            return (*words[:chunk], best, *words[chunk + 1 :]), max(least, high + 1) if best != NONE else least
        while low < high:  # the fewest that fit, if fewer never need less
            middle = (low + high) // 2
            low, high = (low, middle) if fits(StageWord("full", middle)) else (middle + 1, high)
        return (*words[:chunk], StageWord("full", high), *words[chunk + 1 :]), high if len(words) == 1 else least

    def _cost(self, stage: int, word: StageWord) -> float:
        """Seconds of a micro-batch's recomputation in a stage."""
        order, layers = layers_of(self.e.model).order, experiment_layers(self.e)[stage]
        of_kind = self.costs[word.word]
        return float(sum(of_kind[order[layer]] for layer in layers[: word.first or len(layers)]))

    def peak(self, rank: int, words: tuple[StageWord, ...]) -> int:
        """Bytes at a rank's peak with these words of its stages."""
        key = rank, words
        if key not in self._peaks:
            text = words[0].text
            if len(set(words)) > 1:
                of_stages = [NONE] * self.e.num_stages
                for stage, word in zip(self.of_rank(rank), words, strict=True):
                    of_stages[stage] = word
                text = joined_stages(tuple(of_stages))
            if text not in self._written:
                self._written[text] = with_word(self.e, text)
            self._peaks[key] = rank_peak_bytes(self._written[text], rank)
        return self._peaks[key]
