"""``python -m analysis.compare A B [--out DIR]``: two results matched point by point, and what moved beyond noise.

A and B are each a sweep, a folder of sweeps, a Parquet file of attempts, or the Ultra-Scale Playbook's published table
(CSV). They may be of different commits, engine versions, clusters or ways of measuring; the comparison says so first.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from results.errors import InvalidResults, UltrasweepError
from results.schema import METHODS

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from analysis.compare.moved import Noise
    from analysis.compare.prose import Table

FORMATS = ("png", "svg", "html")
_WHAT = "a sweep, a folder of sweeps, a Parquet file of attempts, or the published table of the study (CSV)"
_MOST_TOLD, _MOST_ON_PAGE = 12, 100
"""Moved points that the terminal and the page show; compare.csv has all."""
_MIN_WIDTH = 120
_FAULTS = ("oom", "hang", "timeout", "crash", "nccl_error", "diverged")
"""Ways to fail that are the point's own, not the machine's or the user's."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found. ``pairs`` is what `analysis.compare.moved.judged` returns."""

    sides: tuple[str, str]
    cautions: list[str]
    """Said before any number."""
    alarms: list[str]
    matching: list[str]
    found: list[str]
    pairs: pd.DataFrame
    only_a: pd.DataFrame
    only_b: pd.DataFrame
    by_axis: pd.DataFrame
    noise: Noise
    problems: tuple[str, ...]
    """One line for each file that could not be read."""

    def tables(self, most: int) -> list[Table]:
        """Short tables in words: what the axes explain, and at most ``most`` points that moved."""
        from analysis.compare import prose as compare_prose

        return [*compare_prose.axis_tables(self.by_axis), compare_prose.moved_table(self.pairs, most)]


class _Parser(argparse.ArgumentParser):
    """Errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise InvalidResults(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when ``--fail-if-slower`` found something; 2 after a user's mistake."""
    try:
        options = _parser().parse_args(argv)
        comparison = compare(options.a, options.b, options.methods, options.across, options.noise)
        files = write(comparison, options.out, options.format)
        _tell(comparison, files, options.noise is None)
        return 0 if options.fail_if_slower is None else _gate(comparison, options.fail_if_slower)
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def compare(
    a: Path,
    b: Path,
    methods: tuple[str, str] | None = None,
    across: Sequence[str] = (),
    noise: float | None = None,
) -> Comparison:
    """Match the results at ``a`` and ``b`` and judge every matched point.

    ``methods``: of A's and of B's rows, the same one unless asked otherwise; ``across``: axes in which partners may
    differ; ``noise``: a fraction, instead of what the data say. Raises `InvalidResults` when there is nothing to
    compare, or only something that must not be.
    """
    from analysis.compare import matching, moved
    from analysis.compare import prose as compare_prose
    from analysis.rows.load import load

    loaded = [load(path) for path in (a, b)]
    for path, read in zip((a, b), loaded, strict=True):
        if read.attempts.empty and read.problems:
            raise InvalidResults(f"{path} has no row that can be read: {read.problems[0]}")
    methods = matching.choose_methods(loaded[0].attempts, loaded[1].attempts, methods)
    rows = [found.attempts[found.attempts["method"] == of] for found, of in zip(loaded, methods, strict=True)]
    points = [
        matching.points(part, _step_times(path) if of == "measured" else None)
        for part, path, of in zip(rows, (a, b), methods, strict=True)
    ]
    found = matching.match(points[0], points[1], across)
    judged_by = moved.noise_of(points[0], points[1], noise)
    same_numbers = not set(across) & set(moved.SAME_NUMBERS) and "seed" not in found.unrecorded
    pairs = moved.judged(found.pairs, judged_by, compare_losses=same_numbers)
    ignored = (*found.crossed, *found.unrecorded, *across)
    why_a = matching.why_unmatched(found.only_a, points[1], ignored)
    why_b = matching.why_unmatched(found.only_b, points[0], ignored)
    beside = compare_prose.beside(rows[0], rows[1])
    return Comparison(
        sides=(
            compare_prose.side("A", a, rows[0], len(points[0])),
            compare_prose.side("B", b, rows[1], len(points[1])),
        ),
        cautions=compare_prose.cautions(rows[0], rows[1]),
        alarms=compare_prose.alarms(pairs),
        matching=[*([beside] if beside else []), *compare_prose.matched(found, why_a, why_b, across)],
        found=compare_prose.found(pairs, judged_by),
        pairs=pairs,
        only_a=found.only_a,
        only_b=found.only_b,
        by_axis=moved.by_axis(pairs),
        noise=judged_by,
        problems=(*loaded[0].problems, *loaded[1].problems),
    )


def write(comparison: Comparison, out: Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """``tables/compare.csv``, ``tables/compare_by_axis.csv``, ``figures/compare.png`` and ``.svg``, ``compare.html``.

    An earlier comparison's files are replaced once the new ones are whole; those of formats not asked for are removed.
    Raises `InvalidResults` when ``out`` cannot be written.
    """
    from analysis.compare import page as compare_page
    from analysis.compare import ratio_figure as ratios
    from analysis.figures import style

    names = {"csv": "tables/compare.csv", "axes": "tables/compare_by_axis.csv", "html": "compare.html"}
    names |= {kind: f"figures/compare.{kind}" for kind in ("png", "svg")}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as made_in:
            made = {kind: Path(made_in) / name for kind, name in names.items()}
            for path in made.values():
                path.parent.mkdir(exist_ok=True)
            compare_page.table(comparison).to_csv(made["csv"], index=False)
            comparison.by_axis.to_csv(made["axes"], index=False)
            missing = None
            try:
                style.save(ratios.draw(comparison.pairs, comparison.noise), made["png"], made["svg"])
            except style.NothingToDraw as reason:
                missing = str(reason)
            if "html" in formats:
                picture = None if missing else made["png"]
                made["html"].write_text(compare_page.render(comparison, picture, missing, most=_MOST_ON_PAGE))
            written = []
            for kind, name in names.items():
                place = out / name
                if made[kind].exists() and kind in ("csv", "axes", *formats):
                    place.parent.mkdir(exist_ok=True)
                    written.append(made[kind].replace(place))
                else:
                    place.unlink(missing_ok=True)
        return written
    except OSError as error:
        raise InvalidResults(f"cannot write a comparison into {out}: {error.strerror or error}") from None


def no_longer_good(pairs: pd.DataFrame, fraction: float) -> pd.DataFrame:
    """Pairs slower by more than ``fraction`` beyond noise, or that finished in A and fail in B by their own fault."""
    from analysis.compare import moved

    slower = (pairs["speed"] == moved.SLOWER) & (pairs["ratio"] < 1 - fraction)
    return pairs[slower | ((pairs["outcome_a"] == "ok") & pairs["outcome_b"].isin(_FAULTS))]


def _gate(comparison: Comparison, fraction: float) -> int:
    from analysis.compare.moved import DIFFERS

    pairs = comparison.pairs
    if not (pairs["outcome_a"] == "ok").any():
        raise InvalidResults("--fail-if-slower: no matched point finished in A, so there is nothing to hold B to")
    bad = no_longer_good(pairs, fraction)
    if unsure := int(((pairs["speed"] == DIFFERS) & (pairs["ratio"] < 1 - fraction)).sum()):
        print(
            f"not held against B: {unsure:,} points are slower, but of unknown spread; --noise says what to take for it"
        )
    if len(bad):
        print(f"failed: {len(bad):,} of {len(pairs):,} points slower by more than {100 * fraction:g} % or failing in B")
    return 1 if len(bad) else 0


def _step_times(path: Path) -> Mapping[str, Sequence[float]]:
    """Time of every timed step by attempt, of its slowest rank, in seconds; empty where steps are not recorded."""
    from results import store

    if not path.is_dir():
        return {}
    steps = store.scan(path, "steps").table.select(["attempt_id", "step", "is_warmup", "step_time_s"]).to_pandas()
    timed = steps[steps["is_warmup"].eq(False) & steps["step_time_s"].notna()]
    slowest = timed.groupby(["attempt_id", "step"])["step_time_s"].max()
    return {str(attempt): times.tolist() for attempt, times in slowest.groupby(level="attempt_id")}


def _tell(comparison: Comparison, files: Sequence[Path], hint: bool) -> None:
    console = _console()

    def line(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False)

    for text in (*comparison.cautions, *comparison.alarms):
        line(text, "bold red" if text in comparison.alarms else "bold yellow")
    for text in comparison.problems:
        line(f"warning: {text}", "yellow")
    for text in (*comparison.sides, *comparison.matching):
        line(text)
    console.print()
    for text in comparison.found:
        line(text)
    for table in comparison.tables(_MOST_TOLD):
        if table.rows:
            console.print(_rich(table))
    line(" ".join(str(path) for path in files), "dim")


def _rich(table: Table) -> object:
    from rich import box
    from rich import table as rich_table
    from rich.text import Text

    shown = rich_table.Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in table.header:
        shown.add_column(Text(name), overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(cell) for cell in row))
    return shown


def _console() -> Console:
    from rich.console import Console

    console = Console()
    # Tables need room where nobody set a width: in a pipe or a log file.
    return console if console.is_terminal or console.width >= _MIN_WIDTH else Console(width=_MIN_WIDTH)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m analysis.compare",
        description="Match two results point by point and say what moved beyond noise: throughput, peak memory, "
        "outcomes, losses. Writes tables/compare.csv, figures/compare.png and .svg, and compare.html.",
    )
    parser.add_argument("a", metavar="A", type=_folder, help=_WHAT)
    parser.add_argument("b", metavar="B", type=_folder, help="the same, compared with A: ratios are B over A")
    parser.add_argument("--out", type=_folder, default=Path("comparison"), metavar="DIR", help="default: comparison/")
    parser.add_argument(
        "--noise",
        type=_percent,
        metavar="PERCENT",
        help="change of throughput to take for noise, instead of what timed steps and repeats say",
    )
    parser.add_argument(
        "--across",
        type=_axes,
        default=(),
        metavar="AXIS[,AXIS]",
        help="match points that differ in these axes, e.g. compile, recompute or dp_replicate,dp_shard,zero_stage",
    )
    parser.add_argument(
        "--methods",
        type=_methods,
        metavar="OF_A,OF_B",
        help=f"which rows of each side ({', '.join(METHODS)}); e.g. measured,rehearsed. Default: the same of both",
    )
    parser.add_argument(
        "--format", type=_formats, default=FORMATS, metavar="KIND[,KIND]", help=f"of {','.join(FORMATS)} (default: all)"
    )
    parser.add_argument(
        "--fail-if-slower",
        type=_percent,
        metavar="PERCENT",
        help="exit with 1 when a point of B is slower by more than this beyond noise, or no longer finishes",
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _axes(text: str) -> tuple[str, ...]:
    if not (names := _names(text)):
        raise argparse.ArgumentTypeError(f"{text!r} names no axis")
    return names


def _folder(text: str) -> Path:
    if not text.strip():
        raise argparse.ArgumentTypeError("an empty path; write . for the folder that you are in")
    return Path(text)


def _methods(text: str) -> tuple[str, str]:
    names = _names(text)
    if len(names) != 2 or any(name not in METHODS for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not two of {', '.join(METHODS)}, with a comma between")
    return names[0], names[1]


def _formats(text: str) -> tuple[str, ...]:
    names = _names(text)
    if not names or any(name not in FORMATS for name in names):
        raise argparse.ArgumentTypeError(f"{text!r}: formats are {', '.join(FORMATS)}")
    return names
