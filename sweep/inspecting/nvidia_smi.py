"""What nvidia-smi says about the GPUs of this machine: their kind, memory, MIG, PCIe, and the links between them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from results.errors import UltrasweepError
from results.text.numbers import MIB, listed
from results.text.printable import one_line

_FIELDS = ("name", "memory.total", "mig.mode.current", "pcie.link.gen.max", "pcie.link.width.max")
QUERY = ("nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
TOPOLOGY = ("nvidia-smi", "topo", "-m")
_LIMIT_S = 60.0
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NIC = re.compile(r"^\s*NIC[0-9]+:\s*(\S+)\s*$", re.MULTILINE)
_DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Paths over PCIe, from the nearest to the farthest, as nvidia-smi calls them."""
_PCIE_GT = {3: 8e9, 4: 16e9, 5: 32e9, 6: 64e9}
"""Transfers per second and lane by generation (PCI-SIG)."""
_PCIE_CODING = 128 / 130
"""Share of data in what a lane of generation 3 to 5 sends; a little less in generation 6 (PCI-SIG)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of one machine, all of one kind."""

    name: str
    count: int
    memory_bytes: int | None
    link: str | None
    """Slowest link between two of them in nvidia-smi's words: ``NV18``, ``PIX`` to ``SYS``; None: not known."""
    nics: tuple[str, ...] = ()
    """Network devices that nvidia-smi lists, such as ``mlx5_0``."""
    pcie: tuple[int, int] | None = None
    """Generation and width of PCIe at most."""

    @property
    def pcie_bandwidth(self) -> float | None:
        """Nominal bytes per second of one device over PCIe in one direction; None if not known."""
        if self.pcie is None or self.pcie[0] not in _PCIE_GT:
            return None
        generation, width = self.pcie
        return _PCIE_GT[generation] * width / 8 * _PCIE_CODING

    @property
    def on_nvlink(self) -> bool:
        return self.link is not None and self.link.startswith("NV")


def read_gpus(run: Callable[[Sequence[str]], str] | None = None) -> Gpus:
    """The GPUs of this machine. ``run`` returns the output of a command; None: call it.

    Raises `UltrasweepError` with one line without nvidia-smi or GPUs, with MIG, or with GPUs of several kinds.
    """
    call = run or _call
    rows = [[part.strip() for part in line.split(",")] for line in call(QUERY).splitlines() if line.strip()]
    rows = [row for row in rows if len(row) == len(_FIELDS)]
    if not rows:
        raise UltrasweepError("nvidia-smi shows no GPU on this machine; run the command on a compute node")
    mig = [str(number) for number, row in enumerate(rows) if row[2] == "Enabled"]
    if mig:
        raise UltrasweepError(
            f"MIG is on for GPU {listed(mig)}: a process can use only one part of a GPU; switch it off "
            "(nvidia-smi -mig 0, by an administrator), or write a cluster file of one device a node by hand"
        )
    kinds = sorted({(row[0], row[1]) for row in rows})
    if len(kinds) > 1:
        what = listed([f"{sum(row[0] == name for row in rows)} {name} ({memory} MiB)" for name, memory in kinds])
        raise UltrasweepError(f"this machine has GPUs of {len(kinds)} kinds, {what}; a cluster file describes one kind")
    name, memory, _, generation, width = rows[0]
    link, nics = parse_topology(call(TOPOLOGY), len(rows)) if len(rows) > 1 else (None, ())
    return Gpus(
        name=name,
        count=len(rows),
        memory_bytes=int(memory) * MIB if memory.isdigit() else None,
        link=link,
        nics=nics,
        pcie=(int(generation), int(width)) if generation.isdigit() and width.isdigit() else None,
    )


def parse_topology(text: str, count: int) -> tuple[str | None, tuple[str, ...]]:
    """The slowest link between ``count`` GPUs, and the network devices, in the output of ``nvidia-smi topo -m``."""
    lines = _COLOURS.sub("", text).splitlines()
    header = next((line.split() for line in lines if "GPU0" in line.split() and line.split()[1:2] != ["X"]), [])
    rows = {words[0]: words[1 : count + 1] for line in lines if (words := line.split())}
    links = {link for number in range(count) for link in rows.get(f"GPU{number}", [])} - {"X"}
    nics = tuple(_NIC.findall("\n".join(lines))) or tuple(
        word for word in header if not word.startswith(("GPU", "NIC")) and word not in ("CPU", "NUMA", "Affinity", "ID")
    )
    distances = [link for link in _DISTANCES if link in links]
    if distances:
        return distances[-1], nics
    numbers = sorted(int(link.removeprefix("NV")) for link in links if re.fullmatch(r"NV[0-9]+", link))
    return (f"NV{numbers[0]}" if numbers else None), nics


def _call(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        raise UltrasweepError(f"{command[0]} is not on PATH here; run the command on a compute node with its driver")
    try:
        done = subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UltrasweepError(f"{' '.join(command[:2])} did not answer within {_LIMIT_S:.0f} s") from None
    if done.returncode != 0 and command != TOPOLOGY:  # without a topology the links are not known
        words = one_line((done.stderr + done.stdout).strip()) or f"exit code {done.returncode}"
        raise UltrasweepError(f"nvidia-smi: {words}")
    return done.stdout
