"""``advise --where``: only layouts that meet a condition in the language of grids, also as JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from sweep.__main__ import main

WORDS = ("model=llama8b", "cluster=h200", "gpus=8", "global_batch_size=64", "cp=1", "pp=[1,2]", "results_dir=nowhere")


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["advise", *WORDS, *words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_conditions_are_as_good_as_narrowed_axes(capsys: pytest.CaptureFixture[str]) -> None:
    by_axes = answered(capsys, "tp=[2,4]", "recompute=none")
    by_conditions = answered(capsys, "--where", "tp > 1 and tp < 8", "--where", "recompute == 'none'")
    assert [one["experiment_id"] for one in by_conditions["layouts"]] == [
        one["experiment_id"] for one in by_axes["layouts"]
    ]
    assert by_conditions["families"] == by_axes["families"]
    assert by_conditions["where"] == ["tp > 1 and tp < 8", "recompute == 'none'"] and by_axes["where"] == []
    words = shlex.split(by_conditions["search_command"])
    assert words[-4:] == ["--where", "tp > 1 and tp < 8", "--where", "recompute == 'none'"]


def test_the_search_that_settles_it_reads_the_users_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "ours.yaml").write_text("defaults: [h200, _self_]\nname: ours\n")
    of_ours = [word.replace("h200", "ours") for word in WORDS]
    assert main(["advise", *of_ours, "tp=2", "--conf", str(tmp_path), "--json"]) == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["search_command"])
    assert words[words.index("--conf") + 1] == str(tmp_path)


def test_every_layout_of_the_answer_meets_a_condition_on_several_fields(capsys: pytest.CaptureFixture[str]) -> None:
    condition = "dp_shard == 2 and recompute_every * pp <= 2"
    layouts = [one["experiment"] for one in answered(capsys, "--where", condition)["layouts"]]
    assert layouts and all(one["dp_shard"] == 2 and one["recompute_every"] * one["pp"] <= 2 for one in layouts)
    assert main(["advise", *WORDS, "--where", condition, "--top", "1"]) == 0
    assert f"only layouts with {condition}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("tpp == 2", "advise: --where: no name 'tpp'; did you mean 'tp'?"),
        ("step_time_s < 2", "step_time_s is a prediction; conditions here are on a layout's fields"),
        ("tp / 0 > 1", "advise: --where 'tp / 0 > 1': "),
        ("tp == 3", "advise: no layout meets --where tp == 3"),
        ("tp ==", "advise: --where"),
        (
            'tp == "2"',
            """advise: --where 'tp == "2"': tp is a number and "2" is a text, which are never equal; write 2""",
        ),
        ("recompute == 'ful'", "advise: --where 'recompute == 'ful'': recompute='ful'; did you mean 'full'?"),
    ],
)
def test_mistakes_get_one_line(condition: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *WORDS, "--where", condition]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
