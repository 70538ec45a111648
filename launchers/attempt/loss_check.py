"""Checks that all layouts of one model compute the same thing, because a wrong layout can be fast.

The losses and gradient norms of the first steps of every run are compared with those of the first run that trained the
same model from the same seed on the same data. The norm is the sharper test: near initialisation the loss is close to
the logarithm of the vocabulary whatever the model computes, and clipping and AdamW hide most of the error of wrong
gradients from later losses.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.shared_filesystem.patience import repeated
from results.shared_filesystem.whole_files import create, temporary_path
from results.statistics.agreement import COMPARED_STEPS, TOLERANCES, largest_difference
from workloads.contract.protocol import read_json
from workloads.spec import experiment as ex
from workloads.spec.documents.lengths import without_path
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class LossComparison:
    """Distance of one attempt from its reference; None where nothing was compared."""

    reference_id: str | None
    """The attempt used as reference; None when this attempt is itself the reference."""
    max_difference: float | None
    """Largest relative difference of the losses."""
    max_norm_difference: float | None
    """Largest relative difference of the gradient norms."""
    agrees: bool | None
    """Whether both differences are within the tolerances of the precision (`results.statistics.agreement`)."""


NOT_COMPARED = LossComparison(reference_id=None, max_difference=None, max_norm_difference=None, agrees=None)


_DROPPED_BY = ("micro_batch_size", "tp", "etp", "sequence_parallel", "cp", "cp_kind")
"""Fields on which dropped tokens depend. With a capacity factor, an expert drops the tokens of a rank's micro-batch
that exceed the capacity. Layouts that divide tokens differently drop different ones, so their losses differ although
both are right."""


def loss_key(experiment: Experiment) -> str:
    """Key that is equal for experiments whose losses must be equal: those that differ only in their layout."""
    fields = ex.to_dict(experiment)
    shared = {
        name: fields[name] for name in ("global_batch_size", "seq_len", "seed", "precision", "engine", "engine_version")
    }
    if experiment.documents is not None:
        shared["documents"] = without_path(experiment.documents)
    if experiment.routing != "balanced":
        shared["routing"] = experiment.routing
    if experiment.routing == "skewed":
        shared["routing_imbalance"] = experiment.routing_imbalance
    if experiment.capacity_factor is not None:
        shared |= {name: fields[name] for name in ("capacity_factor", *_DROPPED_BY)} | {"dp": experiment.dp}
    shared["model"] = {name: value for name, value in fields["model"].items() if name != "name"}
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]
    return f"{experiment.precision}-{digest}"


def compare(
    folder: Path, experiment: Experiment, attempt_id: str, losses: Sequence[float], grad_norms: Sequence[float]
) -> LossComparison:
    """Compare with the reference in ``folder``. The first attempt becomes the reference; of two at once only one
    does."""
    reference = folder / f"{loss_key(experiment)}.json"
    this_attempt: dict[str, Any] = {
        "attempt_id": attempt_id,
        "losses": list(losses[:COMPARED_STEPS]),
        "grad_norms": list(grad_norms[:COMPARED_STEPS]),
    }
    other = _read(reference)
    if other is None:
        other = this_attempt if _create(reference, this_attempt) else _read(reference) or this_attempt
    if other["attempt_id"] == attempt_id:
        return NOT_COMPARED
    loss, norm = (largest_difference(this_attempt[name], other.get(name, ())) for name in ("losses", "grad_norms"))
    if loss is None or norm is None:
        return NOT_COMPARED
    loss_tolerance, norm_tolerance = TOLERANCES[experiment.precision]
    return LossComparison(
        reference_id=other["attempt_id"],
        max_difference=loss,
        max_norm_difference=norm,
        agrees=loss <= loss_tolerance and norm <= norm_tolerance,
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = read_json(path)
    except (FileNotFoundError, ValueError):
        return None
    return data


def _create(path: Path, data: dict[str, Any]) -> bool:
    """Write the whole file atomically unless it exists: link() fails where rename() would replace it. False when the
    file existed."""
    temporary = temporary_path(path)
    with create(temporary) as file:
        file.write(json.dumps(data).encode())
    try:
        repeated(lambda: os.link(temporary, path))
    except FileExistsError:
        return False
    finally:
        repeated(lambda: temporary.unlink(missing_ok=True))
    return True
