"""What a point can get at most: devices of the launcher, nodes of the cluster, memory of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from results.text.numbers import GIB
from sweep.__main__ import main
from sweep.composing.config import compose_sweep
from sweep.grids.expand import expand_all
from sweep.planning import limits
from sweep.planning.limits import device_limit, host_bytes, machine_memory_bytes
from sweep.planning.plan import Plan, make_plan, refuse_if_nothing_can_run
from tests.sweep.helpers import plan_of
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.errors import InvalidSweep


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))


def plan_on(memory: int, *words: str) -> Plan:
    """The tiny grid on a machine with so many bytes."""
    config = compose_sweep(["+grid=tiny", *words])
    return make_plan(config, expand_all(config.grids, config.models.__getitem__), "measured", host_bytes=memory)


@pytest.mark.slow
def test_cpu_processes_share_the_memory_of_the_machine() -> None:
    sizes = {p.experiment.id: estimate_memory(p.experiment) for p in plan_of(["+grid=tiny"]).points}
    together = {
        p.experiment.id: sum(stage.peak_bytes for stage in sizes[p.experiment.id].stages)
        * (p.experiment.world_size // p.experiment.pp)
        for p in plan_of(["+grid=tiny"]).points
    }
    memory = sorted(together.values())[len(together) // 2]
    plan = plan_on(memory)
    assert {p.experiment.id for p in plan.points if p.verdict == "predicted_oom"} == {
        id for id, size in together.items() if size > 1.1 * memory
    }
    refused = next(p for p in plan.points if p.verdict == "predicted_oom")
    assert re.search(
        r"\d process(es need .* together, at most .* each| needs .*); this machine has", refused.detail or ""
    )
    assert all(p.limit_bytes == memory // p.experiment.world_size for p in plan.points)
    assert plan_on(memory, "plan.run_predicted_oom=true").counts["run"] == len(plan.points)


def test_a_model_far_too_large_for_this_machine_is_refused() -> None:
    config = compose_sweep(["+grid=tiny", "model=llama405b", "grid.axes.world_size=4"])
    plan = make_plan(
        config, expand_all(config.grids, config.models.__getitem__), "measured", host_bytes=machine_memory_bytes()
    )
    with pytest.raises(InvalidSweep, match=r"no point fits in memory: .* 4 processes need .* this machine has"):
        refuse_if_nothing_can_run(plan)


def test_the_command_asks_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+grid=tiny", "model=llama405b"]) == 2
    assert "no point fits in memory" in capsys.readouterr().err


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = machine_memory_bytes()
    assert whole is not None and whole > GIB // 2
    v2, v1 = tmp_path / "memory.max", tmp_path / "memory.limit_in_bytes"
    monkeypatch.setattr(limits, "_CGROUP_LIMITS", (v2, v1))
    physical = machine_memory_bytes()
    v2.write_text("max\n")
    assert machine_memory_bytes() == physical
    v2.write_text("1048576\n")
    assert machine_memory_bytes() == 1048576
    v2.unlink()
    v1.write_text("2097152\n")
    assert machine_memory_bytes() == 2097152


@pytest.mark.slow
def test_only_processes_on_this_machine_share_its_memory() -> None:
    assert host_bytes(compose_sweep(["+grid=tiny"]), "measured") == machine_memory_bytes()
    for words in (["+grid=tiny", "launcher=slurm"], ["+grid=one_gpu"]):
        assert host_bytes(compose_sweep(words), "measured") is None
    assert host_bytes(compose_sweep(["+grid=tiny", "launcher=rehearse"]), "rehearsed_fake") is None


@pytest.mark.slow
def test_layouts_beyond_the_cluster_are_flagged_with_their_reason() -> None:
    words = ["+grid=playbook", "model=llama1.34b", "grid.axes.nodes=[1,4,8]", "grid.axes.tp=1", "grid.axes.pp=1"]
    unknown = plan_of(words)
    assert "cluster_nodes" not in {point.rule for point in unknown.points}
    plan = plan_of([*words, "cluster.nodes=4"])
    flagged = [point for point in plan.points if point.rule == "cluster_nodes"]
    assert {point.experiment.world_size for point in flagged} == {64}
    assert flagged[0].detail == "64 ranks need 8 nodes; cluster h100_efa has 4 nodes of 8 devices (nodes in its file)"
    assert all(point.verdict == "invalid" and point.time is not None for point in flagged)  # and what it would give
    assert plan.counts["run"] == sum(p.verdict == "run" and p.experiment.world_size <= 32 for p in unknown.points)


@pytest.mark.slow
def test_the_plan_applies_max_nodes_as_the_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+grid=playbook", "grid.axes.nodes=[1,4]", "model=llama1.34b", "grid.axes.tp=1", "grid.axes.pp=1"]
    assert main(["plan", *words, "launcher=slurm", "launcher.max_nodes=2", "--show", "invalid", "--top", "1"]) == 0
    text = capsys.readouterr().out
    assert "launcher_devices: needs 32 devices, launcher.max_nodes=2 gives 16" in " ".join(text.split())
    assert "4 nodes, 32 GPUs" not in text  # no jobs for it


@pytest.mark.slow
def test_the_plan_of_gpus_can_be_made_anywhere() -> None:
    local = compose_sweep(["+grid=llama8b_8gpu"])
    assert device_limit(local, "measured", None, None) is None
    two = device_limit(compose_sweep(["+grid=tiny", "launcher.num_devices=2"]), "measured", None, None)
    assert two is not None and two.devices == 2
    here = device_limit(local, "measured", None, 4)
    assert here is not None and here.why == "this machine gives 4; launcher=rehearse needs one"
    assert device_limit(local, "rehearsed", None, 1) is None
