"""The instructions of a pilot: a small JSON file in the sweep's folder, written before the pilot is started.

The file holds the ranks' environment variables with their values, secrets included (`results.text.secrets`), so only
its user can read it. No other file in a sweep's folder holds such a value.
"""

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
from results.shared_filesystem.patience import patiently
from results.shared_filesystem.whole_files import read_own_text

BatchSystem = Literal["none", "slurm"]
_READ_LIMIT_S = 60.0
"""Seconds to wait for a filesystem on which the file cannot be read now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PilotConfig:
    """All that a pilot needs to know besides the queue."""

    settings: LaunchSettings
    command: str | None
    """The command line that started the sweep. It is copied into every row."""
    wall_time_s: float | None
    """Seconds of the allocation, from its start, that points may use; None: unlimited. The batch system's answer about
    the end of the allocation takes precedence."""
    stop_with_parent: bool
    """Standard input is a pipe from the process that started this pilot; when the pipe closes, the pilot stops."""
    nodes: int = 1
    """Number of nodes in the allocation. With more than one, the pilot's command runs on each of them (``srun``)."""
    batch_system: BatchSystem = "none"
    """The system that gave the allocation to the pilot."""
    provenance: Mapping[str, Any] | None = None
    """Provenance of the code when the pilot was submitted; None: the pilot determines it."""
    use_excluded: bool = False
    """Whether to use also the nodes that the sweep has excluded: without them Slurm cannot give as many nodes as are
    needed."""
    reserve_s: float = 0.0
    """Seconds before the end of the allocation by which points must have ended."""


def pilot_config_to_dict(config: PilotConfig) -> dict[str, Any]:
    """Plain data, ready for JSON."""
    return {
        "settings": settings_to_dict(config.settings),
        "command": config.command,
        "wall_time_s": config.wall_time_s,
        "stop_with_parent": config.stop_with_parent,
        "nodes": config.nodes,
        "batch_system": config.batch_system,
        "provenance": dict(config.provenance) if config.provenance is not None else None,
        "use_excluded": config.use_excluded,
        "reserve_s": config.reserve_s,
    }


def read_pilot_config(path: Path) -> PilotConfig:
    """Inverse of `pilot_config_to_dict`, from a file. Raises `InvalidResults` when the file is not a pilot's config."""
    try:
        fields: Mapping[str, Any] = patiently(lambda: json.loads(read_own_text(path)), limit_s=_READ_LIMIT_S)
        return PilotConfig(
            settings=settings_from_dict(fields["settings"]),
            command=fields["command"],
            wall_time_s=fields["wall_time_s"],
            stop_with_parent=fields["stop_with_parent"],
            nodes=fields["nodes"],
            batch_system=fields["batch_system"],
            provenance=fields["provenance"],
            use_excluded=bool(fields.get("use_excluded", False)),
            reserve_s=float(fields.get("reserve_s", 0.0)),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidResults(f"{path} is not the config of a pilot: {error}") from None


def pilot_environment() -> dict[str, str]:
    """Environment variables of a new pilot. They let it import this code from any folder and nothing from the working
    folder, and keep libraries (NumPy's
    BLAS, Arrow's allocator) from starting a thread at import: a process with threads must not fork."""
    paths = [str(code_root()), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
