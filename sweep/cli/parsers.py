"""Options and help of every command of ``python -m sweep``. `sweep.cli.commands` does the work.

Only argparse is imported here, so that ``--help`` and mistakes answer at once. The reference of the command line
(`docs.tools.write_reference`) is made from these parsers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from results.text.command_line import Parser, names, path
from sweep.cli.help_texts import (
    ADVISE_EXAMPLES,
    ADVISE_OVERRIDES,
    CARD_EXAMPLES,
    EXAMPLES,
    EXPORT_EXAMPLES,
    OVERRIDES,
    PARITY_EXAMPLES,
    PREDICT_EXAMPLES,
    PROBE_EXAMPLES,
    SEARCH_EXAMPLES,
    VERIFY_EXAMPLES,
)

ENGINES = ("torchtitan", "megatron", "nanotron", "deepspeed")
_SWEEP_PATH = "the sweep's folder, e.g. results/tiny"
_EXPERIMENT_ID = "an experiment's id, or a unique part of it, such as the hash at its end"
_RESULTS = Path("results")


def help_text() -> str:
    """Text of ``python -m sweep --help``: every command in one line, examples, and the overrides."""
    first_sentences = {name: (make().description or "").partition(". ")[0] for name, make in PARSERS.items()}
    commands = "\n".join(f"  {name:8} {sentence.rstrip('.')}" for name, sentence in first_sentences.items())
    return (
        "usage: python -m sweep COMMAND [OVERRIDE ...] [options]\n\n"
        f"Plan and run sweeps over the parallel layouts of LLM training.\n\n{commands}\n\n{EXAMPLES}\n{OVERRIDES}\n"
        "python -m sweep COMMAND --help has the options of each command."
    )


def _plan() -> Parser:
    parser = _sweep_parser(
        "plan", "Show every point of the grids with its verdict, predicted memory and speed, and price. Nothing is run."
    )
    parser.add_argument(
        "--out", type=path, metavar="FILE", help="write every point: FILE.parquet (a ledger) or FILE.csv"
    )
    parser.add_argument(
        "--top",
        type=_positive,
        metavar="N",
        help="list the N predicted fastest points of each model and size (default: 10, or fewer if there are many "
        "models and sizes); with --sort, the first N of all points",
    )
    parser.add_argument(
        "--sort",
        metavar="COLUMN[:asc|:desc]",
        help="list points by a column of the ledger, e.g. predicted_peak_bytes:asc",
    )
    parser.add_argument(
        "--show",
        type=names,
        default=(),
        metavar="VERDICT,...",
        help="list points with these verdicts and their reasons, e.g. invalid,predicted_oom, or all (default: points "
        "that can run)",
    )
    return parser


def _run() -> Parser:
    parser = _sweep_parser(
        "run",
        "Plan, then run every point that is worth running: on this machine, or through Slurm. Ctrl-C stops cleanly,\n"
        "and the same command resumes the run. Under Slurm, Ctrl-C only stops watching.",
    )
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    parser.add_argument("--detach", action="store_true", help="Slurm: return as soon as the jobs are submitted")
    return parser


def _status() -> Parser:
    parser = _parser("status", "Show the progress of the sweeps below a folder, from their files and from Slurm.")
    parser.add_argument(
        "path",
        type=path,
        nargs="?",
        default=_RESULTS,
        help="a sweep or a folder of sweeps (default: results)",
    )
    return parser


def _watch() -> Parser:
    parser = _parser("watch", "Follow a sweep, wherever it runs, until no point is left. Ctrl-C only stops watching.")
    parser.add_argument("path", type=path, help=_SWEEP_PATH)
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    return parser


def _logs() -> Parser:
    parser = _parser("logs", "Show the last log lines of the ranks and the pilot of a point's newest attempt.")
    parser.add_argument("id", help="id of an experiment or attempt, or a part of it that is unique")
    _add_results(parser, "folder of sweeps, or one sweep (default: results)")
    parser.add_argument("--rank", type=_not_negative, metavar="N", help="show only this rank's log")
    parser.add_argument("--lines", type=_positive, default=20, metavar="N", help="lines of each log (default: 20)")
    return parser


def _cancel() -> Parser:
    parser = _parser(
        "cancel",
        "Cancel a sweep's Slurm jobs; unfinished points stay in its queue. Running points get a row with the outcome\n"
        "preempted. To resume, repeat the `run` command.",
    )
    parser.add_argument("path", type=path, help=_SWEEP_PATH)
    return parser


def _retry() -> Parser:
    parser = _parser("retry", "Requeue finished points of a sweep. Repeat its `run` command to run them.")
    parser.add_argument("path", type=path, help=_SWEEP_PATH)
    parser.add_argument(
        "which", nargs="*", help="outcomes (crash, hang ...) or ids (default: all outcomes except ok and oom)"
    )
    parser.add_argument(
        "--outcome", action="append", default=[], metavar="OUTCOME", help="an outcome; unlike `which`, never an id"
    )
    parser.add_argument(
        "--paused", action="store_true", help="only unpause paused kinds of points (every retry does), requeue nothing"
    )
    return parser


def _explain() -> Parser:
    parser = _parser("explain", "Show everything known about one point: configuration, verdict, prediction, attempts.")
    parser.add_argument("id", help=_EXPERIMENT_ID)
    _add_results(parser)
    return parser


def _diff() -> Parser:
    parser = _parser("diff", "Show how two points differ, with their predictions and measurements.")
    parser.add_argument("first", help=_EXPERIMENT_ID)
    parser.add_argument("second", help="id of the other experiment")
    _add_results(parser)
    return parser


def _export() -> Parser:
    parser = _parser(
        "export",
        "Write a point's layout as another training engine's configuration. For torchtitan 0.2.2 (TOML), Megatron-LM\n"
        "core_v0.16.1 (flags), nanotron (YAML) or DeepSpeed 0.19.8 (JSON). A layout that the engine cannot run is\n"
        "refused with the name of the field. Exit code: 0 written, 2 the engine cannot run the layout.",
        EXPORT_EXAMPLES,
    )
    parser.add_argument("id", help=_EXPERIMENT_ID)
    parser.add_argument("--to", choices=ENGINES, required=True, help="target engine")
    parser.add_argument(
        "--out", type=path, metavar="FOLDER", help="write the files and NOTES.txt to this folder (default: print them)"
    )
    _add_results(parser)
    return parser


def _card() -> Parser:
    parser = _parser(
        "card",
        "Write a finished point as a card (YAML): what ran, on what, and within which bands another run passes.",
        CARD_EXAMPLES,
    )
    parser.add_argument(
        "id", nargs="?", help="an experiment's id, or a part that only it has, such as its last 8 digits"
    )
    parser.add_argument("--all", action="store_true", help="write every finished point of --results, one card each")
    parser.add_argument("--out", type=path, metavar="FILE", help="write the cards there (default: print them)")
    _add_results(parser)
    return parser


def _verify() -> Parser:
    parser = _parser(
        "verify",
        "Run cards again and check each result against the card; list the differences if it fails. Exit code: 0 all\n"
        "passed (or --bisect has found the commit), 1 one failed, 2 a mistake, 130 interrupted.",
        VERIFY_EXAMPLES,
    )
    parser.add_argument(
        "cards",
        nargs="+",
        metavar="CARD",
        help="card files, and overrides of `run` for all cards: launcher=slurm, launcher.partition=main, "
        "results_dir=DIR (default: results/verify)",
    )
    parser.add_argument("--only", metavar="ID", help="verify only the cards whose id contains this text")
    parser.add_argument("--write", action="store_true", help="record in the card that it passed on this device")
    parser.add_argument(
        "--bisect", metavar="GOOD..BAD", help="find the first commit between these two that fails the card"
    )
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    parser.add_argument(
        "--conf", action="append", default=[], type=path, metavar="DIR", help="folder with your own model/ files"
    )
    return parser


def _grade() -> Parser:
    parser = _parser(
        "grade",
        "Compare every prediction with every measurement. Prints errors, ranking, interval coverage and\n"
        "out-of-memory verdicts, by depth of prediction and by axis.",
    )
    parser.add_argument(
        "path", type=path, nargs="?", default=_RESULTS, help="folder of sweeps, or one sweep (default: results)"
    )
    parser.add_argument(
        "--out", type=path, metavar="FILE", help="write every pair (FILE.parquet), or pairs and grades (FILE.json)"
    )
    parser.add_argument(
        "--by",
        type=names,
        default=(),
        metavar="AXIS,...",
        help="tables by these axes only, e.g. tp,zero_stage, including memory (default: step times by every axis)",
    )
    parser.add_argument(
        "--predictions", type=path, metavar="FILE", help="also grade this file of predictions (Parquet or CSV)"
    )
    parser.add_argument(
        "--against",
        type=path,
        metavar="TABLE",
        help="the table that was predicted, in the same row order, with status, step_time_s and reserved_gib "
        "(default: rows below the folder, matched by experiment_id)",
    )
    return parser


def _predict() -> Parser:
    parser = _parser(
        "predict",
        "Predict step time, memory and whether it fits for every row of any table of training configurations. A row\n"
        "that cannot be predicted gets a reason. Exit code: 0 predictions were written, 2 the table cannot be read.",
        PREDICT_EXAMPLES,
    )
    parser.add_argument("table", type=path, metavar="TABLE", help="a CSV or Parquet file; columns: docs/accuracy.md")
    parser.add_argument(
        "--calibrate",
        type=path,
        metavar="ROWS",
        help="rows with the same columns and status, step_time_s, reserved_gib: the prediction is fitted only on these",
    )
    parser.add_argument("--out", type=path, metavar="FILE", required=True, help="FILE.parquet or FILE.csv")
    parser.add_argument(
        "--conf", action="append", default=[], type=path, metavar="DIR", help="folder with your own cluster/ files"
    )
    return parser


def _parity() -> Parser:
    parser = _parser(
        "parity",
        "Train two layouts of one model from the same seed and batches, and compare every tensor. Exit code: 0 they\n"
        "agree within rounding, 1 they differ (the first differing tensor is named), 2 they cannot be compared.",
        PARITY_EXAMPLES,
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="NAME=VALUE",
        help="fields of both sides: model=NAME (required), model.num_layers=2 or another model size, seq_len (default: "
        "128), global_batch_size (8), precision=fp64, fp32 or bf16 (fp32), seed; also fields of a layout",
    )
    parser.add_argument("--left", default="", metavar="FIELDS", help="the left layout (default: one rank)")
    parser.add_argument("--right", required=True, metavar="FIELDS", help='the right layout, e.g. "tp=2 pp=2 dp=2"')
    parser.add_argument("--steps", type=_positive, default=2, metavar="N", help="optimizer steps (default: 2)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="CPU processes or GPUs (default: GPUs if there are any)"
    )
    parser.add_argument(
        "--conf", action="append", default=[], type=path, metavar="DIR", help="folder with your own model/ files"
    )
    return parser


def _probe() -> Parser:
    parser = _parser(
        "probe",
        "Measure the speed of this node's devices and links, in minutes, for later plans of its cluster. With\n"
        "launcher=slurm it measures nodes of the cluster through Slurm, as a sweep would run.",
        PROBE_EXAMPLES,
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="cluster=NAME, launcher=local or slurm and its options, model=NAME (its matrix shapes are measured), "
        "results_dir=DIR",
    )
    parser.add_argument("--nodes", type=_positive, default=1, metavar="N", help="nodes to measure at once (default: 1)")
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    parser.add_argument(
        "--conf", action="append", default=[], type=path, metavar="DIR", help="folder with your own cluster/ files"
    )
    return parser


def _search() -> Parser:
    parser = _sweep_parser(
        "search",
        "Find the fastest layout of each model and size with few runs. It runs a few points at a time, chosen from\n"
        "the results so far, until a better layout is improbable. The same command resumes it. With --replay nothing\n"
        "runs: the search is simulated on a table of finished runs and compared with other strategies.",
        f"{SEARCH_EXAMPLES}\n{OVERRIDES}",
    )
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    parser.add_argument(
        "--replay",
        type=path,
        metavar="TABLE",
        help="a CSV or Parquet file with the columns of predict, status and step_time_s, or the study's raw table",
    )
    parser.add_argument(
        "--out",
        type=path,
        metavar="FILE",
        help="with --replay: write every run of every strategy, as FILE.parquet or FILE.csv",
    )
    return parser


def _advise() -> Parser:
    parser = _parser(
        "advise",
        "Recommend the layouts that train a model fastest on a number of GPUs, of all that fit. Or, with tokens and\n"
        "days, the fewest GPUs and the least money to train so many tokens in time. Nothing runs: all numbers are\n"
        "predictions with 90 % intervals. The command that would measure the best layouts is printed, too.",
        f"{ADVISE_EXAMPLES}\n{ADVISE_OVERRIDES}",
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="see below")
    parser.add_argument(
        "--top", type=_positive, default=5, metavar="N", help="layouts shown for each number of GPUs (default: 5)"
    )
    parser.add_argument(
        "--conf", action="append", default=[], type=path, metavar="DIR", help="folder with your own model/ files"
    )
    return parser


PARSERS: dict[str, Callable[[], Parser]] = {
    "advise": _advise,
    "plan": _plan,
    "run": _run,
    "status": _status,
    "watch": _watch,
    "logs": _logs,
    "cancel": _cancel,
    "retry": _retry,
    "explain": _explain,
    "diff": _diff,
    "export": _export,
    "card": _card,
    "verify": _verify,
    "grade": _grade,
    "predict": _predict,
    "search": _search,
    "parity": _parity,
    "probe": _probe,
}
"""The function that makes the parser of each command, in the order of the help."""


def _parser(command: str, description: str, epilog: str | None = None) -> Parser:
    return Parser(
        prog=f"python -m sweep {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _sweep_parser(command: str, description: str, epilog: str = OVERRIDES) -> Parser:
    parser = _parser(command, description, epilog)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="what to sweep, see below")
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="EXPR",
        help="one more condition: on axes and fields of a point (tp <= 4), or on its predictions "
        "(predicted_peak_bytes < 60e9)",
    )
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        type=path,
        metavar="DIR",
        help="folder with your own grid/, model/, cluster/ ... files",
    )
    return parser


def _add_results(
    parser: Parser, what: str = "folder of sweeps, one sweep, or a ledger written by plan --out (default: results)"
) -> None:
    parser.add_argument("--results", type=path, default=_RESULTS, metavar="PATH", help=what)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _not_negative(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
