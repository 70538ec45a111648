"""Which files of a folder a report or comparison may replace and remove."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from analysis.page.earlier_report import KIND
from analysis.page.staging import Staged, UnwritableReport

HEAD = f'<meta name="generator" content="{KIND.generator}">'


def write(out: Path, figures: tuple[str, ...] = ("all.png",), text: str = "new") -> None:
    """A small report with these figures."""
    with Staged(out, KIND) as staged:
        for name in figures:
            (staged.figures / name).write_text(text)
        (staged.tables / "runs.csv").write_text(text)
        links = "".join(f'<a href="figures/{name}">' for name in figures)
        (staged.folder / "index.html").write_text(f'{HEAD}{links}<a href="tables/runs.csv">')
        staged.publish()


def test_only_files_of_the_last_report_are_removed(tmp_path: Path) -> None:
    write(tmp_path, ("all.png", "old.png"))
    mine = [tmp_path / "figures" / "mine.png", tmp_path / "tables" / "mine.csv", tmp_path / "report.json"]
    for path in mine:
        path.write_text("mine")
    write(tmp_path)
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert not (tmp_path / "figures" / "old.png").exists()
    assert (tmp_path / ".report-files").read_text().split() == ["figures/all.png", "index.html", "tables/runs.csv"]


def test_a_report_without_a_list_is_known_by_its_links(tmp_path: Path) -> None:
    write(tmp_path, ("all.png", "old.png"))
    (tmp_path / ".report-files").unlink()
    (tmp_path / "figures" / "mine.png").write_text("mine")
    write(tmp_path)
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["all.png", "mine.png"]


@pytest.mark.parametrize("listing", [None, "index.html\n../victim\nfigures/../../victim\n/etc/victim\n"])
def test_a_file_in_the_way_is_named_and_kept(tmp_path: Path, listing: str | None) -> None:
    out, victim = tmp_path / "out", tmp_path / "victim"
    (out / "figures").mkdir(parents=True)
    victim.write_text("mine")
    (out / "figures" / "all.png").symlink_to(victim)
    if listing is not None:
        (out / "index.html").write_text(HEAD)
        (out / ".report-files").write_text(listing)
    with pytest.raises(UnwritableReport, match=re.escape(f"figures/all.png in {out}: no earlier report wrote this")):
        write(out)
    assert victim.read_text() == "mine"
    assert (out / "figures" / "all.png").is_symlink()
    assert not list(out.glob(".unfinished-*"))


def test_folders_that_are_links_are_refused(tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    write(out)
    other.mkdir()
    (other / "all.png").write_text("mine")
    (out / "figures").rename(tmp_path / "moved")
    (out / "figures").symlink_to(other)
    with pytest.raises(UnwritableReport, match="figures is a link"):
        write(out)
    assert (other / "all.png").read_text() == "mine"


def test_leftovers_of_killed_commands_go_and_links_among_them_stay(tmp_path: Path) -> None:
    old, fresh, link = (tmp_path / f".unfinished-{name}" for name in ("old", "fresh", "link"))
    elsewhere = tmp_path / "elsewhere"
    for folder in (old, fresh, elsewhere):
        folder.mkdir()
    link.symlink_to(elsewhere)
    for path in (old, link):
        os.utime(path, (0, 0), follow_symlinks=False)
    write(tmp_path)
    assert [path.exists() for path in (old, fresh, link, elsewhere)] == [False, True, True, True]
