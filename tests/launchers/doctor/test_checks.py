"""Each check of the doctor on answers that are made up, and how those of several nodes become one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from launchers.doctor import checks as all_checks
from launchers.doctor.checks import (
    CLOCK_LIMIT_S,
    LOG_BYTES,
    NAMES,
    TEMPORARY_BYTES,
    Answer,
    Check,
    Expected,
    checks,
    chosen_interfaces,
    unanswered,
)

HERE = {"numpy": "2.3.5", "nvidia-ml-py": "13.6", "pyarrow": "26.0.1", "torch": "2.13.0+cpu", "triton": None}
H100 = "NVIDIA H100 80GB HBM3"
NOW = 1_000_000.0


def expected(**changes: Any) -> Expected:
    fields: dict[str, Any] = {
        "python": "3.11.7",
        "packages": HERE,
        "devices": 8,
        "driver_names": (H100,),
        "ranks": 8,
    }
    return Expected(**{**fields, **changes})


def answer(*, read_at: float = NOW + 0.5, file_seen: bool = True, outside: str | None = None, **changes: Any) -> Answer:
    facts: dict[str, Any] = {
        "token": "t",
        "node": "node1",
        "python": "3.11.9",
        "executable": "/venv/bin/python",
        "packages": {**HERE, "torch": "2.13.0+cu130", "triton": "3.7.1"},
        "gpus": {"names": [H100] * 8, "mig": ["Disabled"] * 8},
        "torch_gpus": {"count": 8},
        "visible": "0,1,2,3,4,5,6,7",
        "interfaces": {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1", "ib1": None},
        "infiniband": ["mlx5_0"],
        "socket_ifname": None,
        "scontrol": "/usr/bin/scontrol",
        "temporary": {"path": "/tmp", "free_bytes": TEMPORARY_BYTES},
        "folder": {"path": "/shared/r", "free_bytes": 8 * LOG_BYTES},
        "shared": {"seen": "t", "written": "answer-0", "error": None},
        "login_time": NOW - 0.25,
        "time": NOW,
    }
    assert changes.keys() <= facts.keys()
    return Answer(facts={**facts, **changes}, read_at=read_at, file_seen=file_seen, scontrol_outside=outside)


def line(name: str, *, of: Mapping[str, Any] | None = None, to: Mapping[str, Any] | None = None) -> Check:
    """The line called ``name`` for an answer with the changes ``of`` compared with the changes ``to``."""
    return {check.name: check for check in checks([answer(**(of or {}))], expected(**(to or {})))}[name]


def test_a_healthy_node_passes_every_check() -> None:
    found = checks([answer()], expected())
    assert [check.name for check in found] == list(NAMES)
    assert {check.status for check in found} == {"pass"}


BROKEN: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], str, str]] = {
    "folder is not there": (
        "shared folder",
        {"shared": {"seen": None, "written": None, "error": "No such file or directory"}},
        {},
        "fail",
        "/shared/r cannot be read on the node: No such file or directory",
    ),
    "folder is another one": (
        "shared folder",
        {"shared": {"seen": "other", "written": "answer-0", "error": None}},
        {},
        "fail",
        "another folder than here",
    ),
    "folder is read-only": (
        "shared folder",
        {"shared": {"seen": "t", "written": None, "error": "Read-only file system"}},
        {},
        "fail",
        "cannot be written on the node: Read-only file system",
    ),
    "file does not come back": ("shared folder", {"file_seen": False}, {}, "fail", "is not seen here"),
    "python is too old": (
        "Python",
        {"python": "3.6.8"},
        {},
        "fail",
        "3.6.8 (/venv/bin/python); 3.11 or 3.12 is needed",
    ),
    "python differs": ("Python", {"python": "3.12.1"}, {}, "fail", "3.11 here"),
    "python lists nothing": ("packages", {"packages": None}, {}, "unknown", "cannot list"),
    "package is missing": (
        "packages",
        {"packages": {**HERE, "pyarrow": None, "triton": "3"}},
        {},
        "fail",
        "pyarrow missing",
    ),
    "package differs": (
        "packages",
        {"packages": {**HERE, "numpy": "1.26.4", "triton": "3"}},
        {},
        "fail",
        "numpy 1.26.4, 2.3.5 here",
    ),
    "no driver": (
        "GPUs",
        {"gpus": {"error": "nvidia-smi is not on PATH"}, "torch_gpus": {"count": 0}},
        {},
        "fail",
        "nvidia-smi is not on PATH",
    ),
    "MIG": ("GPUs", {"gpus": {"names": [H100], "mig": ["Enabled"]}}, {}, "fail", "MIG is on"),
    "torch without CUDA": (
        "GPUs",
        {"torch_gpus": {"count": 0}},
        {},
        "fail",
        f"nvidia-smi shows 8 {H100}, torch sees none",
    ),
    "torch does not load": (
        "GPUs",
        {"torch_gpus": {"error": "libcudart.so"}},
        {},
        "fail",
        "torch sees none: libcudart.so",
    ),
    "fewer GPUs": (
        "GPUs",
        {"torch_gpus": {"count": 4}, "visible": "0,1,2,3"},
        {},
        "fail",
        f"4 {H100} (CUDA_VISIBLE_DEVICES=0,1,2,3), the cluster file says 8",
    ),
    "other GPUs": (
        "GPUs",
        {"gpus": {"names": ["NVIDIA A100"] * 8, "mig": []}},
        {},
        "fail",
        f"the cluster file says {H100}",
    ),
    "nothing to compare": ("GPUs", {}, {"devices": None}, "unknown", f"8 {H100}; no cluster file"),
    "only loopback": ("network", {"interfaces": {"lo": "127.0.0.1"}}, {}, "fail", "which other nodes do not reach"),
    "wrong interface": (
        "network",
        {},
        {"socket_ifname": "bond0"},
        "fail",
        "NCCL_SOCKET_IFNAME=bond0 fits none of lo 127.0.0.1, eth0 10.0.0.1 and ib0 10.1.0.1",
    ),
    "interface without address": ("network", {}, {"socket_ifname": "ib1"}, "fail", "NCCL_SOCKET_IFNAME=ib1 fits none"),
    "no list of interfaces": ("network", {"interfaces": None}, {}, "unknown", "cannot be listed"),
    "no scontrol": ("scontrol", {"scontrol": None}, {}, "fail", "cannot requeue its job"),
    "clock ahead": ("clock", {"time": NOW + 3600}, {}, "fail", "ahead of"),
    "clock behind": ("clock", {"time": NOW - 3600}, {}, "fail", "behind"),
    "clock ahead, folder unseen": (
        "clock",
        {"time": NOW + 3600, "login_time": None},
        {},
        "fail",
        "at least 3600 s ahead",
    ),
    "folder unseen": ("clock", {"login_time": None}, {}, "unknown", "could not read this machine's time"),
    "slow answer": ("clock", {"read_at": NOW + 2 * CLOCK_LIMIT_S}, {}, "unknown", "took too long"),
    "small folder": (
        "space for the sweep",
        {"folder": {"path": "/shared/r", "free_bytes": 8 * LOG_BYTES - 1}},
        {},
        "fail",
        "8 logs of up to 16 MiB need",
    ),
    "folder cannot be asked": (
        "space for the sweep",
        {"folder": {"path": "/shared/r", "error": "Stale file handle"}},
        {},
        "fail",
        "/shared/r: Stale file handle",
    ),
    "small temporary folder": (
        "space for temporary files",
        {"temporary": {"path": "/tmp", "free_bytes": TEMPORARY_BYTES - 1}},
        {},
        "fail",
        "compiled kernels need",
    ),
    "no temporary folder": (
        "space for temporary files",
        {"temporary": {"path": None, "error": "no folder can be written"}},
        {},
        "fail",
        "no folder can be written",
    ),
}


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_broken_is_named_with_a_remedy(case: tuple[str, dict[str, Any], dict[str, Any], str, str]) -> None:
    name, of, to, status, text = case
    check = line(name, of=of, to=to)
    assert check.status == status
    assert text in check.value
    assert check.remedy
    others = [one for one in checks([answer(**of)], expected(**to)) if one.name != name]
    assert all(one.status == "pass" for one in others if one.name != "clock")


FINE: Mapping[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "CPU cluster": ("GPUs", {"gpus": {"error": "none"}, "torch_gpus": {"count": 0}}, {"devices": 0}, "none needed"),
    "no triton for CPU": ("packages", {"packages": {**HERE, "triton": None}}, {"devices": 0}, "torch 2.13.0+cpu"),
    "login node without torch": ("packages", {}, {"packages": {**HERE, "torch": None}}, "(not here: torch and triton)"),
    "more GPUs": ("GPUs", {}, {"devices": 4}, f"8 {H100}, of which 4 are used"),
    "named interface": (
        "network",
        {},
        {"socket_ifname": "ib"},
        "ib0 10.1.0.1 (NCCL_SOCKET_IFNAME=ib); InfiniBand mlx5_0",
    ),
    "interface of the job": ("network", {"socket_ifname": "=eth0"}, {}, "eth0 10.0.0.1 (NCCL_SOCKET_IFNAME==eth0)"),
    "one node": ("network", {"interfaces": {"lo": "127.0.0.1"}}, {"several_nodes": False}, "enough for one node"),
    "image without scontrol": (
        "scontrol",
        {"scontrol": None, "outside": "/opt/slurm/bin/scontrol"},
        {},
        "not in the image",
    ),
    "no requeue": ("scontrol", {"scontrol": None}, {"requeue": False}, "not needed with launcher.requeue=false"),
    "no Slurm": ("scontrol", {"scontrol": None}, {"slurm": False}, "not needed without Slurm"),
    "one machine": ("clock", {"login_time": None}, {"slurm": False}, "the same machine"),
    "clock": ("clock", {}, {}, "-0.5 to +0.2 s"),
}


@pytest.mark.parametrize("case", FINE.values(), ids=FINE.keys())
def test_what_is_fine_passes_with_its_value(case: tuple[str, dict[str, Any], dict[str, Any], str]) -> None:
    name, of, to, text = case
    check = line(name, of=of, to=to)
    assert check.status == "pass"
    assert text in check.value


def test_the_worst_of_several_nodes_counts_and_is_named() -> None:
    few = {"torch_gpus": {"count": 4}}
    answers = [answer(), answer(node="node2", **few), answer(node="node3", **few), answer(node="node4")]
    gpus = next(check for check in checks(answers, expected()) if check.name == "GPUs")
    assert gpus.status == "fail"
    assert gpus.value.startswith(f"node2 and node3: 4 {H100}")
    answers[2] = answer(node="node3", torch_gpus={"count": 7})
    gpus = next(check for check in checks(answers, expected()) if check.name == "GPUs")
    assert "node2: 4 " in gpus.value and "; node3: 7 " in gpus.value
    assert "node1" not in gpus.value and "node4" not in gpus.value


def test_many_nodes_that_differ_are_counted() -> None:
    answers = [answer(node=f"node{number}", python=f"3.11.{number}") for number in range(30)]
    value = next(check for check in checks(answers, expected()) if check.name == "Python").value
    assert value.startswith("node0: 3.11.0 ") and value.endswith("; and 24 more")


def test_without_an_answer_the_job_fails_and_the_rest_is_unknown() -> None:
    found = unanswered("job 7 still waits; Slurm says Priority", "wait longer")
    assert [check.status for check in found] == ["fail", *["unknown"] * len(NAMES)]


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("eth", ["eth0", "eth1"]),
        ("eth,ib", ["eth0", "eth1", "ib0"]),
        ("=eth1", ["eth1"]),
        ("=eth", []),
        ("^lo,docker", ["eth0", "eth1", "ib0"]),
        ("^=eth0,lo,docker0", ["eth1", "ib0"]),
    ],
)
def test_interfaces_are_chosen_as_nccl_does(given: str, chosen: list[str]) -> None:
    assert chosen_interfaces(given, ["lo", "docker0", "eth0", "eth1", "ib0"]) == chosen


def test_every_check_has_its_name() -> None:
    functions: Callable[..., Any] = all_checks.checks
    assert [check.name for check in functions([answer()], expected())] == list(NAMES)
    assert json.dumps(answer().facts)
