"""Commands that predict and run nothing: advise, plan, model, grade, predict."""

from __future__ import annotations

from argparse import Namespace

from results.errors import UltrasweepError
from results.text.command_line import Parser, names, path
from results.text.numbers import listed, plural
from results.text.printable import printable
from results.text.terminal import open_console
from sweep.cli.command import RESULTS, Command, add_conf, add_json, add_overrides_of_a_sweep, positive
from sweep.cli.help_texts import ADVISE_EXAMPLES, ADVISE_OVERRIDES, MODEL_EXAMPLES, OVERRIDES, PREDICT_EXAMPLES


def _advise_arguments(parser: Parser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="see below")
    parser.add_argument(
        "--top", type=positive, default=5, metavar="N", help="layouts shown for each number of GPUs (default: 5)"
    )
    parser.add_argument(
        "--optimise",
        metavar="OBJECTIVE",
        help="rank the layouts of all numbers of GPUs together, by time, by energy (joules a token) or by cost "
        "(GPU-hours a token); with tokens and days this choice comes first",
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="EXPR",
        help="a condition on the fields of a layout that it must meet: 'tp * cp <= 8'",
    )
    add_conf(parser, "model/")
    add_json(parser)


def _advise(options: Namespace) -> int:
    from sweep.advising.answer import answer
    from sweep.advising.question import read_question
    from sweep.advising.report import print_answer
    from sweep.composing.conffiles import ConfFolders

    question = read_question(options.overrides, ConfFolders(tuple(options.conf)), options.where)
    advice = answer(question, options.top, optimise=options.optimise)
    if options.json:
        from sweep.advising.advice_json import advice_json

        print(advice_json(advice))
        return 0
    print_answer(advice, open_console())
    return 0


ADVISE = Command(
    name="advise",
    description=(
        "Recommend the layouts that train a model fastest on a number of GPUs, of all that fit. Or, with tokens and\n"
        "days, the fewest GPUs and the least money to train so many tokens in time. Nothing runs: all numbers are\n"
        "predictions with 90 % intervals. The command that would measure the best layouts is printed, too."
    ),
    arguments=_advise_arguments,
    run=_advise,
    epilog=f"{ADVISE_EXAMPLES}\n{ADVISE_OVERRIDES}",
)


def _plan_arguments(parser: Parser) -> None:
    add_overrides_of_a_sweep(parser)
    parser.add_argument(
        "--out", type=path, metavar="FILE", help="write every point: FILE.parquet (a ledger) or FILE.csv"
    )
    parser.add_argument(
        "--top",
        type=positive,
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
    add_json(parser)


def _plan(options: Namespace) -> int:
    from results.tables.schema import VERDICTS
    from results.text.secrets import hide_in_arguments
    from sweep.composing.conffiles import ConfFolders
    from sweep.composing.machine import this_machine
    from sweep.planning.best_layouts import parse_order, print_best
    from sweep.planning.ledger import check_ledger_path, write_ledger_file
    from sweep.planning.plan import refuse_if_nothing_can_run
    from sweep.planning.summary import cannot_run_here, print_plan
    from sweep.running.plan_only import plan_only
    from workloads.spec.checks import suggest

    order = parse_order(options.sort) if options.sort is not None else None
    for name in options.show:
        if name not in (*VERDICTS, "all"):
            raise UltrasweepError(f"--show {name}: no such verdict{suggest(name, (*VERDICTS, 'all'))}")
    if options.out is not None:
        check_ledger_path(options.out)
    plan = plan_only(options.overrides, ConfFolders(tuple(options.conf)), options.where)
    if options.out is not None:
        conf = [word for folder in options.conf for word in ("--conf", str(folder))]
        where = [word for condition in options.where for word in ("--where", condition)]
        words = hide_in_arguments([*conf, *where, *options.overrides])
        write_ledger_file(options.out, plan, words)
    if not options.show:
        refuse_if_nothing_can_run(plan)
    verdicts = VERDICTS if "all" in options.show else options.show
    if options.json:
        from sweep.planning.plan_json import plan_json

        print(plan_json(plan, this_machine().num_gpus, top=options.top, order=order, verdicts=verdicts))
        refuse_if_nothing_can_run(plan)
        return 0
    console = open_console()
    print_plan(plan, console)
    if (note := cannot_run_here(plan, this_machine().num_gpus)) is not None:
        console.print(note, highlight=False, markup=False)
    print_best(plan, console, top=options.top, order=order, verdicts=verdicts)
    if options.out is not None:
        console.print(f"ledger: {options.out}", highlight=False, markup=False)
    refuse_if_nothing_can_run(plan)  # if --show has listed the reasons first
    return 0


PLAN = Command(
    name="plan",
    description=(
        "Show every point of the grids with its verdict, predicted memory and speed, and price. Nothing is run."
    ),
    arguments=_plan_arguments,
    run=_plan,
    epilog=OVERRIDES,
)


def _model_arguments(parser: Parser) -> None:
    parser.add_argument("path", type=path, metavar="PATH", help="a config.json of Hugging Face, or its folder")
    parser.add_argument("--out", type=path, metavar="FILE", help="write conf/model/NAME.yaml, for model=NAME")
    parser.add_argument(
        "--without-mtp",
        action="store_true",
        help="with --out: without the modules of multi-token prediction that PATH names",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _model(options: Namespace) -> int:
    from results.shared_filesystem.whole_files import write_output
    from sweep.inspecting.published import print_model, to_json, to_yaml
    from workloads.spec.config_json.read import config_path, read_config

    model = read_config(options.path)
    if options.out is not None:
        if options.out.suffix != ".yaml":
            raise UltrasweepError(f"--out {options.out}: a file of conf/model ends in .yaml")
        write_output(options.out, to_yaml(model, options.out, config_path(options.path), ahead=not options.without_mtp))
    if options.json:
        print(to_json(model), end="")
        return 0
    console = open_console()
    print_model(model, console)
    if options.out is not None:
        console.print(printable(f"written: {options.out}"), highlight=False, markup=False)
    return 0


MODEL = Command(
    name="model",
    description=(
        "Show what a model's config.json describes: parameters, kinds of layers, FLOPs. Also what of it cannot be\n"
        "run yet, by name. Exit code: 0 read, 2 a field is not understood."
    ),
    arguments=_model_arguments,
    run=_model,
    epilog=MODEL_EXAMPLES,
)


def _grade_arguments(parser: Parser) -> None:
    parser.add_argument(
        "path", type=path, nargs="?", default=RESULTS, help="folder of sweeps, or one sweep (default: results)"
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


GRADE = Command(
    name="grade",
    description=(
        "Compare every prediction with every measurement. Prints errors, ranking, interval coverage and\n"
        "out-of-memory verdicts, by depth of prediction and by axis."
    ),
    arguments=_grade_arguments,
    run=_grade,
)


def _predict_arguments(parser: Parser) -> None:
    parser.add_argument("table", type=path, metavar="TABLE", help="a CSV or Parquet file; columns: docs/predict.md")
    parser.add_argument(
        "--calibrate",
        type=path,
        metavar="ROWS",
        help="rows with the same columns and status, step_time_s, reserved_gib: the prediction is fitted only on these",
    )
    parser.add_argument("--out", type=path, metavar="FILE", required=True, help="FILE.parquet or FILE.csv")
    add_conf(parser, "cluster/")


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


PREDICT = Command(
    name="predict",
    description=(
        "Predict step time, memory and whether it fits for every row of any table of training configurations. A row\n"
        "that cannot be predicted gets a reason. Exit code: 0 predictions were written, 2 the table cannot be read."
    ),
    arguments=_predict_arguments,
    run=_predict,
    epilog=PREDICT_EXAMPLES,
)
