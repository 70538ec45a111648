"""Files of a comparison: one self-contained HTML page, its figure, and the tables behind both."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.compare import moved, ratio_figure, verdicts
from analysis.compare.comparison import Comparison
from analysis.compare.facts import FACTS
from analysis.drawing import style
from analysis.page.render import environment, style_sheet
from analysis.page.staging import Staged, listed_files
from results.shared_filesystem.whole_files import open_regular

_GENERATOR = "ultrasweep analysis.compare"
_FILES = {
    "csv": "tables/compare.csv",
    "axes": "tables/compare_by_axis.csv",
    "html": "compare.html",
    "png": "figures/compare.png",
    "svg": "figures/compare.svg",
}
_LIST = "comparison_files.txt"
"""File that names the files of the last comparison, one a line."""
_SHARED = ("model", "workload", "world_size", "layout")
_OF_EACH = (
    *("experiment_id", "attempt_id", "cluster", "engine", "engine_version", "measurement_version", "outcome", "runs"),
    *("rate", "rate_low", "rate_high", "step_time_s", "step_spread", "peak_allocated", "peak_reserved"),
    *(name for name in FACTS if name not in ("engine", "engine_version", "measurement_version", "cluster")),
)
_JUDGED = (
    *("verdict", "verdict_reason"),
    *("ratio", "ratio_low", "ratio_high", "speed", "peak_change_bytes", "peak_ratio", "memory"),
    *("loss_difference", "norm_difference", "same_losses"),
)
_NAMES = {
    "rate": "tokens_per_s_per_gpu",
    "peak_allocated": "peak_allocated_bytes",
    "peak_reserved": "peak_reserved_bytes",
}


def write(comparison: Comparison, out: Path, formats: Sequence[str], most: int) -> list[Path]:
    """Write the comparison into ``out``; returns the paths of its files.

    Both tables are always written; ``html`` (with at most ``most`` changed points), ``png`` and ``svg`` if in
    ``formats``. An earlier comparison's files are replaced once the new ones are complete, and removed if their format
    is not asked for. Raises `UnwritableReport` if ``out`` cannot be written.
    """
    with Staged(out, "a comparison", _LIST) as staged:
        made = {kind: staged.folder / name for kind, name in _FILES.items()}
        table(comparison).to_csv(made["csv"], index=False)
        comparison.by_axis.to_csv(made["axes"], index=False)
        missing = None
        try:
            style.save(ratio_figure.draw(comparison.pairs, comparison.noise), made["png"], made["svg"])
        except style.NothingToDraw as reason:
            missing = str(reason)
        if "html" in formats:
            made["html"].write_text(render(comparison, None if missing else made["png"], missing, most))
        for kind in {"png", "svg"} - set(formats):
            made[kind].unlink(missing_ok=True)
        written = [out / name for kind, name in _FILES.items() if made[kind].exists()]
        staged.publish(listed_files(out, _LIST) or _unlisted(out))
    return written


def _unlisted(out: Path) -> list[str]:
    """Files of a comparison of an earlier version, which wrote no list; empty if there is none."""
    try:
        with open_regular(out / _FILES["csv"]) as file:
            begins = file.readline(80)
    except (OSError, ValueError):
        return []
    return list(_FILES.values()) if begins.startswith(b"found_in,matched_by,") else []


def table(comparison: Comparison) -> pd.DataFrame:
    """One row for each point of either side: ``found_in`` (both, A or B), verdict, judged values, and the values of
    each side.

    Units are those of `results.tables.schema`; ratios are B over A.
    """
    parts = [comparison.pairs.assign(found_in="both")]
    for end, only in (("a", comparison.only_a), ("b", comparison.only_b)):
        parts.append(only.add_suffix(f"_{end}").assign(found_in=end.upper()))
    rows = pd.concat([part for part in parts if len(part)] or parts[:1], ignore_index=True)
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *parts[0].columns, "matched_by", *_JUDGED])))
    shared = {}
    for name in _SHARED:
        of_a, of_b = (rows[f"{name}_{end}"] if f"{name}_{end}" in rows else pd.Series(index=rows.index) for end in "ab")
        shared[name] = of_a.where(of_a.notna(), of_b)
    each = [f"{name}_{end}" for name in _OF_EACH for end in "ab"]
    rows = pd.concat([rows[["found_in", "matched_by"]], pd.DataFrame(shared), rows[[*_JUDGED, *each]]], axis=1)
    return rows.rename(columns={f"{name}_{end}": f"{new}_{end}" for name, new in _NAMES.items() for end in "ab"})


def render(comparison: Comparison, png: Path | None, missing: str | None, most: int) -> str:
    """The page as text, with ``png`` embedded; everything that comes from rows is escaped."""
    transitions = moved.transitions(comparison.pairs)
    return (
        environment()
        .get_template("compare.html")
        .render(
            generator=_GENERATOR,
            comparison=comparison,
            counts=verdicts.counts(comparison.pairs),
            tables=[part for part in comparison.tables(most) if part.rows],
            transitions=transitions if transitions.size else None,
            figure=None if png is None else "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode(),
            missing=missing,
            style=style_sheet(),
        )
    )
