"""Fixtures shared by all tests: one pool of processes for each backend, and what needs devices skips without them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.pool import Pool


@cache
def device_count() -> int:
    """CUDA devices, asked without starting CUDA in this process."""
    import torch

    return torch.cuda.device_count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-reliability", action="store_true", help="write docs/reliability.md from this run")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm: needs a Slurm that can be brought up here (see tests/slurm/lab)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if any(item.get_closest_marker("slurm") for item in items):
        from tests.slurm.lab import why_not

        if (reason := why_not()) is not None:
            for item in items:
                if item.get_closest_marker("slurm"):
                    item.add_marker(pytest.mark.skip(reason=reason))
    for item in items:
        needed = 2 if item.get_closest_marker("multi_gpu") else 1 if item.get_closest_marker("gpu") else 0
        if needed and device_count() < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), {device_count()} here"))


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
