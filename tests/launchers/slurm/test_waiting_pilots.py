"""Pilots that wait with old options, and those that Slurm will never start."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from launchers.settings import LaunchSettings
from launchers.slurm.options import SlurmOptions
from launchers.slurm.reconcile import Reconciler
from launchers.slurm.waiting_pilots import pilot_options
from launchers.state import node_exclusions, pilot_state
from launchers.state.pilot_config import read_pilot_config
from launchers.state.submissions import all_submissions
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from tests.launchers.scripted import settings
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.runs import run
from tests.launchers.slurm.test_reconcile import Submitter

pytestmark = pytest.mark.slow  # each calls the scripts of the cluster a few times


def states(fake: FakeSlurm) -> list[str]:
    return [f"{job['id']} {job['state']}" for job in fake.jobs]


def test_waiting_pilots_get_the_options_of_the_next_command(
    fake: FakeSlurm, sweep: SweepDir, capsys: pytest.CaptureFixture[str]
) -> None:
    run(sweep, detach=True)
    run(sweep, detach=True, time_min=10)
    assert states(fake) == ["1 CANCELLED", "2 PENDING"]
    assert "1 waiting pilot of 1 node replaced: time_min was 5 and is 10" in capsys.readouterr().out
    assert [one.time_min for one in all_submissions(sweep)] == [5, 10]
    run(sweep, detach=True, time_min=10, max_nodes=7, target_h=9.0)  # they say nothing about one pilot
    assert len(fake.jobs) == 2


def test_pilots_that_run_keep_theirs(fake: FakeSlurm, sweep: SweepDir) -> None:
    run(sweep, detach=True)
    fake.move("RUNNING")
    run(sweep, detach=True, time_min=10)
    assert states(fake) == ["1 RUNNING"]


def test_settings_of_the_pilot_count_too_and_secrets_are_not_shown(fake: FakeSlurm, sweep: SweepDir) -> None:
    lines: list[str] = []

    def cycle(launch: LaunchSettings) -> None:
        Reconciler(
            sweep,
            launch,
            SlurmOptions(time_min=5),
            pilot=("python",),
            command="test",
            report=lines.append,
            stopped=lambda: False,
        ).cycle([])

    cycle(settings())
    cycle(settings(environment={"HUB_TOKEN": "hunter2"}, max_attempts=7))
    assert lines[-1] == "1 waiting pilot of 1 node replaced: environment has changed, max_attempts was 3 and is 7"
    assert "hunter2" not in "".join(path.read_text() for path in (sweep.path / "submissions").glob("*.json"))
    token = all_submissions(sweep)[-1].token
    assert read_pilot_config(pilot_state.config_path(sweep, token)).settings.max_attempts == 7


def test_two_commands_do_not_replace_each_others_pilots_for_ever(fake: FakeSlurm, sweep: SweepDir) -> None:
    first = Submitter(sweep)
    first.cycle()
    second = Submitter(sweep, time_min=10)
    second.cycle()
    for _ in range(3):
        first.cycle()
        second.cycle()
    assert states(fake) == ["1 CANCELLED", "2 PENDING"]


def test_options_that_slurm_refuses_cost_no_place_in_the_queue(fake: FakeSlurm, sweep: SweepDir) -> None:
    Submitter(sweep).cycle()
    fake.mode("sbatch", "refuse")
    other = Submitter(sweep, partition="nope")
    cycle = other.cycle()
    assert 1 in cycle.given_up and states(fake) == ["1 PENDING"]
    assert other.lines == ["1 waiting pilot of 1 node keeps its old options"]


def test_a_quota_that_the_old_ones_fill(fake: FakeSlurm, sweep: SweepDir) -> None:
    Submitter(sweep, target_h=1e-4).cycle()
    fake.mode("sbatch", "quota 3")
    other = Submitter(sweep, target_h=1e-4, time_min=10)
    other.cycle()
    other.cycle()
    assert sum(job["state"] == "PENDING" for job in fake.jobs) == 3
    assert {job["id"] for job in fake.jobs if job["state"] == "CANCELLED"} == {1}


def test_a_pilot_that_never_starts_is_an_error_until_the_options_change(fake: FakeSlurm, sweep: SweepDir) -> None:
    with_reason(fake, "PartitionTimeLimit")
    with pytest.raises(
        UltrasweepError, match=r"will never start 1 waiting pilot of 1 node: .*PartitionTimeLimit\. Repeat"
    ):
        run(sweep, detach=True, time_min=300)
    with pytest.raises(UltrasweepError, match="will never start"):
        run(sweep, time_min=300)
    assert states(fake) == ["1 PENDING"]
    fake.set(default_reason="Priority")
    assert run(sweep, detach=True, time_min=10).detached
    assert states(fake) == ["1 CANCELLED", "2 PENDING"]


def test_a_pilot_that_never_starts_without_the_excluded_nodes_gets_them(fake: FakeSlurm, sweep: SweepDir) -> None:
    node_exclusions.exclude(sweep, "node3", "memory stays", "p")
    with_reason(fake, "BadConstraints")
    submitter = Submitter(sweep)
    submitter.cycle()
    fake.set(default_reason="Priority")
    submitter.cycle()
    assert states(fake) == ["1 CANCELLED", "2 PENDING"]
    old, new = all_submissions(sweep)
    assert (list(old.excluded), list(new.excluded)) == (["node3"], [])
    assert read_pilot_config(pilot_state.config_path(sweep, new.token)).use_excluded
    assert "BadConstraints without the excluded nodes (node3)" in submitter.lines[-1]


def with_reason(fake: FakeSlurm, reason: str) -> None:
    """Jobs submitted from now on wait for this reason."""
    fake.set(default_reason=reason)


def test_every_option_that_changes_a_job_is_compared() -> None:
    base = pilot_options(SlurmOptions(), settings())
    changes: dict[str, Any] = {"partition": "x", "time_min": 9, "setup": ("a",), "sbatch": {"switches": 1}}
    differ: Callable[[str, Any], bool] = lambda name, value: (  # noqa: E731
        pilot_options(SlurmOptions(**{name: value}), settings()) != base
    )
    assert all(differ(name, value) for name, value in changes.items())
    assert not any(differ(name, value) for name, value in {"max_nodes": 3, "max_pilots": 2, "target_h": 1.0}.items())


def test_no_line_of_the_user_is_stored_and_lines_of_earlier_versions_are_compared(
    fake: FakeSlurm, sweep: SweepDir
) -> None:
    lines = {"setup": ("source /shared/secret.sh",), "srun_args": ("--mpi=pmix",)}
    run(sweep, detach=True, **lines)
    [stored] = (sweep.path / "submissions").glob("slurm-*.json")
    fields = json.loads(stored.read_text())
    assert "secret.sh" not in stored.read_text() and "pmix" not in stored.read_text()
    assert fields["options"]["setup"][0].startswith("sha256:")
    stored.write_text(json.dumps({**fields, "options": {**fields["options"], "setup": list(lines["setup"])}}))
    run(sweep, detach=True, **lines)
    assert states(fake) == ["1 PENDING"]
    run(sweep, detach=True, **{**lines, "setup": ("source /shared/other.sh",)})
    assert states(fake) == ["1 CANCELLED", "2 PENDING"]


def test_waiting_pilots_do_not_get_nodes_that_are_excluded_meanwhile(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep, exclude="node9", target_h=1e-4)
    submitter.cycle()
    node_exclusions.exclude(sweep, "node3", "memory stays", "p")
    for _ in range(2):
        submitter.cycle()
    updates = [words for words in fake.calls("scontrol") if words[0] == "update"]
    assert updates == [["update", "JobId=1_0,1_1,1_2", "ExcNodeList=node9,node3"]]
    assert list(all_submissions(sweep)[0].excluded) == ["node3"] and not fake.calls("scancel")


def test_other_nodes_are_asked_for_although_so_many_were_refused_before(fake: FakeSlurm, sweep: SweepDir) -> None:
    submitter = Submitter(sweep)
    submitter.cycle()
    fake.mode("scontrol", "refuse")
    node_exclusions.exclude(sweep, "node3", "memory stays", "p")
    for _ in range(2):
        submitter.cycle()
    fake.mode("scontrol")
    node_exclusions.exclude(sweep, "node3", "memory stays", "p", for_s=0.0)  # its exclusion is over
    node_exclusions.exclude(sweep, "node4", "memory stays", "p")
    submitter.cycle()
    updates = [words for words in fake.calls("scontrol") if words[0] == "update"]
    assert [words[-1] for words in updates] == ["ExcNodeList=node3", "ExcNodeList=node4"]
