"""How ``advise`` leaves layouts out: bounds that no layout is below, and few of them computed exactly."""

from __future__ import annotations

import numpy as np
import pytest

from sweep.advising.axes import KINDS
from sweep.advising.factor_bounds import FactorBounds
from sweep.advising.question import read_question
from sweep.advising.ranking import Ranking
from sweep.advising.simpler import departures
from sweep.advising.space import space_of
from sweep.advising.times import Times
from sweep.grids.step_time import ALIKE, StepTime
from sweep.predicting.known import Known
from workloads.rules.layout_rules import violations

MIXTURE = ("model=qwen3_30b_a3b_8_layers", "cluster=h200", "gpus=16", "global_batch_size=64", "pp=[1,2]", "tp=[1,2]")
DENSE = ("model=llama8b", "cluster=h200", "gpus=16", "global_batch_size=16", "seq_len=16384", "tp=[1,2]", "pp=[1,2]")

TIERS = ("cluster=gb200_nvl72", "cluster.tiers.0.devices=8", "cluster.tiers.1.devices=16")
"""Three tiers, of which the layouts below use all."""
SPINE = (*TIERS, "cluster.tiers.2.bandwidth=2e9")
ON_TIERS = (
    (*(word for word in MIXTURE if "cluster" not in word and "gpus" not in word), *SPINE, "gpus=64"),
    (*(word for word in DENSE if "cluster" not in word and "gpus" not in word), *SPINE, "gpus=32", "engine=torchtitan"),
)


def ranking_of(*words: str) -> Ranking:
    question = read_question(words)
    usable = question.cluster.usable_bytes
    assert usable is not None
    return Ranking(space_of(question), Times.of(question, Known()), usable)


@pytest.mark.parametrize("words", [MIXTURE, (*MIXTURE, "seq_len=256", "cuda_graph=none"), DENSE, *ON_TIERS])
def test_no_structure_factor_is_below_its_bound(words: tuple[str, ...]) -> None:
    ranking = ranking_of(*words)
    space, times = ranking.space, ranking.times
    shares: list[float] = []
    for kind in ("ring", *space.kinds[1:] * bool((space.cp > 1).any())):
        rows = ranking.rows[(space.cp[ranking.rows] > 1) | (kind == "ring")][::5]
        bounds = FactorBounds.of(times, space, rows, kind)
        for replicas in (1, 2, 8):
            found = {row: space.layout(row, space.plain_group(row, kind, replicas)) for row in rows.tolist()}
            valid = {row: one for row, one in found.items() if one and not violations(one, space.question.cluster)}
            if not valid:
                continue
            least = bounds.least(np.array(list(valid)), replicas)
            factors = times.factors(list(valid.values()))
            assert (least > 0).all() and (least <= factors).all()
            shares += (least / factors).tolist()
    assert len(shares) > 50
    # Bounds know the first tier of a network alone.
    assert np.median(shares) > (0.97 if len(space.question.cluster.outside) < 2 else 0.1)


def test_few_structure_factors_are_computed_exactly() -> None:
    ranking = ranking_of(*MIXTURE)
    assert len(ranking.best(16, 3).best) == 3
    sets = {(group.cp_kind, group.replicas) for group in ranking.space.groups}
    rows = sum(int(((ranking.space.cp[ranking.rows] > 1) | (kind == "ring")).sum()) for kind, _ in sets)
    print(len(ranking.factors), rows)
    assert 0 < len(ranking.factors) < 0.1 * rows
    assert set(ranking.factor_bounds) == set(ranking.space.kinds)


@pytest.mark.parametrize("words", [MIXTURE, *ON_TIERS])
def test_bounds_times_factors_are_the_times_of_a_plan(words: tuple[str, ...]) -> None:
    """With 1F1B and on one replica, whose whole time the bounds add up to."""
    ranking = ranking_of(*words, "cuda_graph=none")
    space, times = ranking.space, ranking.times
    rows = ranking.rows[:: max(1, len(ranking.rows) // 60)]
    bounds = times.bounds(space, rows)
    found = [space.layout(row, space.plain_group(row, "ring", 1)) for row in rows.tolist()]
    known = [at for at, one in enumerate(found) if one is not None and not violations(one, space.question.cluster)]
    layouts = [one for at in known if (one := found[at]) is not None]
    kinds = [KINDS.index(one.recompute) for one in layouts]
    whole = np.array([sum(part[at, kind] for part in bounds) for at, kind in zip(known, kinds, strict=True)])
    planned = np.array([time.step_time_s if time else np.nan for time in times.of_layouts(layouts)])
    assert len(known) > 15 and np.isfinite(planned).all()
    assert whole * times.factors(layouts) == pytest.approx(planned, rel=0.02)


SMALL = ("model=smollm3_3b", "cluster=h100_efa", "gpus=8", "tp=1", "cp=1", "pp=[1,2]", "micro_batch_size=[1,2]")


def test_nothing_is_recomputed_where_memory_is_free_and_no_time_is_won() -> None:
    ranking = ranking_of(*SMALL)
    free = [one.experiment for one in ranking.best(8, 4).best if one.memory.peak_bytes < 0.8 * ranking.limit_bytes]
    assert len(free) >= 2
    assert {one.recompute for one in free} == {"none"}
    assert departures(free[0]) == 0
    asked_for = ranking_of(*SMALL, "recompute=selective", "recompute_every=[2,4]").best(8, 1).best[0]
    assert asked_for.experiment.recompute_every == 4


def test_recomputation_that_wins_time_or_saves_needed_memory_stays() -> None:
    ranking = ranking_of(*SMALL[:-1], "micro_batch_size=4")
    best = ranking.best(8, 1).best[0]
    without = best.experiment.replace(recompute="none", recompute_every=1)
    assert best.experiment.recompute == "selective"
    assert (memory := ranking.peak(without)) is not None and memory.peak_bytes > 0.88 * ranking.limit_bytes
    [time] = ranking.times.of_layouts([without])
    assert time is not None and time.step_time_s < (1 + ALIKE) * best.time.step_time_s


def test_a_wide_interval_counts_against_a_layout() -> None:
    wide, narrow = (StepTime(step, step / (1 + share), step * (1 + share), 0.0, 0.0) for step, share in WIDTHS)
    assert wide.step_time_s < narrow.step_time_s and narrow.cautious_s < wide.cautious_s
    assert StepTime(1.0, 1.0, 1.0, 0.0, 0.0).cautious_s == 1.0
    best = [one.time for one in ranking_of(*MIXTURE, "micro_batch_size=[1,2,4]").best(16, 12).best]
    assert [one.cautious_s for one in best] == sorted(one.cautious_s for one in best)
    assert [one.step_time_s for one in best] != sorted(one.step_time_s for one in best)


WIDTHS = ((1.0, 0.6), (1.1, 0.1))
"""Step seconds and half-widths of 90 % intervals."""


@pytest.mark.parametrize("model", ["deepseek_v2_lite_10_layers", "nemotron_3_nano_14_layers"])
def test_no_peak_is_below_the_bound_of_memory(model: str) -> None:
    """Models whose layers differ, of which a rank may hold the smallest ones."""
    ranking = ranking_of(f"model={model}", "cluster=h200", "gpus=8", "global_batch_size=32", "recompute_every=[1,2,4]")
    space, mine = ranking.space, np.arange(len(ranking.rows))
    shares: list[float] = []
    for group in space.groups[::3]:
        needs = ranking.needs(mine, group)
        for at in mine[:: max(1, len(mine) // 60)].tolist():
            one = space.layout(int(ranking.rows[at]), group)
            if one and not violations(one, space.question.cluster) and (peak := ranking.peak(one)) is not None:
                shares.append(needs[at] / peak.peak_bytes)
    assert len(shares) > 200 and max(shares) <= 1
    assert np.median(shares) > 0.3
