"""The copy of the code in a sweep's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.state.code_snapshot import PACKAGES, Snapshot, take_snapshot, write_snapshot
from launchers.state.sweep_dir import SweepDir
from results.errors import InvalidResults


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


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    """The code of a small checkout."""
    for package in PACKAGES:
        (tmp_path / "checkout" / package).mkdir(parents=True)
        (tmp_path / "checkout" / package / "__init__.py").write_text(package)
    return take_snapshot(tmp_path / "checkout")


@pytest.mark.parametrize("change", ["edited", "added", "compiled", "emptied", "linked"])
def test_a_changed_copy_is_kept_aside_and_written_anew(
    change: str, sweep: SweepDir, snapshot: Snapshot, tmp_path: Path
) -> None:
    folder, lines = write_snapshot(sweep, snapshot), list[str]()
    module = folder / "workloads" / "__init__.py"
    if change == "edited":
        module.chmod(0o644)
        module.write_text("print('other')")
    elif change == "added":
        (folder / "json.py").write_text("print('other')")
    elif change == "compiled":
        (folder / "workloads" / "__pycache__").mkdir()
        (folder / "workloads" / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"other")
    elif change == "emptied":
        module.unlink()
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    assert write_snapshot(sweep, snapshot, lines.append) == folder
    assert [(path.relative_to(folder).as_posix()) for path in sorted(folder.rglob("*")) if path.is_file()] == [
        name for name, _ in snapshot.files
    ]
    assert module.read_text() == "workloads" and not folder.is_symlink()
    (line,) = lines
    assert "had been changed" in line and line.count("\n") == 0
    assert (folder.parent / line.rpartition(" ")[2]).exists()
    assert write_snapshot(sweep, snapshot, lines.append) == folder and len(lines) == 1


def test_no_code_is_written_through_a_link(sweep: SweepDir, snapshot: Snapshot, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (sweep.path / "code").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InvalidResults, match="is a link"):
        write_snapshot(sweep, snapshot)
    assert not list((tmp_path / "elsewhere").iterdir())
