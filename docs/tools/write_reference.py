"""``python -m docs.tools.write_reference``: writes the pages of ``docs/reference/`` from the code.

command_line.md     help of every command, from its parser
tables.md           columns of every table, from `results.tables.schema`
configuration.md    options with defaults and meaning, from the files and comments of ``sweep/conf``
python.md           functions and dataclasses of the package ``ultrasweep``, from their docstrings

A test fails if a page differs from the code.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa

from docs.tools.conf_comments import FileOptions, Option, read_options
from docs.tools.python_interface import interface_parts
from results.tables.reference import EXTRA_COLUMNS
from results.tables.rows import CHOICES
from results.tables.schema import ATTEMPT_COLUMNS, CONFIG_COLUMNS, LEDGER_COLUMNS, STEP_COLUMNS, Column
from sweep.cli.commands import COMMANDS, help_text
from sweep.cli.help_texts import OVERRIDES
from sweep.composing.conffiles import PACKAGED, ConfFolders
from workloads.costs.shape.params import num_params

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
COMMAND = "python -m docs.tools.write_reference"
_OTHER_COMMANDS = ("analysis.report", "analysis.compare")
"""Modules that this one may not import: their help is read from a separate process."""
_WIDTH = 100
_TYPES = {
    pa.string(): "text",
    pa.int64(): "whole number",
    pa.float64(): "number",
    pa.bool_(): "true or false",
    pa.timestamp("us", tz="UTC"): "time (UTC)",
}


def main() -> int:
    """Write every page; returns 0."""
    FOLDER.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
        print(FOLDER / name)
    return 0


def command_line() -> str:
    """Help of every command of ``python -m sweep``, of the report and of the comparison."""
    parts = [_heading("Command line"), _block(help_text())]
    for name, one in COMMANDS.items():
        parser = one.parser()
        # Fix the width: argparse would take the terminal's.
        parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, width=_WIDTH)
        if parser.epilog == OVERRIDES:
            parser.epilog = "overrides: see the top of this page"
        parts += [f"## sweep {name}", _block(parser.format_help())]
    for module in _OTHER_COMMANDS:
        environment = {**os.environ, "COLUMNS": str(_WIDTH)}
        command = [sys.executable, "-m", module, "--help"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
        parts += [f"## {module}", _block(done.stdout)]
    return _page(parts)


def tables() -> str:
    """Every column of every table."""
    shared = set(CONFIG_COLUMNS)
    return _page(
        [
            _heading("Tables"),
            "A sweep's folder holds three tables as Parquet files. Units and meanings are in the files too (field "
            "metadata). A value that is not known is null, never 0. GiB is 2³⁰ bytes; B/s and FLOP/s are SI.",
            "## attempts",
            "`attempts.parquet`: one row an attempt, failed ones too. It also has the columns of the configuration.",
            _columns(column for column in ATTEMPT_COLUMNS if column not in shared),
            "## steps",
            "`steps.parquet`: one row a step and rank, of the attempts that got to their steps.",
            _columns(STEP_COLUMNS),
            "## ledger",
            "`ledger.parquet`: one row a point of the plan. It also has the columns of the configuration.",
            _columns(column for column in LEDGER_COLUMNS if column not in shared),
            "## Configuration",
            "The columns that `attempts` and `ledger` have for what was, or would be, run.",
            _columns(CONFIG_COLUMNS),
            "## The published study",
            "Rows read from the table of the Ultra-Scale Playbook's study have the columns of `attempts` and these.",
            _columns(EXTRA_COLUMNS),
        ]
    )


def configuration() -> str:
    """Every option of a sweep, and the shipped grids, models and clusters."""
    folders = ConfFolders()
    whole = read_options(PACKAGED / "config.yaml")
    measures = {name: read_options(PACKAGED / "measure" / f"{name}.yaml") for name in folders.names("measure")}
    launchers = {name: read_options(PACKAGED / "launcher" / f"{name}.yaml") for name in folders.names("launcher")}
    parts = [
        _heading("Configuration"),
        "Every option can be given on the command line as `NAME=VALUE`, in Hydra's grammar: `plan.oom_margin=1.2`. New "
        "entries of `environment`, `phase_limits_s` and `sbatch` need no plus, others do. Options of a "
        "group can also stand in a file of your own, `DIR/launcher/NAME.yaml` with `--conf DIR launcher=NAME`.",
        "## The sweep",
        _options_table(option for section in whole.sections for option in section.options),
        "## Measuring: `measure=NAME`",
        _compared("measure", measures),
        "## Launchers: `launcher=NAME`",
        *(f"`{name}`: {_first(file.intro)}" for name, file in launchers.items()),
        "Options with their defaults; an empty cell means that the launcher has no such option.",
        _compared("launcher", launchers),
        "Options of `launcher=slurm` alone:",
        *_slurm_alone(launchers),
        "## Shipped grids: `+grid=NAME`",
        _table(("grid", "cluster", "what it is for"), _grids(folders)),
        "## Shipped models: `model=NAME`",
        _table(("model", "parameters", "layers", "hidden size", "experts"), _models(folders)),
        "## Shipped clusters: `cluster=NAME`",
        _table(("cluster", "what it describes"), _clusters(folders)),
    ]
    return _page(parts)


def python() -> str:
    """The Python interface."""
    return _page([_heading("Python"), *interface_parts()])


PAGES: dict[str, Callable[[], str]] = {
    "command_line.md": command_line,
    "tables.md": tables,
    "configuration.md": configuration,
    "python.md": python,
}


def _columns(columns: Iterable[Column]) -> str:
    rows = []
    for column in columns:
        meaning = column.description
        choices = CHOICES.get(column.name)
        if choices and not all(choice in meaning for choice in choices):
            meaning += f": {', '.join(choices)}"
        rows.append((f"`{column.name}`", _type(column.type), column.unit, "" if column.nullable else "no", meaning))
    return _table(("column", "type", "unit", "null?", "meaning"), rows)


def _type(kind: pa.DataType) -> str:
    if not pa.types.is_list(kind):
        return _TYPES[kind]
    if not pa.types.is_struct(kind.value_type):
        return f"list of {_TYPES[kind.value_type]}s"
    fields = (f"{field.name}: {_TYPES[field.type]}" for field in kind.value_type)
    return f"list of entries ({', '.join(fields)})"


def _options_table(options: Iterable[Option], prefix: str = "") -> str:
    rows = [(f"`{prefix}{option.name}`", f"`{option.default}`", option.meaning) for option in options]
    return _table(("option", "default", "meaning"), rows)


def _compared(group: str, files: dict[str, FileOptions]) -> str:
    """Table of the options that at least two files of a group have, with a column of defaults for each file."""
    by_file = [file.by_name() for file in files.values()]
    rows: list[Sequence[str]] = []
    for name in dict.fromkeys(name for options in by_file for name in options):
        options_of_files = [options[name] for options in by_file if name in options]
        if len(options_of_files) < 2 or name == group:  # launcher.launcher is the file's kind, not an option to choose
            continue
        defaults = [f"`{options[name].default}`" if name in options else "" for options in by_file]
        rows.append((f"`{group}.{name}`", *defaults, options_of_files[0].meaning))
    return _table(("option", *(f"`{group}={name}`" for name in files), "meaning"), rows)


def _slurm_alone(launchers: dict[str, FileOptions]) -> list[str]:
    others = {name for kind, file in launchers.items() if kind != "slurm" for name in file.by_name()}
    parts: list[str] = []
    for section in launchers["slurm"].sections:
        if options := [option for option in section.options if option.name not in others]:
            parts += [section.heading] if section.heading else []
            parts.append(_options_table(options, "launcher."))
    return parts


def _grids(folders: ConfFolders) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name in folders.names("grid"):
        grid = folders.read("grid", name)
        rows.append((f"`{name}`", f"`{grid['cluster']}`", str(grid["description"])))
    return rows


def _models(folders: ConfFolders) -> list[tuple[str, ...]]:
    models = sorted((folders.model(name) for name in folders.names("model")), key=num_params)
    return [
        (
            f"`{model.name}`",
            _count(num_params(model)),
            str(model.num_layers),
            f"{model.hidden_size:,}",
            str(model.moe.num_experts) if model.moe else "",
        )
        for model in models
    ]


def _clusters(folders: ConfFolders) -> list[tuple[str, ...]]:
    names = folders.names("cluster")
    return [(f"`{name}`", read_options(folders.find("cluster", name)).intro) for name in names]


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.2f} B" if parameters >= 1e8 else f"{parameters / 1e6:,.2f} M"


def _heading(title: str) -> str:
    return f"# {title}\n\n<!-- Written by {COMMAND}; do not edit. -->"


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def _first(text: str) -> str:
    """The first sentence with its full stop."""
    return f"{text.partition('. ')[0].rstrip('.')}."


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _page(parts: Iterable[str]) -> str:
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
