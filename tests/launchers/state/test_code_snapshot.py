"""The copy of the code in a sweep's folder."""

from __future__ import annotations

from pathlib import Path

from launchers.state.code_snapshot import take_snapshot, write_snapshot
from launchers.state.sweep_dir import SweepDir


def test_a_snapshot_outlives_the_checkout(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    for name in (
        "launchers/__init__.py",
        "launchers/pilot.py",
        "launchers/state/__init__.py",
        "workloads/__init__.py",
        "workloads/data.json",
        "results/__init__.py",
        "results/a.py",
        "results/recorded/big.parquet",
        "results/mine/pilots/secret.json",
        "sweep/x.py",
    ):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(name)
    (checkout / "launchers" / "__pycache__").mkdir()
    (checkout / "launchers" / "__pycache__" / "pilot.pyc").write_text("old")
    sweep = SweepDir.create(tmp_path / "sweep", {})
    first = write_snapshot(sweep, take_snapshot(checkout))
    assert sorted(str(path.relative_to(first)) for path in first.rglob("*") if path.is_file()) == [
        "launchers/__init__.py",
        "launchers/pilot.py",
        "launchers/state/__init__.py",
        "results/__init__.py",
        "results/a.py",
        "workloads/__init__.py",
        "workloads/data.json",
    ]
    assert write_snapshot(sweep, take_snapshot(checkout)) == first
    (checkout / "launchers" / "pilot.py").write_text("edited")
    second = write_snapshot(sweep, take_snapshot(checkout))
    assert second != first and (first / "launchers" / "pilot.py").read_text() == "launchers/pilot.py"
    assert sorted(path.name for path in (sweep.path / "code").iterdir()) == sorted([first.name, second.name])
