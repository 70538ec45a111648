"""``search`` on a real Slurm of 64 virtual nodes finds what running every layout would find, while pilots die and the
command is killed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sweep.composing.search_settings import Settings
from tests.slurm.cells import answers_of, fastest, read_cells
from tests.slurm.conftest import free_ports
from tests.slurm.lab import Lab
from tests.slurm.lab.lab import wait_until
from tests.slurm.searches import CELLS, KILLS, NODES, SearchRun, layout_of, printed
from tests.slurm.sweeps import brief

CLOSE = 1.3
"""Layouts slower than the fastest by more than this are not repeated."""
STUDY = Path(__file__).resolve().parents[3] / "shared" / "study" / "bench_final2_mfu2.csv"
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.exhaustive(seconds=90),
    pytest.mark.skipif(not STUDY.exists(), reason="the study's raw table is not beside the checkout"),
]


@pytest.fixture(scope="module")
def wide_lab() -> Iterator[Lab]:
    with Lab(nodes=NODES, port_base=free_ports(NODES + 2)) as lab:
        yield lab


@pytest.mark.timeout(400)
def test_a_search_names_the_winner_of_the_whole_grid_though_pilots_die(wide_lab: Lab, tmp_path: Path) -> None:
    layouts = read_cells(STUDY, CELLS)
    search = SearchRun(wide_lab, tmp_path, layouts)
    search.run(limit_s=240)
    print(f"\n{search.summary()}")
    rows = search.attempts()
    assert search.candidates() == len(layouts)
    assert len(search.killed) == len(KILLS) + 1 and search.crashed is not None, search.output
    assert search.given == 2
    _check_winners(search, rows)
    _check_once(search, rows)
    assert len({layout_of(row) for row in rows}) < len(rows) < len(layouts) / 2
    # A job that had the crashed node is COMPLETING until Slurm gives that node up.
    wait_until(lambda: {job.state for job in wide_lab.jobs()} <= {"COMPLETING"}, 60, "the end of the jobs")


def _check_winners(search: SearchRun, rows: list[dict[str, Any]]) -> None:
    """Compare with the best of all rows of the table, including those that the search has not run."""
    answers, keys, within = answers_of(search.layouts), printed(rows), Settings().within
    for model, gpus in CELLS:
        best_s, named = fastest(search.layouts, model, gpus).step_time_s, search.named(model, gpus)
        assert best_s is not None and named, search.output
        found_s = answers[keys[model, named[0]]]
        assert found_s is not None and best_s >= found_s * (1 - within), (named, found_s, best_s)
        if found_s > best_s:
            assert fastest(search.layouts, model, gpus).key not in {layout_of(row) for row in rows}, named


def _check_once(search: SearchRun, rows: list[dict[str, Any]]) -> None:
    """Every point has one last row, and other rows only where its pilot was killed. A layout has several points only
    where it was repeated, with other seeds, at the end."""
    answers = answers_of(search.layouts)
    lost = [row for row in rows if row["will_retry"]]
    assert 1 <= len(lost) <= len(search.killed), brief(lost)
    assert {row["outcome"] for row in lost} == {"node_failure"}, brief(lost)
    died = [*(f"pilot {one} died" for one in search.killed), f"node {search.crashed}"]
    assert all(any(cause in row["evidence"] for cause in died) for row in lost), (search.killed, brief(lost))
    by_layout: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if not row["will_retry"]:
            by_layout[row["model"], layout_of(row)].append(row)
    last = [row for of_layout in by_layout.values() for row in of_layout]
    assert {row["experiment_id"] for row in lost} <= {row["experiment_id"] for row in last}, "a point was lost"
    assert len({row["experiment_id"] for row in last}) == len(last), "a point ran twice"
    for (_, layout), of_layout in by_layout.items():
        expected = {("oom", None)} if answers[layout] is None else {("ok", answers[layout])}
        assert {(row["outcome"], row["step_time_s"]) for row in of_layout} == expected, brief(of_layout)
    repeated = {key: len(of_layout) for key, of_layout in by_layout.items() if len(of_layout) > 1}
    for model, _ in CELLS:
        repeats = sum(count - 1 for key, count in repeated.items() if key[0] == model)
        assert repeats <= Settings().repeats, repeated
    for model, gpus in CELLS:
        ran = [key for key in by_layout if key[0] == model and answers[key[1]] is not None]
        ran.sort(key=lambda key: answers[key[1]] or 0.0)
        limit_s = CLOSE * (answers[ran[0][1]] or 0.0)
        close, again = {key for key in ran if answers[key[1]] <= limit_s}, {key for key in repeated if key[0] == model}
        assert again <= close, f"{model} on {gpus}: {again - close} ran again"
