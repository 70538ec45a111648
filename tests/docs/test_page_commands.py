"""The commands and files of the pages work: sweeps can be composed, plans and examples planned, points explained."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from sweep.__main__ import main
from sweep.composing.conffiles import GROUPS, ConfFolders
from sweep.composing.config import SweepConfig, compose_sweep
from tests.docs.pages import DOCS, REFERENCE, ROOT, WRITTEN_BY_HAND, commands, name_of, write_conf
from tests.sampling import sampled
from workloads.costs.shape.params import num_params

EXAMPLES = DOCS / "examples"
PLANNED = (*REFERENCE, EXAMPLES / "README.md")
"""Pages whose commands are run below, not only composed."""


@pytest.mark.slow(seconds=3)
def test_sweeps_on_the_command_lines_can_be_composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = []
    for path in WRITTEN_BY_HAND:
        if path in PLANNED:
            continue
        folder = tmp_path / name_of(path).replace("/", "-")
        folder.mkdir()
        write_conf(path.read_text(), folder)
        monkeypatch.chdir(folder)
        for words in commands(path.read_text(), "sweep"):
            if words[0] in ("plan", "run") and len(words) > 1 and "--help" not in words:
                try:
                    assert compose(words[1:]).grids
                except Exception as error:
                    wrong.append(f"{shlex.join(words)} in {name_of(path)}: {error!r}")
    assert wrong == []


def compose(words: list[str]) -> SweepConfig:
    rest, where, folders = [], [], []
    arguments = iter(words)
    for word in arguments:
        if word == "--where":
            where.append(next(arguments))
        elif word == "--conf":
            folder = Path(next(arguments))
            folders.append(folder if folder.is_dir() else ROOT / folder)
        elif word in ("--out", "--top", "--sort", "--show"):
            next(arguments)
        elif not word.startswith("--"):
            rest.append(word)
    return compose_sweep(rest, ConfFolders(tuple(folders)), extra_where=where)


# The reference: grids, fields, files and plans

COMMANDS_OF_THE_REFERENCE = [
    [name_of(page), *words] for page in REFERENCE for words in commands(page.read_text(), "sweep")
]
PLANS_OF_THE_REFERENCE = [command for command in COMMANDS_OF_THE_REFERENCE if command[1] == "plan"]


def plan_of(command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs a command in a folder that has the YAML files of its page alone."""
    page, *words = command
    write_conf((ROOT / page).read_text(), folder)
    monkeypatch.chdir(folder)
    return main(words)


@pytest.mark.slow
@pytest.mark.parametrize("command", sampled(PLANS_OF_THE_REFERENCE, 10, seconds=2), ids=" ".join)
def test_plans_of_the_reference(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_of(command, tmp_path, monkeypatch) == 0, capsys.readouterr().err
    assert "no step time is predicted" not in capsys.readouterr().out


@pytest.mark.slow
def test_points_of_the_reference_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    explained = [command for command in COMMANDS_OF_THE_REFERENCE if command[1] == "explain"]
    assert explained
    for command in explained:
        file = command[command.index("--results") + 1]
        (written,) = (other for other in PLANS_OF_THE_REFERENCE if other[0] == command[0] and other[-1] == file)
        assert plan_of(written, tmp_path, monkeypatch) == 0, capsys.readouterr().err
        assert plan_of(command, tmp_path, monkeypatch) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_every_file_of_the_reference_is_used_or_can_be(tmp_path: Path) -> None:
    for page in REFERENCE:
        write_conf(page.read_text(), tmp_path)
    folders = ConfFolders((tmp_path / "conf",))
    own = {group: [path.stem for path in (tmp_path / "conf" / group).glob("*.yaml")] for group in GROUPS}
    assert all(own.values()), own
    for grid in own["grid"]:
        assert compose_sweep([f"+grid={grid}"], folders).grids[0].description
    for cluster in own["cluster"]:
        assert compose_sweep(["+grid=first", f"cluster={cluster}"], folders).cluster.name == cluster
    for model in own["model"]:
        assert folders.model(model).name == model
    for group in ("launcher", "measure"):
        for name in own[group]:
            compose_sweep(["+grid=first", f"{group}={name}"], folders)


ON_SLURM = [words for words in commands((ROOT / "README.md").read_text(), "sweep") if "launcher=slurm" in words]


@pytest.mark.slow
@pytest.mark.parametrize("command", ON_SLURM, ids=" ".join)
def test_commands_of_the_first_page_for_slurm_write_batch_files(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "launcher.dry=true"]) == 0, capsys.readouterr().err
    assert "#SBATCH --partition=main" in capsys.readouterr().out


# docs/examples


@pytest.mark.slow
@pytest.mark.parametrize("command", commands((EXAMPLES / "README.md").read_text(), "sweep"), ids=" ".join)
def test_examples_plan(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path / "examples")
    assert main(["plan", *command[1:]]) == 0, capsys.readouterr().err
    assert re.search(r"^run +\d", capsys.readouterr().out, re.MULTILINE)


def test_the_qwen_example_is_qwen(tmp_path: Path) -> None:
    folders = ConfFolders((EXAMPLES / "qwen3_14b" / "conf",))
    assert num_params(folders.model("qwen3_14b")) == 14_768_307_200  # safetensors total on Hugging Face
    cluster = compose_sweep(["+grid=qwen3_14b_128gpu"], folders).cluster
    assert cluster.inter_node is not None
    assert 8 * 8 * cluster.inter_node.bandwidth == 4 * 200e9  # bits per second of a node
