"""What an experiment becomes in another engine, put together: options, refusals by field, warnings, notes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from workloads.spec.experiment import Experiment

Options = Mapping[str, Any]
"""Option of the engine by its own name; a dot enters a section. A flag without a value is True."""

STEPS = 100
"""How many steps the files ask for. An experiment has no such number, and every engine wants one."""
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, MAX_GRAD_NORM = 3e-5, (0.9, 0.95), 1e-8, 0.1, 1.0
"""The optimizer of a sweep's runs (`workloads.engine.training.optimizer`, which needs torch and is not imported
here)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one value of one field becomes: options of the engine, or the reason why it has none."""

    options: Options = field(default_factory=dict)
    refused: str = ""
    """Why the engine cannot do it."""
    warning: str = ""
    """What differs though the layout stays: in speed, or in the memory of activations."""
    note: str = ""
    """What the user's own code has to do."""


NOTHING = Choice()
"""The engine does the same without an option."""


class Draft:
    """Collects what one experiment becomes. Fields without effect (a schedule without a pipeline) are not looked at."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.options: dict[str, Any] = {}
        self.refusals: list[str] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []

    def set(self, options: Options) -> None:
        self.options.update(options)

    def refuse(self, name: str, why: str) -> None:
        """``name``: a field of the experiment, or ``model.X``."""
        value: Any = self.experiment
        for part in name.split("."):
            value = getattr(value, part)
        if is_dataclass(value):
            self.refusals.append(f"{name} ({why})")
        else:
            shown = str(value).lower() if isinstance(value, bool) else value
            self.refusals.append(f"{name}={shown} ({why})")

    def choose(self, name: str, table: Mapping[Any, Choice]) -> None:
        """What the table says of the field's value; refused if it says nothing."""
        choice = table.get(getattr(self.experiment, name), Choice(refused="no counterpart"))
        self.set(choice.options)
        if choice.refused:
            self.refuse(name, choice.refused)
        if choice.warning:
            self.warnings.append(f"{name}: {choice.warning}")
        if choice.note:
            self.notes.append(f"{name}: {choice.note}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine that experiments are exported to."""

    name: str
    version: str
    """Whose own parser the options' names were checked with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """An experiment as another engine's configuration."""

    target: Target
    name: str
    """The experiment's id."""
    files: Mapping[str, str]
    """Text by file name, the first one first in importance."""
    start: str
    """The command that starts it, on every node."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
