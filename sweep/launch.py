"""From the launcher's file to what launchers take: what a pilot is told, and how Slurm is asked for allocations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from launchers.settings import LaunchSettings, settings_from_dict
from sweep.config import SweepConfig
from sweep.machine import Machine, method_of
from workloads.cluster import environment_from_dict, to_dict
from workloads.errors import InvalidSweep

if TYPE_CHECKING:
    from launchers.slurm.options import SlurmOptions

_PILOTS = {field.name for field in dataclasses.fields(LaunchSettings)}
_OURS = ("dry",)
"""Options of the launcher's file that only this package reads."""


def launch_settings(config: SweepConfig, machine: Machine) -> LaunchSettings:
    """What a pilot is told. Under Slurm that is bound to the cluster file, everywhere else to this machine.

    Raises `InvalidSweep` for values that cannot be.
    """
    method = method_of(config)
    on_gpu = config.cluster.backend == "cuda" if method == "measured" else method == "rehearsed"
    slurm = config.launcher_kind == "slurm"
    fields: dict[str, Any] = {name: value for name, value in config.launcher.items() if name in _PILOTS or not slurm}
    # The cluster's variables come first, so that the launcher's can change them.
    own = environment_from_dict(fields.get("environment") or {})
    fields["environment"] = {**config.cluster.environment, **own}
    if slurm:
        fields["num_devices"] = config.cluster.devices_per_node
    elif fields.get("num_devices") is None:
        fields["num_devices"] = machine.num_gpus if on_gpu else config.cluster.devices_per_node
    if method != "measured":
        fields["num_devices"] = 1
    fields |= {
        "device": "cuda" if on_gpu else "cpu",
        "cluster": to_dict(config.cluster),
        "method": method,
    }
    try:
        return dataclasses.replace(settings_from_dict(fields), measure=config.measure)
    except TypeError as error:
        raise InvalidSweep(f"launcher: {error}; its options are numbers") from None


def slurm_options(config: SweepConfig) -> SlurmOptions | None:
    """How allocations are asked for; None for a launcher that asks for none. Raises `InvalidSweep`."""
    if config.launcher_kind != "slurm":
        return None
    from launchers.slurm.options import check_path, options_from_dict

    check_path(config.sweep_dir)
    return options_from_dict(
        {name: value for name, value in config.launcher.items() if name not in _PILOTS and name not in _OURS}
    )


def is_dry(config: SweepConfig) -> bool:
    """Whether submissions are only to be shown. Raises `InvalidSweep` for what is neither yes nor no."""
    dry = config.launcher.get("dry", False)
    if not isinstance(dry, bool):
        raise InvalidSweep(f"launcher.dry={dry!r} must be true or false")
    return dry
