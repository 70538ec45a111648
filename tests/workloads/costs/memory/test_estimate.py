from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any, get_args

import pytest

from tests.sampling import sampled
from tests.workloads.costs.shapes import (
    DEEPSEEK_V3,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL,
    QWEN3_14B,
    study_experiment,
    study_rows,
)
from workloads.costs.memory.activations import head_bytes
from workloads.costs.memory.estimate import estimate_memory, moments_held, peak_stage
from workloads.costs.memory.kind_sizes import kind_bytes
from workloads.costs.memory.kind_tensors import Sizes, kind_tensors
from workloads.costs.memory.sizes import accumulates_unsharded
from workloads.costs.shape.params import num_params
from workloads.costs.shape.schedule import SPLIT_BACKWARD, held, schedule_actions
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PipelineSchedule
from workloads.spec.model_layers import layers_of

GIB = 2**30
OPERATIONS = ("norm", "rope", "swiglu")


def experiment(**fields: object) -> Experiment:
    return Experiment.canonical(**{"model": LLAMA_8B, "seq_len": 4096, "global_batch_size": 8, **fields})


def tensors(e: Experiment) -> dict[str, int]:
    """Bytes by name of what the first layer saves."""
    return {one.name: one.bytes for one in kind_tensors(layers_of(e.model).kinds[0], Sizes.of(e, 2)).all()}


def saved(e: Experiment) -> int:
    return kind_bytes(e, layers_of(e.model).kinds[0], 2, recomputed=True).saved


def test_layer_tensors_by_hand() -> None:
    # 8B, one sequence of 4096, bf16. In multiples of T h = 4096 x 4096 elements = 32 MiB:
    # input 1, norms 1 each, qkv (32 + 16) / 32 = 1.5, rotated (32 + 8) / 32 = 1.25, attention 1, residual 1,
    # gate_up 2 x 3.5, product 3.5: 18.25, and statistics.
    t = tensors(experiment())
    unit = 32 * 2**20
    assert t["input"] == t["residual"] == t["attention output"] == t["mixer: norm"] == unit
    assert t["projected"] == 1.5 * unit
    assert t["rotated"] == 1.25 * unit
    assert t["gate and up"] == 2 * t["product"] == 7 * unit
    statistics = 2 * 4 * 4096 + 4 * 4096 * 32
    assert sum(t.values()) == 18.25 * unit + statistics


def test_tensor_and_sequence_parallel_divide_activations() -> None:
    one = saved(experiment())
    assert saved(experiment(tp=8)) * 8 == one
    without = saved(experiment(tp=8, sequence_parallel=False))
    stream = 4 * 32 * 2**20 + 2 * 4 * 4096  # input, residual, two normed copies and their statistics stay whole
    assert without == (one - stream) // 8 + stream


def test_recompute_keeps_less() -> None:
    none, selective, full = (saved(experiment(recompute=recompute)) for recompute in ("none", "selective", "full"))
    assert full == 32 * 2**20, "the block input alone"
    assert 0.6 < selective / none < 0.8
    spared = {kind: none - saved(experiment(recompute=kind)) for kind in OPERATIONS}
    assert sum(spared.values()) == none - selective
    assert none - saved(experiment(recompute="norm+rope")) == (spared["norm"] + spared["rope"])


@pytest.mark.parametrize("kind", ["full", "selective", "swiglu"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_stage_without_recomputed_layers_is_as_without_recomputation(kind: str, zero: int) -> None:
    """32 layers on four stages of 8, of which only layers 0 and 16 are recomputed."""
    layout = {"pp": 4, "pp_split": "even", "dp": 2, "zero_stage": zero, "global_batch_size": 32}
    none = estimate_memory(experiment(**layout)).stages
    some = estimate_memory(experiment(recompute=kind, recompute_every=16, **layout)).stages
    every = estimate_memory(experiment(recompute=kind, **layout)).stages
    assert (some[1], some[3]) == (none[1], none[3])
    for stage in (0, 2):
        assert every[stage].peak_bytes < some[stage].peak_bytes < none[stage].peak_bytes


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_fewer_recomputed_layers_hold_more(kind: str) -> None:
    peaks = [
        estimate_memory(experiment(recompute=kind, recompute_every=every, dp=8, zero_stage=2)).peak_bytes
        for every in (1, 2, 4, 8, 16, 32)
    ]
    assert peaks == sorted(peaks)
    assert len(set(peaks)) == len(peaks)
    assert peaks[-1] < estimate_memory(experiment(dp=8, zero_stage=2)).peak_bytes


def test_math_attention_keeps_the_scores() -> None:
    flash = saved(experiment())
    math = saved(experiment(attention="math"))
    assert math - flash == 4096 * 4096 * 32 * 2 - 4096 * 32 * 4


def test_head_never_holds_all_logits() -> None:
    shapes = (experiment(micro_batch_size=batch, global_batch_size=batch) for batch in (1, 8))
    short, long = (head_bytes(shape, 2).working for shape in shapes)
    logits = 8 * 4096 * 128256 * 2
    assert long - short < logits / 4
    gpipe, other = (
        head_bytes(experiment(pp=2, pp_schedule=schedule, gradient_accumulation_fusion=False), 2).saved
        for schedule in ("gpipe", "1f1b")
    )
    assert gpipe < other / 10


@pytest.mark.parametrize(
    ("zero_stage", "microbatches", "parameters", "optimizer"),
    # Bytes a parameter with 8 shards: ZeRO 0 has 4 master + 2 gathered and 8 moments; 1 and 2 shard all but the copy.
    [(0, 4, 6, 8), (1, 4, 4 / 8 + 2, 1), (2, 4, 4 / 8 + 2, 1)],
)
def test_zero_stages(zero_stage: int, microbatches: int, parameters: float, optimizer: float) -> None:
    e = experiment(dp=8, zero_stage=zero_stage, global_batch_size=8 * microbatches, micro_batch_size=1)
    memory = estimate_memory(e).stages[0]
    n = num_params(LLAMA_8B)
    head = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    # The head may be resharded already at the highest moment.
    assert parameters - 2 * head / n <= memory.parameters_bytes / n <= parameters + 0.001
    assert memory.optimizer_bytes / n == pytest.approx(optimizer, rel=0.001)


def test_accumulation_is_unsharded_below_zero_2() -> None:
    one, several = (experiment(dp=8, zero_stage=1, global_batch_size=gbs) for gbs in (8, 16))
    assert not accumulates_unsharded(one)
    assert accumulates_unsharded(several)
    assert not accumulates_unsharded(several.replace(zero_stage=2))
    assert estimate_memory(several).stages[0].gradients_bytes == 4 * num_params(LLAMA_8B)


def test_each_zero_stage_needs_no_more_than_the_one_before() -> None:
    for batch in (1, 4):
        peaks = [
            estimate_memory(experiment(dp=8, zero_stage=z, micro_batch_size=batch, global_batch_size=64)).peak_bytes
            for z in (0, 1, 2, 3)
        ]
        assert peaks == sorted(peaks, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", sampled([s for s in get_args(PipelineSchedule) if s != "none"], 2, seconds=4))
def test_more_sequences_need_no_less_and_more_sharding_or_recomputation_no_more(schedule: str) -> None:
    """Over models, layouts and batches. Where a backward is split, a recomputed layer is held until its second half, so
    that full recomputation may need more than selective. Three thousandths are left for buffers at moments that only
    one of two choices has: ZeRO 3 gathers in full recomputation, and the layer that runs is computed again. With split
    backwards ZeRO 2 also keeps the flat copy of one reduction until the next, which with few micro-batches is more than
    it saves (in the traced engine 3.7 % of a small model with one, 1.2 % with two): six hundredths."""
    spare = 1.06 if schedule in SPLIT_BACKWARD else 1.003

    def fall(peaks: list[int]) -> bool:
        return all(after <= spare * before for before, after in itertools.pairwise(peaks))

    shapes = [(1, 2, 1), (2, 2, 2), (1, 4, 1), (4, 2, 1), *([(1, 1, 1), (2, 1, 2)] if schedule == "1f1b" else [])]
    stages = {"virtual_stages": 2} if schedule.startswith("interleaved") else {}

    def peak(batch: int, zero: int, recompute: str, **fixed: Any) -> int:
        rounds = fixed.pop("rounds")
        return peak_stage(
            Experiment.canonical(
                dp=4,
                seq_len=4096,
                pp_schedule=schedule,
                micro_batch_size=batch,
                global_batch_size=4 * batch * rounds,
                zero_stage=zero,
                recompute=recompute,
                **fixed,
                **stages,
            )
        ).peak_bytes

    for model, (tp, pp, cp), rounds in itertools.product((LLAMA_1B, LLAMA_8B, MIXTRAL), shapes, (1, 2, 8)):
        fixed = {"model": model, "tp": tp, "pp": pp, "cp": cp, "rounds": rounds}
        for zero, recompute in itertools.product(range(4), ("none", "selective", "full")):
            grown = [peak(batch, zero, recompute, **fixed) for batch in (1, 2, 4, 8)]
            assert grown == sorted(grown), (fixed, zero, recompute)
        for recompute in ("none", "selective", "full"):
            sharded = [peak(1, zero, recompute, **fixed) for zero in range(4)]
            assert fall(sharded), (fixed, recompute, sharded)
        for zero in range(4):
            again = [peak(1, zero, recompute, **fixed) for recompute in ("none", "selective", "full")]
            assert schedule in SPLIT_BACKWARD or fall(again), (fixed, zero, again)


def test_hsdp_shards_over_the_inner_axis_only() -> None:
    fields = {"model": LLAMA_8B, "global_batch_size": 16, "zero_stage": 3, "dp_shard": 4}
    alone, replicated = (estimate_memory(Experiment(**fields, dp_replicate=r)) for r in (1, 2))  # type: ignore[arg-type]
    assert alone.stages[0].optimizer_bytes == replicated.stages[0].optimizer_bytes


def test_fp32_has_no_second_dtype() -> None:
    e = experiment(precision="fp32", global_batch_size=1)
    memory = estimate_memory(e).stages[0]
    n = num_params(LLAMA_8B)
    assert memory.parameters_bytes <= 8 * n
    assert memory.optimizer_bytes == 8 * n
    fp64 = estimate_memory(e.replace(precision="fp64")).stages[0]
    assert fp64.optimizer_bytes == 16 * n


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in get_args(PipelineSchedule) if name != "none"])
def test_the_highest_stage_alone_is_what_all_stages_say(name: str) -> None:
    draw = random.Random(name)
    for _ in range(60):
        pp, chunks = draw.choice([2, 3, 4, 8]), draw.choice([2, 3]) if name.startswith("interleaved") else 1
        zero, m = draw.choice([0, 1, 2, 3]), draw.choice([1, 2, pp - 1, pp, pp + 1, 2 * pp, 24])
        e = experiment(
            model=dataclasses.replace(draw.choice([LLAMA_1B, LLAMA_8B, MIXTRAL]), num_layers=draw.randint(24, 34)),
            pp=pp,
            pp_schedule=name,
            virtual_stages=chunks,
            pp_split=draw.choice(["even", "balanced"]),
            dp=2,
            zero_stage=zero,
            recompute=draw.choice(["none", "selective", "full"]),
            micro_batch_size=2,
            global_batch_size=4 * m,
        )
        everything = estimate_memory(e)
        assert peak_stage(e) == everything.stages[everything.peak_stage], e


def test_first_pipeline_stage_holds_most_microbatches() -> None:
    e = experiment(model=LLAMA_70B, pp=8, tp=8, global_batch_size=64)
    estimate = estimate_memory(e)
    assert len(estimate.stages) == 8
    assert [stage.stage for stage in estimate.stages] == list(range(8))
    assert estimate.peak_stage == 0
    middle = [stage.activations_bytes for stage in estimate.stages[1:-1]]
    assert middle == sorted(middle, reverse=True)
    assert estimate.peak_bytes == estimate.stages[0].peak_bytes


def test_gpipe_holds_all_microbatches() -> None:
    one_f_one_b = experiment(pp=4, global_batch_size=32, micro_batch_size=1)
    gpipe = one_f_one_b.replace(pp_schedule="gpipe")
    assert moments_held(gpipe, 0) == ((32, 0),)
    assert (
        estimate_memory(gpipe).stages[0].activations_bytes
        > 6 * estimate_memory(one_f_one_b).stages[0].activations_bytes
    )


@pytest.mark.parametrize(
    ("schedule", "most"),
    [("interleaved_1f1b", [5.5, 4.5, 3.5, 2.5]), ("zero_bubble_v", [4] * 4), ("dualpipe_v", [4.5] * 4)],
)
def test_microbatches_held_by_schedules_with_chunks(schedule: str, most: list[float]) -> None:
    e = experiment(pp=4, pp_schedule=schedule, virtual_stages=2, global_batch_size=32)
    assert [max(moments_held(e, rank))[0] for rank in range(4)] == most
    assert estimate_memory(e).peak_bytes > 0


@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v"]
)
@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("rest", [0, 1])
def test_long_schedules_hold_no_more_than_short_ones(schedule: str, pp: int, rest: int) -> None:
    chunks = 1 if schedule == "1f1b" else 2
    e = experiment(pp=pp, pp_schedule=schedule, virtual_stages=chunks, global_batch_size=16 * pp + rest)
    for rank in range(pp):
        whole = held(schedule_actions(schedule, rank, pp, e.num_microbatches, chunks))
        found = {(sum(one.activations) / chunks, sum(one.for_weights) / chunks) for one in whole}
        assert set(moments_held(e, rank)) == found


def test_experts_are_sharded_over_the_ranks_that_share_them() -> None:
    base = Experiment(model=MIXTRAL, dp_shard=8, zero_stage=1, global_batch_size=8)
    together, spread = (estimate_memory(base.replace(ep=ep)).stages[0] for ep in (1, 8))
    assert together.optimizer_bytes == spread.optimizer_bytes, "one copy of the optimizer state over 8 ranks, both ways"
    assert spread.parameters_bytes < together.parameters_bytes / 3


def test_latent_attention_and_all_axes() -> None:
    e = Experiment(
        model=DEEPSEEK_V3, dp_shard=16, zero_stage=1, pp=16, ep=16, cp=2, pp_schedule="1f1b", global_batch_size=256
    )
    peak = estimate_memory(e).peak_bytes
    assert 20 * GIB < peak < 400 * GIB


def test_smaller_pieces_need_less() -> None:
    base = experiment(micro_batch_size=4, global_batch_size=64)
    peak = estimate_memory(base).peak_bytes
    for change in ({"tp": 2}, {"tp": 8}, {"micro_batch_size": 2}, {"seq_len": 2048}, {"recompute": "selective"}):
        assert estimate_memory(base.replace(**change)).peak_bytes < peak, change
    assert estimate_memory(base.replace(pp=4, pp_schedule="1f1b")).peak_bytes < peak


def test_tied_embeddings_of_a_split_model_are_held_twice() -> None:
    first, last = estimate_memory(experiment(model=LLAMA_1B, pp=2)).stages
    both = first.optimizer_bytes + last.optimizer_bytes
    assert both == 8 * (num_params(LLAMA_1B) + 128256 * 2048)


LIMIT_BYTES = 75 * GIB
"""What training can have of the study's 80 GB devices. The largest estimate of a run that succeeded there is 65 GiB.

The study's engine is not ours: it keeps whole logits in fp32, saves more tensors a layer and always accumulates in
fp32, so what it reserved is more than we estimate to be allocated (1.5 times at the median) in all but two successes,
which are recorded at 94 % and at half of the estimate. Where even our leaner engine would not fit, its engine did not.
The margin of 10 GiB (75 against 65) is there for rows like those two.
"""


@pytest.mark.slow(seconds=3)
def test_drops_most_of_the_studys_ooms_and_no_success() -> None:
    dropped = {"Success": 0, "OOM": 0, "Other": 0}
    highest_success = 0
    for row in study_rows():
        if not row["batch_accum"] or int(row["num_heads"]) % int(row["tp"]) or int(row["pp"]) > int(row["num_layers"]):
            continue
        peak = estimate_memory(study_experiment(row)).peak_bytes
        dropped[row["status"]] += peak > LIMIT_BYTES
        if row["status"] == "Success":
            highest_success = max(highest_success, peak)
    assert dropped["Success"] == 0
    assert dropped["OOM"] >= 1600  # of 1,917
    assert LIMIT_BYTES - 11 * GIB < highest_success < LIMIT_BYTES - 9 * GIB, "the margin stated above"


def test_norms_of_queries_and_keys_keep_one_number_a_head() -> None:
    # Qwen3-14B: 40 query and 8 key heads, over tp 4; 4,096 tokens. The normed heads are not kept: rotation needs none.
    models = [dataclasses.replace(QWEN3_14B, qk_norm=qk_norm) for qk_norm in (False, True)]
    plain, normed = (tensors(experiment(model=model, tp=4)) for model in models)
    statistics = normed.pop("norm of heads: statistics")
    assert statistics == 4 * 4096 * (40 + 8) / 4 and normed == plain
    kept = {
        recompute: [saved(experiment(model=model, recompute=recompute)) for model in models]
        for recompute in ("none", "selective", "full")
    }
    more = {recompute: with_norm - without for recompute, (without, with_norm) in kept.items()}
    assert more == {"none": 4 * 4096 * 48, "selective": 4 * 4096 * 48, "full": 0}
