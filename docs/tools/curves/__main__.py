"""``python -m docs.tools.curves --out FILE``: trains small models on a real text and checks their curves against
bands."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

from docs.tools.curves.curve_bands import FIRST_STEPS, WINDOW, Distance, collapsed, distances
from docs.tools.curves.curve_table import write_curves
from docs.tools.curves.recipe import TrainingRecipe
from docs.tools.curves.runs import Run, all_runs
from results.errors import UltrasweepError
from results.tables.provenance import code_provenance
from results.text import command_line
from results.text.terminal import open_console, plain_table
from workloads.measuring.processes import on_ranks
from workloads.spec.checks import whole_number
from workloads.spec.errors import InvalidExperiment

_ROOT = Path(__file__).resolve().parents[3]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a run failed or left its band; 2 after a user's mistake."""
    try:
        options = _parser().parse_args(argv)
        whole_number("--jobs", options.jobs, 1, error=InvalidExperiment)
        runs = chosen(options.only)
        recipe = TrainingRecipe(
            steps=options.steps,
            learning_rate=options.learning_rate,
            warmup_steps=min(TrainingRecipe().warmup_steps, options.steps // 3),
        )
        rows: list[dict[str, Any]] = []
        failed = 0
        for outcome in _results(runs, recipe, options.device, options.jobs):
            if isinstance(outcome, UltrasweepError):
                failed += 1
                print(f"error: {' '.join(str(outcome).split())}", file=sys.stderr, flush=True)
                continue
            rows += outcome
            place = {run.name: number for number, run in enumerate(runs)}
            rows.sort(key=lambda row: (place[row["run"]], row["step"]))
            write_curves(options.out, rows)  # write after every run: it may be the last one that there is time for
        if rows:
            print(options.out)
        apart, fallen = distances(rows), collapsed(rows)
        _tell(apart)
        for name, least in fallen.items():
            print(f"{name}: the routing of a layer has collapsed, to {least:.2f} of an even load's entropy")
        return 1 if failed or fallen or not all(distance.is_inside for distance in apart) else 0
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def chosen(only: Sequence[str] | None) -> list[Run]:
    """The runs whose name contains one of the texts; None: all runs."""
    runs = all_runs()
    for text in only or ():
        if not any(text in run.name for run in runs):
            raise InvalidExperiment(
                f"--only {text!r}: no run has this in its name; runs: {'; '.join(r.name for r in runs)}"
            )
    return [run for run in runs if only is None or any(text in run.name for text in only)]


def train_run(run: Run, recipe: TrainingRecipe, device: str, first_gpu: int = 0) -> list[dict[str, Any]]:
    """Train on processes of this machine; the rows of `docs.tools.curves.curve_table`.

    Raises `workloads.measuring.processes.RankFailed` if a rank fails.
    """
    from docs.tools.curves.train import train_curve  # only this import needs torch

    e = run.experiment
    work = partial(train_curve, experiment=e, recipe=recipe, device=device)
    steps = on_ranks(work, e.world_size, device, preload=["docs.tools.curves.train"], first_gpu=first_gpu)[0]
    code = code_provenance(_ROOT)
    what = {
        "run": run.name,
        "experiment_id": e.id,
        "model": e.model.name,
        "precision": e.precision,
        "layout": run.layout,
        "world_size": e.world_size,
        "git_commit": None if code["git_dirty"] else code["git_commit"],
    }
    return [{**what, **step} for step in steps]


def _results(
    runs: Sequence[Run], recipe: TrainingRecipe, device: str, jobs: int
) -> Iterator[list[dict[str, Any]] | UltrasweepError]:
    """Yields the rows of each run, or its error, as the runs end."""
    with ThreadPoolExecutor(jobs) as pool:
        futures, first_gpu = [], 0
        for run in runs:
            futures.append(pool.submit(_train_and_tell, run, recipe, device, first_gpu))
            first_gpu += run.experiment.world_size
        try:
            for future in as_completed(futures):
                try:
                    yield future.result()
                except UltrasweepError as error:
                    yield error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _train_and_tell(run: Run, recipe: TrainingRecipe, device: str, first_gpu: int) -> list[dict[str, Any]]:
    start = time.perf_counter()
    rows = train_run(run, recipe, device, first_gpu)
    first, last = rows[0], rows[-1]
    held_out = "" if last["held_out_loss"] is None else f", held-out {last['held_out_loss']:.4f}"
    print(
        f"{run.name}: loss {first['loss']:.4f} -> {last['loss']:.4f}{held_out} ({time.perf_counter() - start:.0f} s)",
        flush=True,
    )
    return rows


def _tell(apart: Iterable[Distance]) -> None:
    table = plain_table(title="largest differences of the loss, nats a token, with what is allowed")
    for name in ("run", "against"):
        table.add_column(name)
    first, mean = f"steps 0-{FIRST_STEPS - 1}", f"mean of {WINDOW}"
    for name in (first, "allowed", mean, "allowed", "end", "held out", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("")
    for d in apart:
        mean, held_out = ("" if value is None else f"{value:.4f}" for value in (d.mean, d.held_out))
        numbers = (f"{d.first:.5f}", f"{d.band.first:g}", mean, f"{d.band.mean:g}", f"{d.end:.4f}", held_out)
        table.add_row(d.run, d.reference, *numbers, f"{d.band.end:g}", "" if d.is_inside else "outside")
    if table.row_count:
        open_console().print(table)


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        prog="python -m docs.tools.curves",
        description="Trains small models on a real text in every precision and layout, one run after the other, and "
        "says how far their losses are apart. Exit status 1: a run failed, or is outside of its band.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=command_line.path, required=True, metavar="FILE", help="Parquet file to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=TrainingRecipe().steps, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--learning-rate",
        type=float,
        default=TrainingRecipe().learning_rate,
        metavar="RATE",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="runs with this in their name; may be given several times"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at the same time; default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
