"""The shipped YAML: shapes against published parameter counts, clusters against driver names, grids against a plan."""

from __future__ import annotations

import dataclasses

import pytest

from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import compose_sweep
from sweep.composing.machine import clusters_of_device
from sweep.grids.expand import expand_all
from sweep.planning.auto_recompute import with_choices
from sweep.planning.plan import make_plan
from tests.sampling import sampled
from tests.sweep.helpers import check_points_to_run
from workloads.costs.shape.params import num_params
from workloads.rules.engine_support import refused
from workloads.spec.engine_versions import ENGINES
from workloads.spec.experiment import Experiment
from workloads.spec.recurrent_kernels import has_recurrences

FOLDERS = ConfFolders()

PARAMETERS = {
    # the study's table of models: G parameters to three decimals
    "llama1.34b": 1.342e9,
    "llama3.57b": 3.574e9,
    "llama8.86b": 8.859e9,
    "llama80b": 79.995e9,
    "llama469b": 469e9,
    # safetensors totals on Hugging Face
    "llama1b": 1_235_814_400,
    "llama3b": 3_212_749_824,
    "llama8b": 8_030_261_248,
    "llama70b": 70_553_706_496,
    "llama405b": 405_853_388_800,
    "smollm1.7b": 1_711_376_384,
    "smollm3_3b": 3_075_098_624,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_419_200,
    # by hand: 2*1024*128 + 4*(2*128*128 + 2*128*64 + 3*128*384 + 2*128) + 128
    "tiny": 1_049_728,
    # llama8b without 24 layers of 2*4096*4096 + 2*4096*1024 + 3*4096*14336 + 2*4096
    "llama8b_8_layers": 8_030_261_248 - 24 * 218_112_000,
    # 2*256*256 + 4*(2*256*256 + 2*256*128 + 3*256*768 + 2*256) + 256, and with 8*(3*256*384 + 256) for 3*256*768
    "tiny_moe": 256 * 64
    + (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64)
    + 64
    + 2 * (64 * 64 * 2 + 2 * 64 * 32 + 9 * 3 * 64 * 64 + 8 * 64 + 2 * 64),
    # vocabulary twice, attention (with norms of heads), router and experts of each layer, and norms
    "qwen3_30b_a3b_8_layers": 2 * 151936 * 2048
    + 2048
    + 8 * (2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128 + 2 * 128 + 128 * (2048 + 3 * 2048 * 768) + 2 * 2048),
    "mixtral_8x7b_5_layers": 2 * 32000 * 4096
    + 4096
    + 5 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * (4096 + 3 * 4096 * 14336) + 2 * 4096),
    "deepseek_v2_lite_10_layers": 2 * 102400 * 2048
    + 2048
    + 10 * (2048 * 16 * 192 + 2048 * 576 + 512 + 512 * 16 * 256 + 16 * 128 * 2048 + 2 * 2048)
    + 3 * 2048 * 10944
    + 9 * (64 * 2048 + 66 * 3 * 2048 * 1408),
    "bytes": 3_279_104,
    "bytes_moe": 10_365_184,
    "bytes_moe_bias": 10_365_184,
    "gpt_oss_20b": 20_914_757_184,
    "gemma_4_26b_a4b": 25_233_141_760,
    "gpt_oss_120b": 116.83e9,
    "kimi_k2": 1.026e12,
    # the whole models without 16 and 24 of their layers: attention with its biases and sinks, or norms of heads;
    # router, experts and norms. Of Gemma's 24 four have full attention
    "gpt_oss_20b_8_layers": 20_914_757_184
    - 16 * (2 * 2880 * 64 * 64 + 2 * 2880 * 8 * 64 + 80 * 64 + 2880 + 64 + 2 * 2880)
    - 16 * 32 * (2880 + 1 + 3 * 2880 * 2880 + 3 * 2880),
    "gemma_4_26b_a4b_6_layers": 25_233_141_760
    - 20 * (2816 * 32 * 256 + 16 * 256 * 2816 + 2 * 256)
    - 4 * (2816 * 18 * 512 + 16 * 512 * 2816 + 2 * 512)
    - 24 * (128 * (2816 + 3 * 2816 * 704) + 3 * 2816 * 2112 + 7 * 2816 + 2816 + 128),
    # vocabulary twice, final norm, attention, routers, 16 experts and a shared one, norms
    "llama4_scout_4_layers": 2 * 202048 * 5120
    + 5120
    + 4 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 16 * 5120 + 17 * 3 * 5120 * 8192 + 2 * 5120),
    # the same: neither's attention has norms with weights
    "llama4_plain_4_layers": 2 * 202048 * 5120
    + 5120
    + 4 * (2 * 5120 * 5120 + 2 * 5120 * 1024 + 16 * 5120 + 17 * 3 * 5120 * 8192 + 2 * 5120),
    # vocabulary twice, final norm, attention with norms of heads, a dense MLP, three with 128 experts and two shared
    "dots_llm1_4_layers": 2 * 152064 * 4096
    + 4096
    + 4 * (4 * 4096 * 4096 + 2 * 128 + 2 * 4096)
    + 3 * 4096 * 10944
    + 3 * (128 * 4096 + 130 * 3 * 4096 * 1408),
    # the same with two of experts
    "dots_llm1_3_layers": 2 * 152064 * 4096
    + 4096
    + 3 * (4 * 4096 * 4096 + 2 * 128 + 2 * 4096)
    + 3 * 4096 * 10944
    + 2 * (128 * 4096 + 130 * 3 * 4096 * 1408),
    # the same with norms over all heads, and 256 experts in both layers
    "minimax_m2.5_2_layers": 2 * 200064 * 3072
    + 3072
    + 2 * (2 * 3072 * 6144 + 2 * 3072 * 1024 + 6144 + 1024 + 256 * (3072 + 3 * 3072 * 1536) + 2 * 3072),
    # eight MLPs with 256 experts, a shared one and its gate; six delta rules with convolution, decays and norm;
    # attention with a gate as large as its queries
    "qwen3_5_35b_a3b_8_layers": 2 * 248320 * 2048
    + 2048
    + 8 * (256 * (2048 + 3 * 2048 * 512) + 3 * 2048 * 512 + 2048 + 2 * 2048)
    + 6 * (2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4 * (2 * 2048 + 4096) + 2 * 32 + 128 + 4096 * 2048)
    + 2 * (2048 * (2 * 16 + 2 * 2) * 256 + 16 * 256 * 2048 + 2 * 256),
    # norms, a dense MLP, three of 256 experts with a shared one; three KDA with convolution, low-rank decays and gates,
    # rates and norm; latent attention
    "kimi_linear_4_layers": 2 * 163840 * 2304
    + 2304
    + 8 * 2304
    + 3 * 2304 * 9216
    + 3 * (257 * 3 * 2304 * 1024 + 256 * 2304)
    + 3 * (4 * 2304 * 4096 + 2 * (2304 + 4096) * 128 + 2304 * 32 + 3 * 4096 * 4 + 4096 + 32 + 128)
    + (2304 * 32 * 192 + 2304 * 576 + 512 + 512 * 32 * 256 + 32 * 128 * 2304),
    # six Mamba-2 with convolution and its bias, decays, skips, biases of steps and norm; six MLPs; two of attention
    "nemotron_3_nano_14_layers": 2 * 131072 * 2688
    + 2688
    + 6 * (2688 * (2 * 4096 + 2048 + 64) + 5 * (4096 + 2048) + 3 * 64 + 4096 + 4096 * 2688 + 2688)
    + 6 * (128 * (2688 + 2 * 2688 * 1856) + 2 * 2688 * 3712 + 2688)
    + 2 * (2688 * (32 + 2 * 2) * 128 + 32 * 128 * 2688 + 2688),
    # the same with three Mamba-2, three MLPs and one attention
    "nemotron_3_nano_7_layers": 2 * 131072 * 2688
    + 2688
    + 3 * (2688 * (2 * 4096 + 2048 + 64) + 5 * (4096 + 2048) + 3 * 64 + 4096 + 4096 * 2688 + 2688)
    + 3 * (128 * (2688 + 2 * 2688 * 1856) + 2 * 2688 * 3712 + 2688)
    + (2688 * (32 + 2 * 2) * 128 + 32 * 128 * 2688 + 2688),
    # four dense MLPs and pairs of norms; three delta rules as above; attention
    "qwen_dense": 2 * 4096 * 2048
    + 2048
    + 4 * (3 * 2048 * 4096 + 2 * 2048)
    + 3 * (2048 * (2 * 2048 + 2 * 4096 + 2 * 32) + 4 * (2 * 2048 + 4096) + 2 * 32 + 128 + 4096 * 2048)
    + (16 + 2 * 2) * 128 * 2048
    + 16 * 128 * 2048,
    # the same with three Mamba-2 as above
    "nemotron_dense": 2 * 4096 * 2688
    + 2688
    + 4 * (3 * 2688 * 4096 + 2 * 2688)
    + 3 * (2688 * (2 * 4096 + 2048 + 64) + 5 * (4096 + 2048) + 3 * 64 + 4096 + 4096 * 2688)
    + (16 + 2 * 2) * 128 * 2688
    + 16 * 128 * 2688,
}
DRIVER_NAMES = [
    "NVIDIA H200",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA B200",
    "NVIDIA GB200",
    "NVIDIA GH200 480GB",
    "NVIDIA GH200 120GB",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA H20",
    "NVIDIA H800",
    "NVIDIA A800-SXM4-80GB",
    "NVIDIA L40S",
    "AMD Instinct MI300X",
    "AMD Instinct MI300X OAM",
    "AMD Instinct MI325 OAM",
    "AMD Instinct MI355X",
]


def test_every_model_is_checked() -> None:
    assert sorted(PARAMETERS) == FOLDERS.names("model")


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_models_have_their_published_size(name: str) -> None:
    model = FOLDERS.model(name)
    assert model.name == name
    tolerance = 0 if isinstance(PARAMETERS[name], int) else 0.01 if name == "llama469b" else 5e-4
    # Beyond parameters, DeepSeek-V3's total has the routing biases of its 58 routed layers (256 each).
    extra = 58 * 256 if name == "deepseek_v3" else 0
    assert num_params(model) + extra == pytest.approx(PARAMETERS[name], rel=tolerance, abs=0)


@pytest.mark.parametrize("driver_name", DRIVER_NAMES)
def test_a_driver_name_belongs_to_one_device(driver_name: str) -> None:
    devices = [name for name in FOLDERS.names("device") if driver_name in FOLDERS.read("device", name)["driver_names"]]
    assert len(devices) == 1
    assert clusters_of_device(FOLDERS, driver_name)


def test_no_driver_name_is_given_twice() -> None:
    names = [name for device in FOLDERS.names("device") for name in FOLDERS.read("device", device)["driver_names"]]
    assert len(names) == len(set(names))
    assert set(DRIVER_NAMES) <= set(names)


@pytest.mark.parametrize("name", FOLDERS.names("cluster"))
def test_clusters_are_complete_and_say_where_rates_come_from(name: str) -> None:
    cluster = compose_sweep(["+grid=tiny", f"cluster={name}"]).cluster
    assert cluster.name == name
    assert cluster.device.source
    assert all(tier.source for tier in cluster.tiers_by_size)
    if cluster.backend != "cpu":
        assert cluster.outside
        assert cluster.device.driver_names
        assert cluster.usable_bytes is not None
        assert 0.9 < cluster.usable_bytes / (cluster.device.memory_bytes or 0) < 1
        assert cluster.matmul_efficiency is not None
        assert 0.4 < cluster.matmul_efficiency < 0.9
        assert cluster.device.power_w is not None
        assert 300 <= cluster.device.power_w <= 1400
        assert all(tier.bandwidth < cluster.inside.bandwidth for tier in cluster.outside)
        assert "bf16" in cluster.device.peak_flops


def test_gb200_is_the_same_with_two_links_and_with_its_tiers() -> None:
    links, tiers = (compose_sweep(["+grid=tiny", f"cluster={name}"]).cluster for name in ("gb200", "gb200_nvl72"))
    assert (links.domain, tiers.domain) == (72, 72)
    without = {"name": "", "tiers": (), "intra_node": None, "inter_node": None, "linked_devices": None}
    assert dataclasses.replace(links, **without) == dataclasses.replace(tiers, **without)
    rates = [{(tier.bandwidth, tier.latency_s) for tier in one.outside} for one in (links, tiers)]
    assert rates[0] == rates[1] and links.inside.bandwidth == tiers.inside.bandwidth


def test_dense_peaks() -> None:
    peaks = {name: FOLDERS.read("device", name)["peak_flops"] for name in FOLDERS.names("device")}
    assert peaks["h100_80gb"]["bf16"] == peaks["h200"]["bf16"] == 989e12
    assert peaks["h100_80gb"]["fp8"] == peaks["h200"]["fp8"] == 1979e12
    assert peaks["a100_80gb"]["bf16"] == peaks["a100_40gb"]["bf16"] == 312e12
    assert (peaks["b200"]["bf16"], peaks["b200"]["fp8"]) == (2250e12, 4500e12)
    assert "fp8" not in peaks["a100_80gb"]
    same = ("h800", "gh200_96gb", "gh200_144gb")
    assert all(peaks[name] == peaks["h100_80gb"] for name in same) and peaks["a800_80gb"] == peaks["a100_80gb"]
    assert (peaks["h20"]["bf16"], peaks["h20"]["fp8"], peaks["l40s"]["bf16"]) == (148e12, 296e12, 362.05e12)
    assert peaks["mi300x"] == peaks["mi325x"] and peaks["mi300x"]["bf16"] == 1307.4e12
    assert (peaks["mi355x"]["bf16"], peaks["mi355x"]["fp8"]) == (2516.6e12, 5033.2e12)


PLANNED_HERE = [grid for grid in FOLDERS.names("grid") if not grid.startswith("playbook")]


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(PLANNED_HERE, 12, seconds=2))
def test_grids_have_points_to_run(name: str) -> None:
    """`tests.sweep.grids.test_playbook` checks the study's grid, whose plan takes longer."""
    config = compose_sweep([f"+grid={name}"])
    assert config.grids[0].description
    check_points_to_run(make_plan(config, expand_all(config.grids, config.models.__getitem__), "measured"))


def test_the_tiny_grid_is_a_handful_with_every_kind_of_layout() -> None:
    config = compose_sweep(["+grid=tiny"])
    experiments = [point.experiment for point in expand_all(config.grids, config.models.__getitem__).points]
    assert 10 <= len(experiments) <= 20
    assert {e.world_size for e in experiments} == {1, 2, 4}
    assert {e.zero_stage for e in experiments} == {0, 1, 2, 3}
    assert {e.recompute for e in experiments} == {"none", "full"}
    assert any(e.tp > 1 and e.pp > 1 for e in experiments)
    assert any(e.dp > 1 and e.pp > 1 for e in experiments)
    assert any(e.dp > 1 and e.tp > 1 for e in experiments)


def test_every_layout_of_the_grid_of_kinds_fits_two_gpus_in_a_short_step() -> None:
    config = compose_sweep(["+grid=kinds_2gpu"])
    plan = make_plan(config, expand_all(config.grids, config.models.__getitem__), "measured")
    assert {(point.verdict, point.rule) for point in plan.points} == {("run", None)}
    for point in plan.points:
        assert point.peak_bytes is not None and point.limit_bytes is not None and point.time is not None
        assert point.peak_bytes < point.limit_bytes
        # recurrent layers take long in torch operations
        assert point.time.step_time_s < (5 if has_recurrences(point.experiment.model) else 2)
    by_model: dict[str, list[Experiment]] = {}
    for point in plan.points:
        by_model.setdefault(point.experiment.model.name, []).append(point.experiment)
    assert len(by_model) == 5
    recurrent = {"qwen3_5_35b_a3b_8_layers", "nemotron_3_nano_14_layers"}
    for name, experiments in by_model.items():
        layouts = {(e.dp, e.tp, e.pp, e.cp, e.ep, e.zero_stage, e.virtual_stages) for e in experiments}
        assert len(layouts) == 10
        assert len(experiments) == (20 if name in recurrent else 10)
        assert {e.tokens_per_step for e in experiments} == {8 * 4096}


def test_every_peer_runs_the_layouts_of_this_engine_on_kinds_of_layers() -> None:
    config = compose_sweep(["+grid=kinds_peers_2gpu", "grid.axes.engine=[ultrasweep,torchtitan,transformers]"])
    experiments = [point.experiment for point in expand_all(config.grids, config.models.__getitem__).points]
    older = [e.replace(engine_version=ENGINES[e.engine]) for e in experiments]
    assert [reason for e in older for reason in refused(e)] == []

    def layout(e: Experiment) -> tuple[object, ...]:
        return e.model.name, e.routing, e.ep, e.zero_stage, e.micro_batch_size, e.tokens_per_step

    own = [layout(e) for e in older if e.engine == "ultrasweep"]
    assert len(own) == len(set(own)) == 8
    for peer, layouts, points in (("torchtitan", 3, 6), ("transformers", 5, 10)):
        theirs = [layout(e) for e in older if e.engine == peer]
        assert (len(set(theirs)), len(theirs)) == (layouts, points)
        assert set(theirs) <= set(own)
    kernels = {(e.engine, e.model.name[:8], e.recurrence) for e in older if e.recurrence != "torch"}
    assert len(kernels) == 4 and ("transformers", "nemotron", "mamba_ssm") in kernels


@pytest.mark.slow
@pytest.mark.parametrize(("name", "points", "longest_s"), [("mixtures_2gpu", 22, 1.0), ("settings_2gpu", 21, 3.0)])
def test_grids_to_check_predictions_fit_two_gpus_and_keep_them_busy(name: str, points: int, longest_s: float) -> None:
    config = compose_sweep([f"+grid={name}"])
    expansion = with_choices(expand_all(config.grids, config.models.__getitem__), config.cluster)
    plan = make_plan(config, expansion, "measured")
    assert {(point.verdict, point.rule) for point in plan.points} == {("run", None)}
    assert len(plan.points) == points
    device_bytes = max(point.limit_bytes or 0 for point in plan.points)
    for point in plan.points:
        assert point.peak_bytes is not None and point.time is not None
        assert point.peak_bytes < 0.85 * device_bytes
        assert point.time.step_time_s < longest_s
        assert point.experiment.tokens_per_step >= 16_384 * point.experiment.dp * point.experiment.cp


def test_sizes_that_are_no_power_of_two_are_ordinary() -> None:
    config = compose_sweep(["+grid=smollm3_384gpu"])
    experiments = [point.experiment for point in expand_all(config.grids, config.models.__getitem__).points]
    assert {e.world_size for e in experiments} == {384}
    trained_with = [e for e in experiments if (e.dp, e.tp, e.pp, e.micro_batch_size) == (192, 2, 1, 3)]
    assert trained_with
    assert {e.num_microbatches for e in trained_with} == {1}


@pytest.mark.slow
def test_the_5d_grid_adds_every_axis_that_the_study_left_out() -> None:
    config = compose_sweep(["+grid=playbook_5d"])
    expansion = expand_all(config.grids, config.models.__getitem__)
    experiments = [point.experiment for point in expansion.points]
    assert len(experiments) == 20_000
    assert {e.cp for e in experiments} == {1, 2, 4, 8, 16}
    assert {e.zero_stage for e in experiments} == {0, 1, 2, 3}
    assert {e.recompute for e in experiments} == {"none", "selective", "full"}
    assert {e.precision for e in experiments} == {"bf16", "fp8_tensorwise", "fp8_rowwise"}
    assert {e.seq_len for e in experiments} == {4096, 8192, 16384, 32768}
    assert {e.world_size for e in experiments} == {8 * nodes for nodes in (1, 2, 4, 8, 16, 32, 64)}
    assert all(e.tokens_per_step == 2**20 for e in experiments)
    assert {e.model.name for e in experiments if e.ep > 1} == {"mixtral_8x7b", "qwen3_30b_a3b", "deepseek_v3"}
    assert {e.model.name for e in experiments} >= {"llama1.34b", "llama3.57b", "llama8.86b", "llama80b", "llama469b"}
