"""``model``: what is printed of a config.json, the file of ``conf/model``, and ``model=`` with a path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sweep.__main__ import main
from sweep.advising.answer import settling_words
from sweep.advising.question import read_question
from sweep.composing.conffiles import ConfFolders
from workloads.spec.errors import InvalidSweep
from workloads.spec.model_spec import model_to_dict

CONFIGS = Path(__file__).parents[2] / "workloads" / "spec" / "published_models.json"


@pytest.fixture
def published(tmp_path: Path) -> Any:
    """Writes the config.json of a published model into a folder of its name, and returns the file."""
    models = json.loads(CONFIGS.read_text())["models"]

    def write(name: str) -> Path:
        file = tmp_path / name.rpartition("/")[2] / "config.json"
        file.parent.mkdir()
        file.write_text(json.dumps(models[name]["config"]))
        return file

    return write


def test_a_model_that_can_be_planned(published: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = published("deepseek-ai/DeepSeek-V3"), tmp_path / "model" / "v3.yaml"
    out.parent.mkdir()
    assert main(["model", str(file.parent), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for part in ("671,026,404,352", "37,552,282,624", "3 x latent", "250.46 G", "multi-token prediction", "model=PATH"):
        assert part in printed
    assert "of 8 groups" in out.read_text()
    assert "original_max_position_embeddings" in out.read_text()
    written, given = ConfFolders((tmp_path,)).model("v3"), ConfFolders().model(str(file))
    assert {**model_to_dict(written), "name": given.name} == model_to_dict(given)
    assert given.name == "DeepSeek-V3"


def test_a_model_with_a_list_of_layers(published: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = published("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), tmp_path / "model" / "nano.yaml"
    out.parent.mkdir()
    assert main(["model", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 31_577_937_344
    assert [kind["count"] for kind in facts["kinds"]] == [23, 23, 6]
    assert "Mamba-2" in facts["not_expressible"]
    assert main(["model", str(file), "--out", str(out)]) == 0
    assert "run             yes, with model=" in capsys.readouterr().out
    written, given = ConfFolders((tmp_path,)).model("nano"), ConfFolders().model(str(file))
    assert {**model_to_dict(written), "name": given.name} == model_to_dict(given)
    assert given.layers is not None and len(given.layers.kinds) == 3


def test_what_the_engine_lacks_is_refused_by_name(published: Any, capsys: pytest.CaptureFixture[str]) -> None:
    file = published("MiniMaxAI/MiniMax-M3")
    for command in (["run", "+grid=one_point", "name=x"], ["parity", "--right", "tp=2"]):
        assert main([*command, f"model={file}"]) == 2
        refused = capsys.readouterr().err
        assert refused.count("\n") == 1
        assert "model MiniMax-M3 can be planned, but not run yet: the engine lacks gated (clamped_silu) MLPs" in refused
        assert "norm of queries" not in refused and "block-sparse with top 16 blocks of 128 attention" in refused


def test_the_command_that_settles_an_answer_has_the_path(published: Any) -> None:
    file = published("Qwen/Qwen3-0.6B")
    question = read_question([f"model={file}", "cluster=h200", "gpus=1"])
    assert question.model.name == "Qwen3-0.6B"
    with pytest.raises(InvalidSweep, match="nothing fits"):
        settling_words(question, [])
    assert question.model_given == str(file)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nowhere/config.json", "nowhere/config.json: no such file"),
        ("nowhere/else", "nowhere/else: no such file; nothing is downloaded: give the path of a config.json"),
    ],
)
def test_a_path_to_nothing_is_one_line(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "+grid=one_point", f"model={word}"]) == 2
    refused = capsys.readouterr().err
    assert message in refused and refused.count("\n") == 1
