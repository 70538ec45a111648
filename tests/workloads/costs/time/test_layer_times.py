"""Times of kinds: less for kinds that compute and send less."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from tests.workloads.costs.published import published
from tests.workloads.costs.shapes import H200, LLAMA_8B
from workloads.costs.memory.kind_tensors import Sizes, kind_tensors
from workloads.costs.time.attention_rates import (
    FLEX_FORWARD_64,
    SINKS,
    WHOLE_64,
    kernel_relative,
    sink_passes,
)
from workloads.costs.time.layer_times import layer_times, rates_of
from workloads.costs.time.rank_times import LayerTimes
from workloads.costs.time.recurrent_operations import torch_passes
from workloads.costs.time.recurrent_times import kernel_passes, slowed
from workloads.costs.time.step_times import StepTimes
from workloads.costs.time.timeline import estimate_time
from workloads.spec.documents.lengths import packed
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


OF_DOCUMENTS = {
    (64, 16384): ("flex 144.2 124.2 211.9 98.8", "flash 190.8 164.1 238.7 125.8"),
    (128, 16384): ("flex 241.7 212.8 320.1 172.8", "flash 229.7 206.2 276.4 163.4"),
    (64, 4096): ("flex 67.1 94.8 142.6 55.7", "flash 105.2 144.9 185.5 75.5"),
    (128, 4096): ("flex 120.7 170.5 220.6 100.8", "flash 135.0 175.7 217.4 99.3"),
}
"""TFLOP/s of attention to the documents of one sequence, forward and backward, on one H200 (docs/lab/
measurements_0.3.0.md), by head size and tokens of a sequence: of the first three of mean 1,500, and the first of mean
512."""


def attention_tflops(e: Experiment) -> float:
    rates = rates_of(e, H200)
    assert rates is not None
    return rates.attention / 1e12 * kernel_relative(e, layers_of(e.model).kinds[0])


def with_heads(size: int, **fields: Any) -> Experiment:
    """Llama 8B, whose 32 heads have 128, or the same number of heads of 64."""
    model = dataclasses.replace(LLAMA_8B, name=f"heads of {size}", head_dim=size)
    return Experiment.canonical(model=model, **fields)


@pytest.mark.parametrize(("size", "tokens"), OF_DOCUMENTS)
def test_kernels_of_documents_are_as_fast_as_measured(size: int, tokens: int, tmp_path: Path) -> None:
    for line in OF_DOCUMENTS[size, tokens]:
        kernel, *measured = line.split()
        found = []
        for mean, which in ((1500, 0), (1500, 1), (1500, 2), (512, 0)):
            lengths = packed(f"lognormal mean={mean} sigma=1.2 seed=7", tokens, which + 1)[which]
            path = tmp_path / f"{mean} {which}"
            path.write_text("\n".join(map(str, lengths)))
            documents = {"kind": "file", "path": str(path)}
            attention = "auto" if kernel == "flex" else kernel
            e = with_heads(size, global_batch_size=1, seq_len=tokens, documents=documents, attention=attention)
            found.append(attention_tflops(e))
        assert found == pytest.approx([float(one) for one in measured], rel=0.1), kernel


@pytest.mark.parametrize(
    ("size", "tokens", "batch", "measured"),
    [
        *((64, 2048, 4, 318.1), (64, 4096, 1, 346.9), (64, 4096, 4, 390.0), (64, 16384, 1, 455.1)),
        *((128, 2048, 4, 425.4), (128, 4096, 1, 466.6), (128, 4096, 4, 512.6), (128, 16384, 1, 536.2)),
    ],
)
def test_whole_sequences_are_as_fast_as_measured(size: int, tokens: int, batch: int, measured: float) -> None:
    e = with_heads(size, global_batch_size=batch, micro_batch_size=batch, seq_len=tokens)
    assert attention_tflops(e) == pytest.approx(measured, rel=0.1)


def test_documents_shorten_a_step_as_measured() -> None:
    """Llama 1B on one H200, 2 x 16,384 tokens: 0.7083 s with whole sequences, 0.5236 s with documents
    (results/recorded/h200x1_packed/NOTE.md)."""
    documents = {"kind": "lognormal", "mean": 1500, "sigma": 1.2, "seed": 7}
    model = ConfFolders().model("llama1b")
    e, within = (
        Experiment.canonical(model=model, global_batch_size=2, seq_len=16384, documents=one)
        for one in (None, documents)
    )
    seconds = StepTimes(H200).seconds([e, within])
    assert seconds[1] / seconds[0] == pytest.approx(0.5236 / 0.7083, rel=0.03)


def test_small_heads_have_a_longer_forward_in_flexattention() -> None:
    """And the same time of both passes, so that only what is computed again is longer."""

    def forward_of(size: int, attention: str) -> float:
        documents = {"kind": "lognormal", "mean": 1500, "sigma": 1.2, "seed": 7}
        e = with_heads(size, global_batch_size=1, seq_len=16384, documents=documents, attention=attention)
        rates, kind = rates_of(e, H200), layers_of(e.model).kinds[0]
        assert rates is not None
        own = layer_times(e, H200, rates, kind)
        products = e.seq_len * kind.mixing(e.slowest_length).trained / attention_tflops(e) / 1e12
        none = layer_times(e, H200, rates._replace(attention=1e30), kind)
        assert own.forward_s + own.backward_s - none.forward_s - none.backward_s == pytest.approx(
            3.5 * products, rel=1e-3
        )
        return (own.forward_s - none.forward_s) / products

    assert forward_of(64, "auto") == pytest.approx(FLEX_FORWARD_64, rel=1e-3)
    for size, attention in ((128, "auto"), (64, "flash")):
        assert forward_of(size, attention) == pytest.approx(1.0, rel=1e-3)


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
    """TFLOP/s, forward and backward, on H200."""
    e, kinds = of_4096_tokens(name, tokens)
    rates = rates_of(e, H200)
    assert rates is not None
    tflops = rates.attention / 1e12 * kernel_relative(e, kinds[kind])
    assert tflops == pytest.approx(measured, rel=0.07)


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    e, (window, full) = of_4096_tokens("openai/gpt-oss-20b")
    short = e.replace(seq_len=128)
    assert kernel_relative(short, window) == kernel_relative(short, full) == WHOLE_64.at(128)


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
    batch = Batch(1, e.seq_len)
    passes, in_torch = (
        kernel_passes(kind.mixer, batch, tp),
        torch_passes(kind.mixer, batch, tp, rates.memory, captured=True),
    )
    moved = sum(one.moved for one in kind_tensors(kind, Sizes.of(e, 2)).mixer)
    scan = e.seq_len * kind.mixer.kernel_flops() / tp / rates.attention
    slow = slowed(passes, kind.mixer, e.engine_version)
    assert slow.forward > passes.forward and slow.backward > passes.backward
    forward, backward = (slow.forward - moved) / rates.memory, (slow.backward - 2 * moved) / rates.memory + scan
    assert with_kernels.forward_s - (usual.forward_s - in_torch.forward_s) == pytest.approx(forward, rel=1e-6)
    assert with_kernels.backward_s - (usual.backward_s - in_torch.backward_s) == pytest.approx(backward, rel=1e-6)
    assert with_kernels.forward_s + with_kernels.backward_s < 0.5 * (usual.forward_s + usual.backward_s)


def test_mamba_took_longer_in_torch_operations() -> None:
    """3.19 ms of a layer's kernels and 8,192 tokens instead of 4.19 on one H200."""
    mixer = layers_of(published("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")).kinds[0].mixer
    assert isinstance(mixer, Mamba2)
    passes = kernel_passes(mixer, Batch(2, 4096), 1)
    now, before = (sum(slowed(passes, mixer, version)) for version in ("7", "6"))
    assert now / before == pytest.approx(3.19 / 4.19, rel=0.05)


def test_ranks_divide_the_bytes_of_kernels() -> None:
    for name in ("Qwen/Qwen3.5-27B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "moonshotai/Kimi-K3"):
        mixers = [kind.mixer for kind in layers_of(published(name)).kinds]
        mixer = next(one for one in mixers if isinstance(one, GatedDeltaRule | KimiDelta | Mamba2))
        whole, half = (kernel_passes(mixer, Batch(2, 4096), tp) for tp in (1, 2))
        assert whole == (2 * half.forward, 2 * half.backward) and whole.backward > 2 * whole.forward


def test_ranks_of_context_divide_the_work_and_copy_what_they_send() -> None:
    name, longer = "Qwen/Qwen3.5-27B", {"seq_len": 16384, "recurrence": "fla"}
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
