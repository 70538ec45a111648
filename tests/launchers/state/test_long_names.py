"""File names stay within the file system's limit, however long a model's name and a layout's description are."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from launchers.attempt.attempt import LONGEST_IN_ATTEMPT, attempt_prefix, new_attempt_id
from launchers.state.history import HistoryReader, write_record
from launchers.state.sweep_dir import Point, SweepDir
from results.shared_filesystem.whole_files import shortened, write_whole
from tests.launchers.queues import everything, queue_reader
from tests.launchers.scripted import attempt_record
from tests.workloads.costs.shapes import MIXTRAL
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_id import LONGEST_ID

LONGEST = Experiment.canonical(
    model=dataclasses.replace(MIXTRAL, name="a-model-of-our-own-with-a-name-that-says-all-about-it" * 4),
    dp_replicate=64,
    dp_shard=64,
    tp=64,
    cp=64,
    pp=16,
    ep=8,
    etp=64,
    micro_batch_size=16,
    global_batch_size=1_048_576,
    seq_len=131_072,
    pp_schedule="interleaved_zero_bubble",
    virtual_stages=16,
    recompute="norm+rope+swiglu",
    recompute_every=2,
    routing="skewed",
    routing_imbalance=2.0,
    precision="fp8_tensorwise",
)
CHINESE = LONGEST.replace(model=dataclasses.replace(MIXTRAL, name="我们自己的模型" * 20))


@pytest.mark.parametrize("longest", [LONGEST, CHINESE])
def test_limits_are_in_bytes(longest: Experiment) -> None:
    point = Point(index=0, grid="long", experiment=longest, deadline_s=60.0)
    assert LONGEST_ID - 3 < len(os.fsencode(longest.id)) <= LONGEST_ID
    assert len(os.fsencode(attempt_prefix(point))) <= LONGEST_IN_ATTEMPT + len(".a")
    assert longest.id.endswith(f"-{longest.hash}")


def test_a_temporary_name_is_not_longer_than_names_can_be(tmp_path: Path) -> None:
    for letter in ("a", "模"):
        path = tmp_path / shortened(letter * 255, 255)
        write_whole(path, "content")
        assert [one.name for one in tmp_path.iterdir()] == [path.name]
        path.unlink()


def test_an_id_keeps_its_hash_and_is_cut_before_it() -> None:
    assert len(LONGEST.id) <= LONGEST_ID
    assert LONGEST.id.endswith(f"-{LONGEST.hash}")
    other = LONGEST.replace(seed=7)
    assert other.id != LONGEST.id
    short = LONGEST.replace(model=dataclasses.replace(LONGEST.model, name="m"), dp_replicate=1)
    assert short.id.startswith("m-dp64z0-tp64")


@pytest.mark.parametrize("longest", [LONGEST, CHINESE])
def test_claims_and_records_of_the_longest_id_can_be_written(longest: Experiment, sweep: SweepDir) -> None:
    point = Point(index=999_999, grid="long", experiment=longest, deadline_s=60.0, method="rehearsed_fake")
    sweep.add_points([point])
    claim = queue_reader(sweep, "slurm-20261124-233312-071876.1000.10").claim_next(everything)
    assert claim is not None
    attempt = new_attempt_id(point, 10)
    taken_over = claim.path.with_name(f"{claim.stem}@{claim.pilot_id}@{attempt}.json")
    claim.path.rename(taken_over)
    write_record(sweep, claim.stem, attempt_record(10, attempt_id=attempt))
    history = HistoryReader(sweep)
    history.refresh()
    assert [one.attempt_id for one in history.of(point.stem)] == [attempt]
