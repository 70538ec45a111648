"""Writes docs/performance.md: this engine and others at the same layouts, each table from one lease.

``python -m docs.tools.write_performance`` reads the shipped rows of `FOUR`, `PAIRS`, `SCHEDULES` and `EXPERTS`, and
files with what other programs measured in the same lease: the bound of the devices, and torchtitan's own
``train.py``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from docs.tools.engines_table import engines_table
from docs.tools.write_accuracy import put_section
from results.tables.load import load
from sweep.planning.summary import layout
from workloads.spec.experiment import ENGINE, Experiment, from_dict

PAGE = Path(__file__).parents[1] / "performance.md"
RECORDED = Path(__file__).parents[2] / "results" / "recorded"
FOUR = RECORDED / "h200x2_engines_best"
PAIRS = RECORDED / "h200x4_engines"
SCHEDULES = RECORDED / "h200x4_engine_schedules"
EXPERTS = RECORDED / "h200x4_experts"
PEER = "torchtitan"
COLUMNS = {
    "ultrasweep": (ENGINE, "none"),
    "compiled": (ENGINE, "block"),
    PEER: (PEER, "none"),
    f"{PEER}, compiled": (PEER, "block"),
}
"""The columns of a table: engine and ``compile`` of their rows."""


def measured(sweep: Path) -> pd.DataFrame:
    """The last attempt at each point. ``layout`` is its layout in words, without compilation."""
    rows: pd.DataFrame = load(sweep).table.to_pandas()
    rows = rows.sort_values("started_at").drop_duplicates("experiment_id", keep="last")
    rows["experiment"] = pd.Series(
        [from_dict(json.loads(text)) for text in rows["config_json"]], index=rows.index, dtype="object"
    )
    rows["layout"] = [_layout(experiment) for experiment in rows["experiment"]]
    return rows


def _layout(experiment: Experiment) -> str:
    schedule = f" ({experiment.pp_schedule})" if experiment.pp_schedule == "1f1b" else ""
    return layout(dataclasses.replace(experiment, compile="none")) + schedule


def pairs_section(rows: pd.DataFrame, bound: Mapping[str, Any]) -> str:
    """Table of both engines' throughput by layout, our best over the peer's best, and our share of the bound.

    Only `COLUMNS` with rows are shown. ``bound`` covers bf16, and fp8 if that was measured.
    """
    shown = [name for name, (engine, how) in COLUMNS.items() if ((rows.engine == engine) & (rows.compile == how)).any()]
    of_fp8 = bound.get("fp8_tokens_per_s_per_gpu")
    lines = [
        f"{_when(rows)} The bound of these devices in bf16 is {bound['bf16_tokens_per_s_per_gpu']:,} tokens/s/GPU"
        + ("." if of_fp8 is None else f", with fp8 matmuls {of_fp8:,}."),
        "",
        f"| layout | {' | '.join(shown)} | ours over the peer's | of the bound | predicted |",
        f"|---|{'---:|' * (len(shown) + 3)}",
    ]
    for layout_name, same in rows.groupby("layout", sort=False):
        cells = {column: _row(same, *which) for column, which in COLUMNS.items()}
        ours = _fastest(cells["ultrasweep"], cells["compiled"])
        theirs = _fastest(cells[PEER], cells[f"{PEER}, compiled"])
        ratio = "–" if ours is None or theirs is None else f"{ours / theirs:.3f}"
        of_columns = [_cell(cells[name]) for name in shown]
        cells_of_row = [*of_columns, ratio, _share(same, ours, bound), _off(cells["ultrasweep"])]
        lines.append(f"| {layout_name} | {' | '.join(cells_of_row)} |")
    return "\n".join(lines)


def experts_section(rows: pd.DataFrame, peer: Mapping[str, Any]) -> str:
    """Table of our rows, and the range in the peer's own log."""
    lines = [
        _when(rows),
        "",
        "| engine | layout | tokens/s/GPU | memory, GiB | mJ a token | predicted |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in rows.sort_values("tokens_per_s_per_gpu", ascending=False).to_dict("records"):
        numbers = (
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['peak_allocated_bytes'] / 2**30:.1f} allocated",
            f"{row['energy_per_token_mj']:.1f}",
            _off({str(key): value for key, value in row.items()}),
        )
        lines.append(f"| ultrasweep | {row['layout']} | {' | '.join(numbers)} |")
    for name in ("compiled", "eager"):
        of = peer[name]
        speed = f"{min(of['tokens_per_s_per_gpu']):,} to {max(of['tokens_per_s_per_gpu']):,}"
        same = rows.loc[rows["zero_stage"] == 3, "layout"].iloc[0]
        lines.append(f"| {PEER}, {name} | {same} | {speed} | {of['reserved_gib']:.1f} reserved | – | – |")
    return "\n".join(lines)


def _when(rows: pd.DataFrame) -> str:
    row = rows.iloc[0]
    days = sorted({f"{day:%Y-%m-%d}" for day in rows["started_at"]})
    model = ", ".join(sorted(set(rows["model"])))
    return (
        f"{row['world_size']} x {row['device_name']} ({row['power_limit_w']:.0f} W), torch {row['torch_version']}, "
        f"{' and '.join(days)}, `{model}`."
    )


def _row(rows: pd.DataFrame, engine: str, compiled: str) -> Mapping[str, Any] | None:
    matching_rows = rows[(rows["engine"] == engine) & (rows["compile"] == compiled)]
    return None if matching_rows.empty else {str(key): value for key, value in matching_rows.iloc[0].items()}


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["outcome"] == "cancelled":
        return "–"
    if row["outcome"] != "ok":
        return str(row["outcome"])
    gib, energy = row["peak_allocated_bytes"] / 2**30, row["energy_per_token_mj"]
    return f"{row['tokens_per_s_per_gpu']:,.0f} ({gib:.1f}; {energy:.1f})"


def _fastest(*rows: Mapping[str, Any] | None) -> float | None:
    return max(
        (float(row["tokens_per_s_per_gpu"]) for row in rows if row is not None and row["outcome"] == "ok"), default=None
    )


def _off(row: Mapping[str, Any] | None) -> str:
    """Relative error of the step time that was predicted before the run."""
    if row is None or row["outcome"] != "ok" or pd.isna(row["predicted_step_time_s"]):
        return "–"
    return f"{row['predicted_step_time_s'] / row['step_time_s'] - 1:+.1%}".replace("%", " %")


def _share(rows: pd.DataFrame, ours: float | None, bound: Mapping[str, Any]) -> str:
    """Share of the bound, which covers bf16, fp8 if measured, and sequences of 4,096 tokens only: longer ones have more
    attention per token."""
    if ours is None or (rows["seq_len"] != 4096).any():
        return "–"
    kinds = {precision.partition("_")[0] for precision in rows["precision"]}
    if len(kinds) > 1 or not kinds <= {"bf16", "fp8"}:
        return "–"
    (kind,) = kinds
    limit = bound.get(f"{kind}_tokens_per_s_per_gpu")
    return "–" if limit is None else f"{ours / limit:.1%}".replace("%", " %")


def page(text: str) -> str:
    """The page with its tables regenerated."""
    four = measured(FOUR)
    text = put_section(text, "engines", f"{_when(four)} {engines_table(four)}")
    text = put_section(text, "pairs", pairs_section(measured(PAIRS), _beside(PAIRS / "bound.json")))
    text = put_section(text, "schedules", pairs_section(measured(SCHEDULES), _beside(SCHEDULES / "bound.json")))
    return put_section(text, "experts", experts_section(measured(EXPERTS), _beside(EXPERTS / "torchtitan.json")))


def _beside(path: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(path.read_text())
    return content


def main() -> int:
    PAGE.write_text(page(PAGE.read_text()))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
