"""Copies this code into the sweep's folder. Pilots run the copy, so later edits do not change them."""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launchers.state.sweep_dir import SweepDir
from launchers.state.typed_paths import absolute_path
from results.errors import InvalidResults

PACKAGES = ("results", "workloads", "launchers")
"""Packages that a pilot imports."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of `PACKAGES` under ``root`` at the time of the snapshot."""

    root: Path
    files: tuple[tuple[str, bytes], ...]
    """Relative path and content of each file, in the order of the paths."""

    @property
    def digest(self) -> str:
        """16 hexadecimal digits of a hash of the files: equal code has an equal digest."""
        whole = hashlib.sha256()
        for name, content in self.files:
            whole.update(f"{name}\0{len(content)}\0".encode())
            whole.update(content)
        return whole.hexdigest()[:16]


def code_root() -> Path:
    """The folder that holds the packages of the running process."""
    return Path(__file__).resolve().parents[2]


def take_snapshot(root: Path | None = None) -> Snapshot:
    """Read the code under ``root`` (default: `code_root`); nothing is written."""
    root = root or code_root()
    paths = [path for package in PACKAGES for path in _files_of_package(root / package)]
    names = sorted(path.relative_to(root).as_posix() for path in paths)
    return Snapshot(root, tuple((name, (root / name).read_bytes()) for name in names))


def _files_of_package(folder: Path) -> Iterator[Path]:
    """The files of a package and of its subpackages. Other folders hold no code: ``results`` contains sweeps, which may
    be large, and unreadable where they belong to another user."""
    for path in folder.iterdir():
        if path.is_dir() and (path / "__init__.py").is_file():
            yield from _files_of_package(path)
        elif path.is_file() and not path.name.startswith("."):
            yield path


def folder_of(sweep: SweepDir, snapshot: Snapshot) -> Path:
    """Folder into which `write_snapshot` copies. The path is absolute, because a job starts in another folder."""
    return absolute_path(sweep.path) / "code" / snapshot.digest


def write_snapshot(sweep: SweepDir, snapshot: Snapshot) -> Path:
    """Write the copy unless it exists, and return its folder. The folder appears whole or not at all. Raises
    `InvalidResults` when it cannot be written."""
    folder = folder_of(sweep, snapshot)
    if folder.is_dir():
        return folder
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        for name, content in snapshot.files:
            target = draft / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            target.chmod(0o444)
        draft.rename(folder)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if folder.is_dir():  # another submitter was faster
            return folder
        raise InvalidResults(f"cannot copy the code to {folder}: {error.strerror or error}") from None
    return folder
