"""From the launcher's file to the settings of a pilot and the options of Slurm jobs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launchers.settings import LaunchSettings, settings_from_dict
from sweep.composing.conffiles import PACKAGED
from sweep.composing.config import SweepConfig
from sweep.composing.machine import Machine, method_of
from sweep.composing.yaml_files import read_yaml
from workloads.spec.checks import flag, known_names, mapping
from workloads.spec.errors import InvalidSweep
from workloads.spec.hardware.cluster_fields import environment_from_dict, to_dict
from workloads.spec.mistakes import Mistakes
from workloads.spec.other_names import OF_SUBMITIT
from workloads.spec.units import seconds

if TYPE_CHECKING:
    from launchers.slurm.options import SlurmOptions

_PILOT_OPTIONS = {field.name for field in dataclasses.fields(LaunchSettings)}
_READ_HERE = ("dry",)
"""Options of the launcher's file that are read here and not passed to a launcher."""
_SECONDS = {"s": 1, "min": 60, "h": 3600}
"""Seconds of the unit that ends an option's name."""


def launcher_options(config: SweepConfig) -> dict[str, Any]:
    """The options of the launcher. Times given with a unit (``2 h``) become numbers in the unit of the option's name,
    and submitit's names become ours.

    Raises `InvalidSweep` with the closest name for an option that this launcher does not have.
    """
    options = {name: value for name, value in config.launcher.items() if name != "launcher"}
    known = read_yaml(PACKAGED / "launcher" / f"{config.launcher_kind}.yaml")
    options = _without_submitits_names(options, known, config.launcher_kind)
    known_names("launcher", options, known.keys() - {"launcher"})
    for name, value in options.items():
        size = _SECONDS.get(name.rpartition("_")[2])
        value_in_s = seconds(f"launcher.{name}", value) if size is not None else value
        if size is not None and value_in_s is not value and isinstance(value_in_s, float):
            amount = value_in_s / size
            options[name] = int(amount) if amount.is_integer() else amount
    limits = options.get("phase_limits_s")
    if isinstance(limits, Mapping):
        options["phase_limits_s"] = {
            str(phase): seconds(f"launcher.phase_limits_s.{phase}", limit) for phase, limit in limits.items()
        }
    return options


def _without_submitits_names(options: dict[str, Any], defaults: Mapping[str, Any], kind: str) -> dict[str, Any]:
    theirs = [name for name in options if name.startswith(OF_SUBMITIT)]
    if not theirs:
        return options
    if kind != "slurm":
        raise InvalidSweep(f"launcher: {theirs[0]} is an option of launcher=slurm; this sweep has launcher={kind}")
    from launchers.slurm.submitit_names import in_our_options

    return in_our_options(options, defaults)


def launch_settings(config: SweepConfig, machine: Machine) -> LaunchSettings:
    """The settings of a pilot. Under Slurm the devices are those of the cluster file, otherwise those of this machine.

    Raises `InvalidSweep` for a value of the wrong type or out of its range.
    """
    method = method_of(config)
    on_gpu = config.cluster.backend == "cuda" if method == "measured" else method == "rehearsed"
    slurm = config.launcher_kind == "slurm"
    fields: dict[str, Any] = {
        name: value for name, value in launcher_options(config).items() if name in _PILOT_OPTIONS or not slurm
    }
    fields["launcher"] = config.launcher_kind
    fields["environment"] = environment_of_ranks(config)
    if slurm:
        fields["num_devices"] = config.cluster.devices_per_node
    elif fields.get("num_devices") is None:
        fields["num_devices"] = machine.num_gpus if on_gpu else config.cluster.devices_per_node
    if method != "measured":
        if fields["num_devices"] not in (1, None):
            raise InvalidSweep(
                f"launcher.num_devices={fields['num_devices']}: a rehearsal uses one device; leave it out"
            )
        fields["num_devices"] = 1
    fields |= {
        "device": "cuda" if on_gpu else "cpu",
        "cluster": to_dict(config.cluster),
        "method": method,
    }
    if "phase_limits_s" in fields:
        fields["phase_limits_s"] = mapping("launcher: phase_limits_s", fields["phase_limits_s"])
    return dataclasses.replace(settings_from_dict(fields), measure=config.measure)


def environment_of_ranks(config: SweepConfig) -> dict[str, str]:
    """Environment variables of every rank: those of the cluster's file, overridden by those of the launcher's file."""
    given = environment_from_dict(config.launcher.get("environment") or {}, "launcher")
    return {**config.cluster.environment, **given}


def slurm_options(config: SweepConfig) -> SlurmOptions | None:
    """Options of the Slurm jobs; None for another launcher. Raises `InvalidSweep` for a wrong option."""
    if config.launcher_kind != "slurm":
        return None
    from launchers.slurm.options import check_path, options_from_dict

    check_path(config.sweep_dir)
    return options_from_dict(
        {
            name: value
            for name, value in launcher_options(config).items()
            if name not in _PILOT_OPTIONS and name not in _READ_HERE
        }
    )


def launch_options(config: SweepConfig, machine: Machine) -> tuple[LaunchSettings, SlurmOptions | None]:
    """`launch_settings` and `slurm_options`. Raises `InvalidSweep` with the mistakes of both."""
    mistakes = Mistakes()
    with mistakes.collected():
        settings = launch_settings(config, machine)
    with mistakes.collected():
        slurm = slurm_options(config)
    mistakes.refuse()
    return settings, slurm


def is_dry(config: SweepConfig) -> bool:
    """Whether batch files are only shown, not submitted. Raises `InvalidSweep` for any value but true and false."""
    return flag("launcher.dry", config.launcher.get("dry", False))
