"""Which version of another engine is installed, and the sentence for one that cannot run: without installing any."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workloads.test_worker import MODEL as TINY
from workloads.adapters import seam
from workloads.rules import installed_engines
from workloads.rules.installed_engines import RELEASES, unusable_here, version_here
from workloads.spec.engine_versions import ENGINE_VERSIONS
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment

WORKS = (
    "what works: 0.2.2 with torch 2.11 or newer (pip install 'ultrasweep[torchtitan02]'), "
    "0.3.0 with torch 2.13 or newer (pip install 'ultrasweep[torchtitan]')"
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a package of a number, with a file of such text, beside a torch of a number."""

    def installed(number: str | None, torch_number: str, text: str = "") -> None:
        package = tmp_path / "torchtitan"
        (package / "components").mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").touch()
        (package / "components" / "loss.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "torchtitan", raising=False)  # another test may have imported the real one
        numbers = {"torchtitan": number, "torch": torch_number}
        monkeypatch.setattr(installed_engines, "_version", lambda name: numbers[name])

    return installed


def of(version: str, **fields: Any) -> Experiment:
    return Experiment.canonical(model=TINY, global_batch_size=4, engine="torchtitan", engine_version=version, **fields)


def test_every_version_has_a_release() -> None:
    assert [r.version for r in RELEASES["torchtitan"]] == list(ENGINE_VERSIONS["torchtitan"])


@pytest.mark.parametrize(
    ("number", "version"), [("0.2.2", "0.2.2+2"), ("0.3.0", "0.3.0+1"), ("0.4.0", None), (None, None)]
)
def test_the_version_is_that_of_the_installed_package(install: Any, number: str | None, version: str | None) -> None:
    install(number, "2.13.0")
    assert version_here("torchtitan") == version
    assert version_here("ultrasweep") is None


@pytest.mark.parametrize(
    ("number", "torch_number", "text", "needs", "why"),
    [
        ("0.3.0", "2.11.0+cu130", "class ChunkedLossWrapper", "0.3.0+1", "it needs torch 2.13 or newer"),
        ("0.4.0", "2.15.0", "", "0.2.2+2", "no adapter drives this version"),
        ("0.3.0", "2.13.0", "class ChunkedLossWrapper", "0.2.2+2", "the experiment needs 0.2.2"),
        (
            "0.2.2",
            "2.11.0",
            "def cross_entropy",
            "0.2.2+2",
            "its components/loss.py has no build_cross_entropy_loss: it is not the release 0.2.2",
        ),
    ],
)
def test_a_version_that_cannot_run_gets_one_sentence(
    install: Any, number: str, torch_number: str, text: str, needs: str, why: str
) -> None:
    install(number, torch_number, text)
    sentence = f"torchtitan {number} with torch {torch_number} is installed, and {why}; {WORKS}"
    assert unusable_here(of(needs)) == sentence
    with pytest.raises(UnsupportedByEngine) as refusal:
        seam.engine_of(of(needs), 0, torch.device("cpu"))
    assert str(refusal.value) == sentence


def test_what_works_is_not_refused_and_what_is_not_installed_is_left_to_the_ranks(install: Any) -> None:
    install("0.2.2", "2.11.0", "def build_cross_entropy_loss")
    assert unusable_here(of("0.2.2+2")) is None
    install("0.3.0", "2.13.0", "class ChunkedLossWrapper")
    assert unusable_here(of("0.3.0+1")) is None
    install(None, "2.13.0")
    assert unusable_here(of("0.3.0+1")) is None
    assert unusable_here(Experiment(model=TINY, global_batch_size=4)) is None


def test_a_release_that_cannot_be_imported_is_refused(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install("0.3.0", "2.13.0", "class ChunkedLossWrapper")

    def broken(module: str) -> None:
        raise ImportError("cannot import name 'DataParallelMeshDims' from 'torch.distributed.fsdp'")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(
        UnsupportedByEngine, match=r"torchtitan 0\.3\.0 cannot be imported \(cannot import name 'DataPa"
    ):
        seam.engine_of(of("0.3.0+1"), 0, torch.device("cpu"))
