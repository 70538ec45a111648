"""Files in folders where other users may have put links and pipes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from results.errors import InvalidResults
from results.shared_filesystem.lease import acquire
from results.shared_filesystem.whole_files import (
    NotAFile,
    open_regular,
    output_file,
    read_own_text,
    read_text,
    whole_file,
    write_whole,
)
from results.tables import compaction, files, store
from results.text.log_tail import read_tail, tail_in_one_line
from workloads.contract.protocol import read_json, write_json


@pytest.fixture
def link(tmp_path: Path) -> Path:
    """A link to a file of somebody else."""
    (tmp_path / "theirs").write_text('{"secret": 1}')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "theirs")
    return tmp_path / "folder" / "link"


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_whole(path, "ours"),
        lambda path: write_json(path, {"ours": 1}, private=True),
        lambda path: files.write_parquet(path, pa.table({"ours": [1]})),
    ],
)
def test_a_link_is_replaced_and_not_followed(write: Callable[[Path], None], link: Path) -> None:
    write(link)
    assert (link.parent.parent / "theirs").read_text() == '{"secret": 1}'
    assert not link.is_symlink() and b"ours" in link.read_bytes()
    assert list(link.parent.iterdir()) == [link]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_whole(path, "old")
    with pytest.raises(RuntimeError), whole_file(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_a_user_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Path, "replace", full)
    for path, write in (
        (tmp_path / "a", write_whole),
        (tmp_path / "no" / "b", write_whole),
        (tmp_path / "c", in_block),
    ):
        with pytest.raises(OSError) as error:
            write(path, b"1")
        assert (error.value.filename, error.value.filename2) == (str(path), None)


def in_block(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read_and_nothing_is_waited_for(kind: str, link: Path) -> None:
    path = link
    if kind != "link":
        link.unlink()
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    for read in (open_regular, read_text, read_json):
        with pytest.raises(NotAFile, match=f"{path} is "):
            read(path)
    with pytest.raises(InvalidResults, match="cannot be read and is left out"):
        files.read_parquet(path)
    with pytest.raises(OSError, match=r"is a link|not a regular file"):
        read_tail(path, 3)
    assert tail_in_one_line(path, 3) == ""


def test_the_parts_of_another_sweep_are_neither_read_nor_merged(tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    part = files.part_path(theirs, "attempts", "a1")
    files.write_parquet(part, pa.table({"attempt_id": ["a1"]}))
    ours.mkdir()
    (ours / files.MARKER).write_text("{}")
    (ours / "parts").symlink_to(theirs / "parts")
    assert compaction.compact(ours)
    reading = store.scan(ours, "attempts")
    assert part.exists() and reading.table.num_rows == 0
    assert len(reading.problems) == 1 and f"{ours / 'parts'} is a link" in reading.problems[0]


def test_a_link_in_the_place_of_a_lock_is_removed_and_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    os.utime(tmp_path / "theirs" / "file", (0, 0))
    (tmp_path / "lock").symlink_to(tmp_path / "theirs")
    with acquire(tmp_path / "lock", stale_after_s=1.0, wait_s=1.0) as lease:
        assert lease is not None and not (tmp_path / "lock").is_symlink()
    assert (tmp_path / "theirs" / "file").exists()


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "123")
    assert read_text(tmp_path / "file", most_bytes=3) == "123"
    with pytest.raises(ValueError, match="larger than 2 bytes"):
        read_text(tmp_path / "file", most_bytes=2)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_a_file_that_another_user_has_put_there_is_not_our_own(tmp_path: Path) -> None:
    write_whole(tmp_path / "config", "{}", private=True)
    assert read_own_text(tmp_path / "config") == "{}"
    os.chown(tmp_path / "config", 65534, -1)
    with pytest.raises(NotAFile, match="belongs to another user"):
        read_own_text(tmp_path / "config")
    os.chown(tmp_path, 65534, -1)  # a file system that gives every file to one user
    assert read_own_text(tmp_path / "config") == "{}"


def test_a_private_file_is_for_its_user(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "x", private=True)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_output_to_a_device_does_not_replace_the_device() -> None:
    with output_file(Path("/dev/null")) as file:
        file.write(b"x")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_output_to_a_descriptor_is_written_into_it(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as target, output_file(Path(f"/proc/self/fd/{target.fileno()}")) as file:
        file.write(b"x")
    assert (tmp_path / "file").read_bytes() == b"x"
