"""From what a node says about itself to lines for the user: pass, fail or unknown, the value, and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launchers.node.log_cap import LIMIT_BYTES as LOG_BYTES
from launchers.slurm.options import WALL_TIME_MARGIN_S
from results.text.numbers import MIB, format_bytes, listed, plural

Status = Literal["pass", "fail", "unknown"]
_WORST: Sequence[Status] = ("fail", "unknown", "pass")
PYTHONS = ("3.11", "3.12")
"""Versions of Python that run this code."""
TEMPORARY_BYTES = 512 * MIB
"""Free bytes that a node's folder for temporary files must have. torch and Triton keep compiled kernels there."""
CLOCK_LIMIT_S = float(WALL_TIME_MARGIN_S)
"""Seconds by which clocks may differ: a pilot plans its end by its own clock and Slurm's, with this margin."""
_NOT_CHOSEN = ("lo", "docker")
"""Beginnings of the names of interfaces that NCCL uses only if there is no other."""
_ONLY_ON_GPUS = ("nvidia-ml-py", "triton")
_MOST_VALUES = 6
"""Values of different nodes that one line shows."""
_LOCAL_VERSION = re.compile(r"\+.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the nodes are compared with."""

    python: str
    """Version of the Python that runs this command."""
    packages: Mapping[str, str | None]
    """Version of each package here; None: not installed here."""
    devices: int | None
    """GPUs of a node; 0: it needs none; None: no cluster file says."""
    driver_names: tuple[str, ...] = ()
    """Names of the cluster file's device; empty: it does not say."""
    socket_ifname: str | None = None
    """``NCCL_SOCKET_IFNAME`` of the ranks; None: not set for them."""
    several_nodes: bool = True
    """Whether ranks of one layout may be on several nodes."""
    slurm: bool = True
    requeue: bool = True
    """Whether a pilot may requeue its own job."""
    ranks: int
    """Ranks of a node, each with a log of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one node has said."""

    facts: Mapping[str, Any]
    """As `launchers.doctor.on_node` prints it."""
    read_at: float
    """Seconds since the epoch on this machine when the answer was read."""
    file_seen: bool
    """Whether the file that the node has written is seen here."""
    scontrol_outside: str | None = None
    """Path of ``scontrol`` for the job's script, which runs outside of an image; None: there is none."""

    @property
    def node(self) -> str:
        return str(self.facts["node"])


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor."""

    name: str
    status: Status
    value: str
    remedy: str = ""


def checks(answers: Sequence[Answer], expected: Expected) -> list[Check]:
    """One line for each check. Of several nodes the worst counts, and nodes that differ are named."""
    return [_merged([(answer.node, check(answer, expected)) for answer in answers]) for check in _CHECKS]


def unanswered(why: str, remedy: str) -> list[Check]:
    """The lines when no node has answered: the job has failed, and nothing else is known."""
    return [Check("job", "fail", why, remedy), *(Check(name, "unknown", "no node answered") for name in NAMES)]


def shared_folder(answer: Answer, expected: Expected) -> Check:
    name, shared, path = "shared folder", answer.facts["shared"], answer.facts["folder"]["path"]
    if not expected.slurm:
        if shared["written"] and answer.file_seen:
            return Check(name, "pass", f"{path} can be written")
        return Check(name, "fail", f"{path}: {shared['error']}", "choose another folder with results_dir=DIR")
    mount = "mount it on the nodes, and in the container at the same path, or give results_dir=DIR on a shared one"
    if shared["seen"] is None:
        return Check(name, "fail", f"{path} cannot be read on the node: {shared['error']}", mount)
    if shared["seen"] != answer.facts["token"]:
        return Check(name, "fail", f"{path} on the node is another folder than here", mount)
    if not shared["written"]:
        remedy = "mount it for writing, and give your user the right to write there"
        return Check(name, "fail", f"{path} cannot be written on the node: {shared['error']}", remedy)
    if not answer.file_seen:
        return Check(name, "fail", f"what the node writes into {path} is not seen here", mount)
    return Check(name, "pass", f"{path}: written here and read on the node, and the reverse")


def python(answer: Answer, expected: Expected) -> Check:
    here, there = _minor(expected.python), _minor(answer.facts["python"])
    value = f"{answer.facts['python']} ({answer.facts['executable']})"
    remedy = f"set launcher.python to a Python {here}, or load one in launcher.setup"
    if there not in PYTHONS:
        return Check("Python", "fail", f"{value}; {' or '.join(PYTHONS)} is needed", remedy)
    return Check("Python", "pass", value) if here == there else Check("Python", "fail", f"{value}, {here} here", remedy)


def packages(answer: Answer, expected: Expected) -> Check:
    there: Mapping[str, str | None] | None = answer.facts["packages"]
    if there is None:
        return Check("packages", "unknown", "this Python cannot list its packages", "use the Python that is needed")
    needed = [name for name in there if expected.devices != 0 or name not in _ONLY_ON_GPUS]
    missing = [name for name in needed if there[name] is None]
    others = [
        f"{name} {there[name]}, {expected.packages[name]} here"
        for name in needed
        if there[name] is not None and _differ(there[name], expected.packages.get(name))
    ]
    if missing or others:
        texts = [f"{listed(missing)} missing"] if missing else []
        remedy = f"install the versions of this machine for {answer.facts['executable']} on the nodes, or set "
        remedy += "launcher.python, launcher.setup or the image to an environment that has them"
        return Check("packages", "fail", "; ".join([*texts, *others]), remedy)
    lacking = [name for name in needed if expected.packages.get(name) is None]
    note = f" (not here: {listed(lacking)})" if lacking else ""
    return Check("packages", "pass", ", ".join(f"{name} {there[name]}" for name in needed) + note)


def devices(answer: Answer, expected: Expected) -> Check:
    """The GPUs that a rank will see. torch's own number counts, since it respects what Slurm gives the job."""
    name, smi, torch = "GPUs", answer.facts["gpus"], answer.facts["torch_gpus"]
    if expected.devices == 0:
        return Check(name, "pass", "none needed: the cluster file has CPU processes")
    request = "look at launcher.gpus, launcher.gpu_type and the cluster file's devices_per_node"
    if "error" in smi and not torch.get("count"):
        remedy = "install the driver, give the container its GPUs (apptainer --nv), or request them with launcher.gpus"
        return Check(name, "fail", smi["error"], remedy)
    if any(mode == "Enabled" for mode in smi.get("mig", ())):
        remedy = "switch MIG off (nvidia-smi -mig 0, by an administrator), or describe nodes of one device"
        return Check(name, "fail", "MIG is on: a process can use only one part of a GPU", remedy)
    kinds = list(dict.fromkeys(smi.get("names", ())))
    of_kind = f" {' and '.join(kinds)}" if kinds else ""
    if "error" in torch:
        remedy = "install a torch for the driver's CUDA version, or the libraries that it lacks"
        return Check(name, "fail", f"torch sees none: {torch['error']}", remedy)
    count = torch["count"]
    if "names" in smi and not count:
        remedy = "install a torch built for CUDA, of a version that the driver supports"
        return Check(name, "fail", f"nvidia-smi shows {len(smi['names'])}{of_kind}, torch sees none", remedy)
    if expected.devices is None:
        remedy = "give cluster=NAME to compare their number"
        return Check(name, "unknown", f"{count}{of_kind}; no cluster file to compare with", remedy)
    if count < expected.devices:
        why = f" (CUDA_VISIBLE_DEVICES={answer.facts['visible']})" if answer.facts["visible"] is not None else ""
        return Check(name, "fail", f"{count}{of_kind}{why}, the cluster file says {expected.devices}", request)
    if expected.driver_names and kinds and not set(kinds) <= set(expected.driver_names):
        remedy = "choose the cluster file of this GPU, or `python -m sweep cluster --from-this-machine` on the node"
        return Check(name, "fail", f"{count}{of_kind}, the cluster file says {expected.driver_names[0]}", remedy)
    more = f", of which {expected.devices} are used" if count > expected.devices else ""
    return Check(name, "pass", f"{count}{of_kind}{more}")


def network(answer: Answer, expected: Expected) -> Check:
    """The interface through which NCCL and gloo start."""
    name, there = "network", answer.facts["interfaces"]
    given = expected.socket_ifname or answer.facts["socket_ifname"]
    if there is None:
        return Check(name, "unknown", "the node's interfaces cannot be listed", "set NCCL_SOCKET_IFNAME")
    usable = {interface: address for interface, address in there.items() if address is not None}
    ports = answer.facts["infiniband"]
    more = f"; InfiniBand {', '.join(ports)}" if ports else ""
    shown = listed([f"{interface} {address}" for interface, address in usable.items()]) or "no interface"
    if given:
        chosen = chosen_interfaces(given, list(usable))
        if not chosen:
            value = f"NCCL_SOCKET_IFNAME={given} fits none of {shown}"
            return Check(name, "fail", value, "correct it in the cluster file's environment")
        return Check(name, "pass", f"{chosen[0]} {usable[chosen[0]]} (NCCL_SOCKET_IFNAME={given}){more}")
    others = [interface for interface in usable if not interface.startswith(_NOT_CHOSEN)]
    if not others and expected.several_nodes:
        remedy = "name the interface between the nodes: NCCL_SOCKET_IFNAME in the cluster file's environment"
        return Check(name, "fail", f"{shown}, which other nodes do not reach", remedy)
    if not others:
        return Check(name, "pass", f"{shown}, enough for one node")
    return Check(name, "pass", f"{others[0]} {usable[others[0]]}, NCCL's own choice{more}")


def scontrol(answer: Answer, expected: Expected) -> Check:
    name, inside, outside = "scontrol", answer.facts["scontrol"], answer.scontrol_outside
    if not expected.slurm:
        return Check(name, "pass", "not needed without Slurm")
    if inside is not None:
        return Check(name, "pass", str(inside))
    if outside is not None:
        return Check(name, "pass", f"not in the image, which needs none: the job's script has {outside}")
    if not expected.requeue:
        return Check(name, "pass", "missing, and not needed with launcher.requeue=false")
    remedy = "add Slurm's folder to PATH in launcher.setup, or set launcher.requeue=false"
    return Check(name, "fail", "missing in the job, so a pilot cannot requeue its job at the time limit", remedy)


def clock(answer: Answer, expected: Expected) -> Check:
    """The node's clock less this machine's lies between two numbers: the node read its clock after this machine had
    written ``login_time``, and before this machine read the answer."""
    if not expected.slurm:
        return Check("clock", "pass", "the same machine")
    there, before = answer.facts["time"], answer.facts["login_time"]
    least = there - answer.read_at
    if before is None:
        if least > CLOCK_LIMIT_S:
            return Check("clock", "fail", f"at least {least:.0f} s ahead of this machine's", _SET_CLOCK)
        return Check("clock", "unknown", "the node could not read this machine's time", "make the folder visible")
    most = there - before
    if least > CLOCK_LIMIT_S or most < -CLOCK_LIMIT_S:
        ahead = "ahead of" if least > 0 else "behind"
        return Check("clock", "fail", f"{min(abs(least), abs(most)):,.0f} s or more {ahead} this machine's", _SET_CLOCK)
    value = f"{least:+.1f} to {most:+.1f} s from this machine's"
    if max(abs(least), abs(most)) > CLOCK_LIMIT_S:
        return Check("clock", "unknown", f"{value}: the answer took too long to tell", "run the doctor again")
    return Check("clock", "pass", value)


def space(answer: Answer, expected: Expected) -> Check:
    reason = f"{plural(expected.ranks, 'log')} of up to {format_bytes(LOG_BYTES, 0)}"
    return _free("space for the sweep", answer.facts["folder"], expected.ranks * LOG_BYTES, reason, "results_dir=DIR")


def temporary_space(answer: Answer, expected: Expected) -> Check:
    remedy = "'launcher.setup=[\"export TMPDIR=DIR\"]'" if expected.slurm else "TMPDIR=DIR"
    reason = "compiled kernels"
    return _free("space for temporary files", answer.facts["temporary"], TEMPORARY_BYTES, reason, remedy)


_SET_CLOCK = "let an administrator set it (NTP, chrony): a pilot plans its end by it"
_CHECKS: Sequence[Callable[[Answer, Expected], Check]] = (
    *(shared_folder, python, packages, devices, network, scontrol, clock, space, temporary_space),
)
NAMES = (
    *("shared folder", "Python", "packages", "GPUs", "network", "scontrol", "clock"),
    *("space for the sweep", "space for temporary files"),
)
"""Names of the checks, in their order."""


def chosen_interfaces(given: str, names: Sequence[str]) -> list[str]:
    """The interfaces that NCCL takes for a value of ``NCCL_SOCKET_IFNAME``: beginnings of names separated by commas,
    whole names after ``=``, all but these after ``^`` (NCCL's documentation, "Environment Variables")."""
    without, exact = given.startswith("^"), given.lstrip("^").startswith("=")
    words = [word for word in given.lstrip("^").lstrip("=").split(",") if word]

    def fits(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in words)

    return [name for name in names if fits(name) != without]


def _free(name: str, there: Mapping[str, Any], least: int, reason: str, option: str) -> Check:
    remedy = f"free some, or choose another folder: {option}"
    if "error" in there:
        return Check(name, "fail", f"{there['path'] or 'none'}: {there['error']}", remedy)
    free, value = there["free_bytes"], f"{format_bytes(there['free_bytes'])} free in {there['path']}"
    if free < least:
        return Check(name, "fail", f"{value}; {reason} need {format_bytes(least)}", remedy)
    return Check(name, "pass", value)


def _merged(of_nodes: Sequence[tuple[str, Check]]) -> Check:
    worst = min((check.status for _, check in of_nodes), key=_WORST.index)
    alike = [(node, check) for node, check in of_nodes if check.status == worst]
    if len({check.value for _, check in of_nodes}) == 1:
        return alike[0][1]
    return _each(alike[0][1], alike)


def _each(first: Check, of_nodes: Sequence[tuple[str, Check]]) -> Check:
    """The line with the nodes of each value."""
    nodes: dict[str, list[str]] = {}
    for node, check in of_nodes:
        nodes.setdefault(check.value, []).append(node)
    values = [f"{listed(names)}: {text}" for text, names in nodes.items()]
    more = [f"and {len(values) - _MOST_VALUES} more"] if len(values) > _MOST_VALUES else []
    value = "; ".join(values[:_MOST_VALUES] + more)
    return Check(first.name, first.status, value, first.remedy)


def _differ(there: str | None, here: str | None) -> bool:
    """Whether two versions differ; the part after ``+`` (``2.13.0+cpu``) does not count, and one that is not known."""
    if there is None or here is None:
        return False
    return _LOCAL_VERSION.sub("", there) != _LOCAL_VERSION.sub("", here)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
