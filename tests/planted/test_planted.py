"""What a test would not notice is not tested: every planted fault must be found, and none without a fault."""

from __future__ import annotations

import importlib
from collections import Counter
from typing import Any

import pytest

from tests.planted import checks
from tests.planted.__main__ import main
from tests.planted.faults_of_ranks import FAULTS
from tests.planted.plant import CannotBePlanted, Fault, planted
from tests.planted.run import Detector
from tests.pool import Pool
from tests.sampling import sampled

CHECKS = sorted({fault.check for fault in FAULTS} - {"parity"})
NUMBERS_ARE_RIGHT = {
    "traffic",
    "clock",
    "precision",
    "loads",
    "times",
    "choices",
    "places",
    "copies",
    "words",
    "adapters",
}
"""Axes whose faults change no number in float64."""


def test_there_are_many_faults_over_every_axis() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 80
    assert len({(fault.place, fault.old, str(fault.new)) for fault in FAULTS}) >= 70
    of_axis = Counter(fault.axis for fault in FAULTS)
    wanted = {
        "scale",
        "data",
        "weights",
        "tp",
        "vocabulary",
        "cp",
        "dp",
        "pp",
        "recompute",
        "norm",
        "optimizer",
        "precision",
    }
    assert all(of_axis[axis] >= 4 for axis in wanted), of_axis


@pytest.mark.slow
def test_each_can_be_planted_and_is_gone_afterwards() -> None:
    failed = {}
    for fault in FAULTS:
        right = changed_by(fault)
        try:
            with planted(fault):
                is_planted = changed_by(fault) is not right
        except CannotBePlanted as why:
            failed[fault.name] = str(why)
            continue
        if not is_planted or changed_by(fault) is not right:
            failed[fault.name] = "is not planted" if not is_planted else "is not gone afterwards"
    assert not failed


def changed_by(fault: Fault) -> Any:
    """The function or the constant that a fault changes, as it is now."""
    module, path = fault.place.split(":")
    *owners, name = path.split(".")
    owner: Any = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    return vars(owner)[name]


def test_a_fault_that_cannot_be_planted_is_not_taken_for_found() -> None:
    place = "workloads.engine.training.data:step_batches"
    fault = Fault(name="gone", what="of code that has changed", axis="data", place=place, old="not there", new="")
    with pytest.raises(CannotBePlanted, match="step_batches has changed"), planted(fault):
        pass
    assert not issubclass(CannotBePlanted, AssertionError)


@pytest.mark.slow
@pytest.mark.parametrize("check", sampled(CHECKS, 8, seconds=2))
def test_the_engine_passes(gloo_pool: Pool, check: str) -> None:
    getattr(checks, check)(gloo_pool, None)


@pytest.fixture(scope="module")
def detector(gloo_pool: Pool) -> Detector:
    return Detector(gloo_pool)


@pytest.mark.slow
@pytest.mark.parametrize("fault", sampled(FAULTS, 18, seconds=2), ids=str)
def test_a_planted_fault_is_found(detector: Detector, fault: Fault) -> None:
    found = detector.find(fault)
    assert found.found_by == fault.check
    if fault.axis in NUMBERS_ARE_RIGHT or fault.check == "reduction_precision":
        assert found.first is None
    else:
        assert found.first is not None and found.first.relative > 5 * found.first.allowed


@pytest.mark.slow
def test_the_first_tensor_is_where_the_fault_is(detector: Detector) -> None:
    by_name = {fault.name: fault for fault in FAULTS}
    for name, what in {
        "embedding_mask": "output of embedding",
        "ring_block_dropped": "output of layers.0.attention",
        "own_maximum": "loss",
        "norms_not_summed": "gradient of norm",
        "norm_counts_replicas": "gradient norm",
        "shard_not_updated": "update of embedding",
    }.items():
        first = detector.find(by_name[name]).first
        assert first is not None and first.computed.what == what
        assert first.computed.step == 0


@pytest.mark.slow
def test_one_by_name_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loss_divided_twice"]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 found in fp64" in said and "step 0: loss" in said


def test_names_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(FAULTS)
    with pytest.raises(SystemExit) as ended:
        main(["loss_over_stagse"])
    assert ended.value.code == 2 and "did you mean 'loss_over_stages'" in capsys.readouterr().err
