"""Cluster files with tiers, from the command line: plans, refusals and what explain and advise make of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sweep.__main__ import main
from sweep.composing.conffiles import ConfFolders
from sweep.planning.plan import Plan
from tests.sweep.helpers import plan_of

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2)]

NULLS = "intra_node: null\ninter_node: null\n"
TIERS = """
tiers:
  - {name: node, devices: 8, bandwidth: 360 GB/s, latency_s: 4 us}
  - {name: leaf, devices: 16, bandwidth: 50 GB/s, latency_s: 5 us}
  - {name: spine, devices: 64, bandwidth: 2 GB/s, latency_s: 5 us}
"""
GRID = ["+grid=playbook", "model=llama1.34b", "grid.axes.nodes=[1,2,4,16]", "grid.axes.tp=1", "grid.axes.pp=1"]


@pytest.fixture(autouse=True)
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return written(f"defaults: [h100_ib400, _self_]\nname: ours\n{NULLS}{TIERS}")


def written(text: str) -> Path:
    path = Path("conf/cluster/ours.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path.parent.parent.resolve()


def planned(conf: Path, *words: str) -> Plan:
    return plan_of([*GRID, "cluster=ours", *words], folders=ConfFolders((conf,)))


def test_layouts_wider_than_the_outermost_tier_are_flagged(conf: Path) -> None:
    plan = planned(conf)
    flagged = [point for point in plan.points if point.rule == "tiers"]
    assert {point.experiment.world_size for point in flagged} == {128}
    assert all(point.verdict == "invalid" for point in flagged)
    assert "on cluster ours, whose outermost tier joins 64 devices; at most 64" in (flagged[0].detail or "")
    assert {p.experiment.world_size for p in plan.points if p.verdict == "run"} == {8, 16, 32}


def test_a_faster_spine_is_never_slower_in_the_plan_and_reaches_only_what_crosses_it(conf: Path) -> None:
    slow, fast = planned(conf), planned(conf, "cluster.tiers.2.bandwidth=50e9")
    ratios: dict[int, list[float]] = {}
    again = {point.experiment.id: point for point in fast.points}
    assert len(again) == len(slow.points)
    for one in slow.points:
        other = again[one.experiment.id]
        if one.time is not None and other.time is not None:
            ratios.setdefault(one.experiment.world_size, []).append(one.time.step_time_s / other.time.step_time_s)
    assert set(ratios[8] + ratios[16]) == {1.0}
    assert min(ratios[32]) >= 1.0 and max(ratios[32]) > 1.4


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words, "--conf", "conf"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_file_on_top_of_the_other_form_says_how_to_change_it(capsys: pytest.CaptureFixture[str]) -> None:
    written(f"defaults: [h100_ib400, _self_]\nname: ours\n{TIERS}")
    said = refusal(capsys, "plan", "+grid=one_gpu", "cluster=ours")
    assert "cluster ours: tiers and intra_node and inter_node both describe the network; keep one form" in said
    written("defaults: [gb200_nvl72, _self_]\nname: ours\ninter_node: {bandwidth: 25 GB/s, latency_s: 5 us}\n")
    said = refusal(capsys, "plan", "+grid=one_gpu", "cluster=ours")
    assert "set what the file inherits of the other to null (inter_node: null, or tiers: null)" in said


def test_tiers_out_of_order_are_refused_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "plan", "+grid=one_gpu", "cluster=ours", "cluster.tiers.1.devices=4")
    assert "cluster ours: tiers[1]: devices=4 is not more than the 8 of cluster ours: tiers[0]" in said
    said = refusal(capsys, "plan", "+grid=one_gpu", "cluster=ours", "cluster.tiers.1.bandwidth=1e9")
    assert "cluster ours: tiers[2]: bandwidth=2e+09 B/s of a device is more than the 1e+09 of" in said


def test_advise_knows_how_many_devices_the_tiers_join(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "advise", "model=llama1b", "gpus=128", "cluster=ours")
    assert "advise: gpus=128, but cluster ours has 64 devices" in said
    assert main(["advise", "model=llama1b", "gpus=32", "tp=1", "pp=1", "cp=1", "cluster=ours", "--conf", "conf"]) == 0
    assert "llama1b on ours" in capsys.readouterr().out


def test_explain_names_the_tiers_of_a_planned_point(capsys: pytest.CaptureFixture[str]) -> None:
    """The cluster of the plan is found again where it is a shipped one."""
    words = ["plan", *GRID[:2], "grid.axes.nodes=[64]", "grid.axes.tp=8", "grid.axes.pp=1", "cluster=gb200_nvl72"]
    assert main([*words, "--out", "plan.parquet", "--show", "run", "--top", "1"]) == 0
    (found,) = re.findall(r"\b[0-9a-f]{8}\b", capsys.readouterr().out)[:1]
    assert main(["explain", found, "--results", "plan.parquet"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "network on gb200_nvl72, by rank order: tp 8 in NVLink rack (640 GB/s), dp" in said
    assert "in scalable unit (" in said


def explained(capsys: pytest.CaptureFixture[str], planned: Sequence[str], *words: str) -> str:
    """What explain says of a point of a plan, on one line."""
    grid = [*GRID[:2], "grid.axes.nodes=[2]", "grid.axes.tp=8", "grid.axes.pp=1", "cluster=ours"]
    assert main(["plan", *grid, *planned, "--out", "plan.parquet", "--show", "run", "--top", "1"]) == 0
    (found,) = re.findall(r"\b[0-9a-f]{8}\b", capsys.readouterr().out)[:1]
    assert main(["explain", found, "--results", "plan.parquet", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_explain_knows_an_own_cluster_by_its_folder(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is given with --conf or, where that folder still exists, was when the point was planned; the command's changes
    of the cluster count too."""
    planned, moved = ("--conf", str(conf)), Path("elsewhere")
    network = "network on ours, by rank order: tp 8 in node (360 GB/s), dp shards 2 in leaf ("
    assert f"{network}50 GB/s)" in explained(capsys, planned)
    assert f"{network}40 GB/s)" in explained(capsys, [*planned, "cluster.tiers.1.bandwidth=40 GB/s"])
    explained(capsys, planned)
    conf.rename(moved)
    for words, said in (
        ([], "cluster not known: no cluster called 'ours'; known: "),
        (["--conf", str(moved)], f"{network}50 GB/s)"),
    ):
        found = next(row for row in pq.read_table("plan.parquet").to_pylist() if row["verdict"] == "run")[
            "experiment_id"
        ]
        assert main(["explain", found, "--results", "plan.parquet", *words]) == 0
        assert said in " ".join(capsys.readouterr().out.split())
        assert main(["explain", found, "--results", "plan.parquet", "--json", *words]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["groups"] is not None) == (document["cluster"] == "ours") == bool(words)
        assert (document["cluster_unknown"] is None) == bool(words)


def test_explain_refuses_a_folder_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "0" * 8, "--conf", "nowhere"]) == 2
    assert capsys.readouterr().err == "ultrasweep: --conf nowhere: no such folder\n"
