"""What is exported for transformers of layers that numbers cannot describe: its classes have the model's parameters."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from sweep.engine_configs.export import engine_config, write_config
from tests.sweep.engine_configs.layouts import layout
from tests.workloads.engine.test_published_modules import COMMON, CONFIGS
from workloads.costs.shape.params import num_params
from workloads.spec.config_json.expressible import model_spec
from workloads.spec.config_json.read import layers_from_config
from workloads.spec.config_json.write import WRITERS, config_of
from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

SHIPPED = {
    "gpt_oss_20b_8_layers": "GptOss",
    "qwen3_5_35b_a3b_8_layers": "Qwen3_5Moe",
    "nemotron_3_nano_14_layers": "NemotronH",
    "gemma_4_26b_a4b_6_layers": "Gemma4",
    "llama4_scout_4_layers": "Llama4",
    "deepseek_v2_lite_10_layers": "DeepseekV2",
    "dots_llm1_4_layers": "Glm4Moe",
    "deepseek_v3": "DeepseekV3",
}
installed = pytest.mark.skipif(
    find_spec("transformers") is None or find_spec("accelerate") is None,
    reason="transformers, accelerate not installed",
)


def small(kind: str, **changes: Any) -> ModelSpec:
    return model_spec(layers_from_config(kind, {**COMMON, **CONFIGS[kind], **changes, "model_type": kind}))


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_written_is_read_as_the_same_model(kind: str) -> None:
    model = small(kind)
    config = config_of(model)
    assert config is not None and config["model_type"] == kind
    assert model_spec(layers_from_config(model.name, config)) == model


def test_a_model_of_no_family_is_refused_by_what_numbers_lack() -> None:
    model = small("gpt_oss")
    assert model.layers is not None
    odd = dataclasses.replace(model.layers.kinds[0], norms=4)
    other = dataclasses.replace(model, layers=dataclasses.replace(model.layers, kinds=(odd, *model.layers.kinds[1:])))
    assert config_of(other) is None
    with pytest.raises(
        UnsupportedByEngine, match=r"to transformers yet: no writer for sliding 5 attention; .*sandwich"
    ):
        engine_config(Experiment.canonical(model=other, global_batch_size=8), "transformers")
    assert set(CONFIGS) == set(WRITERS)


@installed
@pytest.mark.slow(seconds=15)
def test_its_classes_have_the_parameters_of_shipped_models(tmp_path: Path) -> None:
    folders = {}
    for name in SHIPPED:
        e = layout(name, dp=2, zero_stage=3, global_batch_size=8, routing="learned")
        folders[name] = tmp_path / name
        write_config(engine_config(e, "transformers"), folders[name])
    command = [sys.executable, "-m", f"{__package__}.accelerate_reads", *map(str, folders.values())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for found, (name, family) in zip(lines, SHIPPED.items(), strict=True):
        assert found["class"] == f"{family}ForCausalLM"
        model = layout(name, global_batch_size=8).model
        assert found["parameters"] == num_params(model), name


@installed
@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("kind", ["gpt_oss", "gemma4_text"])
def test_the_script_trains(tmp_path: Path, kind: str) -> None:
    fields: dict[str, Any] = {"seq_len": 32, "micro_batch_size": 2, "global_batch_size": 4, "precision": "fp32"}
    e = Experiment.canonical(model=small(kind), routing="learned", **fields)
    write_config(engine_config(e, "transformers"), tmp_path)
    command = [sys.executable, "-m", f"{__package__}.accelerate_reads", "--run", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 2 and all(3 < loss < 9 for loss in losses)
