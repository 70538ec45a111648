"""Padded vocabularies and copied heads cost what the sizes that ranks then hold cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.memory.estimate import estimate_memory, peak_stage
from workloads.costs.shape.flops import hardware_flops_per_token
from workloads.costs.shape.held_model import as_held, copies_in_layers, copies_of_heads
from workloads.costs.shape.partition import experiment_stages
from workloads.costs.traffic.sent import step_traffic
from workloads.rules.layout_rules import lacking, layout_violations
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.model_spec import ModelSpec, model_from_dict


def of(**fields: Any) -> Experiment:
    return Experiment.canonical(**{"model": LLAMA_8B, "global_batch_size": 8, **fields})


def test_padded_rows_cost_what_rows_cost() -> None:
    """128,256 rows, padded to a multiple of 4,096 times tp as Megatron-LM pads: 131,072."""
    padded = of(tp=2, pp=2, pad_vocab_to=4096)
    wider = of(tp=2, pp=2, model=dataclasses.replace(LLAMA_8B, vocab_size=131_072))
    assert as_held(padded).model == wider.model
    assert experiment_stages(padded) == experiment_stages(wider)
    assert estimate_memory(padded) == estimate_memory(wider)
    assert peak_stage(padded) == peak_stage(wider)
    assert hardware_flops_per_token(padded) == hardware_flops_per_token(wider)
    assert step_traffic(padded, 0) == step_traffic(wider, 0)
    assert layout_violations(padded) == []
    assert lacking(padded) == []
    assert layout_violations(of(tp=2, pad_vocab_to=1, model=dataclasses.replace(LLAMA_8B, vocab_size=128_255))) == []


def test_every_rank_has_one_head_where_tp_exceeds_them() -> None:
    """8 key and value heads on 16 ranks: queries, heads of keys and values, and the rest are each rank's own."""
    copied = of(tp=16)
    assert copies_of_heads(copied) == [2]
    assert layout_violations(copied) == []
    assert lacking(copied) == []
    hidden, head = 4096, 128
    stage = experiment_stages(copied)[0]
    attention = (32 // 16 + 2 * 1 + 32 // 16) * head * hidden
    assert stage.layers.split // 16 == 32 * (attention + 3 * 14336 // 16 * hidden)
    more = of(tp=16, model=dataclasses.replace(LLAMA_8B, num_kv_heads=16))
    assert estimate_memory(copied) == estimate_memory(more)
    sums, others = [{(one.axis, one.op): (one.calls, one.bytes) for one in step_traffic(e, 5)} for e in (copied, more)]
    calls, sent = sums.pop(("tp", "all_reduce"))
    calls_of_more, sent_of_more = others.pop(("tp", "all_reduce"))
    assert (calls - calls_of_more, sent - sent_of_more) == (1, 4 * 32 * 2 * head * hidden)
    assert sums == others


def test_without_both_it_is_the_same_experiment() -> None:
    case = of(tp=8)
    assert as_held(case) is case
    assert of(tp=8, pad_vocab_to=1) == case  # 8 divides 128,256
    assert copies_of_heads(of(tp=24)) == []


def of_layers(*kv_heads: int) -> ModelSpec:
    """One layer of each number of key and value heads, among 16 query heads."""
    kinds = [
        {
            "mixer": {"kind": "attention", "heads": 16, "kv_heads": heads, "head_dim": 8, "value_dim": 8}
            | ({"span": {"kind": "window", "size": 4}} if place else {}),
            "mlp": {"kind": "dense", "width": 64, "activation": "silu"},
        }
        for place, heads in enumerate(kv_heads)
    ]
    order = list(range(len(kinds)))
    return model_from_dict(
        {"name": "listed", "hidden_size": 128, "vocab_size": 256, "layers": {"kinds": kinds, "order": order}}
    )


@pytest.mark.parametrize(
    ("kv_heads", "tp", "held", "copies"),
    [
        ((8, 2), 4, [8, 4], [2]),
        ((8, 2), 8, [8, 8], [4]),
        ((8, 2), 16, [16, 16], [2, 8]),
        ((8, 2), 2, [8, 2], []),
        ((8, 3), 4, [8, 3], []),
        ((8, 2), 32, [8, 2], []),
    ],
)
def test_kinds_of_layers_hold_copies_where_tp_exceeds_their_heads(
    kv_heads: Any, tp: int, held: list[int], copies: list[int]
) -> None:
    model = of_layers(*kv_heads)
    given = Experiment.canonical(model=model, tp=tp, global_batch_size=1, seq_len=64)
    one = as_held(given)
    assert one.model.layers is not None
    mixers = [kind.mixer for kind in one.model.layers.kinds]
    assert [mixer.kv_heads for mixer in mixers if isinstance(mixer, Attention)] == held
    assert copies_in_layers(model, tp) == (held != list(kv_heads))
    assert copies_of_heads(given) == copies
    assert ("tp_num_kv_heads" in {broken.rule for broken in layout_violations(given)}) == (
        held == [*kv_heads] and tp > 2
    )


def test_a_padded_vocabulary_of_listed_layers_takes_memory() -> None:
    plain = Experiment.canonical(model=of_layers(8, 2), tp=2, global_batch_size=1, seq_len=64)
    padded = dataclasses.replace(plain, pad_vocab_to=1024)
    assert as_held(padded).model.vocab_size == 2048
    more = sum(one.total for one in experiment_stages(padded)) - sum(one.total for one in experiment_stages(plain))
    assert more == 2 * (2048 - 256) * 128  # in embedding and head
    assert estimate_memory(padded).peak_bytes > estimate_memory(plain).peak_bytes
