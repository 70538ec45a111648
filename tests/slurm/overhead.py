"""Cost of pilots and of one Slurm job per point on the same virtual cluster: ``python -m tests.slurm.overhead``.

Both ways run the same stand-in points (half a second of steps, one node each) with the same number of nodes at a time.
One job per point is the alternative to pilots: each job starts Python, opens the devices, runs its one point, writes
its row and ends. The stand-in imports no torch; with the real engine (about ten seconds of imports) the ratio is
larger.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from launchers.state import pilot_state
from launchers.state.pilot_config import pilot_config_to_dict, read_pilot_config
from launchers.state.sweep_dir import SweepDir, entry_names, read_point
from results.tables.store import read_attempts
from tests.slurm.conftest import free_ports
from tests.slurm.lab import Lab
from tests.slurm.lab.lab import CHECKOUT, wait_until
from tests.slurm.submit import STANDIN
from tests.slurm.sweeps import StandinSweep

POINT = "ok_0.5"
_FORMAT = "ElapsedRaw,NNodes,State,Start,End"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Result of the comparison. Times in seconds; node-seconds as accounted by Slurm."""

    points: int
    pilot_node_s: float
    """Node-seconds of allocation per point, with pilots."""
    job_node_s: float
    """Node-seconds of allocation per point, with one job per point."""
    ratio: float
    idle_share: float
    """Share of the pilots' allocation in which no point ran on a node."""
    pilot_wall_s: float
    job_wall_s: float

    def __str__(self) -> str:
        return "\n".join(f"{name:<16}{value:,.3f}" for name, value in dataclasses.asdict(self).items())


def measure_overhead(lab: Lab, folder: Path, *, points: int, nodes: int) -> Overhead:
    """Run ``points`` points both ways on ``nodes`` nodes of a cluster with accounting."""
    partition = lab.add_partition("overhead", lab.nodes[:nodes])
    sweep = StandinSweep(
        lab, folder, "pilots", [(POINT, 1)] * points, partition, words=[f"launcher.max_pilots={nodes}"]
    )
    sweep.start()
    sweep.finish(900)
    sweep.check()
    rows = read_attempts(sweep.path).to_pylist()
    busy_s = sum(row["duration_s"] for row in rows)
    pilots_s, pilot_wall_s = _accounted(lab, partition)
    jobs_s, job_wall_s = _one_job_a_point(lab, folder, sweep.dir, nodes)
    return Overhead(
        points=points,
        pilot_node_s=pilots_s / points,
        job_node_s=jobs_s / points,
        ratio=jobs_s / pilots_s,
        idle_share=1 - busy_s / pilots_s,
        pilot_wall_s=pilot_wall_s,
        job_wall_s=job_wall_s,
    )


def _one_job_a_point(lab: Lab, folder: Path, done: SweepDir, nodes: int) -> tuple[float, float]:
    """The same points as an array of jobs: a sweep of one point for each job."""
    partition = lab.add_partition("single", lab.nodes[:nodes])
    token = next(iter((done.path / "submissions").glob("*.json"))).stem
    config = dataclasses.replace(
        read_pilot_config(pilot_state.config_path(done, token)), wall_time_s=None, batch_system="none"
    )
    names = entry_names(done.done)
    for number, name in enumerate(names):
        single = SweepDir.create(folder / "singles" / str(number), {})
        single.add_points([read_point(done.done / name)])
        pilot_state.config_path(single, "p").write_text(json.dumps(pilot_config_to_dict(config)))
    script = folder / "single.sh"
    command = f'exec "{sys.executable}" "{STANDIN}" "{folder}/singles/$SLURM_ARRAY_TASK_ID" p'
    script.write_text(f"#!/bin/sh\nexport PYTHONPATH={CHECKOUT}\n{command}\n")
    lab.run(
        *("sbatch", "-p", partition, f"--array=0-{len(names) - 1}", "--exclusive", "-N1", "--gpus-per-node=2"),
        *("-o", "/dev/null", script),
    )
    wait_until(lambda: not lab.jobs(partition=partition), 1800, "the single jobs", every_s=1)
    singles = [SweepDir(folder / "singles" / str(number)) for number in range(len(names))]
    left = [single for single in singles if not entry_names(single.done)]
    assert not left, f"{len(left)} single jobs did not run their point"
    return _accounted(lab, partition)


def _accounted(lab: Lab, partition: str) -> tuple[float, float]:
    """Node-seconds that Slurm accounts to a partition's jobs, and seconds from their first start to their last end."""
    time.sleep(3)  # the accounting is a little behind
    text = lab.run("sacct", "-D", "-X", "-n", "-P", "-r", partition, "-S", "now-1day", "-o", _FORMAT)
    rows = [line.split("|") for line in text.splitlines()]
    ran = [row for row in rows if row[3] != "None" and row[4] not in ("Unknown", "None")]
    starts, ends = [row[3] for row in ran], [row[4] for row in ran]
    span = [time.mktime(time.strptime(at, "%Y-%m-%dT%H:%M:%S")) for at in (min(starts), max(ends))]
    return sum(float(row[0]) * int(row[1]) for row in ran), span[1] - span[0]


def main() -> None:
    with Lab(nodes=8, port_base=free_ports(10)) as lab:
        folder = Path(tempfile.mkdtemp(prefix="overhead-", dir=lab.state))
        print(measure_overhead(lab, folder, points=200, nodes=4))


if __name__ == "__main__":
    main()
