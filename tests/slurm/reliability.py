"""Writes docs/reliability.md from a test run: the faults of real sweeps, and the rows that their points got."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.slurm.lab import Lab
from tests.slurm.lab.lab import CHECKOUT
from tests.slurm.scenarios import SCENARIOS, ScenarioResult

PAGE = CHECKOUT / "docs" / "reliability.md"
_HEAD = """\
# What happens when things break

This page shows what faults of ranks, pilots, nodes, disks and Slurm do to a running sweep: how its points end, and
whether each gets its row. One command breaks the sweeps and writes the table (with
``-k`` only the lines of some scenarios):

    python -m pytest tests/slurm/test_faults.py --write-reliability

Each line of the table is a sweep on a real Slurm ({version}, {nodes} virtual nodes with 8 GPUs declared each, on one
machine with {cores} cores), submitted by the ordinary command and disturbed while it ran. The points are stand-ins that
sleep and fail by script; pilots, agents, queue, submission and Slurm are real. After every scenario the test asserts:

- each point has exactly one last row, and every row before it is marked as followed by another attempt;
- no point ran twice without a mark;
- no process and no job is left.

"Tried again" counts rows of attempts that were followed by another. Times include the start of the pilots and Slurm's
own delays: it checks time limits every 30 s, and notices a lost node after 15 to 90 s.

| scenario | fault | rows of the sweep | seconds |
|---|---|---|---:|
"""


_STORMS = """
## An hour of random faults

Real pilots and real commands on a simulated Slurm with a virtual clock: {nodes} nodes, points on one, two and four
nodes that are added whenever nearly all have ended, time limits of 15 minutes, and a fault every 25 s on average for
one virtual hour, drawn by a seed. Faults are pilots that are killed, frozen or hang in the middle of a call on a file,
lost agents and ranks, rebooted, drained and falsely lost nodes, preempted and cancelled jobs, a controller that is away
(for ten minutes as well) or forgets jobs, failing commands and files, clocks that are set, and commands that are
killed, frozen or typed twice. Two runs of a seed are alike, not the same. One command writes this table:

    python -m tests.slurm.storm --seeds 8 --write-reliability

Failed calls are those on files. After every seed each point has one final row, every other row is marked as followed by
another attempt or as of a point that ran twice, every attempt that was started has a row, every attempt that was
measured before it was recorded has a row with its measurement, and no pilot and no job is left.

| seed | points | faults | failed calls | pilots | commands | final rows | tried again | ran twice | marked | hours |
|---:|---:|---:|---:|---:|---:|---|---|---:|---:|---:|
"""
_STORMS_TITLE = "\n## An hour of random faults\n"


def write_page(results: Mapping[str, ScenarioResult], lab: Lab, page: Path = PAGE) -> None:
    """Write the page with these results by title; other scenarios keep their lines. Its table has the order of
    `SCENARIOS`."""
    version = lab.run("sinfo", "--version").strip()
    text = page.read_text()
    lines = {line.split("|")[1].strip(): line for line in _table(text)}
    for title, result in results.items():
        row = result.rows[title]
        lines[title] = f"| {title} | {row.injected} | {row.rows} | {result.seconds:.0f} |"
    titles = [title for scenario in SCENARIOS for title in scenario.titles if title in lines]
    head = _HEAD.format(version=version, nodes=len(lab.nodes), cores=os.cpu_count())
    _, there, storms = text.partition(_STORMS_TITLE)
    page.write_text(head + "\n".join(lines[title] for title in titles) + "\n" + there + storms)


def write_storms(lines: Sequence[str], nodes: int, page: Path = PAGE) -> None:
    """Write the part of the page about random faults; ``lines`` are those of its table."""
    scenarios = page.read_text().partition(_STORMS_TITLE)[0]
    page.write_text(scenarios + _STORMS.format(nodes=nodes) + "\n".join(lines) + "\n")


def titles_in(page: Path = PAGE) -> list[str]:
    """The scenarios that a page lists."""
    return [line.split("|")[1].strip() for line in _table(page.read_text())]


def _table(text: str) -> list[str]:
    """The lines of the scenarios' table."""
    return [line for line in text.partition(_STORMS_TITLE)[0].splitlines() if line.startswith("| ")][1:]
