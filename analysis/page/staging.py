"""Staging of pages, figures and tables: written beside the earlier ones, moved into place once all are complete."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from analysis.page.render import GENERATOR
from results.errors import UltrasweepError

_KINDS = {"figures": (".png", ".svg", ".html"), "tables": (".csv", ".md", ".tex")}
"""Suffixes of the files that a report writes into each folder; files with other suffixes are not the report's."""


class UnwritableReport(UltrasweepError):
    """Raised if the folder of a report or comparison cannot be written or the disk is full."""


class Staged:
    """Context with a temporary folder below ``out`` (with ``figures`` and ``tables``) for unfinished files.

    On exit, files that `publish` has not moved are removed, and ``out`` is unchanged. ``what`` names the output in
    messages, e.g. ``a report``. Raises `UnwritableReport` for any `OSError` inside.
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
            shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed command
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
        """Move every file to its place in ``out``, pages last, and remove the ``earlier`` files that were not
        replaced."""
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
        for path in self._made:  # deepest first
            try:
                path.rmdir()
            except OSError:  # not empty: it holds the report
                return

    def _unwritable(self, error: OSError) -> UnwritableReport:
        return UnwritableReport(f"cannot write {self._what} into {self.out}: {error.strerror or error}")


def earlier_report(out: Path) -> list[Path]:
    """Files of the earlier report in ``out``, which would not match the new data; empty if there is none.

    Raises `UnwritableReport` if the page there is not a report's.
    """
    index = out / "index.html"
    if not index.exists():
        return []
    if not index.is_file() or GENERATOR not in index.read_text(errors="replace")[:4096]:
        raise UnwritableReport(f"{index} is not a report page and would be overwritten; choose another folder")
    files = [path for name, kinds in _KINDS.items() for path in (out / name).glob("*") if path.suffix in kinds]
    # Earlier versions wrote explorer.html; its runs are now part of the page.
    return [*files, index, *(out / name for name in ("explorer.html", "claims.html", "report.json"))]
