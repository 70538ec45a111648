"""``python -m sweep doctor``: asks compute nodes, or this machine, and prints what is not as runs need it."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from launchers.doctor import on_node
from launchers.doctor.checks import Check, Expected, checks, unanswered
from launchers.settings import LaunchSettings
from results.errors import UltrasweepError
from results.text.numbers import listed
from results.text.printable import printable
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import SweepConfig, cluster_named, compose_sweep
from sweep.composing.machine import clusters_of_device, default_launcher, this_machine
from sweep.composing.planned_only import refuse_planned_only
from sweep.running.launch import environment_of_ranks, is_dry, launch_settings, slurm_options

_GRID = "+grid=probe"
"""A grid is needed to compose a configuration; nothing of it is used."""
_ALLOWED = ("cluster", "launcher", "results_dir")
_FOLDER = "doctor"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The lines of one call, and the folder that holds what they are made from."""

    checks: tuple[Check, ...]
    folder: Path

    @property
    def exit_code(self) -> int:
        """1 if a check fails."""
        return int(any(check.status == "fail" for check in self.checks))


def diagnose(
    overrides: Sequence[str], folders: ConfFolders, nodes: int, wait_s: float, report: Callable[[str], None]
) -> Diagnosis | str:
    """Ask ``nodes`` nodes through Slurm, or this machine, for at most ``wait_s`` seconds; a dry run returns the text of
    the batch file instead. ``report`` takes a line about the job.

    The folder of the job is removed unless a check fails. Raises `UltrasweepError` for a mistake of the user, and if
    Slurm refuses the job.
    """
    config = _compose(overrides, folders)
    folder = config.results_dir / _FOLDER / f"doctor-{time.strftime('%Y%m%d-%H%M%S')}"
    if config.launcher_kind == "local":
        if nodes > 1:
            raise UltrasweepError(f"doctor: --nodes {nodes} needs launcher=slurm; this machine is one node")
        lines = _of_this_machine(config, folders, folder, wait_s)
    else:
        options, settings = slurm_options(config), launch_settings(config, this_machine())
        assert options is not None
        from launchers.doctor.slurm_job import ask_nodes, batch_file

        if is_dry(config):
            return batch_file(folder, settings, options, nodes)
        expected = _expected(config, settings, requeue=options.requeue)
        asked = ask_nodes(folder, settings, options, nodes, wait_s, report)
        lines = checks(asked.answers, expected) if asked.answers else []
        if asked.trouble:
            lines = (
                [Check("job", "fail", asked.trouble, asked.remedy), *lines]
                if lines
                else (unanswered(asked.trouble, asked.remedy))
            )
        elif asked.answers:
            names = listed([answer.node for answer in asked.answers])
            lines = [Check("job", "pass", f"{asked.job_id} on {names}"), *lines]
    diagnosis = Diagnosis(tuple(lines), folder)
    if not diagnosis.exit_code:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others may be in use
            folder.parent.rmdir()
    return diagnosis


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print one line for each check, its remedy below it, and the count."""
    width = max(len(check.name) for check in diagnosis.checks)
    for check in diagnosis.checks:
        console.print(
            printable(f"{check.status:7}  {check.name:{width}}  {check.value}"), highlight=False, markup=False
        )
        if check.remedy and check.status != "pass":
            console.print(printable(f"{'':7}  {'':{width}}  remedy: {check.remedy}"), highlight=False, markup=False)
    counts = {
        status: sum(check.status == status for check in diagnosis.checks) for status in ("pass", "fail", "unknown")
    }
    line = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    more = f"; the batch file and its logs are in {diagnosis.folder}" if diagnosis.exit_code else ""
    console.print(printable(f"{line}{more}"), highlight=False, markup=False)


def _compose(overrides: Sequence[str], folders: ConfFolders) -> SweepConfig:
    for override in overrides:
        name = override.lstrip("+~").partition("=")[0].partition(".")[0]
        if name not in _ALLOWED:
            raise UltrasweepError(f"doctor: {override} has no effect here; {listed(_ALLOWED)} may be given")
    config = compose_sweep([_GRID, *overrides], folders, launcher=default_launcher())
    refuse_planned_only(config.cluster)
    if config.launcher_kind == "rehearse":
        raise UltrasweepError(
            "doctor: launcher=rehearse needs no node; launcher=local or launcher=slurm can be checked"
        )
    if config.launcher_kind == "slurm" and not config.cluster_given:
        raise UltrasweepError(
            "doctor: launcher=slurm needs cluster=NAME, which says how many GPUs a node has; launcher=local checks "
            "this machine"
        )
    return config


def _of_this_machine(config: SweepConfig, folders: ConfFolders, folder: Path, wait_s: float) -> list[Check]:
    from launchers.doctor.on_this_machine import ask_this_machine

    machine = this_machine()
    fitting = clusters_of_device(folders, machine.gpu_name) if machine.gpu_name is not None else []
    devices: int | None = None  # GPUs of a machine that no cluster file, or several, describe
    names: tuple[str, ...] = ()
    if config.cluster_given:
        devices = config.cluster.devices_per_node if config.cluster.backend == "cuda" else 0
        names = config.cluster.device.driver_names
    elif machine.gpu_name is None:
        devices = 0
    elif len(fitting) == 1:
        config = dataclasses.replace(config, cluster=cluster_named(fitting[0], folders))
        devices, names = machine.num_gpus, config.cluster.device.driver_names
    environment = environment_of_ranks(config) if devices is not None else {}
    expected = Expected(
        python=platform.python_version(),
        packages=on_node.packages() or {},
        devices=devices,
        driver_names=names,
        socket_ifname=environment.get("NCCL_SOCKET_IFNAME"),
        several_nodes=False,
        slurm=False,
        ranks=max(1, machine.num_gpus),
    )
    return checks([ask_this_machine(folder, wait_s)], expected)


def _expected(config: SweepConfig, settings: LaunchSettings, *, requeue: bool) -> Expected:
    cluster = config.cluster
    on_gpus = settings.device == "cuda"
    return Expected(
        python=platform.python_version(),
        packages=on_node.packages() or {},
        devices=cluster.devices_per_node if on_gpus else 0,
        driver_names=cluster.device.driver_names,
        socket_ifname=settings.environment.get("NCCL_SOCKET_IFNAME"),
        several_nodes=bool(cluster.outside),
        requeue=requeue,
        ranks=settings.num_devices,
    )
