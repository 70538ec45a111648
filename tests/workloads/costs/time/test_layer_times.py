"""Times of kinds: less for kinds that compute and send less."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.workloads.costs.published import published
from tests.workloads.costs.shapes import H200, LLAMA_8B
from workloads.costs.memory.kind_tensors import Sizes, kind_tensors
from workloads.costs.time.layer_times import (
    BY_LENGTH4,
    BY_LENGTH_64,
    DOCUMENTS_RELATIVE,
    documents_relative,
    layer_times,
    rates_of,
    window_relative,
)
from workloads.costs.time.rank_times import LayerTimes
from workloads.costs.time.recurrent_times import kernel_passes
from workloads.costs.time.timeline import estimate_time
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2
from workloads.spec.model_layers import layers_of
from workloads.spec.recurrent_kernels import Batch


def times(name: str, **fields: Any) -> list[LayerTimes]:
    e = Experiment.canonical(model=published(name), global_batch_size=16, **fields)
    rates = rates_of(e, H200)
    assert rates is not None
    return [layer_times(e, H200, rates, kind) for kind in layers_of(e.model).kinds]


def test_windows_compute_and_send_less_than_full_attention() -> None:
    window, full = times("openai/gpt-oss-20b", seq_len=32768, cp=4, cp_kind="allgather")
    assert window.forward_s < full.forward_s
    assert window.forward_exposed_s < full.forward_exposed_s


def test_kernels_of_documents_differ_in_their_rates() -> None:
    """Llama 8B, whose heads have 128: kernels by length take longer for a score of short documents."""

    def relative(attention: str, mean: int) -> float:
        documents = {"kind": "lognormal", "mean": mean, "sigma": 0.5, "seed": 1}
        return documents_relative(
            Experiment.canonical(
                model=LLAMA_8B, global_batch_size=4, seq_len=16384, documents=documents, attention=attention
            )
        )

    for mean in (400, 3000):
        assert relative("auto", mean) == DOCUMENTS_RELATIVE
        assert relative("flash", mean) < relative("flash4", mean) / 1.9
    assert relative("flash4", 400) < 0.5 < relative("flash4", 3000) < BY_LENGTH4[0]


def test_a_window_is_like_documents_of_its_length() -> None:
    """gpt-oss: 128 of 4,096 tokens, 126 keys a query on average, by the kernels that compute documents."""
    e = Experiment.canonical(model=published("openai/gpt-oss-20b"), global_batch_size=16, seq_len=4096)
    window, full = layers_of(e.model).kinds
    assert window_relative(e, full) == 1.0
    rate, more = BY_LENGTH_64
    keys = 128 - 128 * 127 / 8192
    assert window_relative(e, window) == pytest.approx(rate / (1 + more / (2 * keys)))
    assert window_relative(e.replace(seq_len=128), window) == 1.0


def test_experts_without_a_kernel_of_their_activation_take_its_bytes() -> None:
    """gpt-oss beside the same layers with SwiGLU and without biases of experts."""
    e = Experiment.canonical(model=published("openai/gpt-oss-20b"), global_batch_size=16, seq_len=4096)
    rates, kind = rates_of(e, H200), layers_of(e.model).kinds[0]
    assert rates is not None and isinstance(kind.mlp, RoutedMLP)
    plain = dataclasses.replace(kind.mlp.expert, activation="silu", bias=False)
    usual = dataclasses.replace(kind, mlp=dataclasses.replace(kind.mlp, expert=plain))
    own, fused = (layer_times(e, H200, rates, one) for one in (kind, usual))
    rows, width, biases = 4 * 4096, 2880, (2 * 8 + 16, 2 * 2 + 12)
    forward, backward = ((90 - 6 + biases[0]), (266 - 12 + biases[1]))
    assert own.forward_s - fused.forward_s == pytest.approx(rows * width * forward / rates.memory, rel=1e-6)
    more = own.backward_s - fused.backward_s
    assert more == pytest.approx(rows * width * backward / rates.memory, rel=1e-2)  # and bytes of the biases themselves


def test_a_layer_of_one_part_has_one_sum() -> None:
    mamba, _, attention = times("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", tp=2)
    both, _ = times("Qwen/Qwen3.5-27B", tp=2)
    assert 0 < mamba.forward_exposed_s == attention.forward_exposed_s < both.forward_exposed_s


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["Qwen/Qwen3.5-27B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_kernels_of_recurrences_add_their_bytes_and_a_second_forward(name: str, tp: int) -> None:
    usual, with_kernels = times(name, tp=tp)[0], times(name, tp=tp, recurrence="fla")[0]
    e = Experiment.canonical(model=published(name), global_batch_size=16, tp=tp)
    rates, kind = rates_of(e, H200), layers_of(e.model).kinds[0]
    assert rates is not None and isinstance(kind.mixer, GatedDeltaRule | Mamba2)
    passes = kernel_passes(kind.mixer, Batch(1, e.seq_len), tp)
    moved = sum(one.moved for one in kind_tensors(kind, Sizes.of(e, 2)).mixer)
    scan = e.seq_len * kind.mixer.kernel_flops() / tp / rates.attention
    forward, backward = (passes.forward - moved) / rates.memory, (passes.backward - 2 * moved) / rates.memory + scan
    assert with_kernels.forward_s - usual.forward_s == pytest.approx(forward, rel=1e-6)
    assert with_kernels.backward_s - usual.backward_s == pytest.approx(backward, rel=1e-6)


def test_ranks_divide_the_bytes_of_kernels() -> None:
    for name in ("Qwen/Qwen3.5-27B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "moonshotai/Kimi-K3"):
        mixers = [kind.mixer for kind in layers_of(published(name)).kinds]
        mixer = next(one for one in mixers if isinstance(one, GatedDeltaRule | KimiDelta | Mamba2))
        whole, half = (kernel_passes(mixer, Batch(2, 4096), tp) for tp in (1, 2))
        assert whole == (2 * half.forward, 2 * half.backward) and whole.backward > 2 * whole.forward


@pytest.mark.parametrize("recurrence", ["torch", "fla"])
def test_ranks_of_context_divide_the_work_and_copy_what_they_send(recurrence: str) -> None:
    name, longer = "Qwen/Qwen3.5-27B", {"seq_len": 16384, "recurrence": recurrence}
    alone, shared = times(name, **longer)[0], times(name, cp=4, **longer)[0]
    e = Experiment.canonical(model=published(name), global_batch_size=16)
    along, rates = layers_of(e.model).kinds[0].mixer, rates_of(e, H200)
    assert along is not None and rates is not None
    numbers = along.context_parallel.inputs + along.context_parallel.outputs
    copied = 4 * 2 * 4096 * numbers / rates.memory
    assert shared.forward_s == pytest.approx(alone.forward_s / 4 + copied, rel=1e-9)
    assert shared.backward_s == pytest.approx(alone.backward_s / 4 + copied, rel=1e-9)
    assert 0 == alone.forward_exposed_s < shared.forward_exposed_s == pytest.approx(shared.backward_exposed_s)


def test_a_step_is_the_sum_over_the_layers_of_its_kinds() -> None:
    e = Experiment.canonical(model=published("Qwen/Qwen3.5-27B"), global_batch_size=8)
    delta, full = times("Qwen/Qwen3.5-27B")
    of_step = estimate_time(e, H200)
    assert of_step is not None
    layers = 48 * (delta.forward_s + delta.backward_s) + 16 * (full.forward_s + full.backward_s)
    assert 0 < of_step.compute_s - e.num_microbatches * layers < 0.1 * of_step.compute_s
