"""Writes whole files under new names and reads regular files alone, in folders where other users may have put links.

A file is written to a new hidden name and then renamed, so a reader sees the old file or the whole new one, and a link
that lies at the name is replaced and never followed. A reader opens no link, which may lead out of the sweep's folder,
and no pipe or device, on which it would wait.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from results.shared_filesystem.patience import repeated

MOST_BYTES = 2**28
"""Largest file that `read_text` reads. Files of a sweep that are read as a whole are far smaller."""
_MOST_REPEATED_BYTES = 200
"""Part of a name that its temporary name repeats; file systems allow 255 bytes."""


class NotAFile(ValueError):
    """A name in a sweep's folder holds a link, a folder, a pipe or a device where a file belongs."""


@contextmanager
def whole_file(path: Path, *, private: bool = False) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` at the end of the block; after an error ``path`` is unchanged.
    ``private``: only this user can read the file. Raises `OSError`."""
    temporary = temporary_path(path)
    try:
        with create(temporary, private=private) as file:
            yield file
        temporary.replace(path)
    except (Exception, KeyboardInterrupt) as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        _name(error, path, str(temporary))
        raise


def _name(error: BaseException, path: Path, temporary: str) -> None:
    """Let an error of the system name the file that a user knows: a write that fails names none, others the hidden
    name."""
    if isinstance(error, OSError) and error.errno is not None and error.filename in (None, temporary):
        error.filename, error.filename2 = str(path), None


def write_whole(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write ``content``, text as UTF-8, as `whole_file` does."""
    data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
    # A queue of many points is written in calls of this function: it does without `whole_file` and its objects.
    folder, name = os.path.split(path)

    def write() -> None:
        temporary = os.path.join(folder, _temporary_name(name))  # noqa: PTH118
        try:
            with create(temporary, private=private) as file:
                file.write(data)
            os.replace(temporary, path)  # noqa: PTH105
        except (Exception, KeyboardInterrupt) as error:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            _name(error, path, temporary)
            raise

    repeated(write)


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """As `whole_file`, for a path that a user has typed. A pipe or a device, such as ``/dev/stdout``, is opened
    directly instead of being replaced."""
    path = Path(path)
    of_system = path.absolute().parts[1:2] in (("dev",), ("proc",)) and path.is_symlink()
    if of_system or (path.exists() and not path.is_file()):
        with path.open("wb") as file:
            yield file
    else:
        with whole_file(path) as file:
            yield file


def write_output(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 to a path that a user has typed, as `output_file` does."""
    with output_file(path) as file:
        file.write(text.encode(errors="surrogateescape"))


def temporary_path(path: Path) -> Path:
    """A new hidden file name in the folder of ``path`` that nobody can guess. It contains the beginning of the name of
    ``path``."""
    return path.with_name(_temporary_name(path.name))


def _temporary_name(name: str) -> str:
    return f".{shortened(name, _MOST_REPEATED_BYTES)}.{secrets.token_hex(8)}.tmp"


def shortened(name: str, most_bytes: int) -> str:
    """The beginning of ``name`` in at most ``most_bytes`` bytes of UTF-8, because file systems count bytes."""
    return name.encode(errors="replace")[:most_bytes].decode(errors="ignore")


def create(path: Path | str, *, private: bool = False) -> BinaryIO:
    """A new file, open for writing. Raises `FileExistsError` where anything has this name, also a link."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600 if private else 0o666), "wb")


def open_regular(path: Path) -> BinaryIO:
    """A file, open for reading. Raises `NotAFile` for a link, a folder, a pipe or a device, otherwise `OSError`."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise NotAFile(f"{path} is a link; a sweep's files are read from its own folder alone") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotAFile(f"{path} is not a regular file")
    return os.fdopen(handle, "rb")


def link_out(folder: Path, root: Path) -> Path | None:
    """A link in ``folder`` to a folder that is not below ``root``; None if there is none, or no such folder. Raises
    `OSError`."""
    if not folder.is_dir():
        return None
    with os.scandir(folder) as entries:
        links = [Path(entry.path) for entry in entries if entry.is_symlink() and entry.is_dir()]
    return next((link for link in links if not link.resolve().is_relative_to(root.resolve())), None)


def read_own_text(path: Path) -> str:
    """As `read_text`, but raises `NotAFile` for a file that another user has written. On some file systems every file
    has the same owner, so the owner of the folder counts, too."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_uid not in (os.geteuid(), path.parent.stat().st_uid):
            raise NotAFile(f"{path} belongs to another user")
        return file.read(MOST_BYTES).decode()


def path_of(file: BinaryIO) -> str:
    """A path by which a library opens exactly this open file, whatever lies at its name meanwhile."""
    opened = f"/proc/self/fd/{file.fileno()}"
    return opened if os.path.exists(opened) else str(file.name)  # noqa: PTH110


def read_text(path: Path, most_bytes: int = MOST_BYTES) -> str:
    """The content of a UTF-8 file. Raises `ValueError` when it is not UTF-8 or larger than ``most_bytes``, and as
    `open_regular`."""

    def read() -> bytes:
        with open_regular(path) as file:
            return file.read(most_bytes + 1)

    content = repeated(read)
    if len(content) > most_bytes:
        raise ValueError(f"{path} is larger than {most_bytes:,} bytes")
    return content.decode()
