"""Makes the table of several engines at the same layouts, each engine's fastest row of a layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pandas as pd

from workloads.spec.experiment import ENGINE

TITLES = {ENGINE: ENGINE, "torchtitan": "torchtitan", "megatron": "Megatron-Core", "transformers": "transformers"}
_SAME = ["model", "precision", "dp", "tp", "pp", "cp", "micro_batch_size", "num_microbatches"]


def engines_table(rows: pd.DataFrame) -> str:
    """One line a layout, with the ratio of ours to the fastest peer. Where a peer is faster, the text says so first."""
    rows = rows.assign(dp=rows["dp_replicate"] * rows["dp_shard"]).reset_index(drop=True)
    lines, faster = [], []
    for key, same in rows.groupby(_SAME, sort=False):
        best = {engine: _best(same[same["engine"] == engine]) for engine in TITLES}
        name, ours = _name(dict(zip(_SAME, cast(tuple[Any, ...], key), strict=True)), same), _speed(best[ENGINE])
        peers = {engine: speed for engine in TITLES if engine != ENGINE and (speed := _speed(best[engine]))}
        ratio = "–"
        if ours and peers:
            first = max(peers, key=peers.__getitem__)
            ratio = f"{ours / peers[first]:.3f}"
            if peers[first] > ours:
                faster.append(f"{TITLES[first]} at {name} ({peers[first] / ours - 1:.1%})".replace("%", " %"))
        if any(cells := [_cell(best[engine]) for engine in TITLES]):
            lines.append(f"| {name} | {' | '.join(cell or '–' for cell in cells)} | {ratio} |")
    head = f"Faster than ours: {'; '.join(faster)}." if faster else "No peer is faster than ours at these layouts."
    return "\n".join(
        [
            head,
            "",
            f"| layout | {' | '.join(TITLES.values())} | ours over the fastest peer's |",
            f"|---|{'---:|' * (len(TITLES) + 1)}",
            *lines,
        ]
    )


def _name(of: Mapping[str, Any], rows: pd.DataFrame) -> str:
    degrees = [f"{axis} {of[axis]}" for axis in ("dp", "tp", "pp", "cp") if of[axis] > 1]
    if of["pp"] > 1:
        degrees.append(str(rows["pp_schedule"].iloc[0]).replace("_", " "))
    precision = [] if of["precision"] == "bf16" else [of["precision"].partition("_")[0]]
    parts = [*degrees, f"mbs {of['micro_batch_size']} x {of['num_microbatches']}", *precision]
    return f"{of['model']}, {', '.join(parts)}"


def _best(rows: pd.DataFrame) -> Mapping[str, Any] | None:
    """The fastest row that ran; without one the last of the others; None without rows."""
    if rows.empty:
        return None
    ordered = rows.assign(ran=rows["outcome"] == "ok").sort_values(["ran", "tokens_per_s_per_gpu"], na_position="first")
    return {str(key): value for key, value in ordered.iloc[-1].items()}


def _speed(row: Mapping[str, Any] | None) -> float | None:
    return None if row is None or row["outcome"] != "ok" else float(row["tokens_per_s_per_gpu"])


def _cell(row: Mapping[str, Any] | None) -> str:
    """Throughput, memory and settings of a row, or its outcome; empty without a row that came to its end."""
    if row is None or row["outcome"] == "cancelled":
        return ""
    if row["outcome"] != "ok":
        return str(row["outcome"])
    graph = "graph" if row["engine"] == "megatron" else "compiled"
    how = [f"ZeRO {row['zero_stage']}"] if row["zero_stage"] else []
    how += [graph] if row["compile"] != "none" else []
    numbers = [f"{row['peak_allocated_bytes'] / 2**30:.1f}", *how]
    return f"{row['tokens_per_s_per_gpu']:,.0f} ({'; '.join(numbers)})"
