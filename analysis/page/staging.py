"""Staging of pages, figures and tables: written beside the earlier ones, moved into place once all are complete.

The folder may hold other files. A list beside the page names the files of the last report or comparison; only those
are replaced or removed, and nothing is written or removed through a link.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

from results.errors import UltrasweepError

FOLDERS = ("figures", "tables")
"""Folders below the folder of a report or comparison."""
_UNFINISHED = ".unfinished-"
_LEFT_AFTER_S = 24 * 3600.0
"""Age after which a folder of unfinished files counts as left by a killed command."""
_MOST_NAMED = 3
_HEAD = 4096
"""Characters of a page among which its generator stands."""


class UnwritableReport(UltrasweepError):
    """Raised if the folder of a report or comparison cannot be written or the disk is full."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of output: a report or a comparison."""

    name: str
    """Its name in messages."""
    page: str
    """Name of its page."""
    generator: str
    """The page names this generator in its head."""
    unlisted: Callable[[str], Iterable[str]]
    """Files of an output of an earlier version, which wrote no list, from the text of its page."""

    @property
    def listing(self) -> str:
        """Name of the file that lists the files of the last output."""
        return f".{self.name}-files"


class Staged:
    """Context with a temporary folder below ``out`` (with ``figures`` and ``tables``) for unfinished files.

    On exit, files that `publish` has not moved are removed, and ``out`` is unchanged. Raises `UnwritableReport` for any
    `OSError` inside, and at once if ``out`` holds a page of the same name that is not this kind's, or a link in the
    place of one of its folders.
    """

    def __init__(self, out: Path, kind: Kind) -> None:
        self.out = out
        self._kind = kind
        try:
            self._earlier = self._own_files()
        except OSError as error:
            raise self._unwritable(error) from None
        for name in FOLDERS:
            if (out / name).is_symlink():
                raise UnwritableReport(
                    f"{out / name} is a link; a {kind.name} is not written through links: remove the link or choose "
                    "another folder"
                )

    def __enter__(self) -> Staged:
        self._made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            _remove_left_behind(self.out)
            self.folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.out))
            self.figures = self.folder / "figures"
            self.tables = self.folder / "tables"
            self.figures.mkdir()
            self.tables.mkdir()
        except OSError as error:
            self._take_away()
            raise self._unwritable(error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_away()
        if isinstance(error, OSError):
            raise self._unwritable(error) from None

    def publish(self) -> None:
        """Move every file to its place in ``out``, pages last, and remove files of the earlier output that were not
        replaced.

        Raises `UnwritableReport` before the first change if another file is in the way.
        """
        made = sorted(path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file())
        others = [name for name in made if name not in self._earlier and os.path.lexists(self.out / name)]
        if others:
            more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
            raise UnwritableReport(
                f"{', '.join(others[:_MOST_NAMED])}{more} in {self.out}: no earlier {self._kind.name} wrote this, and "
                f"it would be overwritten; move it away or choose another folder"
            )
        self._write_listing({*made, *self._earlier})  # complete even if the command is killed below
        for name in self._earlier:
            if name not in made:
                (self.out / name).unlink(missing_ok=True)
        for name in sorted(made, key=lambda name: -name.count("/")):
            (self.out / name).parent.mkdir(exist_ok=True)
            (self.folder / name).replace(self.out / name)
        self._write_listing(made)

    def _own_files(self) -> frozenset[str]:
        """Files in ``out`` that the last output of this kind wrote, relative to it and with slashes."""
        page, listing = self.out / self._kind.page, self.out / self._kind.listing
        text = None
        if os.path.lexists(page):
            text = page.read_text(errors="replace") if page.is_file() and not page.is_symlink() else ""
            if self._kind.generator not in text[:_HEAD]:
                raise UnwritableReport(
                    f"{page} is not a {self._kind.name} page and would be overwritten; choose another folder"
                )
        if listing.is_file() and not listing.is_symlink():
            names: Iterable[str] = listing.read_text(errors="replace").splitlines()
        else:
            names = () if text is None else (self._kind.page, *self._kind.unlisted(text))
        return frozenset(name for name in names if _is_output(name) and _is_file_or_link(self.out / name))

    def _write_listing(self, names: Iterable[str]) -> None:
        draft = self.folder / "listing"
        draft.write_text("".join(f"{name}\n" for name in sorted(names)))
        draft.replace(self.out / self._kind.listing)

    def _take_away(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)
        for path in self._made:  # deepest first
            try:
                path.rmdir()
            except OSError:  # not empty: it holds the report
                return

    def _unwritable(self, error: OSError) -> UnwritableReport:
        return UnwritableReport(f"cannot write a {self._kind.name} into {self.out}: {error.strerror or error}")


def _is_output(name: str) -> bool:
    """Whether a line of a list can name a file of an output: in the folder itself or in one of `FOLDERS`."""
    parts = PurePosixPath(name).parts
    folder = len(parts) == 2 and parts[0] in FOLDERS
    return (len(parts) == 1 or folder) and parts[-1] not in ("..", "/") and "\0" not in name


def _is_file_or_link(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _remove_left_behind(out: Path) -> None:
    """Remove folders of unfinished files that killed commands of this user left."""
    for path in out.glob(f"{_UNFINISHED}*"):
        try:
            status = path.lstat()
        except OSError:
            continue
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _LEFT_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)  # refuses a link
