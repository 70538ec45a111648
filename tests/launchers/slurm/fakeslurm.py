"""`FakeSlurm`: a cluster that exists only on PATH, with ``squeue``, ``sbatch`` ... as scripts that share one JSON file.

The test sets the behaviour of each command, and moves jobs from state to state. `scontrol`, `scancel` and `sacct` only
know the options that the launcher uses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_SCRIPT = r"""
import json, os, re, sys, time
name, folder = os.path.basename(sys.argv[0]), os.path.dirname(os.path.realpath(sys.argv[0]))
path = os.path.join(folder, "state.json")
state = json.load(open(path))
mode = state["modes"].get(name, "")
with open(os.path.join(folder, "calls"), "a") as calls:
    calls.write(json.dumps([name, *sys.argv[1:]]) + "\n")
def fail(line):
    sys.stderr.write(line + "\n")
    sys.exit(1)
def save():
    with open(path + ".new", "w") as file:
        json.dump(state, file)
    os.replace(path + ".new", path)
cluster = os.environ.get("SLURM_CLUSTERS", "")
mine = [job for job in state["jobs"] if job.get("cluster", "") == cluster]
def option(flag):
    return sys.argv[sys.argv.index(flag) + 1]
if mode == "hang":
    time.sleep(60)
if mode == "down":
    fail(name + ": error: Unable to contact slurm controller (connect failure)")
if name == "squeue":
    if "SQUEUE_PARTITION" in os.environ or "SQUEUE_STATES" in os.environ:  # as the real one: only some jobs
        sys.exit(0)
    for job in mine:
        name = f"{job['id']}_{job['index']}" if job["array"] else str(job["id"])
        index = job["index"] if job["array"] else "N/A"
        fields = (job["id"], index, name, job["state"], job["reason"], job["nodes"], job["name"], job["comment"])
        print("|".join(map(str, fields)))
elif name == "sacct":
    if mode == "disabled":
        fail("Slurm accounting storage is disabled")
    for job in state["accounted"]:
        if job["name"] in option("--name").split(","):
            print(f"{job['id']}|{job['state']}|{job['exit']}|{job['name']}")
elif name == "scontrol" and sys.argv[1:3] == ["show", "hostnames"]:
    head, numbers = re.fullmatch(r"(.*)\[(.*)\]", sys.argv[3]).groups()
    for part in numbers.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            print(f"{head}{number:0{len(first)}d}")
elif name == "scontrol" and sys.argv[1] == "update":
    if mode == "refuse":
        fail("slurm_update error: Access/permission denied")
elif name == "scontrol":
    print(f"Configuration data\nMaxArraySize            = {state['max_array']}\nMaxJobCount             = 10000")
elif name == "scancel" and "SCANCEL_STATE" in os.environ:  # as the real one: spares the others and reports success
    pass
elif name == "scancel":
    for word in sys.argv[1:]:
        for job in mine:
            if word == f"{job['id']}_{job['index']}" or word == str(job["id"]):
                if job["state"] == "PENDING" or "--state=PENDING" not in sys.argv:
                    job["state"] = "CANCELLED"
    save()
elif name == "sbatch":
    text = open(sys.argv[-1]).read()
    given = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.*)$", text, re.M))
    count = int(given["array"].partition("%")[0].partition("-")[2]) + 1 if "array" in given else 1
    if mode == "refuse":
        fail("sbatch: error: invalid partition specified: nope\nsbatch: error: Batch job submission failed: "
             "Invalid partition name specified")
    if mode.startswith("not without: ") and "exclude" in given:
        fail("sbatch: error: Batch job submission failed: " + mode[13:])
    alive = sum(job["state"] in ("PENDING", "RUNNING") for job in state["jobs"])
    over = mode.startswith("quota ") and alive + count > int(mode[6:])
    if over or (mode.startswith("at most ") and count > int(mode[8:])):
        fail("sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
             "accounting/QOS policy (job submit limit, user's size and/or time limits)")
    if mode == "lost":
        fail("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    number = state["next"]
    state["next"] += 1
    for index in range(count):
        state["jobs"].append({"id": number, "index": index, "array": count > 1, "state": "PENDING",
                              "reason": state.get("default_reason", "None"), "nodes": "",
                              "name": given["job-name"], "comment": given["comment"], "cluster": cluster})
    save()
    if mode == "silent":
        fail("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation")
    if mode == "killed":
        os.kill(int(state["caller"]), 9)
    if mode == "banner":
        print("Welcome to cluster 9!\nYour last job 4711 ended well.\n31337 jobs served so far")
    if mode == "latin":  # a site's line in another encoding
        sys.stdout.buffer.write(b"caf\xe9\n")
    print(number if "--parsable" in sys.argv else f"Submitted batch job {number}")
    if mode == "two numbers":
        print(4711)
"""


class FakeSlurm:
    """The state of the cluster. ``folder`` is put first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("squeue", "sacct", "scontrol", "scancel", "sbatch", "srun"):
            (folder / name).write_text(f"#!{sys.executable} -SIE\n{_SCRIPT}")
            (folder / name).chmod(0o755)
        self._write({"jobs": [], "accounted": [], "modes": {"sacct": "disabled"}, "next": 1, "max_array": 1001})

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "state.json").read_text()))

    @property
    def jobs(self) -> list[dict[str, Any]]:
        return list(self.state["jobs"])

    def set(self, **fields: Any) -> None:
        self._write({**self.state, **fields})

    def mode(self, command: str, mode: str = "") -> None:
        """Set the behaviour of ``command`` from now on; empty: normal."""
        self.set(modes={**self.state["modes"], command: mode})

    def move(self, state: str, *, reason: str = "None", of: int | None = None) -> None:
        """Put all jobs, or those of one number, into ``state``."""
        jobs = [{**j, "state": state, "reason": reason} if of in (None, j["id"]) else j for j in self.jobs]
        self.set(jobs=jobs)

    def forget(self) -> None:
        """Remove all jobs, as when slurmctld has lost its state or the jobs ended long ago."""
        self.set(jobs=[])

    def calls(self, command: str) -> list[list[str]]:
        """Arguments of every call so far."""
        try:
            lines = (self.folder / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [words[1:] for words in map(json.loads, lines) if words[0] == command]

    def _write(self, state: dict[str, Any]) -> None:
        (self.folder / ".state").write_text(json.dumps(state))
        (self.folder / ".state").replace(self.folder / "state.json")
