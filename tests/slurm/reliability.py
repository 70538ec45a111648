"""Writes docs/reliability.md from a test run: the faults of real sweeps, and the rows that their points got."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.slurm.lab import Lab
from tests.slurm.lab.lab import CHECKOUT
from tests.slurm.scenarios import SCENARIOS, ScenarioResult

PAGE = CHECKOUT / "docs" / "reliability.md"
_HEAD = """\
# What happens when things break

This page shows what faults of ranks, pilots, nodes, disks and Slurm do to a running sweep: how its points end, and
whether each gets its row. One command breaks the sweeps and writes the page:

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


def write_page(results: Mapping[str, ScenarioResult], lab: Lab, page: Path = PAGE) -> None:
    """Write the page. Its table has the order of `SCENARIOS`."""
    import os

    version = lab.run("sinfo", "--version").strip()
    lines = []
    for scenario in SCENARIOS:
        for title in scenario.titles:
            result = results[title]
            row = result.rows[title]
            lines.append(f"| {title} | {row.injected} | {row.rows} | {result.seconds:.0f} |")
    head = _HEAD.format(version=version, nodes=len(lab.nodes), cores=os.cpu_count())
    page.write_text(head + "\n".join(lines) + "\n")


def titles_in(page: Path = PAGE) -> list[str]:
    """The scenarios that a page lists."""
    rows = [line.split("|")[1].strip() for line in page.read_text().splitlines() if line.startswith("| ")]
    return rows[1:]
