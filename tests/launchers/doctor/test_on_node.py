"""The program that runs on a node: alone, from standard input, and on any Python."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.doctor import on_node
from launchers.doctor.answers import answer_seen, parse_answer
from launchers.state.code_snapshot import PACKAGES

PROGRAM = Path(on_node.__file__)
ROOT = PROGRAM.parents[2]
NOT_IN_PILOTS = {"pandas", "rich", "submitit", "torchtitan", "megatron", "transformers", "accelerate"}
"""Packages that only the submitting command, readers, or other engines import."""
DISTRIBUTION_OF = {"pynvml": "nvidia-ml-py"}


def test_it_parses_as_python_3_6_and_needs_only_the_standard_library() -> None:
    tree = ast.parse(PROGRAM.read_text(), feature_version=(3, 6))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names - {"__future__"}


@pytest.mark.slow
def test_it_asks_about_every_package_that_pilots_import() -> None:
    imported = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.relative_to(ROOT).parts[:2] == ("results", "recorded"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    others = imported - sys.stdlib_module_names - set(PACKAGES) - NOT_IN_PILOTS
    assert {DISTRIBUTION_OF.get(name, name) for name in others} == set(on_node.DISTRIBUTIONS)


@pytest.mark.slow
def test_its_answer_is_one_line_about_this_machine(tmp_path: Path) -> None:
    (tmp_path / on_node.REQUEST).write_text("token")
    (tmp_path / on_node.CLOCK).write_text("1000.5")
    with PROGRAM.open() as program:
        done = subprocess.run(
            [sys.executable, "-I", "-", str(tmp_path), "token"],
            stdin=program,
            capture_output=True,
            text=True,
            check=True,
        )
    facts = next(facts for line in done.stdout.splitlines() if (facts := parse_answer(line, "token")) is not None)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["packages"]["pyarrow"] == on_node.packages()["pyarrow"]  # type: ignore[index]
    assert facts["shared"] == {"seen": "token", "written": "answer-0", "error": None}
    assert facts["login_time"] == 1000.5
    assert facts["interfaces"]["lo"] == "127.0.0.1"
    assert facts["folder"]["free_bytes"] > 0
    assert answer_seen(tmp_path, facts, "token")


def test_an_answer_to_another_question_is_none() -> None:
    line = f"{on_node.MARK} {json.dumps({'token': 'a'})}"
    assert parse_answer(line, "a") == {"token": "a"}
    assert parse_answer(line, "b") is None
    assert parse_answer(line[:-2], "a") is None
    assert parse_answer("srun: error", "a") is None


def test_a_folder_that_is_missing_is_said(tmp_path: Path) -> None:
    there = tmp_path / "none"
    assert on_node.shared(str(there), "t") == {"seen": None, "written": None, "error": "No such file or directory"}
    assert on_node.free_space(str(there))["error"] == "No such file or directory"
    assert on_node.login_time(str(there)) is None


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\ncat $0.txt\n")
    program.chmod(0o755)
    return tmp_path / "nvidia-smi.txt"


def test_gpus_with_and_without_mig(smi: Path) -> None:
    smi.write_text("NVIDIA H200, Disabled\nNVIDIA H200, Enabled\n")
    assert on_node.gpus() == {"names": ["NVIDIA H200", "NVIDIA H200"], "mig": ["Disabled", "Enabled"]}
    smi.with_suffix("").write_text("#!/bin/sh\necho No devices were found; exit 6\n")
    assert on_node.gpus() == {"error": "nvidia-smi: No devices were found"}
    smi.with_suffix("").unlink()
    assert on_node.gpus() == {"error": "nvidia-smi is not on PATH"}


def test_a_command_that_hangs_is_ended() -> None:
    assert on_node.run(("sleep", "60"), 0) == ("", "no answer within 0 s")
