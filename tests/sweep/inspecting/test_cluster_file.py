"""Cluster files from what nvidia-smi, sinfo and scontrol print: scripts that print the forms of several sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sweep.__main__ import main
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import cluster_named
from sweep.inspecting.nvidia_smi import parse_topology
from sweep.planning.limits import machine_memory_bytes
from workloads.spec.cluster import ClusterSpec

pytestmark = pytest.mark.drawn(one_in=3)

H100, A100, L40 = "NVIDIA H100 80GB HBM3, 81559", "NVIDIA A100-SXM4-40GB, 40960", "NVIDIA L40, 46068"
GB200 = "NVIDIA GB200, 189471"
NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=56 CPUAlloc=0 CPUEfctv=112 CPUTot=112 CPULoad=0.07 "
    "AvailableFeatures=(null) ActiveFeatures=(null) Gres={gres} NodeAddr={name} NodeHostName={name} Version=23.11.4 "
    "OS=Linux 5.15.0 #1 SMP RealMemory=2000000 State={state} Partitions={partitions} "
    "CfgTRES=cpu=112,mem=2000000M,billing=112 Reason=Not responding [root@2026-01-01T00:00:00]"
)


def topology(count: int, link: str, nics: Sequence[str] = ()) -> str:
    """The output of ``nvidia-smi topo -m``: with colours in its header, tabs, and a legend of network devices."""
    gpus, ports = [f"GPU{one}" for one in range(count)], [f"NIC{one}" for one in range(len(nics))]
    lines = ["\t\x1b[4m" + "\t".join([*gpus, *ports, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"]
    for row, gpu in enumerate(gpus):
        links = [" X " if row == column else link for column in range(count)]
        lines.append("\t".join([gpu, *links, *("PIX" for _ in ports), "0-55", "0", "\tN/A"]))
    for row, port in enumerate(ports):
        lines.append(
            "\t".join([port, *("PIX" for _ in gpus), *(" X " if row == at else "SYS" for at in range(len(nics)))])
        )
    lines += ["", "Legend:", "", "  X    = Self", "  SYS  = Connection traversing PCIe as well as the SMP interconnect"]
    if nics:
        lines += ["", "NIC Legend:", "", *(f"  {port}: {nic}" for port, nic in zip(ports, nics, strict=True)), ""]
    return "\n".join(lines)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and the folder of the scripts, the only one on PATH beside the system's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", f"{folder}:/bin")
    monkeypatch.setattr("shutil.which", lambda name, **_: str(folder / name) if (folder / name).exists() else None)
    monkeypatch.setattr("socket.gethostname", lambda: "gpu17.site")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return folder


def smi(folder: Path, gpus: Sequence[str], links: str, *, mig: str = "Disabled", pcie: str = "5, 16") -> None:
    lines = "\n".join(f"{gpu}, {mig}, {pcie}" for gpu in gpus)
    script = f"#!/bin/sh\ncase $1 in topo) cat <<'END'\n{links}\nEND\n;; *) cat <<'END'\n{lines}\nEND\n;; esac\n"
    (folder / "nvidia-smi").write_text(script)
    (folder / "nvidia-smi").chmod(0o755)


def slurm(folder: Path, partitions: Sequence[str], nodes: Sequence[tuple[str, str, str]]) -> None:
    """``nodes``: gres, state and partitions of each."""
    shown = [
        NODE.format(name=f"n{number:02}", gres=gres, state=state, partitions=of)
        for number, (gres, state, of) in enumerate(nodes, 1)
    ]
    for name, lines in {"sinfo": partitions, "scontrol": shown}.items():
        (folder / name).write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join(lines) + "\nEND\n")
        (folder / name).chmod(0o755)


def written(name: str) -> ClusterSpec:
    return cluster_named(name, ConfFolders((Path("conf"),)))


def shipped(name: str) -> ClusterSpec:
    return cluster_named(name, ConfFolders())


def refused(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line by which the command refuses; nothing is written."""
    assert main(["cluster", *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert not Path("conf").exists()
    return lines[0]


@pytest.mark.slow
def test_a_node_of_eight_h100(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smi(commands, [H100] * 8, topology(8, "NV18", [f"mlx5_{port}" for port in range(8)]))
    assert main(["cluster", "--from-this-machine"]) == 0
    said = capsys.readouterr().out
    cluster, base = written("gpu17"), shipped("h100_ib400")
    assert (cluster.devices_per_node, cluster.nodes, cluster.device) == (8, None, base.device)
    assert (cluster.intra_node, cluster.inter_node) == (base.intra_node, base.inter_node)
    text = Path("conf/cluster/gpu17.yaml").read_text()
    for line in (
        "device: NVIDIA H100 80GB HBM3",
        "links between GPUs: NV18",
        "nodes: null",
        "price_per_device_hour: null",
    ):
        assert line in said and f"# - {line}" in text
    assert "inter_node: as in h100_ib400 (nominal rate of one 400 Gb/s InfiniBand port" in said
    assert "h100_efa has the same GPU; --base NAME" in said
    assert "--conf conf cluster=gpu17" in said


@pytest.mark.slow
def test_the_network_devices_choose_between_files_of_one_gpu(commands: Path) -> None:
    smi(commands, [H100] * 8, topology(8, "NV18", [f"rdmap{port}s0" for port in range(32)]))
    assert main(["cluster", "--from-this-machine"]) == 0
    assert written("gpu17").environment == shipped("h100_efa").environment != {}
    smi(commands, [H100] * 8, topology(8, "NV18", ["mlx5_0"]))
    assert main(["cluster", "--from-this-machine", "--base", "h100_efa", "--out", "conf/cluster/other.yaml"]) == 0
    assert written("other").inter_node == shipped("h100_efa").inter_node


@pytest.mark.slow
def test_a_node_of_four_with_another_memory(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smi(commands, [A100.replace("40960", "40536")] * 4, topology(4, "NV4"))
    assert main(["cluster", "--from-this-machine", "--out", "conf/cluster/four.yaml"]) == 0
    cluster = written("four")
    assert cluster.devices_per_node == 4
    assert cluster.host.memory_bytes == machine_memory_bytes()
    assert cluster.device.memory_bytes == 40536 * 2**20
    assert cluster.device.peak_flops == shipped("a100_40gb").device.peak_flops
    assert "device.memory_bytes: 40536 MiB" in capsys.readouterr().out


@pytest.mark.slow
def test_a_base_with_tiers_is_inherited_and_its_sources_are_said(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(commands, [GB200] * 4, topology(4, "NV18"))
    assert main(["cluster", "--from-this-machine", "--base", "gb200_nvl72"]) == 0
    assert written("gpu17").tiers == shipped("gb200_nvl72").tiers
    said = capsys.readouterr().out
    assert "tiers: NVLink rack: as in gb200_nvl72 (as eight B200" in said
    assert "tiers: spine: as in gb200_nvl72 (as inside of a scalable unit" in said
    assert "gb200 has the same GPU; --base NAME" in said


@pytest.mark.slow
def test_gpus_over_pcie_do_not_get_the_tiers_of_an_nvlink(commands: Path) -> None:
    smi(commands, [GB200] * 2, topology(2, "SYS"), pcie="4, 16")
    assert main(["cluster", "--from-this-machine", "--base", "gb200_nvl72"]) == 0
    cluster = written("gpu17")
    assert cluster.tiers == () and cluster.intra_node is not None and cluster.inter_node is not None
    assert cluster.intra_node.bandwidth < 40e9
    assert cluster.inter_node.bandwidth == shipped("gb200_nvl72").outside[0].bandwidth


@pytest.mark.slow
def test_gpus_of_a_known_kind_over_pcie_do_not_get_its_nvlink(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(commands, [H100] * 2, topology(2, "SYS"), pcie="4, 16")
    assert main(["cluster", "--from-this-machine"]) == 0
    link = written("gpu17").intra_node
    assert link.bandwidth == pytest.approx(16e9 * 16 / 8 * 128 / 130)  # 31.5 GB/s: PCIe 4 x16
    assert link.pair_bandwidth is None and link.pair_latency_s is None
    assert "nominal rate of PCIe 4 x16, an upper bound, not measured" in link.source
    assert "links between GPUs: SYS, so no NVLink" in capsys.readouterr().out


@pytest.mark.slow
def test_a_gpu_that_no_file_describes_has_null_rates_and_plans(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(commands, [L40] * 4, topology(4, "NODE"), pcie="4, 16")
    assert main(["cluster", "--from-this-machine"]) == 0
    said = capsys.readouterr().out
    assert "device's peak_flops, memory_bandwidth: null, no cluster file describes it" in said
    cluster = written("gpu17")
    assert (cluster.device.name, cluster.device.memory_bytes) == ("NVIDIA L40", 46068 * 2**20)
    assert (cluster.device.peak_flops, cluster.device.memory_bandwidth, cluster.matmul_efficiency) == ({}, None, None)
    assert main(["plan", "+grid=llama1b_8gpu", "--conf", "conf", "cluster=gpu17"]) == 0
    assert "llama1b" in capsys.readouterr().out


@pytest.mark.slow
def test_a_single_gpu_has_no_link(
    commands: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(commands, [H100], "")
    assert main(["cluster", "--from-this-machine"]) == 0
    assert written("gpu17").devices_per_node == 1
    assert "what this job sees" not in capsys.readouterr().out
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert main(["cluster", "--from-this-machine", "--out", "conf/cluster/part.yaml"]) == 0
    assert "devices_per_node: 1 (what this job sees; the node may have more)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_partition_with_a_type(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [("gpu:h100:8(S:0-1),nvme:1", "IDLE", "gpu,long"), ("gpu:h100:8(S:0-1)", "IDLE+DRAIN", "gpu")]
    nodes += [("gpu:h100:8", "MIXED+POWERED_DOWN", "gpu"), ("gpu:h100:8", "IDLE*", "gpu"), ("(null)", "IDLE", "cpu")]
    slurm(commands, ["cpu", "gpu", "long"], nodes)
    assert main(["cluster", "--from-slurm", "gpu"]) == 0
    said = capsys.readouterr().out
    cluster = written("gpu")
    assert (cluster.devices_per_node, cluster.nodes) == (8, 4)
    assert cluster.device == shipped("h100_ib400").device
    assert "nodes: 4, 2 of them down or drained now" in said
    assert cluster.host.memory_bytes == 2_000_000 * 2**20  # RealMemory is in MiB
    assert cluster.host.link_bandwidth == shipped("h100_ib400").host.link_bandwidth
    assert "host.memory_bytes: 2000000 MiB" in said
    assert "device: Slurm says 'h100'; NVIDIA H100 80GB HBM3 as in h100_ib400, memory and rates too" in said


@pytest.mark.slow
def test_a_partition_without_a_type_plans_with_and_without_a_base(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(commands, ["main"], [("gpu:4", "IDLE", "main")] * 16)
    assert main(["cluster", "--from-slurm", "main", "--out", "conf/cluster/plain.yaml"]) == 0
    said = capsys.readouterr().out
    assert "device: Slurm does not name it" in said and "--base NAME says which: a100_40gb, a100_80gb," in said
    assert "device.memory_bytes: null, so no point is predicted not to fit" in said
    assert written("plain").device.memory_bytes is None
    assert main(["cluster", "--from-slurm", "main", "--base", "h200", "--out", "conf/cluster/ours.yaml"]) == 0
    assert (written("ours").devices_per_node, written("ours").nodes) == (4, 16)
    for name in ("plain", "ours"):
        assert main(["plan", "+grid=first_day", "--conf", "conf", f"cluster={name}", "launcher=slurm"]) == 0


@pytest.mark.slow
def test_a_type_that_may_be_two_devices_is_not_guessed(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(commands, ["gpu"], [("gpu:a100:4", "IDLE", "gpu")])
    assert main(["cluster", "--from-slurm", "gpu"]) == 0
    assert "Slurm says 'a100', which fits no or several cluster files" in capsys.readouterr().out
    cluster = written("gpu")
    assert (cluster.device.name, cluster.device.memory_bytes) == ("a100", None)
    slurm(commands, ["gpu"], [("gpu:nvidia_a100-sxm4-80gb:4", "IDLE", "gpu")])
    assert main(["cluster", "--from-slurm", "gpu", "--out", "conf/cluster/full.yaml"]) == 0
    assert written("full").device == shipped("a100_80gb").device


@pytest.mark.parametrize("gpu_type", ["mi300x", "amd_instinct_mi300x_oam"])
def test_a_partition_of_amd_gpus_can_be_planned_only(
    commands: Path, capsys: pytest.CaptureFixture[str], gpu_type: str
) -> None:
    slurm(commands, ["amd"], [(f"gpu:{gpu_type}:8", "IDLE", "amd")] * 3)
    assert main(["cluster", "--from-slurm", "amd"]) == 0
    assert "This cluster can be planned only: the engine runs on CUDA" in capsys.readouterr().out
    assert (written("amd").device, written("amd").nodes) == (shipped("mi300x").device, 3)
    words = ["--conf", "conf", "cluster=amd", "launcher=slurm", "launcher.partition=amd"]
    assert main(["plan", "+grid=first_day", *words]) == 0
    assert "cluster amd (AMD Instinct MI300X) is planned only" in capsys.readouterr().out
    assert main(["run", "+grid=first_day", *words, "launcher.dry=true"]) == 2
    assert "is planned only: the engine runs on CUDA" in capsys.readouterr().err


def test_amd_gpus_that_no_file_describes_are_not_taken_for_nvidias(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(commands, ["amd"], [("gpu:mi250x:8", "IDLE", "amd")])
    assert main(["cluster", "--from-slurm", "amd"]) == 0
    assert "--base NAME says which: mi300x, mi325x, mi355x" in capsys.readouterr().out
    assert (written("amd").backend, written("amd").device.memory_bytes) == ("rocm", None)


@pytest.mark.parametrize(
    ("gpu_type", "base"),
    [
        ("gh200", None),
        ("nvidia_gh200_480gb", "gh200_96gb"),
        *((name, name) for name in ("h20", "h200", "h800", "l40s", "gb200", "b200")),
        ("l40", None),
        ("mi300a", None),
    ],
)
def test_a_type_is_one_device_by_whole_words(commands: Path, gpu_type: str, base: str | None) -> None:
    slurm(commands, ["gpu"], [(f"gpu:{gpu_type}:8", "IDLE", "gpu")])
    assert main(["cluster", "--from-slurm", "gpu"]) == 0
    device = written("gpu").device
    assert device == shipped(base).device if base is not None else device.memory_bytes is None


MIXED = [("gpu:h100:8(S:0-1)", "IDLE", "gpu")] * 3 + [("gpu:a100:4(S:0)", "IDLE", "gpu")]


@pytest.mark.slow
def test_nodes_of_several_kinds_are_one_line_and_gres_chooses(
    commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(commands, ["gpu"], MIXED)
    line = refused(["--from-slurm", "gpu"], capsys)
    assert "partition gpu has nodes of 2 kinds: 3 with gpu:h100:8 and 1 with gpu:a100:4" in line
    assert "--gres gpu:h100:8" in line
    assert "it has 3 with gpu:h100:8" in refused(["--from-slurm", "gpu", "--gres", "gpu:v100:8"], capsys)
    assert main(["cluster", "--from-slurm", "gpu", "--gres", "gpu:h100:8"]) == 0
    assert (written("gpu").devices_per_node, written("gpu").nodes) == (8, 3)


@pytest.mark.slow
def test_several_partitions_are_one_file(commands: Path) -> None:
    nodes = [("gpu:h200:8", "IDLE", "gpu,long")] * 2 + [("gpu:h200:8", "IDLE", "long")]
    slurm(commands, ["gpu", "long"], nodes)
    assert main(["cluster", "--from-slurm", "gpu,long"]) == 0
    assert written("gpu_long").nodes == 3


NODES: Mapping[str, tuple[list[tuple[str, str, str]], str]] = {
    "no such partition": ([("gpu:8", "IDLE", "other")], "no partition gpu; Slurm has other"),
    "no GPUs": ([("(null)", "IDLE", "gpu")], "knows of no GPU on the 1 node of partition gpu"),
    "MIG": ([("gpu:a100_1g.10gb:7", "IDLE", "gpu")], "has parts of GPUs (MIG), gpu:a100_1g.10gb:7"),
    "mixed nodes": ([("gpu:a100:2,gpu:v100:2", "IDLE", "gpu")], "have GPUs of several kinds each"),
}


@pytest.mark.parametrize(("nodes", "text"), NODES.values(), ids=NODES.keys())
def test_partitions_that_no_file_describes_are_one_line(
    nodes: list[tuple[str, str, str]], text: str, commands: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(commands, sorted({name for _, _, of in nodes for name in of.split(",")}), nodes)
    assert text in refused(["--from-slurm", "gpu"], capsys)


def test_machines_that_no_file_describes_are_one_line(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nvidia-smi is not on PATH here" in refused(["--from-this-machine"], capsys)
    assert "sinfo is not on PATH here" in refused(["--from-slurm", "gpu"], capsys)
    smi(commands, [H100] * 2, topology(2, "NV18"), mig="Enabled")
    assert "MIG is on for GPU 0 and 1" in refused(["--from-this-machine"], capsys)
    smi(commands, [H100, A100], topology(2, "SYS"))
    line = refused(["--from-this-machine"], capsys)
    assert "GPUs of 2 kinds, 1 NVIDIA A100-SXM4-40GB (40960 MiB) and 1 NVIDIA H100 80GB HBM3 (81559 MiB)" in line
    (commands / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA-SMI has failed because it could not talk; exit 9\n")
    assert "nvidia-smi: NVIDIA-SMI has failed" in refused(["--from-this-machine"], capsys)
    (commands / "nvidia-smi").write_text("#!/bin/sh\n")
    assert "nvidia-smi shows no GPU" in refused(["--from-this-machine"], capsys)


def test_wrong_options_are_one_line(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smi(commands, [H100] * 8, topology(8, "NV18"))
    here = ["--from-this-machine"]
    assert "one of the arguments" in refused([], capsys)
    assert "not allowed with" in refused([*here, "--from-slurm", "gpu"], capsys)
    assert "--gres needs --from-slurm" in refused([*here, "--gres", "gpu:8"], capsys)
    assert "--base h200 does not describe NVIDIA H100 80GB HBM3; these do: h100_efa" in refused(
        [*here, "--base", "h200"], capsys
    )
    assert "no cluster called 'h10'" in refused([*here, "--base", "h10"], capsys)
    assert "ends in .yaml" in refused([*here, "--out", "ours.yml"], capsys)
    assert "h200 is a cluster that ships" in refused([*here, "--out", "conf/cluster/h200.yaml"], capsys)
    assert "may hold letters" in refused([*here, "--out", "conf/cluster/a b.yaml"], capsys)


@pytest.mark.slow
def test_a_file_that_exists_is_not_overwritten(commands: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smi(commands, [H100] * 8, topology(8, "NV18"))
    assert main(["cluster", "--from-this-machine"]) == 0
    before = Path("conf/cluster/gpu17.yaml").read_text()
    assert main(["cluster", "--from-this-machine"]) == 2
    assert "conf/cluster/gpu17.yaml exists" in capsys.readouterr().err
    assert Path("conf/cluster/gpu17.yaml").read_text() == before


def test_topologies() -> None:
    assert parse_topology(topology(8, "NV18", ["mlx5_0", "mlx5_1"]), 8) == ("NV18", ("mlx5_0", "mlx5_1"))
    assert parse_topology(topology(2, "PHB"), 2) == ("PHB", ())
    assert parse_topology("", 2) == (None, ())
    # An older form: network devices in the header, spaces, two pairs on NVLink and SYS between the pairs.
    older = """\
        GPU0    GPU1    GPU2    GPU3    mlx5_0  CPU Affinity
GPU0     X      NV4     SYS     SYS     PIX     0-23
GPU1    NV4      X      SYS     SYS     PIX     0-23
GPU2    SYS     SYS      X      NV4     SYS     24-47
GPU3    SYS     SYS     NV4      X      SYS     24-47
mlx5_0  PIX     PIX     SYS     SYS      X
"""
    assert parse_topology(older, 4) == ("SYS", ("mlx5_0",))
