"""Collects an experiment's translation for another engine: options, refusals by field, warnings, notes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from workloads.costs.shape.held_model import copies_of_heads
from workloads.rules.captured_steps import is_captured
from workloads.rules.engine_kinds import adapters_lack
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec
from workloads.spec.pipeline_stages import written_stages
from workloads.spec.updates.words import UPDATE_FIELDS

Options = Mapping[str, Any]
"""The engine's options by name; a dot separates sections. True: a flag without a value."""

STEPS = 100
"""Number of steps in the files. An experiment has no such number, but every engine needs one."""
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY, MAX_GRAD_NORM = 3e-5, (0.9, 0.95), 1e-8, 0.1, 1.0
"""The optimizer of a sweep's runs, as in `workloads.engine.training.optimizer`, which needs torch and is not imported
here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Translation of one value of one field: options of the engine, or the reason why it has none."""

    options: Options = field(default_factory=dict)
    refused: str = ""
    """Why the engine does not support it."""
    warning: str = ""
    """Difference in speed or activation memory, for the same layout."""
    note: str = ""
    """What the user's code has to do."""


NOTHING = Choice()
"""The engine does the same by default."""


class Draft:
    """Translation of one experiment. Fields without effect (a schedule without a pipeline) are skipped."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.options: dict[str, Any] = {}
        self.refusals: list[str] = []
        self.warnings: list[str] = []
        self.notes: list[str] = []
        if is_captured(experiment):
            self.warnings.append("cuda_graph: no whole step is captured there; a host-bound one is slower than planned")

    def set(self, options: Options) -> None:
        self.options.update(options)

    def refuse(self, name: str, why: str) -> None:
        """Record a refusal. ``name``: a field of the experiment, or ``model.X``."""
        value: Any = self.experiment
        for part in name.split("."):
            value = getattr(value, part)
        if is_dataclass(value):
            self.refusals.append(f"{name} ({why})")
        else:
            shown = str(value).lower() if isinstance(value, bool) else value
            self.refusals.append(f"{name}={shown} ({why})")

    def refuse_sizes(
        self,
        *,
        pads_vocabulary: bool = False,
        copies_heads: bool = False,
        adds_gradients: bool = False,
        updates: Collection[str] = (),
        offloads: bool = False,
        documents: str = "nothing here writes its option for packed documents",
    ) -> None:
        """Record refusals of what few targets have: padded rows, copied heads, multi-token modules, unusual formats and
        optimizers, except in the fields ``updates``, which the target's options name; and a warning about gradients
        that products do not add up. ``offloads``: whether the target has options for activations on the host.
        ``documents``: why it cannot have packed documents."""
        e = self.experiment
        for name, usual in UPDATE_FIELDS.items():
            if getattr(e, name) != usual and name not in updates:
                self.refuse(name, f"no counterpart here; {usual} would work")
        if e.gradient_accumulation_fusion and not adds_gradients:
            self.warnings.append("gradient_accumulation_fusion: it rounds each micro-batch's gradient before adding it")
        if e.pad_vocab_to is not None and not pads_vocabulary:
            self.refuse("pad_vocab_to", "it does not pad the vocabulary; null would work")
        if e.activation_offload != "none" and not offloads:
            self.refuse("activation_offload", "no counterpart here; none would work")
        if e.documents is not None:
            self.refuse("documents", f"{documents}; null would work")
        if copies_of_heads(e) and not copies_heads:
            self.refuse("tp", f"it divides key and value heads; at most {e.model.num_kv_heads} would work")
        elif copies_of_heads(e):
            self.warnings.append(
                f"tp: above num_kv_heads={e.model.num_kv_heads} it gathers the columns of q, k and v that all ranks "
                "project, instead of copying heads: less memory of weights, more traffic and activations"
            )
        if e.pp_stages is not None and written_stages(e.pp_stages).multi_token_modules > e.model.mtp_modules:
            self.refuse("pp_stages", "the model has no multi-token modules; without m it would work")

    def choose(self, name: str, table: Mapping[Any, Choice]) -> None:
        """Apply the table's entry for the field's value; refuse a value without an entry."""
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
    """An engine as the target of exports."""

    name: str
    version: str
    """Version whose parser was used to check the names of options."""
    lacks: Callable[[ModelSpec], Sequence[str]] = adapters_lack
    """What of a model's layers has no counterpart there, by name: all that numbers do not describe, if not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """An experiment as another engine's configuration."""

    target: Target
    name: str
    """The experiment's id."""
    files: Mapping[str, str]
    """Text by file name; the most important file first."""
    start: str
    """Command that starts it, on every node."""
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
