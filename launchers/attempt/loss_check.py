"""Do layouts of one model compute the same thing? The first steps' losses and gradient norms of every run are compared
with those of the first run that trained the same model from the same seed on the same data: a wrong layout can be fast.

The norm is the sharper test. Near initialisation the loss is close to the logarithm of the vocabulary whatever the
model computes, and wrong gradients do not touch it until clipping and AdamW have hidden most of their error.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.agreement import COMPARED_STEPS, TOLERANCES, largest_difference
from workloads import experiment as ex
from workloads.experiment import Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    reference_id: str | None
    """Attempt compared with; None when this attempt is itself the reference."""
    max_difference: float | None
    """Of the losses, relative."""
    max_norm_difference: float | None
    """Of the gradient norms, relative."""
    agrees: bool | None


NOT_COMPARED = Comparison(reference_id=None, max_difference=None, max_norm_difference=None, agrees=None)


def loss_key(experiment: Experiment) -> str:
    """What two runs must share for their losses to be the same: everything but the layout."""
    fields = ex.to_dict(experiment)
    shared = {
        name: fields[name] for name in ("global_batch_size", "seq_len", "seed", "precision", "engine", "engine_version")
    }
    shared["model"] = {name: value for name, value in fields["model"].items() if name != "name"}
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]
    return f"{experiment.precision}-{digest}"


def compare(
    folder: Path, experiment: Experiment, attempt_id: str, losses: Sequence[float], grad_norms: Sequence[float]
) -> Comparison:
    """Compare with the reference kept in ``folder``; the first attempt to come becomes it (by exclusive creation)."""
    reference = folder / f"{loss_key(experiment)}.json"
    mine: dict[str, Any] = {
        "attempt_id": attempt_id,
        "losses": list(losses[:COMPARED_STEPS]),
        "grad_norms": list(grad_norms[:COMPARED_STEPS]),
    }
    other = _read(reference)
    if other is None:
        _create(reference, mine)
        other = _read(reference) or mine
    if other["attempt_id"] == attempt_id:
        return NOT_COMPARED
    loss, norm = (largest_difference(mine[name], other.get(name, ())) for name in ("losses", "grad_norms"))
    if loss is None or norm is None:
        return NOT_COMPARED
    loss_tolerance, norm_tolerance = TOLERANCES[experiment.precision]
    return Comparison(
        reference_id=other["attempt_id"],
        max_difference=loss,
        max_norm_difference=norm,
        agrees=loss <= loss_tolerance and norm <= norm_tolerance,
    )


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return data


def _create(path: Path, data: dict[str, Any]) -> None:
    """Write the whole file or nothing, and leave one that is there: link() is exclusive where rename() replaces."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}.tmp")
    temporary.write_text(json.dumps(data))
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
