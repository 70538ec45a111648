"""Packages of an engine that are missing, or installed in another version: named, before anything is imported."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable

import pytest
import torch

from tests.sweep.helpers import plan_of
from tests.workloads.test_worker import MODEL
from workloads.adapters.seam import engine_of
from workloads.rules import installed_packages
from workloads.rules.installed_packages import missing, other_version, packages_of
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment


def of(engine: str = "transformers") -> Experiment:
    return Experiment.canonical(model=MODEL, global_batch_size=1, engine=engine, precision="fp32")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def versions(**found: str) -> None:
        def version(name: str) -> str:
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr("importlib.metadata.version", version)
        installed_packages.installed_version.cache_clear()

    return versions


@pytest.fixture(autouse=True)
def _forget() -> None:
    installed_packages.installed_version.cache_clear()


def test_versions_are_those_of_the_rows() -> None:
    assert packages_of(of()) == {"transformers": "5.24.0", "accelerate": "1.15.0"}
    assert packages_of(of("ultrasweep")) == packages_of(of("torchtitan")) == {}


def test_a_package_of_another_version_is_named(installed: Callable[..., None]) -> None:
    installed(transformers="4.57.6", accelerate="1.15.0")
    assert other_version(of()) == (
        "transformers 4.57.6 is installed, but the experiment needs 5.24.0: pip install 'ultrasweep[transformers]'"
    )
    assert missing(of()) is None
    with pytest.raises(UnsupportedByEngine, match=r"transformers 4\.57\.6 is installed"):
        engine_of(of(), 0, torch.device("cpu"))
    plan = plan_of(["+grid=tiny", "grid.axes.engine=transformers"])
    assert {point.verdict for point in plan.points} == {"invalid"}
    assert any("transformers 4.57.6 is installed" in (point.detail or "") for point in plan.points)


def test_a_missing_package_is_named_by_the_rank_and_planned_without(installed: Callable[..., None]) -> None:
    installed(transformers="5.24.0")
    assert other_version(of()) is None
    assert missing(of()) == (
        "engine=transformers needs accelerate, not installed here: pip install 'ultrasweep[transformers]'"
    )
    with pytest.raises(UnsupportedByEngine, match="needs accelerate"):
        engine_of(of(), 0, torch.device("cpu"))


def test_a_package_that_cannot_be_imported_is_a_refusal(
    installed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(transformers="5.24.0", accelerate="1.15.0")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "workloads.adapters.transformers_accelerate", raising=False)
    with pytest.raises(UnsupportedByEngine, match=r"cannot be imported: .*accelerate"):
        engine_of(of(), 0, torch.device("cpu"))
