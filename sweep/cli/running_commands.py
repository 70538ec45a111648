"""Commands that run points: run, search, parity, probe."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable

from results.errors import UltrasweepError
from results.text.command_line import Parser, path
from results.text.terminal import open_console
from sweep.cli.command import Command, add_conf, add_overrides_of_a_sweep, positive
from sweep.cli.help_texts import OVERRIDES, PARITY_EXAMPLES, PROBE_EXAMPLES, SEARCH_EXAMPLES


def _run_arguments(parser: Parser) -> None:
    add_overrides_of_a_sweep(parser)
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    parser.add_argument("--detach", action="store_true", help="Slurm: return as soon as the jobs are submitted")


def _run(options: Namespace) -> int:
    from sweep.composing.conffiles import ConfFolders
    from sweep.running.run import enqueued, lost_points, prepare
    from sweep.running.run_end import print_end
    from sweep.running.run_messages import print_start
    from sweep.running.start import only_shown, start

    prepared = prepare(options.overrides, ConfFolders(tuple(options.conf)), options.where)
    console = open_console()
    if options.detach and prepared.slurm is None:
        raise UltrasweepError("--detach needs launcher=slurm: a run on this machine ends with this command")
    if only_shown(prepared, console):
        return 0
    live = False if options.plain else None
    with enqueued(prepared) as queued:
        print_start(prepared, queued, console)
        summary = start(prepared, queued, live=live, command=options.command_line, detach=options.detach)
        if not summary.detached and (lost := lost_points(prepared, queued.sweep)):
            summary = summary.with_message(lost)
    print_end(queued.sweep, summary, options.command_line, console)
    return summary.exit_code


RUN = Command(
    name="run",
    description=(
        "Plan, then run every point that is worth running: on this machine, or through Slurm. Ctrl-C stops cleanly,\n"
        "and the same command resumes the run. Under Slurm, Ctrl-C only stops watching."
    ),
    arguments=_run_arguments,
    run=_run,
    epilog=OVERRIDES,
)


def _search_arguments(parser: Parser) -> None:
    add_overrides_of_a_sweep(parser)
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


def _search(options: Namespace) -> int:
    if options.replay is not None:
        return _replay(options)
    if options.out is not None:
        raise UltrasweepError("--out needs --replay: without it the rows of a search are in its sweep's folder")
    from launchers.status.run_summary import RunSummary
    from sweep.composing.conffiles import ConfFolders
    from sweep.running.run import Queued
    from sweep.running.start import only_shown, start
    from sweep.searching.search_run import first_points, prepare_search, print_search, run_search

    search = prepare_search(options.overrides, ConfFolders(tuple(options.conf)), options.where)
    console = open_console()
    if only_shown(search.prepared, console, lambda _: first_points(search)):
        return 0
    live = False if options.plain else None

    def launch(queued: Queued, feed: Callable[[], str]) -> RunSummary:
        most = search.most_points
        return start(search.prepared, queued, live=live, command=options.command_line, feed=feed, most_points=most)

    result = run_search(search, launch, lambda line: console.print(line, markup=False, highlight=False))
    print_search(search, result, console)
    return result.summary.exit_code if result.summary is not None else 0


def _replay(options: Namespace) -> int:
    from sweep.composing.conffiles import ConfFolders
    from sweep.composing.config import compose_search
    from sweep.predicting.predict_table import write_predictions
    from sweep.searching.search_replay import check_replay, print_replay, replay_table, rows

    if options.where:
        raise UltrasweepError(f"--where {options.where[0]}: a replay looks at all rows of its table; leave it out")
    check_replay(options.overrides, options.out)
    settings = compose_search(options.overrides)
    replayed = replay_table(options.replay, settings, ConfFolders(tuple(options.conf)))
    console = open_console(soft_wrap=True)
    print_replay(replayed, settings, console)
    if options.out is not None:
        write_predictions(rows(replayed), options.out)
        console.print(f"runs: {options.out}", markup=False, highlight=False)
    return 0


SEARCH = Command(
    name="search",
    description=(
        "Find the fastest layout of each model and size with few runs. It runs a few points at a time, chosen from\n"
        "the results so far, until a better layout is improbable. The same command resumes it. With --replay nothing\n"
        "runs: the search is simulated on a table of finished runs and compared with other strategies."
    ),
    arguments=_search_arguments,
    run=_search,
    epilog=f"{SEARCH_EXAMPLES}\n{OVERRIDES}",
)


def _parity_arguments(parser: Parser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="NAME=VALUE",
        help="fields of both sides: model=NAME (required), model.num_layers=2 or another model size, seq_len (default: "
        "128), global_batch_size (8), precision=fp64, fp32 or bf16 (fp32), seed; also fields of a layout",
    )
    parser.add_argument("--left", default="", metavar="FIELDS", help="the left layout (default: one rank)")
    parser.add_argument("--right", required=True, metavar="FIELDS", help='the right layout, e.g. "tp=2 pp=2 dp=2"')
    parser.add_argument("--steps", type=positive, default=2, metavar="N", help="optimizer steps (default: 2)")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="CPU processes or GPUs (default: GPUs if there are any)"
    )
    add_conf(parser, "model/")


def _parity(options: Namespace) -> int:
    from sweep.composing.conffiles import ConfFolders
    from sweep.running.parity import print_comparison, read_pair
    from workloads.rules.installed_packages import require_torch

    require_torch("parity")
    folders = ConfFolders(tuple(options.conf))
    pair = read_pair(options.overrides, options.left, options.right, folders, options.device, options.steps)
    from workloads.parity.run import compare_layouts  # only this import needs torch

    compared = compare_layouts(pair.left, pair.right, options.steps, pair.device)
    print_comparison(compared, open_console())
    return 0 if compared.first is None else 1


PARITY = Command(
    name="parity",
    description=(
        "Train two layouts of one model from the same seed and batches, and compare every tensor. Exit code: 0 they\n"
        "agree within rounding, 1 they differ (the first differing tensor is named), 2 they cannot be compared."
    ),
    arguments=_parity_arguments,
    run=_parity,
    epilog=PARITY_EXAMPLES,
)


def _probe_arguments(parser: Parser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="cluster=NAME, launcher=local or slurm and its options, model=NAME (its matrix shapes are measured), "
        "results_dir=DIR",
    )
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes to measure at once (default: 1)")
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    add_conf(parser, "cluster/")


def _probe(options: Namespace) -> int:
    import time

    from sweep.composing.conffiles import ConfFolders
    from sweep.running.probe import headlines, prepare_probe, store_probe
    from sweep.running.run import enqueue
    from sweep.running.start import only_shown, start

    started = time.monotonic()
    prepared = prepare_probe(options.overrides, ConfFolders(tuple(options.conf)), options.nodes)
    console = open_console()
    if only_shown(prepared, console):
        return 0
    queued = enqueue(prepared)
    summary = start(prepared, queued, live=False if options.plain else None, command=options.command_line)
    probe = store_probe(queued.sweep, prepared, options.command_line)
    for line in headlines(probe):
        console.print(line, highlight=False, markup=False)
    minutes = (time.monotonic() - started) / 60
    console.print(f"probe: {probe.describe()}, {minutes:.1f} minutes", highlight=False, markup=False)
    return summary.exit_code


PROBE = Command(
    name="probe",
    description=(
        "Measure the speed of this node's devices and links, in minutes, for later plans of its cluster. With\n"
        "launcher=slurm it measures nodes of the cluster through Slurm, as a sweep would run."
    ),
    arguments=_probe_arguments,
    run=_probe,
    epilog=PROBE_EXAMPLES,
)
