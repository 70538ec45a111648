"""The answer of ``advise`` as plain values with units in their names, for JSON and for the Python interface."""

from __future__ import annotations

import shlex
from typing import Any

from sweep.advising.answer import Advice, Costed, settling_words
from sweep.advising.published import PublishedLayout
from sweep.advising.ranked import RankedLayout
from sweep.composing.planned_only import planned_only
from sweep.planning.facts import narrowed_facts, power_facts
from sweep.planning.mfu import mfu_note, predicted_mfu
from sweep.planning.price import price
from sweep.planning.summary import layout
from sweep.predicting.narrowed import Narrowed, narrowed
from workloads.rules.engine_kinds import engine_lacks
from workloads.spec.recurrent_kernels import has_recurrences

_GOAL = ("fewest", "surely", "cheapest", "soonest")


def advice_facts(answer: Advice) -> dict[str, Any]:
    """What holds for the whole answer: the question, the space of layouts, and the search that would measure it.

    Memory is that of one device, with the workspace of matrix products. None: unknown, or not asked for.
    """
    q, goal = answer.question, answer.goal
    can_run = bool(answer.best) and not engine_lacks(q.model, q.precision) and not q.cluster.is_planned_only
    return {
        "model": q.model.name,
        "cluster": q.cluster.name,
        "device": q.cluster.device.name,
        "engine": q.engine,
        "engine_version": q.engine_version,
        "precision": q.precision,
        "recurrence": q.recurrence if has_recurrences(q.model) else None,
        "seq_len": q.seq_len,
        "global_batch_size": q.global_batch_size,
        "tokens_per_step": q.tokens_per_step,
        "where": [one.text for one in q.where],
        "gpus": [one.ranked.size for one in answer.sizes],
        "gpus_without_layout": sorted(set(q.sizes) - {one.ranked.size for one in answer.sizes}) if goal is None else [],
        "allowed_layouts": answer.rankings.allowed,
        "families": answer.rankings.families,
        "families_that_may_fit": answer.rankings.may_fit,
        "limit_bytes": q.usable_bytes,
        "memory_budget_gib": q.memory_budget,
        "offloads": [{"optimizer_offload": share, "activation_offload": words} for share, words in q.offloads],
        "price_per_gpu_hour": q.price,
        "price_source": q.price_source if q.price is not None else None,
        "optimise": answer.optimise,
        **power_facts(answer.power),
        "power_from": answer.power.source,
        "times_from": answer.times.source,
        **narrowed_facts(narrowed_of(answer)),
        "note": mfu_note([q.precision], q.cluster),
        "engine_lacks": list(engine_lacks(q.model, q.precision)),
        "planned_only": planned_only(q.cluster),
        "search_gpu_hours": search_hours(answer) if can_run else None,
        "search_command": shlex.join(["python", "-m", "sweep", "search", *settling_words(q, answer.best)])
        if can_run
        else None,
    }


def narrowed_of(answer: Advice) -> Narrowed | None:
    """By how much measurements have narrowed the intervals of the answer's layouts."""
    return narrowed(answer.times.forecast, [one.experiment for one in answer.best])


def search_hours(answer: Advice) -> float:
    """Device-hours to run each layout of the answer once."""
    q = answer.question
    runs = (price(one.experiment, one.time, "measured", q.config.measure, q.config.plan) for one in answer.best)
    return sum(run.expected_h for run in runs if run.expected_h is not None)


def layouts_of(answer: Advice) -> list[tuple[RankedLayout, dict[str, Any]]]:
    """The fastest layouts of each number of devices, best first, with their numbers; with an objective the best of all
    numbers of devices. Empty for an inverse question."""
    if answer.optimise is not None:
        return [
            (ranked, {"gpus": ranked.experiment.world_size, "place": place, **_numbers(answer, ranked)})
            for place, ranked in enumerate(answer.ranked, start=1)
        ]
    return [
        (ranked, {"gpus": one.ranked.size, "place": place, **_numbers(answer, ranked)})
        for one in answer.sizes
        for place, ranked in enumerate(one.ranked.best, start=1)
    ]


def published_of(answer: Advice) -> list[tuple[PublishedLayout, dict[str, Any]]]:
    """Published layouts for these numbers of devices, with their numbers and their predicted tokens a second over those
    of the best layout of the same number of devices, less 1. None: not predicted, see ``why_not``."""
    rows = []
    for one in answer.published:
        fields: dict[str, Any] = {"gpus": one.experiment.world_size, "layout": layout(one.experiment)}
        fields |= {"source": one.source, "url": one.url, "date": one.date, "published_precision": one.precision}
        fields |= {"why_not": one.why_not, "against_best": ahead_of_best(answer, one)}
        rows.append((one, {**fields, **(_numbers(answer, one.ranked) if one.ranked is not None else {})}))
    return rows


def ahead_of_best(answer: Advice, one: PublishedLayout) -> float | None:
    """Predicted tokens a second over those of the best layout of the same number of devices, less 1."""
    best = next((size.ranked.best for size in answer.sizes if size.ranked.size == one.experiment.world_size), [])
    if one.ranked is None or not best:
        return None
    return one.ranked.tokens_per_s_per_device / best[0].tokens_per_s_per_device - 1


def sizes_of(answer: Advice) -> list[dict[str, Any]]:
    """How each number of devices was searched: the layouts timed, a bound on those left, and the least memory if
    nothing fits."""
    workspace = answer.question.cluster.device.workspace_bytes
    return [
        {
            "gpus": one.ranked.size,
            "layouts_timed": one.ranked.timed,
            "given_up_at_s": one.ranked.open_bound_s,
            "least_bytes": one.smallest[1].peak_bytes + workspace if one.smallest is not None else None,
        }
        for one in answer.sizes
    ]


def goal_of(answer: Advice) -> list[tuple[RankedLayout, dict[str, Any]]]:
    """The layouts that reach the goal of an inverse question, each with the ``choice`` that it is: on the fewest
    devices (``fewest``), also at the slow end of its prediction (``surely``), of the least device-hours and so of the
    least energy (``cheapest``), and of the fewest days (``soonest``, only if time is optimised)."""
    goal = answer.goal
    if goal is None:
        return []
    chosen = [(name, getattr(goal, name)) for name in _GOAL]
    return [(one.ranked_layout, {"choice": name, **_cost(answer, one)}) for name, one in chosen if one is not None]


def _numbers(answer: Advice, ranked: RankedLayout) -> dict[str, Any]:
    q, time, rate = answer.question, ranked.time, ranked.tokens_per_s_per_device
    parts, energy = answer.times.shares(ranked.experiment), answer.power.joules_per_token(rate)
    return {
        "layout": layout(ranked.experiment),
        "predicted_tokens_per_s_per_gpu": rate,
        "predicted_tokens_per_s_per_gpu_low": rate * time.step_time_s / time.high_s,
        "predicted_tokens_per_s_per_gpu_high": rate * time.step_time_s / time.low_s,
        "predicted_step_time_s": time.step_time_s,
        "predicted_step_time_low_s": time.low_s,
        "predicted_step_time_high_s": time.high_s,
        "predicted_step_time_cautious_s": time.cautious_s,
        "predicted_mfu": predicted_mfu(q.model, q.seq_len, q.precision, rate, q.cluster),
        "predicted_peak_bytes": ranked.memory.peak_bytes + q.cluster.device.workspace_bytes,
        "predicted_energy_per_token_j": energy.measured,
        "predicted_energy_per_token_at_most_j": energy.most,
        "work_share": parts.work,
        "pipeline_share": parts.fill,
        "traffic_share": parts.traffic,
        "optimizer_share": parts.after,
    }


def _cost(answer: Advice, one: Costed) -> dict[str, Any]:
    time, price_per_hour = one.ranked_layout.time, answer.question.price
    energy = answer.power.mwh(one.device_hours)
    return {
        "gpus": one.ranked_layout.experiment.world_size,
        "days": one.days,
        "days_low": one.days * time.low_s / time.step_time_s,
        "days_high": one.slow_days,
        "gpu_hours": one.device_hours,
        "price": one.device_hours * price_per_hour if price_per_hour is not None else None,
        "energy_mwh": energy.measured,
        "energy_at_most_mwh": energy.most,
        **_numbers(answer, one.ranked_layout),
    }
