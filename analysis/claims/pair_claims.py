"""The study's claims on single choices, checked on pairs of runs: ZeRO 1, tensor parallelism, repeats."""

from __future__ import annotations

import pandas as pd

from analysis.claims.verdicts import FAIL, FEWEST, PASS, SAME, UNKNOWN, Tally, Verdict
from analysis.rows import labels, metrics, pairs, winners
from results.text.numbers import format_number, format_percent, listed, plural


def zero_one_matched(frame: pd.DataFrame) -> Verdict:
    """ZeRO 1 saves memory and costs no throughput, over pairs that differ in nothing else."""
    rows = pairs.comparable(frame)
    rows = rows[rows["dp"] > 1]
    rows = pairs.once(rows)
    both = pairs.matched(rows[rows["zero_stage"] == 0], rows[rows["zero_stage"] == 1], ["zero_stage"])
    speed, memory = pairs.ratio(both, metrics.RANK_BY), pairs.ratio(both, metrics.memory_column(frame))
    peak = metrics.memory_column(frame)
    rate, less = (both[f"{name}_two"] / both[f"{name}_one"] for name in (metrics.RANK_BY, peak))
    tally = Tally(int(((rate > 1 - SAME) & (less < 1)).sum()), len(both))
    if speed is None or memory is None or speed.value.n < FEWEST or speed.value.low is None or speed.value.high is None:
        return Verdict(UNKNOWN, f"{plural(len(both), 'pair')} of runs that differ only in ZeRO 0 or 1", tally)
    by_size = rate.groupby(both["world_size"])
    sizes = [f"{value:.2f} on {size}" for size, value in by_size.median()[by_size.size() >= FEWEST].items()]
    text = f"pairs that differ in nothing else, throughput of ZeRO 1 over ZeRO 0: {speed.text}; memory: {memory.text}"
    few = int((by_size.size() < FEWEST).sum())
    text += f"; by number of GPUs {listed(sizes, 9)}" if len(sizes) > 1 else ""
    text += f" ({plural(few, 'size')} with fewer than {FEWEST} pairs not shown)" if len(sizes) > 1 and few else ""
    holds = speed.value.low > 1 - SAME and memory.value.median < 1
    return Verdict(PASS if holds else FAIL, text + _in_noise(both), tally)


def tensor_beyond_node(frame: pd.DataFrame) -> Verdict:
    """Doubling tp beyond the node costs more than doubling it inside, best against best without a pipeline."""
    rows = pairs.candidates(frame)
    rows = rows[rows["pp"] == 1]
    nodes = winners.node_count(rows).astype(float)
    sizes = (rows["world_size"] / nodes)[nodes > 1]
    if sizes.empty:
        return Verdict(UNKNOWN, "no finished run without a pipeline is known to have spanned two nodes")
    per_node = int(sizes.max())

    def doubled(tp: int) -> pairs.Ratio | None:
        return pairs.ratio(pairs.best_against_best(rows, "tp", tp, 2 * tp), metrics.RANK_BY)

    inside, beyond = doubled(per_node // 2), doubled(per_node)
    if beyond is None or inside is None or beyond.value.n < FEWEST or inside.value.n < FEWEST:
        return Verdict(UNKNOWN, f"fewer than {FEWEST} models and sizes with tp of {per_node} and {2 * per_node}")
    text = f"tp {per_node} → {2 * per_node}: {beyond.text}; "
    text += f"inside the node, tp {per_node // 2} → {per_node}: {inside.text}; "
    text += "best run without a pipeline of each model, size and network regime, all other choices free. "
    text += "With all other choices fixed and ranks taken from dp, also without a pipeline: " + listed(
        [f"tp {tp} → {2 * tp}: {_matched(rows, tp)}" for tp in (per_node, per_node // 2)]
    )
    assert beyond.value.high is not None
    assert inside.value.low is not None
    pair = pairs.best_against_best(rows, "tp", per_node, 2 * per_node)
    tally = Tally(int((pair[f"{metrics.RANK_BY}_two"] < pair[f"{metrics.RANK_BY}_one"]).sum()), len(pair))
    return Verdict(PASS if beyond.value.high < min(inside.value.low, 1) else FAIL, text, tally)


def _matched(rows: pd.DataFrame, tp: int) -> str:
    """Effect of doubling tp over pairs of runs that agree in everything except `pairs.MAKE_ROOM`."""
    rows = pairs.once(rows)
    free = ["tp", "sequence_parallel", *pairs.MAKE_ROOM]
    ratio = pairs.ratio(pairs.matched(rows[rows["tp"] == tp], rows[rows["tp"] == 2 * tp], free), metrics.RANK_BY)
    return "no pair" if ratio is None else ratio.text


def throughputs_repeat(frame: pd.DataFrame) -> Verdict:
    """Runs of one configuration have the same throughput."""
    rows = metrics.ranked(frame)
    again = rows[rows["repeats"] > 1]
    tally = Tally(int((again["repeat_spread"] < 2 * SAME).sum()), len(again))
    if len(again) >= FEWEST:
        worst = float(again["repeat_spread"].max())
        text = (
            f"{plural(len(again), 'configuration')} ran more than once; "
            f"their runs differ by at most {format_percent(worst)}"
        )
        return Verdict(PASS if worst < 2 * SAME else FAIL, text, tally)
    steps = frame.loc[frame["outcome"] == "ok", "timed_steps"].dropna()
    text = f"{plural(len(again), 'configuration') if len(again) else 'no configuration'} finished more than once"
    if len(steps) and steps.max() == 1:
        text += ", and every throughput is that of one step"
    text += _across_engines(rows)
    return Verdict(UNKNOWN, text, tally)


def _across_engines(rows: pd.DataFrame) -> str:
    """Clause on configurations that finished under several versions of one engine; empty if there are none."""
    varying = ("engine_version", "network_regime")
    settings = [name for name in pairs.SETTINGS if name in rows and name not in varying]
    rates = rows.groupby(settings, dropna=False)[metrics.RANK_BY]
    again = [sorted(group, reverse=True) for _, group in rates if len(group) > 1]
    if not again:
        return ""
    worst = max(again, key=lambda group: group[0] / group[-1])
    count = f"{plural(len(again), 'configuration')} finished under several versions of the engine"
    furthest = f"{format_number(worst[0])} and {format_number(worst[-1])} {labels.rate_unit(rows)}"
    return f"; {count}, the furthest apart with {furthest}"


def _in_noise(both: pd.DataFrame) -> str:
    """Clause with the number of pairs whose throughput differs by no more than noise; empty if the noise is unknown."""
    within = pairs.within_noise(both)
    known = int(within.notna().sum())
    return f"; {int(within.sum())} of {plural(known, 'pair')} differ by no more than noise" if known else ""
