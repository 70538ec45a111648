"""Checks of what is recommended, on spaces so small that every layout can be looked at."""

from __future__ import annotations

import dataclasses
from collections import Counter
from math import exp

from sweep.advising.answer import answer
from sweep.advising.question import read_question
from sweep.composing.search_settings import Settings
from sweep.grids.step_time import ALIKE
from sweep.predicting.known import Known
from sweep.searching.session import Session
from tests.planted.plant import Fault, planted
from tests.pool import Pool
from tests.sweep.searching.spaces import space
from workloads.costs.memory.estimate import peak_stage
from workloads.rules.layout_rules import violations

DEEP = ("model=llama8b", "cluster=h100_efa", "gpus=32", "pp=[4,8]", "tp=[1,2]", "zero_stage=1")
DEEP += ("micro_batch_size=[1,2]", "cp=1", "dp_replicate=1", "recompute=[none,selective]", "recompute_every=1")
MOST_RUNS = 8
"""Of 40 layouts, in the mean of the searches of `searches`."""


def advice(pool: Pool, fault: Fault | None) -> None:
    """The first of an answer is the best of all layouts that fit, or a simpler one that is as good."""
    del pool  # nothing is run
    # where time is in the schedule, where it is in memory, and where the fastest of all does not fit
    for batch, reserved in ((32, "60e9"), (64, "60e9"), (64, "66e9")):
        _is_best(fault, f"global_batch_size={batch}", f"cluster.reserved_bytes={reserved}")


def _is_best(fault: Fault | None, batch: str, reserved: str) -> None:
    question = read_question((*DEEP, batch, reserved))
    with planted(fault):
        [size] = answer(question, 1, Known()).sizes
    found = answer(question, 1, Known())
    [ranking] = found.rankings.each
    space_of_all = ranking.space
    spelled = (space_of_all.layout(row, group) for row in range(len(space_of_all)) for group in space_of_all.groups)
    layouts = [one for one in spelled if one is not None and not violations(one, question.cluster)]
    fitting = [one for one in layouts if peak_stage(one).peak_bytes <= found.limit_bytes]
    assert 5 < len(fitting) < len(layouts)
    least = min(time.cautious_s for time in found.times.of_layouts(fitting) if time is not None)
    assert size.ranked.best
    first = size.ranked.best[0]
    assert first.memory.peak_bytes <= found.limit_bytes
    assert least <= first.time.cautious_s <= (1 + ALIKE) * least


def searches(pool: Pool, fault: Fault | None) -> None:
    """Searches in cells whose truth is known run no layout twice, and nearly all find the fastest, in few runs."""
    del pool
    found = runs = 0
    for seed in range(6):
        candidates, truth = space(seed=seed, cells=2)
        # Closer together than what the prior misses.
        miss, prior = truth - candidates.log_time, 0.2 * candidates.log_time
        candidates, truth = dataclasses.replace(candidates, log_time=prior), prior + miss
        session = Session(candidates, Settings(batch=1, repeats=0))
        ran: Counter[int] = Counter()
        with planted(fault):
            for cell in candidates.cells:
                while session.end(cell) is None and sum(ran.values()) < 100:
                    for one in session.ask(cell):
                        ran[one] += 1
                        session.tell(one, "ok", exp(float(truth[one])))
                own = candidates.of(cell)
                best = session.best(cell)
                assert best is not None
                found += truth[best] <= truth[own].min() + 0.01
        assert max(ran.values()) == 1
        runs += sum(ran.values())
    assert found >= 11
    assert runs <= 12 * MOST_RUNS
