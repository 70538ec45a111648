"""The study's claims on single choices, asked of pairs of runs: ZeRO 1, tensor parallelism, repeats."""

from __future__ import annotations

import pandas as pd

from analysis.claims.verdicts import FAIL, FEWEST, PASS, SAME, UNKNOWN, Verdict
from analysis.rows import labels, metrics, pairs, winners
from results.text import format_number, format_percent, listed, plural


def zero_one_matched(frame: pd.DataFrame) -> Verdict:
    """ZeRO 1 saves memory and costs no throughput, over pairs that differ in nothing else."""
    rows = pairs.comparable(frame)
    rows = rows[rows["dp"] > 1]
    rows = one_of_each(rows)
    both = pairs.matched(rows[rows["zero_stage"] == 0], rows[rows["zero_stage"] == 1], ["zero_stage"])
    speed, memory = pairs.ratio(both, metrics.RANK_BY), pairs.ratio(both, metrics.memory_column(frame))
    if speed is None or memory is None or speed.value.n < FEWEST or speed.value.low is None or speed.value.high is None:
        return Verdict(UNKNOWN, f"{plural(len(both), 'pair')} of runs that differ only in ZeRO 0 or 1")
    by_size = (both[f"{metrics.RANK_BY}_two"] / both[f"{metrics.RANK_BY}_one"]).groupby(both["world_size"])
    sizes = [f"{value:.2f} on {size}" for size, value in by_size.median()[by_size.size() >= FEWEST].items()]
    text = f"pairs that differ in nothing else, throughput of ZeRO 1 over ZeRO 0: {speed.text}; memory: {memory.text}"
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
    text += f"inside the node, tp {per_node // 2} → {per_node}: {inside.text}; "
    text += "best run without a pipeline of each model and size"
    assert beyond.value.high is not None
    assert inside.value.low is not None
    return Verdict(PASS if beyond.value.high < min(inside.value.low, 1) else FAIL, text)


def throughputs_repeat(frame: pd.DataFrame) -> Verdict:
    """Runs of one configuration have the same throughput."""
    rows = metrics.ranked(frame)
    again = rows[rows["repeats"] > 1]
    if len(again) >= FEWEST:
        worst = float(again["repeat_spread"].max())
        text = (
            f"{plural(len(again), 'configuration')} ran more than once; "
            f"their runs differ by at most {format_percent(worst)}"
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
    furthest = f"{format_number(worst[0])} and {format_number(worst[-1])} {labels.rate_unit(rows)}"
    return f"; {told}, the furthest apart with {furthest}"


def one_of_each(rows: pd.DataFrame) -> pd.DataFrame:
    """The middle run by throughput of each configuration: paired many with many, runs of one would count by the product
    of their numbers."""
    ordered = rows.sort_values(metrics.RANK_BY, kind="stable")
    groups = ordered.groupby(list(pairs.SETTINGS), dropna=False)[metrics.RANK_BY]
    return ordered[groups.cumcount() == (groups.transform("size") - 1) // 2]
