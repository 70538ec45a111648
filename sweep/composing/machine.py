"""Devices of this machine and the cluster files that describe them. Asks the driver's library (NVML), never CUDA."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.node.devices import count_cuda_devices
from sweep.composing.conffiles import PACKAGED, ConfFolders
from sweep.composing.config import SweepConfig
from workloads.contract.protocol import Method
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep


@dataclass(frozen=True, slots=True)
class Machine:
    gpu_name: str | None
    """Name reported by the driver; None: there is no usable GPU."""
    num_gpus: int


def this_machine() -> Machine:
    """GPUs that this process may use (``CUDA_VISIBLE_DEVICES`` counts)."""
    count = count_cuda_devices()
    return Machine(gpu_name=_gpu_name() if count else None, num_gpus=count)


def method_of(config: SweepConfig) -> Method:
    """How points are measured: by a real run, by single ranks on one GPU, or by single ranks on FakeTensor."""
    if config.launcher_kind != "rehearse":
        return "measured"
    return "rehearsed" if count_cuda_devices() else "rehearsed_fake"


def default_launcher() -> str:
    """``slurm`` on a machine that can submit jobs, outside of an allocation; ``local`` everywhere else."""
    configured = Path(os.environ.get("SLURM_CONF") or "/etc/slurm/slurm.conf").is_file()
    if configured and shutil.which("sbatch") is not None and "SLURM_JOB_ID" not in os.environ:
        return "slurm"
    return "local"


def clusters_of_device(folders: ConfFolders, gpu_name: str) -> list[str]:
    """Names of cluster files whose device the driver calls ``gpu_name``, directly or through a file that they build on.

    The user's files if there are any, otherwise the shipped ones.
    """
    matching = [name for name in folders.names("cluster") if gpu_name in driver_names(folders, name)]
    users_files = [name for name in matching if not folders.find("cluster", name).is_relative_to(PACKAGED)]
    return users_files or matching


def fitting_cluster(folders: ConfFolders, machine: Machine, current: ClusterSpec, given: bool) -> str | None:
    """The cluster file to use instead of ``current`` for a real run on this machine; None: ``current`` describes it.

    ``given``: the user named ``current``. Raises `InvalidSweep` if this machine cannot run it, or if no file or several
    files describe this machine.
    """
    if current.backend != "cuda":
        return None
    if machine.gpu_name is None:
        raise InvalidSweep(
            f"cluster {current.name} has CUDA devices and this machine has none; launcher=rehearse needs none, "
            "and +grid=tiny runs on CPU processes"
        )
    if machine.gpu_name in current.device.driver_names:
        return None
    fitting = clusters_of_device(folders, machine.gpu_name)
    if given or len(fitting) != 1:
        hint = f"use cluster={' or cluster='.join(fitting)}" if fitting else "no cluster file describes it; add one"
        raise InvalidSweep(
            f"this machine has {machine.gpu_name}, cluster {current.name} describes {current.device.name}; {hint}"
        )
    return fitting[0]


def driver_names(folders: ConfFolders, cluster: str) -> Sequence[str]:
    """Driver names of the device of a cluster file, from its device file or from the cluster file."""
    names: Sequence[str] = ()
    for file in folders.lineage("cluster", cluster):
        device = file.fields if file.group == "device" else file.fields.get("device")
        if isinstance(device, Mapping) and device.get("driver_names"):
            names = device["driver_names"]
    return (names,) if isinstance(names, str) else names


def _gpu_name() -> str:
    import pynvml

    pynvml.nvmlInit()
    name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    return name.decode() if isinstance(name, bytes) else str(name)
