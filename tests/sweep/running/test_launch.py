"""Which launcher, what a pilot is told, how Slurm is asked, and what the commands hand to the launcher."""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import launchers.slurm.submit
from launchers.pilot import rebuild
from launchers.settings import LaunchSettings
from launchers.slurm.options import SlurmOptions
from launchers.state.sweep_dir import Point, SweepDir, entry_names
from launchers.status.run_summary import RunSummary
from results.errors import UltrasweepError
from sweep.__main__ import main
from sweep.composing import machine
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import compose_sweep
from sweep.composing.machine import Machine, default_launcher
from sweep.running.launch import launch_settings, slurm_options
from workloads.spec.other_names import OF_SUBMITIT

LOGIN_NODE = Machine(gpu_name=None, num_gpus=0)


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine where sbatch is on PATH and configured."""
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\nexit 1\n")
    sbatch.chmod(0o755)
    (tmp_path / "slurm.conf").write_text("")
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


class Fleet:
    """Stands for `launchers.slurm.submit`: notes what it was given."""

    def __init__(self) -> None:
        self.runs: list[tuple[SweepDir, LaunchSettings, SlurmOptions, dict[str, Any]]] = []
        self.shown: list[Sequence[Point]] = []

    def run_slurm(self, sweep: SweepDir, settings: LaunchSettings, options: SlurmOptions, **more: Any) -> RunSummary:
        self.runs.append((sweep, settings, options, more))
        left = len(entry_names(sweep.todo))
        return RunSummary(outcomes={}, attempts=0, left=left, too_wide=0, interrupted=False, detached=True)

    def dry_run(
        self, sweep: SweepDir, points: Sequence[Point], settings: LaunchSettings, options: SlurmOptions
    ) -> list[str]:
        self.shown.append(points)
        return ["#!/bin/bash\n#SBATCH [bold]one[/]\n", "#!/bin/bash\n#SBATCH two\n"]


@pytest.fixture
def submit(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    double = Fleet()
    monkeypatch.setattr(launchers.slurm.submit, "run_slurm", double.run_slurm)
    monkeypatch.setattr(launchers.slurm.submit, "dry_run", double.dry_run)
    monkeypatch.setattr(machine, "count_cuda_devices", lambda: pytest.fail("asked a login node for its GPUs"))
    return double


def test_slurm_is_the_default_where_jobs_are_submitted(login_node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_launcher() == "slurm"
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # inside an allocation
    assert default_launcher() == "local"
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setenv("SLURM_CONF", str(login_node / "none"))
    assert default_launcher() == "local"
    monkeypatch.setenv("SLURM_CONF", str(login_node / "slurm.conf"))
    monkeypatch.setenv("PATH", str(login_node))
    assert default_launcher() == "local"


@pytest.mark.slow
def test_what_a_pilot_is_told_is_bound_to_the_cluster_file() -> None:
    config = compose_sweep(["+grid=playbook", "launcher=slurm", "+launcher.environment.NCCL_DEBUG=WARN"])
    settings = launch_settings(config, LOGIN_NODE)
    assert (settings.launcher, settings.device, settings.method) == ("slurm", "cuda", "measured")
    assert settings.num_devices == config.cluster.devices_per_node == 8
    assert settings.environment == {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_HUGE_PAGE": "0",
        "NCCL_SOCKET_IFNAME": "^docker,lo,veth",
        "NCCL_DEBUG": "WARN",
    }
    local = compose_sweep(["+grid=tiny", "launcher=local", "+launcher.environment.OMP_NUM_THREADS=1"])
    assert launch_settings(local, LOGIN_NODE).environment == {"OMP_NUM_THREADS": "1"}
    assert slurm_options(local) is None


def test_every_option_of_slurm_is_in_the_launchers_file() -> None:
    import dataclasses

    config = compose_sweep(["+grid=tiny", "launcher=slurm"])
    options = slurm_options(config)
    assert options == SlurmOptions()  # the file's values are the defaults
    pilots = {field.name for field in dataclasses.fields(LaunchSettings)}
    told = {field.name for field in dataclasses.fields(SlurmOptions)} | {"dry", "launcher"}
    # Follow from cluster, grid, command.
    missing = {"num_devices", "device", "cluster", "measure", "method", "probe", "linger_s"}
    assert set(config.launcher) == told | (pilots - missing)


def test_the_options_reach_the_launcher() -> None:
    words = [
        "launcher.partition=gpu",
        "launcher.constraint='h100&ib'",
        "launcher.setup=['module load cuda/12.8','source /shared/venv/bin/activate']",
        "launcher.srun_args=['--container-image=/images/a b.sqsh']",
        "launcher.mem=500G",
        "+launcher.sbatch.switches=1",
    ]
    options = slurm_options(compose_sweep(["+grid=playbook", "launcher=slurm", *words]))
    assert options is not None
    assert (options.partition, options.constraint, options.mem) == ("gpu", "h100&ib", "500G")
    assert options.setup == ("module load cuda/12.8", "source /shared/venv/bin/activate")
    assert options.srun_args == ("--container-image=/images/a b.sqsh",)
    assert options.sbatch == {"switches": 1}


def test_options_by_submitits_names_reach_the_launcher_of_slurm_alone() -> None:
    words = ["launcher.slurm_partition=gpu", "launcher.slurm_time=01:30:00", "launcher.mem_gb=4"]
    words += ["+launcher.slurm_additional_parameters.switches=1", "launcher.slurm_setup=['module load a']"]
    options = slurm_options(compose_sweep(["+grid=tiny", "launcher=slurm", *words]))
    expected = SlurmOptions(partition="gpu", time_min=90, mem="4G", sbatch={"switches": 1}, setup=("module load a",))
    assert options == expected
    with pytest.raises(
        UltrasweepError, match="slurm_partition is an option of launcher=slurm; this sweep has launcher=l"
    ):
        launch_settings(compose_sweep(["+grid=tiny", "launcher=local", words[0]]), LOGIN_NODE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ('launcher.partition="a\\n#SBATCH --uid=0"', "partition=.* must be a partition's name"),
        ("launcher.account='$(id)'", "account=.* must be an account's name"),
        ('launcher.setup=["a\nb"]', "setup=.* holds a line break"),
        ('+launcher.environment.A="x\ny"', "environment: A=.* cannot be printed"),
        ("+launcher.environment.A=true", "put it in quotes"),
        ("launcher.time_min=abc", "time_min='abc' must be a whole number"),
        ("+launcher.sbatch.output=/etc/passwd", "sbatch.output is set by the launcher itself"),
        ("results_dir='a%j'", "cannot be the folder of a sweep on Slurm"),
        ("launcher.lease_s=0", "lease_s=0 must be a number of seconds above 0"),
        ("launcher.phase_limits_s=3", "phase_limits_s=3 must be a mapping, NAME: VALUE"),
    ],
)
def test_mistakes_and_injections_are_one_line(word: str, message: str) -> None:
    with pytest.raises(UltrasweepError, match=message) as error:
        config = compose_sweep(["+grid=tiny", "launcher=slurm", word])
        launch_settings(config, LOGIN_NODE)
        slurm_options(config)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_run_on_a_login_node_goes_to_slurm(
    login_node: Path, submit: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "+grid=playbook", "grid.axes.nodes=[1,2]", "model=llama8.86b", "--detach"]) == 0
    sweep, settings, _, more = submit.runs[0]
    assert sweep.path == Path("results/playbook")
    assert (settings.cluster.name, settings.num_devices) == ("h100_efa", 8)
    assert (more["detach"], more["live"]) == (True, None)
    assert more["command"].startswith("python -m sweep run +grid=playbook")
    told = capsys.readouterr().out
    assert "launcher=slurm: this machine can submit to Slurm (launcher=local would run here)" in told
    assert "expected GPU-h" in told and "2 nodes, 16 GPUs" in told  # the price, before anything is submitted
    assert "to run by Slurm, on nodes of 8 GPUs" in told


@pytest.mark.slow
def test_a_dry_run_shows_and_does_nothing(submit: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "+grid=tiny", "launcher=slurm", "launcher.dry=true"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "#SBATCH [bold]one[/]" in told and "#SBATCH two" in told
    assert "15 points: run 15; 15 points would wait" in told
    assert submit.runs == [] and len(submit.shown[0]) == 15
    assert not Path("results").exists()
    every = told.splitlines()
    assert all(line.startswith("#") or not line for line in every)  # it can be read by sbatch's own parser

    assert main(["run", "+grid=tiny", "launcher=slurm", "--where", "world_size <= 2"]) == 0
    sweep = submit.runs[0][0]
    first, second = entry_names(sweep.todo)[:2]
    (sweep.todo / first).rename(sweep.done / first.replace(".json", "@ok.json"))
    (sweep.todo / second).rename(sweep.claimed / second.replace(".json", "@p.json"))
    before = sorted(str(path) for path in Path("results").rglob("*"))
    assert main(words) == 0
    assert len(submit.shown[1]) == 13
    assert sorted(str(path) for path in Path("results").rglob("*")) == before


def test_a_dry_run_rebuilds_no_lost_rows(submit: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that nothing is written."""
    rebuilt: list[SweepDir] = []
    monkeypatch.setattr(rebuild, "rebuild_lost_rows", rebuilt.append)
    SweepDir.create(Path("results/tiny"), {"device": "cpu"})
    assert main(["run", "+grid=tiny", "launcher=slurm", "launcher.dry=true"]) == 0 and not rebuilt


@pytest.mark.slow
def test_points_wider_than_max_nodes_are_invalid(submit: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["+grid=playbook", "model=llama1.34b", "launcher=slurm", "launcher.max_nodes=2"]
    assert main(["run", *words, "grid.axes.nodes=[1,2,4]", "launcher.dry=true"]) == 0
    assert {point.experiment.world_size for point in submit.shown[0]} == {8, 16}
    assert main(["run", *words, "grid.axes.nodes=[4]"]) == 2
    assert "needs 32 devices, launcher.max_nodes=2 gives 16" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_no_longer_planned_is_taken_off_and_what_runs_is_told(
    submit: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "+grid=tiny", "launcher=slurm"]) == 0
    sweep = submit.runs[0][0]
    wide = [name for name in entry_names(sweep.todo) if "tp2-pp2" in name or "dp4" in name]
    (sweep.todo / wide[0]).rename(sweep.claimed / wide[0].replace(".json", "@p.json"))
    assert main(["run", "+grid=tiny", "launcher=slurm", "--where", "world_size <= 2"]) == 0
    told = capsys.readouterr().out
    assert "points of an earlier run are not in this plan and were removed from the queue" in told
    assert "1 point of an earlier run is still running; it is not in this plan but will be recorded" in told
    assert entry_names(sweep.claimed) == [wide[0].replace(".json", "@p.json")]


@pytest.mark.slow
def test_a_refused_submission_leaves_no_device_behind(
    submit: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "+grid=llama1b_8gpu", "grid.axes.tp=1", "grid.axes.pp=1", "launcher=slurm"]

    def refuse(*_: Any, **__: Any) -> RunSummary:
        raise UltrasweepError("Slurm refuses pilots of 1 node: invalid partition specified: none")

    with monkeypatch.context() as patched:
        patched.setattr(launchers.slurm.submit, "run_slurm", refuse)
        assert main([*words, "cluster=h200"]) == 2
    sweep = SweepDir.open(Path("results/llama1b_8gpu"))
    before = len(entry_names(sweep.todo))
    assert main([*words, "cluster=h100_efa", "launcher.dry=true"]) == 0
    assert sweep.settings()["device"] == "NVIDIA H200", "a dry run writes nothing"
    assert main([*words, "cluster=h100_efa"]) == 0
    assert sweep.settings()["device"].startswith("NVIDIA H100") and 0 < len(entry_names(sweep.todo)) <= before
    first = entry_names(sweep.todo)[0]
    (sweep.todo / first).rename(sweep.claimed / first.replace(".json", "@p.json"))
    capsys.readouterr()
    assert main([*words, "cluster=h200"]) == 2
    assert "holds runs for NVIDIA H100" in capsys.readouterr().err


@pytest.mark.slow
def test_the_users_own_cluster_file_brings_its_network(tmp_path: Path) -> None:
    (tmp_path / "conf" / "cluster").mkdir(parents=True)
    text = (
        "defaults: [{/device@device: h200}, _self_]\nname: ours\nbackend: cuda\ndevices_per_node: 4\n"
        "intra_node: {bandwidth: 1.0e11, latency_s: 1.0e-6}\ninter_node: {bandwidth: 1.0e10, latency_s: 1.0e-5}\n"
        "environment: {NCCL_IB_HCA: '=mlx5_0,mlx5_3', NCCL_CROSS_NIC: 0}\n"
    )
    (tmp_path / "conf" / "cluster" / "ours.yaml").write_text(text)
    folders = ConfFolders((tmp_path / "conf",))
    config = compose_sweep(["+grid=llama8b_8gpu", "cluster=ours", "launcher=slurm"], folders)
    settings = launch_settings(config, LOGIN_NODE)
    assert settings.environment == {"NCCL_IB_HCA": "=mlx5_0,mlx5_3", "NCCL_CROSS_NIC": "0"}
    assert settings.num_devices == 4
    (tmp_path / "conf" / "cluster" / "ours.yaml").write_text(text.replace("NCCL_CROSS_NIC", "'NCCL;rm'"))
    with pytest.raises(UltrasweepError, match="cluster ours: environment: 'NCCL;rm' cannot be the name of a variable"):
        compose_sweep(["+grid=llama8b_8gpu", "cluster=ours"], folders)


PAGE = (Path(__file__).resolve().parents[3] / "docs" / "slurm.md").read_text()


def test_the_options_in_the_documentation_exist() -> None:
    known = set(compose_sweep(["+grid=tiny", "launcher=slurm"]).launcher)
    section = PAGE[PAGE.index("## What to set") : PAGE.index("| submitit |")]
    rows = re.findall(r"^\| ((?:`[a-z_]+` )+)\|", section, re.MULTILINE)
    table = {name for row in rows for name in re.findall(r"[a-z_]+", row)}
    named = {name for name in re.findall(r"launcher\.([a-z_]+)", PAGE) if not name.startswith(OF_SUBMITIT)}
    assert len(table) > 10 and len(named) > 5
    assert named | table <= known


@pytest.mark.slow
@pytest.mark.parametrize("line", re.findall(r"^ {4}('?launcher\..*)$", PAGE, re.MULTILINE))
def test_the_lines_in_the_documentation_can_be_typed(line: str) -> None:
    assert slurm_options(compose_sweep(["+grid=first_day", "launcher=slurm", *shlex.split(line)])) is not None


@pytest.mark.slow
def test_the_files_in_the_documentation_are_taken(tmp_path: Path) -> None:
    for block in re.findall(r"^ *```yaml\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL):
        text = textwrap.dedent(block)
        path = tmp_path / text.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    folders = ConfFolders((tmp_path / "conf",))
    config = compose_sweep(["+grid=first_day", "cluster=ours", "launcher=ours"], folders)
    assert config.launcher_kind == "slurm"
    options = slurm_options(config)
    assert options is not None and (options.partition, options.python) == ("gpu", "python")
    rails = compose_sweep(["+grid=first_day", "cluster=rails", "launcher=ours"], folders)
    assert launch_settings(rails, LOGIN_NODE).environment["NCCL_SOCKET_IFNAME"] == "bond0"
