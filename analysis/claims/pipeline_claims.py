"""The study's claims on pipelines: the effect of rewriting their communication, how long they wait, and when they
win."""

from __future__ import annotations

import pandas as pd

from analysis.claims import published
from analysis.claims.verdicts import FAIL, FEWEST, PASS, SAME, UNKNOWN, Tally, Verdict
from analysis.rows import labels, metrics, pairs, pipeline_bubble, winners
from results.text.numbers import format_percent, listed, plural


def pipeline_rewrite(frame: pd.DataFrame) -> Verdict:
    """Rewriting the pipeline's communication made pipelines faster."""
    if "after_pp_fix" not in frame:
        return Verdict(UNKNOWN, "no row says that it ran before or after a rewrite")
    ok = frame[(frame["outcome"] == "ok") & (frame["pp"] > 1)]
    every = _two_sides(ok, metrics.GROUP, ok["after_pp_fix"].eq(True), metrics.MFU)
    groups = every[every["fewest"] >= FEWEST]
    label, nodes, before, after = published.BEST_PIPELINE_BEFORE_AND_AFTER
    key = (label, nodes * published.DEVICES_PER_NODE)
    if key not in groups.index:
        return Verdict(UNKNOWN, f"fewer than {FEWEST} pipelines on one side of the rewrite")
    compared, kept = (_ahead(cells) for cells in (every, groups))
    slower = [f"{name} on {size}" for name, size in every.index[every["best_yes"] <= every["best_no"]]]
    at = labels.records(groups[groups.index == key])[0]
    found_before, found_after = at["best_no"], at["best_yes"]
    same = abs(found_before - before) < 0.001 and abs(found_after - after) < 0.001
    text = (
        f"best pipeline of {label} on {key[1]} GPUs: {format_percent(found_before)} before, "
        f"{format_percent(found_after)} after; of all models and sizes with pipelines on both sides the best after is "
        f"better in {compared}"
        + (f" (not {listed(slower)})" if slower else "")
        + f", of those with {FEWEST} or more on "
        f"each side in {kept}. Not matched: the two sides ran different layouts"
    )
    verdict = PASS if same and kept.holds == kept.of else FAIL
    return Verdict(verdict, text, compared, kept, f"fewer than {FEWEST} pipelines on a side")


def bubble_is_waited(frame: pd.DataFrame) -> Verdict:
    """Pipelines wait at least ``(p − 1) / (v m)`` of their busy time."""
    waited = pipeline_bubble.waited(frame)
    if len(waited) >= FEWEST:
        ratio = waited["measured"] / waited["bubble"]
        enough = float((ratio > 1 - SAME).mean())
        rank = waited["measured"].rank().corr(waited["bubble"].rank())
        text = (
            f"{plural(len(waited), 'pipeline')} waited {ratio.median():.2f} times the closed form in the median "
            f"({ratio.min():.2f} to {ratio.max():.2f}), rank correlation {rank:.2f}"
        )
        tally = Tally(int((ratio > 1 - SAME).sum()), len(ratio))
        return Verdict(PASS if enough >= 0.95 and rank > 0.7 else FAIL, text, tally)
    rows = pairs.candidates(frame)
    rows = rows[rows["pp"] > 1]
    free = ["num_microbatches", "micro_batch_size"]
    rows = pairs.once(rows)
    both = pairs.matched(rows, rows, free)
    both = both[both["num_microbatches_two"] == 2 * both["num_microbatches_one"]]
    text = "the waiting of pipelines was not timed"
    if len(both):
        text += (
            f", and at a fixed batch twice the micro-batches are half as large, so {plural(len(both), 'pair')} that "
            "differ in m differ in the micro-batch too"
        )
    return Verdict(UNKNOWN, text)


def no_pipeline_wins_from_16_nodes(frame: pd.DataFrame) -> Verdict:
    """Published claim: from 16 nodes on, the winners have tensor parallelism and no pipeline."""
    best = winners.best_by(frame, "published_mfu")
    large = best[best["node_count"].ge(16).fillna(False).astype(bool)]
    if large.empty:
        return Verdict(UNKNOWN, "no finished run on 16 nodes or more")
    holds = (large["pp"] == 1) & (large["tp"] > 1)
    others = [f"{row['label']} on {row['world_size']}: {row['degrees']}" for row in labels.records(large[~holds])]
    text = f"{int(holds.sum())} of {plural(len(large), 'winner')}" + (f"; not {listed(others)}" if others else "")
    return Verdict(PASS if holds.all() else FAIL, text, Tally(int(holds.sum()), len(large)))


def no_pipeline_wins_in_one_regime(frame: pd.DataFrame) -> Verdict:
    """The claim on 16 nodes and more among runs of one network regime, for cells with enough runs on both sides."""
    every = pairs.comparable(frame)
    every = every[winners.node_count(every).ge(16).fillna(False).astype(bool)]
    rows = pairs.candidates(frame)
    rows = rows[winners.node_count(rows).ge(16).fillna(False).astype(bool)]
    if rows.empty or rows["network_regime"].isna().all():
        return Verdict(UNKNOWN, "no finished run on 16 nodes or more with a known network regime")
    cells = _two_sides(rows, [*metrics.GROUP, "network_regime"], rows["pp"] == 1, metrics.RANK_BY)
    enough = cells[cells["fewest"] >= FEWEST]
    tallies = (_ahead(cells), _ahead(enough), f"fewer than {FEWEST} runs on a side in one regime")
    fast = every[every["network_regime"] == "fast"]
    shares = (
        f"{int((fast['pp'] == 1).sum())} of {int((every['pp'] == 1).sum())} runs without a pipeline had the fast "
        f"network, {int((fast['pp'] > 1).sum())} of {int((every['pp'] > 1).sum())} with one"
    )
    asked = rows.groupby(metrics.GROUP).ngroups
    comparable = enough.reset_index().groupby(metrics.GROUP).ngroups
    ahead = enough["best_yes"] > enough["best_no"]
    cells_in_words = [
        f"{name} on {size} ({regime}): {'without' if won else 'with'} a pipeline"
        for (name, size, regime), won in zip(enough.index, ahead, strict=True)
    ]
    text = (
        f"{shares}. Of the models, sizes and regimes with a run on both sides pp = 1 is ahead in {tallies[0]}, of "
        f"those with {FEWEST} on each in {tallies[1]}. {comparable} of "
        f"{plural(asked, 'model and size', 'models and sizes')} have {FEWEST} runs on both sides in one regime"
        + (f"; ahead there: {listed(cells_in_words, 8)}" if cells_in_words else "")
    )
    if comparable < asked / 2:
        return Verdict(UNKNOWN, text, *tallies)
    return Verdict(PASS if ahead.all() else FAIL, text, *tallies)


def _two_sides(rows: pd.DataFrame, keys: list[str], side: pd.Series, column: str) -> pd.DataFrame:
    """Best values on and off ``side``: ``best_yes`` and ``best_no`` are the highest ``column`` in groups with runs on
    both sides; ``fewest`` is the smaller number of runs of the two sides."""
    parts = []
    for name, part in (("yes", rows[side]), ("no", rows[~side])):
        groups = part.groupby(keys)[column]
        parts.append(pd.DataFrame({f"best_{name}": groups.max(), f"runs_{name}": groups.count()}).dropna())
    both = parts[0].join(parts[1], how="inner")
    return both.assign(fewest=both[["runs_yes", "runs_no"]].min(axis=1))


def _ahead(cells: pd.DataFrame) -> Tally:
    """Number of cells of `_two_sides` in which the best on the side is ahead of the best off it."""
    return Tally(int((cells["best_yes"] > cells["best_no"]).sum()), len(cells))
