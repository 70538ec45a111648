"""Do layouts of one model compute the same thing? The first steps' losses of every run are compared with those of the
first run that trained the same model from the same seed on the same data: a wrong layout can be fast.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads import experiment as ex
from workloads.experiment import Experiment

COMPARED_STEPS = 3
"""The first steps only: later ones drift apart by chaos, not by error."""

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 5e-3, "fp8_tensorwise": 3e-2, "fp8_rowwise": 3e-2}
"""Largest relative difference of a loss that rounding explains. Sums are taken in another order on every layout: about
1e-13 in fp64 and 1e-6 in fp32 at the first step, and AdamW's division by small second moments multiplies that by some
tens in the two steps after it. bf16 rounds every activation to 2**-9, and the mean over a batch's tokens averages most
of that away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    reference_id: str | None
    """Attempt compared with; None when this attempt is itself the reference."""
    max_difference: float | None
    agrees: bool | None


def loss_key(experiment: Experiment) -> str:
    """What two runs must share for their losses to be the same: everything but the layout."""
    fields = ex.to_dict(experiment)
    shared = {
        name: fields[name] for name in ("global_batch_size", "seq_len", "seed", "precision", "engine", "engine_version")
    }
    shared["model"] = {name: value for name, value in fields["model"].items() if name != "name"}
    digest = hashlib.sha256(json.dumps(shared, sort_keys=True).encode()).hexdigest()[:16]
    return f"{experiment.precision}-{digest}"


def compare(folder: Path, experiment: Experiment, attempt_id: str, losses: Sequence[float]) -> Comparison:
    """Compare with the reference kept in ``folder``; the first attempt to come becomes it (by exclusive creation)."""
    reference = folder / f"{loss_key(experiment)}.json"
    mine: dict[str, Any] = {"attempt_id": attempt_id, "losses": list(losses[:COMPARED_STEPS])}
    other = _read(reference)
    if other is None:
        _create(reference, mine)
        other = _read(reference) or mine
    if other["attempt_id"] == attempt_id:
        return Comparison(reference_id=None, max_difference=None, agrees=None)
    pairs = list(zip(mine["losses"], other["losses"], strict=False))
    if not pairs:
        return Comparison(reference_id=None, max_difference=None, agrees=None)
    largest = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
    agrees = largest <= TOLERANCES[experiment.precision]
    return Comparison(reference_id=other["attempt_id"], max_difference=largest, agrees=agrees)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return data


def _create(path: Path, data: dict[str, Any]) -> None:
    """Write the whole file or nothing, and leave one that is there: link() is exclusive where rename() replaces."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(data))
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
