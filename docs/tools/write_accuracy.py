"""Writes the tables of docs/accuracy.md and docs/accuracy_details.md: errors of predictions on rows left out of fits.

``python -m docs.tools.write_accuracy [--study bench_final2_mfu2.csv] [--a100 a100_runs.csv] [--public public_rows.csv]
[--only SECTION]`` computes every number from rows. The shipped rows are read from results/recorded; the files of the
study, of the A100 runs and of published runs do not ship, and a section whose file is not given is kept as it stands.
The section ``summary`` has lines of the others as they then stand.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from docs.tools import (
    accuracy_limits,
    accuracy_limits_of_public,
    accuracy_of_advice,
    accuracy_of_captured,
    accuracy_of_engines,
    accuracy_of_hosts,
    accuracy_of_plans,
    accuracy_of_public,
    accuracy_of_rehearsals,
    accuracy_summary,
)
from docs.tools.accuracy_limits import host_sets_pace
from docs.tools.accuracy_scores import by_value, percent, scores, table, verdicts
from docs.tools.other_hosts import ON_OTHER_HOSTS
from results.errors import UltrasweepError
from sweep.predicting.measured_tables import a100_table, recorded_table, study_table
from sweep.predicting.predict_table import predict_frame

PAGES = tuple(Path(__file__).parents[1] / name for name in ("accuracy.md", "accuracy_details.md"))
DEVICE = "NVIDIA H200"
"""Device of most shipped rows."""
FAST = 20.0
"""Least MFU in percent of the study's rows that are graded by themselves. No fit selects rows by it."""
TEN = 5
"""Number of draws of ten rows."""
CUTS = tuple(float(gib) for gib in range(56, 93, 4))
"""GiB of reserved memory above which a row of an 80 GB device would be refused."""
FINE_CUTS = tuple(gib / 4 for gib in range(4 * 60, 4 * 88))
"""Finer cuts in GiB, to find the best one."""


def leave_out(rows: pd.DataFrame, given: pd.DataFrame, key: Sequence[str]) -> pd.DataFrame:
    """Predictions of ``rows``; each group of equal ``key`` is predicted from the rows of ``given`` of all other
    groups."""
    parts = []
    for _, group in rows.groupby(list(key), sort=True):
        same = (given[list(key)] == group.iloc[0][list(key)]).all(axis=1)
        parts.append(_predicted(group, given[~same]))
    return pd.concat(parts).sort_index()


def ten_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Predictions of all rows except ten, fitted on these ten, for several draws."""
    parts = []
    for seed in range(TEN):
        drawn = rows.sample(10, random_state=seed).index
        parts.append(_predicted(rows.drop(drawn), rows.loc[drawn]).assign(draw=seed))
    return pd.concat(parts)


def _predicted(rows: pd.DataFrame, given: pd.DataFrame | None) -> pd.DataFrame:
    known = rows.reset_index(drop=True).drop(columns=["status", "step_time_s", "reserved_gib"])
    predictions = predict_frame(known, None if given is None else given.reset_index(drop=True)).predictions
    predictions = predictions.set_index(rows.index).drop(columns="reason").astype(float)
    return rows.join(predictions.add_prefix("of_"))


def recorded_section() -> str:
    rows = recorded_table()
    measured = {name: rows[rows["gpu"] == name] for name in (DEVICE, *sorted({*rows["gpu"].dropna()} - {DEVICE}))}
    left = leave_out(_ran(measured[DEVICE]), measured[DEVICE], ("layers", "hidden"))
    waits = host_sets_pace(left)
    again = recorded_table(ON_OTHER_HOSTS)
    again = _ran(again[again["gpu"] == DEVICE])
    blind = again.drop(columns="host_launch_s")
    lines = [
        (f"{DEVICE}, nothing fitted", scores(_predicted(_ran(measured[DEVICE]), None))),
        (f"{DEVICE}, one model left out", scores(left)),
        ("of these, where the device sets the pace", scores(left[~waits])),
        ("of these, where the host does", scores(left[waits])),
        ("on other hosts, one model left out", scores(leave_out(again, measured[DEVICE], ("layers", "hidden")))),
        ("same, without their launches", scores(leave_out(blind, measured[DEVICE], ("layers", "hidden")))),
        (f"{DEVICE}, ten rows, {TEN} draws", scores(ten_rows(_ran(measured[DEVICE])))),
    ]
    for name, rows_of_device in measured.items():
        if name != DEVICE:
            lines.append((f"{name}, nothing fitted", scores(_predicted(_ran(rows_of_device), None))))
            lines.append((f"{name}, rows of {DEVICE}", scores(_predicted(_ran(rows_of_device), measured[DEVICE]))))
    axes = [
        line
        for name in ("hidden", "tp", "pp", "cp", "sharding", "recompute", "seq", "precision")
        for line in by_value(left, name)
    ]
    return (
        f"{table(lines, 'fitted on')}\n\n{DEVICE}, one model left out, by axis:\n\n{table(axes, 'rows with')}\n\n"
        f"{accuracy_limits.section(left, waits)}"
    )


def _ran(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["status"] == "ok"]


def study_section(path: Path) -> str:
    rows = study_table(path)
    known = rows[rows["status"] != "other"]
    every, models = _ran(known), ("layers", "hidden")
    memory = leave_out(known, known, models)
    tries = [
        ("nothing fitted", _predicted(every, None)),
        ("the whole table of the other models", _ran(memory)),
        (f"ten rows, {TEN} draws", ten_rows(every)),
    ]
    fast = f"of these, at least {FAST:g} % MFU"
    lines = [line for name, found in tries for line in _with_part((name, found), fast, found["mfu"] >= FAST)]
    ran = _ran(memory)
    off = (ran["of_predicted_peak_reserved_bytes"] / 2**30 / ran["reserved_gib"] - 1).abs()
    fits = memory["of_fits"] == 1
    ok, oom = memory["status"] == "ok", memory["status"] == "oom"
    right = ((ok & fits).sum() + (oom & ~fits).sum()) / (ok | oom).sum()
    curve = "\n".join(f"| {cut:g} | {a} | {b} | {percent(c)} |" for cut, a, b, c in verdicts(memory, CUTS))
    best = max(verdicts(memory, FINE_CUTS), key=lambda line: line[3])
    memory_text = (
        f"Memory, one model left out, all {len(memory):,} rows that ran or ran out of memory: reserved memory is off\n"
        f"by {percent(off.mean())} (median {percent(off.median())}, p90 {percent(off.quantile(0.9))}). The verdict "
        f"`fits`, "
        f"with the cut that is best on the other\nmodels, is right for {percent(right)}: it refuses "
        f"{int((ok & ~fits).sum())} of {int(ok.sum()):,} rows that ran and lets {int((oom & fits).sum())} of "
        f"{int(oom.sum()):,} through that ran\nout. A cut of the reserved memory of the first rank alone is right for "
        f"{percent(best[3])} at best, with {best[0]:g} GiB ({best[1]} runs\nrefused, {best[2]} failures let through):"
    )
    of_verdicts = accuracy_limits.verdicts_section(memory)
    axes = [line for name in ("hidden", "tp", "pp", "sharding", "gpus") for line in by_value(ran, name)]
    return f"""{table(lines, "fitted on")}

All rows that ran, from the whole table of the other models, by axis:

{table(axes, "rows with")}

{memory_text}

| GiB | runs refused | failures let through | right |
|---:|---:|---:|---:|
{curve}

{of_verdicts}"""


def _with_part(line: tuple[str, pd.DataFrame], name: str, part: Any) -> list[tuple[str, dict[str, str]]]:
    """Scores of the predictions of a line, and of a ``part`` of them."""
    return [(line[0], scores(line[1])), (name, scores(line[1][part]))]


def a100_section(path: Path) -> str:
    rows = a100_table(path)
    lines = []
    for name, group in rows.groupby("dataset", sort=True):
        lines.append((f"{name}, nothing fitted", scores(_predicted(group, None))))
        if len(group) > 50:
            lines.append((f"{name}, ten rows, {TEN} draws", scores(ten_rows(group))))
    return table(lines, "rows, fitted on")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog="python -m docs.tools.write_accuracy", description=__doc__)
    parser.add_argument("--study", type=Path, help="bench_final2_mfu2.csv of nanotron/ultrascale-playbook-data")
    parser.add_argument("--a100", type=Path, help="a table of measured A100 runs")
    parser.add_argument("--public", type=Path, help="a table of runs that other teams published")
    parser.add_argument("--only", action="append", help="name of a section; give it again for more of them")
    options = parser.parse_args(arguments)
    makers: dict[str, Callable[[], str] | None] = {
        "plans": accuracy_of_plans.section,
        "captured": accuracy_of_captured.section,
        "engines": accuracy_of_engines.section,
        "hosts": accuracy_of_hosts.section,
        "recorded": recorded_section,
        "rehearsals": accuracy_of_rehearsals.section,
        "study": (lambda: study_section(options.study)) if options.study else None,
        "public": (lambda: accuracy_of_public.section(options.public)) if options.public else None,
        "public_limits": (lambda: accuracy_limits_of_public.section(options.public)) if options.public else None,
        "a100": (lambda: a100_section(options.a100)) if options.a100 else None,
        "advice": accuracy_of_advice.section,
        "summary": lambda: accuracy_summary.section("\n".join(page.read_text() for page in PAGES)),
    }
    for name, make in makers.items():
        if make is not None and name in (options.only or makers):
            page, made = page_of(name), make()  # takes minutes, in which another process may write the page
            page.write_text(put_section(page.read_text(), name, made))
            print(f"{page}: {name}")
    return 0


def page_of(section: str) -> Path:
    """The page with a section's marks."""
    return next(page for page in PAGES if f"<!-- {section}: begin -->" in page.read_text())


def put_section(text: str, name: str, contents: str) -> str:
    """The page with the text between a section's marks replaced. Raises `UltrasweepError` for a page without them."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    pattern = rf"({begin}\n).*?({end})"
    if not re.search(pattern, text, re.DOTALL):
        raise UltrasweepError(f"the page has no section {name}: a line {begin} and below it a line {end}")
    return re.sub(pattern, lambda found: f"{found[1]}\n{contents}\n\n{found[2]}", text, flags=re.DOTALL)


if __name__ == "__main__":
    sys.exit(main())
