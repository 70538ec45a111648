"""One function for each command of ``python -m sweep``, which calls the modules that do the work.

Each command imports the modules that it needs, so that it starts fast; only ``parity`` imports torch.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from results.errors import UltrasweepError
from results.text.command_line import InvalidOption
from results.text.numbers import listed, plural
from results.text.printable import printable
from results.text.terminal import open_console
from sweep.cli.parsers import PARSERS


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Parse the arguments of one command, run it and return its exit code. Raises `UltrasweepError` for wrong
    arguments."""
    try:
        options = PARSERS[name]().parse_intermixed_args(list(arguments))
    except InvalidOption as error:
        from sweep.cli.dashes import hint

        how = hint(name, str(error), arguments)
        raise InvalidOption(f"{error}; {how}" if how else str(error)) from None
    options.command_line = _command_line(name, arguments)
    return COMMANDS[name](options)


def _plan(options: Namespace) -> int:
    from results.tables.schema import VERDICTS
    from sweep.composing.conffiles import ConfFolders
    from sweep.composing.config import compose_sweep
    from sweep.composing.machine import Machine, default_launcher, method_of
    from sweep.planning.assemble import plan_sweep
    from sweep.planning.best_layouts import parse_order, print_best
    from sweep.planning.ledger import check_ledger_path, write_ledger_file
    from sweep.planning.plan import refuse_if_nothing_can_run
    from sweep.planning.summary import print_plan
    from sweep.running.launch import launch_options
    from workloads.spec.checks import suggest

    order = parse_order(options.sort) if options.sort is not None else None
    for name in options.show:
        if name not in (*VERDICTS, "all"):
            raise UltrasweepError(f"--show {name}: no such verdict{suggest(name, (*VERDICTS, 'all'))}")
    if options.out is not None:
        check_ledger_path(options.out)
    config = compose_sweep(
        options.overrides, ConfFolders(tuple(options.conf)), extra_where=options.where, launcher=default_launcher()
    )
    # Report mistakes in the launcher's options before planning, whatever this machine is.
    _, slurm = launch_options(config, Machine(gpu_name=None, num_gpus=config.cluster.devices_per_node))
    plan = plan_sweep(config, method_of(config), slurm, devices_here=None)
    if options.out is not None:
        write_ledger_file(options.out, plan)
    if not options.show:
        refuse_if_nothing_can_run(plan)
    console = open_console()
    print_plan(plan, console)
    verdicts = VERDICTS if "all" in options.show else options.show
    print_best(plan, console, top=options.top, order=order, verdicts=verdicts)
    if options.out is not None:
        console.print(f"ledger: {options.out}", highlight=False, markup=False)
    refuse_if_nothing_can_run(plan)  # if --show has listed the reasons first
    return 0


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


def _status(options: Namespace) -> int:
    from sweep.inspecting.status import print_status

    print_status(options.path, open_console())
    return 0


def _watch(options: Namespace) -> int:
    from launchers.slurm.watch import watch
    from launchers.state.sweep_dir import SweepDir
    from sweep.running.run_end import print_end

    sweep = SweepDir.open(options.path, with_queue=True)
    summary = watch(sweep, live=False if options.plain else None)
    print_end(sweep, summary, "", open_console())
    if summary.detached:
        print(f"{plural(summary.left, 'point')} left; stopped watching, the sweep goes on")
    return summary.exit_code


def _cancel(options: Namespace) -> int:
    from launchers.slurm.cancel import cancel
    from launchers.state.submissions import cancel_mark
    from launchers.state.sweep_dir import SweepDir

    sweep = SweepDir.open(options.path)
    mark = cancel_mark(sweep)
    count = cancel(sweep, lambda line: print(printable(line)))
    if count:
        print(f"{plural(count, 'pilot')} cancelled; what they ran waits again, `run` resumes it")
    elif cancel_mark(sweep) != mark:
        print("Slurm has no pilot of this sweep; commands that watch it stop and submit none")
    else:
        print("nothing to cancel: Slurm has no pilot of this sweep (to stop a local run, press Ctrl-C there)")
    return 0


def _logs(options: Namespace) -> int:
    from sweep.inspecting.logs import print_logs

    print_logs(options.results, options.id, open_console(), rank=options.rank, lines=options.lines)
    return 0


def _retry(options: Namespace) -> int:
    from sweep.inspecting.retry import check_outcomes, resume_paused, retry_points

    if options.paused and not options.which and not options.outcome:
        resume_paused(options.path)
        print("no kind of point is paused any more; repeat the `run` command to run the waiting points")
        return 0
    check_outcomes(options.outcome)
    count = retry_points(options.path, [*options.which, *options.outcome])
    hint = "repeat the `run` command to run them" if count else "kinds of points that were paused may run again"
    print(f"{plural(count, 'point')} requeued; {hint}")
    return 0


def _explain(options: Namespace) -> int:
    from sweep.inspecting.explain import print_explanation
    from sweep.inspecting.lookup import Results

    print_explanation(Results(options.results).find(options.id), options.results, open_console())
    return 0


def _diff(options: Namespace) -> int:
    from sweep.inspecting.explain import print_difference
    from sweep.inspecting.lookup import Results

    results = Results(options.results)
    print_difference(results.find(options.first), results.find(options.second), open_console())
    return 0


def _export(options: Namespace) -> int:
    from sweep.engine_configs.export import engine_config, print_config
    from sweep.inspecting.lookup import Results

    record = Results(options.results).find(options.id)
    config = engine_config(record.experiment, options.to, record.id)
    print_config(config, options.out)
    return 0


def _card(options: Namespace) -> int:
    from results.shared_filesystem.whole_files import write_output
    from sweep.cards.card import to_yaml
    from sweep.cards.make import make_card, make_cards
    from sweep.inspecting.lookup import Results

    if (options.id is None) != options.all:
        raise UltrasweepError("card takes either an experiment's id or --all; python -m sweep card --help has examples")
    results = Results(options.results)
    cards = make_cards(results) if options.all else [make_card(results.find(options.id))]
    text = to_yaml(cards)
    without = [card for card in cards if card.expected["step_time_s"].high is None]
    for card in without[:3]:
        print(printable(f"warning: {card.id}: {card.bands_from}; verify cannot judge its speed"), file=sys.stderr)
    if len(without) > 3:
        print(f"warning: {len(without) - 3:,} more cards have no band of the step time", file=sys.stderr)
    if options.out is None:
        print(printable(text, keep="\n"), end="")
        return 0
    write_output(options.out, text)
    print(
        printable(f"{plural(len(cards), 'card')}: {options.out}; python -m sweep verify {options.out} runs them again")
    )
    return 0


def _verify(options: Namespace) -> int:
    from pathlib import Path

    from sweep.cards.verify import announce_bisect, run_card, selected, split_arguments, verify_cards
    from sweep.composing.conffiles import ConfFolders

    files, overrides = split_arguments(options.cards)
    cards = selected(files, options.only)
    if options.bisect is None:
        folders, live = ConfFolders(tuple(options.conf)), False if options.plain else None
        passed = verify_cards(
            cards,
            overrides,
            lambda card, words: run_card(card, words, folders, live, options.command_line),
            options.write,
        )
        return 0 if passed else 1
    from tempfile import TemporaryDirectory

    from sweep.cards.bisect import first_slower, run_code

    if any(word.lower() == "launcher.dry=true" for word in overrides):
        raise UltrasweepError("--bisect runs the card with several commits; leave out launcher.dry=true, or --bisect")
    if len(cards) != 1:
        raise UltrasweepError(f"--bisect takes one card, not {len(cards)}; pick one with --only ID")
    announce_bisect(cards[0][1], overrides)
    with TemporaryDirectory(prefix="ultrasweep-bisect-results-") as results:
        first = first_slower(
            Path(__file__).resolve().parents[2],
            options.bisect,
            cards[0][1],
            lambda root, card: run_code(root, card, overrides, Path(results)),
        )
    print(printable(f"first commit that fails the card: {first}"))
    return 0


def _grade(options: Namespace) -> int:
    from results.statistics.grade import AXES, grades, oom_curve
    from sweep.predicting.grade import check_out, print_grades, read, write
    from workloads.spec.checks import suggest

    if options.out is not None:
        check_out(options.out)
    for name in options.by:
        if name not in AXES:
            raise UltrasweepError(f"--by {name}: no such axis{suggest(name, AXES)}")
    pairs, points = read(options.path, options.predictions, options.against)
    table = grades(pairs)
    curve = oom_curve(points) if len(points) else points
    console = open_console()
    print_grades(table, curve, console, options.by)
    if options.out is not None:
        write(options.out, table, curve, pairs)
        console.print(f"grades: {options.out}", highlight=False, markup=False)
    return 0


def _predict(options: Namespace) -> int:
    from sweep.composing.conffiles import ConfFolders
    from sweep.predicting.predict_table import check_out, predict_frame, read_table, unread_columns, write_predictions

    check_out(options.out, [path for path in (options.table, options.calibrate) if path is not None])
    frame = read_table(options.table)
    calibration = read_table(options.calibrate) if options.calibrate is not None else None
    outcome = predict_frame(frame, calibration, ConfFolders(tuple(options.conf)) if options.conf else None)
    write_predictions(outcome.predictions, options.out)
    console = open_console(soft_wrap=True)
    if unread := unread_columns(frame):
        console.print(printable(f"ignored columns: {listed(unread, 20)}"), markup=False, highlight=False)
    for mistake in outcome.mistakes:
        console.print(printable(mistake), markup=False, highlight=False)
    fitted = f", fitted on {plural(outcome.fitted_on, 'row')}" if calibration is not None else ""
    predicted = int(outcome.predictions["step_time_s"].notna().sum())
    console.print(
        f"{options.out}: {predicted} of {plural(len(frame), 'row')} predicted{fitted}", markup=False, highlight=False
    )
    return 0


def _advise(options: Namespace) -> int:
    from sweep.advising.answer import answer
    from sweep.advising.question import read_question
    from sweep.advising.report import print_answer
    from sweep.composing.conffiles import ConfFolders

    question = read_question(options.overrides, ConfFolders(tuple(options.conf)))
    print_answer(answer(question, options.top), open_console())
    return 0


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
        return start(search.prepared, queued, live=live, command=options.command_line, feed=feed)

    result = run_search(search, launch, lambda line: console.print(line, markup=False, highlight=False))
    print_search(search, result, console)
    return result.summary.exit_code if result.summary is not None else 0


def _replay(options: Namespace) -> int:
    from sweep.composing.config import compose_search
    from sweep.predicting.predict_table import write_predictions
    from sweep.searching.search_replay import check_replay, print_replay, replay_table, rows

    check_replay(options.overrides, options.out)
    settings = compose_search(options.overrides)
    replayed = replay_table(options.replay, settings)
    console = open_console(soft_wrap=True)
    print_replay(replayed, settings, console)
    if options.out is not None:
        write_predictions(rows(replayed), options.out)
        console.print(f"runs: {options.out}", markup=False, highlight=False)
    return 0


def _parity(options: Namespace) -> int:
    from sweep.composing.conffiles import ConfFolders
    from sweep.running.parity import print_comparison, read_pair

    folders = ConfFolders(tuple(options.conf))
    pair = read_pair(options.overrides, options.left, options.right, folders, options.device, options.steps)
    from workloads.parity.run import compare_layouts  # only this import needs torch

    compared = compare_layouts(pair.left, pair.right, options.steps, pair.device)
    print_comparison(compared, open_console())
    return 0 if compared.first is None else 1


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


COMMANDS: dict[str, Callable[[Namespace], int]] = {
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


def _command_line(name: str, arguments: Sequence[str]) -> str:
    from results.tables.provenance import command_line

    return command_line(["python", "-m", "sweep", name, *arguments])
