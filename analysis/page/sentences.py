"""The report's sentences: what was run, what is best, what failed and how far to trust it, each with its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.cohorts import mixtures
from analysis.rows.load import (
    DECIDING,
    LoadedResults,
    decided,
    last_attempts,
    not_run_yet,
    planned,
    waiting,
    without_result,
)
from analysis.rows.stats import MIN_FOR_INTERVAL, MedianInterval, median_interval
from results.statistics import noise
from results.tables import store
from results.text.numbers import format_bytes, format_number, format_percent, listed, plural

_METHODS = {"rehearsed_fake": "traced without a device"}
_MOST_WINNERS = 4
"""Number of groups up to which every winner gets a sentence; with more, one size of each of so many models gets one.
The table has every group."""
_ALONE = 0.1
"""Lead over every other layout above which a winner is less certain, because no similar layout confirms it."""


_SAID = ("model", "world_size", "backend", "ended_at")
"""Columns of attempts, besides those that decide points, of which `what_was_run` speaks."""


def what_was_run(results: LoadedResults) -> list[str]:
    """Sentences on the whole folder: its sweeps, points, dates, and what the plan ran or excluded."""
    attempts = results.attempts[[name for name in (*DECIDING, *_SAID) if name in results.attempts]]
    final = last_attempts(attempts)
    sentences = []
    named = f" ({listed([str(name) for name in results.sweeps])})" if results.sweeps else ""
    if attempts.empty:
        sentences.append(f"{plural(len(results.sweeps), 'sweep')}{named} without a single attempt.")
    else:
        again = len(attempts) - len(final)
        retries = f", {plural(again, 'earlier attempt')} of them tried again" if again else ""
        ended = decided(attempts, ["method"])
        methods = ended["method"].value_counts()
        how = listed([f"{count:,} {_METHODS.get(str(method), method)}" for method, count in methods.items()])
        where = f"in {plural(len(results.sweeps), 'sweep')}{named}"
        tried = f"{plural(len(ended), 'point')} attempted {where}"
        sentences.append(f"{tried}: {how}{retries}." if len(ended) else f"{tried}.")
        sentences += _stopped(len(final) - len(ended))
        models = [str(name) for name in final["model"].dropna().unique()]
        sizes = [f"{size:,}" for size in labels.world_sizes(final)]
        noun = labels.device_noun(final)
        sentences.append(f"{plural(len(models), 'model')} ({listed(models)}) on {listed(sizes, 12)} {noun}.")
        started, ended = attempts["started_at"].min(), attempts["ended_at"].max()
        if pd.notna(started) and pd.notna(ended):
            sentences.append(f"From {started:%Y-%m-%d %H:%M} to {ended:%Y-%m-%d %H:%M} UTC.")
    return sentences + _plan(results)


def _plan(results: LoadedResults) -> list[str]:
    verdict = results.ledger["verdict"].copy()
    verdict[planned(results).index] = "run"
    verdicts = verdict.value_counts()
    if verdicts.empty:
        return []
    names = {
        "run": "to run",
        "cached": "answered by the rows of another sweep",
        "invalid": "excluded by a rule",
        "predicted_oom": "predicted not to fit",
        "over_budget": "over the budget",
    }
    parts = [f"{verdicts[verdict]:,} {name}" for verdict, name in names.items() if verdict in verdicts]
    said = [f"The plan has {plural(int(verdicts.sum()), 'grid point')}: {listed(parts)}."]
    left = len(without_result(results)) if store.is_shipped(results.path) else 0
    return [*said, f"{plural(left, 'point')} of these sweeps did not run before they ended."] if left else said


def unfinished(results: LoadedResults) -> str | None:
    """A sentence if planned points have no result yet, otherwise None."""
    left = len(waiting(results))
    if not left:
        return None
    points = plural(len(planned(results)), "planned point")
    return f"Unfinished: {left:,} of {points} {'has' if left == 1 else 'have'} no result yet. These results may change."


def what_is_best(frame: pd.DataFrame) -> list[str]:
    """A sentence for each winner, the most informative first: the largest model on the most devices among certain
    winners.

    With more than `_MOST_WINNERS` groups, only the first winner of each model gets one. Sentences on less certain
    winners and mixed batches follow.
    """
    best = metrics.best_configurations(frame)
    if best.empty:
        return ["No run has finished with a throughput, so nothing can be called best."]
    best = labels.in_group_order(best).iloc[::-1]
    best = best.assign(_doubt=_doubts(best, frame))
    noun, unit = labels.device_noun(frame), labels.rate_unit(frame)
    best = best.sort_values("_doubt", key=lambda doubt: doubt.ne(""), kind="stable")
    shown = best
    if len(best) > _MOST_WINNERS:
        shown = best.drop_duplicates("workload").head(_MOST_WINNERS)
    winner_sentences = [_winner(row, noun, unit) for row in labels.records(shown)]
    return winner_sentences + _less_certain(best) + _batches(frame, noun)


def _doubts(best: pd.DataFrame, frame: pd.DataFrame) -> list[str]:
    """Reason why each winner is less certain; empty if there is none."""
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna()]
    regimes = rows.groupby(metrics.GROUP)["network_regime"].nunique().to_dict() if "network_regime" in rows else {}
    doubts = []
    for row in labels.records(best):
        if regimes.get((row["workload"], row["world_size"]), 0) > 1:
            doubts.append("the layouts ran in different network regimes")
        elif row["candidates"] < MIN_FOR_INTERVAL:
            doubts.append(f"fewer than {MIN_FOR_INTERVAL} layouts finished")
        elif row["slower_by"] > _ALONE:
            doubts.append(
                f"the next layout is more than {format_percent(_ALONE, 0)} slower, so no similar layout "
                "confirms the winner"
            )
        else:
            doubts.append("")
    return doubts


def _less_certain(best: pd.DataFrame) -> list[str]:
    """One sentence on the winners that are less certain, with the reasons."""
    counts = best.loc[best["_doubt"] != "", "_doubt"].value_counts()
    if not len(counts) or len(best) == 1:
        return []
    why = "; ".join(f"{count} because {doubt}" for doubt, count in counts.items())
    return [
        f"{counts.sum()} of {plural(len(best), 'winner')} {'is' if counts.sum() == 1 else 'are'} less certain: {why}."
    ]


def _batches(frame: pd.DataFrame, noun: str) -> list[str]:
    """One sentence if runs of different batch sizes are ranked together."""
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna() & rows["tokens_per_step"].notna()]
    mixed_groups = []
    for _, group in rows.groupby(metrics.GROUP, sort=False):
        counts = group["tokens_per_step"].value_counts()
        if len(counts) > 1:
            shown = listed([f"{tokens:,.0f} ({count:,})" for tokens, count in counts.items()])
            mixed_groups.append(
                f"{labels.group_name(group['workload'].iloc[0], group['world_size'].iloc[0], noun)}: {shown}"
            )
    if not mixed_groups:
        return []
    return [
        "Runs of several batch sizes are ranked together; a larger batch spreads the costs of a step over more tokens. "
        f"Tokens per step (runs): {'; '.join(mixed_groups[:_MOST_WINNERS])}"
        + (f"; and {len(mixed_groups) - _MOST_WINNERS} more." if len(mixed_groups) > _MOST_WINNERS else ".")
    ]


def _winner(row: Mapping[str, Any], noun: str, unit: str) -> str:
    details = []
    if pd.notna(row[metrics.MFU]):
        details.append(f"{metrics.MFU_NAME} {format_percent(row[metrics.MFU])}")
    if pd.notna(row["peak_allocated_bytes"]):
        details.append(f"peak {format_bytes(row['peak_allocated_bytes'])}")
    elif pd.notna(row["peak_reserved_bytes"]):
        details.append(f"{format_bytes(row['peak_reserved_bytes'])} reserved")
    text = f"{row['workload']} on {labels.devices(row['world_size'], noun)}: {row['layout']} is fastest of "
    text += f"{plural(int(row['candidates']), 'finished layout')} with {format_number(row[metrics.RANK_BY])} {unit}"
    text += f" ({', '.join(details)})" if details else ""
    if pd.isna(row["slower_by"]):
        return text + "; there is nothing to compare it with."
    if pd.isna(row["tie"]):
        return (
            text + f"; the next one, {row['runner_up']}, is {format_percent(row['slower_by'])} slower; the share "
            "of noise in this difference is unknown, because there is no spread of steps and there are no repeats."
        )
    if metrics.is_tie(row["tie"]):
        named = listed(row["tied_layouts"].split("; "), 4)
        return (
            text + f", and {plural(int(row['tied']), 'more layout')} within the noise may be as fast: {named}, up to "
            f"{format_percent(row['tied_slower_by'])} slower ({noise.describe(row)})."
        )
    return text + (
        f"; the next one, {row['runner_up']}, is {format_percent(row['slower_by'])} slower, more than noise explains "
        f"({noise.describe(row)})."
    )


def _stopped(count: int) -> list[str]:
    """Sentence on the points whose last attempt was cancelled or will be retried."""
    has = "has" if count == 1 else "have"
    return [f"{plural(count, 'point')} had to stop and {has} not run yet."] if count else []


def what_failed(frame: pd.DataFrame) -> list[str]:
    """Counts by kind, the device time that failures took, and the phases they happened in."""
    final = last_attempts(frame)
    final = final[~not_run_yet(final)]
    failed = final[final["outcome"] != "ok"]
    if final.empty:
        return []
    if failed.empty:
        fine = "The one point did not fail." if len(final) == 1 else f"None of the {len(final):,} points failed."
        return [fine]
    kinds = failed["outcome"].value_counts()
    parts = [f"{count:,} {labels.OUTCOME_NAMES.get(str(kind), kind)}" for kind, count in kinds.items()]
    sentences = [
        f"{len(failed):,} of {plural(len(final), 'point')} did not finish "
        f"({format_percent(len(failed) / len(final))}): {listed(parts)}.",
    ]
    hours = metrics.device_hours(frame)
    if hours.sum() > 0:
        lost = hours.drop("ok", errors="ignore").sum()
        noun = "GPU-hours" if labels.device_noun(frame) == "GPUs" else "process-hours"
        sentences.append(
            f"Attempts that did not finish held {format_number(lost)} of {format_number(hours.sum())} {noun} "
            f"({format_percent(lost / hours.sum())})."
        )
    phases = failed["phase"].dropna().value_counts()
    if len(phases):
        shown = listed([f"{phase} ({count:,})" for phase, count in phases.items()])
        sentences.append(f"Phases in which points did not finish: {shown}.")
    hung = int(final["teardown_hung"].eq(True).sum())
    if hung:
        sentences.append(f"{plural(hung, 'point')} measured in full had to be killed in teardown; they count as ok.")
    return sentences


def how_far_to_trust(frame: pd.DataFrame) -> list[str]:
    """Spread of steps, agreement of losses, prediction errors, and differences between rows."""
    sentences = []
    spread = median_interval(metrics.step_spread(frame))
    if spread is not None:
        sentences.append(
            f"Within a run the slowest timed step took {_interval(spread)} longer than the fastest "
            f"(median of {plural(spread.n, 'run')})."
        )
    once = frame["timed_steps"].eq(1) & frame[metrics.RANK_BY].notna()
    if once.any():
        sentences.append(
            f"{plural(int(once.sum()), 'throughput')} come from one timed step each, so their noise is unknown."
        )
    ranked = metrics.ranked(frame)
    repeated = ranked[ranked["repeats"] > 1]
    if len(repeated):
        worst = format_percent(float(repeated["repeat_spread"].max()))
        sentences.append(
            f"{plural(len(repeated), 'layout')} finished more than once; the runs of one differ by at most {worst}."
        )
    elif len(ranked):
        sentences.append("No layout finished more than once: differences between runs of one layout are unknown.")
    sentences += _noise(ranked)
    sentences += _losses(frame)
    for name, predicted, measured in (
        ("peak memory", "predicted_peak_bytes", "peak_allocated_bytes"),
        ("step time", "predicted_step_time_s", "step_time_s"),
    ):
        error = median_interval(metrics.prediction_errors(frame, predicted, measured).abs())
        if error is not None:
            sentences.append(
                f"The {name} predicted before the run was off by {_interval(error)} (median of {error.n:,})."
            )
    inside, known = metrics.inside_interval(frame)
    if known:
        share = format_percent(inside / known, 0)
        sentences.append(
            f"Inside the interval predicted before the run, which should hold 90 %: {inside:,} of "
            f"{plural(known, 'measured step time')} ({share})."
        )
    if frame["git_dirty"].eq(True).any():
        dirty = int(frame["git_dirty"].eq(True).sum())
        sentences.append(f"{plural(dirty, 'row')} came from a checkout with uncommitted changes.")
    throttled = int(frame["throttle_reasons"].fillna("").ne("").sum())
    if throttled:
        reasons = sorted(
            {r.strip() for text in frame["throttle_reasons"].dropna().unique() for r in text.split(",") if r.strip()}
        )
        sentences.append(f"The device clocks were throttled in {plural(throttled, 'run')} ({listed(reasons)}).")
    return sentences + mixtures(frame)


def _noise(ranked: pd.DataFrame) -> list[str]:
    """Sentence on the noise estimates that decide the order of layouts."""
    sources = []
    for source, rows in ranked[ranked["noise"].notna()].groupby("noise_from", sort=False):
        low, high = format_percent(rows["noise"].min()), format_percent(rows["noise"].max())
        span = low if low == high else f"{low} to {high}"
        sources.append(f"{span} of one run, from {source} ({plural(len(rows), 'layout')})")
    unknown = int(ranked["noise"].isna().sum())
    if unknown:
        sources.append(f"not known for {plural(unknown, 'layout')}")
    return [f"Noise used to judge the order of layouts (standard deviation): {'; '.join(sources)}."] if sources else []


def _losses(frame: pd.DataFrame) -> list[str]:
    ok = frame.loc[frame["outcome"] == "ok", ["workload", "layout", "loss_agrees"]]
    differ = ok[metrics.losses_differ(ok)]
    agree = int(ok["loss_agrees"].eq(True).sum())
    if differ.empty and not agree:
        return []
    if differ.empty:
        return [
            f"The first losses of {plural(agree, 'run')} agree with another layout's of the same model, seed and data."
        ]
    names = listed([f"{row['workload']} {row['layout']}" for row in labels.records(differ)], 4)
    return [
        f"The losses of {plural(len(differ), 'run')} differ from the reference layout's ({names}): they are not "
        f"ranked, since a wrong layout can be fast. {agree:,} agree."
    ]


def rehearsal_check(attempts: pd.DataFrame) -> list[str]:
    """Sentences that compare rehearsed rows with measured ones of the same experiments: peaks, and step times with and
    without tensor parallelism, whose collectives a rehearsal only models."""
    both = metrics.rehearsed_beside_measured(attempts)
    sentences = []
    peaks = both["peak_difference"].dropna().abs()
    if len(peaks):
        sentences.append(
            f"{plural(len(peaks), 'experiment')} were both rehearsed and measured: the rehearsed peak memory is off by "
            f"{format_percent(peaks.median(), 2)} in the median and {format_percent(peaks.max(), 2)} at most."
        )
    tp, cp = both["tp"] > 1, both["cp"] > 1
    parts = []
    for name, rows in (
        ("with tensor parallelism", both[tp]),
        ("with context parallelism", both[cp & ~tp]),
        ("without either" if cp.any() else "without it", both[~tp & ~cp]),
    ):
        times = rows["step_time_difference"].dropna()
        if len(times):
            low, middle, high = (_signed(value) for value in times.quantile([0, 0.5, 1]))
            parts.append(f"{low} to {high} (median {middle}, n = {len(times):,}) {name}")
    if parts:
        sentences.append(f"Rehearsed step times differ from the measured ones by {listed(parts)}.")
    return sentences


def _signed(fraction: float) -> str:
    return f"{100 * fraction:+.1f} %".replace("-", "−")


def _interval(value: MedianInterval) -> str:
    if value.low is None or value.high is None:
        return format_percent(value.median)
    return f"{format_percent(value.median)} (95 % interval {100 * value.low:.1f} to {format_percent(value.high)})"
