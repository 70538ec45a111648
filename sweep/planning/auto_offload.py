"""Chooses what waits on the host where a grid says ``activation_offload: auto``, beside what is recomputed.

Steps with activations on the host wait for copies that no layer hides. So a choice takes the time of a step with its
recomputation, and the waits. It is looked for only where that may save more than predictions
tell apart (`sweep.grids.step_time.ALIKE`), beside every recomputation that may then be faster: the fewest bytes with
which the layout fits (`workloads.predict.fitting_offload`). Where no choice without waits and recomputation fits,
recomputation by stage is looked for beside a few sets of words.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sweep.grids.step_time import ALIKE, StepTime
from sweep.predicting.forecast import Forecast
from workloads.costs.memory.estimate import peak_stage
from workloads.costs.memory.host_activations import node_host_bytes
from workloads.costs.shape.partition import with_word
from workloads.predict.fitting_offload import FittingOffload, offloads_of
from workloads.predict.fitting_recompute import FittingRecompute, words_of
from workloads.rules.layout_rules import violations
from workloads.spec.activations.offload import ALL, canonical_offload
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment

_BY_STAGE = ("input", ALL)
"""Sets of words beside which recomputation by stage is looked for, with the two of the fastest choices."""


class Choice(NamedTuple):
    """What becomes of the activations of a layout."""

    recompute: str
    offload: str

    def of(self, e: Experiment) -> Experiment:
        """The layout with it, as `Experiment.canonical` writes it."""
        offload = canonical_offload(self.offload, self.recompute)
        return with_word(e, self.recompute).replace(activation_offload=offload)


def forbidden(e: Experiment, cluster: ClusterSpec) -> str | None:
    """Why the layout can have no activations on the host; None if it can."""
    broken = violations(Choice(e.recompute, "input").of(e), cluster)
    return broken[0].message if broken else None


def bare(e: Experiment, word: str) -> Experiment:
    """The layout with one recomputation and nothing on the host."""
    return with_word(e, word).replace(activation_offload="none")


@dataclass(slots=True)
class OffloadSearch:
    """Finds choices with activations on the host for the layouts of one cluster."""

    forecast: Forecast
    by_stage: FittingRecompute

    def found(
        self, e: Experiment, limits: Sequence[int], bare_times: Mapping[str, StepTime], best_s: float, *, stages: bool
    ) -> dict[Choice, int]:
        """Bytes of tensors on the fullest device by choice that fits the first of the ``limits``, and its node's host.

        ``limits``: bytes of tensors that a rank may have, the least last. ``bare_times``: those of steps without waits,
        by the recomputations to consider. ``best_s``: the fastest step without activations on the host that
        fits. ``stages``: whether the recomputation may differ by stage.
        """
        least_s = min(time.step_time_s for time in bare_times.values())
        if best_s <= (1 + ALIKE) * least_s:
            return {}
        search, found, seconds = FittingOffload(self.forecast.with_rates()), dict[Choice, int](), dict[Choice, float]()
        sizes: dict[Hashable, Any] = {}
        for word, time in sorted(bare_times.items(), key=lambda pair: pair[1].step_time_s):
            if time.step_time_s > (1 + ALIKE) * best_s:
                break
            of_word = with_word(e, word)
            offloads = offloads_of(of_word, search.cluster, sizes)
            for limit in limits:
                if (one := search.least(of_word, offloads, limit)) is None:
                    break
                choice = Choice(word, one.text)
                found[choice] = one.peak_bytes
                seconds[choice] = self.forecast.near_full(time, one.peak_bytes).step_time_s + one.waits_s
                best_s = min(best_s, seconds[choice])
        if stages and e.num_stages > 1 and best_s > (1 + ALIKE) * least_s:
            fastest = sorted(seconds, key=seconds.__getitem__)[:2]
            found |= self._by_stage(
                e, search, limits[0], dict.fromkeys((*_BY_STAGE, *(one.offload for one in fastest)))
            )
        return found

    def _by_stage(
        self, e: Experiment, search: FittingOffload, limit: int, texts: Mapping[str, None]
    ) -> dict[Choice, int]:
        """Choices whose recomputation differs by stage. ``texts``: of ``activation_offload``."""
        found = {}
        for text in texts:
            fit = self.by_stage.fit(e.replace(activation_offload=text), limit)
            choice = Choice(fit.recompute, text)
            layout = choice.of(e)
            if fit.too_big is None and search.host_holds(layout) and not violations(layout, search.cluster):
                found[choice] = max(fit.peaks)
        return found

    def least(self, e: Experiment, words: Sequence[str], limit: int) -> tuple[Choice, int] | None:
        """Where nothing fits: the choice with the least peak of devices beside the ``words``, and its bytes of tensors;
        of those with at most ``limit``, which no host holds, that with the fewest bytes there. None if no layer
        offloads anything."""
        cluster = self.forecast.with_rates()
        roomy = FittingOffload(replace(cluster, host=replace(cluster.host, memory_bytes=None)))
        found: list[tuple[int, int, Choice]] = []
        sizes: dict[Hashable, Any] = {}
        for word in words:
            of_word = with_word(e, word)
            offloads = offloads_of(of_word, cluster, sizes)
            one = roomy.least(of_word, offloads, limit)
            if one is not None:
                choice, peak = Choice(word, one.text), one.peak_bytes
            elif offloads.texts:
                choice, peak = Choice(word, ALL), peak_stage(Choice(word, ALL).of(e)).peak_bytes
            else:
                continue
            held = node_host_bytes(choice.of(e), cluster.devices_per_node) if peak <= limit else 0
            found.append((max(peak, limit), held, choice))
        if not found:
            return None
        _, _, choice = min(found)
        return choice, peak_stage(choice.of(e)).peak_bytes


def words_beside(e: Experiment, cluster: ClusterSpec) -> list[str]:
    """Words of all layers with which the layout can have activations on the host."""
    return [word for word in words_of(e) if not violations(Choice(word, ALL).of(e), cluster)]
