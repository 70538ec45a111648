"""The study's claims as named checks, on the study's rows and on anyone's: pass, fail or not enough data.

Each check says what it compared and with which numbers. A check of few rows says so instead of deciding. On rows that
are not the study's a claim is asked of those rows: whether the same holds there.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.claims import published
from analysis.claims import scaling as claims_scaling
from analysis.claims.verdicts import FAIL, FEWEST, PASS, SAME, UNKNOWN, Claim, Verdict, is_study
from analysis.rows import labels, metrics, pairs, pipeline_bubble, winners
from analysis.rows.cohorts import Cohort
from analysis.rows.derived import SHAPE, add_formulas
from results.text import format_number, format_percent, listed, plural

__all__ = ["CLAIMS", "FAIL", "PASS", "UNKNOWN", "Claim", "Verdict", "is_study", "table"]


def table(cohorts: Sequence[Cohort]) -> pd.DataFrame:
    """Every claim on every measured cohort: ``claim``, ``data``, ``verdict``, ``evidence``, ``name``."""
    rows = []
    for cohort in cohorts:
        if (cohort.frame["method"] != "measured").any():
            continue
        for claim in CLAIMS:
            verdict = claim.check(cohort.frame)
            rows.append(
                {
                    "claim": claim.statement,
                    "data": "the study" if is_study(cohort.frame) else cohort.title,
                    "verdict": verdict.verdict,
                    "evidence": verdict.evidence,
                    "name": claim.name,
                }
            )
    return pd.DataFrame(rows, columns=["claim", "data", "verdict", "evidence", "name"])


def published_winners(frame: pd.DataFrame) -> Verdict:
    """The winner of each cell has the published layout; on the study's rows also its MFU and memory."""
    best = winners.best_by(frame, "published_mfu")
    best = best.assign(_label=best["label"] if is_study(frame) else _label_of_shape(best))
    found = {(row["_label"], row["world_size"]): row for row in labels.records(best)}
    compared, wrong = 0, []
    for (label, nodes), cell in published.WINNERS.items():
        row = found.get((label, nodes * published.DEVICES_PER_NODE))
        if row is None:
            continue
        compared += 1
        names = ("dp", "tp", "pp", "num_microbatches", "micro_batch_size", "zero_stage")
        same = tuple(int(row[name]) for name in names) == cell.layout
        if is_study(frame):
            same = same and abs(row["mfu_percent"] - cell.mfu_percent) < 0.01
            same = same and abs(row["memory_gb"] - cell.memory_gb) < 0.01
        if not same:
            wrong.append(f"{label} on {nodes * published.DEVICES_PER_NODE} GPUs: {row['layout']}")
    if not compared:
        return Verdict(UNKNOWN, "no finished run of the study's models on its numbers of GPUs")
    what = "layout, MFU and memory" if is_study(frame) else "layout"
    agree = f"{compared - len(wrong)} of {plural(compared, 'cell')} agree in {what}"
    return Verdict(FAIL if wrong else PASS, agree + (f"; others: {listed(wrong, 3)}" if wrong else ""))


def winners_by_throughput(frame: pd.DataFrame) -> Verdict:
    """Ranking by throughput names other winners than the study's MFU."""
    both = [winners.best_by(frame, rule).set_index(["label", "world_size"]) for rule in winners.RULES]
    common = both[0].index.intersection(both[1].index)
    tied = frame["tie_embeddings"].eq(True) & (frame["outcome"] == "ok")
    if not len(common) or not (tied & (frame["pp"] > 1)).any() or not (tied & (frame["pp"] == 1)).any():
        return Verdict(UNKNOWN, "no model with tied embeddings finished both with and without a pipeline")
    changed = common[both[0].loc[common, "attempt_id"] != both[1].loc[common, "attempt_id"]]
    names = [f"{row['label']} on {row['world_size']}" for row in labels.records(both[0].loc[changed].reset_index())]
    text = f"{len(changed)} of {plural(len(common), 'winner')} change"
    expected = len(changed) == 7 if is_study(frame) else len(changed) > 0
    return Verdict(PASS if expected else FAIL, text + (f": {listed(names, 7)} GPUs" if names else ""))


def cells_are_of_their_model(frame: pd.DataFrame) -> Verdict:
    """Every published winner has the shape that its label stands for."""
    if not is_study(frame):
        return Verdict(UNKNOWN, "these rows have no labels beside their shapes")
    best = winners.best_by(frame, "published_mfu")
    other = best[best["label"] != best["workload"]]
    if other.empty:
        return Verdict(PASS, f"all {len(best)} winners have the shape of their label")
    said = []
    proper = metrics.best_configurations(frame)
    for row in labels.records(other):
        own = proper[(proper["workload"] == row["label"]) & (proper["world_size"] == row["world_size"])]
        instead = [f"{r['layout']} with {format_number(r[metrics.RANK_BY])} tokens/s/GPU" for r in labels.records(own)]
        said.append(
            f"{row['label']} on {row['world_size']} GPUs is {row['workload']} with "
            f"{format_number(row[metrics.RANK_BY])} tokens/s/GPU; "
            f"the best {row['label']} proper is {listed(instead) or 'none'}"
        )
    return Verdict(FAIL, listed(said))


def mfu_formula(frame: pd.DataFrame) -> Verdict:
    """``(6 N + 12 L h s) * tokens/s/GPU / peak`` gives the recorded MFU."""
    ok = frame[frame["outcome"] == "ok"]
    if is_study(frame):
        known = ok[ok["counted_params"].notna()]
        flops = 6 * known["counted_params"] + 12 * known["num_layers"] * known["hidden_size"] * known["seq_len"]
        recorded, again = known["published_mfu"], flops * known["tokens_per_s_per_gpu"] / known["peak_flops"]
    else:
        known = ok[ok["mfu_playbook"].notna() & ok[[*SHAPE]].notna().all(axis=1)]
        recorded, again = known["mfu_playbook"], add_formulas(known)["mfu_playbook"]
    if known.empty:
        return Verdict(UNKNOWN, "no finished run has an MFU and its shape")
    error = (again / recorded - 1).abs()
    wrong = int((error > 1e-6).sum())
    again_text = f"{len(known) - wrong:,} of {plural(len(known), 'value')} reproduced"
    return Verdict(FAIL if wrong else PASS, f"{again_text}, largest relative difference {error.max():.0e}")


def tied_embeddings(frame: pd.DataFrame) -> Verdict:
    """The study's MFU of pipelines counts tied embeddings twice."""
    ok = frame[(frame["outcome"] == "ok") & frame["tie_embeddings"].eq(True) & frame[metrics.MFU].notna()]
    share = winners.published_mfu(ok) / ok[metrics.MFU]
    split = ok.assign(_share=share, _piped=ok["pp"] > 1).groupby(["workload", "_piped"])["_share"].median().unstack()
    if True not in split or False not in split or split.dropna().empty:
        return Verdict(UNKNOWN, "no model with tied embeddings finished both with and without a pipeline")
    inflation = (split[True] / split[False]).dropna()
    expected = [
        abs(value - published.INFLATION[str(name)]) < 0.01 if name in published.INFLATION else value > 1.01
        for name, value in inflation.items()
    ]
    text = listed([f"× {value:.3f} for {name}" for name, value in inflation.items()])
    return Verdict(PASS if all(expected) else FAIL, f"the MFU of a pipeline is higher by {text} at the same throughput")


def pipeline_rewrite(frame: pd.DataFrame) -> Verdict:
    """Rewriting the pipeline's communication made pipelines faster."""
    if "after_pp_fix" not in frame:
        return Verdict(UNKNOWN, "no row says that it ran before or after a rewrite")
    ok = frame[(frame["outcome"] == "ok") & (frame["pp"] > 1)]
    groups = _two_sides(ok, metrics.GROUP, ok["after_pp_fix"].eq(True), metrics.MFU)
    label, nodes, before, after = published.BEST_PIPELINE_BEFORE_AND_AFTER
    key = (label, nodes * published.DEVICES_PER_NODE)
    if key not in groups.index:
        return Verdict(UNKNOWN, f"fewer than {FEWEST} pipelines on one side of the rewrite")
    faster = int((groups["best_yes"] > groups["best_no"]).sum())
    at = labels.records(groups[groups.index == key])[0]
    found_before, found_after = at["best_no"], at["best_yes"]
    same = abs(found_before - before) < 0.001 and abs(found_after - after) < 0.001
    text = (
        f"best pipeline of {label} on {key[1]} GPUs: {format_percent(found_before)} before, "
        f"{format_percent(found_after)} after; the best after is better in {faster} of "
        f"{plural(len(groups), 'model and size', 'models and sizes')}. Not matched: the two sides ran other layouts"
    )
    return Verdict(PASS if same and faster == len(groups) else FAIL, text)


def zero_one_matched(frame: pd.DataFrame) -> Verdict:
    """ZeRO 1 saves memory and costs no throughput, over pairs that differ in nothing else."""
    rows = pairs.comparable(frame)
    rows = rows[rows["dp"] > 1]
    rows = _one_of_each(rows)
    both = pairs.matched(rows[rows["zero_stage"] == 0], rows[rows["zero_stage"] == 1], ["zero_stage"])
    speed, memory = pairs.ratio(both, metrics.RANK_BY), pairs.ratio(both, metrics.memory_column(frame))
    if speed is None or memory is None or speed.value.n < FEWEST or speed.value.low is None or speed.value.high is None:
        return Verdict(UNKNOWN, f"{plural(len(both), 'pair')} of runs that differ only in ZeRO 0 or 1")
    by_size = (both[f"{metrics.RANK_BY}_two"] / both[f"{metrics.RANK_BY}_one"]).groupby(both["world_size"])
    sizes = [f"{value:.2f} on {size}" for size, value in by_size.median()[by_size.size() >= FEWEST].items()]
    text = f"throughput of ZeRO 1 over ZeRO 0: {speed.text}; memory: {memory.text}"
    text += f"; by number of GPUs {listed(sizes, 9)}" if len(sizes) > 1 else ""
    holds = speed.value.low > 1 - SAME and memory.value.median < 1
    return Verdict(PASS if holds else FAIL, text)


def tensor_beyond_node(frame: pd.DataFrame) -> Verdict:
    """Doubling tp beyond the node costs more than doubling it inside, best against best without a pipeline."""
    rows = pairs.candidates(frame)
    rows = rows[rows["pp"] == 1]
    nodes = winners.node_count(rows).astype(float)
    sizes = (rows["world_size"] / nodes)[nodes > 1]
    if sizes.empty:
        return Verdict(UNKNOWN, "no finished run without a pipeline is known to have spanned two nodes")
    per_node = int(sizes.max())
    rows = rows.assign(network_regime=rows["network_regime"].astype(object).where(rows["network_regime"].notna(), "–"))
    best = rows.groupby(["workload", "world_size", "network_regime", "tp"])[metrics.RANK_BY].max().reset_index()

    def doubled(tp: int) -> pairs.Ratio | None:
        keys = ["workload", "world_size", "network_regime"]
        one, two = best[best["tp"] == tp], best[best["tp"] == 2 * tp]
        return pairs.ratio(one.merge(two, on=keys, suffixes=("_one", "_two")), metrics.RANK_BY)

    inside, beyond = doubled(per_node // 2), doubled(per_node)
    if beyond is None or inside is None or beyond.value.n < FEWEST or inside.value.n < FEWEST:
        return Verdict(UNKNOWN, f"fewer than {FEWEST} models and sizes with tp of {per_node} and {2 * per_node}")
    text = f"tp {per_node} → {2 * per_node}: {beyond.text}; "
    text += f"inside the node, tp {per_node // 2} → {per_node}: {inside.text}"
    assert beyond.value.high is not None
    assert inside.value.low is not None
    return Verdict(PASS if beyond.value.high < min(inside.value.low, 1) else FAIL, text)


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
        return Verdict(PASS if enough >= 0.95 and rank > 0.7 else FAIL, text)
    rows = pairs.candidates(frame)
    rows = rows[rows["pp"] > 1]
    free = ["num_microbatches", "micro_batch_size"]
    rows = _one_of_each(rows)
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
    """As published: from 16 nodes on the winners have no pipeline, and tensor parallelism."""
    best = winners.best_by(frame, "published_mfu")
    large = best[best["node_count"].ge(16).fillna(False).astype(bool)]
    if large.empty:
        return Verdict(UNKNOWN, "no finished run on 16 nodes or more")
    holds = (large["pp"] == 1) & (large["tp"] > 1)
    others = [f"{row['label']} on {row['world_size']}: {row['degrees']}" for row in labels.records(large[~holds])]
    text = f"{int(holds.sum())} of {plural(len(large), 'winner')}" + (f"; not {listed(others)}" if others else "")
    return Verdict(PASS if holds.all() else FAIL, text)


def no_pipeline_wins_in_one_regime(frame: pd.DataFrame) -> Verdict:
    """The same among runs of one regime of the network, where both sides have enough runs."""
    every = pairs.comparable(frame)
    every = every[winners.node_count(every).ge(16).fillna(False).astype(bool)]
    rows = pairs.candidates(frame)
    rows = rows[winners.node_count(rows).ge(16).fillna(False).astype(bool)]
    if rows.empty or rows["network_regime"].isna().all():
        return Verdict(UNKNOWN, "no finished run on 16 nodes or more whose network's regime is known")
    enough = _two_sides(rows, [*metrics.GROUP, "network_regime"], rows["pp"] == 1, metrics.RANK_BY)
    fast = every[every["network_regime"] == "fast"]
    shares = (
        f"{int((fast['pp'] == 1).sum())} of {int((every['pp'] == 1).sum())} runs without a pipeline had the fast "
        f"network, {int((fast['pp'] > 1).sum())} of {int((every['pp'] > 1).sum())} with one"
    )
    asked = rows.groupby(metrics.GROUP).ngroups
    comparable = enough.reset_index().groupby(metrics.GROUP).ngroups
    ahead = enough["best_yes"] > enough["best_no"]
    told = [
        f"{name} on {size} ({regime}): {'without' if won else 'with'} a pipeline"
        for (name, size, regime), won in zip(enough.index, ahead, strict=True)
    ]
    text = (
        f"{shares}. {comparable} of {plural(asked, 'model and size', 'models and sizes')} have {FEWEST} runs on both "
        "sides in one regime" + (f"; ahead there: {listed(told, 8)}" if told else "")
    )
    if comparable < asked / 2:
        return Verdict(UNKNOWN, text)
    return Verdict(PASS if ahead.all() else FAIL, text)


def throughputs_repeat(frame: pd.DataFrame) -> Verdict:
    """Runs of one configuration have the same throughput."""
    rows = metrics.ranked(frame)
    again = rows[rows["repeats"] > 1]
    if len(again) >= FEWEST:
        worst = float(again["repeat_spread"].max())
        text = (
            f"{plural(len(again), 'configuration')} ran more than once; their runs differ by at most "
            f"{format_percent(worst)}"
        )
        return Verdict(PASS if worst < 2 * SAME else FAIL, text)
    steps = frame.loc[frame["outcome"] == "ok", "timed_steps"].dropna()
    text = f"{plural(len(again), 'configuration') if len(again) else 'no configuration'} finished more than once"
    if len(steps) and steps.max() == 1:
        text += ", and every throughput is that of one step"
    text += _across_engines(rows)
    return Verdict(UNKNOWN, text)


def _across_engines(rows: pd.DataFrame) -> str:
    """What became of configurations that finished under several versions of one engine."""
    varying = ("engine_version", "network_regime")
    settings = [name for name in pairs.SETTINGS if name in rows and name not in varying]
    rates = rows.groupby(settings, dropna=False)[metrics.RANK_BY]
    again = [sorted(group, reverse=True) for _, group in rates if len(group) > 1]
    if not again:
        return ""
    worst = max(again, key=lambda group: group[0] / group[-1])
    told = f"{plural(len(again), 'configuration')} finished under several versions of the engine"
    apart = f"{format_number(worst[0])} and {format_number(worst[-1])} {labels.rate_unit(rows)}"
    return f"; {told}, the furthest apart with {apart}"


CLAIMS = (
    Claim("published_winners", "The published best configurations are the best by the study's MFU", published_winners),
    Claim("winners_by_throughput", "Ranked by tokens/s/GPU, other configurations win", winners_by_throughput),
    Claim(
        "cells_are_of_their_model", "Every published winner is of the model it is labelled as", cells_are_of_their_model
    ),
    Claim("mfu_formula", "(6 N + 12 L h s) · tokens/s/GPU over the peak gives every recorded MFU", mfu_formula),
    Claim("tied_embeddings", "The study's MFU counts tied embeddings twice in pipelines", tied_embeddings),
    Claim("pipeline_rewrite", "Rewriting the pipeline's communication made pipelines faster", pipeline_rewrite),
    Claim("zero_one_matched", "ZeRO 1 saves memory and costs no throughput against ZeRO 0", zero_one_matched),
    Claim("tensor_beyond_node", "Tensor parallelism beyond the node costs more than inside it", tensor_beyond_node),
    Claim("bubble_is_waited", "A pipeline waits at least (p − 1) / (v m) of its busy time", bubble_is_waited),
    Claim(
        "no_pipeline_wins_from_16_nodes",
        "From 16 nodes on, pp = 1 with tensor parallelism wins",
        no_pipeline_wins_from_16_nodes,
    ),
    Claim(
        "no_pipeline_wins_in_one_regime",
        "From 16 nodes on, pp = 1 wins among runs on the same regime of the network",
        no_pipeline_wins_in_one_regime,
    ),
    Claim(
        "data_parallel_falls",
        "Each doubling of pure data parallelism costs throughput per GPU",
        claims_scaling.data_parallel_falls,
    ),
    Claim(
        "short_pipelines_are_slower",
        "A pipeline with 32 micro-batches is faster than one with m = p − 1 (or m = p)",
        claims_scaling.short_pipelines_are_slower,
    ),
    Claim(
        "published_bars",
        "Every bar of the published scaling figures is a row of the table",
        claims_scaling.published_bars,
    ),
    Claim(
        "bandwidths_are_medians",
        "The published bandwidths are medians over the runs, as captioned",
        claims_scaling.bandwidths_are_medians,
    ),
    Claim(
        "bandwidth_falls_in_one_regime",
        "From 8 nodes on, more nodes slow the all-reduce down also inside one regime of the network",
        claims_scaling.bandwidth_falls_in_one_regime,
    ),
    Claim(
        "failures_take_devices",
        "Runs that fail take about 45 % of the requested GPUs",
        claims_scaling.failures_take_devices,
    ),
    Claim("throughputs_repeat", "Runs of one configuration have the same throughput", throughputs_repeat),
)


def _one_of_each(rows: pd.DataFrame) -> pd.DataFrame:
    """The middle run by throughput of each configuration: paired many with many, runs of one would count by the product
    of their numbers."""
    ordered = rows.sort_values(metrics.RANK_BY, kind="stable")
    groups = ordered.groupby(list(pairs.SETTINGS), dropna=False)[metrics.RANK_BY]
    return ordered[groups.cumcount() == (groups.transform("size") - 1) // 2]


def _two_sides(rows: pd.DataFrame, keys: list[str], side: pd.Series, column: str) -> pd.DataFrame:
    """``best_yes`` and ``best_no``: the highest ``column`` on and off ``side``, of groups with enough runs on both."""
    parts = []
    for name, part in (("yes", rows[side]), ("no", rows[~side])):
        groups = part.groupby(keys)[column]
        parts.append(pd.DataFrame({f"best_{name}": groups.max()})[groups.size() >= FEWEST])
    return parts[0].join(parts[1], how="inner")


def _label_of_shape(rows: pd.DataFrame) -> pd.Series:
    """The study's label of each row's shape; None for another model."""
    by_shape = {shape: label for label, shape in published.SHAPES.items()}

    def find(row: pd.Series) -> str | None:
        names = ("num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size")
        if row[[*names, "num_kv_heads"]].isna().any() or row["num_kv_heads"] != row["num_heads"]:
            return None
        return by_shape.get(published.Shape(*(int(row[name]) for name in names)))

    if rows.empty:
        return pd.Series([], dtype=object)
    return pd.Series([find(row) for _, row in rows.iterrows()], index=rows.index, dtype=object)
