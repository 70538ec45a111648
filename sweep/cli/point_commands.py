"""Commands about points that have been planned or run: explain, diff, export, card, verify."""

from __future__ import annotations

import sys
from argparse import Namespace

from results.errors import UltrasweepError
from results.text.command_line import Parser, path
from results.text.numbers import plural
from results.text.printable import printable
from results.text.terminal import open_console
from sweep.cli.command import EXPERIMENT_ID, Command, add_conf, add_json, add_results
from sweep.cli.help_texts import CARD_EXAMPLES, EXPORT_EXAMPLES, VERIFY_EXAMPLES

ENGINES = ("torchtitan", "torchtitan-0.2", "megatron", "nanotron", "deepspeed", "transformers")


def _explain_arguments(parser: Parser) -> None:
    parser.add_argument("id", help=EXPERIMENT_ID)
    parser.add_argument(
        "--memory", action="store_true", help="show the allocations and frees that lead to the predicted peak instead"
    )
    add_results(parser)
    add_conf(parser, "cluster/ and grid/")
    add_json(parser)


def _explain(options: Namespace) -> int:
    from sweep.composing.conffiles import ConfFolders
    from sweep.inspecting.explain import print_explanation
    from sweep.inspecting.lookup import Results

    folders = ConfFolders(tuple(options.conf))
    if options.json:
        from sweep.inspecting.explain_json import explanation_json, memory_json

        record = Results(options.results).find(options.id)
        print(memory_json(record) if options.memory else explanation_json(record, options.results, folders))
        return 0
    if options.memory:
        from sweep.inspecting.explain_memory import print_memory

        print_memory(Results(options.results).find(options.id), open_console())
        return 0
    print_explanation(Results(options.results).find(options.id), options.results, folders, open_console())
    return 0


EXPLAIN = Command(
    name="explain",
    description="Show everything known about one point: configuration, verdict, prediction, attempts.",
    arguments=_explain_arguments,
    run=_explain,
)


def _diff_arguments(parser: Parser) -> None:
    parser.add_argument("first", help=EXPERIMENT_ID)
    parser.add_argument("second", help="id of the other experiment")
    add_results(parser)


def _diff(options: Namespace) -> int:
    from sweep.inspecting.difference import print_difference
    from sweep.inspecting.lookup import Results

    results = Results(options.results)
    print_difference(results.find(options.first), results.find(options.second), open_console())
    return 0


DIFF = Command(
    name="diff",
    description="Show how two points differ, with their predictions and measurements.",
    arguments=_diff_arguments,
    run=_diff,
)


def _export_arguments(parser: Parser) -> None:
    parser.add_argument("id", help=EXPERIMENT_ID)
    parser.add_argument("--to", choices=ENGINES, required=True, help="target engine")
    parser.add_argument(
        "--out", type=path, metavar="FOLDER", help="write the files and NOTES.txt to this folder (default: print them)"
    )
    add_results(parser)


def _export(options: Namespace) -> int:
    from sweep.engine_configs.export import engine_config, print_config
    from sweep.inspecting.lookup import Results

    record = Results(options.results).find(options.id)
    config = engine_config(record.experiment, options.to, record.id)
    print_config(config, options.out)
    return 0


EXPORT = Command(
    name="export",
    description=(
        "Write a point's layout as another training engine's configuration. For torchtitan 0.3.0 (Python) or, before\n"
        "torch 2.13, torchtitan 0.2.2 (TOML), Megatron-Core 0.19.2 (flags), nanotron (YAML), DeepSpeed 0.19.8 (JSON)\n"
        "or transformers 5.24.0 with accelerate 1.15.0 (YAML and a script). A layout that the engine cannot run is\n"
        "refused with the name of the field. Exit code: 0 written, 2 the engine cannot run the layout."
    ),
    arguments=_export_arguments,
    run=_export,
    epilog=EXPORT_EXAMPLES,
)


def _card_arguments(parser: Parser) -> None:
    parser.add_argument(
        "id", nargs="?", help="an experiment's id, or a part that only it has, such as its last 8 digits"
    )
    parser.add_argument("--all", action="store_true", help="write every finished point of --results, one card each")
    parser.add_argument("--out", type=path, metavar="FILE", help="write the cards there (default: print them)")
    add_results(parser)


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


CARD = Command(
    name="card",
    description=(
        "Write a finished point as a card (YAML): what ran, on what, and within which bands another run passes."
    ),
    arguments=_card_arguments,
    run=_card,
    epilog=CARD_EXAMPLES,
)


def _verify_arguments(parser: Parser) -> None:
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
    add_conf(parser, "model/")


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

    if options.write:
        raise UltrasweepError("--bisect records nothing in the card; leave out --write, or --bisect")
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
            lambda root, card: run_code(root, card, overrides, Path(results), options.conf),
        )
    print(printable(f"first commit that fails the card: {first}"))
    return 0


VERIFY = Command(
    name="verify",
    description=(
        "Run cards again and check each result against the card; list the differences if it fails. Exit code: 0 all\n"
        "passed (or --bisect has found the commit), 1 one failed, 2 a mistake, 130 interrupted."
    ),
    arguments=_verify_arguments,
    run=_verify,
    epilog=VERIFY_EXAMPLES,
)
