"""What a user sees of an export, and the fields that it refuses."""

from __future__ import annotations

import re

from sweep.engine_configs.export import ENGINES
from workloads.spec.experiment import Experiment


def refused(experiment: Experiment, engine: str) -> list[str]:
    """Fields without a counterpart, in the order of the message."""
    found, _ = ENGINES[engine][1](experiment, experiment.id)
    return [re.split(r"[= ]", text)[0] for text in found.refusals]


def told(experiment: Experiment, engine: str) -> tuple[object, ...]:
    """Everything that a user sees of an export; the name is left out, because the id changes with any field."""
    draft, config = ENGINES[engine][1](experiment, "same")
    return dict(config.files), draft.refusals, draft.warnings, draft.notes, config.start
