"""All mistakes of a user's file are reported at once, each with the line to write."""

from __future__ import annotations

import dataclasses

import pytest

from results.errors import UltrasweepError
from workloads.spec import model_fields
from workloads.spec.errors import InvalidExperiment, InvalidSweep
from workloads.spec.hardware.cluster_fields import read_cluster
from workloads.spec.mistakes import Mistakes
from workloads.spec.model_spec import MLASpec, ModelSpec, MoESpec, model_from_dict


def test_mistakes_are_collected_and_each_is_reported_once() -> None:
    mistakes = Mistakes()
    mistakes.refuse()
    for text in ("a", "b", "a"):
        with mistakes.collected():
            raise InvalidExperiment(text)
    outer = Mistakes()
    with outer.collected():
        mistakes.refuse()
    with outer.collected():
        raise InvalidSweep("c")
    with pytest.raises(InvalidExperiment) as error:
        outer.refuse()
    assert error.value.messages == ("a", "b", "c")
    assert str(error.value) == "a; b; c"
    single = Mistakes()
    with single.collected():
        raise UltrasweepError("alone")
    with pytest.raises(UltrasweepError, match="alone"):
        single.refuse()


def test_a_model_file_of_another_program_gets_every_line_at_once() -> None:
    config = {
        "name": "ours",
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "intermediate_size": 5632,
        "vocab_size": "32k",
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "moe": {"num_local_experts": 8, "num_experts_per_tok": 2, "gate": "relu"},
        "max_position_embeddings": 4096,
    }
    with pytest.raises(InvalidExperiment) as error:
        model_from_dict(config)
    assert [message.partition(" known:")[0] for message in error.value.messages] == [
        "model ours: no field 'num_hidden_layers'; did you mean 'num_layers'? write num_layers: 24",
        "model ours: no field 'num_attention_heads'; did you mean 'num_heads'? write num_heads: 16",
        "model ours: no field 'intermediate_size'; did you mean 'ffn_hidden_size'? write ffn_hidden_size: 5632",
        "model ours: no field 'tie_word_embeddings'; did you mean 'tie_embeddings'? write tie_embeddings: true",
        "model ours: no field 'hidden_act'; the feed-forward layer is SwiGLU; leave it out",
        "model ours: no field 'max_position_embeddings'; it is the axis seq_len of a grid: grid.axes.seq_len=4096;",
        "model ours: num_kv_heads must be given; write for example num_kv_heads: 8",
        "model ours: vocab_size='32k' must be a whole number of at least 1",
        "model ours: moe: no field 'num_local_experts'; did you mean 'num_experts'? write num_experts: 8",
        "model ours: moe: no field 'num_experts_per_tok'; did you mean 'experts_per_token'?",
        "model ours: moe: expert_hidden_size must be given; write for example expert_hidden_size: 14336",
        "model ours: moe: gate='relu'; it may be softmax or sigmoid",
    ]


def test_the_fields_of_a_model_are_those_of_its_classes() -> None:
    for kind, checks in ((MoESpec, model_fields._MOE), (MLASpec, model_fields._MLA)):
        assert set(checks) == {field.name for field in dataclasses.fields(kind)}
    in_files = {*model_fields._MODEL, "moe", "mla", "layers"} - {
        "mtp_modules",
        "mtp_loss_weight",
    }  # parts of the layers
    assert in_files == {field.name for field in dataclasses.fields(ModelSpec)}


def test_all_mistakes_of_a_cluster_are_reported_at_once() -> None:
    fields = {
        "name": "ours",
        "backend": "nccl",
        "gpus_per_node": 8,
        "device": {"name": "GPU", "memory_bytes": 80, "peak_flops": {"bf16": 989}, "memory_bandwidth": "3 TX/s"},
        "intra_node": {"bandwidth": 450},
        "inter_node": {"bandwidth": "400 Gb/s", "latency": "5 us"},
        "matmul_efficiency": 70,
    }
    with pytest.raises(InvalidSweep) as error:
        read_cluster(fields)
    said = [message.removeprefix("cluster ours: ").partition(" known:")[0] for message in error.value.messages]
    assert [text.partition(" means")[0] for text in said] == [
        "device.memory_bandwidth='3 TX/s': 'TX/s' is not a unit of bandwidth; write it like '50 GB/s', or as a number "
        "of B/s",
        "intra_node: latency_s must be given; write for example latency_s: 5 us",
        "inter_node: no option 'latency'; did you mean 'latency_s'?",
        "no option 'gpus_per_node'; did you mean 'devices_per_node'?",
        "backend='nccl'; it may be cuda, cpu or rocm",
        "device.memory_bytes=80",
        "matmul_efficiency=70 must be a share above 0, at most 1 (0.7 is 70 %)",
        "intra_node.bandwidth=450",
        "device.peak_flops.bf16=989",
    ]
