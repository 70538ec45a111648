"""Plans of points whose optimizer is on the host: memory of nodes, unknown rates, and what explain says."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from results.tables.store import read_ledger
from sweep.__main__ import main
from sweep.planning.plan import refuse_if_nothing_can_run
from sweep.planning.summary import on_hosts, print_plan
from tests.sweep.helpers import plan_of
from workloads.costs.memory.host_activations import node_host_bytes
from workloads.spec.errors import InvalidSweep

EIGHT = ["+grid=one_point", "cluster=h200", "grid.axes.model=llama8b", "grid.axes.global_batch_size=8"]
HALF = [*EIGHT, "grid.axes.optimizer_offload=[0,0.5]"]


def test_the_memory_of_a_node_is_checked_as_that_of_a_device() -> None:
    plan = plan_of([*HALF, "cluster.host.memory_bytes='20 GiB'", "plan.oom_margin=1.5"])
    (point,) = (point for point in plan.points if point.experiment.optimizer_offload)
    assert (point.verdict, point.host_memory_bytes) == ("run", node_host_bytes(point.experiment, 8))
    plan = plan_of([*HALF, "cluster.host.memory_bytes='20 GiB'", "plan.oom_margin=1.4"])
    (point,) = (point for point in plan.points if point.experiment.optimizer_offload)
    assert point.verdict == "predicted_oom"
    assert point.detail == (
        "optimizer_offload=0.5 needs 29.9 GiB of the host's memory on a node; 20.0 GiB x margin 1.4 = 28.0 GiB"
    )
    assert all(other.verdict == "run" for other in plan.points if other is not point)


def test_a_plan_that_no_host_can_hold_is_refused_with_the_numbers() -> None:
    plan = plan_of([*EIGHT, "grid.axes.optimizer_offload=0.5", "cluster.host.memory_bytes='20 GiB'"])
    with pytest.raises(InvalidSweep, match=r"needs 29\.9 GiB of the host's memory .*use a smaller optimizer_offload"):
        refuse_if_nothing_can_run(plan)


def test_an_unknown_memory_is_said_and_not_checked() -> None:
    plan = plan_of(HALF)
    assert on_hosts(plan) == [
        "1 point with optimizer_offload: up to 29.9 GiB of the host's memory on a node; the memory of a node is not "
        "known, so it is not checked (host.memory_bytes of cluster h200)"
    ]
    (point,) = (point for point in plan.points if point.experiment.optimizer_offload)
    assert point.verdict == "run" and point.time is not None
    assert on_hosts(plan_of(EIGHT)) == []


def test_unknown_rates_give_no_time_and_are_named() -> None:
    plan = plan_of([*HALF, "cluster.host.link_bandwidth=null"])
    times = {point.experiment.optimizer_offload: point.time for point in plan.points}
    assert times[0.0] is not None and times[0.5] is None
    file = io.StringIO()
    print_plan(plan, Console(file=file, width=300))
    assert "no step time with optimizer_offload: the file of cluster h200 lacks host.link_bandwidth" in file.getvalue()


def test_the_ledger_and_explain_have_the_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.parquet"
    assert main(["plan", *HALF, "--out", str(path)]) == 0
    capsys.readouterr()
    rows = {row["optimizer_offload"]: row for row in read_ledger(path).to_pylist()}
    assert rows[0.0]["predicted_host_memory_bytes"] == 0
    needed = rows[0.5]["predicted_host_memory_bytes"]
    assert needed == pytest.approx(29.9 * 2**30, rel=1e-3)
    assert main(["explain", rows[0.5]["experiment_id"], "--results", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "50 % of the optimizer on the host: 29.92 GiB of its memory for the fullest rank" in said
    assert "moments to the device and back 690.8 ms, kernels 30.1 ms; overlapped 691.2 ms" in said
    assert main(["explain", rows[0.5]["experiment_id"], "--results", str(path), "--json"]) == 0
    host = json.loads(capsys.readouterr().out)["host"]
    assert (host["rank_bytes"], host["node_bytes"], host["node_memory_bytes"]) == (needed, needed, None)
    update = host["update"]
    assert update["streamed_s"] >= max(update["link_s"], update["update_s"])
    assert main(["explain", rows[0.0]["experiment_id"], "--results", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["host"] is None


@pytest.mark.slow
def test_advice_has_no_layout_that_the_host_cannot_hold(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["advise", "model=llama8b", "cluster=h200", "gpus=1", "global_batch_size=8", "optimizer_offload=0.5"]
    assert main([*words, "cluster.host.memory_bytes='30 GiB'"]) == 0
    assert "the fastest that fit" in capsys.readouterr().out
    assert main([*words, "cluster.host.memory_bytes='29 GiB'"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 GPUs: nothing fits" in said
    assert "optimizer_offload=0.5 needs 29.9 GiB of the host's memory on a node; 29.0 GiB" in said
    assert main([*words, "cluster.host.link_bandwidth=null"]) == 2
    assert "lacks host.link_bandwidth" in capsys.readouterr().err


AWAY = [*EIGHT, "grid.axes.activation_offload=[none,all]"]


def test_activations_count_for_the_memory_of_the_host() -> None:
    plan = plan_of(AWAY)
    (point,) = (point for point in plan.points if point.experiment.activation_offload != "none")
    assert point.host_memory_bytes == node_host_bytes(point.experiment, 8) > 0
    assert any("with activation_offload: up to" in line for line in on_hosts(plan))
    times = {one.experiment.activation_offload: one.time for one in plan.points}
    assert times["all"] is not None and times["none"] is not None
    assert times["all"].step_time_s > times["none"].step_time_s
    plan = plan_of([*AWAY, "cluster.host.memory_bytes='1 GiB'"])
    (point,) = (point for point in plan.points if point.experiment.activation_offload != "none")
    assert point.verdict == "predicted_oom" and point.detail is not None
    assert point.detail.startswith("activation_offload=all needs ")


def test_a_point_too_big_for_devices_and_hosts_says_both() -> None:
    words = [*EIGHT, "grid.axes.optimizer_offload=0.5", "cluster.host.memory_bytes='20 GiB'"]
    (host,) = plan_of(words).points
    (both,) = plan_of([*words, "+grid.axes.memory_budget=20"]).points
    (device,) = plan_of([*EIGHT, "grid.axes.optimizer_offload=0.5", "+grid.axes.memory_budget=20"]).points
    assert both.verdict == "predicted_oom" and "memory_budget=20 GiB" in str(device.detail)
    assert both.detail == f"{device.detail}; {host.detail}"
