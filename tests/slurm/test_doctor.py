"""The doctor on a real Slurm: a healthy node, and one thing broken at a time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.slurm.lab import Lab
from tests.slurm.lab.lab import CHECKOUT

pytestmark = pytest.mark.drawn(one_in=2)

GPUS = 2
CLUSTER = f"""
defaults: [/device@device: h100_80gb, _self_]
name: lab
backend: cuda
devices_per_node: {GPUS}
intra_node: {{bandwidth: 360.0e9, latency_s: 4.0e-6, source: a test}}
inter_node: {{bandwidth: 50.0e9, latency_s: 5.0e-6, source: a test}}
matmul_efficiency: null
"""
SMI = """#!/bin/sh
for number in $(seq {count}); do echo "NVIDIA H100 80GB HBM3, [N/A]"; done
"""
TORCH = "class cuda:\n    device_count = staticmethod(lambda: {count})\n"
NAMES = ["job", "shared folder", "Python", "packages", "GPUs", "network", "scontrol", "clock"]
NAMES += ["space for the sweep", "space for temporary files"]


@dataclass
class Patient:
    """One call of the doctor on a node whose GPUs are a script and a module of a test."""

    lab: Lab
    root: Path
    node: str | None
    """The only node of the job; None: any."""
    setup: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.root / "conf" / "cluster").mkdir(parents=True)
        (self.root / "conf" / "cluster" / "lab.yaml").write_text(CLUSTER)
        self.gpus(GPUS)

    @property
    def fake(self) -> Path:
        return self.root / "fake"

    def gpus(self, count: int) -> None:
        self.fake.mkdir(exist_ok=True)
        (self.fake / "nvidia-smi").write_text(SMI.format(count=count))
        (self.fake / "nvidia-smi").chmod(0o755)
        (self.fake / "torch.py").write_text(TORCH.format(count=count))

    def ask(self, *words: str, results: Path | None = None) -> tuple[int, dict[str, str], str]:
        """Exit code, the status of each check, and everything that was printed."""
        fake = f"export PATH={self.fake}:$PATH PYTHONPATH={self.fake}"
        setup = ",".join(f'"{line}"' for line in [fake, *self.setup])
        command = [
            *(sys.executable, "-m", "sweep", "doctor", "--conf", str(self.root / "conf"), "cluster=lab"),
            *("launcher=slurm", f"launcher.nodelist={self.node or 'null'}", "launcher.exclusive=false"),
            *("launcher.cpus_per_task=2", "launcher.mem=100M", f"launcher.setup=[{setup}]"),
            *(f"results_dir={results or self.root / 'results'}", *self.words, *words),
        ]
        done = subprocess.run(
            command,
            cwd=CHECKOUT,
            env=self.lab.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert not done.stderr, done.stderr
        found = {}
        for line in done.stdout.splitlines():
            status, _, rest = line.partition(" ")
            name = next((name for name in NAMES if rest.strip().startswith(f"{name} ")), None)
            if status in ("pass", "fail", "unknown") and name is not None:
                found[name] = status
        return done.returncode, found, done.stdout


@pytest.fixture
def patient(plain_lab: Lab, tmp_path: Path) -> Iterator[Patient]:
    yield Patient(plain_lab, tmp_path, plain_lab.nodes[0])


def only_failure(asked: tuple[int, dict[str, str], str], name: str, *texts: str) -> None:
    """Exactly this check fails, and its value and remedy hold these texts."""
    code, found, output = asked
    assert code == 1
    assert found == {**dict.fromkeys(NAMES, "pass"), name: "fail"}, output
    lines = output.splitlines()
    number = next(number for number, line in enumerate(lines) if line.startswith("fail"))
    assert "remedy: " in lines[number + 1]
    for text in texts:
        assert text in "".join(lines[number : number + 2]), output


def _ends(lab: Lab) -> bool:
    """Whether the last job of the cluster ends within seconds."""
    until = time.monotonic() + 30
    while lab.jobs() and time.monotonic() < until:
        time.sleep(0.2)
    return not lab.jobs()


def test_a_healthy_node_passes_and_nothing_is_left(patient: Patient) -> None:
    patient.node = None
    code, found, output = patient.ask("--nodes", "2")
    assert (code, found) == (0, dict.fromkeys(NAMES, "pass")), output
    assert "10 pass" in output
    assert not (patient.root / "results" / "doctor").exists()


def test_a_folder_that_the_node_does_not_see(patient: Patient) -> None:
    results = patient.root / "results"
    results.mkdir()
    assert patient.node is not None
    patient.lab.node("exec", patient.node, "mount", "-t", "tmpfs", "none", str(results))
    try:
        code, found, output = patient.ask()
    finally:
        patient.lab.node("exec", patient.node, "umount", str(results))
    assert code == 1
    assert found == {"job": "fail", **dict.fromkeys(NAMES[1:], "unknown")}, output
    assert f"on {patient.node} ended" in output and "does not see this folder" in output
    assert "results_dir=DIR on a shared file system" in output


@pytest.mark.exhaustive(seconds=8)
def test_a_folder_that_only_the_program_does_not_see(patient: Patient) -> None:
    """As in a container that mounts less than its node."""
    hide = f"unshare --mount sh -c 'mount -t tmpfs none {patient.root}/results && exec \\\"$@\\\"' sh"
    wrapper = patient.root / "container"
    wrapper.write_text(f'#!/bin/sh\n{hide.replace(chr(92), "")} "$@"\n')
    wrapper.chmod(0o755)
    patient.words.append(f"launcher.prefix=[{wrapper}]")
    code, found, output = patient.ask()
    failed = {name for name, status in found.items() if status == "fail"}
    assert code == 1 and "shared folder" in failed, output
    assert "cannot be read on the node: No such file or directory" in output


def test_a_package_of_another_version(patient: Patient) -> None:
    other = patient.fake / "pyarrow-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: pyarrow\nVersion: 1.0\n")
    only_failure(patient.ask(), "packages", "pyarrow 1.0, ", "launcher.python")


@pytest.mark.exhaustive(seconds=8)
def test_a_python_without_packages(patient: Patient) -> None:
    empty = patient.root / "empty"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(empty)], check=True)
    patient.words.append(f"launcher.python={empty}/bin/python")
    only_failure(patient.ask(), "packages", "numpy, nvidia-ml-py, pyarrow, torch and triton missing", f"{empty}/bin")


def test_fewer_gpus_than_the_cluster_file_says(patient: Patient) -> None:
    patient.gpus(GPUS - 1)
    only_failure(patient.ask(), "GPUs", "1 NVIDIA H100 80GB HBM3", "the cluster file says 2", "devices_per_node")


def test_scontrol_is_not_on_path(patient: Patient) -> None:
    without = patient.root / "bin"
    without.mkdir()
    for folder in reversed(patient.lab.environment["PATH"].split(":")):
        for program in Path(folder).glob("*") if folder else ():
            if program.name != "scontrol":
                (without / program.name).unlink(missing_ok=True)
                (without / program.name).symlink_to(program)
    patient.setup.append(f"export PATH={patient.fake}:{without}")
    only_failure(patient.ask(), "scontrol", "cannot requeue its job", "launcher.requeue=false")
    code, found, output = patient.ask("launcher.requeue=false")
    assert (code, found["scontrol"]) == (0, "pass"), output


def test_a_file_system_that_is_too_small(patient: Patient) -> None:
    results = patient.lab.disk / "results"
    try:
        only_failure(patient.ask(results=results), "space for the sweep", "2 logs of up to 16 MiB", "results_dir=DIR")
    finally:
        shutil.rmtree(results)


def test_a_clock_that_is_an_hour_ahead(patient: Patient) -> None:
    (patient.fake / "sitecustomize.py").write_text("import time\nreal = time.time\ntime.time = lambda: real() + 3600\n")
    only_failure(patient.ask(), "clock", "ahead of this machine's", "NTP")


@pytest.mark.exhaustive(seconds=8)
def test_a_setup_line_that_fails_is_named(patient: Patient) -> None:
    patient.setup.append("module load no_such_module")
    code, found, output = patient.ask()
    assert code == 1 and found["job"] == "fail", output
    assert "launcher.setup failed with exit code" in output and "module load no_such_module" in output


def test_a_job_that_does_not_start_says_why_and_is_cancelled(patient: Patient) -> None:
    assert patient.node is not None
    patient.lab.drain(patient.node)
    try:
        code, found, output = patient.ask("--wait", "5")
    finally:
        patient.lab.resume(patient.node)
    assert code == 1 and found == {"job": "fail", **dict.fromkeys(NAMES[1:], "unknown")}, output
    assert "still waits after 5 s; Slurm says " in output and "ReqNodeNotAvail" in output
    assert "--wait SECONDS" in output
    assert _ends(patient.lab)


@pytest.mark.exhaustive(seconds=8)
def test_a_job_that_runs_and_does_not_answer_is_cancelled(patient: Patient) -> None:
    patient.setup += ["echo copying the image", "sleep 300"]
    code, found, output = patient.ask("--wait", "6")
    assert code == 1 and found["job"] == "fail", output
    assert f"is running on {patient.node} after 6 s, without an answer: " in output
    assert "copying the image" in output and "look at the logs in " in output
    assert _ends(patient.lab)


def test_slurm_refuses_the_job_in_one_line(patient: Patient) -> None:
    command: Sequence[str] = (
        *(sys.executable, "-m", "sweep", "doctor", "--conf", str(patient.root / "conf"), "cluster=lab"),
        *("launcher=slurm", "launcher.partition=nowhere", f"results_dir={patient.root / 'results'}"),
    )
    environment = {**patient.lab.environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(command, cwd=CHECKOUT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "invalid partition" in done.stderr.lower()
