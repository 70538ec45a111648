from __future__ import annotations

import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from results.tables.provenance import code_provenance, command_line, python_version


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_commit_and_dirty_flag(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    clean = code_provenance(tmp_path)
    assert clean["git_commit"] == git(tmp_path, "rev-parse", "HEAD")
    assert clean["git_dirty"] is False
    (tmp_path / "more.py").write_text("y = 2\n")
    assert code_provenance(tmp_path)["git_dirty"] is True


def test_no_checkout_or_somebody_elses(tmp_path: Path) -> None:
    assert code_provenance(tmp_path)["git_commit"] is None
    assert code_provenance(tmp_path)["git_dirty"] is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-qm", "theirs", "--allow-empty")
    inside = tmp_path / "site-packages"
    inside.mkdir()
    assert code_provenance(inside)["git_commit"] is None


def test_command_and_python() -> None:
    assert command_line(["python", "-m", "sweep", "run", "grid=[a, b]"]) == "python -m sweep run 'grid=[a, b]'"
    printing = "from results.tables.provenance import command_line; print(command_line())"
    told = subprocess.run([sys.executable, "-c", printing], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == shlex.join([sys.executable, "-c", printing])
    assert python_version().count(".") == 2


def test_the_version_is_that_of_the_code_and_needs_no_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    (tmp_path / "pyproject.toml").write_text('[project]\nname = "ultrasweep"\nversion = "9.8.7"\n')
    assert code_provenance(tmp_path)["ultrasweep_version"] == "9.8.7", "not the one that is installed beside it"
    monkeypatch.setattr(metadata, "version", not_installed)
    assert code_provenance(tmp_path)["ultrasweep_version"] == "9.8.7"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "theirs"\nversion = "1"\n')
    assert code_provenance(tmp_path)["ultrasweep_version"] is None
    (tmp_path / "pyproject.toml").write_text("no TOML")
    assert code_provenance(tmp_path)["ultrasweep_version"] is None
