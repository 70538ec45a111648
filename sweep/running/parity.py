"""``parity``: trains two layouts of one model from the same seed and batches, and prints whether they agree."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console

from results.text.numbers import format_bytes, plural
from results.text.terminal import plain_table
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import compose_sweep
from sweep.composing.machine import clusters_of_device, this_machine
from sweep.planning.limits import machine_memory_bytes
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.shape.params import num_params
from workloads.rules.engine_kinds import refuse_lacking_kinds, refuse_planned_formats
from workloads.rules.layout_rules import violations
from workloads.spec.checks import suggest
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InfeasibleLayout, InvalidSweep
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import FIELDS
from workloads.spec.mesh import data_degrees
from workloads.spec.model_spec import MODEL_SIZES, ModelSpec, model_from_dict

if TYPE_CHECKING:
    from workloads.parity.compare import Difference
    from workloads.parity.run import ParityComparison

SHARED = ("model", "seq_len", "global_batch_size", "precision", "documents", "seed")
"""Options that define the computation, equal for both layouts."""
OF_LAYOUT = ("dp", *(name for name in FIELDS if name not in (*SHARED, "engine", "engine_version")))
DEFAULTS: Mapping[str, Any] = {"seq_len": 128, "global_batch_size": 8, "precision": "fp32"}
_MODEL_FIELDS = (*MODEL_SIZES, "tie_embeddings", "qk_norm")
_HOST_SHARE = 0.9
"""Share of the machine's memory that may be used."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two layouts that can be compared on this machine."""

    left: Experiment
    right: Experiment
    device: str
    """``cpu`` or ``cuda``."""


def read_pair(
    overrides: Sequence[str], left: str, right: str, folders: ConfFolders, device: str | None, steps: int
) -> Pair:
    """The two layouts, checked against the rules and this machine. ``left``, ``right``: overrides of one side each.

    ``device``: ``cpu`` or ``cuda``; None: GPUs if there are any. Raises an `UltrasweepError` with one line for a
    mistake.
    """
    shared = {**DEFAULTS, **_read(overrides, (*SHARED, *OF_LAYOUT), "")}
    if "model" not in shared:
        raise InvalidSweep(f"no model given: add model=NAME, one of {', '.join(folders.names('model'))}")
    model = _model(folders, shared)
    refuse_lacking_kinds([model])
    cluster, devices = _cluster(folders, device)
    sides = []
    for side, text in (("left", left), ("right", right)):
        side_fields = _read(_words(text, side), OF_LAYOUT, f"--{side}: ")
        fields = {**shared, **side_fields}
        if side_fields.keys() & {"dp_replicate", "dp_shard"} and "dp" not in side_fields:
            fields.pop("dp", None)
        experiment = Experiment.canonical(model=model, **fields)
        if broken := violations(experiment, cluster):
            raise InfeasibleLayout(f"{side} layout: {'; '.join(violation.message for violation in broken)}")
        if experiment.world_size > devices:
            raise InfeasibleLayout(
                f"{side} layout: it needs {plural(experiment.world_size, 'GPU')}, this machine has {devices}; "
                "--device cpu takes processes instead"
            )
        sides.append(experiment)
    refuse_planned_formats(side.precision for side in sides)
    _check_memory(sides, cluster, steps)
    return Pair(sides[0], sides[1], cluster.backend)


def _words(text: str, side: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidSweep(f"--{side}: cannot read {text!r}: {error}") from None


def _read(overrides: Sequence[str], known: Sequence[str], place: str) -> dict[str, Any]:
    """Parses ``NAME=VALUE`` words into fields. ``model.NAME`` changes one size of the model."""
    fields: dict[str, Any] = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        part = name.removeprefix("model.")
        if not equals or not text:
            raise InvalidSweep(f"{place}cannot read {override!r}; expected NAME=VALUE")
        if part != name and "model" in known:
            if part not in _MODEL_FIELDS:
                raise InvalidSweep(f"{place}a model has no {part!r} to change{suggest(part, _MODEL_FIELDS)}")
        elif name in SHARED and name not in known:
            raise InvalidSweep(f"{place}{name} is the same for both layouts; give it outside of --left and --right")
        elif name not in known:
            raise InvalidSweep(f"{place}no field {name!r}{suggest(name, known)}")
        if name in fields:
            raise InvalidSweep(f"{place}{name} is given twice")
        value: Any = {"true": True, "false": False}.get(text.lower(), text)
        fields[name] = int(text) if re.fullmatch(r"-?\d{1,18}", text) else value
        if name in FIELDS:
            FIELDS[name].check(f"{place}{name}", fields[name])
        elif name == "dp":
            FIELDS["dp_shard"].check(f"{place}dp", fields[name])
    return fields


def _model(folders: ConfFolders, shared: dict[str, Any]) -> ModelSpec:
    """Builds the model and removes its fields from ``shared``."""
    name = str(shared.pop("model"))
    changes = {key.removeprefix("model."): shared.pop(key) for key in [k for k in shared if k.startswith("model.")]}
    with folders.named("model", name):
        model = model_from_dict({"name": name, **folders.read("model", name), **changes})
    for field, value in changes.items():
        if (used := getattr(model, field)) != value:
            why = "latent attention has its own sizes" if field == "head_dim" else "every layer has routed experts"
            raise InvalidSweep(f"model.{field}={value} has no effect on {name}: {why}; leave it out ({field}={used})")
    return model


def _cluster(folders: ConfFolders, device: str | None) -> tuple[ClusterSpec, int]:
    """Returns (the cluster that the layouts run on, its number of devices)."""
    name, count = "cpu", None
    if device != "cpu":
        machine = this_machine()
        if device == "cuda" and machine.gpu_name is None:
            raise InvalidSweep("--device cuda: this machine has no usable GPU; use --device cpu")
        if machine.gpu_name is not None:
            fitting = clusters_of_device(folders, machine.gpu_name)
            if not fitting:
                raise InvalidSweep(f"no cluster file describes {machine.gpu_name}; add one, or use --device cpu")
            name, count = fitting[0], machine.num_gpus
    cluster = compose_sweep(["+grid=tiny", f"cluster={name}"], folders).cluster
    return cluster, cluster.devices_per_node if count is None else count


def _check_memory(sides: Sequence[Experiment], cluster: ClusterSpec, steps: int) -> None:
    """Refuse layouts that a device or this machine cannot hold, with the numbers."""
    limit, host = cluster.device.memory_bytes, machine_memory_bytes()
    smaller = "take a smaller model (model.num_layers=2), batch or seq_len"
    most_in_ranks, kept = 0, 0
    for side, experiment in zip(("left", "right"), sides, strict=True):
        peak = estimate_memory(experiment).peak_bytes + cluster.device.workspace_bytes
        if limit is not None and peak > limit:
            raise InfeasibleLayout(
                f"{side} layout: a rank needs about {format_bytes(peak)}, {cluster.device.name} has "
                f"{format_bytes(limit)}; {smaller}"
            )
        most_in_ranks = max(most_in_ranks, peak * experiment.world_size if cluster.backend == "cpu" else 0)
        kept += _kept_bytes(experiment, steps)
    kept += _kept_bytes(sides[0], steps)  # the left layout in a higher precision
    if host is not None and most_in_ranks + kept > _HOST_SHARE * host:
        raise InfeasibleLayout(
            f"comparing needs about {format_bytes(most_in_ranks + kept)} of this machine's {format_bytes(host)} "
            f"({format_bytes(kept)} for gradients, weights and activations of both layouts); {smaller}"
        )


def _kept_bytes(experiment: Experiment, steps: int) -> int:
    """Host bytes that the comparison keeps of one layout: pieces from its ranks, and whole tensors."""
    e, size = experiment, 8 if experiment.precision == "fp64" else 4
    copies, _ = data_degrees(e)
    weights = num_params(e.model) * size * (1 + 2 * steps)
    streams = steps * (6 * e.model.num_layers + 3) * e.tokens_per_step * e.model.hidden_size * size
    return weights * (1 + copies) + 2 * streams


def print_comparison(compared: ParityComparison, console: Console) -> None:
    """Print both layouts, the worst tensor of every phase of every step, and the verdict."""
    for side, experiment in (("left", compared.left), ("right", compared.right)):
        console.print(f"{side:6} {plural(experiment.world_size, 'rank')}: {experiment.id}", highlight=False)
    table = plain_table()
    for name in ("step", "", "tensors", "worst"):
        table.add_column(name)
    for name in ("difference", "allowed"):
        table.add_column(name, justify="right")
    table.add_column("")
    for (step, phase), group in compared.by_phase().items():
        worst = max(group, key=_excess)
        table.add_row(
            "" if step is None else str(step),
            phase,
            str(len(group)),
            worst.computed.name if len(group) > 1 else "",
            f"{worst.relative:.1e}",
            f"{worst.allowed:.1e}",
            f"[red]{sum(d.differs for d in group)} differ[/]" if any(d.differs for d in group) else "",
        )
    console.print(table)
    numbers = "; ".join(
        f"step {step}: loss {loss[0]:.9g} and {loss[1]:.9g}, gradient norm {norm[0]:.9g} and {norm[1]:.9g}"
        for step, (loss, norm) in enumerate(compared.numbers())
    )
    console.print(numbers, highlight=False)
    console.print(verdict(compared), highlight=False)


def _excess(difference: Difference) -> float:
    if difference.relative == 0.0:
        return 0.0
    return difference.relative / difference.allowed if difference.allowed else float("inf")


def verdict(compared: ParityComparison) -> str:
    """One line: the layouts agree, or the first tensor that differs."""
    first = compared.first
    if first is None:
        return f"[bold green]agree[/]: all {len(compared.differences)} tensors differ by no more than rounding explains"
    step = "" if first.computed.step is None else f"step {first.computed.step}, "
    where = "" if first.sequence is None else f", micro-batch {first.microbatch} (sequence {first.sequence})"
    copies = ""
    if first.computed.whole.spread > first.allowed:
        copies = "; its copies within the right layout differ"
    return (
        f"[bold red]differ[/]: first in {step}{first.computed.phase}: {first.computed.what}{where}, relative "
        f"difference {first.relative:.1e}, allowed {first.allowed:.1e}{copies}"
    )
