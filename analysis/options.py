"""The command line of ``python -m analysis.report``: its options, checked."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from results.text import command_line
from results.text.command_line import InvalidOption
from results.text.numbers import listed

FORMATS = ("png", "svg", "html")
TABLE_KINDS = ("csv", "md", "latex")
_RESULTS = (
    "a sweep, a folder that holds sweeps, a Parquet file of attempts or of a plan, or bench_final2_mfu2.csv of the "
    "Hugging Face dataset nanotron/ultrascale-playbook-data"
)


@dataclass(frozen=True, slots=True)
class Options:
    """Contents of the report. ``figures``: names, or None for all."""

    formats: tuple[str, ...] = ("png", "svg")
    figures: tuple[str, ...] | None = None
    tables: tuple[str, ...] = ("csv",)
    price_per_gpu_hour: float | None = None
    """Price of one device-hour, in any currency."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The whole command line."""

    results: Path | None
    """Path to read; None only with ``list_figures``."""
    out: Path
    list_figures: bool
    options: Options


def parse(argv: Sequence[str] | None) -> CommandLine:
    """Parse the command line. Raises `InvalidOption`. `choose` checks the names of figures later, once they are
    loaded."""
    parser = command_line.Parser(
        prog="python -m analysis.report",
        description="Draw a report of a sweep, of every sweep below a folder, or of the Ultra-Scale Playbook's "
        "published table: index.html, claims.html, report.json, figures/ and tables/.",
        allow_abbrev=False,
    )
    parser.add_argument("results", type=command_line.path, nargs="?", metavar="RESULTS", help=_RESULTS)
    parser.add_argument(
        "--out", type=command_line.path, default=Path("report"), help="where the report goes (default: report/)"
    )
    parser.add_argument(
        "--format",
        type=command_line.names_of(FORMATS),
        default=("png", "svg"),
        metavar="KIND[,KIND...]",
        help="files of each figure: png, svg, html (default: png,svg). html is a page of its own with the picture as "
        "SVG, its caption and the table of its values; it opens from disk and needs no network",
    )
    parser.add_argument(
        "--figures", type=command_line.names, metavar="NAME[,NAME...]", help="only these figures (default: all)"
    )
    parser.add_argument("--list-figures", action="store_true", help="name, part of the page and title of every figure")
    parser.add_argument(
        "--tables",
        type=command_line.names_of(TABLE_KINDS),
        default=("csv",),
        metavar="KIND[,KIND...]",
        help="kinds of table files: csv, md, latex (default: csv). csv holds every row in full precision; md and latex "
        "are for reading: at most 50 rows, six digits",
    )
    parser.add_argument(
        "--price-per-gpu-hour",
        type=_price,
        metavar="X",
        help="price of one GPU for one hour, for the figures of cost (no default)",
    )
    arguments, more = parser.parse_known_args(argv)
    if arguments.results is not None and more and not any(word.startswith("-") for word in more):
        raise InvalidOption(
            f"RESULTS is one path, {arguments.results}, so {listed(more, 4)} cannot be added; it may be a folder that "
            "holds many sweeps, and python -m analysis.compare takes two"
        )
    if more:
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if arguments.results is None and not arguments.list_figures:
        raise InvalidOption(f"RESULTS is missing: {_RESULTS}")
    options = Options(
        formats=arguments.format,
        figures=arguments.figures,
        tables=arguments.tables,
        price_per_gpu_hour=arguments.price_per_gpu_hour,
    )
    return CommandLine(arguments.results, arguments.out, arguments.list_figures, options)


def choose(wanted: Sequence[str], known: Sequence[str]) -> None:
    """Raise `InvalidOption` for a figure name that is not ``known``, with the nearest names and all of them."""
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            meant = f" did you mean {' or '.join(near)}?" if near else ""
            raise InvalidOption(
                f"--figures: there is no figure {name!r};{meant} known figures: {listed(known, len(known))}"
            )


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not math.isfinite(price) or price <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price; it is a number above 0, e.g. 2.5")
    return price
