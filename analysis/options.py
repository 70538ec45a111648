"""What a report is asked for on the command line, and one line for each value that cannot be."""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from results.errors import UltrasweepError
from results.text import listed

FORMATS = ("png", "svg", "html")
TABLE_KINDS = ("csv", "md", "latex")
_RESULTS = (
    "a sweep, a folder that holds sweeps, a Parquet file of attempts, or bench_final2_mfu2.csv of the Hugging Face "
    "dataset nanotron/ultrascale-playbook-data"
)


class InvalidOption(UltrasweepError):
    """A value on the command line of the report that it cannot have."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is wanted of a report. ``figures`` None is all of them."""

    formats: tuple[str, ...] = ("png", "svg")
    figures: tuple[str, ...] | None = None
    tables: tuple[str, ...] = ("csv",)
    price_per_gpu_hour: float | None = None
    """Money for one device and hour, in whatever currency."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A whole command line."""

    results: Path | None
    """None only with ``list_figures``."""
    out: Path
    list_figures: bool
    options: Options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidOption(f"{message} ({self.prog} --help lists every option)")


def parse(argv: Sequence[str] | None) -> CommandLine:
    """The command line. Raises `InvalidOption`; names of figures are looked at by `choose`."""
    parser = _Parser(
        prog="python -m analysis.report",
        description="Draw a report of a sweep, of every sweep below a folder, or of the Ultra-Scale Playbook's "
        "published table: index.html, explorer.html, figures/ and tables/.",
        allow_abbrev=False,
    )
    parser.add_argument("results", type=_folder, nargs="?", metavar="RESULTS", help=_RESULTS)
    parser.add_argument("--out", type=_folder, default=Path("report"), help="where the report goes (default: report/)")
    parser.add_argument(
        "--format",
        default="png,svg",
        metavar="KIND[,KIND...]",
        help="files of each figure: png, svg, html (default: png,svg). html is a page of its own with the picture as "
        "SVG, its caption and the table of its values; it opens from disk and asks for nothing",
    )
    parser.add_argument("--figures", metavar="NAME[,NAME...]", help="only these figures (default: all)")
    parser.add_argument("--list-figures", action="store_true", help="name, part of the page and title of every figure")
    parser.add_argument(
        "--tables",
        default="csv",
        metavar="KIND[,KIND...]",
        help="kinds of table files: csv, md, latex (default: csv). csv holds every row in full precision; md and latex "
        "are for reading: at most 50 rows, six digits",
    )
    parser.add_argument(
        "--price-per-gpu-hour", metavar="X", help="price of one GPU for one hour, for the figures of cost (no default)"
    )
    found = parser.parse_args(argv)
    if found.results is None and not found.list_figures:
        raise InvalidOption(f"RESULTS is missing: {_RESULTS}")
    options = Options(
        formats=_several("--format", found.format, FORMATS),
        figures=None if found.figures is None else _names("--figures", found.figures),
        tables=_several("--tables", found.tables, TABLE_KINDS),
        price_per_gpu_hour=None if found.price_per_gpu_hour is None else _price(found.price_per_gpu_hour),
    )
    return CommandLine(found.results, found.out, found.list_figures, options)


def choose(wanted: Sequence[str], known: Sequence[str]) -> None:
    """Check names of figures. Raises `InvalidOption` with the nearest names and all of them."""
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            meant = f" did you mean {' or '.join(near)}?" if near else ""
            raise InvalidOption(f"--figures: there is no figure {name!r};{meant} there are {listed(known, len(known))}")


def _several(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = _names(option, text)
    for name in names:
        if name not in known:
            raise InvalidOption(f"{option}: {name!r} is none of {', '.join(known)}")
    return names


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise InvalidOption(f"{option}: {text!r} names nothing")
    return names


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty path; write . for the folder that you are in")
    return Path(text)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not math.isfinite(price) or price <= 0:
        raise InvalidOption(f"--price-per-gpu-hour: {text!r} is not a price; it is a number above 0, e.g. 2.5")
    return price
