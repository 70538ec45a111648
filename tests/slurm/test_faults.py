"""Runs every scenario of `faults_*` on real clusters, those that do not disturb each other at the same time."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.sampling import sampled
from tests.slurm.lab import Lab
from tests.slurm.reliability import PAGE, titles_in, write_page
from tests.slurm.scenarios import SCENARIOS, Isolation, ScenarioResult, ScenarioRunner

for kind in ("points", "cluster", "nodes", "users", "submission"):  # in the order of the table
    importlib.import_module(f"tests.slurm.faults_{kind}")
TITLES = [title for scenario in SCENARIOS for title in scenario.titles]
AT_ONCE = 8


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, lab: Lab, plain_lab: Lab) -> Iterator[Mapping[str, Future[ScenarioResult]]]:
    """Running futures of the chosen scenarios, by title."""
    chosen = {item.callspec.params.get("title") for item in request.session.items if hasattr(item, "callspec")}
    futures = {title: Future[ScenarioResult]() for title in TITLES}

    def run(isolation: Isolation, at_once: int) -> None:
        where = plain_lab if isolation == "plain" else lab
        runner = ScenarioRunner(where, where.state / "sweeps", at_once)
        chosen_here = [one for one in SCENARIOS if one.isolation == isolation and chosen.intersection(one.titles)]
        futures_here = runner.run_all(chosen_here)
        for title, future in futures_here.items():
            future.add_done_callback(lambda done, title=title: _pass_on(done, futures[title]))
        wait(futures_here.values())

    def with_accounting() -> None:
        run("nodes", AT_ONCE)
        run("cluster", 1)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(with_accounting)
        pool.submit(run, "plain", 1)
        yield futures
    if request.config.getoption("--write-reliability"):
        ended = {title: future for title, future in futures.items() if future.done() and not future.exception()}
        write_page({title: future.result() for title, future in ended.items()}, lab)


def _pass_on(done: Future[ScenarioResult], to: Future[ScenarioResult]) -> None:
    error = done.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


@pytest.mark.slurm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", sampled(TITLES, 3, seconds=20))
def test_nothing_is_lost_when(title: str, running: Mapping[str, Future[ScenarioResult]]) -> None:
    result = running[title].result(timeout=880)
    row = result.rows[title]
    assert row.injected and row.rows
    print(f"{result.seconds:.0f} s: {row.injected}: {row.rows}")


def test_the_page_lists_every_scenario(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-reliability"):
        pytest.skip("the page is being written by this run")
    assert titles_in(Path(PAGE)) == TITLES, "write it anew: pytest tests/slurm/test_faults.py --write-reliability"
