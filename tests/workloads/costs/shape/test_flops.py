from __future__ import annotations

import pytest

from tests.workloads.costs.shapes import DEEPSEEK_V3, LLAMA_8B, TINY, study_experiment, study_rows
from workloads.costs.shape.flops import flops_per_token, hardware_flops_per_token
from workloads.costs.shape.params import matmul_params, playbook_params
from workloads.spec.experiment import Experiment

H100_PEAK = 989e12


def test_llama_8b_at_8192() -> None:
    # 6 x 7.505e9 + 12 x 32 layers x 32 heads x 128 x 8192: 57.9 GFLOP a token; halved scores give 51.5.
    assert flops_per_token(LLAMA_8B, 8192, "palm") == pytest.approx(57.9e9, rel=1e-3)
    assert flops_per_token(LLAMA_8B, 8192, "causal") == pytest.approx(51.5e9, rel=1e-3)
    assert flops_per_token(LLAMA_8B, 8192, "playbook") == pytest.approx(61.1e9, rel=1e-3)


def test_attention_term_by_hand() -> None:
    attention = flops_per_token(TINY, 10, "palm") - 6 * matmul_params(TINY)
    assert attention == 12 * 4 * 2 * 4 * 10


def test_latent_attention_has_two_head_sizes() -> None:
    attention = flops_per_token(DEEPSEEK_V3, 4096, "palm") - 6 * matmul_params(DEEPSEEK_V3)
    assert attention == 6 * 61 * 128 * (192 + 128) * 4096


def test_unknown_convention() -> None:
    with pytest.raises(ValueError, match="palm, causal, playbook"):
        flops_per_token(TINY, 10, "megatron")  # type: ignore[arg-type]


def test_hardware_flops_count_recomputation() -> None:
    none = Experiment(model=LLAMA_8B, global_batch_size=1, seq_len=4096)
    model_flops = flops_per_token(LLAMA_8B, 4096, "causal")
    head = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    assert hardware_flops_per_token(none) == model_flops
    assert hardware_flops_per_token(none.replace(recompute="selective")) == model_flops
    # Full: a third of the blocks' 6 N + attention comes again; not the head, nor the down projections.
    full = none.replace(recompute="full")
    forward = (model_flops - 6 * head) / 3
    assert hardware_flops_per_token(full) - model_flops == pytest.approx(forward - 2 * 32 * 14336 * 4096)
    quarter = none.replace(recompute="full", recompute_every=4)
    again = hardware_flops_per_token(full) - model_flops
    assert hardware_flops_per_token(quarter) - model_flops == pytest.approx(again / 4)
    assert hardware_flops_per_token(quarter.replace(recompute_every=5)) - model_flops == pytest.approx(again * 7 / 32)
    gpipe = none.replace(pp=2, pp_schedule="gpipe")
    assert hardware_flops_per_token(gpipe) - model_flops == 2 * head


def test_full_recomputation_of_a_mixture_spares_the_down_projections_of_its_dense_layers() -> None:
    """The 3 dense layers of DeepSeek-V3 repeat all but theirs, the 58 layers with experts repeat everything."""
    none = Experiment(model=DEEPSEEK_V3, global_batch_size=1, seq_len=4096)
    head, model_flops = DEEPSEEK_V3.vocab_size * DEEPSEEK_V3.hidden_size, hardware_flops_per_token(none)
    again = hardware_flops_per_token(none.replace(recompute="full")) - model_flops
    assert again == pytest.approx((model_flops - 6 * head) / 3 - 2 * 3 * 18432 * 7168, rel=1e-12)


def test_experts_made_again_repeat_two_of_their_three_products() -> None:
    """Of 58 layers with experts in DeepSeek-V3, after 3 dense ones; with every second layer 31 - 2 of them."""
    for every, layers in ((1, 58), (2, 29)):
        none = Experiment(model=DEEPSEEK_V3, global_batch_size=1, seq_len=4096, recompute_every=every)
        again = hardware_flops_per_token(none.replace(recompute="experts")) - hardware_flops_per_token(none)
        assert again == pytest.approx(2 * layers * 8 * 2 * 7168 * 2048)
        both = hardware_flops_per_token(none.replace(recompute="selective+experts"))
        assert both == hardware_flops_per_token(none.replace(recompute="experts"))


def test_playbook_mfu_of_every_published_run() -> None:
    """The published MFU to 0.01 percentage points, from the published (rounded) parameter count; ours rounds to it."""
    rows = [row for row in study_rows() if row["status"] == "Success"]
    assert len(rows) == 1765
    for row in rows:
        experiment = study_experiment(row)
        model = experiment.model
        ours = playbook_params(model, experiment.pp)
        published = float(row["Total Params"].rstrip("G")) * 1e9
        # Three digits, plus the norms of several ranks that the study's engine counted more than once.
        assert ours == pytest.approx(published, rel=0.005), row["name"]
        rate = float(row["tok/s/gpu"])
        exact = flops_per_token(model, experiment.seq_len, "playbook", pp=experiment.pp)
        rounded = exact + 6 * (published - ours)
        assert 100 * rounded * rate / H100_PEAK == pytest.approx(float(row["mfu"]), abs=0.01), row["name"]
        assert 100 * exact * rate / H100_PEAK == pytest.approx(float(row["mfu"]), abs=0.06), row["name"]
