"""Sentences and short tables on what a comparison found, identical on the terminal and on the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from analysis.compare import moved
from analysis.compare.matching import MOST_EXAMINED, PointMatching
from analysis.compare.moved import change, interval
from analysis.page.render import PageTable
from analysis.rows import labels
from analysis.rows.cohorts import METHOD_NAMES
from analysis.rows.stats import median_interval
from results.statistics.agreement import COMPARED_STEPS
from results.text.numbers import format_bytes, format_number, format_setting, listed, plural

_TELLING = {
    "cluster": "cluster",
    "device_name": "device",
    "engine": "engine",
    "measurement_version": "measurement version",
}
"""Columns whose differences are reported before anything else."""
_BESIDE = {
    "engine_version": "engine version",
    "git_commit": "commit",
    "torch_version": "PyTorch",
    "cuda_version": "CUDA",
    "nccl_version": "NCCL",
    "driver_version": "driver",
    "timed_steps": "timed steps",
    "warmup_steps": "warm-up steps",
}
_MOST_AXES = 3


def side(name: str, path: Path, rows: pd.DataFrame, points: int) -> str:
    """One line on side A or B: its path, attempts and points, cluster, version, commit and day."""
    facts = [
        f"{plural(len(rows), 'attempt')} at {plural(points, 'point')}",
        METHOD_NAMES[rows["method"].iloc[0]].lower(),
    ]
    for column, word in ({"cluster": "on", "engine_version": "engine version", "git_commit": "commit"}).items():
        if values := _values(rows, column):
            facts.append(f"{word} {listed(values, 3)}")
    if rows["started_at"].notna().any():
        facts.append(f"{rows['started_at'].min():%Y-%m-%d}")
    return f"{name}: {path} ({', '.join(facts)})"


def cautions(a: pd.DataFrame, b: pd.DataFrame) -> list[str]:
    """Warnings that apply to all numbers: the sides differ in method, cluster, device, engine or measurement."""
    sentences = []
    methods = [rows["method"].iloc[0] for rows in (a, b)]
    if methods[0] != methods[1]:
        names = [METHOD_NAMES[method].lower() for method in methods]
        sentences.append(
            f"A is {names[0]}, B {names[1]}: differences are between these two methods, not changes of the runs. "
            "A rehearsal models communication; an estimate models everything."
        )
    if differences := _differences(a, b, _TELLING):
        sentences.append(f"A and B differ in {'; '.join(differences)}: this alone may explain the changes.")
    return sentences


def beside(a: pd.DataFrame, b: pd.DataFrame) -> str | None:
    """One sentence on other recorded differences (commit, versions, timed steps); None if there are none."""
    differences = _differences(a, b, _BESIDE)
    return f"They differ in {'; '.join(differences)}." if differences else None


def matched(matching: PointMatching, why_a: Counter[str], why_b: Counter[str], across: Sequence[str]) -> list[str]:
    """Sentences on how points were matched, and on why the others were not."""
    counts = matching.pairs["matched_by"].value_counts()
    how = [
        f"{counts[name]:,} by {words}"
        for name, words in {
            "experiment_id": "experiment_id",
            "configuration": "the whole configuration except the engine version",
        }.items()
        if counts.get(name)
    ]
    freely = f"; {listed(list(across))} may differ" if across else ""
    sentences = [
        f"{plural(len(matching.pairs), 'point')} matched{': ' if how else ''}{listed(how)}{freely if how else ''}. "
        f"{len(matching.only_a):,} only in A, {len(matching.only_b):,} only in B."
    ]
    if matching.unrecorded:
        sentences.append(f"One side does not record {listed(matching.unrecorded)}: matching ignores that.")
    if matching.older:
        sentences.append(
            f"{plural(matching.older, 'point')} of an older engine version left out in favour of a newer one."
        )
    for name, other, why, only in (("A", "B", why_a, matching.only_a), ("B", "A", why_b, matching.only_b)):
        if why:
            axes = [f"{axis} ({count:,})" for axis, count in why.most_common(_MOST_AXES)]
            first = f"the first {MOST_EXAMINED} of " if len(only) > MOST_EXAMINED else ""
            sentences.append(
                f"For {first}{plural(len(only), 'point')} only in {name}, the nearest points in {other} differ most "
                "often in "
                f"{listed(axes)}."
            )
    if matching.pairs.empty and (alone := _single_axis(why_a, why_b)) is not None and alone not in across:
        sentences.append(f"--across {alone} matches points that differ only in {alone}.")
    return sentences


def found(pairs: pd.DataFrame, noise: moved.Noise) -> list[str]:
    """Sentences on the changes between judged ``pairs``: noise, throughput, memory, outcomes, losses."""
    if pairs.empty:
        return []
    sentences = [noise.why]
    both = pairs[pairs["speed"] != moved.UNFINISHED]
    if len(both):
        sentences += [_speed(both), _memory(both)]
    sentences.append(_outcomes(pairs))
    if losses := _losses(both):
        sentences.append(losses)
    return sentences


def alarms(pairs: pd.DataFrame) -> list[str]:
    """Sentences on losses that differ; the speeds of the two sides are then not comparable."""
    wrong = pairs[pairs["same_losses"].eq(False)]
    sentences = []
    if len(wrong):
        apart = wrong[["loss_difference", "norm_difference"]].astype(float).max(axis=1).fillna(0)
        worst = wrong.assign(_apart=apart).nlargest(1, "_apart").iloc[0]
        compared = plural(int(pairs["same_losses"].notna().sum()), "point")
        sentences.append(
            f"LOSSES DIFFER in {len(wrong):,} of {compared}: A and B do not compute the same thing there, so their "
            f"speeds do not compare. Worst: {worst['workload_a']}, {worst['layout_a']}: losses "
            f"{_relative(worst['loss_difference'])}, gradient norms "
            f"{_relative(worst['norm_difference'])} apart."
        )
    contradicting = {end: int(pairs[f"loss_agrees_{end}"].eq(False).sum()) for end in "ab"}
    sentences += [
        f"{plural(count, 'point')} of {end.upper()} had losses that contradict its own reference layout."
        for end, count in contradicting.items()
        if count
    ]
    left_out = {end: int(pairs[f"contradicting_{end}"].sum()) for end in "ab"}
    return sentences + [
        f"{plural(count, 'run')} of {end.upper()} left out: the losses contradict its own reference layout, those of "
        "other runs of the point do not."
        for end, count in left_out.items()
        if count
    ]


def moved_table(pairs: pd.DataFrame, most: int) -> PageTable:
    """The points whose throughput changed most beyond noise, then those whose memory did."""
    speed = pairs[pairs["speed"].isin([moved.FASTER, moved.SLOWER, moved.DIFFERS])]
    order = np.log(speed["ratio"]).abs().sort_values(ascending=False, kind="stable").index
    memory = pairs[pairs["memory"].isin(["more", "less"]) & ~pairs.index.isin(order)]
    order = order.append(np.log(memory["peak_ratio"]).abs().sort_values(ascending=False, kind="stable").index)
    unit, kind = labels.rate_unit(pairs.rename(columns={"backend_a": "backend"})), moved.memory_kind(pairs).name
    shown = pairs.loc[order[:most]]
    rows = [
        [
            row["workload_a"],
            f"{int(row['world_size_a']):,}",
            row["layout_a"] if row["layout_a"] == row["layout_b"] else f"{row['layout_a']} → {row['layout_b']}",
            f"{format_number(row['rate_a'])} → {format_number(row['rate_b'])}",
            change(row["ratio"]),
            interval(row["ratio_low"], row["ratio_high"]),
            row["speed"],
            _moved_bytes(row["peak_change_bytes"]) if row["memory"] != "same" else "same",
            row["verdict"],
            row["verdict_reason"],
        ]
        for row in labels.records(shown)
    ]
    title = "Points that moved" + (f" (the first {len(shown)} of {len(order):,})" if len(order) > len(shown) else "")
    header = ["Model", labels.device_noun(pairs.rename(columns={"backend_a": "backend"})), "Layout", unit, "Change"]
    header += ["Interval", "Throughput", f"Peak {kind}", "Verdict", "Why"]
    return PageTable(header, rows, len(order), title)


def axis_tables(table: pd.DataFrame) -> list[PageTable]:
    """Changes for each value of the axes that explain most of them."""
    tables = []
    for axis in moved.leading_axes(table):
        part = table[table["axis"] == axis]
        rows = [
            [
                format_setting(row["value"]),
                f"{row['points']:,}",
                change(row["ratio"]),
                interval(row["ratio_low"], row["ratio_high"]),
                f"{row[moved.FASTER]} / {row[moved.SLOWER]}",
                change(row["peak_ratio"]),
                f"{row['more']} / {row['less']}",
            ]
            for row in labels.records(part)
        ]
        header = [axis, "Points", "Throughput", "95 % interval", "Faster / slower", "Peak memory", "More / less"]
        tables.append(PageTable(header, rows, len(rows), f"By {axis} (medians)"))
    return tables


def _speed(both: pd.DataFrame) -> str:
    counts = both["speed"].value_counts()
    speeds = [f"{counts[name]:,} {_SPEED_WORDS.get(name, name)}" for name in moved.CLASSES if counts.get(name)]
    middle = median_interval(both["ratio"])
    if middle is None:
        return f"Throughput, B over A: {listed(speeds)}."
    between = "" if middle.low is None else f" (95 % interval {interval(middle.low, middle.high)})"
    low, high = float(both["ratio"].min()), float(both["ratio"].max())
    span = f"; from {change(low)} to {change(high)}" if middle.n > 1 else ""
    return f"Throughput, B over A: {listed(speeds)}. Median {change(middle.median)}{between}{span}."


def _memory(both: pd.DataFrame) -> str:
    kind, counts = moved.memory_kind(both), both["memory"].value_counts()
    if not counts.drop("unknown", errors="ignore").sum():
        return "Peak memory: not known on both sides."
    memories = [f"{counts[name]:,} {word}" for name, word in _MEMORY_WORDS.items() if counts.get(name)]
    extremes = [
        f"{word} {change(rows['peak_ratio'].iloc[0])} ({rows['layout_a'].iloc[0]})"
        for word, rows in (
            ("most", both[both["memory"] == "more"].nlargest(1, "peak_ratio")),
            ("least", both[both["memory"] == "less"].nsmallest(1, "peak_ratio")),
        )
        if len(rows)
    ]
    return (
        f"Peak {kind.name} memory: {listed(memories)}{', ' if extremes else ''}{listed(extremes)}. Peaks count as "
        "equal within "
        f"{kind.granularity_bytes // 2**20} MiB, the allocator's granularity."
    )


_SPEED_WORDS = {moved.DIFFERS: "that differ with unknown spread", moved.UNKNOWN: "undecided"}
_MEMORY_WORDS = {"more": "need more", "less": "need less", "same": "the same", "unknown": "not known"}


def _outcomes(pairs: pd.DataFrame) -> str:
    changed = moved.changed_outcomes(pairs)
    names = labels.OUTCOME_NAMES
    same = pairs.loc[pairs["outcome_a"] == pairs["outcome_b"], "outcome_a"].value_counts()
    unchanged = listed([f"{count:,} {names.get(str(outcome), outcome)}" for outcome, count in same.items()])
    if changed.empty:
        return f"Outcomes: no point changed ({unchanged})."
    changes = []
    for key, count in changed.items():
        assert isinstance(key, tuple)
        changes.append(f"{count:,} {names.get(key[0], key[0])} → {names.get(key[1], key[1])}")
    return f"Outcomes: {listed(changes)}; unchanged {unchanged or 'none'}."


def _losses(both: pd.DataFrame) -> str | None:
    compared = both[both["same_losses"].notna()]
    if compared.empty:
        return (
            "Losses: not compared; they are not recorded on both sides, or partners differ in settings that change "
            "them."
        )
    if compared["same_losses"].eq(False).any():
        return None  # reported by `alarms`
    return (
        f"Losses of the first {COMPARED_STEPS} steps agree ({plural(len(compared), 'point')} compared): within "
        f"{_relative(compared['loss_difference'].max())}, gradient norms within "
        f"{_relative(compared['norm_difference'].max())}."
    )


def _single_axis(*whys: Counter[str]) -> str | None:
    """The only axis in which nearest partners differ, on at least one side; None if there are several."""
    for why in whys:
        if len(why) == 1:
            return next(iter(why))
    return None


def _differences(a: pd.DataFrame, b: pd.DataFrame, columns: dict[str, str]) -> list[str]:
    sentences = []
    for column, word in columns.items():
        of_a, of_b = _values(a, column), _values(b, column)
        if of_a and of_b and of_a != of_b:
            sentences.append(f"{word} (A {listed(of_a, 3)}, B {listed(of_b, 3)})")
    return sentences


def _values(rows: pd.DataFrame, column: str) -> list[str]:
    """Known values of a column as sorted texts; commits are cut to 8 characters."""
    values = [format_setting(value) for value in rows[column].dropna().unique()]
    return sorted(value[:8] for value in values) if column == "git_commit" else sorted(values)


def _relative(value: float | None) -> str:
    return "not known" if value is None or not np.isfinite(value) else f"{value:.1e} relative"


def _moved_bytes(change_bytes: float) -> str:
    if not np.isfinite(change_bytes):
        return "–"
    return f"{'+' if change_bytes > 0 else '−'}{format_bytes(abs(change_bytes))}"
