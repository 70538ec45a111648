"""``cluster``: the file of ``conf/cluster`` for this machine or a partition of Slurm, and what it could not know."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console

from results.errors import UltrasweepError
from results.text.numbers import MIB, listed
from results.text.printable import printable
from sweep.composing.conffiles import PACKAGED, ConfFolders
from sweep.composing.config import cluster_named
from sweep.composing.machine import clusters_of_device, driver_names
from sweep.inspecting.nvidia_smi import Gpus
from sweep.inspecting.slurm_nodes import SlurmNodes
from sweep.planning.limits import machine_memory_bytes
from workloads.spec.cluster import UNKNOWN_HOST, ClusterSpec, HostSpec
from workloads.spec.hardware.network import RATES, LinkSpec, TierSpec
from workloads.spec.hardware.vendors import PLANNED_ONLY, is_amd

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_WIDTH = 118
_EFA = ("rdmap", "efa")
"""Beginnings of the names of AWS's network devices (EFA)."""
_CHECKED = "`python -m sweep probe` measures rates; `python -m sweep doctor` checks a node against this file."
_PLANNED = "This cluster can be planned only: the engine runs on CUDA, so run, probe and doctor refuse it."
_UNUSED = "used only once peak_flops and memory_bandwidth of the device are given"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What was found out about the nodes, from nvidia-smi or from Slurm."""

    source: str
    device: str | None
    """The GPU's name for the driver, or Slurm's type; None: not known."""
    exact: bool
    """Whether ``device`` is the driver's name."""
    memory_bytes: int | None
    devices_per_node: int
    nodes: int | None
    away: int = 0
    host_memory_bytes: int | None = None
    """Memory of a node; None: not known."""
    gpus: Gpus | None = None
    """None: only Slurm was asked."""
    in_job: bool = False
    """Whether nvidia-smi ran in a job, which may have only a part of the node's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """A file of ``conf/cluster``."""

    name: str
    text: str
    known: tuple[str, ...]
    """One line for each value that was found out."""
    unknown: tuple[str, ...]
    """One line for each value that was not, and what the file has instead."""
    planned_only: bool = False


def from_machine(gpus: Gpus) -> Found:
    return Found(
        source=f"nvidia-smi on {socket.gethostname()}",
        device=gpus.name,
        exact=True,
        memory_bytes=gpus.memory_bytes,
        devices_per_node=gpus.count,
        nodes=None,
        host_memory_bytes=machine_memory_bytes(),
        gpus=gpus,
        in_job="SLURM_JOB_ID" in os.environ,
    )


def from_partition(nodes: SlurmNodes) -> Found:
    return Found(
        source=f"sinfo and scontrol, partition {nodes.partition}, {nodes.gres}",
        device=nodes.gpu_type,
        exact=False,
        memory_bytes=None,
        devices_per_node=nodes.gpus,
        nodes=nodes.count,
        away=nodes.away,
        host_memory_bytes=nodes.memory_bytes,
    )


def file_name(out: Path | None, proposed: str) -> Path:
    """Where to write the file. ``proposed``: its name if ``out`` gives none, with other characters replaced.

    Raises `UltrasweepError` for a name that exists or that no configuration can have.
    """
    name = re.sub(r"[^A-Za-z0-9_.+-]+", "_", proposed).lstrip(".+-") or "cluster"
    path = out or Path("conf", "cluster", f"{name}.yaml")
    if path.suffix != ".yaml":
        raise UltrasweepError(f"--out {path}: a file of conf/cluster ends in .yaml")
    if not _NAME.fullmatch(path.stem):
        raise UltrasweepError(f"--out {path}: a cluster's name may hold letters, digits, _, -, + and .")
    if (PACKAGED / "cluster" / path.name).is_file():
        raise UltrasweepError(
            f"{path.stem} is a cluster that ships with the program; give --out conf/cluster/NAME.yaml"
        )
    if path.exists():
        raise UltrasweepError(f"{path} exists; remove it, or give another name with --out conf/cluster/NAME.yaml")
    return path


def cluster_file(found: Found, name: str, base: str | None, folders: ConfFolders) -> ClusterFile:
    """The file for what was found. ``base``: the cluster file with the same device whose rates it takes; None: the one
    that fits, if one does.

    Raises `UltrasweepError` for a base that does not exist or has another device.
    """
    fitting = _fitting(found, folders)
    if base is not None:
        folders.find("cluster", base)
        spec = cluster_named(base, folders)
        known = spec.backend == _backend(found) if found.device is not None else spec.backend != "cpu"
        if not known or (found.exact and found.device not in spec.device.driver_names):
            also = f"; these do: {listed(fitting)}" if fitting else "; no cluster file does, so leave --base out"
            raise UltrasweepError(f"--base {base} does not describe {found.device or 'a GPU'}{also}")
    elif fitting:
        base = _best(fitting, found, folders)
    if base is None:
        return _without_base(found, name, folders)
    return _on_base(found, name, base, [one for one in fitting if one != base], folders)


def _fitting(found: Found, folders: ConfFolders) -> list[str]:
    """Cluster files of the device. Slurm's type must fit the names of one device only: ``a100`` is two."""
    if found.device is None:
        return []
    if found.exact:
        return clusters_of_device(folders, found.device)
    words = _words(found.device)
    names = {name: tuple(driver_names(folders, name)) for name in _gpu_clusters(folders, _backend(found))}
    fitting = {name: known for name, known in names.items() if any(words <= _words(one) for one in known)}
    return sorted(fitting) if len(set(fitting.values())) == 1 else []


def _backend(found: Found) -> str:
    return PLANNED_ONLY if found.device is not None and is_amd(found.device) else "cuda"


def _gpu_clusters(folders: ConfFolders, backend: str) -> list[str]:
    """Names of the cluster files with GPUs of a ``backend``, read without Hydra."""
    backends = {
        name: [file.fields["backend"] for file in folders.lineage("cluster", name) if "backend" in file.fields]
        for name in folders.names("cluster")
    }
    return [name for name, given in backends.items() if given[-1:] == [backend]]


def _words(name: str) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z0-9]+", name.lower()))


def _best(fitting: Sequence[str], found: Found, folders: ConfFolders) -> str:
    """The file whose network is that of this machine, if its devices tell; else one without settings of a network."""
    on_efa = found.gpus is not None and any(nic.startswith(_EFA) for nic in found.gpus.nics)
    if len(fitting) == 1:
        return fitting[0]
    return min(fitting, key=lambda name: (bool(cluster_named(name, folders).environment) != on_efa, name))


def _on_base(found: Found, name: str, base: str, others: Sequence[str], folders: ConfFolders) -> ClusterFile:
    spec = cluster_named(base, folders)
    fields: dict[str, object] = {
        "defaults": [base, "_self_"],
        "name": name,
        "devices_per_node": found.devices_per_node,
        "nodes": found.nodes,
    }
    known, unknown = _counts(found)
    as_in = f"as in {base}"
    if found.exact:
        known.insert(0, f"device: {found.device}")
        unknown.append(f"device's rates: {as_in} ({spec.device.source})")
        if found.memory_bytes is not None:
            known.append(f"device.memory_bytes: {found.memory_bytes // MIB} MiB")
            if found.memory_bytes != spec.device.memory_bytes:
                fields["device"] = {"memory_bytes": found.memory_bytes}
    else:
        said = f"Slurm says {found.device!r}" if found.device else "Slurm does not name it"
        unknown.append(f"device: {said}; {spec.device.name} {as_in}, memory and rates too ({spec.device.source})")
    unknown += _links(found, spec, as_in, fields, known)
    if others:
        unknown.append(
            f"which network: {listed(others)} {'has' if len(others) == 1 else 'have'} the same GPU; --base NAME"
        )
    if spec.environment:
        unknown.append(f"environment: {as_in} ({', '.join(spec.environment)})")
    unknown.append(f"reserved_bytes, matmul_efficiency: {as_in}, which says where they are from")
    unknown.append(_host(found, spec.host, as_in, fields, known))
    if spec.price_per_device_hour is None:
        unknown.append(_price(fields))
    else:
        unknown.append(f"price_per_device_hour: {as_in}, {spec.price_per_device_hour}")
    return _file(found, name, spec.backend, fields, known, unknown)


def _links(found: Found, spec: ClusterSpec, as_in: str, fields: dict[str, object], known: list[str]) -> list[str]:
    """What is not known about the links on a base; a link that is known to differ from the base's is written."""
    called = [(tier.network, f"{_called(tier, spec)}: {as_in} ({tier.source})") for tier in spec.tiers_by_size]
    outer = [line for network, line in called if network]
    outer = outer or ([] if spec.tiers else [f"inter_node: null, {as_in}"])
    *inner, intra = [line for network, line in called if not network]
    gpus = found.gpus
    if gpus is None or gpus.count < 2:
        return [*inner, intra, *outer]
    if gpus.link is None:
        return [*inner, f"{intra}; nvidia-smi topo -m does not show the links", *outer]
    if gpus.on_nvlink:
        known.append(f"links between GPUs: {gpus.link}")
        return [*inner, intra, *outer]
    known.append(f"links between GPUs: {gpus.link}, so no NVLink between all of them")
    fields["intra_node"], how = _over_pcie(gpus, spec.inside.link, as_in)
    if spec.tiers:  # which join more devices by faster links than these
        between = next((tier.link for tier in spec.outside), None)
        fields |= {"inter_node": _given(between) if between else None, "tiers": None}
    return [f"intra_node: {how}", *outer]


def _called(tier: TierSpec, spec: ClusterSpec) -> str:
    """The name that a link has in a cluster's file."""
    return f"tiers: {tier.name}" if spec.tiers else "inter_node" if tier.network else "intra_node"


def _given(link: LinkSpec) -> dict[str, object]:
    return {name: value for name, value in dataclasses.asdict(link).items() if value is not None}


def _host(found: Found, spec: HostSpec, as_in: str, fields: dict[str, object], known: list[str]) -> str:
    """What is not known about a node's host; its memory is written if it was found out."""
    rates = f"host.link_bandwidth, host.memory_bandwidth: {as_in}"
    if found.host_memory_bytes is None:
        return f"host: {as_in}; host.memory_bytes: {spec.memory_bytes or 'null, so it is not checked'}"
    known.append(f"host.memory_bytes: {found.host_memory_bytes // MIB} MiB")
    fields["host"] = {"memory_bytes": found.host_memory_bytes}
    return rates


def _over_pcie(gpus: Gpus, other: LinkSpec, as_in: str) -> tuple[dict[str, object], str]:
    """An intra_node for GPUs that talk over PCIe, and in words where it is from."""
    latency = f"latency {as_in}"
    if gpus.pcie_bandwidth is None:
        how = f"GPUs talk over PCIe ({gpus.link}), whose rate is not known: {as_in}, too fast; measure it with probe"
        return {**dataclasses.asdict(other), "source": how}, how
    assert gpus.pcie is not None
    how = f"nominal rate of PCIe {gpus.pcie[0]} x{gpus.pcie[1]}, an upper bound, not measured; {latency}"
    rates = {"bandwidth": round(gpus.pcie_bandwidth), "latency_s": other.latency_s}
    return {**rates, **{name: None for name in RATES if name.startswith("pair")}, "source": how}, how


def _without_base(found: Found, name: str, folders: ConfFolders) -> ClusterFile:
    """A file for a device that no other file describes: its rates are null, so step times are not predicted."""
    backend = _backend(found)
    bases = _gpu_clusters(folders, backend)
    other_name = bases[0]
    other = cluster_named(other_name, folders)
    known, unknown = _counts(found)
    device: dict[str, object] = {
        "name": found.device or f"GPU of {name}",
        "driver_names": [found.device] if found.exact and found.device else [],
        "memory_bytes": found.memory_bytes,
        "peak_flops": {},
        "memory_bandwidth": None,
        "source": found.source,
    }
    if found.exact:
        known.insert(0, f"device: {found.device}")
        unknown.append("device's peak_flops, memory_bandwidth: null, no cluster file describes it; see its data sheet")
    else:
        said = (
            f"Slurm says {found.device!r}, which fits no or several" if found.device else "Slurm does not name it, of"
        )
        unknown.append(f"device: {said} cluster files; --base NAME says which: {', '.join(bases)}")
    if found.memory_bytes is None:
        unknown.append("device.memory_bytes: null, so no point is predicted not to fit")
    else:
        known.append(f"device.memory_bytes: {found.memory_bytes // MIB} MiB")
    intra: dict[str, object] = {**dataclasses.asdict(other.inside.link)}
    how = f"not known: that of {other_name}, {_UNUSED}"
    if found.gpus is not None and found.gpus.link is not None:
        known.append(f"links between GPUs: {found.gpus.link}")
        if not found.gpus.on_nvlink:
            intra, how = _over_pcie(found.gpus, other.inside.link, f"as in {other_name}")
    intra["source"] = how
    inter = {**_given(other.outside[0].link), "source": f"not known: that of {other_name}, {_UNUSED}"}
    unknown += [f"intra_node: {how}", f"inter_node: {inter['source']}", "reserved_bytes, matmul_efficiency: 0 and null"]
    of_host: dict[str, object] = {}
    unknown.append(_host(found, UNKNOWN_HOST, "null", of_host, known))
    fields: dict[str, object] = {
        "name": name,
        "backend": backend,
        "device": device,
        "devices_per_node": found.devices_per_node,
        "nodes": found.nodes,
        "intra_node": {key: value for key, value in intra.items() if value is not None},
        "inter_node": inter,
        "reserved_bytes": 0,
        "matmul_efficiency": None,
        **of_host,
    }
    return _file(found, name, backend, fields, known, [*unknown, _price(fields)])


def _counts(found: Found) -> tuple[list[str], list[str]]:
    known, unknown = [f"devices_per_node: {found.devices_per_node}"], []
    if found.in_job:
        unknown.append(f"devices_per_node: {found.devices_per_node} (what this job sees; the node may have more)")
    if found.nodes is None:
        unknown.append("nodes: null, so no layout is too wide")
    else:
        known.append(f"nodes: {found.nodes}{f', {found.away} of them down or drained now' if found.away else ''}")
    return known, unknown


def _price(fields: dict[str, object]) -> str:
    fields["price_per_device_hour"] = None
    return "price_per_device_hour: null"


def _file(
    found: Found, name: str, backend: str, fields: dict[str, object], known: Sequence[str], unknown: Sequence[str]
) -> ClusterFile:
    heads = [f"From {found.source}.", "Known:", *(f"- {line}" for line in known)]
    heads += ["Not known:", *(f"- {line}" for line in unknown)]
    heads.append(_PLANNED if backend == PLANNED_ONLY else _CHECKED)
    comment = [
        f"# {line}"
        for head in heads
        for line in textwrap.wrap(head, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]
    body = yaml.safe_dump(fields, sort_keys=False, width=_WIDTH, default_flow_style=None, allow_unicode=True)
    text = "\n".join([*comment, body])
    planned = backend == PLANNED_ONLY
    return ClusterFile(name=name, text=text, known=tuple(known), unknown=tuple(unknown), planned_only=planned)


def print_cluster_file(made: ClusterFile, found: Found, path: Path, console: Console) -> None:
    """Print what is known and what is not, and the commands that use the file."""
    folder = path.parent.parent if path.parent.name == "cluster" else None
    lines = [f"written: {path}, from {found.source}", "known:", *(f"  {line}" for line in made.known)]
    lines += ["not known:", *(f"  {line}" for line in made.unknown)]
    if made.planned_only:
        lines.append(_PLANNED)
    if folder is None:
        lines.append(f"move it into a folder DIR/cluster, and give --conf DIR cluster={made.name}")
    else:
        lines.append(f"use it: python -m sweep plan +grid=NAME --conf {folder} cluster={made.name}")
    for line in lines:
        console.print(printable(line), highlight=False, markup=False)
