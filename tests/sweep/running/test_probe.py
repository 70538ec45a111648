"""The command ``probe``: what it runs where, what it refuses, and a whole probe on CPU processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from results.errors import UltrasweepError
from results.tables.probes import load_probe
from sweep.__main__ import main
from sweep.composing.conffiles import ConfFolders
from sweep.running.probe import prepare_probe

pytestmark = pytest.mark.drawn(one_in=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "nodes", "message"),
    [
        (["grid.axes.tp=[1]"], 1, "grid.axes.tp is set by this command"),
        (["name=mine"], 1, "name is set by this command"),
        (["+grid=tiny"], 1, "grid is set by this command"),
        (["launcher=local"], 2, "needs launcher=slurm"),
        (["launcher=local", "cluster=cpu", "results_dir=a", "results_dir=b"], 1, "results_dir is given twice, a and b"),
        (["launcher=rehearse"], 1, "no links to measure"),
    ],
)
def test_what_is_not_the_users_to_choose(overrides: list[str], nodes: int, message: str) -> None:
    with pytest.raises(UltrasweepError, match=message):
        prepare_probe(overrides, ConfFolders(), nodes)


@pytest.mark.slow
def test_nodes_of_a_cluster_through_slurm(tmp_path: Path) -> None:
    prepared = prepare_probe(["cluster=h100_efa", "launcher=slurm", f"results_dir={tmp_path}"], ConfFolders(), nodes=2)
    layouts = sorted((p.experiment.world_size, p.experiment.tp, p.experiment.zero_stage) for p in prepared.plan.to_run)
    assert layouts == [(16, 1, 3), (16, 8, 3)]
    assert prepared.settings.probe == "probe"
    assert prepared.settings.node_check is False
    assert prepared.plan.config.sweep_dir.is_relative_to(tmp_path / "probes" / "runs")


@pytest.mark.exhaustive(seconds=20)
def test_a_probe_of_this_machines_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "cluster=cpu", f"results_dir={tmp_path}", "--plain"]) == 0
    probe = load_probe("cpu", tmp_path)
    assert probe is not None
    kinds = {row["kind"] for row in probe.rows}
    assert kinds == {"matmul", "attention", "copy", "optimizer", "layer", "host", "collective", "step"}
    assert {(row["dp"], row["tp"]) for row in probe.select("step")} == {(2, 1), (1, 2)}
    assert {row["rank"] for row in probe.select("matmul")} == {0, 1}
    assert {row["unit"] for row in probe.rows} == {"s", "B/s", "FLOP/s"}
    assert all(row["command"].startswith("python -m sweep probe") and row["torch_version"] for row in probe.rows)
    assert str(probe.path) in capsys.readouterr().out.replace("\n", "")
    assert main(["plan", "+grid=tiny", f"results_dir={tmp_path}"]) == 0
    assert "predicted with" not in capsys.readouterr().out, "figures of processes say nothing of a plan"


@pytest.mark.slow(seconds=10)
def test_a_pilot_checks_its_node(tmp_path: Path) -> None:
    from results.tables.store import read_attempts

    point = ["+grid=tiny", "grid.axes.world_size=[2]", "grid.axes.zero_stage=[3]", "launcher=local"]
    run = ["run", *point, "launcher.node_check=true", "launcher.num_devices=2", f"results_dir={tmp_path}", "name=one"]
    assert main([*run, "--plain"]) == 0
    (row,) = read_attempts(tmp_path / "one").to_pylist()
    assert row["check_matmul_flops"] > 0
    assert row["check_copy_bytes_per_s"] > 0
    assert row["check_all_reduce_inside_node_bytes_per_s"] > 0
    assert row["check_all_reduce_between_nodes_bytes_per_s"] is None, "one node"
