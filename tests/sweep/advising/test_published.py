"""Layouts that teams published, beside the answer of ``advise``."""

from __future__ import annotations

import json

import pytest

from sweep.__main__ import main
from sweep.advising.published import FOLDER
from sweep.composing.conffiles import PACKAGED
from sweep.composing.yaml_files import read_yaml
from sweep.predicting.codebases import read_clusters

WORDS = ("model=qwen3_30b_a3b", "cluster=h100_efa", "gpus=16", "tp=1", "cp=1", "pp=1", "ep=[8,16]", "dp_replicate=1")
NOWHERE = "results_dir=nowhere"


def test_every_published_layout_has_a_model_a_device_and_a_source() -> None:
    devices = {cluster.device.name for cluster in read_clusters().values()}
    for path in FOLDER.glob("*.yaml"):
        assert (PACKAGED / "model" / path.name).is_file()
        for one in read_yaml(path)["layouts"]:
            assert one["device"] in devices and one["url"].startswith("https://") and one["source"]
            assert one["date"][:2] == "20"
            assert one["gpus"] % (one.get("tp", 1) * one.get("cp", 1) * one.get("pp", 1)) == 0


def test_a_published_layout_is_compared_with_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *WORDS, NOWHERE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [one] = found["published"]
    best = found["layouts"][0]["predicted_tokens_per_s_per_gpu"]
    assert one["against_best"] == pytest.approx(one["predicted_tokens_per_s_per_gpu"] / best - 1)
    assert (one["experiment"]["ep"], one["experiment"]["dp_shard"], one["why_not"]) == (16, 16, None)
    assert main(["advise", *WORDS, NOWHERE]) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("published: ")]
    assert "dp 16, ep 16, mbs 1 x 64, ZeRO 1, recompute selective on 16 GPUs in bf16 (Megatron-Bridge" in line
    assert (
        f"{100 * abs(one['against_best']):.0f} % {'less' if one['against_best'] < 0 else 'more'} than the first" in line
    )


def test_one_that_does_not_suit_the_question_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *WORDS, NOWHERE, "cluster.reserved_bytes=60e9", "--json"]) == 0
    [one] = json.loads(capsys.readouterr().out)["published"]
    assert one["why_not"] == "it is predicted not to fit in memory" and one["against_best"] is None
