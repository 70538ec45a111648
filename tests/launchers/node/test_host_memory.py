"""Kills because host memory ran out, read from the files of control groups of version 1 and 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.node.host_memory import oom_kills


def made(root: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """``/proc/self`` and ``/sys/fs/cgroup`` of a machine."""
    proc, mounts = root / "proc", root / "cgroup"
    proc.mkdir()
    mounts.mkdir()
    (proc / "cgroup").write_text(cgroup)
    for name, text in files.items():
        (mounts / name).parent.mkdir(parents=True, exist_ok=True)
        (mounts / name).write_text(text)
    return proc, mounts


def test_version_2(tmp_path: Path) -> None:
    events = "low 0\nhigh 3\nmax 17\noom 2\noom_kill 2\noom_group_kill 0\n"
    places = made(tmp_path, "0::/system.slice/job_7/step_0\n", {"system.slice/job_7/step_0/memory.events": events})
    assert oom_kills(*places) == 2


def test_version_1_counts_kills(tmp_path: Path) -> None:
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
    cgroup = "12:cpuset:/slurm\n4:memory:/slurm/uid_0/job_7/step_0/task_0\n0::/\n"
    group = "memory/slurm/uid_0/job_7/step_0/task_0"
    places = made(tmp_path, cgroup, {f"{group}/memory.oom_control": control, f"{group}/memory.failcnt": "900\n"})
    assert oom_kills(*places) == 3


def test_version_1_of_an_old_kernel_counts_only_how_often_the_limit_was_met(tmp_path: Path) -> None:
    job = "memory/slurm/uid_0/job_7"
    files = {
        f"{job}/step_0/task_0/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n",
        f"{job}/step_0/task_0/memory.failcnt": "0\n",
        f"{job}/step_0/memory.failcnt": "5\n",
        f"{job}/memory.failcnt": "0\n",
        "memory/memory.failcnt": "0\n",
    }
    assert oom_kills(*made(tmp_path, "4:memory:/slurm/uid_0/job_7/step_0/task_0\n", files)) == 5


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    files = {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"}
    assert oom_kills(*made(tmp_path, "4:memory:/docker/0123abcd\n0::/\n", files)) == 1


@pytest.mark.parametrize("cgroup", ["", "nonsense", "0::/gone\n", "4:memory:/gone\n"])
def test_a_kernel_without_a_count_gives_zero(tmp_path: Path, cgroup: str) -> None:
    assert oom_kills(*made(tmp_path, cgroup, {})) == 0
    assert oom_kills(tmp_path / "nowhere", tmp_path) == 0


@pytest.mark.slow
def test_a_real_kill_is_counted() -> None:
    """A child in a group with a limit of 64 MiB uses more: the kernel kills it, and the group's count shows the
    kill."""
    name = f"ultrasweep_test_{os.getpid()}"
    try:
        lines = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        version_1 = "memory" in lines
        parent = (
            Path("/sys/fs/cgroup/memory" if version_1 else "/sys/fs/cgroup") / lines["memory" if version_1 else ""][1:]
        )
        group = parent / name
        group.mkdir()
    except (OSError, KeyError) as error:
        pytest.skip(f"no control group can be made here: {error}")
    limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
    if not limit.exists():
        group.rmdir()
        pytest.skip("groups made here have no memory controller")
    program = (
        "import os, sys\n"
        "from launchers.node.host_memory import oom_kills\n"
        f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        "before = oom_kills()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    held = bytearray(os.urandom(1)) * (512 * 2**20)\n"
        "    os._exit(0)\n"
        "status = os.waitpid(pid, 0)[1]\n"
        "print(os.WTERMSIG(status), oom_kills() - before)\n"
    )
    try:
        limit.write_text(str(64 * 2**20))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    finally:
        group.rmdir()
    assert done.stdout.split() == [str(int(signal.SIGKILL)), "1"], done.stderr
