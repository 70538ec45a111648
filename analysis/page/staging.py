"""Staging of pages, figures and tables: written beside the earlier ones, moved into place once all are complete.

A list beside the pages names the files of the last report. Only these files are replaced or removed: a folder may also
hold files of its user. Nothing is written or removed through a link.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from types import TracebackType

from analysis.page.render import GENERATOR
from results.errors import UltrasweepError
from results.shared_filesystem.whole_files import open_regular, write_whole

REPORT_LIST = "report_files.txt"
"""File in a report's folder that names the files of that report, one a line."""
_HEAD = "# Only these files are replaced or removed by the next command that writes here."
_PAGES = ("index.html", "claims.html", "report.json", "explorer.html")
"""Pages of a report. Earlier versions wrote explorer.html; its runs are now part of the page."""
_NAME = re.compile(r"figures/[^/\n]+\.(?:png|svg|html)|tables/[^/\n]+\.(?:csv|md|tex)|[^/\n]+\.(?:html|json|txt)")
"""A file that a list may name: in the folder itself or in one of the two folders below it."""
_LINKED = re.compile(r"(?:figures|tables)/[\w.+-]+")
_DRAFT = ".unfinished-"
_LEFT_S = 86_400.0
"""Age in seconds of a folder of unfinished files from which its command counts as killed."""
_MOST_BYTES = 2**26
_MOST_NAMES = 3


class UnwritableReport(UltrasweepError):
    """Raised if the folder of a report or comparison cannot be written or the disk is full."""


class Staged:
    """Context with a temporary folder below ``out`` (with ``figures`` and ``tables``) for unfinished files.

    On exit, files that `publish` has not moved are removed, and ``out`` is unchanged. ``what`` names the output in
    messages, e.g. ``a report``; ``list_name`` is the file that lists the published files. Raises `UnwritableReport` for
    any `OSError` inside, and for a link where a folder of the output belongs.
    """

    def __init__(self, out: Path, what: str, list_name: str = REPORT_LIST) -> None:
        self.out = out
        self._what = what
        self._list = list_name

    def __enter__(self) -> Staged:
        self._made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        self._refuse_links()
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            self._remove_left()
            self.folder = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self.out))
            self.figures, self.tables = self.folder / "figures", self.folder / "tables"
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

    def publish(self, earlier: Collection[str] = ()) -> None:
        """Move every file to its place in ``out``, pages last, and remove the files of the ``earlier`` output that were
        not replaced. Raises `UnwritableReport`, and changes nothing, where another file has a place."""
        made = [path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()]
        made.sort(key=lambda name: (-name.count("/"), name))
        self._refuse_links()
        others = [name for name in [*made, self._list] if name not in earlier and _exists(self.out / name)]
        if others:
            more = f" and {len(others) - _MOST_NAMES} more" if len(others) > _MOST_NAMES else ""
            raise UnwritableReport(
                f"{self.out} holds {', '.join(others[:_MOST_NAMES])}{more}, which no earlier {self._what.split()[-1]} "
                "wrote; move the file away or choose another folder (--out)"
            )
        # A command that is killed here leaves a list that names the files of both.
        self._write_list({*made, *earlier})
        for name in earlier:
            if name not in made and name != self._list:
                (self.out / name).unlink(missing_ok=True)
        for name in made:
            (self.out / name).parent.mkdir(exist_ok=True)
            (self.folder / name).replace(self.out / name)
        self._write_list(made)

    def _write_list(self, names: Iterable[str]) -> None:
        write_whole(self.out / self._list, "".join(f"{name}\n" for name in [_HEAD, *sorted(names)]))

    def _refuse_links(self) -> None:
        for folder in (self.out / "figures", self.out / "tables"):
            if folder.is_symlink():
                raise UnwritableReport(
                    f"{folder} is a link, and {self._what} is written into its own folder alone; "
                    "remove the link or choose another folder (--out)"
                )

    def _remove_left(self) -> None:
        """Remove folders of commands that were killed."""
        for left in self.out.glob(f"{_DRAFT}*"):
            if not left.is_symlink() and left.stat().st_mtime < time.time() - _LEFT_S:
                shutil.rmtree(left, ignore_errors=True)

    def _take_away(self) -> None:
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)
        for path in self._made:  # deepest first
            try:
                path.rmdir()
            except OSError:  # not empty: it holds the report
                return

    def _unwritable(self, error: OSError) -> UnwritableReport:
        return UnwritableReport(f"cannot write {self._what} into {self.out}: {error.strerror or error}")


def earlier_report(out: Path) -> list[str]:
    """Names, relative to ``out``, of the files of the earlier report there, which would not match the new data; empty
    if there is none.

    Raises `UnwritableReport` if the page there is not a report's.
    """
    index = out / "index.html"
    text = ""
    if _exists(index):
        text = _text(index)
        if GENERATOR not in text[:4096]:
            raise UnwritableReport(f"{index} is not a report page and would be overwritten; choose another folder")
    listed = listed_files(out, REPORT_LIST)
    if listed or not text:
        return sorted({*listed, *(["index.html"] if text else [])})
    # Earlier versions wrote no list: then the files of the report are those that its page links.
    return sorted({*_LINKED.findall(text), *_PAGES})


def listed_files(out: Path, list_name: str) -> list[str]:
    """The files that the list of an earlier report or comparison names; empty without a list."""
    names = _text(out / list_name).splitlines()
    if names[:1] != [_HEAD]:
        return []
    return sorted({name for name in [*names[1:], list_name] if _NAME.fullmatch(name)})


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _text(path: Path) -> str:
    """The beginning of a regular file; empty if there is none."""
    try:
        with open_regular(path) as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""
