"""The report's command line: options, formats, selections, and one line for each mistake."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from analysis import options, report
from analysis.figures import registry
from analysis.page import export
from analysis.page.render import PageTable
from analysis.page.report_progress import ReportProgress
from tests.analysis import synthetic
from tests.analysis.pages import POINTS, links, text_of
from tests.sampling import sampled

pytestmark = pytest.mark.drawn(one_in=3)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.make_sweep(tmp_path_factory.mktemp("results") / "s", synthetic.attempts(POINTS[:6], outcome="ok"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "analysis.report", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a folder without a sweep", "nothing", "a text file"])
def test_what_is_no_result_is_one_line_and_exit_2(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "a folder without a sweep":
        path.mkdir()
    elif what == "a text file":
        path.write_text("hello")
    done = run(str(path), "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(path) in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--format", "png,gif"], "argument --format: 'gif' is not one of png, svg, html"),
        (["--format", ","], "argument --format: ',' contains no name"),
        (["--tables", "xlsx"], "argument --tables: 'xlsx' is not one of csv, md, latex"),
        (["--price-per-gpu-hour", "cheap"], "'cheap' is not a price"),
        (["--price-per-gpu-hour", "-1"], "'-1' is not a price"),
        (["--figures", "outcome"], "there is no figure 'outcome'; did you mean outcomes"),
        (["--figurs", "outcomes"], "unrecognized arguments: --figurs outcomes"),
        (["second", "third"], "so second and third cannot be added; it may be a folder that holds many sweeps"),
    ],
)
def test_a_wrong_value_is_one_line_and_exit_2(
    arguments: list[str], told: str, sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report.main([str(sweep), "--out", str(tmp_path / "out"), *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    [line] = said.err.splitlines()
    assert line.startswith("error: ")
    assert told in line
    assert not (tmp_path / "out").exists()


def test_an_unknown_figure_is_answered_with_all_names() -> None:
    names = [spec.name for spec in registry.FIGURES]
    with pytest.raises(options.InvalidOption) as caught:
        options.choose(["zzz"], names)
    assert all(name in str(caught.value) for name in names)
    assert "did you mean" not in str(caught.value)


def test_results_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 2
    assert capsys.readouterr().err.startswith("error: RESULTS is missing: a sweep, ")


def test_every_figure_is_listed_with_its_part_and_title(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--list-figures"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(registry.FIGURES)
    for line, spec in zip(lines, registry.FIGURES, strict=True):
        assert line.split()[:2] == [spec.name, spec.section]
        assert line.endswith(spec.title)


@pytest.mark.slow
def test_only_the_figures_asked_for_are_drawn(sweep: Path, tmp_path: Path) -> None:
    wanted = options.Options(figures=("outcomes", "all_runs"))
    index = report.build(sweep, tmp_path / "out", wanted)
    drawn = {path.name for path in (index.parent / "figures").iterdir()}
    assert drawn == {f"{name}-measured-h200.{kind}" for name in ("outcomes", "all_runs") for kind in ("png", "svg")}
    tables = {path.stem for path in (index.parent / "tables").iterdir()}
    assert tables == {"claims", "ranked", "failures", "outcomes", "all_runs"}
    assert "that these rows cannot make" not in text_of(index)


@pytest.mark.slow
@pytest.mark.parametrize(
    "formats", sampled([(kinds,) for kinds in (("png",), ("svg",), ("html",), ("png", "html"))], 2)
)
def test_each_format_alone_makes_a_whole_page(formats: tuple[str, ...], sweep: Path, tmp_path: Path) -> None:
    index = report.build(sweep, tmp_path / "out", options.Options(formats=formats, figures=("outcomes",)))
    names = {f"outcomes-measured-h200.{kind}" for kind in formats}
    assert {path.name for path in (index.parent / "figures").iterdir()} == names
    found = links(index)
    assert {link.removeprefix("figures/") for link in found if link.startswith("figures/")} == names
    pictures = [kind for kind in ("png", "svg") if kind in formats]
    assert index.read_text().count("<img loading") == (1 if pictures else 0)


@pytest.mark.slow
def test_a_figure_as_a_page_holds_picture_caption_and_values(sweep: Path, tmp_path: Path) -> None:
    wanted = options.Options(formats=("html",), figures=("all_runs",))
    index = report.build(sweep, tmp_path / "out", wanted)
    page = index.parent / "figures" / "all_runs-measured-h200.html"
    [spec] = [spec for spec in registry.FIGURES if spec.name == "all_runs"]
    text, source = text_of(page), page.read_text()
    assert spec.caption in text
    assert source.count("<svg") == 1
    assert "<?xml" not in source
    assert "<!DOCTYPE svg" not in source
    assert links(page) == [link for link in links(page) if link.startswith("#")]
    values = pd.read_csv(index.parent / "tables" / "all_runs.csv")
    assert source.count("<tr>") == len(values) + 1


@pytest.mark.slow
def test_tables_in_every_kind(sweep: Path, tmp_path: Path) -> None:
    wanted = options.Options(tables=options.TABLE_KINDS, figures=("outcomes",))
    folder = report.build(sweep, tmp_path / "out", wanted).parent / "tables"
    assert {path.name for path in folder.iterdir()} == {
        f"{name}.{kind}" for name in ("claims", "ranked", "failures", "outcomes") for kind in ("csv", "md", "tex")
    }
    lines = (folder / "ranked.md").read_text().splitlines()
    assert lines[0].startswith("| method | cluster | model | seq\\_len |")
    assert len(lines) == 2 + 6
    assert (folder / "ranked.tex").read_text().count(r"\\") == 1 + 6


ODD = pd.DataFrame(
    {
        "na|me": ["a|b", "50 % & $5 #1_{x}~^\\", "[two\nlines]", None],
        "value": [1 / 3, float("nan"), 45459906560.0, 1e-9],
        "whole": [True, False, True, False],
    }
)


def test_markdown_is_escaped() -> None:
    lines = export.markdown(export.shown(ODD, 50), "odd").splitlines()
    assert lines[:3] == ["| na\\|me | value | whole |", "|---|---|---|", "| a\\|b | 0.333333 | True |"]
    assert lines[3] == "| 50 % & $5 \\#1\\_\\{x\\}\\~^\\\\ | – | False |"
    assert lines[4:] == ["| \\[two lines\\] | 45459906560 | True |", "| – | 1e-09 | False |"]


def test_latex_is_escaped() -> None:
    rows = export.latex(export.shown(ODD, 50), "odd").splitlines()
    assert rows[4:9] == [
        "\\midrule",
        r"a\textbar{}b & 0.333333 & True \\",
        r"50 \% \& \$5 \#1\_\{x\}\textasciitilde{}\textasciicircum{}\textbackslash{} & -- & False \\",
        r"{[}two lines] & 45459906560 & True \\",
        r"-- & 1e-09 & False \\",
    ]


def test_long_tables_are_cut_for_reading_with_their_number_of_rows(tmp_path: Path) -> None:
    long = pd.DataFrame({"x": range(1234)})
    export.write([export.FileTable("long", long)], tmp_path, options.TABLE_KINDS)
    told = "The first 50 of 1,234 rows"
    assert len(pd.read_csv(tmp_path / "long.csv")) == 1234
    assert told in (tmp_path / "long.md").read_text()
    assert len((tmp_path / "long.md").read_text().splitlines()) == 2 + 50 + 2
    assert told in (tmp_path / "long.tex").read_text()
    assert export.latex(PageTable(["x"], [["1"]], 1), "one").count("The first") == 0


@pytest.mark.slow
def test_a_price_reaches_the_figures(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    figure = "--figures=training_cost"
    assert report.main([str(sweep), "--out", str(out), figure, "--price-per-gpu-hour", "2.5"]) == 0
    with_price = (out / "tables" / "training_cost.csv").read_text()
    assert report.main([str(sweep), "--out", str(out), figure]) == 0
    assert (out / "tables" / "training_cost.csv").read_text() != with_price


def test_progress_on_a_terminal_is_one_line_that_renews_itself() -> None:
    stream = io.StringIO()
    progress = ReportProgress(Console(file=stream, force_terminal=True, width=30))
    progress.step(1, 2, "a-figure-with-a-long-name-indeed")
    progress.step(2, 2, "another")
    progress.say("done")
    first, *_, rest = stream.getvalue().split("figure 2 of 2: another")
    assert "figure 1 of 2: a-figure-with-…" in first
    assert "\n" not in first
    assert first.endswith("\r\x1b[2K"), "the line before is removed"
    assert rest.endswith("\x1b[2Kdone\n")


def test_progress_elsewhere_is_a_line_now_and_then() -> None:
    now = [0.0]
    stream = io.StringIO()
    progress = ReportProgress(Console(file=stream), clock=lambda: now[0])
    for done in range(1, 41):
        now[0] += 0.5
        progress.step(done, 40, "name")
    progress.clear()
    assert stream.getvalue().splitlines() == [f"figure {done} of 40: name" for done in (10, 20, 30, 40)]


@pytest.mark.slow
def test_no_torch_and_no_pyplot_are_imported(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:2]))
    code = (
        "import sys, json; from pathlib import Path; from analysis import report;"
        f"report.build(Path({str(sweep)!r}), Path({str(tmp_path / 'out')!r}));"
        "print(json.dumps([m for m in ('torch', 'matplotlib.pyplot', 'hydra') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert json.loads(done.stdout) == []


DROPPED = """
import os, signal, sys, weakref
from analysis import report
from analysis.page.report_progress import ReportProgress

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whatever the tests inherit

class Freed:
    pass

def drawn(self, done, total, what):
    if done == 1:
        freed = Freed()
        kept = weakref.ref(freed, lambda _: os.kill(os.getpid(), signal.SIGINT))
        del freed

ReportProgress.step = drawn
sys.exit(report.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ctrl_c_that_python_drops_ends_the_report_at_the_next_figure(sweep: Path, tmp_path: Path) -> None:
    """As exceptions are in callbacks of weak references: printed and ignored."""
    words = [sys.executable, "-c", DROPPED, str(sweep), "--out", str(tmp_path / "out")]
    ended = subprocess.run(words, check=False, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "Exception ignored" in ended.stderr
    assert ended.returncode == 130 and ended.stderr.endswith("error: interrupted; an earlier report is unchanged\n")
    assert not (tmp_path / "out" / "index.html").exists()
