"""``export``: writes a layout as the configuration of another training engine."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from results.errors import UltrasweepError
from results.shared_filesystem.whole_files import create
from results.text.numbers import plural
from results.text.printable import printable
from sweep.engine_configs import deepspeed, megatron, nanotron, torchtitan, torchtitan03, transformers
from sweep.engine_configs.draft import Draft, EngineConfig, Target
from workloads.rules.engine_kinds import refuse_kinds
from workloads.rules.layout_rules import layout_violations
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment

ENGINES: Mapping[str, tuple[Target, Callable[[Experiment, str], tuple[Draft, EngineConfig]]]] = {
    "torchtitan": (torchtitan03.TARGET, torchtitan03.export),
    "torchtitan-0.2": (torchtitan.TARGET, torchtitan.export),
    "megatron": (megatron.TARGET, megatron.export),
    "nanotron": (nanotron.TARGET, nanotron.export),
    "deepspeed": (deepspeed.TARGET, deepspeed.export),
    "transformers": (transformers.TARGET, transformers.export),
}


def engine_config(experiment: Experiment, engine: str, name: str | None = None) -> EngineConfig:
    """The experiment as a configuration for one of `ENGINES`. ``name``: the id under which it was stored, if different.

    Raises `UnsupportedByEngine` with every field that the engine does not support, and for a layout that breaks a rule.
    """
    target, export = ENGINES[engine]
    name = name or experiment.id
    refuse_kinds(experiment.model, target.name, target.lacks(experiment.model))
    if violations := list(layout_violations(experiment)):
        raise UnsupportedByEngine(f"{name} cannot be exported: {violations[0].message}")
    draft, config = export(experiment, name)
    if draft.refusals:
        raise UnsupportedByEngine(f"{name} has no counterpart in {target.version}: {'; '.join(draft.refusals)}")
    return config


def write_config(config: EngineConfig, folder: Path) -> list[Path]:
    """Write the files and ``NOTES.txt`` to a folder. Raises `UltrasweepError` rather than replace a file."""
    files = {**config.files, "NOTES.txt": "".join(f"{line}\n" for line in summary(config))}
    paths = [folder / name for name in files]
    if there := [path for path in paths if path.exists() or path.is_symlink()]:
        raise UltrasweepError(f"--out {shlex.quote(str(folder))}: {there[0].name} already exists; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for path, text in zip(paths, files.values(), strict=True):
            with create(path) as file:
                file.write(text.encode())
    except OSError:  # a full disk: the same command must be accepted later
        for path in paths:
            path.unlink(missing_ok=True)
        raise
    return paths


def summary(config: EngineConfig) -> list[str]:
    """Summary lines: target engine, launch command, warnings, notes."""
    lines = [f"{config.name} for {config.target.version}", f"start: {config.start}"]
    lines += [f"warning: {text}" for text in config.warnings]
    return lines + [f"note: {text}" for text in config.notes]


def print_config(config: EngineConfig, out: Path | None) -> None:
    """Print the files on standard output and the summary on standard error.

    With ``out``, write the files there and print the summary on standard output.
    """
    stream = sys.stdout if out is not None else sys.stderr
    for line in summary(config):
        print(printable(line), file=stream)
    if out is not None:
        paths = write_config(config, out)
        print(printable(f"{plural(len(paths), 'file')} in {out}: {', '.join(path.name for path in paths)}"))
        return
    for name, text in config.files.items():
        if len(config.files) > 1:
            print(f"# ---- {name}")
        print(printable(text, keep="\n"), end="")
