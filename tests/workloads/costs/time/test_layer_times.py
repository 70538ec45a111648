"""Times of kinds: less for kinds that compute and send less."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.workloads.costs.published import published
from tests.workloads.costs.shapes import H200, LLAMA_8B
from workloads.costs.memory.kind_tensors import Sizes, kind_tensors
from workloads.costs.time.attention_rates import (
    BY_LENGTH4,
    DOCUMENTS_RELATIVE,
    SINKS,
    documents_relative,
    kind_relative,
    sink_passes,
)
from workloads.costs.time.layer_times import layer_times, rates_of
from workloads.costs.time.rank_times import LayerTimes
from workloads.costs.time.recurrent_times import kernel_passes
from workloads.costs.time.timeline import estimate_time
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.model import Layer
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


def of_4096_tokens(name: str, tokens: int = 4096) -> tuple[Experiment, list[Layer]]:
    e = Experiment.canonical(model=published(name), global_batch_size=16, seq_len=tokens)
    return e, list(layers_of(e.model).kinds)


@pytest.mark.parametrize(
    ("name", "tokens", "kind", "measured"),
    [
        ("openai/gpt-oss-20b", 4096, 0, 68.1),  # a window of 128, heads of 64
        ("openai/gpt-oss-20b", 2048, 0, 66.7),
        ("google/gemma-4-26B-A4B", 4096, 0, 214.9),  # a window of 1,024, heads of 256
        ("google/gemma-4-26B-A4B", 8192, 0, 218.7),
        ("google/gemma-4-26B-A4B", 4096, 1, 50.1),  # heads of 512
        ("Qwen/Qwen3.5-27B", 4096, 1, 397.7),  # heads of 256
    ],
)
def test_kernels_of_kinds_have_their_own_rates(name: str, tokens: int, kind: int, measured: float) -> None:
    """TFLOP/s, forward and backward, on H200 beside 492 of heads of 128 on whole sequences of 4,096 tokens."""
    e, kinds = of_4096_tokens(name, tokens)
    assert kind_relative(e, kinds[kind]) * 492 == pytest.approx(measured, rel=0.07)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    e, (window, full) = of_4096_tokens("openai/gpt-oss-20b")
    assert kind_relative(e.replace(seq_len=128), window) == kind_relative(e, full) == 1.0


def test_sinks_take_passes_over_the_output() -> None:
    """gpt-oss: 64 heads of 64 in 16 bits, 4,096 tokens."""
    e, (window, _) = of_4096_tokens("openai/gpt-oss-20b")
    own = dataclasses.replace(window, mixer=dataclasses.replace(window.mixer, sinks=False))
    assert sink_passes(e, window, 2) == tuple(passes * 2 * 4096 * 64 * 64 for passes in SINKS)
    assert sink_passes(e, own, 2) == (0, 0)


def test_biases_of_experts_and_their_gradients_are_passes() -> None:
    """gpt-oss beside the same layers with SwiGLU and without biases of experts: four bytes of every column forward, two
    backward, and two more of the second product."""
    e, kinds = of_4096_tokens("openai/gpt-oss-20b")
    rates, kind = rates_of(e, H200), kinds[0]
    assert rates is not None and isinstance(kind.mlp, RoutedMLP)
    plain = dataclasses.replace(kind.mlp.expert, activation="silu", bias=False)
    usual = dataclasses.replace(kind, mlp=dataclasses.replace(kind.mlp, expert=plain))
    own, fused = (layer_times(e, H200, rates, one) for one in (kind, usual))
    rows, width = 4 * 4096, 2880
    assert own.forward_s - fused.forward_s == pytest.approx(rows * width * 12 / rates.memory, rel=1e-6)
    more = own.backward_s - fused.backward_s
    assert more == pytest.approx(rows * width * 8 / rates.memory, rel=2e-2)  # and bytes of the biases themselves


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
