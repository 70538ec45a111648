"""A packed folder reads as a loose one, at every step of the packing and after every death in the middle."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

from results.shared_filesystem import packed_folder
from results.shared_filesystem.whole_files import NotAFile
from tests.launchers.failing_calls import Death, FailingFiles

FILES = {"task.json": "{}", "begun.json": "[]", "rank_0.log": "line\n" * 2000, "rank_1.log": ""}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "x.a1.0abc"
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_text(content)
        os.utime(path / name, (1e9 + len(content),) * 2)
    return path


def content(folder: Path) -> dict[str, str]:
    return {name: packed_folder.read_text(folder / name) for name in FILES}


def test_a_packed_folder_is_one_small_file_and_reads_as_before(folder: Path) -> None:
    before = packed_folder.sizes(folder), packed_folder.written_at(folder)
    (folder / ".task.json.0123456789abcdef.tmp").touch()
    packed_folder.pack(folder, "begun.json")
    [packed] = folder.parent.iterdir()
    assert packed.name == "x.a1.0abc.zip" and packed.stat().st_size < 1500
    assert content(folder) == FILES
    assert packed_folder.sizes(folder) == before[0]
    assert packed_folder.written_at(folder) == pytest.approx(before[1], abs=2.0)
    assert packed_folder.folders(folder.parent) == [folder]
    assert packed_folder.exists(folder / "task.json") and packed_folder.home(folder) == packed
    with pytest.raises(FileNotFoundError):
        packed_folder.open_file(folder / "rank_2.log")


def test_what_must_stay_loose_stays(folder: Path) -> None:
    (folder / "rank_0.trace.json.gz").write_bytes(b"trace")
    (folder / "link").symlink_to(folder / "task.json")
    (folder / "dump").mkdir()
    packed_folder.pack(folder, "begun.json", kept=(".trace.json.gz",))
    assert sorted(path.name for path in folder.iterdir()) == ["dump", "link", "rank_0.trace.json.gz"]
    assert content(folder) == FILES and packed_folder.sizes(folder)["rank_0.trace.json.gz"] == 5


def test_a_folder_that_never_began_is_not_packed(folder: Path) -> None:
    (folder / "begun.json").unlink()
    packed_folder.pack(folder, "begun.json")
    assert len(list(folder.iterdir())) == len(FILES) - 1 and not packed_folder.packed_path(folder).exists()
    packed_folder.pack(folder.parent / "missing", "begun.json")


def test_a_death_at_any_call_loses_nothing_and_the_next_try_ends_the_work(tmp_path: Path) -> None:
    for call in range(1, 40):
        folder = tmp_path / f"x.a{call}.0abc"
        folder.mkdir()
        for name, text in FILES.items():
            (folder / name).write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            failing = FailingFiles(patch.setattr, folder.parent, seed=call, rate=0.0)
            failing.active, failing.dies_at = True, call
            try:
                packed_folder.pack(folder, "begun.json")
                died = False
            except Death:
                died = True
            failing.active = False
        assert content(folder) == FILES
        packed_folder.pack(folder, "begun.json")
        assert content(folder) == FILES and not folder.exists()
        if not died:
            break
    assert call > 2 + 2 * len(FILES)


def test_a_second_packer_does_not_replace_the_whole_file_by_half_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process packs the folder while this one reads it."""
    real = packed_folder.open_regular

    def slowly(path: Path) -> object:
        if path.name == "task.json":
            monkeypatch.setattr(packed_folder, "open_regular", real)
            packed_folder.pack(folder, "begun.json")
        return real(path)

    monkeypatch.setattr(packed_folder, "open_regular", slowly)
    with pytest.raises(FileNotFoundError):
        packed_folder.pack(folder, "begun.json")
    assert content(folder) == FILES and not folder.exists()


@pytest.mark.parametrize("damage", [b"", b"PK", b"not a zip file"])
def test_a_damaged_file_is_named(folder: Path, damage: bytes) -> None:
    packed_folder.pack(folder, "begun.json")
    packed_folder.packed_path(folder).write_bytes(damage)
    with pytest.raises(NotAFile, match=r"x\.a1\.0abc\.zip is damaged"):
        packed_folder.open_file(folder / "task.json")
    with pytest.raises(NotAFile):
        packed_folder.sizes(folder)


def test_a_flipped_bit_and_a_link_are_refused(folder: Path) -> None:
    packed_folder.pack(folder, "begun.json")
    packed = packed_folder.packed_path(folder)
    with zipfile.ZipFile(packed) as archive:
        at = archive.getinfo("rank_0.log").header_offset + 30 + len("rank_0.log") + 5
    whole = bytearray(packed.read_bytes())
    whole[at] ^= 0xFF
    packed.write_bytes(whole)
    with pytest.raises(NotAFile, match="damaged"):
        packed_folder.open_file(folder / "rank_0.log")
    packed.rename(folder.parent / "elsewhere")
    packed.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(NotAFile, match="is a link"):
        packed_folder.open_file(folder / "task.json")
    assert packed_folder.folders(folder.parent) == []
