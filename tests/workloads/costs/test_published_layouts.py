"""All published models go through the planner's closed forms: stages, memory, times and traffic of a small grid."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.workloads.costs.published import PUBLISHED, published
from tests.workloads.costs.shapes import H200
from workloads.costs.memory.estimate import estimate_memory, peak_stage
from workloads.costs.shape.params import matmul_of, matmul_params, num_params
from workloads.costs.shape.partition import experiment_stages
from workloads.costs.time.step_times import StepTimes
from workloads.costs.traffic.sent import step_traffic
from workloads.rules.engine_kinds import lacking_kinds
from workloads.rules.layout_rules import violations
from workloads.spec.config_json.expressible import spec_fields
from workloads.spec.config_json.read import layers_from_config
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import model_from_dict

LAYOUTS = (
    {"dp": 16, "zero_stage": 3},
    {"dp": 4, "tp": 2, "cp": 2, "zero_stage": 1, "recompute": "full"},
    {"dp": 2, "tp": 2, "pp": 4, "zero_stage": 1, "recompute": "selective", "recompute_every": 2},
    {"dp": 2, "pp": 2, "virtual_stages": 2, "pp_schedule": "interleaved_1f1b", "zero_stage": 2},
    {"dp": 2, "pp": 2, "pp_schedule": "zero_bubble_v", "zero_stage": 2},
)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_is_planned(name: str) -> None:
    model = published(name)
    ep = 2 if model.moe is not None else 1
    kind: Any = {"cp_kind": "ulysses"} if "Llama-4" in name else {}  # a ring does not exchange chunks
    layouts = [Experiment.canonical(model=model, global_batch_size=32, ep=ep, **fields, **kind) for fields in LAYOUTS]
    for e, seconds in zip(layouts, StepTimes(H200).seconds(layouts), strict=True):
        assert violations(e, H200) == []
        assert math.isfinite(seconds) and seconds > 0
        stages = experiment_stages(e)
        copies = model.vocab_size * model.hidden_size if model.tie_embeddings and e.pp > 1 else 0
        assert sum(stage.total for stage in stages) == num_params(model) + copies
        kinds = layers_of(model)
        assert [sum(of_kind) for of_kind in zip(*(stage.of_kind for stage in stages), strict=True)] == [
            kinds.order.count(at) for at in range(len(kinds.kinds))
        ]
        memory = estimate_memory(e)
        assert memory.peak_bytes == peak_stage(e).peak_bytes
        # at least the optimizer's states of one rank
        assert memory.peak_bytes > 12 * num_params(model) / e.world_size / 2
        assert sum(sent.bytes for sent in step_traffic(e, 0)) > 0


def test_modules_of_multi_token_prediction_count_as_layers_and_passes_of_the_head() -> None:
    file = layers_from_config("v3", PUBLISHED["deepseek-ai/DeepSeek-V3"]["config"])
    plain, ahead = (model_from_dict(spec_fields(file, "v3", ahead=on)) for on in (False, True))
    assert ahead.layers is not None and (plain.num_layers, ahead.num_layers) == (61, 62)
    layer = file.layers[-1]
    module = sum(weight.parameters for weight in layer.weights(7168)) + 2 * 7168 * 7168 + 3 * 7168
    assert num_params(ahead) - num_params(plain) == module
    head = 129280 * 7168
    assert matmul_params(ahead) - matmul_params(plain) == matmul_of(layer, 7168) + 2 * 7168 * 7168 + head
    assert lacking_kinds(ahead) == ()
    layouts = [
        Experiment.canonical(model=model, pp=4, dp=8, ep=8, zero_stage=1, global_batch_size=64)
        for model in (plain, ahead)
    ]
    seconds = StepTimes(H200).seconds(layouts)
    assert seconds[0] < seconds[1] < 1.2 * seconds[0]
    assert experiment_stages(layouts[1])[-1].of_kind[-1] == 1
    written = layouts[1].replace(pp_stages="Et*16|t*16|t*16|t*13mL")
    assert violations(written, H200) == []
    assert [stage.num_layers for stage in experiment_stages(written)] == [16, 16, 16, 14]
    assert experiment_stages(written)[-1].of_kind[-1] == 1
    without = layouts[0].replace(pp_stages="Et*16|t*16|t*16|t*13mL")
    assert "(m in pp_stages=Et*16|t*16|t*16|t*13mL; v3 has none)" in violations(without, H200)[0].message


def test_recomputation_saves_memory_and_takes_time() -> None:
    for name in ("openai/gpt-oss-20b", "Qwen/Qwen3.5-27B", "nvidia/Nemotron-H-56B-Base-8K"):
        none, selective, full = (
            Experiment.canonical(
                model=published(name),
                global_batch_size=64,
                dp=16,
                zero_stage=3,
                micro_batch_size=4,
                recompute=recompute,
            )
            for recompute in ("none", "selective", "full")
        )
        peaks = [peak_stage(e).peak_bytes for e in (none, selective, full)]
        seconds = StepTimes(H200).seconds([none, selective, full]).tolist()
        assert peaks == sorted(peaks, reverse=True) and seconds == sorted(seconds)


def test_heads_of_all_kinds_bound_tensor_parallelism() -> None:
    def broken(name: str, tp: int) -> list[str]:
        e = Experiment.canonical(model=published(name), global_batch_size=8, tp=tp)
        return [one.rule for one in violations(e, H200)]

    # Two key and value heads in full layers, of which four ranks hold copies; eight in sliding ones.
    assert broken("google/gemma-4-26B-A4B", 4) == []
    assert "tp_num_kv_heads" in broken("google/gemma-4-26B-A4B", 3)
    assert broken("nvidia/Nemotron-H-56B-Base-8K", 8) == []
    assert "tp_recurrent_heads" in broken("nvidia/Nemotron-H-56B-Base-8K", 16)


@pytest.mark.parametrize("precision", ["fp8_tensorwise", "fp8_blockwise"])
def test_fp8_products_of_kinds_take_less_time_and_memory(precision: Any) -> None:
    for name in ("MiniMaxAI/MiniMax-M3", "Qwen/Qwen3.5-27B", "nvidia/Nemotron-H-56B-Base-8K", "zai-org/GLM-5"):
        wide, narrow = (
            Experiment.canonical(model=published(name), global_batch_size=16, dp=16, zero_stage=3, precision=kind)
            for kind in ("bf16", precision)
        )
        # The projection of Qwen3.5's delta rule has 16,480 columns, no multiple of a block of 128.
        odd_columns = name == "Qwen/Qwen3.5-27B" and precision == "fp8_blockwise"
        assert [one.rule for one in violations(narrow, H200)] == (["fp8_sizes"] if odd_columns else [])
        assert violations(wide, H200) == []
        of_wide, of_narrow = StepTimes(H200).seconds([wide, narrow])
        assert 0.3 * of_wide < of_narrow < of_wide
        assert peak_stage(narrow).peak_bytes <= peak_stage(wide).peak_bytes
    odd = Experiment.canonical(
        model=published("Qwen/Qwen3.5-27B"), global_batch_size=16, seq_len=4100, precision=precision
    )
    assert [one.rule for one in violations(odd, H200)] == ["fp8_sizes"]
