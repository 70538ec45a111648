"""Context-parallel messages of kinds: a window sends its reach, a recurrent mixer its inputs and outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.workloads.costs.published import published
from workloads.costs.traffic.context_parallel import AttentionMessages, context_messages_of
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.recurrent import LightningAttention
from workloads.spec.model_layers import layers_of


def messages(name: str, kind: int, *, backward: bool = False, **fields: Any) -> list[AttentionMessages]:
    e = Experiment.canonical(model=published(name), global_batch_size=16, seq_len=32768, cp=4, **fields)
    return context_messages_of(e, layers_of(e.model).kinds[kind], 2, 4, backward=backward)


def test_a_window_sends_its_reach_once_for_each_piece() -> None:
    numbers = 8 * 2 * 64  # keys and values of gpt-oss, whose window is a token's own position and 127 before it
    assert messages("openai/gpt-oss-20b", 0) == [AttentionMessages("send", 2, 127 * numbers * 2)]
    assert messages("openai/gpt-oss-20b", 0, backward=True, tp=2) == [
        AttentionMessages("send", 2, 127 * numbers // 2 * 2)  # gradients alone, in the compute dtype
    ]
    assert messages("openai/gpt-oss-20b", 1) == [AttentionMessages("send", 3, 8192 * numbers * 2)]


def test_a_recurrent_mixer_exchanges_tokens_for_heads() -> None:
    keys, values = 16 * 128, 48 * 128  # Qwen3.5-27B
    columns = 2 * keys + values + values + 2 * 48  # queries and keys, values, gates, decays and rates
    sent = [AttentionMessages("all_to_all", 1, 3 * 8192 * n // 4 // 2 * 2) for n in (columns, values)]
    for kind in ("ring", "ulysses", "allgather"):
        assert messages("Qwen/Qwen3.5-27B", 0, cp_kind=kind, tp=2) == sent
        assert messages("Qwen/Qwen3.5-27B", 0, cp_kind=kind, tp=2, backward=True) == sent[::-1]


def test_lightning_attention_passes_states_on() -> None:
    lightning = LightningAttention(heads=64, head_dim=128)
    e = Experiment.canonical(model=published("Qwen/Qwen3.5-27B"), global_batch_size=16, cp=4, tp=2)
    kind = dataclasses.replace(layers_of(e.model).kinds[0], mixer=lightning)
    assert context_messages_of(e, kind, 2, 4, backward=False) == [
        AttentionMessages("all_gather", 1, 3 * 4 * 64 * 128**2 // 2)
    ]


def test_keys_of_one_head_are_whole_on_every_rank() -> None:
    (sliding,) = messages("deepseek-ai/DeepSeek-V4-Flash", 0, tp=2)
    assert sliding == AttentionMessages("send", 2, 128 * 512 * 2)
    (chosen,) = messages("deepseek-ai/DeepSeek-V4-Flash", 1, tp=2)
    assert chosen.bytes_each == 8192 * ((512 + 128) // 4) * 2  # an entry and the indexer's for four tokens
