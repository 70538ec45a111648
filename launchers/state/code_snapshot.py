"""Copies this code into the sweep's folder. Pilots run the copy, so later edits do not change them.

The sweep's folder may lie where other users can write, and a pilot may start days after its submission. So the name of
a copy proves nothing: the copy is compared with its digest before every submission, and once more by the job itself,
before Python starts in it (`check_line`). The comparison includes added files that Python would import. Other files may
lie next to the packages: the folder is the working folder of pilots, where a core dump may end up.
"""

from __future__ import annotations

import hashlib
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launchers.state.sweep_dir import SweepDir
from launchers.state.typed_paths import absolute_path
from results.errors import InvalidResults
from results.shared_filesystem.whole_files import create, open_regular

PACKAGES = ("results", "workloads", "launchers")
"""Packages that a pilot imports."""
_IMPORTED = (".py", ".pyc", ".so")
"""Endings of files that Python imports from any folder on its path."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of `PACKAGES` under ``root`` at the time of the snapshot."""

    root: Path
    files: tuple[tuple[str, bytes], ...]
    """Relative path and content of each file, in the order of the paths."""

    @property
    def digest(self) -> str:
        """SHA-256 over the names and contents of the files, as `check_line` computes it: equal code has an equal
        digest."""
        return _digest((name, hashlib.sha256(content)) for name, content in self.files)


def code_root() -> Path:
    """The folder that holds the packages of the running process."""
    return Path(__file__).resolve().parents[2]


def take_snapshot(root: Path | None = None) -> Snapshot:
    """Read the code under ``root`` (default: `code_root`); nothing is written."""
    root = root or code_root()
    paths = [path for package in PACKAGES for path in _files_of_package(root / package)]
    names = sorted((path.relative_to(root).as_posix() for path in paths), key=str.encode)
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
    return absolute_path(sweep.path) / "code" / snapshot.digest[:16]


def write_snapshot(sweep: SweepDir, snapshot: Snapshot, report: Callable[[str], None] = lambda line: None) -> Path:
    """Write the copy, unless an equal one exists, and return its folder. The folder appears whole or not at all. A copy
    that has been changed is kept under a hidden name, and ``report`` gets a line about it. Raises `InvalidResults` when
    the copy cannot be written."""
    folder = folder_of(sweep, snapshot)
    try:
        if folder.parent.is_symlink():
            raise InvalidResults(f"{folder.parent} is a link; pilots run code of the sweep's own folder alone")
        if _exists(folder):
            if _digest_of_folder(folder) == snapshot.digest:
                return folder
            aside = folder.with_name(f".{folder.name}.changed.{secrets.token_hex(4)}")
            folder.rename(aside)
            report(
                f"warning: the copy of the code in {folder} had been changed; it is written anew, and the changed one "
                f"is kept as {aside.name}"
            )
        _write(folder, snapshot)
        # Another submitter may have been faster. Its copy must be the same.
        if _digest_of_folder(folder) != snapshot.digest:
            raise InvalidResults(f"{folder} is changed by somebody else while it is written; choose another folder")
    except OSError as error:
        raise InvalidResults(f"cannot copy the code to {folder}: {error.strerror or error}") from None
    return folder


def check_line(folder: Path, digest: str) -> str:
    """A line for a job's shell that ends the job unless ``folder`` holds exactly the files of this digest, and no link.
    The line needs no Python, because Python would already run files of the folder."""
    where = shlex.quote(str(folder))
    counted = " -o ".join([*(f"-path './{name}/*'" for name in PACKAGES), *(f"-name '*{end}'" for end in _IMPORTED)])
    others = "find . ! -type d ! -type f"
    files = f"find . -type f \\( {counted} \\) -print0 | LC_ALL=C sort -z | xargs -0 -r sha256sum"
    seen = f"$(cd {where} && {{ {others}; {files}; }} | sha256sum | cut -c1-64)"
    message = f"the code in {folder} is not the code that was submitted; run the same command again, which mends it"
    return f'[ "{seen}" = {digest} ] || {{ echo {shlex.quote(message)}; exit 1; }}'


def _exists(folder: Path) -> bool:
    return folder.exists() or folder.is_symlink()


def _write(folder: Path, snapshot: Snapshot) -> None:
    """Write the copy under a hidden name and rename it, unless another process has done so. Raises `OSError`."""
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
    try:
        folder.parent.mkdir(exist_ok=True)  # not its parents: a sweep that was removed does not come back
        draft.mkdir()
        for name, content in snapshot.files:
            target = draft / name
            target.parent.mkdir(parents=True, exist_ok=True)
            with create(target) as file:
                file.write(content)
            target.chmod(0o444)
        for inner in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
            inner.chmod(0o755)  # the group cannot add files, whatever the umask
        draft.rename(folder)
    except OSError:
        if not _exists(folder):
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _digest_of_folder(folder: Path) -> str:
    """The digest of the files in a folder that `check_line` compares; empty where the folder holds a link or a pipe."""
    if folder.is_symlink():
        return ""
    hashes = []
    for path in sorted(folder.rglob("*"), key=lambda path: path.as_posix().encode(errors="surrogateescape")):
        if path.is_dir() and not path.is_symlink():
            continue
        name = path.relative_to(folder)
        try:
            with open_regular(path) as file:
                if (len(name.parts) > 1 and name.parts[0] in PACKAGES) or name.name.endswith(_IMPORTED):
                    hashes.append((name.as_posix(), hashlib.sha256(file.read())))
        except ValueError:
            return ""
    return _digest(hashes)


def _digest(files: Iterable[tuple[str, hashlib._Hash]]) -> str:
    """SHA-256 of the text that ``sha256sum`` prints for the files."""
    lines = (f"{content.hexdigest()}  ./{name}\n" for name, content in files)
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()
