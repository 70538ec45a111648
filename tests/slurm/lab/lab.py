"""`Lab`: one throw-away Slurm cluster on this machine, and the faults that it can be made to have."""

from __future__ import annotations

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "slurmdbd", "mariadbd")
OTHER_USER = "nobody"
"""A user that exists everywhere and owns no files."""
DISK_MB = 24
"""Size of the file system that can be filled."""
_PATH = f"{os.environ['PATH']}:/usr/sbin"
_SACCT_DISABLED = '#!/bin/sh\necho "Slurm accounting storage is disabled" >&2\nexit 1\n'


@functools.cache
def why_not() -> str | None:
    """Reason why no cluster can be started here; None when one can."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]:
        return f"no Slurm here: {', '.join(missing)} missing (as root on Debian or Ubuntu: tests/slurm/lab/packages)"
    if os.geteuid() != 0:
        return "a Slurm for tests needs root"
    probe = ["unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        return "a Slurm for tests needs namespaces, and unshare is not permitted here"
    return None


@dataclass(frozen=True, slots=True)
class Job:
    """One line of squeue."""

    id: str
    """Job id: ``1234`` or ``1234_5``."""
    state: str
    reason: str
    partition: str
    nodes: tuple[str, ...]


class Lab:
    """A running cluster. Use as a context manager, or call `down`."""

    def __init__(
        self,
        *,
        nodes: int = 8,
        gpus: int = 8,
        accounting: Literal["dbd", "none"] = "dbd",
        port_base: int = 19000,
        real_gpus: bool = False,
        state: Path | None = None,
    ) -> None:
        """Start the cluster; needs ``nodes + 2`` ports from ``port_base``. Raises `RuntimeError` with the failed step.

        ``real_gpus``: the nodes share out the machine's own GPUs, ``gpus`` to each. ``state``: folder of the cluster,
        which may already run there; None: a new one.
        """
        self.state = state or Path(tempfile.mkdtemp(prefix="ultrasweep-slurm-", dir="/tmp"))
        self.state.mkdir(exist_ok=True)
        self.state.chmod(0o755)
        self.nodes = tuple(f"node{number:03d}" for number in range(1, nodes + 1))
        self.gpus = gpus
        self.accounting = accounting
        self.disk = self.state / "disk"
        words = ["--nodes", nodes, "--gpus", gpus, "--accounting", accounting, "--port-base", port_base]
        words += ["--real-gpus", "yes"] if real_gpus else []
        for folder in _closed_to_others():
            words += ["--open", folder]
        done = subprocess.run(
            [HERE / "up", "--state", self.state, "--disk-mb", str(DISK_MB), *map(str, words)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )
        if done.returncode != 0:
            self.down()
            raise RuntimeError(f"the cluster did not come up: {done.stderr[-2000:]}")

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def down(self, *, keep: bool = False) -> None:
        """Stop all processes of the cluster. ``keep``: leave the folder with the logs."""
        command = [HERE / "down", "--state", self.state, *(["--keep"] if keep else [])]
        subprocess.run(command, stdin=subprocess.DEVNULL, check=True, timeout=120)

    @property
    def environment(self) -> dict[str, str]:
        """Environment for commands that are to find this cluster."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return {**inherited, "PATH": _PATH, "SLURM_CONF": str(self.state / "slurm.conf")}

    def run(self, *command: str | Path, timeout_s: float = 30.0, check: bool = True) -> str:
        """Standard output of a command of this cluster (``squeue`` ...)."""
        done = subprocess.run(
            list(map(str, command)),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
        return done.stdout

    # State of the cluster

    def jobs(self, *, partition: str | None = None, every: bool = False) -> list[Job]:
        """Waiting and running jobs; ``every``: also those that ended in the last minutes."""
        words = ["-h", "-r", "-o", "%i|%T|%r|%P|%N", *(["-t", "all"] if every else [])]
        if partition is not None:
            words += ["-p", partition]
        lines = [line.split("|") for line in self.run("squeue", *words).splitlines()]
        return [Job(number, state, reason, where, expand(nodes)) for number, state, reason, where, nodes in lines]

    def sdiag(self) -> dict[str, int]:
        """The numbers that slurmctld keeps about itself, by their label."""
        found = re.findall(r"^\s*([A-Z][^:\n]*?)\s*:\s*(\d+)\s*$", self.run("sdiag"), re.M)
        return {label: int(value) for label, value in reversed(found)}

    def processes(self, text: str, node: str | None = None) -> list[int]:
        """Living processes, seen from the machine, whose command line contains ``text``; ``node``: only those on that
        node."""
        init = self.node("pid", node).strip() if node is not None else None
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit() or int(folder.name) == os.getpid():
                continue
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().decode(errors="replace")
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                if text not in words or state in "ZX":
                    continue
                if init is None or _same_namespace(folder.name, init):
                    found.append(int(folder.name))
        return found

    # Faults of nodes

    def node(self, verb: str, name: str, *words: str, check: bool = True) -> str:
        """Run the node script and return its answer."""
        return self.run(HERE / "node", self.state, verb, name, *words, check=check)

    def crash_node(self, name: str) -> None:
        """Power loss: all processes of the node die at once."""
        self.node("crash", name)

    def start_node(self, name: str) -> None:
        self.node("start", name)

    def drain(self, name: str, reason: str = "test") -> None:
        self.run("scontrol", "update", f"nodename={name}", "state=drain", f"reason={reason}")

    def resume(self, name: str) -> None:
        self.run("scontrol", "update", f"nodename={name}", "state=resume")

    def kill_in_node(self, name: str, pid: int, number: int = signal.SIGKILL) -> None:
        """Signal a process by the pid that it has inside the node."""
        self.node("exec", name, "bash", "-c", f"kill -{int(number)} {pid}")

    def set_clock(self, name: str, seconds: float) -> None:
        """Shift the node's clock by ``seconds`` for stand-ins that start there from now on (see `standin`)."""
        (self.state / "clock" / name).write_text(str(seconds))

    def add_partition(self, name: str, nodes: Sequence[str], *, preemptible: bool = False) -> str:
        """Add a partition of some nodes. Jobs of all other partitions preempt the jobs of a preemptible one, which are
        requeued."""
        words = ["PriorityTier=1", "PreemptMode=REQUEUE", "GraceTime=10"]
        if not preemptible:
            words = ["PriorityTier=10", "PreemptMode=OFF"]
        names = f"Nodes={','.join(nodes)}"
        self.run("scontrol", "create", f"PartitionName={name}", names, "DefaultTime=60", "State=UP", *words)
        return name

    def break_python(self, name: str) -> None:
        """From now on Python on this node is ``false`` and ends at once."""
        false = shutil.which("false") or "/bin/false"
        self.node("exec", name, "mount", "--bind", false, os.path.realpath(sys.executable))

    def repair_python(self, name: str) -> None:
        self.node("exec", name, "umount", os.path.realpath(sys.executable))

    def node_seconds(self, partition: str) -> float:
        """Node-seconds that Slurm has accounted to all jobs of a partition so far."""
        time.sleep(3)  # the accounting is a little behind
        words = ["-D", "-X", "-n", "-P", "-r", partition, "-S", "now-1day", "-o", "ElapsedRaw,NNodes,Start"]
        text = self.run("sacct", *words)
        rows = [line.split("|") for line in text.splitlines()]
        return sum(float(seconds) * int(nodes) for seconds, nodes, start in rows if start not in ("None", "Unknown"))

    def limit_jobs(self, partition: str, most: int) -> None:
        """Limit each user to so many jobs in a partition; each element of an array counts."""
        self.run("sacctmgr", "-i", "add", "qos", f"most{most}", f"MaxSubmitJobsPerUser={most}")
        wait_until(lambda: self._has_qos(partition, f"most{most}"), 20, "the limit")

    # Faults of the controller

    def ctld_stop(self) -> None:
        self._stop("slurmctld", signal.SIGTERM)

    def ctld_kill(self) -> None:
        self._stop("slurmctld", signal.SIGKILL)

    def resume_nodes(self) -> None:
        """Make every node available again, whatever Slurm or a scenario has drained."""
        self.run("scontrol", "update", "nodename=ALL", "state=resume", check=False)

    def ctld_save(self) -> None:
        """Copy the controller's saved state for `ctld_forget`. Stops it for a moment, since it saves its state when it
        stops."""
        self.ctld_stop()
        shutil.copytree(self.state / "ctld", self.state / "ctld-before", dirs_exist_ok=True)
        self.ctld_start()

    def ctld_forget(self) -> None:
        """Restore the copy of `ctld_save` while the controller is down. So it forgets later jobs and reuses their
        ids."""
        shutil.rmtree(self.state / "ctld")
        (self.state / "ctld-before").rename(self.state / "ctld")

    def ctld_start(self) -> None:
        """Start the controller again and wait until it answers."""
        self.run("slurmctld")
        wait_until(lambda: "UP" in self.run("scontrol", "ping", check=False), 30, "slurmctld")

    def ctld_freeze(self) -> None:
        """Freeze the controller: it accepts connections and never answers."""
        os.kill(self._pid("slurmctld"), signal.SIGSTOP)

    def ctld_thaw(self) -> None:
        os.kill(self._pid("slurmctld"), signal.SIGCONT)

    def dbd_kill(self) -> None:
        self._stop("slurmdbd", signal.SIGKILL)

    def dbd_start(self) -> None:
        environment = {**self.environment, "MYSQL_UNIX_PORT": str(self.state / "mysql" / "socket")}
        subprocess.run(["slurmdbd"], env=environment, stdin=subprocess.DEVNULL, check=True, timeout=30)
        wait_until(lambda: "lab" in self.run("sacctmgr", "-n", "show", "cluster", check=False), 30, "slurmdbd")

    def without_sacct(self) -> dict[str, str]:
        """`environment` in which ``sacct`` prints the error of a cluster without accounting."""
        folder = self.state / "no-sacct"
        folder.mkdir(exist_ok=True)
        (folder / "sacct").write_text(_SACCT_DISABLED)
        (folder / "sacct").chmod(0o755)
        return {**self.environment, "PATH": f"{folder}:{_PATH}"}

    # Faults of the disk, other users

    def fill_disk(self) -> None:
        """Leave no free byte on `disk`."""
        filler = os.open(self.disk / ".filler", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        with suppress(OSError):
            while os.write(filler, bytes(65_536)):
                pass
        os.close(filler)

    def free_disk(self) -> None:
        (self.disk / ".filler").unlink(missing_ok=True)

    def as_other_user(self, command: Sequence[str], *, login: str | None = None) -> list[str]:
        """``command`` run by another user on a node (inside of which that user may enter closed folders)."""
        become = ["setpriv", "--reuid", OTHER_USER, "--regid", "nogroup", "--clear-groups"]
        node = login or self.nodes[0]
        return [str(HERE / "node"), str(self.state), "exec", node, *become, *command]

    def _has_qos(self, partition: str, qos: str) -> bool:
        self.run("scontrol", "update", f"PartitionName={partition}", f"QOS={qos}", check=False)
        return f"QoS={qos}" in self.run("scontrol", "show", "partition", partition)

    def _pid(self, daemon: str) -> int:
        return int((self.state / "run" / f"{daemon}.pid").read_text())

    def _stop(self, daemon: str, number: int) -> None:
        pid = self._pid(daemon)
        os.kill(pid, number)
        wait_until(lambda: not _alive(pid), 20, f"the end of {daemon}")


def expand(nodes: str) -> tuple[str, ...]:
    """Names in one of Slurm's lists of nodes, e.g. ``node[001-003,007]``."""
    names: list[str] = []
    for prefix, inside in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?", nodes):
        if not inside:
            names.append(prefix)
        for part in filter(None, inside.split(",")):
            first, _, last = part.partition("-")
            names += [f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return tuple(names)


def wait_until(condition: Callable[[], object], limit_s: float, what: str, *, every_s: float = 0.1) -> None:
    """Wait for ``condition``. Raises `AssertionError` naming ``what`` when it stays false."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s:.0f} s for {what}"
        time.sleep(every_s)


@contextmanager
def afterwards(undo: Callable[[], None]) -> Iterator[None]:
    """Call ``undo`` at the end, even when the test fails."""
    try:
        yield
    finally:
        undo()


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _same_namespace(one: str, other: str) -> bool:
    first, second = (Path("/proc", pid, "ns", "pid").readlink() for pid in (one, other))
    return first == second


def _closed_to_others() -> list[str]:
    """Folders on the path to Python and to this checkout that other users may not enter."""
    ways = (Path(sys.executable).resolve(), Path(sys.prefix), CHECKOUT)
    closed = {str(folder) for way in ways for folder in way.parents if not folder.stat().st_mode & 0o001}
    return sorted(closed)
