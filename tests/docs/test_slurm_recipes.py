"""The table of recipes in docs/slurm.md: its launcher files, and the batch files that a dry run writes with them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from sweep.__main__ import main
from tests.docs.pages import DOCS

CONF = DOCS / "examples" / "slurm_recipes" / "conf"
_ROW = re.compile(
    r"^\| [^|]+ \| \[(?P<name>\w+)\]\((?P<link>[^)]+)\): (?P<options>[^|]+) \| (?P<lines>[^|]+) \|$", re.MULTILINE
)
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Recipe:
    name: str
    file: Path
    options: tuple[str, ...]
    lines: tuple[str, ...]


SECTION = (DOCS / "slurm.md").read_text().partition("## Recipes")[2].partition("\n## ")[0]
RECIPES = [
    Recipe(row["name"], DOCS / row["link"], tuple(_CODE.findall(row["options"])), tuple(_CODE.findall(row["lines"])))
    for row in _ROW.finditer(SECTION)
]
each = pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.name for recipe in RECIPES])


def batch_files(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> list[str]:
    words = ["run", "+grid=first_day", "--conf", str(CONF), "cluster=four_h100", f"launcher={recipe.name}"]
    assert main([*words, "results_dir=/shared/results", "launcher.dry=true"]) == 0
    texts = [f"#!/bin/bash{text}" for text in capsys.readouterr().out.split("#!/bin/bash")[1:]]
    assert len(texts) == 2  # one for each number of nodes
    return texts


def test_the_table_has_every_file_and_nothing_else() -> None:
    assert sorted(recipe.file for recipe in RECIPES) == sorted((CONF / "launcher").glob("*.yaml"))
    assert SECTION.count("\n| ") == len(RECIPES) + 1, "a row does not have the form of the others"


@each
def test_the_page_shows_what_the_file_has(recipe: Recipe) -> None:
    fields = yaml.safe_load(recipe.file.read_text())
    assert fields.pop("defaults") == ["slurm", "_self_"]
    assert yaml.safe_load("\n".join(recipe.options)) == fields


@pytest.mark.slow
@each
def test_the_batch_file_is_bash_and_has_the_lines_of_the_page(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in batch_files(recipe, capsys):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
        at, lines = 0, text.splitlines()
        for line in recipe.lines:
            pattern = ".*".join(map(re.escape, line.removesuffix(" ...").split("...")))
            number = next((n for n in range(at, len(lines)) if re.match(pattern, lines[n])), None)
            assert number is not None, f"{line} is not in the batch file, in the page's order"
            at = number + 1
        assert "#SBATCH --gpus-per-node=4" in lines or "#SBATCH --gres=gpu:h100:4" in lines


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [one for one in RECIPES if "setup" in one.options[0]], ids=lambda recipe: str(recipe.name)
)
def test_a_set_up_that_is_missing_ends_the_job_before_srun(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    for text in batch_files(recipe, capsys):
        ended = subprocess.run(["bash", "-c", text], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ended.returncode != 0
        assert "No such file or directory" in ended.stderr or "launcher.setup failed with exit code" in ended.stderr
        assert not (tmp_path / "started").exists()


def test_nodes_of_four_take_two_for_eight_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = next(recipe for recipe in RECIPES if recipe.name == "four_gpus")
    assert [re.findall(r"^#SBATCH --nodes=(\d+)$", text, re.MULTILINE) for text in batch_files(recipe, capsys)] == [
        ["2"],
        ["1"],
    ]


def test_amd_gpus_are_planned_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "conf" / "cluster" / "amd.yaml").write_text("defaults: [mi300x, _self_]\nname: amd\n")
    words = ["+grid=first_day", "--conf", str(tmp_path / "conf"), "cluster=amd", "launcher=apptainer"]
    assert main(["plan", *words]) == 0
    assert "cluster amd (AMD Instinct MI300X) is planned only" in capsys.readouterr().out
    assert main(["run", *words, "launcher.dry=true"]) == 2
    assert "planned only: the engine runs on CUDA; plan, advise, explain" in capsys.readouterr().err
