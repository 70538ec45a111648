"""What a command of ``python -m sweep`` is, and the arguments that several commands have.

Commands import what they need when they run, so that ``--help`` and mistakes answer at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from results.text.command_line import Parser, path

SWEEP_PATH = "the sweep's folder, e.g. results/tiny"
EXPERIMENT_ID = "an experiment's id, or a unique part of it, such as the hash at its end"
RESULTS = Path("results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command."""

    name: str
    description: str
    """Its help; the first sentence is its line in the list of commands."""
    arguments: Callable[[Parser], None]
    """Adds its arguments to a parser."""
    run: Callable[[argparse.Namespace], int]
    """Does its work and returns the exit code."""
    epilog: str | None = None
    """Examples and overrides below its help."""

    def parser(self) -> Parser:
        parser = Parser(
            prog=f"python -m sweep {self.name}",
            description=self.description,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.arguments(parser)
        return parser


def add_overrides_of_a_sweep(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="what to sweep, see below")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="EXPR",
        help="one more condition: on axes and fields of a point (tp <= 4), or on its predictions "
        "(predicted_peak_bytes < 60e9)",
    )
    add_conf(parser, "grid/, model/, cluster/ ...")


def add_conf(parser: Parser, groups: str) -> None:
    """``groups``: the files that the command reads from it."""
    help_text = f"folder with your own {groups} files"
    parser.add_argument("--conf", action="append", default=[], type=path, metavar="DIR", help=help_text)


def add_results(
    parser: Parser, what: str = "folder of sweeps, one sweep, or a ledger written by plan --out (default: results)"
) -> None:
    parser.add_argument("--results", type=path, default=RESULTS, metavar="PATH", help=what)


def add_json(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document instead, see docs/json.md")


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def not_negative(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
