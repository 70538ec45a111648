"""Every scenario of `faults_*`, played on real clusters at the same time as far as they do not disturb each other."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.reliability import PAGE, titles_in, write_page
from tests.slurm.stage import SCENARIOS, Leg, Played, Theatre

for kind in ("points", "cluster", "people"):  # in the order of the table
    importlib.import_module(f"tests.slurm.faults_{kind}")
TITLES = [title for scenario in SCENARIOS for title in scenario.titles]
AT_ONCE = 6


@pytest.fixture(scope="module")
def playing(request: pytest.FixtureRequest, lab: Lab, plain_lab: Lab) -> Iterator[Mapping[str, Future[Played]]]:
    """The chosen scenarios, being played; by title."""
    chosen = {item.callspec.params.get("title") for item in request.session.items if hasattr(item, "callspec")}
    futures = {title: Future[Played]() for title in TITLES}

    def play(leg: Leg, at_once: int) -> None:
        where = plain_lab if leg == "plain" else lab
        theatre = Theatre(where, where.state / "sweeps", at_once)
        wanted = [one for one in SCENARIOS if one.leg == leg and chosen.intersection(one.titles)]
        begun = theatre.play_all(wanted)
        for title, future in begun.items():
            future.add_done_callback(lambda done, title=title: _hand_on(done, futures[title]))
        wait(begun.values())

    def with_accounting() -> None:
        play("nodes", AT_ONCE)
        play("controller", 1)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(with_accounting)
        pool.submit(play, "plain", 1)
        yield futures
    if request.config.getoption("--write-reliability") and all(
        f.done() and not f.exception() for f in futures.values()
    ):
        write_page({title: future.result() for title, future in futures.items()}, lab)


def _hand_on(done: Future[Played], to: Future[Played]) -> None:
    error = done.exception()
    if error is not None:
        to.set_exception(error)
    else:
        to.set_result(done.result())


@pytest.mark.slurm
@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", TITLES)
def test_nothing_is_lost_when(title: str, playing: Mapping[str, Future[Played]]) -> None:
    played = playing[title].result(timeout=880)
    told = played.told[title]  # missing where the scenario ended without a word of what it asserted
    assert told.injected and told.rows
    print(f"{played.seconds:.0f} s: {told.injected}: {told.rows}")


def test_the_page_lists_every_scenario(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--write-reliability"):
        pytest.skip("the page is being written by this run")
    assert titles_in(Path(PAGE)) == TITLES, "write it anew: pytest tests/slurm/test_faults.py --write-reliability"
