"""The study's claims on scaling and on its published bars: data parallelism, short pipelines, bandwidth, failures."""

from __future__ import annotations

import pandas as pd

from analysis.claims import published
from analysis.claims.verdicts import FAIL, FEWEST, PASS, SAME, UNKNOWN, Tally, Verdict, is_study
from analysis.rows import by_degree, collective_bandwidth, labels, metrics
from analysis.rows.load import decided
from analysis.rows.stats import median_interval
from results.text.numbers import format_number, format_percent, listed, plural

_FEWEST_DEGREES = 3
"""Smallest number of degrees in a series that shows a trend."""


def published_bars(frame: pd.DataFrame) -> Verdict:
    """Every bar of the published scaling figures is the throughput of a row."""
    if not is_study(frame):
        return Verdict(UNKNOWN, "these rows are not those of the published figures")
    rates = frame.loc[frame["outcome"] == "ok", metrics.RANK_BY].to_numpy()
    counts, missing = [], 0
    for name, bars in published.BARS.items():
        matching_bars = sum(bool((abs(rates - bar) < 0.01).any()) for bar in bars.values())
        missing += len(bars) - matching_bars
        counts.append(f"{matching_bars} of {len(bars)} for {name}")
    every = sum(map(len, published.BARS.values()))
    tally = Tally(every - missing, every)
    return Verdict(FAIL if missing else PASS, f"rows with the published value: {listed(counts)}", tally)


def data_parallel_falls(frame: pd.DataFrame) -> Verdict:
    """Each doubling of pure data parallelism costs throughput per device, or at least gains none beyond `SAME`."""
    table = by_degree.data_parallel(frame)
    series: list[str] = []
    rises: list[str] = []
    level: list[str] = []
    doublings, short = 0, [0, 0]
    for name, rows in table.groupby("workload", sort=False):
        rates, degrees = rows[metrics.RANK_BY].to_numpy(), rows["degree"].astype(int).to_numpy()
        if len(rows) < _FEWEST_DEGREES:
            short = [short[0] + int((rates[1:] < rates[:-1]).sum()), short[1] + len(rates) - 1]
            continue
        series.append(
            f"{name} from {format_number(rates[0])} to {format_number(rates[-1])} tokens/s each "
            f"over dp {degrees[0]} to {degrees[-1]}"
        )
        doublings += len(rates) - 1
        for k, ratio in enumerate(rates[1:] / rates[:-1]):
            if ratio >= 1:
                step = f"{name} over dp {degrees[k]} to {degrees[k + 1]} ({format_percent(ratio - 1)} faster)"
                (rises if ratio > 1 + SAME else level).append(step)
    if not series:
        return Verdict(UNKNOWN, f"no model has runs of pure data parallelism at {_FEWEST_DEGREES} degrees")
    falls = doublings - len(rises) - len(level)
    text = f"{falls} of {plural(doublings, 'step')} to a higher degree cost throughput: {listed(series)}"
    text += f"; not {listed(rises + level)}" if rises or level else ""
    kept, every = Tally(falls, doublings), Tally(falls + short[0], doublings + short[1])
    rule = f"models with fewer than {_FEWEST_DEGREES} degrees"
    return Verdict(FAIL if rises else PASS, text, every, kept, rule)


def short_pipelines_are_slower(frame: pd.DataFrame) -> Verdict:
    """With few micro-batches, m = p − 1 (otherwise m = p), the fastest pipeline is slower than the fastest with 32, at
    the same depth and number of devices."""
    rows = by_degree.pipelines(frame).sort_values(metrics.RANK_BY, ascending=False, kind="stable")
    rows = rows.assign(network_regime=rows["network_regime"].astype(object).fillna("not known"))
    same = ["workload", "world_size", "network_regime", "degree"]
    long = rows[rows["series"] == "m = 32"].drop_duplicates(same)
    short = rows[(rows["series"] != "m = 32") & (rows["num_microbatches"] < 32)]
    short = short.sort_values("num_microbatches", kind="stable").drop_duplicates(same)
    both = short[[*same, metrics.RANK_BY]].merge(long[[*same, metrics.RANK_BY]], on=same, suffixes=("_short", "_long"))
    ratio = both[f"{metrics.RANK_BY}_short"] / both[f"{metrics.RANK_BY}_long"]
    slower = int((ratio < 1).sum())
    tally = Tally(slower, len(both))
    if len(both) < FEWEST:
        few = f"{plural(len(both), 'depth')} with few micro-batches and with 32 on as many devices"
        return Verdict(UNKNOWN, few, tally)
    interval = median_interval(ratio)
    assert interval is not None
    asked = plural(len(both), "model, size and depth", "models, sizes and depths")
    text = f"{slower} of {asked} are slower with few micro-batches"
    return Verdict(PASS if slower == len(both) else FAIL, f"{text}; speed against 32: {interval.text()}", tally)


def bandwidths_are_medians(frame: pd.DataFrame) -> Verdict:
    """The published bandwidths, captioned as medians over the runs, are those of the rows."""
    table = collective_bandwidth.by_nodes(frame)
    if not is_study(frame) or table.empty:
        return Verdict(UNKNOWN, "these rows are not those of the published figure")
    table = table[(table["scope"] == "world") & (table["regime"] == "all")].set_index(["collective", "nodes"])
    plotted = pd.Series(published.BANDWIDTHS)
    means, medians = (
        int(((table[what].reindex(plotted.index) - plotted).abs() < published.BANDWIDTH_DIGIT).sum())
        for what in ("mean", "median")
    )
    return Verdict(
        PASS if medians == len(plotted) else FAIL,
        f"of {len(plotted)} published values {means} are the mean of their runs and {medians} the median",
        Tally(medians, len(plotted)),
    )


def bandwidth_falls_in_one_regime(frame: pd.DataFrame) -> Verdict:
    """From 8 nodes on, more nodes slow down the all-reduce within one network regime, too."""
    table = collective_bandwidth.by_nodes(frame)
    table = table[(table["scope"] == "world") & (table["collective"] == "all_reduce") & (table["regime"] != "all")]
    every, _, _ = _falling(table)
    falls, regimes, fewest = _falling(table[table["runs"] >= FEWEST])
    if not falls:
        return Verdict(UNKNOWN, f"no regime has a bandwidth at {_FEWEST_DEGREES} numbers of nodes")
    return Verdict(
        PASS if all(falls) else FAIL,
        f"medians of at least {fewest} runs, " + "; ".join(regimes),
        Tally(sum(every), len(every)),
        Tally(sum(falls), len(falls)),
        f"sizes with fewer than {FEWEST} runs in a regime",
    )


def _falling(table: pd.DataFrame) -> tuple[list[bool], list[str], int]:
    """For each regime with enough sizes: whether the bandwidth falls, and its values in words; and the fewest runs
    behind a median."""
    falls, regimes, fewest = [], [], []
    for regime, rows in table.sort_values("nodes").groupby("regime"):
        if len(rows) < _FEWEST_DEGREES:
            continue
        values = rows["median"].to_numpy()
        falls.append(bool(values[-1] < (1 - SAME) * values[0] and (values[1:] < (1 + SAME) * values[:-1]).all()))
        fewest.append(int(rows["runs"].min()))
        sizes = listed([f"{int(nodes)}" for nodes in rows["nodes"]], 8)
        regimes.append(f"{regime}: {listed([format_number(value) for value in values], 8)} GB/s on {sizes} nodes")
    return falls, regimes, min(fewest, default=0)


def failures_take_devices(frame: pd.DataFrame) -> Verdict:
    """Points that fail hold about as large a share of the requested devices as `published.FAILED_SHARE`."""
    final = frame if is_study(frame) else decided(frame)
    if len(final) < FEWEST:
        return Verdict(UNKNOWN, f"{plural(len(final), 'point')} in all")
    failed = final["outcome"] != "ok"
    share = float(final.loc[failed, "world_size"].sum() / final["world_size"].sum())
    kinds = final["outcome"].value_counts()
    counts = [f"{count:,} {labels.OUTCOME_NAMES.get(str(kind), kind)}" for kind, count in kinds.items()]
    near = abs(share - published.FAILED_SHARE) < published.FAILED_SHARE_DIGIT
    return Verdict(PASS if near else FAIL, f"{format_percent(share)} of the requested devices: {listed(counts)}")
