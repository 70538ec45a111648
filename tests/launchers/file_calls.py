"""Counts the calls that a pilot and its ranks make on a sweep's folder: ``python -m tests.launchers.file_calls``.

A pilot of this machine runs stand-in ranks under `strace`, which sees every system call that names a file: open, stat,
rename, mkdir, unlink and the like; not read, write, close, or fstat of an open file, which need no look-up. Two figures
matter on a shared filesystem: the calls per second while ranks run, which must not grow with their number, and the
calls per point of two ranks from its claim to its end. Needs ``strace`` (``apt-get install strace``) and no torch.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from launchers.settings import LaunchSettings
from launchers.state import pilot_state
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict, pilot_environment
from launchers.state.sweep_dir import Point, SweepDir, entry_names
from tests.launchers.scripted import points, settings
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import write_json

RANKS = (2, 8, 32)
POINTS = 20
STEPS = 8
"""Number of one-second steps in the measurement of calls per second."""
_CALL = re.compile(r"^(\d+) +(\d+\.\d+) (\w+)\((.*)$")


@dataclass(frozen=True, slots=True)
class Call:
    process: int
    time: float
    """Seconds since the epoch."""
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Calls per second on the sweep's folder while all ranks of one point run."""

    pilot: float
    """Calls of the pilot and its agent."""
    ranks: float
    """Calls of all ranks together."""


def calls_a_second(folder: Path, ranks: int) -> Rate:
    """Run one point of ``ranks`` ranks that take a step a second."""
    launch = settings(
        num_devices=ranks, measure=MeasureSpec(warmup_steps=1, timed_steps=STEPS - 1), phase_limits_s={}, lease_s=60.0
    )
    calls = trace(folder, points("slowish", dp=ranks, global_batch_size=2 * ranks, deadline_s=120.0), launch)
    logs = [call for call in calls if re.search(r"rank_\d+\.log", call.arguments) and "O_CREAT" in call.arguments]
    results = [call for call in calls if "result.json" in call.arguments and "O_CREAT" in call.arguments]
    start, end = max(call.time for call in logs) + 1.0, min(call.time for call in results) - 0.1
    processes = {call.process for call in logs}
    inside = [call.process in processes for call in calls if start <= call.time < end]
    return Rate(pilot=inside.count(False) / (end - start), ranks=inside.count(True) / (end - start))


def calls_a_point(folder: Path, count: int = POINTS) -> Counter[str]:
    """Calls of all processes per point, over ``count`` short points of two ranks, by the name of the call. They are
    counted from the first claim to the end of the last point, without the pilot's own start and end."""
    calls = trace(folder, points(*["ok"] * count), settings(lease_s=60.0))
    moves = [call for call in calls if call.name.startswith("rename")]
    start = min(call.time for call in moves if "/queue/claimed/" in call.arguments)
    end = max(call.time for call in moves if "/queue/done/" in call.arguments)
    inside = Counter(call.name for call in calls if start <= call.time <= end)
    return Counter({name: round(number / count, 2) for name, number in inside.items()})  # type: ignore[misc]


def trace(folder: Path, queued: list[Point], launch: LaunchSettings) -> list[Call]:
    """Every call on the folder of a sweep whose ``queued`` points one pilot runs, oldest first."""
    sweep = SweepDir.create(folder, {})
    sweep.add_points(queued)
    config = PilotConfig(settings=launch, command=None, wall_time_s=None, stop_with_parent=False, provenance={})
    write_json(pilot_state.config_path(sweep, "p"), pilot_config_to_dict(config))
    log = folder.with_name(f"{folder.name}.strace")
    strace = ["strace", "-f", "--seccomp-bpf", "-ttt", "-s", "300", "-e", "trace=%file", "-o", str(log)]
    command = [*strace, sys.executable, "-m", "tests.launchers.scripted", str(sweep.path), "p"]
    subprocess.run(command, env=pilot_environment(), check=True, stdout=subprocess.DEVNULL)
    assert len(entry_names(sweep.done)) == len(queued)
    traced = (_CALL.match(line) for line in log.read_text(errors="replace").splitlines() if str(sweep.path) in line)
    calls = [Call(int(match[1]), float(match[2]), match[3], match[4]) for match in traced if match is not None]
    return sorted(calls, key=lambda call: call.time)


def main() -> None:
    """Print both figures."""
    if shutil.which("strace") is None:
        sys.exit("strace is missing: apt-get install strace")
    with tempfile.TemporaryDirectory(prefix="file_calls-") as name:
        print("calls a second on the sweep's folder while ranks run")
        print(f"{'ranks':>8}{'pilot':>10}{'ranks':>10}")
        for ranks in RANKS:
            rate = calls_a_second(Path(name) / f"ranks{ranks}", ranks)
            print(f"{ranks:>8}{rate.pilot:>10.1f}{rate.ranks:>10.1f}", flush=True)
        a_point = calls_a_point(Path(name) / "points")
        rates = ", ".join(f"{name} {number:g}" for name, number in a_point.most_common())
        print(f"calls a point of two ranks: {sum(a_point.values()):.1f} ({rates})")


if __name__ == "__main__":
    main()
