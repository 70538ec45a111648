"""Where pages, figures and tables are written: beside the earlier ones, and in their place once all are whole."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from analysis.page.render import GENERATOR
from results.errors import UltrasweepError

_KINDS = {"figures": (".png", ".svg", ".html"), "tables": (".csv", ".md", ".tex")}
"""What a report puts into each folder: files of other kinds there are somebody else's."""


class UnwritableReport(UltrasweepError):
    """The folder for a report or a comparison cannot be written, or has no room."""


class Staged:
    """A folder below ``out`` with ``figures`` and ``tables``, for files that are being made.

    A context: what `publish` has not moved when it is left is removed, and ``out`` is as it was. ``what`` is being
    written, for messages: ``a report``. Raises `UnwritableReport` for any `OSError` inside.
    """

    def __init__(self, out: Path, what: str) -> None:
        self.out = out
        self.folder = out / ".unfinished"
        self.figures = self.folder / "figures"
        self.tables = self.folder / "tables"
        self._what = what

    def __enter__(self) -> Staged:
        self._made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        try:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a command that was killed
            self.figures.mkdir(parents=True)
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

    def publish(self, earlier: Iterable[Path] = ()) -> None:
        """Move every file to its place in ``out``, pages last, and remove the ``earlier`` files that none replaced."""
        made = sorted(path.relative_to(self.folder) for path in self.folder.rglob("*") if path.is_file())
        places = [self.out / path for path in made]
        for path in earlier:
            if path not in places:
                path.unlink(missing_ok=True)
        for path in sorted(made, key=lambda path: -len(path.parts)):
            (self.out / path).parent.mkdir(exist_ok=True)
            (self.folder / path).replace(self.out / path)

    def _take_away(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in self._made:  # the lowest first
            try:
                path.rmdir()
            except OSError:  # not empty: the report is there
                return

    def _unwritable(self, error: OSError) -> UnwritableReport:
        return UnwritableReport(f"cannot write {self._what} into {self.out}: {error.strerror or error}")


def earlier_report(out: Path) -> list[Path]:
    """Files of the report that ``out`` holds, so that none outlives its data; none where it holds none.

    Raises `UnwritableReport` when the page there is not a report's.
    """
    index = out / "index.html"
    if not index.exists():
        return []
    if not index.is_file() or GENERATOR not in index.read_text(errors="replace")[:4096]:
        raise UnwritableReport(f"{index} is no report's page and would be overwritten; name another folder")
    files = [path for name, kinds in _KINDS.items() for path in (out / name).glob("*") if path.suffix in kinds]
    # explorer.html was beside the page before the page had every run.
    return [*files, index, *(out / name for name in ("explorer.html", "claims.html", "report.json"))]
