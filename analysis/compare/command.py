"""``python -m analysis.compare A B [--out DIR]``: two results matched point by point, and the changes beyond noise.

A and B are each a sweep, a folder of sweeps, a Parquet file of attempts, or the Ultra-Scale Playbook's published table
(CSV). They may differ in commit, engine version, cluster or method; the comparison reports such differences first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from results.errors import InvalidResults, UltrasweepError
from results.tables.schema import METHODS
from results.text import command_line
from results.text.command_line import InvalidOption
from results.text.numbers import listed, plural
from results.text.terminal import open_console

if TYPE_CHECKING:
    from analysis.compare.comparison import Comparison
    from analysis.page.render import PageTable

# Slow imports happen where they are used, so that --help and usage errors answer at once.
FORMATS = ("png", "svg", "html")
_OUT = Path("comparison")
_WHAT = "a sweep, a folder of sweeps, a Parquet file of attempts, or the published table of the study (CSV)"
_MOST_PRINTED, _MOST_ON_PAGE = 12, 100
"""Largest number of changed points on the terminal and on the page; compare.csv has all."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 if ``--fail-if-slower`` finds a regression; 2 after a user's mistake; 130 after Ctrl-C."""
    try:
        options = _parser().parse_args(argv)
        from analysis.compare import comparison as comparing
        from analysis.compare import write_comparison

        if options.json and (options.out or options.format != FORMATS or options.fail_if_slower is not None):
            raise InvalidOption("--json writes no file and judges nothing; leave out --out, --format, --fail-if-slower")
        comparison = comparing.compare(
            options.a, options.b, options.methods, options.across, options.noise, options.engines
        )
        if options.json:
            from analysis.compare.compare_json import compare_json

            print(compare_json(comparison, options.a, options.b))
            return 0
        out = options.out if options.out is not None else _OUT
        files = write_comparison.write(comparison, out, options.format, _MOST_ON_PAGE)
        _print(comparison, files)
        return 0 if options.fail_if_slower is None else _gate(comparison, options.fail_if_slower)
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def _gate(comparison: Comparison, fraction: float) -> int:
    """Returns 1 if a point of B has regressed by more than ``fraction`` or no longer finishes, otherwise 0."""
    from analysis.compare import comparison as comparing
    from analysis.compare import verdicts
    from analysis.compare.moved import DIFFERS, LOUDEST, percent

    pairs = comparison.pairs
    if not (pairs["outcome_a"] == "ok").any():
        raise InvalidResults("--fail-if-slower: no matched point finished in A, so there is no baseline for B")
    if (pairs["verdict"].dropna() == verdicts.METHOD_CHANGED).all():
        raise InvalidResults(
            f"--fail-if-slower: every matched point has the verdict {verdicts.METHOD_CHANGED!r}, so there is no "
            "baseline for B"
        )
    if not comparison.noise.judges:
        raise InvalidResults(
            f"--fail-if-slower: equal runs differ by {percent(comparison.noise.fraction)}, and beyond "
            f"{percent(LOUDEST)} no change of throughput is judged; repeat the runs, or give --noise PERCENT"
        )
    if len(open_ones := comparing.not_held(pairs, fraction)):
        verdict_counts = listed([f"{count:,} {verdict}" for verdict, count in verdicts.counts(open_ones)])
        print(f"not counted as failed: {plural(len(open_ones), 'point')} slower or failing in B ({verdict_counts})")
        if (open_ones["speed"] == DIFFERS).any():
            print("--noise PERCENT sets the noise for points of unknown spread")
    bad = comparing.regressions(pairs, fraction)
    if len(bad):
        print(f"failed: {len(bad):,} of {len(pairs):,} points slower by more than {100 * fraction:g} % or failing in B")
    return 1 if len(bad) else 0


def _print(comparison: Comparison, files: Sequence[Path]) -> None:
    console = open_console()

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    for text in (*comparison.cautions, *comparison.alarms):
        line(text, "bold red" if text in comparison.alarms else "bold yellow")
    for text in comparison.problems:
        line(f"warning: {text}", "yellow")
    if comparison.verdicts is not None:
        line(comparison.verdicts, "bold")
    for text in (*comparison.sides, *comparison.matching):
        line(text)
    console.print()
    for text in comparison.found:
        line(text)
    for table in comparison.tables(_MOST_PRINTED):
        if table.rows:
            console.print(_rich(table))
    line(" ".join(str(path) for path in files), "dim")


def _rich(table: PageTable) -> object:
    from rich import box
    from rich import table as rich_table
    from rich.text import Text

    shown = rich_table.Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in table.header:
        shown.add_column(Text(name), overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="python -m analysis.compare",
        description="Match two results point by point and list changes beyond noise: throughput, peak memory, "
        "outcomes, losses. Writes tables/compare.csv, figures/compare.png and .svg, and compare.html.",
    )
    parser.add_argument("a", metavar="A", type=command_line.path, help=_WHAT)
    parser.add_argument("b", metavar="B", type=command_line.path, help="like A; compared with A, ratios are B over A")
    parser.add_argument("--out", type=command_line.path, metavar="DIR", help=f"default: {_OUT}/")
    parser.add_argument(
        "--noise",
        type=_percent,
        metavar="PERCENT",
        help="change of throughput that counts as noise, instead of the estimate from timed steps and repeats",
    )
    parser.add_argument(
        "--across",
        type=command_line.names,
        default=(),
        metavar="AXIS[,AXIS]",
        help="match points that differ in these axes, e.g. compile, recompute or dp_replicate,dp_shard,zero_stage",
    )
    parser.add_argument(
        "--methods",
        type=_methods,
        metavar="OF_A,OF_B",
        help=f"which rows of each side ({', '.join(METHODS)}); e.g. measured,rehearsed. Default: the same method for "
        "both",
    )
    parser.add_argument(
        "--engines",
        type=_engines,
        metavar="OF_A,OF_B",
        help="which engine's rows of each side, e.g. ultrasweep,torchtitan of one folder given twice. Default: all",
    )
    parser.add_argument(
        "--format",
        type=command_line.names_of(FORMATS),
        default=FORMATS,
        metavar="KIND[,KIND]",
        help=f"of {','.join(FORMATS)} (default: all)",
    )
    parser.add_argument(
        "--fail-if-slower",
        type=_percent,
        metavar="PERCENT",
        help="exit with 1 when a point of B is a regression by more than this, or no longer finishes",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document and write no file, see docs/json.md"
    )
    return parser


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage from 0 to 100")
    return value / 100


def _engines(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not two engines separated by a comma")
    return names[0], names[1]


def _methods(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or any(name not in METHODS for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not two of {', '.join(METHODS)}, separated by a comma")
    return names[0], names[1]
