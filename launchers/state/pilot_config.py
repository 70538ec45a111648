"""What a pilot is told: a small JSON file in the sweep's folder, written before the pilot is started or submitted."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from launchers.settings import LaunchSettings, settings_from_dict, settings_to_dict
from launchers.state.code_snapshot import code_root
from results.errors import InvalidResults

BatchSystem = Literal["none", "slurm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotConfig:
    """What a pilot is told."""

    settings: LaunchSettings
    command: str | None
    """Command line of the sweep, for the rows."""
    wall_time_s: float | None
    """Length of the allocation; None: no end."""
    stop_with_parent: bool
    """Standard input is a pipe from whoever started this pilot; when it closes, the pilot stops."""
    nodes: int = 1
    """Nodes of the allocation. With more than one the pilot's command runs on each of them (``srun``)."""
    batch_system: BatchSystem = "none"
    provenance: Mapping[str, Any] | None = None
    """Of the code, as it was when the pilot was submitted; None: the pilot looks for itself."""


def pilot_config_to_dict(config: PilotConfig) -> dict[str, Any]:
    return {
        "settings": settings_to_dict(config.settings),
        "command": config.command,
        "wall_time_s": config.wall_time_s,
        "stop_with_parent": config.stop_with_parent,
        "nodes": config.nodes,
        "batch_system": config.batch_system,
        "provenance": dict(config.provenance) if config.provenance is not None else None,
    }


def read_pilot_config(path: Path) -> PilotConfig:
    """Raises `InvalidResults` when the file is not a pilot's config."""
    try:
        fields: Mapping[str, Any] = json.loads(path.read_text())
        return PilotConfig(
            settings=settings_from_dict(fields["settings"]),
            command=fields["command"],
            wall_time_s=fields["wall_time_s"],
            stop_with_parent=fields["stop_with_parent"],
            nodes=fields["nodes"],
            batch_system=fields["batch_system"],
            provenance=fields["provenance"],
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InvalidResults(f"{path} is not the config of a pilot: {error}") from None


def pilot_environment() -> dict[str, str]:
    """The environment to start a pilot in: it finds this code wherever it is started, and no library gives it a
    thread of its own at import (NumPy's BLAS, Arrow's allocator), since a process with threads must not fork."""
    paths = [str(code_root()), *(path for path in [os.environ.get("PYTHONPATH")] if path)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
