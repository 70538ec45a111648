"""Nodes far below their peers, and the rates in the rows."""

from __future__ import annotations

from pathlib import Path

from launchers.pilot.node_check import COLUMNS, check_dir, rates_of, slow_nodes
from launchers.settings import LaunchSettings
from launchers.state.sweep_dir import SweepDir
from results.tables.schema import ATTEMPTS
from tests.workloads.contract.test_stages import CLUSTER
from workloads.contract.protocol import write_json

MATMUL, COPY, INSIDE, BETWEEN = COLUMNS.values()


def rates(matmul: float = 7e14, inside: float | None = 4.5e11) -> dict[str, float | None]:
    return {MATMUL: matmul, COPY: 4e12, INSIDE: inside, BETWEEN: None}


def sweep(tmp_path: Path) -> SweepDir:
    return SweepDir.create(tmp_path / "s", {})


def test_every_rate_is_a_column() -> None:
    assert set(COLUMNS.values()) <= set(ATTEMPTS.names)


def test_an_attempt_has_the_lowest_rates_of_its_nodes() -> None:
    checks = {"a": rates(), "b": rates(matmul=6e14), "c": rates(inside=1.0)}
    assert rates_of(checks, ["a", "b"]) == rates(matmul=6e14)
    assert rates_of(checks, ["a", "d"]) is None, "d was not checked"
    assert rates_of({}, []) is None


def test_a_node_far_below_the_others_is_reported(tmp_path: Path) -> None:
    checks = {"a": rates(), "b": rates(matmul=6.9e14), "c": rates(inside=4.25e11), "d": rates(inside=4.5e10)}
    assert list(slow := slow_nodes(sweep(tmp_path), checks)) == ["d"]
    assert slow["d"] == "far below its peers: all reduce inside node 45 GB/s, median of 3 others 450"


def test_a_lone_node_is_compared_with_those_of_earlier_pilots(tmp_path: Path) -> None:
    folder = sweep(tmp_path)
    assert not slow_nodes(folder, {"a": rates(matmul=1e14)})
    for pilot, earlier_rates in (("p1", {"b": rates()}), ("p2", {"a": rates(matmul=2e14)})):
        check_dir(folder, pilot).mkdir(parents=True)
        write_json(check_dir(folder, pilot) / "rates.json", earlier_rates)
    (folder.path / "checks" / "p1" / "rank_0.log").write_text("")
    assert list(slow_nodes(folder, {"a": rates(matmul=1e14)})) == ["a"]


def test_nodes_are_checked_on_gpus_unless_set_otherwise() -> None:
    def settings(device: str, check: bool | None) -> LaunchSettings:
        return LaunchSettings(num_devices=1, cluster=CLUSTER, device=device, node_check=check)  # type: ignore[arg-type]

    assert [settings(device, check).checks_nodes for device in ("cuda", "cpu") for check in (None, True, False)] == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]
