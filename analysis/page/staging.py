"""Where a report is written: beside the one that it replaces, and in its place once it is whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType

from analysis.page.render import GENERATOR
from results.errors import UltrasweepError

_KINDS = {"figures": (".png", ".svg", ".html"), "tables": (".csv", ".md", ".tex")}
"""What a report puts into each folder: files of other kinds there are somebody else's."""
_PAGES = ("index.html", "explorer.html")


class UnwritableReport(UltrasweepError):
    """The folder for the report cannot be written, or has no room."""


class Staged:
    """The folders of a report that is being made, below ``out``. A context: what `publish` has not moved when it
    is left is gone, and an earlier report in ``out`` is as it was.

    Raises `UnwritableReport` for any `OSError` inside.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out / ".unfinished"
        self.figures = self.folder / "figures"
        self.tables = self.folder / "tables"

    def __enter__(self) -> Staged:
        index = self.out / "index.html"
        if index.exists() and not self._is_ours(index):
            raise UnwritableReport(f"{index} is no report's page and would be overwritten; name another folder")
        self._made = [path for path in (self.out, *self.out.parents) if not path.exists()]
        try:
            shutil.rmtree(self.folder, ignore_errors=True)  # of a report that was killed
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

    def publish(self) -> None:
        """Move everything to ``out``. Files of an earlier report go, so that none outlives its data."""
        ours = self._is_ours(self.out / "index.html")
        for name, kinds in _KINDS.items():
            folder = self.out / name
            folder.mkdir(exist_ok=True)
            for old in folder.iterdir() if ours else ():
                if old.suffix in kinds:
                    old.unlink()
            for new in (self.folder / name).iterdir():
                new.replace(folder / new.name)
        for name in _PAGES:
            if (self.folder / name).exists():
                (self.folder / name).replace(self.out / name)
            elif ours:
                (self.out / name).unlink(missing_ok=True)

    @staticmethod
    def _is_ours(index: Path) -> bool:
        return index.is_file() and GENERATOR in index.read_text(errors="replace")[:4096]

    def _take_away(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for path in self._made:  # the lowest first
            try:
                path.rmdir()
            except OSError:  # not empty: the report is there
                return

    def _unwritable(self, error: OSError) -> UnwritableReport:
        return UnwritableReport(f"cannot write a report into {self.out}: {error.strerror or error}")
