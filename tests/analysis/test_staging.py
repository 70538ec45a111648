"""Files of reports and comparisons replace earlier ones of theirs, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.page.render import GENERATOR
from analysis.page.staging import REPORT_LIST, Staged, UnwritableReport, earlier_report

PAGE = f'<meta name="generator" content="{GENERATOR}">'


def write_report(out: Path, *names: str) -> None:
    """A report of a page and the named files."""
    with Staged(out, "a report") as staged:
        for name in ("index.html", *names):
            (staged.folder / name).write_text(PAGE)
        staged.publish(earlier_report(out))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_report(tmp_path / "out", "figures/a.png", "tables/a.csv")
    return tmp_path / "out"


def test_only_listed_files_are_removed(out: Path) -> None:
    mine = [out / name for name in ("figures/mine.png", "tables/mine.csv", "claims.html", "notes.txt")]
    for path in mine:
        path.write_text("mine")
    write_report(out, "figures/b.png")
    assert all(path.read_text() == "mine" for path in mine)
    assert not (out / "figures" / "a.png").exists() and not (out / "tables" / "a.csv").exists()
    assert (out / REPORT_LIST).read_text().splitlines()[1:] == ["figures/b.png", "index.html"]


def test_a_file_of_the_user_is_not_overwritten(out: Path) -> None:
    (out / "figures" / "b.png").write_text("mine")
    with pytest.raises(UnwritableReport, match=r"holds figures/b\.png, which no earlier report wrote; move the file"):
        write_report(out, "figures/b.png")
    assert (out / "figures" / "b.png").read_text() == "mine"
    assert (out / "figures" / "a.png").exists() and not list(out.glob(".*"))


def _link_figures(out: Path, elsewhere: Path) -> None:
    (out / "figures" / "a.png").rename(elsewhere / "a.png")
    (out / "figures").rmdir()
    (out / "figures").symlink_to(elsewhere)


def _link_picture(out: Path, elsewhere: Path) -> None:
    (out / "figures" / "a.png").unlink()
    (out / "figures" / "a.png").symlink_to(elsewhere / "a.png")


@pytest.mark.parametrize("link", [_link_figures, _link_picture])
def test_nothing_is_written_or_removed_through_a_link(
    link: Callable[[Path, Path], None], out: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link(out, elsewhere)
    (elsewhere / "a.png").write_text("theirs")
    for names in ((), ("figures/a.png",)):
        try:
            write_report(out, *names)
        except UnwritableReport as error:
            assert "is a link" in str(error)
    assert (elsewhere / "a.png").read_text() == "theirs"
    assert [path.name for path in elsewhere.iterdir()] == ["a.png"]


def test_a_list_names_no_file_outside(out: Path, tmp_path: Path) -> None:
    outside = [tmp_path / "theirs.html", out / "other" / "theirs.html"]
    for path in outside:
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")
    head = (out / REPORT_LIST).read_text().splitlines()[0]
    (out / REPORT_LIST).write_text(
        f"{head}\n../theirs.html\n{outside[0]}\nother/theirs.html\nfigures/../../theirs.html\n"
    )
    write_report(out)
    assert all(path.exists() for path in outside)


def test_a_report_without_a_list_owns_what_its_page_links(out: Path) -> None:
    (out / REPORT_LIST).unlink()
    (out / "figures" / "mine.png").write_text("mine")
    (out / "index.html").write_text(f'{PAGE}<a href="figures/a.png">')
    write_report(out)
    assert not (out / "figures" / "a.png").exists()
    assert (out / "figures" / "mine.png").exists() and (out / "tables" / "a.csv").exists()


def test_a_pipe_in_the_place_of_the_page_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.html")
    with pytest.raises(UnwritableReport, match="is not a report page"):
        earlier_report(tmp_path)
