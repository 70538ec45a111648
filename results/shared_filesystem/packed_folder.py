"""A folder of small files that becomes one ZIP file beside it, ``NAME.zip``, when nothing writes to it any more.

A file is named by its path in the folder, whether it still lies there or is packed. The ZIP file is whole before the
first file of the folder is removed, so a reader that looks into the folder first and then into the ZIP file finds every
file at any time, and a process that dies leaves the folder, the ZIP file or both.
"""

from __future__ import annotations

import calendar
import io
import os
import time
import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from results.shared_filesystem.whole_files import MOST_BYTES, NotAFile, open_regular, whole_file

ENDING = ".zip"
_MOST_PACKED_BYTES = 2**26
"""A larger file stays loose."""
_LEVEL = 1
"""Compression level: logs shrink to a tenth at the fastest one."""
_FIRST_S = calendar.timegm((1980, 1, 1, 0, 0, 0))
"""The first time that a ZIP file can state; its times are in UTC here."""
_DAMAGES = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OverflowError)
"""What `zipfile` raises for a file that is not a whole ZIP file."""


def packed_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{ENDING}")


def pack(folder: Path, last: str, *, kept: Collection[str] = ()) -> None:
    """Pack the regular files of ``folder`` and remove them; then remove the folder if it is empty.

    ``last``: a file of every complete folder. It is read after all others and removed before them, so a second process
    that packs the same folder either reads it whole or fails. A folder without this file is left as it is, unless the
    ZIP file shows that its removal was interrupted. ``kept``: endings of names that stay loose. May be repeated. Raises
    `OSError`, and `NotAFile` for a damaged ZIP file.
    """
    try:
        names = [name for name in _names(folder) if not name.endswith(tuple(kept))]
    except FileNotFoundError:
        return
    if last in names:
        names.sort(key=lambda name: name == last)
        with whole_file(packed_path(folder)) as file:
            whole = _write(folder, [name for name in names if not _temporary(name)], file)
            file.flush()
            os.fsync(file.fileno())
    else:
        whole = set(_packed(folder))
    for name in reversed(names):
        if name in whole or (whole and _temporary(name)):
            (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # something else is left in it
        folder.rmdir()


def open_file(path: Path) -> BinaryIO:
    """A file of a folder, loose or packed, open for reading. Raises as `open_regular`, and `NotAFile` for a damaged ZIP
    file."""
    try:
        return open_regular(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = error
    with _opened(path.parent) as archive:
        if archive is None or path.name not in archive.NameToInfo:
            raise missing
        if archive.getinfo(path.name).file_size > MOST_BYTES:
            raise NotAFile(f"{path} is larger than {MOST_BYTES:,} bytes")
        return io.BytesIO(archive.read(path.name))


def read_text(path: Path) -> str:
    """The content of a UTF-8 file of a folder, loose or packed. Raises as `open_file`, and `ValueError` when it is not
    UTF-8 or too large."""
    with open_file(path) as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES:,} bytes")
    return content.decode()


def exists(path: Path) -> bool:
    """Whether a file of a folder exists, or its folder is packed. Raises `OSError`."""
    return path.exists() or packed_path(path.parent).exists()


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of every regular file of a folder, loose or packed, by its name. Empty where there is neither. Raises
    `OSError`, and `NotAFile` for a damaged ZIP file."""
    return {name: status.st_size for name, status in _loose(folder).items()} | _packed(folder)


def written_at(folder: Path) -> dict[str, float]:
    """When each file of a folder was last written, loose or packed, in seconds since the epoch, to two seconds where it
    is packed. Raises as `sizes`."""
    times = {name: status.st_mtime for name, status in _loose(folder).items()}
    with _opened(folder) as archive:
        entries = archive.infolist() if archive is not None else []
    return {entry.filename: _seconds(entry) for entry in entries} | times


def home(folder: Path) -> Path:
    """Where the files of a folder lie now, for people: the folder, or its ZIP file."""
    packed = packed_path(folder)
    return packed if packed.exists() and not folder.exists() else folder


def folders(parent: Path) -> list[Path]:
    """Every folder in ``parent``, loose, packed or both, once; links are left out. Raises `OSError`."""
    with os.scandir(parent) as entries:
        names = {
            entry.name.removesuffix(ENDING)
            for entry in entries
            if not entry.name.startswith(".")
            and (
                entry.is_file(follow_symlinks=False)
                if entry.name.endswith(ENDING)
                else entry.is_dir(follow_symlinks=False)
            )
        }
    return [parent / name for name in sorted(names)]


def _names(folder: Path) -> list[str]:
    """The regular files in a loose folder."""
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]


def _loose(folder: Path) -> dict[str, os.stat_result]:
    """The regular files in a folder, by name; empty if there is no folder. A file that is packed while the folder is
    read is left out."""
    files = {}
    with suppress(FileNotFoundError, NotADirectoryError):
        for name in _names(folder):
            with suppress(FileNotFoundError):
                files[name] = (folder / name).lstat()
    return files


def _packed(folder: Path) -> dict[str, int]:
    with _opened(folder) as archive:
        return {info.filename: info.file_size for info in archive.infolist()} if archive is not None else {}


@contextmanager
def _opened(folder: Path) -> Iterator[zipfile.ZipFile | None]:
    """The ZIP file of a folder; None if there is none. Its damages become `NotAFile`."""
    path = packed_path(folder)
    try:
        file = open_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        yield None
        return
    try:
        with file, zipfile.ZipFile(file) as archive:
            yield archive
    except _DAMAGES as error:
        raise NotAFile(f"{path} is damaged: {error}") from None


def _write(folder: Path, names: Collection[str], file: BinaryIO) -> set[str]:
    """Write the files into a ZIP file; return their names, without those that are too large or cannot be named
    there."""
    written = set()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            with open_regular(folder / name) as source:
                status = os.fstat(source.fileno())
                if status.st_size > _MOST_PACKED_BYTES or not name.isprintable():
                    continue
                entry = zipfile.ZipInfo(name, time.gmtime(max(status.st_mtime, _FIRST_S))[:6])
                entry.external_attr = (status.st_mode & 0xFFFF) << 16
                archive.writestr(entry, source.read(), zipfile.ZIP_DEFLATED, _LEVEL)
            written.add(name)
    return written


def _temporary(name: str) -> bool:
    """Whether a killed process has left the file before it had its name."""
    return name.startswith(".") and name.endswith(".tmp")


def _seconds(info: zipfile.ZipInfo) -> float:
    return float(calendar.timegm((*info.date_time, 0, 0, 0)))
