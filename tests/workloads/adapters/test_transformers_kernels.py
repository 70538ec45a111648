"""Which packages transformers finds for the recurrent layers of a point."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workloads.adapters.test_transformers import of_kind
from workloads.adapters import transformers_kernels
from workloads.adapters.transformers_kernels import KERNELS, choose
from workloads.engine.kind_ops import linear_kernels
from workloads.rules.engine_support import refused
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODULES = {module for modules in KERNELS.values() for module in modules}
DELTA, MAMBA = "qwen3_5_moe_text", "nemotron_h"


def of(kind: str, **fields: Any) -> Experiment:
    return of_kind(kind, precision="bf16", **fields)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str | None]:
    """Empty modules of all packages, in the versions by package that are returned."""
    for module in MODULES:
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    versions: dict[str, str | None] = {name: number for one in KERNELS.values() for name, number in one.values()}
    monkeypatch.setattr(transformers_kernels, "installed_version", versions.get)
    monkeypatch.setattr(linear_kernels, "unusable", lambda sizes: None)
    monkeypatch.setattr(linear_kernels, "allow_wide_keys", lambda: None)
    return versions


@pytest.mark.parametrize(
    ("recurrence", "device", "found"),
    [
        ("torch", CUDA, set()),
        ("fla", CUDA, {"fla", "causal_conv1d"}),
        ("mamba_ssm", CUDA, {"mamba_ssm", "causal_conv1d"}),
        ("fla", CPU, set()),
    ],
)
def test_the_packages_of_the_point_alone_can_be_imported(
    packages: dict[str, str | None], recurrence: str, device: torch.device, found: set[str]
) -> None:
    choose(of(MAMBA if recurrence == "mamba_ssm" else DELTA, recurrence=recurrence), device)
    for module in MODULES:
        if module in found:
            importlib.import_module(module)
        else:
            with pytest.raises(ImportError):
                importlib.import_module(module)


def test_a_package_that_is_missing_or_cannot_run_is_named(
    packages: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    e = of(DELTA, recurrence="fla")
    packages["causal-conv1d"] = None
    with pytest.raises(UnsupportedByEngine, match=r"needs causal-conv1d 1\.7\.0, and it is not installed"):
        choose(e, CUDA)
    packages["causal-conv1d"] = "1.6.0"
    with pytest.raises(UnsupportedByEngine, match=r"1\.7\.0, and causal-conv1d 1\.6\.0 is installed"):
        choose(e, CUDA)
    packages["causal-conv1d"] = "1.7.0"
    monkeypatch.setattr(linear_kernels, "unusable", lambda sizes: f"keys of {sizes}")
    with pytest.raises(UnsupportedByEngine, match="keys of"):
        choose(e, CUDA)
    monkeypatch.setattr(linear_kernels, "unusable", lambda sizes: None)
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    with pytest.raises(UnsupportedByEngine, match="causal-conv1d cannot be imported"):
        choose(e, CUDA)


def test_each_kind_of_recurrent_layer_has_its_package() -> None:
    assert refused(of(DELTA, recurrence="fla")) == refused(of(MAMBA, recurrence="mamba_ssm")) == []
    assert "Mamba-2 on mamba-ssm; use mamba_ssm or torch" in refused(of(MAMBA, recurrence="fla"))[0]
    assert "it runs Mamba-2 alone on mamba-ssm" in refused(of(DELTA, recurrence="mamba_ssm"))[0]
