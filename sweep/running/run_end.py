"""The end of ``run`` and ``watch``: how the points ended, the fastest layouts, what to try next, and the report."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding

from launchers.state.sweep_dir import SweepDir
from launchers.status.run_summary import RunSummary
from launchers.status.status import sweep_status
from results.errors import UltrasweepError
from results.tables.store import own_sweep_dirs, read_ledger, read_runs
from results.text.numbers import device_noun, format_bytes, format_percent, listed, plural
from results.text.terminal import plain_table
from sweep.inspecting.findings import (
    LEDGER_COLUMNS,
    ROW_COLUMNS,
    Cell,
    Untried,
    best_layouts,
    freeing_cache,
    older,
    sockets_between_nodes,
    untried_points,
    waiting_for_host,
)
from sweep.planning.summary import layout, workload

_MOST_CELLS, _MOST_TIED, _MOST_UNTRIED = 12, 3, 3
_MENDABLE = ("hang", "nccl_error", "node_failure")
"""Outcomes that may not repeat in another attempt, in addition to failures of the infrastructure."""
_METHODS = {"measured": "measured", "rehearsed": "rehearsed", "rehearsed_fake": "estimated"}


def print_end(sweep: SweepDir, summary: RunSummary, command: str, console: Console) -> None:
    """Print how the points ended and what they show. ``command`` runs the rest after an interruption."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(summary.outcomes.items()))
    if summary.attempts:
        say(f"{plural(summary.attempts, 'attempt')}; points by outcome: {outcomes or 'none yet'}")
    folders = [sweep.path]
    if not summary.detached:
        try:
            folders = _print_findings(sweep, summary, command, console)
        except (OSError, UltrasweepError) as error:
            say(f"cannot summarize the rows: {error}")
    if summary.interrupted:
        say(f"interrupted, {plural(summary.left, 'point')} left; go on with: {command}")
    elif summary.message:
        say(summary.message)
    elif not summary.left and folders:
        say(f"report: python -m analysis.report {shlex.quote(str(sweep.path))}")


def _print_findings(sweep: SweepDir, summary: RunSummary, command: str, console: Console) -> list[Path]:
    """Print the fastest layouts and what to try next. Returns the folders whose rows the sweep uses."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    ledger = read_ledger(sweep.path).select(LEDGER_COLUMNS).to_pylist()
    rows = _rows_of(sweep.path)
    folders = [sweep.path] if rows else []
    used = {row["cached_attempt"]: row["cached_sweep"] for row in ledger if row["cached_attempt"]}
    others = set(used.values()) - {sweep.name}
    for folder in own_sweep_dirs(sweep.path.parent) if others else []:
        if folder.name in others:
            reused_rows = [row for row in _rows_of(folder) if row["attempt_id"] in used]
            say(f"the rows of {plural(len(reused_rows), 'point')} are in {folder}")
            rows += reused_rows
            folders.append(folder)
    cells = best_layouts(rows)
    _print_best(cells, console)
    waited, known_runs = waiting_for_host(rows)
    if waited:
        say(
            f"{waited} of {plural(known_runs, 'run')} were host-bound (host_lead_s near 0): "
            "their times may differ on another host"
        )
    freed, known_runs = freeing_cache(rows)
    if freed:
        say(
            f"in {freed} of {plural(known_runs, 'run')} memory was so full that the allocator had to free its cache "
            "(allocator_retries): a layout that needs less memory may be faster"
        )
    sockets, known_runs = sockets_between_nodes(rows)
    if sockets:
        say(
            f"in {sockets} of {plural(known_runs, 'run')} over several nodes NCCL used sockets between them "
            "(nccl_transports): if the nodes have InfiniBand or EFA, see NCCL's variables in the cluster file "
            "(docs/slurm.md, The network between the nodes)"
        )
    if left_out := older(rows):
        say(
            f"{plural(left_out, 'finished run')} with an older version of the engine or the measurement not ranked here"
        )
    method = Counter(row["method"] for row in rows).most_common(1)[0][0] if rows else "measured"
    _print_untried(untried_points(ledger, rows, cells, method), summary, command, console)
    _print_failed(sweep, console)
    return folders


def _rows_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_runs(folder).select(ROW_COLUMNS).to_pylist()
    return rows


def _print_best(cells: Sequence[Cell], console: Console) -> None:
    if not cells:
        return
    shown = cells[:_MOST_CELLS]
    noun = device_noun(shown[0].layouts[0].backend)
    methods = {cell.key.method for cell in shown}
    mfu = any(cell.layouts[0].mfu for cell in shown)
    table = plain_table(title="")
    table.add_column(f"fastest {_METHODS[methods.pop()]}" if len(methods) == 1 else "fastest", overflow="fold")
    for heading in (f"tokens/s/{noun}", "peak", *(("MFU",) if mfu else ()), "next is slower by"):
        table.add_column(heading, justify="right", no_wrap=True)
    several_lengths = len({cell.key.seq_len for cell in cells}) > 1
    for cell in shown:
        name = f"{cell.key.workload} on {plural(cell.key.world_size, noun)}"
        name += f", {cell.key.seq_len:,} tokens" if several_lengths else ""
        name += f", tp {cell.key.tp}" if cell.key.tp is not None else ""
        name += f", cp {cell.key.cp}" if (cell.key.cp or 1) > 1 else ""
        table.add_row(name + (f" ({_METHODS[cell.key.method]})" if methods else ""))
        for place, measured in enumerate(cell.layouts[: min(cell.tied or 1, 1 + _MOST_TIED)]):
            table.add_row(
                Padding(layout(measured.experiment), (0, 0, 0, 2)),
                f"{measured.rate:,.0f}",
                format_bytes(measured.peak_bytes),
                *((format_percent(measured.mfu),) if mfu else ()),
                "" if place else _lead(cell),
            )
        if (more := (cell.tied or 1) - 1 - _MOST_TIED) > 0:
            table.add_row(f"  and {more:,} more")
    console.print(table)
    say = partial(console.print, highlight=False, markup=False)
    if len(cells) > _MOST_CELLS:
        say(f"... and {plural(len(cells) - _MOST_CELLS, 'model and size', 'models and sizes')} more in the report")
    if others := sum(cell.not_like_these for cell in cells):
        which = "another batch size or precision than most layouts of that model and size"
        say(f"{plural(others, 'layout')} not ranked: {which}")
    if any(cell.tied is None and len(cell.layouts) > 1 for cell in shown):
        say("?: run-to-run variation is unknown (too few timed steps, no repeats)")
    if any(cell.key.tp is not None for cell in shown):
        say("rehearsed times cannot rank different tp against each other: each tp has its own line")


def _lead(cell: Cell) -> str:
    """How far the next layout is behind the fastest one, or how many layouts are tied."""
    if len(cell.layouts) == 1:
        return "no other"
    lead = format_percent(1 - cell.layouts[1].rate / cell.layouts[0].rate)
    if cell.tied is None:
        return f"{lead} ?"
    return f"tie of {cell.tied}" if cell.tied > 1 else lead


def _print_untried(untried: Sequence[Untried], summary: RunSummary, command: str, console: Console) -> None:
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if not untried:
        return
    say("worth trying next, by predictions corrected with the runs so far:")
    for point in untried[:_MOST_UNTRIED]:
        than = f"{point.gain:+.0%} to the best" if point.gain is not None else "nothing measured there yet"
        where = f"{workload(point.experiment)} on {point.experiment.world_size}"
        say(f"  {where}, about {point.rate:,.0f} tokens/s each ({than}): {layout(point.experiment)}")
    hours = [point.expected_hours or 0.0 for point in untried[:_MOST_UNTRIED] if point.verdict == "over_budget"]
    if hours and command and not summary.left:
        say(f"  to run them, repeat the command with a budget of at least {max(hours):.2g} device-hours: {command}")


def _print_failed(sweep: SweepDir, console: Console) -> None:
    """Print the failures that may not repeat in another attempt, with the command that requeues their points."""
    last = {record.experiment_id: record for record in sweep_status(sweep).attempts}
    failed = Counter(
        record.outcome
        for record in last.values()
        if not record.will_retry and (record.outcome in _MENDABLE or (record.infrastructure and record.outcome != "ok"))
    )
    if failed:
        failures = listed([f"{outcome} {count:,}" for outcome, count in failed.most_common()])
        retry = shlex.join(["python", "-m", "sweep", "retry", str(sweep.path), *failed])
        console.print(f"worth another try ({failures}): {retry}", highlight=False, markup=False, soft_wrap=True)
