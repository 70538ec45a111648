"""Recomputation by stage for the layouts that ``advise`` has found, with ``recompute=auto``.

The search looks at words of all layers, of which it knows bounds. Each of its best layouts that recomputes then gets
what a plan chooses for it (`sweep.planning.auto_recompute`), if that is predicted to be faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sweep.advising.conditions import meets
from sweep.advising.question import Question
from sweep.advising.ranked import RankedLayout
from sweep.advising.times import Times
from sweep.grids.step_time import StepTime
from sweep.planning.auto_offload import Choice
from sweep.planning.auto_recompute import Asked, choose
from workloads.rules.layout_rules import violations
from workloads.spec.experiment import Experiment

MORE = 3
"""The search keeps this many times as many layouts as are asked for, of which recomputation by stage may change the
order."""


def by_stage(
    best: Sequence[RankedLayout],
    question: Question,
    times: Times,
    fitting: Callable[[Experiment, StepTime], RankedLayout | None],
) -> list[RankedLayout]:
    """The layouts, each with the recomputation that is predicted to be fastest. ``fitting``: as in
    `sweep.advising.simpler`."""
    again = [at for at, one in enumerate(best) if one.experiment.recompute != "none"]
    words = question.activation_offload
    plain = [Choice("none", words).of(best[at].experiment.replace(recompute_every=1)) for at in again]
    found = list(best)
    chosen = choose([Asked(one, question.memory_budget) for one in plain], times.forecast)
    for at, e, choice in zip(again, plain, chosen, strict=True):
        if choice is None or not choice.fits:
            continue
        other = Choice(choice.recompute, words).of(e)
        if violations(other, question.cluster) or not meets(other, question.where):
            continue
        (time,) = times.of_layouts([other])
        ranked = None if time is None else fitting(other, time)
        if ranked is not None and ranked.time.cautious_s < found[at].time.cautious_s:
            found[at] = ranked
    return found
