"""The program that the doctor runs on a node: it prints what the node is like, as one line of JSON.

It is read from standard input (``python - FOLDER TOKEN < on_node.py``), so it also runs where the folder is not
visible. It uses the standard library alone and keeps to Python 3.6, because a node's Python may be too old or may lack
every package: so no ``from __future__ import annotations``, and newer annotations stand in quotes.
"""

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MARK = "ultrasweep-doctor"
"""Beginning of the line with the answer."""
DISTRIBUTIONS = ("numpy", "nvidia-ml-py", "pyarrow", "torch", "triton")
"""Packages that pilots, agents and ranks import."""
REQUEST, CLOCK, ANSWER = "request", "clock", "answer"
"""Files in the folder: its token, the time on the login node, and one of each node with the token."""
_QUERY = ("nvidia-smi", "--query-gpu=name,mig.mode.current", "--format=csv,noheader")
_SMI_LIMIT_S, _TORCH_LIMIT_S = 60, 240
"""Seconds. The first import of torch from a shared file system may take minutes."""
_TORCH = "import torch; print(torch.cuda.device_count())"
_SIOCGIFADDR, _SIOCGIFFLAGS, _UP = 0x8915, 0x8913, 1


def main(folder: str, token: str) -> None:
    facts: dict[str, Any] = {
        "token": token,
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "executable": sys.executable,
        "packages": packages(),
        "gpus": gpus(),
        "torch_gpus": torch_gpus(),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "interfaces": interfaces(),
        "infiniband": names_in("/sys/class/infiniband"),
        "socket_ifname": os.environ.get("NCCL_SOCKET_IFNAME"),
        "scontrol": shutil.which("scontrol"),
        "temporary": free_space(temporary_folder()),
        "folder": free_space(folder),
        "shared": shared(folder, token),
    }
    # The clocks come last: the later they are read, the less lies between them and the doctor's reading of the answer.
    facts["login_time"] = login_time(folder)
    facts["time"] = time.time()
    sys.stdout.write(f"\n{MARK} {json.dumps(facts)}\n")
    sys.stdout.flush()


def packages() -> "dict[str, str | None] | None":
    """Version of each of `DISTRIBUTIONS`; None: not installed. None for all: this Python cannot tell."""
    try:
        from importlib import metadata
    except ImportError:
        return None
    versions: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def gpus() -> "dict[str, Any]":
    """Name and MIG mode of each GPU that nvidia-smi shows, or why it shows none."""
    if shutil.which(_QUERY[0]) is None:
        return {"error": "nvidia-smi is not on PATH"}
    output, error = run(_QUERY, _SMI_LIMIT_S)
    if error:
        return {"error": "nvidia-smi: " + error}
    lines = [[part.strip() for part in line.split(",")] for line in output.splitlines() if line.strip()]
    return {"names": [line[0] for line in lines], "mig": [line[-1] for line in lines]}


def torch_gpus() -> "dict[str, Any]":
    """Number of GPUs that torch can use, or why torch does not say."""
    output, error = run((sys.executable, "-c", _TORCH), _TORCH_LIMIT_S)
    last = output.split()[-1:] if not error else []
    if last and last[0].isdigit():
        return {"count": int(last[0])}
    return {"error": error or "torch printed no number"}


def run(command: "tuple[str, ...]", limit_s: int) -> "tuple[str, str]":
    """Standard output of a command and an empty text, or an empty text and the last line about its failure."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True
        )
    except OSError as error:
        return "", str(error)
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return "", f"no answer within {limit_s} s"
    if process.returncode == 0:
        return output, ""
    lines = [line.strip() for line in (errors + output).splitlines() if line.strip()]
    return "", lines[-1] if lines else f"exit code {process.returncode}"


def interfaces() -> "dict[str, str | None] | None":
    """IPv4 address of each network interface that is up, None for one without; by name, in the kernel's order."""
    addresses: dict[str, str | None] = {}
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                try:
                    flags = struct.unpack("H", fcntl.ioctl(any_socket.fileno(), _SIOCGIFFLAGS, request)[16:18])[0]
                except OSError:
                    continue
                if not flags & _UP:
                    continue
                try:
                    answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                    addresses[name] = socket.inet_ntoa(answer[20:24])
                except OSError:
                    addresses[name] = None
    except OSError:
        return None
    return addresses


def names_in(folder: str) -> "list[str]":
    """Names of the entries of a folder; none where it does not exist."""
    try:
        return sorted(entry.name for entry in Path(folder).iterdir())
    except OSError:
        return []


def temporary_folder() -> "str | None":
    """The folder for temporary files, which Python has tried to write into; None: there is none."""
    try:
        return tempfile.gettempdir()
    except OSError:
        return None


def free_space(folder: "str | None") -> "dict[str, Any]":
    """Path and free bytes of a folder's file system, or the error."""
    if folder is None:
        return {"path": None, "error": "no folder for temporary files can be written (TMPDIR, /tmp, /var/tmp)"}
    try:
        return {"path": folder, "free_bytes": shutil.disk_usage(folder).free}
    except OSError as error:
        return {"path": folder, "error": error.strerror}


def shared(folder: str, token: str) -> "dict[str, str | None]":
    """Whether the request of this token is in the folder, and whether a file could be written beside it."""
    written, error = None, None
    try:
        seen = Path(folder, REQUEST).read_text()
    except OSError as failure:
        return {"seen": None, "written": None, "error": failure.strerror}
    name = f"{ANSWER}-{os.environ.get('SLURM_PROCID', '0')}"
    try:
        Path(folder, name).write_text(token)
        written = name
    except OSError as failure:
        error = failure.strerror
    return {"seen": seen, "written": written, "error": error}


def login_time(folder: str) -> "float | None":
    """Seconds since the epoch that the login node wrote last; None where they cannot be read."""
    try:
        return float(Path(folder, CLOCK).read_text())
    except (OSError, ValueError):
        return None


if __name__ == "__main__":
    main(*sys.argv[1:3])
