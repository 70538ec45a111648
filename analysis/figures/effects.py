"""The effect of one choice by itself: ratios of throughput and memory over pairs of runs that agree in everything else.

A degree doubled on the same devices at the same batch takes ranks from data parallelism, and a larger micro-batch takes
micro-batches: only `analysis.rows.pairs.MAKE_ROOM` may differ there. Each doubling has its own line, since going
from tp 1 to 2 and from tp 8 to 16 are different effects.

A second number holds nothing fixed: the fastest run with one value over the fastest with the other
(`analysis.rows.pairs.best_against_best`). The two differ: a tp that costs much at the same micro-batch costs less if
the memory that it frees is used for a larger one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from analysis.figures import conclusions, style
from analysis.figures.spec import FigureSpec
from analysis.rows import labels, metrics, pairs
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.stats import MIN_FOR_INTERVAL, MedianInterval, supported_median
from results.statistics import noise
from results.text.numbers import listed

FEWEST = MIN_FOR_INTERVAL
"""Smallest number of pairs for which an effect gets a number; with fewer it is listed as having too few."""
COLUMNS = (
    *("effect", "choice", "from", "to", "pairs", "enough", "slower_share", "within_noise_share"),
    *("throughput_ratio", "throughput_low", "throughput_high", "throughput_q05", "throughput_q95"),
    *("memory_pairs", "memory_ratio", "memory_low", "memory_high", "memory_q05", "memory_q95", "memory_kind"),
    *("held", "best_pairs", "best_ratio", "best_low", "best_high"),
)
_BAND = (0.05, 0.95)
Values = NDArray[np.float64]
Places = NDArray[np.int64]


_COLOUR = "#0072B2"
_BEST = "#D55E00"
_TICKS = (1.0, 0.5, 2.0, 0.2, 5.0, 0.1, 10.0, 0.8, 1.2, 0.9, 1.1, 1.5, 0.7, 0.3, 3.0, 0.05, 20.0)
"""Candidate ticks in order of priority."""
_WIDTH_IN = 10.5
_POOLED = {
    "engine_version": "engine versions",
    "network_regime": "network regimes",
    "device_name": "devices",
    "driver_version": "drivers",
    "torch_version": "PyTorch versions",
}


@dataclass(frozen=True, slots=True)
class Effect:
    """A choice: ``column`` going from one value to another, while the columns ``free`` may differ too."""

    name: str
    column: str
    before: int | str
    after: int | str
    free: tuple[str, ...] = ()


def _effects(rows: pd.DataFrame) -> Iterator[Effect]:
    """Every choice examined, and each doubling that the rows may contain, in the order of the figure."""
    for stage in (1, 2, 3):
        yield Effect(f"ZeRO {stage - 1} → {stage}", "zero_stage", stage - 1, stage)
    named = sorted(kind for kind in rows["recompute"].dropna().unique() if kind not in ("none", "selective", "full"))
    for kind in (*named, "selective", "full"):
        yield Effect(f"recompute none → {kind}", "recompute", "none", kind)
    for every in sorted(int(value) for value in rows["recompute_every"].dropna().unique() if value > 1):
        yield Effect(f"recompute all layers → 1 in {every}", "recompute_every", 1, every)
    precisions = sorted(name for name in rows["precision"].dropna().unique() if str(name).startswith("fp8"))
    for precision in precisions or ["fp8"]:
        yield Effect(f"bf16 → {precision.replace('_', ' ')}", "precision", "bf16", precision)
    modes = sorted(mode for mode in rows["compile"].dropna().unique() if mode != "none")
    for mode in modes or ["block"]:
        yield Effect("eager → compiled" + (f" ({mode})" if len(modes) > 1 else ""), "compile", "none", mode)
    for choice in ("step", "auto"):
        if {"none", choice} <= set(rows["cuda_graph"]):
            yield Effect("eager → captured step", "cuda_graph", "none", choice)
    yield Effect("GPipe → 1F1B", "pp_schedule", "gpipe", "1f1b")
    # rehearsed times rank tp and cp too high, see `analysis.rows.cohorts`
    rehearsed = "rehearsed" in set(rows["method"])
    for axis, names in {
        "cp": pairs.MAKE_ROOM,
        "ep": (),
        "tp": (*pairs.MAKE_ROOM, "sequence_parallel"),
        "pp": (*pairs.MAKE_ROOM, "pp_schedule"),
        "micro_batch_size": ("num_microbatches",),
    }.items():
        if axis in ("tp", "cp") and rehearsed:
            continue
        present = {int(value) for value in rows[axis].dropna().unique()}
        shown = "micro-batch" if axis == "micro_batch_size" else axis
        for degree in sorted(value for value in present if 2 * value in present) or [1]:
            yield Effect(f"{shown} {degree} → {2 * degree}", axis, degree, 2 * degree, names)


@cache_per_frame
def data(frame: pd.DataFrame) -> pd.DataFrame:
    """One row for each effect, `COLUMNS`: medians of after over before with bootstrap intervals and the 5 to 95 %
    range.

    With fewer than `FEWEST` pairs there is no ratio. Pairs that share a run are not independent, so intervals are too
    narrow. ``within_noise_share`` is the share of pairs that differ by no more than noise, null if noise is unknown.
    ``held`` names what agrees within a pair; ``best_ratio`` compares fastest with fastest, with everything else free.
    """
    memory = metrics.memory_column(frame)
    read = dict.fromkeys([*pairs.SETTINGS, "method", "attempt_id", metrics.RANK_BY, memory, *noise.COLUMNS])
    rows = pairs.once(pairs.comparable(frame)[[*read]])
    rates, peaks = (rows[name].to_numpy(dtype=float) for name in (metrics.RANK_BY, memory))
    summaries = [
        _summary(effect, rates[two] / rates[one], peaks[two] / peaks[one], metrics.MEMORY_NAMES[memory])
        | {"within_noise_share": _within_noise(rows, one, two)}
        | _best(rows, effect)
        for effect, one, two in _pairs(rows)
    ]
    return pd.DataFrame(summaries, columns=[*COLUMNS])


def _pairs(rows: pd.DataFrame) -> Iterator[tuple[Effect, Places, Places]]:
    """Each effect with the positions of the runs before and after in ``rows`` (of `pairs.comparable`)."""
    matching = pairs.Matching(rows)
    depth, schedule = rows["pp"].to_numpy(), rows["pp_schedule"].to_numpy()
    for effect in _effects(rows):
        before, after = rows[effect.column] == effect.before, rows[effect.column] == effect.after
        if effect.column == "zero_stage":  # one rank has nothing to shard
            before, after = before & (rows["dp"] > 1), after & (rows["dp"] > 1)
        one, two = matching.pairs(before, after, [effect.column, *effect.free])
        if effect.column == "pp":  # from one stage the other run has 1F1B; otherwise both have the same schedule
            same = np.where(depth[one] == 1, schedule[two] == "1f1b", schedule[one] == schedule[two])
            one, two = one[same], two[same]
        yield effect, one, two


def _within_noise(rows: pd.DataFrame, one: Places, two: Places) -> float | None:
    """Share of pairs that differ by no more than noise; None if no pair's noise is known."""
    if not rows["noise"].notna().any():
        return None
    kept = rows[[metrics.RANK_BY, *pairs.NOISE]]
    sides = [kept.iloc[places].reset_index(drop=True) for places in (one, two)]
    within = pairs.sides_within_noise(*sides).dropna()
    return float(within.mean()) if len(within) else None


def _best(rows: pd.DataFrame, effect: Effect) -> dict[str, object]:
    """Fastest run after over the fastest before, for each workload, size, batch and network regime."""
    both = pairs.best_against_best(rows, effect.column, effect.before, effect.after)
    ratios = (both[f"{metrics.RANK_BY}_two"] / both[f"{metrics.RANK_BY}_one"]).dropna()
    known = supported_median(ratios, FEWEST)
    ends = (None, None, None) if known is None else (known.median, known.low, known.high)
    return {
        "held": f"everything but {listed([effect.column, *effect.free])}",
        "best_pairs": len(ratios),
        **dict(zip(("best_ratio", "best_low", "best_high"), ends, strict=True)),
    }


def _summary(effect: Effect, speed: Values, memory: Values, memory_kind: str) -> dict[str, object]:
    speed, memory = speed[np.isfinite(speed)], memory[np.isfinite(memory)]
    known = supported_median(speed, FEWEST)
    return {
        "effect": effect.name,
        "choice": effect.column,
        "from": str(effect.before),
        "to": str(effect.after),
        "pairs": len(speed),
        "enough": known is not None,
        "slower_share": float((speed < 1).mean()) if known is not None else None,
        **_columns("throughput", speed, known),
        "memory_pairs": len(memory),
        **_columns("memory", memory, supported_median(memory, FEWEST)),
        "memory_kind": memory_kind,
    }


def _columns(name: str, values: Values, found: MedianInterval | None) -> dict[str, float | None]:
    ends = dict.fromkeys(f"{name}_{end}" for end in ("ratio", "low", "high", "q05", "q95"))
    if found is None:
        return {**ends}
    q05, q95 = np.quantile(values, _BAND)
    return dict(zip(ends, (found.median, found.low, found.high, float(q05), float(q95)), strict=True))


@style.styled
def draw(frame: pd.DataFrame) -> Figure:
    """Throughput (left) and peak memory (right), after over before, one line per effect; effects with too few pairs are
    named."""
    table = data(frame)
    known = table[table["enough"]].reset_index(drop=True)
    if known.empty:
        most = int(table["pairs"].max()) if len(table) else 0
        raise style.NothingToDraw(
            f"no choice has {FEWEST} pairs of runs that agree in everything else; the most is {most}"
        )
    figure = style.new_figure(_WIDTH_IN, 0.27 * len(known) + 1.9)
    axes = figure.subplots(1, 2, sharey=True)
    kind = str(known["memory_kind"].iloc[0])
    for ax, name, label in (
        (axes[0], "throughput", f"Ratio of {labels.rate_unit(frame)}"),
        (axes[1], "memory", f"Ratio of {kind}"),
    ):
        _panel(ax, known, name)
        ax.set_xlabel(label)
    names = [_name(row) for row in labels.records(known)]
    best = known["best_ratio"].astype(float)
    axes[0].plot(
        best, range(len(known)), linestyle="", marker="D", markersize=4.5, color=_BEST, markerfacecolor="white"
    )
    axes[0].set_yticks(range(len(known)), names, fontsize=8.5)
    style.bottom_legend(figure, _handles(), _note(frame, table))
    return figure


def _name(row: dict[str, object]) -> str:
    """Name of an effect with its number of pairs; ≈ if most of them differ by no more than noise."""
    share = row["within_noise_share"]
    noisy = "≈ " if isinstance(share, float) and share > 0.5 else ""
    return f"{noisy}{row['effect']} (n = {row['pairs']:,})"


def _panel(ax: Axes, rows: pd.DataFrame, name: str) -> None:
    places = np.arange(len(rows))
    ax.hlines(places, rows[f"{name}_q05"], rows[f"{name}_q95"], color="#b5cfe3", linewidth=4.5)
    ax.hlines(places, rows[f"{name}_low"], rows[f"{name}_high"], color=_COLOUR, linewidth=1.8)
    ax.plot(rows[f"{name}_ratio"], places, linestyle="", marker="o", markersize=4.5, color=_COLOUR)
    ax.axvline(1.0, color="#444444", linewidth=1)
    for place, (choice, before) in enumerate(zip(rows["choice"], rows["choice"].shift(), strict=True)):
        if place and choice != before:
            ax.axhline(place - 0.5, color="#e2e2e2", linewidth=0.8, zorder=0)
    shown = [f"{name}_q05", f"{name}_q95", *(["best_ratio"] if name == "throughput" else [])]
    values = rows[shown].to_numpy(dtype=float)
    low, high = (float(np.nanmin(values)), float(np.nanmax(values))) if np.isfinite(values).any() else (0.9, 1.1)
    low, high = min(0.95 * low, 0.9), max(1.05 * high, 1.1)
    ax.set(xscale="log", xlim=(low, high), ylim=(len(rows) - 0.4, -0.6))
    ax.xaxis.set_major_locator(FixedLocator(_spaced([tick for tick in _TICKS if low <= tick <= high], high / low)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"× {value:g}"))
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x")


def _spaced(ticks: list[float], span: float) -> list[float]:
    """Ticks far enough apart to be read on a logarithmic axis over ``span``; earlier ticks have priority."""
    kept: list[float] = []
    for tick in ticks:
        if all(abs(np.log(tick / other)) > 0.1 * np.log(span) for other in kept):
            kept.append(tick)
    return sorted(kept)


def _note(frame: pd.DataFrame, table: pd.DataFrame) -> str | None:
    """Note on effects with too few pairs, and on settings in which the pairs of one median differ."""
    parts = []
    few = table[~table["enough"]]
    if len(few):
        shown = few["effect"].str.replace(" ", "\N{NO-BREAK SPACE}")  # lines do not break inside a name
        named = ", ".join(f"{effect} ({pairs})" for effect, pairs in zip(shown, few["pairs"], strict=True))
        parts.append(f"Too few pairs, fewer than {FEWEST}, for a number: {named}.")
    ok = frame[frame["outcome"] == "ok"]
    if "rehearsed" in set(frame["method"].unique()):
        parts.append("Not computed for rehearsed rows: tp, whose steps come out too short; memory by tp has a figure.")
    pooled = [f"{name} ({listed(values)})" for name, values in _several(ok)]
    if pooled:
        parts.append(f"The runs of a pair agree in them, but one median has pairs from several {listed(pooled)}.")
    return "\n".join(line for part in parts for line in textwrap.wrap(part, int(_WIDTH_IN / 0.078))) or None


def _several(rows: pd.DataFrame) -> list[tuple[str, list[str]]]:
    pooled = []
    for column, name in _POOLED.items():
        values = sorted(str(value) for value in rows[column].dropna().unique()) if column in rows else []
        if len(values) > 1:
            pooled.append((name, values))
    return pooled


def _handles() -> list[Line2D]:
    return [
        Line2D(
            [], [], color=_COLOUR, marker="o", markersize=4.5, linewidth=1.8, label="median of the pairs, 95 % interval"
        ),
        Line2D([], [], color="#b5cfe3", linewidth=4.5, label="5 to 95 % of the pairs"),
        Line2D(
            [],
            [],
            linestyle="",
            marker="D",
            markersize=4.5,
            color=_BEST,
            markerfacecolor="white",
            label="fastest against fastest, all else free (median)",
        ),
    ]


FIGURE = FigureSpec(
    name="effects",
    section="why",
    title="What one choice does by itself",
    caption=(
        "Median ratio, after over before, over pairs of runs that agree in everything else, including devices, "
        "driver and "
        "versions. A degree takes ranks from data parallelism on the same devices at the same batch, a larger "
        "micro-batch takes micro-batches. Pairs that share a run are not independent: intervals are too narrow. "
        "Diamonds hold nothing fixed: the fastest run with one value over the fastest with the other. ≈: most pairs "
        "differ "
        "by no more than noise."
    ),
    draw=draw,
    data=data,
    conclude=lambda frame: conclusions.of_effects(data(frame)),
)
