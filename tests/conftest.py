"""Marks, groups and fixtures of all tests: what needs a device, a Slurm or a browser, and one pool for each backend."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.pool import Pool
from tests.sampling import LONG_SECONDS, SEED, USUAL_SECONDS, drawn_part, seconds_of, some_of, stays

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    # Workers of pytest-xdist use every core. More threads in one of them only wait for one another, at full speed.
    os.environ.setdefault(name, "1")

MARK_OF_FIXTURE = {"lab": "slurm", "plain_lab": "slurm", "browser": "browser", "gloo_pool": "slow"}
"""A test that uses the fixture, directly or through another one, carries the mark."""
SEEDED_PART = pytest.StashKey[str]()
"""Which exhaustive tests were drawn, for the end of the report."""


@cache
def device_count() -> int:
    """CUDA devices, asked without starting CUDA in this process."""
    import torch

    return torch.cuda.device_count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-reliability", action="store_true", help="write docs/reliability.md from this run")
    parser.addoption(
        "--exhaustive-part",
        metavar="SECONDS/SEED",
        help="of the tests marked exhaustive only about so many seconds, drawn by the seed",
    )


def pytest_report_header() -> str:
    return f"seeded samples: TESTS_SEED={SEED}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while modules are imported, nor in what they have made later: it is never garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # Python's 700 (2,000 since 3.12) costs a twentieth of all tests' time
        gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries that count what is left at the end would take it for a leak


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if (mark := MARK_OF_FIXTURE.get(fixture)) and not item.get_closest_marker(mark):
                item.add_marker(mark)
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    _leave_to_exhaustive_runs(items)
    _skip_without_slurm([item for item in items if item.get_closest_marker("slurm")])
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed and device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), {device_count()} here"))
    if part := config.getoption("--exhaustive-part"):
        _keep_part(config, items, part)
    if hasattr(config, "workerinput"):  # workers take groups in this order: the long ones first
        weights = {group: sum(map(_weight, of_group)) for group, of_group in _by_group(items).items()}
        items.sort(key=lambda item: -weights[group_of(item)])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop where pytest-xdist has lost the groups: each worker would then bring up every cluster, browser and pool."""
    scattered = [item.nodeid for item in session.items if not item.nodeid.endswith(f"@{group_of(item)}")]
    if hasattr(session.config, "workerinput") and session.config.getvalue("loadgroup") and scattered:
        pytest.exit(f"pytest {pytest.__version__} and pytest-xdist do not keep groups together: {scattered[0]}", 3)


def _leave_to_exhaustive_runs(items: list[pytest.Item]) -> None:
    """Of a file marked ``drawn`` a part of the slow test functions, drawn by the seed, stays in an ordinary run. Where
    samples are shared (`tests.sampling.SHARE`), so are tests that take long and no sample is of."""
    slow: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        if any(map(item.get_closest_marker, ("slow", "browser", "slurm"))):
            file, _, test = item.nodeid.partition("::")
            slow.setdefault(file, {}).setdefault(test.partition("[")[0], []).append(item)
    for file, of_function in slow.items():
        drawn = [name for name, of_name in of_function.items() if of_name[0].get_closest_marker("drawn")]
        for name, of_name in of_function.items():
            if (mark := of_name[0].get_closest_marker("drawn")) is None:
                left = [] if any(map(_is_exhaustive, of_name)) else filter(_is_left_out, of_name)
            elif mark.kwargs.get("whole"):
                left = [] if stays(file, mark.kwargs["one_in"]) else of_name
            else:
                left = [] if name in some_of(drawn, mark.kwargs["one_in"], file) else of_name
            for item in left:
                if not _is_exhaustive(item):
                    item.add_marker(pytest.mark.exhaustive(seconds=_seconds_if_slow(item) or USUAL_SECONDS))


def _is_exhaustive(item: pytest.Item) -> bool:
    return item.get_closest_marker("exhaustive") is not None


def _is_left_out(item: pytest.Item) -> bool:
    """Whether the test takes long and the seed does not leave it in this run."""
    mark = item.get_closest_marker("slow")
    always = mark is not None and mark.kwargs.get("always", False)
    return not always and _seconds_if_slow(item) >= LONG_SECONDS and not stays(item.nodeid)


def _seconds_if_slow(item: pytest.Item) -> float:
    """What the mark ``slow`` says of the test's time; 0 without a word of it."""
    mark = item.get_closest_marker("slow")
    return float(mark.kwargs.get("seconds", 0.0)) if mark is not None else 0.0


def _keep_part(config: pytest.Config, items: list[pytest.Item], part: str) -> None:
    exhaustive = [
        item for item in items if item.get_closest_marker("exhaustive") and not item.get_closest_marker("skip")
    ]
    drawn = drawn_part(exhaustive, part)
    names = ", ".join(sorted(item.nodeid for item in drawn))
    seed = part.partition("/")[2]
    config.stash[SEEDED_PART] = f"seeded part: seed {seed}, {len(drawn)} of {len(exhaustive)} exhaustive tests: {names}"
    left_out = {item for item in items if item.get_closest_marker("exhaustive")} - set(drawn)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells the process that reports which part it has drawn."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seeded_part"] = session.config.stash.get(SEEDED_PART, "")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[SEEDED_PART] = getattr(node, "workeroutput", {}).get("seeded_part", "")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which part was drawn, how many layouts were compared with the unsharded model, and in how much time."""
    if drawn := terminalreporter.config.stash.get(SEEDED_PART, ""):
        terminalreporter.write_line(drawn)
    compared = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" and "test_parity.py" in report.nodeid
    ]
    if len(compared) > 1:
        minutes = sum(report.duration for report in compared) / 60
        terminalreporter.write_line(f"parity: {len(compared)} tests of layouts in {minutes:.1f} minutes of one worker")


def group_of(item: pytest.Item) -> str:
    """Tests of one group run one after the other in one worker of pytest-xdist.

    A group is a file, whose tests share a browser or drawn figures, or what a mark ``xdist_group`` of the file says.
    Everything that brings up Slurm is one group, since two clusters at once would slow each other down.
    """
    if item.get_closest_marker("slurm"):
        return "slurm"
    named = item.get_closest_marker("xdist_group")
    return str(named.args[0]) if named is not None else item.nodeid.split("::")[0]


def _by_group(items: list[pytest.Item]) -> dict[str, list[pytest.Item]]:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(group_of(item), []).append(item)
    return groups


def _weight(item: pytest.Item) -> int:
    """A rough measure of how long a test takes: 0 if it is skipped."""
    if item.get_closest_marker("skip"):
        return 0
    if item.get_closest_marker("exhaustive"):
        return int(10 * seconds_of(item))
    if seconds := _seconds_if_slow(item):
        return int(10 * seconds)
    weights = {"slurm": 1000, "slow": 20, "browser": 10}
    return next((weight for mark, weight in weights.items() if item.get_closest_marker(mark)), 1)


def _skip_without_slurm(items: list[pytest.Item]) -> None:
    if not items:
        return
    from tests.slurm.lab import why_not

    if (reason := why_not()) is not None:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gloo_pool() -> Iterator[Pool]:
    pool = Pool(8, "gloo")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def nccl_pool() -> Iterator[Pool]:
    pool = Pool(device_count(), "nccl")
    yield pool
    pool.close()
